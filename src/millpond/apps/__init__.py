"""Applications: short programs that show what a pond is for, each with its own data."""
