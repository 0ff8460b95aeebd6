"""What a container holds of one resident, whatever its kind: the protocol, and what all kinds have in common.

A kind is a module of this package: a `Holding`, which also says how one is opened. `KINDS` finds it by the spec.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.container.holdings.load import Load
from millpond.errors import BadMessage, Moved, Unavailable, UnknownTable, not_trusted
from millpond.runtime import Lock
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.keys import Keys
from millpond.stores.windows.spilling import Spilling
from millpond.times import Progress
from millpond.wire.base import Exchange, Read, SliceId, Turn
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.specs import Resident, Spec, Work


class Runner(Protocol):
    """Does `work` on every item, perhaps on several threads; returns when all is done, raises what work raised."""

    threads: int

    def __call__(self, work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None: ...

    def resize(self, threads: int) -> None:
        """So many threads from now on; what has begun goes on as it is."""


class Serially:
    """One thread, whatever is asked for."""

    threads = 1

    def __call__(self, work: Callable[[Any], None], items: Sequence[Any], rows: int) -> None:
        for item in items:
            work(item)

    def resize(self, threads: int) -> None:
        pass


class Watched(Protocol):
    """A piece of work that says how it is getting on. It is asked from another thread."""

    seconds_max: float | None
    memory_max: int | None
    before_s: float
    """What earlier pieces took of the time that all have together."""

    @property
    def spent_s(self) -> float: ...

    @property
    def grown_bytes(self) -> int: ...

    def where(self) -> str:
        """What it is at, as in "at event 3"; empty if it cannot tell."""

    def stop(self) -> None:
        """It has to end: compiled code of it does so as soon as it looks, if it looks."""


class Limits(Protocol):
    """Runs what may contain user code, and ends it when it takes too long."""

    def run(self, what: str, work: Callable[[], _T], watched: Watched | None = None) -> _T: ...

    def doom(self, why: str) -> None:
        """The process must end, and begin anew from what is durable."""


class Unlimited:
    def run(self, what: str, work: Callable[[], _T], watched: Watched | None = None) -> _T:
        return work()

    def doom(self, why: str) -> None:
        pass


class NoCode:
    """For a root whose code is not trusted: what may contain user code is not run."""

    def run(self, what: str, work: Callable[[], _T], watched: Watched | None = None) -> _T:
        raise not_trusted(f"{what} would run code")

    def doom(self, why: str) -> None:
        pass


class Bounds(NamedTuple):
    """How far the files of slices may grow before they are made fewer or smaller. A share is of what a base takes."""

    log_bytes: int = 64 << 20
    log_records: int = 512
    deltas: int = 16
    """Files of a slice behind its base, before they become one."""
    deltas_share: float = 0.5
    """What these may take before they become part of the base."""
    deltas_bytes: int = 64 << 10
    """What they may take in any case."""
    delta_share: float = 0.5
    """What of a slice may have changed before it is written whole."""


class Means(NamedTuple):
    """What a container works with: threads for slices, limits on user code, locks, memory for what it holds, files' bounds."""

    run: Runner = Serially()
    limits: Limits = Unlimited()
    lock: Callable[[], Lock] = threading.RLock
    sleep: Callable[[float], None] = time.sleep
    wall_s: Callable[[], float] = time.time
    """Seconds since 1970: for what is remembered over a restart."""

    memory: int = 16 << 30
    memory_max: int = 0
    """What the process may take altogether; 0 where nothing limits it."""

    bounds: Bounds = Bounds()
    spilling: Spilling | None = None
    """Where rows of windows go that memory has no room for."""

    @property
    def threads(self) -> int:
        return self.run.threads

    @property
    def runs_code(self) -> bool:
        """Where it does not, a holding must not even compile what its resident's spec brings."""
        return not isinstance(self.limits, NoCode)


class RoundsOf(Protocol):
    """How an epoch that several containers run goes on from one round to the next. `owners` tell who has which slice."""

    owners: Mapping[SliceId, int]
    here: int
    """This container."""

    def exchange(
        self, rows: Mapping[int, Sequence[SlicedBatch]], counts: Sequence[int]
    ) -> tuple[list[SlicedBatch], list[int]]:
        """Sends the rows of a round to others, by container, and waits for theirs: all that came; and numbers, with those of
        all others added. StageLost if one of them does not go on.
        """


