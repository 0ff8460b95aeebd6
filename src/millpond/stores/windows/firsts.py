"""Deduplication: which rows are the first of their keys, by the times of those that were."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import pairs as kernel
from millpond.schema import KEY, TIME, KeyKind, key_kind, parse_ddl
from millpond.stores import views
from millpond.stores.keys import Keys
from millpond.stores.outputs import Outputs
from millpond.stores.windows.firing import FiringStore, Portions
from millpond.stores.windows.session_index import SessionIndex
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.dedups import DedupSpec

Longs = NDArray[np.int64]


class DedupShape:
    """`staged` are the columns of rows as they are sent; what is kept of them are `marks`."""

    def __init__(self, spec: DedupSpec) -> None:
        self.keys = parse_ddl(spec.key, "key")
        self.values = parse_ddl(spec.value, "value") if spec.value else pa.schema([])
        self.within = spec.within
        self.key_kind: KeyKind = key_kind(self.keys)
        self.key_type: pa.DataType = pa.int64() if self.key_kind == "i64" else pa.binary()
        self.marks = pa.schema([(KEY, self.key_type), (TIME, pa.int64())])
        self.staged = pa.schema([*self.marks, *self.values])


class FirstTimes(SessionIndex):
    """The times of each key's rows that passed: of each a session from it on, in which no other may, and that none joins."""

    def __init__(self, kind: KeyKind, within: int) -> None:
        super().__init__(kind)
        self._within = within

    def admit(self, keys: Keys, times: Longs) -> NDArray[np.bool_]:
        """Which rows pass, one after the other."""
        entries = self._entries_of(keys)
        ends = np.full(len(times), TIME_MAX)
        if self._within:
            ends = np.where(times > TIME_MAX - self._within, TIME_MAX, times + self._within)
        self._note(times, ends)
        passes = np.zeros(len(entries), np.uint8)
        done = 0
        while True:
            done = kernel.admit_first(
                entries, times, ends, self._within, done,
                self._heads, self.starts, self.ends, self._next, self.entries,
                self._free, self._control, passes,
            )  # fmt: skip
            if done == len(entries):
                return passes.view(np.bool_)
            self._make_room(len(entries) - done)


class DedupStore(FiringStore):
    """One slice."""

    def __init__(self, shape: DedupShape, outputs: Outputs | None = None) -> None:
        super().__init__(outputs)
        self.shape = shape
        self._times = FirstTimes(shape.key_kind, shape.within)

    def results(self, time_kind: str) -> pa.Schema:
        return self.shape.values

    def take_in(self, portions: Portions, time_kind: str) -> Iterator[pa.Table]:
        """In one epoch, first is what is earlier; of one time, what is further ahead in it."""
        if not portions:
            return
        keys = Keys.concat([keys for keys, _ in portions])
        rows = pa.concat_batches([batch for _, batch in portions])
        times = views.plain(views.longs(rows.column(1)))
        order = np.argsort(times, kind="stable")
        first = order[self._times.admit(keys.take(order), times[order])]
        self.dropped += len(order) - len(first)
        passed = rows.take(pa.array(first))
        yield pa.Table.from_arrays(passed.columns[2:], schema=self.shape.values)

    def fire(self, watermark: Progress, time_kind: str) -> Iterator[pa.Table]:
        """Rows that come from now on are at the watermark or after it: spans that are over by then go."""
        if math.isfinite(watermark):
            over = self._times.ended(watermark)
            if len(over):
                self._times.remove(over)
        yield from ()

    def contents(self) -> Iterator[pa.RecordBatch]:
        nodes = self._times.all()
        columns = [self._times.keys(nodes).to_arrow(), pa.array(self._times.starts[nodes])]
        return iter([pa.RecordBatch.from_arrays(columns, schema=self.shape.marks)] if len(nodes) else [])

    def restore(self, batch: pa.RecordBatch) -> None:
        batch = batch.cast(self.shape.marks)
        passes = self._times.admit(
            Keys.from_arrow(batch.column(0)), views.plain(views.longs(batch.column(1)))
        )
        if not passes.all():
            raise ValueError("a snapshot holds rows that would not have passed")

    @property
    def count(self) -> int:
        return len(self._times)

    @property
    def newest(self) -> int | None:
        return None

    @property
    def oldest(self) -> int:
        return self._times.oldest

    @property
    def reach(self) -> int:
        return TIME_MAX if len(self._times) else TIME_MIN

    @property
    def nbytes(self) -> int:
        return self._times.nbytes

    @property
    def beside_bytes(self) -> int:
        return self._times.used_bytes

    def validate(self) -> None:
        super().validate()
        self._times.validate()
