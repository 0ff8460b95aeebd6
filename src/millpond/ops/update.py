"""The Update operator: adds the rows of an epoch to a State, exactly once."""

from __future__ import annotations

import math
import random
import time
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, EpochOutOfOrder, LateRows, StageLost
from millpond.ops.columns import Names, as_names, as_table, check_column_name, keys_of, times_of, values_of
from millpond.schema import key_kind, parse_ddl
from millpond.stores.keys import Keys
from millpond.times import Progress, TimeKind, delay_for, format_time, parse_duration
from millpond.wire.messages import (
    BeginEpoch,
    CommitEpoch,
    EpochCommitted,
    EpochPlan,
    Receipt,
    Register,
    Stage,
    StateSpec,
    check_name,
    writer_id,
)

LOCAL_QUERY = "local"
STAGE_ATTEMPTS = 20
EPOCH_MAX = 2**63 - 1
STAGE_PAUSE_S = 0.05


class _Rows(NamedTuple):
    keys: Keys
    times: npt.NDArray[np.int64]
    values: list[pa.Array]
    kind: TimeKind
    late: int


class Update:
    """A callable `(table, epoch)`. Its updater exists, and holds U back, from the moment it is built."""

    def __init__(
        self,
        client: Client,
        spec: StateSpec,
        *,
        key: Names,
        at: str,
        value: Names,
        delay: str | int | timedelta,
        late: str,
        name: str,
    ) -> None:
        if late not in ("drop", "error"):
            raise BadOption(
                f"late={late!r} is not a choice", hint='late="drop" or late="error"', option="late"
            )
        parse_duration(delay)
        self.name = check_name(name, "the updater")
        self._client = client
        self._spec = spec
        self._key_schema = parse_ddl(spec.key, "key")
        self._value_schema = parse_ddl(spec.value, "value")
        key_type = pa.int64() if key_kind(self._key_schema) == "i64" else pa.binary()
        self._rows_schema = pa.schema([("_key", key_type), ("_time", pa.int64()), *self._value_schema])
        self._key = as_names(key, self._key_schema, "key")
        self._value = as_names(value, self._value_schema, "value")
        self._at = check_column_name(at, "at")
        self._delay = delay
        self._late = late
        client.call(Register(spec.name, name, "updater"))

    def __call__(self, table: pa.Table, epoch: int) -> EpochCommitted:
        """Commits one epoch. When it returns, the rows are durable and U has moved; a replay changes nothing."""
        return self.commit(as_table(table), epoch, LOCAL_QUERY)

    def commit(self, table: pa.Table, epoch: int, query: str) -> EpochCommitted:
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch <= EPOCH_MAX:
            raise EpochOutOfOrder(
                f"{epoch!r} is not an epoch",
                hint="epochs are numbered 0, 1, 2, ...",
                epoch=epoch,
                expected=None,
            )
        for attempt in range(STAGE_ATTEMPTS):
            plan: EpochPlan = self._client.call(BeginEpoch(self._spec.name, self.name, query, epoch))
            rows = self._rows(table, plan)
            receipt = self._digest(rows) if plan.replayed else self._stage(rows, epoch, query)
            try:
                committed: EpochCommitted = self._client.call(
                    CommitEpoch(
                        state=self._spec.name,
                        updater=self.name,
                        query=query,
                        epoch=epoch,
                        delay=delay_for(rows.kind, self._delay),
                        late_below=plan.late_below,
                        time_kind=rows.kind if table.num_rows else "",
                        receipts=[receipt],
                    )
                )
                return committed
            except StageLost:
                if attempt + 1 == STAGE_ATTEMPTS:
                    raise
                time.sleep(STAGE_PAUSE_S)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _rows(self, table: pa.Table, plan: EpochPlan) -> _Rows:
        """The table's rows in the pond's terms, without the late ones."""
        times, kind = times_of(table, self._at, plan.time_kind)
        delay_for(kind, self._delay)
        keys = keys_of(table, self._key, self._key_schema)
        values = values_of(table, self._value, self._value_schema)
        late = late_rows(times, plan.late_below)
        if len(late) == 0:
            return _Rows(keys, times, values, kind, 0)
        if self._late == "error" and not plan.replayed:
            raise LateRows(
                f"{len(late):,} of {len(times):,} rows are below the watermark"
                f" {format_time(plan.late_below, kind)} of updater {self.name!r}; nothing was changed",
                hint='give the updater a longer delay, or late="drop" to count and drop such rows',
                rows=len(late),
                watermark=plan.late_below,
            )
        timely = np.delete(np.arange(len(times)), late)
        return _Rows(
            keys.take(timely),
            times[timely],
            [column.take(pa.array(timely)) for column in values],
            kind,
            len(late),
        )

    def _stage(self, rows: _Rows, epoch: int, query: str) -> Receipt:
        message = Stage(
            state=self._spec.name,
            writer=writer_id(self.name, query),
            epoch=epoch,
            partition=0,
            attempt=random.getrandbits(62),
        )
        return self._client.stage(message, self._rows_schema, rows.keys, rows.times, rows.values, rows.late)

    def _digest(self, rows: _Rows) -> Receipt:
        return self._client.digest(0, rows.keys, rows.times, rows.values, rows.late)


def late_rows(times: npt.NDArray[np.int64], late_below: Progress) -> npt.NDArray[np.int64]:
    """Positions of the rows whose time is below the watermark."""
    if late_below == -math.inf:
        return np.empty(0, dtype=np.int64)
    if late_below == math.inf:
        return np.arange(len(times))
    return np.flatnonzero(times < late_below)