class CheckedRows(NamedTuple):
    """A batch that was checked: rows grouped by slice, `counts[slice]` each, and their keys with their hashes."""

    batch: pa.RecordBatch
    counts: npt.NDArray[np.int32]
    keys: Keys | None = None

    def cut(self, slices: Iterable[SliceId]) -> CheckedRows:
        """The rows of these slices alone."""
        slices = list(slices)
        if int(self.counts[slices].sum(dtype=np.int64)) == self.batch.num_rows:
            return CheckedRows(self.batch, self.counts)
        chosen = np.zeros(len(self.counts), np.bool_)
        chosen[list(slices)] = True
        starts = np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))
        mine = np.flatnonzero(chosen & (self.counts > 0))
        parts = [self.batch.slice(starts[n], self.counts[n]) for n in mine.tolist()]
        batch = pa.concat_batches(parts) if parts else self.batch.slice(0, 0)
        return CheckedRows(batch, np.where(chosen, self.counts, 0).astype(np.int32))


class Record(NamedTuple):
    """One epoch's rows in this container, as the log keeps them."""

    resident: str
    writer: str
    turn: Turn
    ballot: int
    digest: int
    work: Work
    parts: list[CheckedRows]
    came: int | None = None
    """How many rows were staged, where the record holds what came of them."""

    @property
    def rows(self) -> int:
        return sum(part.batch.num_rows for part in self.parts) if self.came is None else self.came

    def cut(self, slices: Iterable[SliceId]) -> Record:
        """What the record tells of these slices. The digest stays that of the whole."""
        slices = list(slices)
        return self._replace(parts=[part.cut(slices) for part in self.parts])


class Frozen(Protocol):
    """What does not change any more while it is written."""

    def export(self) -> pa.RecordBatch: ...


@runtime_checkable
class InPieces(Frozen, Protocol):
    """What may be more than memory has room for."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """One at least, made one by one, once. A store loads them one after the other."""


def pieces_of(frozen: Frozen) -> Iterator[pa.RecordBatch]:
    return frozen.batches() if isinstance(frozen, InPieces) else iter([frozen.export()])


class Store(Protocol):
    """What a slice holds, as far as checkpoints go. It knows what has changed since it was last `clean`."""

    @property
    def dirty_share(self) -> float:
        """How much of it has changed, of 1."""

    def clean(self) -> None:
        """All that there is is saved. Of what an undecided epoch has done, nothing counts as a change yet."""

    def copy(self) -> Any: ...

    def export(self) -> pa.RecordBatch: ...

    def load(self, batch: pa.RecordBatch) -> None: ...

    def validate(self) -> None: ...


class Revert(Protocol):
    """Takes back what an epoch that is not decided has done to a store, or to a copy of it."""

    def __call__(self, store: Any) -> None: ...


class Saved(NamedTuple):
    """The files that hold a slice: its base, and deltas in their order; with their bytes."""

    base: str
    base_bytes: int
    deltas: tuple[str, ...] = ()
    delta_bytes: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        return (self.base, *self.deltas)


def load_pieces(holding: Holding[Any], held: HeldSlice[Any], batches: Iterable[pa.RecordBatch]) -> None:
    """A slice that is being rebuilt takes in what `pieces_of` another gave."""
    for batch in batches:
        held.store.load(batch)
        holding.loaded(held)


_S = TypeVar("_S", bound=Store)
_T = TypeVar("_T")


class HeldSlice(Generic[_S]):
    """One slice of one resident. `vector` is `{writer: newest turn applied here}`.

    `saved` are the files that hold it, but for what made it `dirty`; what they hold does not count where it must be
    written `anew`. `undecided` takes back the epoch that has run here and is not decided. While `torn` is set, an epoch
    is being applied, or was and failed half-way: whoever takes the lock and finds it set must not look further.
    `asking` are those who want the lock for a short while: who needs it for long lets them have it now and then.
    """

    __slots__ = ("anew", "asking", "dirty", "load", "lock", "saved", "store", "torn", "undecided", "vector")

    def __init__(self, store: _S, lock: Lock) -> None:
        self.store: _S = store
        self.lock = lock
        self.load = Load()
        self.vector: dict[str, Turn] = {}
        self.dirty = False
        self.saved: Saved | None = None
        self.anew = False
        self.torn = False
        self.undecided: Revert | None = None
        self.asking: set[object] = set()

    def has_seen(self, writer: str, turn: Turn) -> bool:
        newest = self.vector.get(writer)
        return newest is not None and newest >= turn

    @contextmanager
    def changing(self, writer: str, turn: Turn) -> Iterator[None]:
        """What is done within is that turn's doing: seen once it has come to its end, and torn if it does not."""
        self.torn = True
        yield
        self.vector[writer] = turn
        self.torn = False

    def check_whole(self) -> None:
        """Before anything is read. The caller holds the lock."""
        if self.torn:
            raise Unavailable("an epoch failed half-way here", hint="the slice is rebuilt", address="")

    def decided_copy(self) -> _S:
        """All that is decided, to be read while this slice goes on. The caller holds the lock."""
        self.check_whole()
        copy: _S = self.store.copy()
        if self.undecided is not None:
            self.undecided(copy)
        return copy

    def write_anew(self) -> None:
        """No file that there is holds what a delta would go on from."""
        self.dirty = self.anew = True


