"""What one slice of a window keeps: its open windows, what the last epochs fired, and how far it has fired."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Protocol

import numpy as np
import pyarrow as pa

from millpond.stores.keys import Keys, decode_keys
from millpond.stores.outputs import Outputs, Stored
from millpond.stores.parts import Part, in_packs, unpack
from millpond.stores.windows.aligned_windows import AlignedWindows
from millpond.stores.windows.celltable import Fired
from millpond.stores.windows.counted import CountedWindows
from millpond.stores.windows.cut_sessions import CutSessions, row_schema
from millpond.stores.windows.panes import PaneStore
from millpond.stores.windows.rowlog import InMemory, RowLog, Spillable, no_figures
from millpond.stores.windows.sessions import SessionCells, SessionRows
from millpond.stores.windows.shape import (
    RETRACTED,
    SESSION_ID,
    WINDOW_END,
    WINDOW_START,
    WindowShape,
    time_type,
)
from millpond.stores.windows.whole import Rows, WholeWindows
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.base import Turn

Portions = list[tuple[Keys, pa.RecordBatch]]
NewRows = Callable[[pa.Schema, str], RowLog]
"""A log of rows of that schema, for that pattern."""
NewCells = Callable[[WindowShape, int], "CellWindows"]
"""Windows whose aggregates are cells."""
META = pa.schema({"fired": pa.float64(), "exact": pa.int64()})
FIRED_BYTES = 4 << 20
"""Of what an epoch fires in a slice, what is made at once; of more, all goes to disk."""


class OpenWindows(Protocol):
    """The open windows of one slice, whichever way they are kept."""

    def insert(self, portions: Portions) -> None:
        """Rows of one epoch, in the form in which they are sent."""

    def fire(self, watermark: Progress, closes: bool, emits: bool = False) -> Iterator[Fired]:
        """What ends at the watermark or before, or all; it is gone once this has come to its end.

        Where windows stay or are updated: what has changed since it was last sent. `emits`: whether it ends or not.
        """

    def open(self, keys: Keys | None = None) -> Iterator[Fired]: ...

    def fork(self, keys: Keys, watermark: Progress, closes: bool, emits: bool) -> OpenWindows:
        """To try an epoch on that has rows of these keys, and then fires: no more than what such an epoch touches.

        These stay as they are, and may not change meanwhile.
        """

    def contents(self) -> Iterator[pa.RecordBatch]:
        """All of it as it is now, in the form in which rows are sent; inserted in this order it is the same again.

        What is on disk is read when it is asked for, whatever becomes of it here meanwhile.
        """

    def marked(self) -> Iterator[tuple[str, pa.Table]]:
        """What else there is to know, by name, where windows stay or are updated: what has changed, and ids."""

    def load_marks(self, name: str, rows: pa.Table) -> None:
        """What `marked` gave, behind what `contents` gave."""

    @property
    def withheld(self) -> bool:
        """Where windows are updated: whether something has changed since it was last sent."""

    @property
    def oldest(self) -> int:
        """The earliest time that something here depends on."""

    @property
    def newest(self) -> int | None:
        """When the last window that is open ends; None if there is none that time ends."""

    @property
    def count(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """In memory."""

    @property
    def staying_bytes(self) -> int:
        """What of it cannot leave memory."""

    def validate(self) -> None: ...


class CellWindows(OpenWindows, Spillable, Protocol):
    """Those whose aggregates are cells, and how they share memory."""


def memory_cells(shape: WindowShape, slices: int) -> CellWindows:
    """In memory alone."""
    return SessionCells(shape, slices) if shape.window.kind == "session" else PaneStore(shape)


class WindowStore:
    """One slice. Everything in it follows from the records of epochs, in their order."""

    def __init__(
        self,
        shape: WindowShape,
        new_rows: NewRows,
        slices: int = 1,
        new_cells: NewCells = memory_cells,
        outputs: Outputs | None = None,
    ) -> None:
        self.shape = shape
        self._slices = slices
        self._new_rows = new_rows
        self._new_cells = new_cells
        self.windows: OpenWindows = self._new_windows()
        self.outputs = outputs or Outputs()
        self.schemas: dict[str, pa.Schema] = {}
        self.fired: Progress = -math.inf
        self._saved_until = TIME_MIN
        self.spent = no_figures()

    def _new_windows(self) -> OpenWindows:
        shape = self.shape
        session = shape.window.kind == "session"
        if shape.pattern == "rmw":
            return self._new_cells(shape, self._slices)
        if shape.window.is_cut and not shape.fires_once:
            return CutSessions(shape, self._new_rows(row_schema(shape), "aur"), self._slices)
        if session:
            return SessionRows(shape, self._new_rows(shape.staged.remove(0), "aur"), self._slices)
        if shape.window.kind == "counted":
            return CountedWindows(shape, self._new_rows(shape.staged.remove(0), "aur"))
        return AlignedWindows(shape, self._new_rows(shape.staged, "aar"))

    @property
    def rows(self) -> RowLog | None:
        return getattr(self.windows, "rows", None)

    @property
    def spillable(self) -> Spillable:
        """What of it can leave memory: its log of rows, or its cells."""
        return self.windows if self.rows is None else self.rows  # type: ignore[return-value]

    @property
    def spillables(self) -> Sequence[InMemory]:
        return [self.spillable, self.outputs]

    @property
    def oldest(self) -> int:
        return self.windows.oldest

    @property
    def live_bytes(self) -> int:
        """What a snapshot would take, about."""
        return max(self.spillable.live_bytes, self.windows.nbytes)

    @property
    def beside_bytes(self) -> int:
        return self.windows.nbytes - self.spillable.memory_bytes

    @property
    def staying_bytes(self) -> int:
        return self.windows.staying_bytes

    # Epochs

    def begin_after(self, fired: Progress) -> None:
        """All up to there has fired, whether it was seen here or not: nothing of what was before is left."""
        if fired > self.fired:
            self.fired = fired
            self._go_on()

    def run(
        self, portions: Portions, watermark: Progress, closes: bool, time_kind: str, emits: bool = True
    ) -> pa.Table | Stored:
        """Takes rows in, and gives what fires. The watermark never falls. Of updates, only an epoch that `emits` gives some.

        Much of it is on disk, where there is one: it is made and written piece by piece.
        """
        fires = self.fires(portions, watermark, closes, emits)
        tables = (self.table(some, time_kind) for some in _together(fires))
        return self.outputs.collect(tables, self.schema(time_kind))

    def fires(
        self, portions: Portions, watermark: Progress, closes: bool, emits: bool = True
    ) -> Iterator[Fired]:
        """The same, one piece after another. It has happened once this has come to its end."""
        if portions:
            with self.counting("write_s"):
                self.windows.insert(portions)
        self.fired = max(self.fired, watermark)
        pieces = iter(self.windows.fire(self.fired, closes, emits and self.shape.updates))
        while True:
            with self.counting("read_s"):
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    @contextmanager
    def counting(self, figure: str) -> Iterator[None]:
        """CPU time that goes into cells, as a figure of `figures`."""
        begin = time.thread_time()
        yield
        self.spent[figure] += time.thread_time() - begin

    def figures(self) -> dict[str, float]:
        """As those of a log of rows, which count for themselves what they do; of cells, how long they took."""
        return dict(self.spent) if self.rows is None else self.rows.figures()

    @property
    def disk_bytes(self) -> int:
        return self.spillable.disk_bytes

    def trial(
        self, portions: Portions, watermark: Progress, closes: bool, time_kind: str, emits: bool = True
    ) -> pa.Table | Stored:
        """What `run` would give; nothing changes. User code runs here first."""
        fork = WindowStore.__new__(WindowStore)
        fork.shape, fork.fired, fork.outputs = self.shape, self.fired, self.outputs
        fork.schemas = self.schemas
        fork.spent = no_figures()
        keys = [own for own, _ in portions] or [Keys.from_arrow(pa.array([], self.shape.key_type))]
        fork.windows = self.windows.fork(
            Keys.concat(keys), max(self.fired, watermark), closes, emits and self.shape.updates
        )
        return fork.run(portions, watermark, closes, time_kind, emits)

    def tidy_folds(self) -> None:
        """Upkeep of what is on disk that runs user code: where that may fail, and is limited."""
        if isinstance(self.windows, PaneStore | SessionCells):
            self.windows.tidy_folds()

    def recode(self, shape: WindowShape) -> None:
        """The same windows, whose functions of their own are others from now on."""
        self.shape, self.schemas = shape, {}
        if isinstance(self.windows, AlignedWindows | SessionRows | CountedWindows | CutSessions):
            self.windows.recode(shape)

    def keep(self, writer: str, turn: Turn, rows: pa.Table | Stored) -> None:
        """What an epoch fired."""
        self.outputs.keep(writer, turn, rows)

    @property
    def withheld(self) -> bool:
        """Whether an epoch that emits would give an update, though it brought nothing."""
        return self.shape.updates and self.windows.withheld

    def open(self, time_kind: str, keys: Keys | None = None) -> pa.Table:
        """What is open now, of all keys or of these."""
        return self.table(list(self.windows.open(keys)), time_kind)

    def now(self, time_kind: str) -> pa.Table | Stored:
        """All that is open; what is much is on disk, where there is one."""
        tables = (self.table(some, time_kind) for some in _together(self.windows.open()))
        return self.outputs.collect(tables, self.schema(time_kind))

    def schema(self, time_kind: str) -> pa.Schema:
        """Of rows as users get them."""
        if time_kind not in self.schemas:
            self.schemas[time_kind] = self.table([], time_kind).schema
        return self.schemas[time_kind]

    def table(self, fired: list[Fired], time_kind: str) -> pa.Table:
        """Rows as users get them."""
        some = [each for each in fired if len(each)]
        return self._table(joined(some) if some else nothing(self.shape), time_type(time_kind))

    def _table(self, fired: Fired, times: pa.DataType) -> pa.Table:
        columns = dict(fired.columns)
        if self.shape.window.kind == "everything":
            columns[WINDOW_START] = columns[WINDOW_END] = pa.nulls(len(fired), pa.int64())
        else:
            columns[WINDOW_START], columns[WINDOW_END] = pa.array(fired.starts), pa.array(fired.ends)
        return self.shape.results(columns, decode_keys(fired.keys.to_arrow(), self.shape.keys), times)

    # As checkpoints see it

    @property
    def dirty_share(self) -> float:
        """Windows come and go as a whole: a snapshot of one is a base, whatever a delta may take."""
        return math.inf

    def clean(self) -> None:
        self.outputs.clean()
        self._note_saved()

    def _note_saved(self) -> None:
        """Up to when the last window stays that a snapshot holds; one that time does not end may last for ever."""
        newest = self.windows.newest
        until = TIME_MAX if newest is None else min(newest + self.shape.lateness, TIME_MAX)
        self._saved_until = until if self.windows.count else TIME_MIN

    def needs_saved(self, writers: Collection[str], oldest: int) -> bool:
        """Whether the last snapshot holds what is nowhere else: something that depends on times from `oldest` on, or what
        the last turns of one of these writers gave.
        """
        return self._saved_until >= oldest or not self.outputs.are_new(writers)

    def copy(self) -> WindowStore:
        """All of it as it is now, to be written piece by piece: rows are immutable, and files stay as long as they are read."""
        return _Frozen(self)  # type: ignore[return-value]

    def export(self) -> pa.RecordBatch:
        return _Frozen(self).export()

    def load(self, batch: pa.RecordBatch) -> None:
        """One of the batches that it was written as, after the others."""
        for kind, name, rows in unpack(batch):
            if kind == "outputs":
                self.outputs.load(name, rows)
            elif kind == "meta":
                fired, exact = rows.column("fired")[0].as_py(), rows.column("exact")[0].as_py()
                self.fired = exact if exact is not None else fired
                self._go_on()
            elif kind == "marks":
                self.windows.load_marks(name, rows)
            else:
                self._load(rows)
        self._note_saved()

    def _go_on(self) -> None:
        """What fired before does not fire again."""
        for _ in self.windows.fire(self.fired, closes=False):
            raise ValueError("a snapshot holds windows that have fired")

    def _load(self, rows: pa.Table) -> None:
        for each in rows.combine_chunks().to_batches():
            if isinstance(self.windows, CutSessions):
                self.windows.load(each)
                continue
            staged = each.cast(self.shape.staged)
            if isinstance(self.windows, CountedWindows):
                self.windows.load(staged)
            else:
                self.windows.insert([(Keys.from_arrow(staged.column(0)), staged)])

    def forget(self, writers: list[str]) -> None:
        for writer in writers:
            self.outputs.forget(writer)

    def close(self) -> None:
        self.spillable.close()

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        self.windows.validate()
        assert self.windows.newest is None or self.windows.count > 0


class _Frozen:
    """A slice as it was, to be written."""

    def __init__(self, store: WindowStore) -> None:
        exact = None if math.isinf(store.fired) else int(store.fired)
        meta = pa.table([[float(store.fired)], pa.array([exact], pa.int64())], schema=META)
        self._meta = [Part("meta", "", meta)]
        self._contents = store.windows.contents()
        self._marks = [Part("marks", name, rows) for name, rows in store.windows.marked()]
        self._outputs = store.outputs.pieces()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Once: what is on disk is read now. Each is for `load`, in this order."""
        contents = (Part("open", "", pa.Table.from_batches([each])) for each in self._contents)
        outputs = (Part("outputs", name, rows) for name, rows in self._outputs)
        return in_packs(chain(self._meta, contents, self._marks, outputs))

    def export(self) -> pa.RecordBatch:
        return pa.concat_batches(list(self.batches()))


