"""Millpond: shared, timestamped state for PySpark streams."""

from __future__ import annotations

from millpond.errors import MillpondError
from millpond.pond import Pond, State, connect
from millpond.pond import open_pond as open  # noqa: A004 - mp.open reads as it should
from millpond.rules import count, keep_all, keep_latest, largest, latest, put, smallest, total, values

__version__ = "0.1.0"

__all__ = [
    "MillpondError",
    "Pond",
    "State",
    "connect",
    "count",
    "keep_all",
    "keep_latest",
    "largest",
    "latest",
    "open",
    "put",
    "smallest",
    "total",
    "values",
]
