"""How rows go into a join or a deduplication: as they are, but for those that are late."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.client.receipts import receipt_of
from millpond.errors import LateRows, updater_finished
from millpond.kernels import windows as kernel
from millpond.ops.columns import keys_of, times_of, values_of
from millpond.ops.intake import Part
from millpond.stores import views
from millpond.stores.rows import digest_rows
from millpond.stores.windows.firsts import DedupShape
from millpond.stores.windows.join_shape import JoinShape
from millpond.times import Progress, delay_for, format_time
from millpond.wire.base import KindOfTime
from millpond.wire.dedups import DedupSpec
from millpond.wire.epochs import EpochPlan, Receipt
from millpond.wire.joins import JoinSpec, Side

Longs = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class RowIntake(ABC):
    """A `Stager`. Plain data that tasks can carry."""

    def __init__(
        self,
        resident: str,
        name: str,
        key: tuple[str, ...],
        at: str,
        value: tuple[str, ...],
        delay: Any,
        late: str,
    ) -> None:
        self.resident = resident
        self.name = name
        self.at = at
        self._key = key
        self._value = value
        self._delay = delay
        self._late = late

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys((*self._key, self.at, *self._value)))

    def delay(self, kind: KindOfTime) -> int:
        return delay_for(kind, self._delay) if kind else 0

    @property
    @abstractmethod
    def _schemas(self) -> tuple[pa.Schema, pa.Schema, pa.Schema]:
        """The columns of keys, of values, and of rows as they are sent: a key, a time, and the values."""

    def _is_late(self, times: Longs, late_below: Progress) -> Flags:
        """Rows before the watermark of their source."""
        if math.isinf(late_below):
            return np.full(len(times), late_below > 0)
        return times < late_below

    def late_flags(self, table: pa.Table, plan: EpochPlan) -> Flags:
        """Of all rows of a table, which are late in an epoch."""
        times, _ = times_of(table, self.at, plan.time_kind)
        return self._is_late(views.plain(times), plan.late_below)

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        """An epoch is known by all rows that came, late or not."""
        times, kind = times_of(table, self.at, plan.time_kind)
        times = views.plain(times)
        key_schema, value_schema, staged = self._schemas
        keys = keys_of(table, self._key, key_schema)
        values = values_of(table, self._value, value_schema)
        source = digest_rows(keys, times, values)
        if plan.late_below == math.inf and len(times) and not plan.replayed:
            raise updater_finished(self.resident, self.name)
        is_late = self._is_late(times, plan.late_below)
        late = int(np.count_nonzero(is_late))
        if late and self._late == "error" and not plan.replayed:
            raise LateRows(
                f"{late:,} of {len(times):,} rows come after the watermark {format_time(plan.late_below, kind)}"
                f" of {self.name!r} has passed them; nothing was changed",
                hint='late="drop" counts and drops such rows; a longer delay waits for them',
                rows=late,
                watermark=plan.late_below,
            )
        newest = times
        if late:
            timely = np.flatnonzero(~is_late)
            keys, times = keys.take(timely), times[timely]
            values = [column.take(pa.array(timely)) for column in values]
        attempt = client.runtime.bits(62)
        digest = 0
        if not plan.replayed:
            message = part.message(self.resident, self.name, attempt)
            digest = client.stage(message, staged, keys, [times], values, plan.placement)
        return replace(receipt_of(part.partition, attempt, len(times), late, digest, newest), source=source)


class JoinIntake(RowIntake):
    """Of one side."""

    def __init__(
        self,
        spec: JoinSpec,
        side: Side,
        key: tuple[str, ...],
        at: str,
        value: tuple[str, ...],
        delay: Any,
        late: str,
    ) -> None:
        super().__init__(spec.name, side, key, at, value, delay, late)
        self._spec = spec
        self._side: Side = side

    @property
    def _schemas(self) -> tuple[pa.Schema, pa.Schema, pa.Schema]:
        shape = JoinShape(self._spec)
        return shape.keys, shape.values[self._side], shape.staged[self._side]

    def _is_late(self, times: Longs, late_below: Progress) -> Flags:
        """In windows, rows whose last window is over."""
        window = self._spec.window
        if window is None or math.isinf(late_below):
            return super()._is_late(times, late_below)
        ends = np.empty(len(times), np.int64)
        kernel.last_ends(times, window.size, window.slide or window.size, window.offset, ends)
        return ends <= late_below


class DedupIntake(RowIntake):
    """Of all columns that pass."""

    def __init__(
        self,
        spec: DedupSpec,
        name: str,
        key: tuple[str, ...],
        at: str,
        value: tuple[str, ...],
        delay: Any,
        late: str,
    ) -> None:
        super().__init__(spec.name, name, key, at, value, delay, late)
        self._spec = spec

    @property
    def _schemas(self) -> tuple[pa.Schema, pa.Schema, pa.Schema]:
        shape = DedupShape(self._spec)
        return shape.keys, shape.values, shape.staged
