"""What operators make of a user's rows. Plain data that tasks can carry: no connection, no state of its own."""

from __future__ import annotations

import math
import random
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.container.held import check_values
from millpond.errors import BadOption, LateRows, updater_finished
from millpond.ops.columns import (
    Names,
    as_names,
    check_column_name,
    keys_of,
    sequence_of,
    times_of,
    values_of,
)
from millpond.schema import key_kind, parse_ddl
from millpond.stores.keys import Keys
from millpond.times import Progress, TimeKind, delay_for, format_time, parse_duration
from millpond.wire.messages import EpochPlan, Receipt, Stage, StateSpec, check_name, writer_id


class Rows(NamedTuple):
    """Rows in the pond's terms; `late` of them were left out."""

    keys: Keys
    times: npt.NDArray[np.int64]
    values: list[pa.Array]
    kind: TimeKind
    late: int


class Part(NamedTuple):
    """Which rows these are: of a partition of an epoch of a query."""

    query: str
    epoch: int
    partition: int

    def stage(self, state: str, updater: str) -> Stage:
        """The message that announces them, as a new attempt."""
        writer = writer_id(updater, self.query)
        return Stage(state, writer, self.epoch, self.partition, attempt=random.getrandbits(62))


class Intake:
    """How one updater reads its rows."""

    def __init__(
        self,
        spec: StateSpec,
        key: Names,
        at: str,
        value: Names,
        delay: str | int | timedelta,
        late: str,
        name: str,
        seq: str | None = None,
    ) -> None:
        check_late(late)
        parse_duration(delay)
        self.name = check_name(name, "the updater")
        self.state = spec.name
        self.key_schema = parse_ddl(spec.key, "key")
        self.value_schema = parse_ddl(spec.value, "value")
        key_type = pa.int64() if key_kind(self.key_schema) == "i64" else pa.binary()
        self.update = spec.update
        self.rows_schema = pa.schema([("_key", key_type), ("_time", pa.int64()), *self.value_schema])
        self.seq = None if seq is None else check_column_name(seq, "seq")
        if seq is not None:
            self.rows_schema = self.rows_schema.append(pa.field("_seq", pa.int64()))
        self.key = as_names(key, self.key_schema, "key")
        self.value = as_names(value, self.value_schema, "value")
        self.at = check_column_name(at, "at")
        self._delay = delay
        self._late = late

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, each once."""
        seq = () if self.seq is None else (self.seq,)
        return list(dict.fromkeys((*self.key, self.at, *self.value, *seq)))

    def delay(self, kind: TimeKind) -> int:
        return delay_for(kind, self._delay)

    def rows(self, table: pa.Table, plan: EpochPlan) -> Rows:
        """The table's rows in the pond's terms, without the late ones."""
        times, kind = times_of(table, self.at, plan.time_kind)
        self.delay(kind)
        keys = keys_of(table, self.key, self.key_schema)
        values = values_of(table, self.value, self.value_schema)
        check_values(self.update, self.value_schema, values)
        if self.seq is not None:
            values.append(sequence_of(table, self.seq))
        timely = timely_rows(times, plan, kind, self.state, self.name, self._late)
        if timely is None:
            return Rows(keys, times, values, kind, 0)
        return Rows(
            keys.take(timely),
            times[timely],
            [column.take(pa.array(timely)) for column in values],
            kind,
            len(times) - len(timely),
        )

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> tuple[Receipt, TimeKind]:
        """Sends rows to their containers. Those of an epoch that is there already are only compared with it."""
        rows = self.rows(table, plan)
        if plan.replayed:
            receipt = client.digest(part.partition, rows.keys, rows.times, rows.values, rows.late)
        else:
            message = part.stage(self.state, self.name)
            receipt = client.stage(message, self.rows_schema, rows.keys, rows.times, rows.values, rows.late)
        return receipt, rows.kind


def check_late(late: str) -> str:
    if late not in ("drop", "error"):
        raise BadOption(f"late={late!r} is not a choice", hint='late="drop" or late="error"', option="late")
    return late


def timely_rows(
    times: npt.NDArray[np.int64], plan: EpochPlan, kind: TimeKind, state: str, updater: str, late: str
) -> npt.NDArray[np.int64] | None:
    """Positions of the rows that are not late; None if all are timely. With `late="error"` a late row is an error."""
    if plan.late_below == math.inf and len(times) and not plan.replayed:
        raise updater_finished(state, updater)
    found = late_rows(times, plan.late_below)
    if len(found) == 0:
        return None
    if late == "error" and not plan.replayed:
        raise LateRows(
            f"{len(found):,} of {len(times):,} rows are below the watermark"
            f" {format_time(plan.late_below, kind)} of updater {updater!r}; nothing was changed",
            hint='late="drop" counts and drops such rows; an updater with a longer delay waits for them',
            rows=len(found),
            watermark=plan.late_below,
        )
    return np.delete(np.arange(len(times)), found)


def late_rows(times: npt.NDArray[np.int64], late_below: Progress) -> npt.NDArray[np.int64]:
    """Positions of the rows whose time is below the watermark."""
    if late_below == -math.inf:
        return np.empty(0, dtype=np.int64)
    if late_below == math.inf:
        return np.arange(len(times))
    return np.flatnonzero(times < late_below)
