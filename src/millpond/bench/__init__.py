"""Benchmarks: ratios measured in one run, against named peers, on the same work."""
