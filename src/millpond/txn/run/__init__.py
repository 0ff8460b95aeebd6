"""Epochs of events on their way over tables: plans, kernels, the interpreter, and outputs."""
