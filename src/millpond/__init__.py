"""Millpond: shared, timestamped state for PySpark streams."""

from __future__ import annotations

from millpond.code.rules import (
    add,
    as_of,
    count,
    edges,
    keep_all,
    keep_latest,
    largest,
    latest,
    neighbours,
    net_edges,
    paths,
    put,
    smallest,
    total,
    ttl,
    values,
)
from millpond.errors import MillpondError, RuleInterpreted
from millpond.ops.flow import Flow, Stream
from millpond.pond import Pond, State, connect
from millpond.pond import open_pond as open  # noqa: A004 - mp.open reads as it should
from millpond.txn import abort, transaction

__version__ = "0.1.0"

__all__ = [
    "Flow",
    "MillpondError",
    "Pond",
    "RuleInterpreted",
    "State",
    "Stream",
    "abort",
    "add",
    "as_of",
    "connect",
    "count",
    "edges",
    "keep_all",
    "keep_latest",
    "largest",
    "latest",
    "neighbours",
    "net_edges",
    "open",
    "paths",
    "put",
    "smallest",
    "total",
    "transaction",
    "ttl",
    "values",
]
