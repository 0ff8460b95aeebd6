"""The coordinator: placement, epochs and progress. Pure decisions, and a shell that does the I/O."""
