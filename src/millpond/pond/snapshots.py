"""Snapshots of a State: when they may be read, and how they look to a user."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, RowsWaiting
from millpond.stores.keys import decode_keys
from millpond.stores.readiness import check_not_below, ready
from millpond.times import TIME_MIN, Progress, TimeKind, format_time
from millpond.wire.questions import ResidentProgress
from millpond.wire.states import ReadSlices, StateSpec


def read_versions(client: Client, state: str, at: Progress, slices: Sequence[int] | None = None) -> pa.Table:
    """One row per key, the newest version with time <= `at`: of all slices, or of some."""
    return client.read(lambda some: ReadSlices(state, at, some), slices)


def snapshot_time_kind(progress: ResidentProgress) -> TimeKind:
    """What kind of time a State has; logical until the first rows tell."""
    return "timestamp" if progress.time_kind == "timestamp" else "long"


def snapshot_time(at: Progress | None, progress: ResidentProgress) -> Progress | None:
    """The time to read at: `at` itself if it is final and not below F, or the newest final; None if nothing is."""
    kind = snapshot_time_kind(progress)
    if at is None:
        if progress.update <= TIME_MIN:
            return None
        # Compaction keeps the newest value below F, so that a read at F - 1 is right as well.
        check_not_below(progress.update, progress.fetch, kind)
        return progress.update - 1
    if math.isinf(at):
        raise BadOption(
            "a snapshot is of a time, or of all that is final", hint="leave the time out", option="at"
        )
    check_not_below(at, progress.fetch, kind)
    if not ready(None, at, progress.update):
        raise RowsWaiting(
            f"a snapshot at {format_time(at, kind)} is not final: U is {format_time(progress.update, kind)}",
            hint="leave the time out for the newest final values",
            rows=0,
            update_progress=progress.update,
        )
    return at


def snapshot_schema(spec: StateSpec, kind: TimeKind) -> pa.Schema:
    """Key columns, the time (under a name that is free), value columns."""
    keys, values = spec.shape.keys, spec.shape.values
    name = "time"
    while name in {*keys.names, *values.names}:
        name = f"_{name}"
    time = pa.field(name, pa.timestamp("us", "UTC") if kind == "timestamp" else pa.int64())
    return pa.schema([*keys, time, *values])


def snapshot_table(spec: StateSpec, kind: TimeKind, rows: pa.Table | None) -> pa.Table:
    """Rows as containers give them, with the user's names and types; none for None."""
    schema = snapshot_schema(spec, kind)
    if rows is None:
        return schema.empty_table()
    keys = decode_keys(rows.column(0).combine_chunks(), spec.shape.keys)
    time_type = schema.field(len(keys)).type
    columns = [*keys, rows.column(1).cast(time_type), *rows.columns[2:]]
    return pa.Table.from_arrays(columns, schema=schema)
