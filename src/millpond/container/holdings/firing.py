"""What a container holds of a join or a deduplication: what is open in its slices, and what the last epochs gave.

An epoch takes its rows in, moves the watermark, and gives what comes of both: in every slice, whether it has rows or not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa

from millpond.container.holdings.base import CheckedRows, HeldSlice, Means, Ready, Record, Size
from millpond.container.holdings.keyed import KeyedHolding, Portion
from millpond.container.holdings.resting import RestingHolding
from millpond.errors import BadMessage, NullTime, SchemaMismatch
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.outputs import Outputs, in_batches
from millpond.stores.parts import PARTS
from millpond.stores.rows import digest_columns
from millpond.stores.windows.firing import FiringStore
from millpond.stores.windows.overlay import memory_rows
from millpond.stores.windows.rowlog import figures_of
from millpond.stores.windows.store import NewRows
from millpond.wire.base import Exchange, Read, SliceId, Turn
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.specs import Resident
from millpond.wire.windows import AskOpen, ReadFired, WindowWork

OPEN = pa.schema(
    {
        "slice": pa.int64(),
        "open": pa.int64(),
        "newest": pa.int64(),
        "fired": pa.float64(),
        "dropped": pa.int64(),
    }
)
"""What `AskOpen` is answered by."""
_F = TypeVar("_F", bound=FiringStore)


class FiringHolding(RestingHolding[_F]):
    """A kind gives its stores, and says which columns rows have."""

    snapshot_schema = PARTS
    in_pieces = True
    work_type = WindowWork

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        self._figures = {"epochs": 0, "rows": 0, "fired": 0}

    @abstractmethod
    def staged(self, names: Sequence[str]) -> pa.Schema:
        """The columns of rows that have these names: a key, a time, and values."""

    @property
    @abstractmethod
    def keys(self) -> pa.Schema:
        """The key's columns, as users see them."""

    @property
    def may_rest(self) -> bool:
        return True

    @property
    def time_column(self) -> int:
        return 1

    @property
    def new_rows(self) -> NewRows:
        return memory_rows if self.means.spilling is None else self.means.spilling.new_rows

    @property
    def new_outputs(self) -> Callable[[], Outputs]:
        return Outputs if self.means.spilling is None else self.means.spilling.new_outputs

    def loaded(self, held: HeldSlice[_F]) -> None:
        self._make_room(held.store)

    def concerns(self, counts: Sequence[Sequence[int]], number: SliceId) -> bool:
        """An epoch without rows moves the watermark, too."""
        return True

    def delta(self, held: HeldSlice[_F]) -> _F:
        return held.decided_copy()

    def merged(self, files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
        raise BadMessage(f"{self.name} is a {self.spec.kind}: its snapshots are whole")

    def columns_of(self, names: Sequence[str], work: WindowWork) -> pa.Schema:
        return self.staged(names)

    # Rows in

    def check(self, rows: SlicedBatch) -> tuple[CheckedRows, int]:
        batch, counts = rows
        keys = self.keys_of(rows, self.staged(batch.schema.names))
        if batch.column(1).null_count:
            raise NullTime("a time is null", column=batch.schema.names[1], rows=batch.column(1).null_count)
        self.check_keys(batch.column(0), self.keys)
        return CheckedRows(batch, counts, keys), digest_columns(batch.columns)

    def prepare(self, record: Record) -> Ready:
        if self.means.spilling is not None and record.rows:
            stores = [held.store for held in list(self.slices.values())]
            self.means.spilling.check_room(f"{self.spec.kind} {self.name!r}", stores)
        return Ready(record)

    def apply(self, ready: Ready) -> int:
        return self.replay(ready.record, self.slices)

    def replay(self, record: Record, slices: Mapping[SliceId, HeldSlice[_F]]) -> int:
        work = record.work
        assert isinstance(work, WindowWork)
        fired: list[int] = []

        def take_in(held: HeldSlice[_F], portions: list[Portion]) -> None:
            with held.changing(record.writer, record.turn):
                held.store.begin_after(work.after)
                pairs = [(portion.keys, portion.batch) for portion in portions]
                rows = held.store.run(pairs, work.watermark, work.closes, work.time_kind)
                held.store.keep(record.writer, record.turn, rows)
                held.dirty = True
                self._make_room(held.store)
            held.load.rows_updated += sum(portion.batch.num_rows for portion in portions)
            fired.append(len(rows))

        self.each(record, slices, take_in)
        before = self._figures
        self._figures = {
            "epochs": before["epochs"] + 1,
            "rows": before["rows"] + record.rows,
            "fired": before["fired"] + sum(fired),
        }
        return record.rows

    def _make_room(self, store: _F) -> None:
        """Rows that memory has no room for go to disk."""
        if self.means.spilling is not None:
            self.means.spilling.make_room(store)

    def forget(self, writers: Sequence[str]) -> None:
        super().forget(writers)
        for held in list(self.slices.values()):
            with held.lock:
                held.store.forget(writers)

    # Questions

    def exchange(self, message: Exchange[Any], rows: SlicedBatch, budget: Budget = UNLIMITED) -> Answer[Any]:
        raise self._not_answered(message)

    def read(self, message: Read) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        match message:
            case ReadFired(_, writer, turn, slices):
                return read_fired(self, slices, writer, turn)
            case AskOpen(_, slices):
                rows = self._from(slices, _told)
            case _:
                raise self._not_answered(message)
        return rows.schema, in_batches(rows)

    def _not_answered(self, message: Exchange[Any] | Read) -> BadMessage:
        return BadMessage(f"{self.name} is a {self.spec.kind}: it does not answer {type(message).__name__}")

    def _from(self, slices: Sequence[SliceId], ask: Callable[[SliceId, _F], pa.Table]) -> pa.Table:
        tables = []
        for number in slices:
            held = self.held(number)
            with held.lock:
                held.check_whole()
                tables.append(ask(number, held.store))
        return pa.concat_tables(tables)

    def size(self, held: HeldSlice[_F]) -> Size:
        return Size(held.store.nbytes + held.store.outputs.nbytes, held.store.count)

    def figures(self) -> dict[str, Any]:
        slices = dict(self.slices)
        self.sizes = {number: self.size(held) for number, held in slices.items()}
        return {
            # Every container takes part in every epoch, and figures of containers are added up.
            **{name: self._figures[name] for name in ("rows", "fired")},
            "open": sum(size.keys for size in self.sizes.values()),
            "bytes": sum(size.nbytes for size in self.sizes.values()),
            **figures_of([log for held in slices.values() for log in held.store.logs]),
        }


def _told(number: SliceId, store: FiringStore) -> pa.Table:
    row = [[int(number)], [store.count], [store.newest], [float(store.fired)], [store.dropped]]
    return pa.table([pa.array(v, f.type) for v, f in zip(row, OPEN, strict=True)], schema=OPEN)


def read_fired(
    holding: KeyedHolding[Any], slices: Sequence[SliceId], writer: str, turn: Turn
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """What a turn gave in these slices; what is on disk is read while it is sent."""
    parts: list[tuple[pa.Schema, Iterator[pa.RecordBatch]]] = []
    for number in slices:
        held = holding.held(number)
        with held.lock:
            held.check_whole()
            parts.append(held.store.outputs.find_batches(writer, turn))
    return parts[0][0], chain.from_iterable(batches for _, batches in parts)


def exists_otherwise(name: str, kind: str, existing: str, requested: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"{kind} {name!r} exists otherwise\n  existing:  {existing}\n  requested: {requested}",
        hint="open it as it is, or choose another name;"
        f" pond.forget(pond.{kind}({name!r})) drops it, with all that it holds",
        resident=name,
        existing=existing,
        requested=requested,
    )
