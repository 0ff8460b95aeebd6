"""The container's core: a state machine without sockets, files or clock.

An epoch passes through it in three steps. *Stage* keeps rows aside, under the attempt that sent them.
*Prepare* picks the attempts that count and has the holding do all that may fail; the shell makes the record durable.
*Apply* makes the epoch visible, once the coordinator has decided it. Slices come by `install` and go by `release`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millpond.container.holdings import holding_of
from millpond.container.holdings.base import CheckedRows, HeldSlice, Holding, Means, Ready, Record
from millpond.container.holdings.load import Load
from millpond.container.room import ROOM_SHARE
from millpond.container.staging import (
    PART_BYTES,
    STAGED_BYTES_MAX,
    Arrival,
    Staged,
    StagedEpoch,
    StagedPart,
)
from millpond.errors import BadMessage, ResidentBroken, StageLost, UnknownResident
from millpond.wire.base import ResidentId, SliceId, Term, Turn
from millpond.wire.connection import SlicedBatch
from millpond.wire.epochs import Apply, Prepare, Prepared, Stage, StageDone
from millpond.wire.specs import Resident

# A checkpoint waits so long for a slice in which an epoch runs.
BUSY_S_MAX = 0.5


class Logged(NamedTuple):
    """An epoch that is prepared: durable as number `seq` of the log, and not decided as far as is known here."""

    seq: int
    ready: Ready


class CheckpointPlan(NamedTuple):
    """Every log record up to `covered` is applied or void.

    `dirty` are the slices to snapshot; `clean` those that are as their snapshots hold them, with where writers stood,
    by the resident's id. Those that are `behind` go on resting on the log: torn, broken or busy; or of a resident that is
    `resting` there of its own accord, and needs the records after a number.
    """

    covered: int
    dirty: list[tuple[Holding[Any], SliceId]]
    clean: dict[tuple[ResidentId, SliceId], dict[str, Turn]]
    behind: set[tuple[ResidentId, SliceId]]
    resting: dict[ResidentId, int]


class Core:
    """Bookkeeping is guarded by one lock, held briefly; the work on slices by a lock each.

    The caller sees to it that steps of one resident's epochs do not overlap.
    """

    def __init__(self, container: int, term: Term, pond_slices: int, means: Means | None = None) -> None:
        self.container = container
        self.term = term
        self.pond_slices = pond_slices
        self.owned: set[SliceId] = set()
        self.holdings: dict[str, Holding[Any]] = {}
        self.rows_applied = 0
        self.rows_fetched = 0
        self.retired: dict[SliceId, Load] = {}
        """What residents that were dropped did in slices that are here: counts do not fall."""
        self.seq = 0
        self._means = means or Means()
        self._lock = self._means.lock()
        self._staged = Staged(min(STAGED_BYTES_MAX, self._means.memory // ROOM_SHARE))
        self._logged: dict[str, Logged] = {}
        # Numbers of records that are written while their epochs still run.
        self._numbered: dict[str, int] = {}
        # Of each resident, the lowest number that still counts.
        self._ballots: dict[str, int] = {}
        self.void: set[int] = set()
        """Numbers of records that will never be decided."""

    # Residents and slices

    def add(self, resident: Resident) -> None:
        """A resident that is new, or has grown."""
        with self._lock:
            holding = self.holdings.get(resident.spec.name)
            if holding is None or holding.resident.born < resident.born:
                holding = holding_of(resident, self.pond_slices, self._means)
                holding.slices = {number: holding.new_slice() for number in holding.places(self.owned)}
                self.holdings[resident.spec.name] = holding
                return
        if holding.resident.born == resident.born:
            holding.extend(resident)

    def drop(self, name: str, born: int) -> Holding[Any] | None:
        """Lets go of a resident; of a later one of the same name nothing."""
        with self._lock:
            holding = self.holdings.get(name)
            if holding is None or holding.resident.born > born:
                return None
            del self.holdings[name]
            logged = self._logged.pop(name, None)
            if logged is not None:
                self.void.add(logged.seq)
            for number, held in holding.slices.items():
                self.retired.setdefault(number, Load()).add(held.load)
            self._staged.forget(lambda epoch: epoch.resident == name)
            return holding

    def install(self, slices: Mapping[SliceId, Mapping[str, HeldSlice[Any]]]) -> None:
        """These slices are served from now on: of each, what was rebuilt of each resident. New ones begin empty."""
        with self._lock:
            for holding in self.holdings.values():
                held = dict(holding.slices)
                for number in holding.places(slices):
                    held[number] = slices[number].get(holding.name) or holding.new_slice()
                    held[number].load = Load()  # what was replayed was counted where it was done
                holding.slices = held
                # Where they come from, word that a resident has grown may not have come yet.
                for number in holding.places(slices):
                    with held[number].lock:
                        holding.fit(held[number])
            self.owned |= set(slices)

    def release(self, slices: Collection[SliceId]) -> dict[SliceId, dict[str, HeldSlice[Any]]]:
        """These slices are served no more; what was held of them, as decided epochs left it. What was staged for those who
        had them is forgotten, and so is what was prepared: it will not be decided.
        """
        with self._lock:
            gone = set(slices) & self.owned
            prepared = [name for name in self._logged if gone.intersection(self.holdings[name].slices)]
        for name in prepared:
            self._undo(name)
        with self._lock:
            released: dict[SliceId, dict[str, HeldSlice[Any]]] = {number: {} for number in gone}
            for name, holding in self.holdings.items():
                for number in gone.intersection(holding.slices):
                    released[number][name] = holding.slices[number]
            self.owned -= gone
            self.retired = {number: load for number, load in self.retired.items() if number not in gone}
            concerned = {name for name, holding in self.holdings.items() if gone.intersection(holding.slices)}
            for name in concerned:
                holding = self.holdings[name]
                holding.slices = {n: held for n, held in holding.slices.items() if n not in gone}
            self._staged.forget(lambda epoch: epoch.resident in concerned)
            return released

    def holding(self, name: str) -> Holding[Any]:
        try:
            return self.holdings[name]
        except KeyError:
            raise UnknownResident(f"there is no {name!r} in this pond", resident=name) from None

    # An epoch's way in

    def stage(self, message: Stage, batches: Iterator[SlicedBatch], now_s: float) -> StageDone:
        """Keeps rows aside. The same attempt sent again replaces what it sent before."""
        holding = self.holding(message.resident)
        epoch = StagedEpoch(message.resident, message.writer, message.turn)
        arrival = Arrival(epoch, message.partition, now_s)
        parts: list[CheckedRows] = []
        digest = 0
        try:
            self._staged.admit(arrival, PART_BYTES, self._is_known)
            for sliced in batches:
                self._staged.admit(arrival, sliced.batch.nbytes, self._is_known)
                checked, own = holding.check(sliced)
                digest += own
                parts.append(checked)
            part = StagedPart(parts, digest % (1 << 64), now_s)
            with self._lock:
                # A slice may have gone since its rows were checked.
                for checked in parts:
                    holding.check_counts(checked.counts)
                # What comes after its epoch was applied is a zombie's, and nobody will ask for it.
                if not holding.has_seen(message.writer, message.turn):
                    # An epoch begins when the one before is decided: nobody will ask for that one's any more.
                    self._staged.forget(lambda other: other[:2] == epoch[:2] and other.turn < epoch.turn)
                    self._staged.keep(arrival, message.attempt, part)
        finally:
            self._staged.leave(arrival)
        return StageDone(rows=part.rows, digest=part.digest)

    def _is_known(self, epoch: StagedEpoch) -> bool:
        """Whether the writer had an epoch applied here before."""
        holding = self.holdings.get(epoch.resident)
        return holding is not None and any(epoch.writer in held.vector for held in holding.slices.values())

    def begin(self, message: Prepare) -> Record | Prepared:
        """The record to prepare, or the answer itself if it is prepared already. What was prepared before is void."""
        holding = self.holding(message.resident)
        if holding.broken is not None:
            raise holding.broken
        holding.check_work(message.work)
        with self._lock:
            if holding.has_seen(message.writer, message.turn):
                raise BadMessage(f"epoch {message.turn} of {message.writer} is applied already")
            logged = self._logged.get(message.resident)
            if logged is not None and logged.ready.record.ballot == message.ballot:
                return self._prepared(logged.ready.record)
            if message.ballot < self._ballots.get(message.resident, 0):
                raise StageLost(f"epoch {message.turn} was asked for too late", container=self.container)
            self._ballots[message.resident] = message.ballot
            epoch = StagedEpoch(message.resident, message.writer, message.turn)
            chosen = self._staged.find(epoch, message.attempts)
            if None in chosen:
                raise StageLost(
                    f"container {self.container} does not hold what was staged for epoch {message.turn}",
                    container=self.container,
                )
            parts = [part for staged in chosen if staged for part in staged.parts]
            self._check_owned(holding, message.turn, parts)
        self._undo(message.resident, message.ballot)
        digest = sum(staged.digest for staged in chosen if staged) % (1 << 64)
        return Record(
            message.resident, message.writer, message.turn, message.ballot, digest, message.work, parts
        )

    def _check_owned(self, holding: Holding[Any], turn: Turn, parts: Sequence[CheckedRows]) -> None:
        """Rows of a slice that is not here would be decided, and lost. The caller holds the lock."""
        for part in parts:
            gone = set(np.flatnonzero(part.counts).tolist()).difference(holding.slices)
            if gone:
                raise StageLost(
                    f"slices {sorted(gone)} went to other containers after epoch {turn} was staged",
                    container=self.container,
                )

    def number(self, resident: str) -> int:
        """The number of the resident's next record. From here on no checkpoint covers it, until it is `logged`."""
        with self._lock:
            self._numbered[resident] = self.seq + 1
            return self.seq + 1

    def not_written(self, seq: int) -> None:
        """The record could not be made durable under the number that it was to have."""

    def logged(self, seq: int, ready: Ready) -> Prepared:
        """The record is durable under that number, and all that may fail is done."""
        with self._lock:
            record = ready.record
            self._numbered.pop(record.resident, None)
            self._logged[record.resident] = Logged(seq, ready)
            self.holding(record.resident).logged(seq, record)
            # The attempts that count are in the record now; the others were zombies'.
            self._forget_staged(record.resident, record.writer, record.turn)
            return self._prepared(record)

    def refused(self, record: Record, seq: int | None = None) -> None:
        """The record could not be prepared, if it is logged under that number: whoever tries again stages again."""
        with self._lock:
            self._numbered.pop(record.resident, None)
            if seq is not None:
                self.void.add(seq)
            self._forget_staged(record.resident, record.writer, record.turn)

    def discard(self, resident: str, ballot: int) -> None:
        """Forgets a prepared epoch. Its record stays in the log, undecided, until the log is truncated."""
        with self._lock:
            self._ballots[resident] = max(ballot + 1, self._ballots.get(resident, 0))
        self._undo(resident, ballot + 1)

    def _undo(self, resident: str, below: float = math.inf) -> None:
        """What was prepared under a number below that will not be decided."""
        with self._lock:
            logged = self._logged.get(resident)
            if logged is None or logged.ready.record.ballot >= below:
                return
            del self._logged[resident]
            self.void.add(logged.seq)
        self.holding(resident).undo(logged.ready)

    def apply(self, message: Apply) -> None:
        """Makes a prepared epoch visible; an epoch that is visible already changes nothing."""
        holding = self.holding(message.resident)
        with self._lock:
            if holding.has_seen(message.writer, message.turn):
                holding.epochs = max(holding.epochs, message.number)
                return
            logged = self._logged.get(message.resident)
        if logged is None or logged.ready.record.ballot != message.ballot:
            raise StageLost(
                f"container {self.container} has not prepared epoch {message.turn}", container=self.container
            )
        if any(held.torn for held in holding.slices.values()):
            # Not `Unavailable`: waiting does not help, the container has to begin anew.
            raise StageLost(
                f"epoch {message.turn} failed half-way in container {self.container}",
                container=self.container,
            )
        rows = holding.apply(logged.ready)
        with self._lock:
            holding.epochs = max(holding.epochs, message.number)
            if self._logged.get(message.resident) is logged:
                del self._logged[message.resident]
            self._forget_staged(message.resident, message.writer, message.turn)
            self.rows_applied += rows

    # Upkeep

    def plan_checkpoint(self, may_rest: Callable[[Holding[Any], int], bool] | None = None) -> CheckpointPlan:
        """`may_rest` says whether a resident may rest on the records after a number."""
        with self._lock:
            covered = min((seq - 1 for seq in self.unfinished()), default=self.seq)
            holdings = [holding for _, holding in sorted(self.holdings.items())]
        plan = CheckpointPlan(covered, [], {}, set(), {})
        for holding in holdings:
            after = None if may_rest is None or holding.broken is not None else holding.rests_after(covered)
            if after is not None and may_rest is not None and may_rest(holding, after):
                plan.resting[holding.resident.id] = after
                plan.behind.update((holding.resident.id, number) for number in holding.slices)
                continue
            for number, held in sorted(holding.slices.items()):
                # Not a slice in which user code runs for long: it stays behind, and all others go on.
                if holding.broken is not None or not held.lock.acquire(timeout=BUSY_S_MAX):
                    plan.behind.add((holding.resident.id, number))
                    continue
                try:
                    if held.torn:
                        plan.behind.add((holding.resident.id, number))
                    elif held.dirty:
                        plan.dirty.append((holding, number))
                    else:
                        plan.clean[holding.resident.id, number] = dict(held.vector)
                finally:
                    held.lock.release()
        return plan

    def unfinished(self) -> list[int]:
        """Numbers of records that are neither applied nor void. The caller holds the lock."""
        return [*(logged.seq for logged in self._logged.values()), *self._numbered.values()]

    def undecided(self) -> list[int]:
        """Numbers of records that were not decided, as far as is known here. The caller holds the lock."""
        return self.unfinished()

    def expire(self, now_s: float) -> None:
        with self._lock:
            self._staged.expire(now_s)

    @property
    def rows_staged(self) -> int:
        with self._lock:
            return self._staged.rows

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        self._staged.validate()
        for name, holding in self.holdings.items():
            assert sorted(holding.slices) == holding.places(self.owned), name
            assert not any(held.torn for held in holding.slices.values()), name
            holding.validate()
            logged = self._logged.get(name)
            undecided = [held for held in holding.slices.values() if held.undecided is not None]
            assert not undecided or logged is not None, name
            if logged is not None:
                assert 0 < logged.seq <= self.seq, name
                assert not holding.has_seen(logged.ready.record.writer, logged.ready.record.turn)

    def _forget_staged(self, resident: str, writer: str, upto: Turn) -> None:
        """The caller holds the lock."""
        self._staged.forget(lambda epoch: epoch[:2] == (resident, writer) and epoch.turn <= upto)

    def _prepared(self, record: Record) -> Prepared:
        return Prepared(term=self.term, rows=record.rows, digest=record.digest)


def broken(name: str, what: str, error: BaseException) -> ResidentBroken:
    """Why a resident does not answer, though all that was acknowledged is in the log."""
    return ResidentBroken(
        f"{name!r} could not be rebuilt: {what}: {type(error).__name__}: {error}",
        hint="nothing is lost: open the pond again when the cause is mended, such as too little memory",
        resident=name,
    )
