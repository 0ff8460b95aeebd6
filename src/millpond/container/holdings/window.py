"""What a container holds of a window: the open windows of its slices, and what the last epochs fired.

An epoch takes its rows in, moves the watermark, and fires what that has passed: in every slice, whether it has rows or
not. User code runs once before the epoch is decided, on what the epoch would leave; its results are those that count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
from msgspec.structs import replace

from millpond.code.windows import Aggregate
from millpond.container.holdings.base import CheckedRows, HeldSlice, Means, Ready, Record, Size
from millpond.container.holdings.firing import exists_otherwise, read_fired
from millpond.container.holdings.keyed import Portion
from millpond.container.holdings.resting import RestingHolding
from millpond.errors import BadMessage, BadOption, BadType, NullTime, not_trusted
from millpond.schema import check_key_types, format_ddl
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.outputs import Stored, in_batches
from millpond.stores.parts import PARTS
from millpond.stores.rows import digest_columns
from millpond.stores.windows.overlay import memory_rows
from millpond.stores.windows.rowlog import figures_of
from millpond.stores.windows.shape import (
    OF_STAGED_ROWS,
    RETRACTED,
    SESSION_ID,
    WINDOW_END,
    WINDOW_START,
    WindowShape,
    columns_needed,
)
from millpond.stores.windows.store import WindowStore
from millpond.wire.base import Done, Exchange, KindOfTime, Read, SliceId
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.specs import Resident, Spec
from millpond.wire.windows import AskOpen, FindOpen, ReadFired, ReadOpen, WindowSpec, WindowWork

_T = TypeVar("_T")
OPEN = pa.schema(
    {
        "slice": pa.int64(),
        "open": pa.int64(),
        "newest": pa.int64(),
        "fired": pa.float64(),
        "withheld": pa.bool_(),
    }
)
"""What `AskOpen` is answered by."""
KEPT_BYTES = 32 << 20
"""Of what is read of open windows, what may be in memory until it is sent."""


class WindowHolding(RestingHolding[WindowStore]):
    """One window's slices in this container. Until its types are known nothing can come for it."""

    snapshot_schema = PARTS
    in_pieces = True
    work_type = WindowWork

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        self._shape = shape_of(self._window)
        self._time_kind: KindOfTime = ""
        self._figures = {"epochs": 0, "rows": 0, "fired": 0}
        if self._window.runs_code and not means.runs_code:
            self.broken = not_trusted(f"the results of window {self.name!r} are made by functions of its own")

    @property
    def _window(self) -> WindowSpec:
        spec = self.resident.spec
        assert isinstance(spec, WindowSpec)
        return spec

    @staticmethod
    def opened(
        spec: WindowSpec, existing: WindowSpec | None, others: Sequence[Spec], owners: Sequence[int]
    ) -> WindowSpec:
        """Types that were not known yet may come later, and stay. A function of all rows may become another one."""
        if existing is None:
            _check_spec(spec)
            return spec
        known = replace(spec, value=existing.value) if spec.value is None else spec
        if existing.value is None and known == replace(existing, value=known.value):
            _check_spec(known)
            return known
        if known == existing:
            return existing
        if _without_code(known) == _without_code(existing):
            _check_spec(known)
            return known
        raise exists_otherwise(spec.name, "window", describe_window(existing), describe_window(spec))

    def extend(self, resident: Resident) -> None:
        """Its types have become known: until now it held nothing. Or functions of its own were replaced."""
        if resident.spec == self.resident.spec:
            return
        assert isinstance(resident.spec, WindowSpec)
        self.resident = resident
        self._shape = shape_of(resident.spec)
        for held in list(self.slices.values()):
            with held.lock:
                self.fit(held)

    def fit(self, held: HeldSlice[WindowStore]) -> None:
        was = held.store.shape
        if (was.pattern, was.staged) == (self._shape.pattern, self._shape.staged):
            held.store.recode(self._shape)
        else:
            held.store = self.new_store()

    def new_store(self) -> WindowStore:
        spilling = self.means.spilling
        if spilling is None:
            return WindowStore(self._shape, memory_rows, self.pond_slices)
        return WindowStore(
            self._shape, spilling.new_rows, self.pond_slices, spilling.new_cells, spilling.new_outputs()
        )

    def loaded(self, held: HeldSlice[WindowStore]) -> None:
        self._make_room(held.store)

    def concerns(self, counts: Sequence[Sequence[int]], number: SliceId) -> bool:
        """An epoch without rows fires, too."""
        return True

    def delta(self, held: HeldSlice[WindowStore]) -> WindowStore:
        return held.decided_copy()

    def merged(self, files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
        raise BadMessage(f"{self.name} is a window: its snapshots are whole")

    def columns_of(self, names: Sequence[str], work: WindowWork) -> pa.Schema:
        return self._shape.staged

    # Rows in

    def check(self, rows: SlicedBatch) -> tuple[CheckedRows, int]:
        batch, counts = rows
        keys = self.keys_of(rows, self._shape.staged)
        for name in self._shape.longs:
            if batch.column(name).null_count:
                raise NullTime("a time is null", column=name, rows=batch.column(name).null_count)
        for name in self._shape.staged.names[1:]:
            if self._shape.layout is not None and batch.column(name).null_count:
                raise BadMessage(f"a cell of window {self.name} is null")
        self.check_keys(batch.column(0), self._shape.keys)
        return CheckedRows(batch, counts, keys), digest_columns(batch.columns)

    @property
    def may_rest(self) -> bool:
        # Ids tell sessions apart by their number since the beginning. Where sessions are cut by length hangs on the parts
        # before, which have gone.
        return not self._shape.has_ids and not self._shape.window.longest

    @property
    def time_column(self) -> int:
        place: int = self._shape.staged.names.index(self._shape.longs[0])
        return place

    def prepare(self, record: Record) -> Ready:
        """What fires is worked out where user code may fail: nothing changes yet."""
        if self.means.spilling is not None and record.rows:
            stores = [held.store for held in list(self.slices.values())]
            self.means.spilling.check_room(f"window {self.name!r}", stores)
        if not self._window.runs_code:
            return Ready(record)
        made: dict[int, pa.Table | Stored] = {}
        work = record.work
        assert isinstance(work, WindowWork)

        def run() -> None:
            def try_one(held: HeldSlice[WindowStore], portions: list[Portion]) -> None:
                made[id(held)] = held.store.trial(
                    _pairs(portions), work.watermark, work.closes, work.time_kind, work.emits
                )
                held.store.tidy_folds()

            self.each(record, self.slices, try_one)

        self.means.limits.run(f"the aggregates of window {self.name!r}", run)
        return Ready(record, made)

    def apply(self, ready: Ready) -> int:
        return self._take_in(ready.record, self.slices, ready.made)

    def replay(self, record: Record, slices: Mapping[SliceId, HeldSlice[WindowStore]]) -> int:
        if not self._window.runs_code:
            return self._take_in(record, slices, None)
        what = f"the aggregates of window {self.name!r}, from the log,"
        return self.means.limits.run(what, lambda: self._take_in(record, slices, None))

    def _take_in(
        self,
        record: Record,
        slices: Mapping[SliceId, HeldSlice[WindowStore]],
        made: dict[int, pa.Table | Stored] | None,
    ) -> int:
        work = record.work
        assert isinstance(work, WindowWork)
        self._time_kind = self._time_kind or work.time_kind
        fired: list[int] = []

        def take_in(held: HeldSlice[WindowStore], portions: list[Portion]) -> None:
            with held.changing(record.writer, record.turn):
                held.store.begin_after(work.after)
                pairs, store = _pairs(portions), held.store
                if made is None:
                    store.tidy_folds()
                    rows = store.run(pairs, work.watermark, work.closes, work.time_kind, work.emits)
                else:
                    # What ran before the decision is what counts.
                    for _ in store.fires(pairs, work.watermark, work.closes, work.emits):
                        pass
                    rows = made[id(held)]
                store.keep(record.writer, record.turn, rows)
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

    def _make_room(self, store: WindowStore) -> None:
        """Rows and cells that memory has no room for go to disk."""
        if self.means.spilling is not None:
            with store.counting("write_s"):
                self.means.spilling.make_room(store)

    def forget(self, writers: Sequence[str]) -> None:
        super().forget(writers)
        for held in list(self.slices.values()):
            with held.lock:
                held.store.forget(list(writers))

    # Questions

    def exchange(self, message: Exchange[Any], rows: SlicedBatch, budget: Budget = UNLIMITED) -> Answer[Any]:
        if not isinstance(message, FindOpen):
            raise BadMessage(f"{self.name} is a window: it does not answer {type(message).__name__}")
        keys = self.keys_of(rows, pa.schema([self._shape.staged.field(0)]))
        tables = self._guarded(
            lambda: self.ask(
                rows.counts, lambda store, start, stop: store.open(self._time_kind, keys.part(start, stop))
            )
        )
        table = pa.concat_tables(tables) if tables else self.new_store().open(self._time_kind)
        budget.claim(table.nbytes)
        return Answer(Done(), _one_batch(table))

    def read(self, message: Read) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        match message:
            case ReadFired(_, writer, turn, slices):
                return read_fired(self, slices, writer, turn)
            case ReadOpen(_, slices):
                parts = self._guarded(lambda: self._open(slices))
                return parts[0].schema, chain.from_iterable(
                    in_batches(part) if isinstance(part, pa.Table) else part.batches() for part in parts
                )
            case AskOpen(_, slices):
                rows = pa.concat_tables([self._asked(number) for number in slices])
            case _:
                raise BadMessage(f"{self.name} is a window: it does not answer {type(message).__name__}")
        return rows.schema, in_batches(rows)

    def _guarded(self, work: Callable[[], _T]) -> _T:
        """What is open is made by the same code as what fires: its time is as limited."""
        if not self._window.runs_code:
            return work()
        return self.means.limits.run(f"the aggregates of window {self.name!r}", work)

    def _open(self, slices: Sequence[SliceId]) -> list[pa.Table | Stored]:
        """What is open in these slices, some of it in memory."""
        parts: list[pa.Table | Stored] = []
        kept = 0
        for number in slices:
            held = self.held(number)
            with held.lock:
                held.check_whole()
                rows = held.store.now(self._time_kind)
                if isinstance(rows, pa.Table) and kept + rows.nbytes > KEPT_BYTES:
                    rows = held.store.outputs.set_aside(rows)
            kept += rows.nbytes if isinstance(rows, pa.Table) else rows.memory_bytes
            parts.append(rows)
        return parts

    def _asked(self, number: SliceId) -> pa.Table:
        held = self.held(number)
        with held.lock:
            held.check_whole()
            windows = held.store.windows
            row = [[int(number)], [windows.count], [windows.newest], [float(held.store.fired)]]
            row.append([held.store.withheld])
        return pa.table([pa.array(v, f.type) for v, f in zip(row, OPEN, strict=True)], schema=OPEN)

    def size(self, held: HeldSlice[WindowStore]) -> Size:
        return Size(held.store.windows.nbytes + held.store.outputs.nbytes, held.store.windows.count)

    def figures(self) -> dict[str, Any]:
        slices = dict(self.slices)
        self.sizes = {number: self.size(held) for number, held in slices.items()}
        return {
            # Every container takes part in every epoch, and figures of containers are added up.
            **{name: self._figures[name] for name in ("rows", "fired")},
            "open": sum(size.keys for size in self.sizes.values()),
            "bytes": sum(size.nbytes for size in self.sizes.values()),
            **figures_of([held.store for held in slices.values()]),
        }


def _pairs(portions: list[Portion]) -> list[tuple[Any, pa.RecordBatch]]:
    return [(portion.keys, portion.batch) for portion in portions]


def shape_of(spec: WindowSpec) -> WindowShape:
    """Without types that are known, that of a window that only counts: nothing comes for it."""
    if spec.value is None:
        return WindowShape(
            spec.key, "", replace(spec.window, gap_column="", gap=None), {"": Aggregate("count")}
        )
    return WindowShape(
        spec.key,
        spec.value,
        spec.window,
        spec.aggregates,
        spec.pattern,
        lateness=spec.lateness,
        updates=spec.emit == "update",
    )


def _without_code(spec: WindowSpec) -> WindowSpec:
    """What stays of a window whose functions of whole windows are replaced."""
    aggregates = {
        name: replace(each, code=None) if each.name == "custom" else each
        for name, each in spec.aggregates.items()
    }
    return replace(spec, aggregates=aggregates)


def describe_window(spec: WindowSpec) -> str:
    aggregates = ", ".join(f"{name}={aggregate}" for name, aggregate in spec.aggregates.items())
    firing = f", lateness={spec.lateness}" if spec.lateness else ""
    if spec.emit == "update":
        firing += f", every={spec.every} us" if spec.every else ', emit="update"'
    return f"key={spec.key!r}, value={spec.value!r}, window={spec.window}, aggregate=({aggregates}){firing}"


def _check_spec(spec: WindowSpec) -> None:
    """A spec that containers could not read must never get into the journal."""
    shape = shape_of(spec)
    check_key_types(shape.keys)
    if format_ddl(shape.keys) != spec.key or (spec.value and format_ddl(shape.values) != spec.value):
        raise BadMessage(f"the types of window {spec.name!r} are not in their canonical form")
    if spec.value is not None:
        missing = set(columns_needed(spec.window, spec.aggregates, shape.values.names)) - set(
            shape.values.names
        )
        if missing:
            raise BadOption(
                f"window {spec.name!r} has no value column {', '.join(sorted(missing))}",
                hint=f"value={spec.value!r} must have every column that aggregates and gaps are of",
                option="value",
            )
        WindowStore(shape, _no_rows)
    never_late = spec.window.kind in ("counted", "everything")
    if (spec.lateness and never_late) or (spec.every and spec.emit != "update"):
        raise BadMessage(f"window {spec.name!r} cannot fire like that")
    _check_names(spec, shape)


def _check_names(spec: WindowSpec, shape: WindowShape) -> None:
    """Of results and of rows that are sent, every column has a name of its own. Spark takes them for equal whatever their case."""
    for name in shape.values.names:
        if name in OF_STAGED_ROWS:
            raise BadType(f"the name {name} is reserved", hint="give the column another name", ddl=name)
    taken = {WINDOW_START, WINDOW_END}
    if spec.emit == "update" and spec.window.kind == "session":
        taken |= {SESSION_ID, RETRACTED}
    for name in (*(shape.keys.names if shape.is_keyed else ()), *spec.aggregates):
        if not name:
            raise BadType(
                f"a result of window {spec.name!r} has no name", hint="give every aggregate a name", ddl=name
            )
        if name.lower() in taken:
            raise BadType(
                f"the results of window {spec.name!r} would have two columns {name!r}",
                hint="give one of them another name",
                ddl=name,
            )
        taken.add(name.lower())


def _no_rows(schema: pa.Schema, pattern: str) -> Any:
    return None


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    if batches:
        return batches[0]
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in table.schema], schema=table.schema)