def _together(fires: Iterator[Fired]) -> Iterator[list[Fired]]:
    """Pieces that are small in one, up to some bytes."""
    some: list[Fired] = []
    size = 0
    for each in fires:
        if len(each):
            some.append(each)
            size += each.nbytes
        if size > FIRED_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def joined(fired: list[Fired]) -> Fired:
    """All of them, of which there is at least one, as one."""
    if len(fired) == 1:
        return fired[0]
    return Fired(
        Keys.concat([each.keys for each in fired]),
        np.concatenate([each.starts for each in fired]),
        np.concatenate([each.ends for each in fired]),
        {name: pa.concat_arrays([each.columns[name] for each in fired]) for name in fired[0].columns},
    )


def nothing(shape: WindowShape) -> Fired:
    """No window, with the columns that one would have."""
    if shape.layout is not None:
        columns = shape.layout.results(shape.layout.zeros(0))
    else:
        empty = np.empty(0, np.int64)
        values = [pa.array([], field.type) for field in shape.values]
        columns = WholeWindows(shape.values, shape.aggregates).results(
            Rows(empty, values, np.zeros(1, np.int64))
        )
    if shape.has_ids:
        columns |= {SESSION_ID: pa.array([], pa.int64()), RETRACTED: pa.array([], pa.bool_())}
    keys = Keys.from_arrow(pa.array([], shape.key_type))
    return Fired(keys, np.empty(0, np.int64), np.empty(0, np.int64), columns)
