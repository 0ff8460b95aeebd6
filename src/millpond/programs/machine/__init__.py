"""Bodies of tasks as machine code: the same results as the interpreted ones, or none, and then these are run instead."""
