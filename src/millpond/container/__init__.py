"""Containers: processes that own slices and serve them. A pure core, and a shell that does the I/O."""
