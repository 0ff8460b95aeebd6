"""Kernels: compiled loops over arrays. No classes, no I/O, no Python object per row."""

from __future__ import annotations

from millpond.kernels._warm import warm_up

__all__ = ["warm_up"]