class Size(NamedTuple):
    nbytes: int
    keys: int


class Ready(NamedTuple):
    """An epoch of which everything that may fail is done. What the kind adds is handed to its `apply`."""

    record: Record
    made: Any = None


class Holding(ABC, Generic[_S]):
    """What a container holds of one resident: a `HeldSlice` for each of its slices that the container owns.

    Epochs come one at a time: *check* when rows are staged, *prepare* when they are logged, then *apply* or *undo*.
    """

    snapshot_schema: pa.Schema
    work_type: ClassVar[type[Work]]
    """What its epochs bring."""
    in_pieces = False
    """Whether snapshots, each of which is whole, may be many batches."""
    sweeps_code = False
    """Whether upkeep runs user code."""

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        self.resident = resident
        self.pond_slices = pond_slices
        self.means = means
        self.slices: dict[SliceId, HeldSlice[_S]] = {}
        self.broken: Exception | None = None
        self.epochs = resident.epochs
        """How many of the resident's epochs are visible here, of all that were decided."""
        self.sizes: dict[SliceId, Size] = {}
        """Of the slices, as of the last `figures`."""

    @property
    def spec(self) -> Spec:
        return self.resident.spec

    @property
    def name(self) -> str:
        return self.resident.spec.name

    def places(self, slices: Iterable[SliceId]) -> list[SliceId]:
        """Those of the slices in which the resident is."""
        everywhere = set(self.resident.spec.places(self.pond_slices))
        return sorted(everywhere.intersection(slices))

    def new_slice(self) -> HeldSlice[_S]:
        return HeldSlice(self.new_store(), self.means.lock())

    def has_seen(self, writer: str, turn: Turn) -> bool:
        """Whether every slice here has; where there is none, nothing was seen."""
        slices = list(self.slices.values())
        return bool(slices) and all(held.has_seen(writer, turn) for held in slices)

    def held(self, number: SliceId) -> HeldSlice[_S]:
        if self.broken is not None:
            raise self.broken
        try:
            return self.slices[number]
        except KeyError:
            raise Moved(f"slice {number} is not served here", slice_id=number) from None

    def each_held(self, numbers: Sequence[SliceId]) -> list[HeldSlice[_S]]:
        if self.broken is None:
            slices = self.slices
            with suppress(KeyError):
                return [slices[number] for number in numbers]
        return [self.held(number) for number in numbers]

    def check_seen(self, born: int, epochs: int) -> None:
        """Who knows of more epochs than are visible here is not answered; nor who knows of a later resident of this name.

        Who knows of an earlier one is: what is here counts.
        """
        own = self.resident.born
        if born > own:
            raise Unavailable(
                f"{self.name!r} was made anew, of which this container has not heard",
                hint="try again in a moment",
                address="",
            )
        if born in (0, own) and epochs > self.epochs:
            # It was stopped while its slices went elsewhere, or is about to hear of its last epoch.
            raise Unavailable(
                f"{self.epochs} epochs of {self.name!r} are visible here, and {epochs} are asked about",
                hint="try again in a moment",
                address="",
            )

    def check_counts(self, counts: npt.NDArray[np.int32]) -> None:
        if len(counts) != self.pond_slices:
            raise BadMessage(f"a batch counts its rows for {len(counts)} slices, not {self.pond_slices}")
        for number in np.flatnonzero(counts).tolist():
            if self.broken is not None or number not in self.slices:
                self.held(SliceId(number))

    def loaded(self, held: HeldSlice[_S]) -> None:
        """A slice that is being rebuilt has what its snapshot holds."""

    def forget(self, writers: Sequence[str]) -> None:
        """Lets go of what is remembered of writers that send no more."""
        for held in list(self.slices.values()):
            with held.lock:
                for writer in writers:
                    held.vector.pop(writer, None)
                held.dirty = True

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for held in self.slices.values():
            held.store.validate()

    def check_work(self, work: Work) -> None:
        if not isinstance(work, self.work_type):
            raise BadMessage(f"{self.name} is a {self.spec.kind}: it takes no {work.__struct_config__.tag}")

    def schema_of(self, names: Sequence[str], work: Work) -> pa.Schema:
        """The columns of an epoch's rows that have these names."""
        self.check_work(work)
        return self.columns_of(names, work)

    # What a kind says of itself

    @staticmethod
    @abstractmethod
    def opened(spec: Any, existing: Any, others: Sequence[Spec], owners: Sequence[int]) -> Spec:
        """The spec under which the resident goes on; SchemaMismatch if what exists is something else.

        `others` are the pond's other residents, `owners` the containers of all slices.
        """

    @staticmethod
    def after(spec: Any, work: Any) -> Spec:
        """The spec under which the resident goes on when an epoch with that work is decided; StageLost if it was made for
        another one.
        """
        known: Spec = spec
        return known

    @staticmethod
    def version_of(work: Work) -> str:
        """What tells the code that an epoch brings from other code; empty where it brings none, or nobody asks."""
        return ""

    @staticmethod
    def without(spec: Any, table: str) -> Spec | None:
        """The spec without that table; None if then there is nothing left. UnknownTable if it has none."""
        raise UnknownTable(f"{spec.name!r} is a {spec.kind}: it has no table {table!r}", table=table)

    @abstractmethod
    def new_store(self) -> _S: ...

    def extend(self, resident: Resident) -> None:
        """The resident was opened again, and may have grown."""
        if resident.spec != self.resident.spec:
            raise BadMessage(f"{resident.spec.name} is held here with another schema")

    def fit(self, held: HeldSlice[_S]) -> None:
        """Makes a slice one of the resident as it is now, if it is of the resident before it grew. The caller holds its lock."""

    def is_stale(self, snapshot: pa.RecordBatch) -> bool:
        """Whether a snapshot holds what the resident does not have any more."""
        return False

    def concerns(self, counts: Sequence[Sequence[int]], number: SliceId) -> bool:
        """Whether an epoch with that many rows, by batch and slice, leaves anything in the slice."""
        return any(of_batch[number] for of_batch in counts)

    @abstractmethod
    def delta(self, held: HeldSlice[_S]) -> Frozen:
        """What has changed in a slice since it was last clean, as far as it is decided. The caller holds its lock."""

    @abstractmethod
    def merged(self, files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
        """What files of a slice hold together, oldest first: a base and deltas if `whole`, else deltas, and then one."""

    @abstractmethod
    def columns_of(self, names: Sequence[str], work: Any) -> pa.Schema:
        """The columns of an epoch's rows that have these names."""

    @abstractmethod
    def check(self, rows: SlicedBatch) -> tuple[CheckedRows, int]:
        """Rows as the resident takes them, and their digest; an error if they are not."""

    def stamped(self, record: Record) -> Record:
        """The record as it is logged, with what its kind notes in it."""
        return record

    def logged(self, seq: int, record: Record) -> None:
        """The record is durable under that number."""

    def rests_after(self, covered: int) -> int | None:
        """Of the log, which is applied up to there: the number after which records are needed to rebuild all slices. None
        for a kind that rests on snapshots.
        """
        return None

    @property
    def live_bytes(self) -> int:
        """Of a kind that may rest on the log: what a snapshot of it would take, about."""
        return 0

    @abstractmethod
    def prepare(self, record: Record) -> Ready:
        """Does all that may fail. What it changes is not seen, and `undo` takes it back."""

    def run(self, record: Record, rounds: RoundsOf) -> Ready:
        """In place of `prepare`, where the spec says that containers run epochs together: the record that it is ready with
        is the one to be logged.
        """
        raise BadMessage(f"{self.name} is a {self.spec.kind}: its epochs do not run in rounds")

    def undo(self, ready: Ready) -> None:
        """The epoch will not be decided."""

    @abstractmethod
    def apply(self, ready: Ready) -> int:
        """Makes a decided epoch visible. Returns its rows."""

    @abstractmethod
    def replay(self, record: Record, slices: Mapping[SliceId, HeldSlice[_S]]) -> int:
        """Applies a decided record to slices that are being rebuilt, where they have not seen it. Returns its rows."""

    @abstractmethod
    def exchange(self, message: Exchange[Any], rows: SlicedBatch, budget: Budget = UNLIMITED) -> Answer[Any]:
        """Answers a question that comes with rows. What the answer takes is claimed from the budget first."""

    @abstractmethod
    def read(self, message: Read) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        """Answers a question that is answered with rows."""

    def advance(self, fetch_progress: Progress, final_below: Progress) -> None:
        """F and the time below which no update comes any more. Neither falls."""

    @property
    def progress(self) -> tuple[Progress, Progress]:
        """F, and the time below which no update comes any more, as far as is known here."""
        return -math.inf, -math.inf

    def sweep(self, number: SliceId, budget: int) -> bool:
        """A bounded piece of upkeep of a slice. True when there is nothing left to do."""
        return True

    def size(self, held: HeldSlice[_S]) -> Size:
        """What a slice takes; as of the last `figures`, where that is not known at any time."""
        return Size(0, 0)

    def report(self) -> dict[str, Any]:
        """Figures, or why there are none."""
        return self.figures() if self.broken is None else {"broken": str(self.broken)}

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Those of a name in several containers are added up."""
