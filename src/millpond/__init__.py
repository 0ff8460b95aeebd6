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
    total,
    ttl,
    values,
)
from millpond.errors import MillpondError, RuleInterpreted
from millpond.txn import abort, transaction

if TYPE_CHECKING:
    from millpond.ops.flow import Flow, Stream
    from millpond.pond import Pond, State, connect
    from millpond.pond import open_pond as open  # noqa: A004 - mp.open reads as it should

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

_WHEN_ASKED_FOR = {
    "Flow": ("millpond.ops.flow", "Flow"),
    "Stream": ("millpond.ops.flow", "Stream"),
    "Pond": ("millpond.pond", "Pond"),
    "State": ("millpond.pond", "State"),
    "connect": ("millpond.pond", "connect"),
    "open": ("millpond.pond", "open_pond"),
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
