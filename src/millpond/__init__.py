"""Millpond: shared, timestamped state for PySpark streams."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    ttl,
    values,
)
from millpond.code.windows import (
    collect,
    counted,
    everything,
    fold,
    mean,
    median,
    percentile,
    session,
    sliding,
    top,
    tumbling,
    where_largest,
    windows,
)
from millpond.errors import MillpondError, RuleInterpreted
from millpond.programs.merging import Collection, average, total
from millpond.txn import abort, transaction

if TYPE_CHECKING:
    from millpond.ops.flow import Flow, Stream
    from millpond.pond import Dedup, Join, Pond, State, Window, connect
    from millpond.pond import open_pond as open  # noqa: A004 - mp.open reads as it should
    from millpond.programs.annotations import Partial, Partitioned, everywhere, program, reject
    from millpond.programs.elements import DenseMatrix, Map, Matrix, StateElement, Vector
    from millpond.programs.explain import explain
    from millpond.programs.migrating import Migration
    from millpond.programs.plain import plain

__version__ = "0.1.0"

__all__ = [
    "Collection",
    "Dedup",
    "DenseMatrix",
    "Flow",
    "Join",
    "Map",
    "Matrix",
    "Migration",
    "MillpondError",
    "Partial",
    "Partitioned",
    "Pond",
    "RuleInterpreted",
    "State",
    "StateElement",
    "Stream",
    "Vector",
    "Window",
    "abort",
    "add",
    "as_of",
    "average",
    "collect",
    "connect",
    "count",
    "counted",
    "edges",
    "everything",
    "everywhere",
    "explain",
    "fold",
    "keep_all",
    "keep_latest",
    "largest",
    "latest",
    "mean",
    "median",
    "neighbours",
    "net_edges",
    "open",
    "paths",
    "percentile",
    "plain",
    "program",
    "put",
    "reject",
    "session",
    "sliding",
    "smallest",
    "top",
    "total",
    "transaction",
    "ttl",
    "tumbling",
    "values",
    "where_largest",
    "windows",
]

_WHEN_ASKED_FOR = {
    "Flow": ("millpond.ops.flow", "Flow"),
    "Stream": ("millpond.ops.flow", "Stream"),
    "Dedup": ("millpond.pond", "Dedup"),
    "Join": ("millpond.pond", "Join"),
    "Pond": ("millpond.pond", "Pond"),
    "State": ("millpond.pond", "State"),
    "Window": ("millpond.pond", "Window"),
    "connect": ("millpond.pond", "connect"),
    "open": ("millpond.pond", "open_pond"),
    "Partial": ("millpond.programs.annotations", "Partial"),
    "Partitioned": ("millpond.programs.annotations", "Partitioned"),
    "everywhere": ("millpond.programs.annotations", "everywhere"),
    "program": ("millpond.programs.annotations", "program"),
    "reject": ("millpond.programs.annotations", "reject"),
    "DenseMatrix": ("millpond.programs.elements", "DenseMatrix"),
    "Map": ("millpond.programs.elements", "Map"),
    "Matrix": ("millpond.programs.elements", "Matrix"),
    "StateElement": ("millpond.programs.elements", "StateElement"),
    "Vector": ("millpond.programs.elements", "Vector"),
    "explain": ("millpond.programs.explain", "explain"),
    "Migration": ("millpond.programs.migrating", "Migration"),
    "plain": ("millpond.programs.plain", "plain"),
}
"""What containers and tasks of Spark, of which many start, have no use for."""


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _WHEN_ASKED_FOR[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = getattr(importlib.import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_ASKED_FOR})
