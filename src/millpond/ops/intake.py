"""What operators make of a user's rows. Plain data that tasks can carry: no connection, no state of its own."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.client.receipts import receipt_of
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
from millpond.stores.keys import Keys
from millpond.stores.readiness import late_rows
from millpond.stores.rows import digest_rows
from millpond.stores.ruleset import check_values
from millpond.times import TimeKind, delay_for, format_time, parse_duration
from millpond.wire.base import KindOfTime, Turn, check_name, writer_id
from millpond.wire.epochs import EpochPlan, Receipt, Stage
from millpond.wire.states import StateSpec


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
    turn: Turn
    partition: int

    def message(self, resident: str, operator: str, attempt: int) -> Stage:
        """The message that announces them, as an attempt of its own."""
        return Stage(resident, writer_id(operator, self.query), self.turn, self.partition, attempt)


class Stager(Protocol):
    """How an operator's rows go to the containers; plain data that tasks can carry."""

    @property
    def resident(self) -> str:
        """Whom they are for."""

    @property
    def name(self) -> str:
        """The operator's."""

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, each once."""

    @property
    def at(self) -> str | None:
        """The column of times, if rows have one."""

    def delay(self, kind: KindOfTime) -> int:
        """How far the operator's watermark stays behind its newest row, in units of that kind of time."""

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        """Sends rows to their containers. Those of an epoch that is there already are only compared with it."""


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
        self.resident = spec.name
        self.shape = spec.shape
        self.update = spec.update
        self.seq = None if seq is None else check_column_name(seq, "seq")
        self.rows_schema = self.shape.rows if seq is None else self.shape.sequenced_rows
        self.key = as_names(key, self.shape.keys, "key")
        self.value = as_names(value, self.shape.values, "value")
        self.at = check_column_name(at, "at")
        self._delay = delay
        self._late = late

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, each once."""
        seq = () if self.seq is None else (self.seq,)
        return list(dict.fromkeys((*self.key, self.at, *self.value, *seq)))

    def delay(self, kind: KindOfTime) -> int:
        assert kind
        return delay_for(kind, self._delay)

    def rows(self, table: pa.Table, plan: EpochPlan) -> Rows:
        """The table's rows in the pond's terms, without the late ones."""
        times, kind = times_of(table, self.at, plan.time_kind)
        self.delay(kind)
        keys = keys_of(table, self.key, self.shape.keys)
        values = values_of(table, self.value, self.shape.values)
        check_values(self.update, self.shape.values, values)
        if self.seq is not None:
            values.append(sequence_of(table, self.seq))
        timely = timely_rows(times, plan, kind, self.resident, self.name, self._late)
        if timely is None:
            return Rows(keys, times, values, kind, 0)
        return Rows(
            keys.take(timely),
            times[timely],
            [column.take(pa.array(timely)) for column in values],
            kind,
            len(times) - len(timely),
        )

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        rows = self.rows(table, plan)
        attempt = client.runtime.bits(62)
        if plan.replayed:
            digest = digest_rows(rows.keys, rows.times, rows.values)
        else:
            message = part.message(self.resident, self.name, attempt)
            digest = client.stage(
                message, self.rows_schema, rows.keys, [rows.times], rows.values, plan.placement
            )
        return receipt_of(part.partition, attempt, len(rows.times), rows.late, digest, rows.times)


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
