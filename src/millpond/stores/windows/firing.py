"""What one slice keeps of a resident whose epochs give rows back: what is open, what the last epochs gave, and how far it is."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import pyarrow as pa

from millpond.stores.keys import Keys
from millpond.stores.outputs import Outputs, Stored, tables_together
from millpond.stores.parts import Part, in_packs, unpack
from millpond.stores.windows.rowlog import InMemory, RowLog
from millpond.times import TIME_MIN, Progress
from millpond.wire.base import Turn

Portions = list[tuple[Keys, pa.RecordBatch]]
META = pa.schema({"fired": pa.float64(), "exact": pa.int64(), "dropped": pa.int64()})


class FiringStore(ABC):
    """One slice. Everything in it follows from the records of epochs, in their order. `fired` is the watermark.

    `dropped` counts rows that gave nothing, and never will.
    """

    def __init__(self, outputs: Outputs | None = None) -> None:
        self.outputs = outputs or Outputs()
        self.fired: Progress = -math.inf
        self.dropped = 0
        self._saved_until = TIME_MIN

    def begin_after(self, fired: Progress) -> None:
        """All up to there has come out, whether it was seen here or not: nothing of what was before is left."""
        if fired > self.fired:
            self.fired = fired
            self._go_on()

    def run(self, portions: Portions, watermark: Progress, closes: bool, time_kind: str) -> pa.Table | Stored:
        """Takes the rows of an epoch in, and gives what comes out of it. The watermark never falls; `closes` is its end.

        What is much goes to disk piece by piece as it is made, where there is one.
        """
        tables = tables_together(self._made(portions, watermark, closes, time_kind))
        return self.outputs.collect(tables, self.results(time_kind))

    def _made(
        self, portions: Portions, watermark: Progress, closes: bool, time_kind: str
    ) -> Iterator[pa.Table]:
        yield from self.take_in(portions, time_kind)
        self.fired = max(self.fired, watermark)
        yield from self.fire(math.inf if closes else self.fired, time_kind)

    def keep(self, writer: str, turn: Turn, rows: pa.Table | Stored) -> None:
        """What an epoch gave."""
        self.outputs.keep(writer, turn, rows)

    # What a kind adds

    @abstractmethod
    def results(self, time_kind: str) -> pa.Schema:
        """The columns of what comes out, as users get it."""

    @abstractmethod
    def take_in(self, portions: Portions, time_kind: str) -> Iterator[pa.Table]:
        """Rows of one epoch, in the form in which they are sent: what comes out at once. They are in at its end."""

    @abstractmethod
    def fire(self, watermark: Progress, time_kind: str) -> Iterator[pa.Table]:
        """What comes out because time has come so far; at its end what nothing can come out of any more is let go of."""

    @abstractmethod
    def contents(self) -> Iterator[pa.RecordBatch]:
        """All that is open now; what `restore` takes, in this order. What is on disk is read when it is asked for, whatever
        becomes of it here meanwhile.
        """

    @abstractmethod
    def restore(self, batch: pa.RecordBatch) -> None:
        """A part of the contents that it had."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How much is open."""

    @property
    @abstractmethod
    def newest(self) -> int | None:
        """When the last that is open comes out; None where nothing does by time alone."""

    @property
    @abstractmethod
    def oldest(self) -> int:
        """The earliest time that something here depends on; TIME_MAX if nothing is open."""

    @property
    @abstractmethod
    def reach(self) -> int:
        """Nothing that is open here depends on later times; TIME_MIN if nothing is open."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What is open takes in memory."""

    @property
    def logs(self) -> Sequence[RowLog]:
        """Where its rows are."""
        return ()

    @property
    def beside_bytes(self) -> int:
        """In memory, beside its logs: it cannot leave it."""
        return 0

    @property
    def spillables(self) -> Sequence[InMemory]:
        return [*self.logs, self.outputs]

    @property
    def staying_bytes(self) -> int:
        return self.beside_bytes + sum(log.staying_bytes for log in self.logs)

    # As checkpoints see it

    @property
    def dirty_share(self) -> float:
        """What is open comes and goes as a whole: a snapshot of it is a base, whatever a delta may take."""
        return math.inf

    def clean(self) -> None:
        self.outputs.clean()
        self._note_saved()

    def _note_saved(self) -> None:
        self._saved_until = self.reach

    def needs_saved(self, writers: Collection[str], oldest: int) -> bool:
        """Whether the last snapshot holds what is nowhere else: something that depends on times from `oldest` on, or what
        the last turns of one of these writers gave.
        """
        return self._saved_until >= oldest or not self.outputs.are_new(writers)

    @property
    def live_bytes(self) -> int:
        """What a snapshot would take, about."""
        return self.beside_bytes + sum(log.live_bytes for log in self.logs)

    def copy(self) -> Contents:
        """All of it as it is now, to be written."""
        return Contents(self)

    def export(self) -> pa.RecordBatch:
        return self.copy().export()

    def load(self, batch: pa.RecordBatch) -> None:
        """One of the batches that it was written as, after the others."""
        for kind, name, rows in unpack(batch):
            if kind == "outputs":
                self.outputs.load(name, rows)
            elif kind == "meta":
                fired, exact, self.dropped = (rows.column(each)[0].as_py() for each in META.names)
                self.fired = exact if exact is not None else fired
                self._go_on()
            else:
                for each in rows.combine_chunks().to_batches():
                    self.restore(each)
        self._note_saved()

    def _go_on(self) -> None:
        """Before anything is open: what has come out does not come out again."""
        for _ in self.fire(self.fired, ""):
            raise ValueError("a snapshot holds what has fired")

    def forget(self, writers: Sequence[str]) -> None:
        for writer in writers:
            self.outputs.forget(writer)

    def close(self) -> None:
        for log in self.logs:
            log.close()

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for log in self.logs:
            log.validate()
        assert self.dropped >= 0


class Contents:
    """A slice as it was, to be written piece by piece: rows are immutable, and files stay as long as they are read."""

    def __init__(self, store: FiringStore) -> None:
        exact = None if math.isinf(store.fired) else int(store.fired)
        row = [[float(store.fired)], [exact], [store.dropped]]
        meta = pa.table([pa.array(v, f.type) for v, f in zip(row, META, strict=True)], schema=META)
        self._meta = [Part("meta", "", meta)]
        self._contents = store.contents()
        self._outputs = store.outputs.pieces()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Once: what is on disk is read now. Each is for `load`, in this order."""
        contents = (Part("open", "", pa.Table.from_batches([each])) for each in self._contents)
        outputs = (Part("outputs", name, rows) for name, rows in self._outputs)
        return in_packs(chain(self._meta, contents, outputs))

    def export(self) -> pa.RecordBatch:
        return pa.concat_batches(list(self.batches()))
