"""Stores: what a slice holds. Batches of Arrow arrays in, Arrow arrays out; kernels do the work."""
