"""What tasks of an epoch hand on, and what its calls have returned, as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from millpond.errors import BadMessage
from millpond.programs.call_columns import column_type
from millpond.programs.calls import HEAD_COLUMNS, Heads, Longs, calls_schema

STRING = calls_schema(("string",))


class HandedOn(NamedTuple):
    """A call that goes on: its head, the line of the task that it comes from, and its values."""

    row: int
    entry: int
    steps: int
    at: int
    line: int
    values: Sequence[Any]


class Made:
    """Calls that go on, by the next task or how they ended: one by one, and in batches."""

    def __init__(self) -> None:
        self.single: dict[int, list[HandedOn]] = {}
        self.batches: dict[int, list[pa.RecordBatch]] = {}

    def add(self, following: int, call: HandedOn) -> None:
        self.single.setdefault(following, []).append(call)

    def merge(self, other: Made) -> None:
        for following, calls in other.single.items():
            self.single.setdefault(following, []).extend(calls)
        for following, batches in other.batches.items():
            self.batches.setdefault(following, []).extend(batches)

    def add_all(self, following: int, calls: pa.RecordBatch) -> None:
        self.batches.setdefault(following, []).append(calls)


def heads_of(calls: Sequence[HandedOn], following: int) -> Heads:
    rows, entries, steps, at, *_ = zip(*calls, strict=True)
    return Heads(
        np.array(rows, np.int64),
        np.array(entries, np.int32),
        np.full(len(calls), following, np.int32),
        np.array(steps, np.int32),
        np.array(at, np.int32),
    )


class Returned:
    """What calls returned, or why they were rejected, by their rows; `kind` is the type of results."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._rows: list[Longs] = []
        self._results: list[pa.Array] = []
        self._errors: list[pa.Array] = []

    def keep(self, calls: pa.RecordBatch, *, rejected: bool) -> None:
        values = calls.column(HEAD_COLUMNS)
        self._rows.append(calls.column(0).to_numpy())
        self._results.append(pa.nulls(len(calls), column_type(self.kind)) if rejected else values)
        self._errors.append(values if rejected else pa.nulls(len(calls), pa.string()))

    def of(self, rows: Iterable[int] | Longs) -> tuple[pa.Array, pa.Array]:
        """Results and errors of calls, in the order of these rows; of each one of the two is null."""
        wanted = np.asarray(rows, np.int64)
        if not len(wanted):
            return pa.array([], column_type(self.kind)), pa.array([], pa.string())
        known = np.concatenate(self._rows) if self._rows else np.empty(0, np.int64)
        order = np.argsort(known, kind="stable")
        places = np.searchsorted(known[order], wanted, side="right") - 1
        if not len(known) or (known[order][places] != wanted).any():
            raise BadMessage("of a call that was run nobody knows what it returned")
        found = pa.array(order[places])
        return pa.concat_arrays(self._results).take(found), pa.concat_arrays(self._errors).take(found)
