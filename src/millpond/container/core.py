"""The container's core: a state machine without sockets, files or clock.

An epoch passes through it in three steps. *Stage* keeps rows aside, under the attempt that sent them.
*Prepare* picks the attempts that count and gives back a log record, which the shell makes durable and
returns by `appended`. *Apply* makes the rows visible, once the coordinator has decided the epoch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa

from millpond.code.rules import FetchRule
from millpond.container.group import HeldGroup
from millpond.container.held import HeldState, Record, Runner, run_serially
from millpond.errors import BadMessage, GroupBroken, StageLost, UnknownState
from millpond.wire.connection import SlicedBatch
from millpond.wire.messages import Apply, GroupSpec, Prepare, Prepared, Spec, Stage, Staged

# Of one partition: the one that counts, its speculative twin, and some zombies.
ATTEMPTS_KEPT = 8


class Append(NamedTuple):
    """An effect: make `record` durable as number `seq` of the log, then call `appended`."""

    seq: int
    record: Record


class StagedPart(NamedTuple):
    batches: list[SlicedBatch]
    digest: int


class CheckpointPlan(NamedTuple):
    """Every log record up to `covered` is applied; `vector` is where each writer stood then."""

    covered: int
    dirty: list[tuple[str, int]]
    vector: dict[str, dict[str, int]]


class Core:
    """Bookkeeping is guarded by one lock, held briefly; the work on slices by a lock each."""

    def __init__(
        self,
        container: int,
        term: int,
        slices: list[int],
        pond_slices: int,
        run: Runner = run_serially,
        threads: int = 1,
    ) -> None:
        self.container = container
        self.term = term
        self.owned = sorted(slices)
        self.pond_slices = pond_slices
        self.states: dict[str, HeldState | HeldGroup] = {}
        self.vector: dict[str, dict[str, int]] = {}
        self.rows_applied = 0
        self.rows_fetched = 0
        self.threads = threads
        self._run = run
        self._lock = threading.Lock()
        self._staged: dict[tuple[str, str, int], dict[tuple[int, int], StagedPart]] = {}
        self._pending: dict[tuple[str, str], Append] = {}
        self._seq = 0

    def add_state(self, spec: Spec) -> HeldState | HeldGroup:
        with self._lock:
            if spec.name not in self.states:
                self.states[spec.name] = (
                    HeldGroup(spec, self.owned, self.pond_slices, self.threads)
                    if isinstance(spec, GroupSpec)
                    else HeldState(spec, self.owned, self.pond_slices)
                )
                self.vector[spec.name] = {}
            held = self.states[spec.name]
        if isinstance(held, HeldGroup) and isinstance(spec, GroupSpec):
            held.extend(spec)
        if held.spec != spec:
            raise BadMessage(f"state {spec.name} is held here with another schema")
        return held

    def held(self, name: str) -> HeldState | HeldGroup:
        try:
            return self.states[name]
        except KeyError:
            raise UnknownState(f"there is no state {name!r} in this pond", state=name) from None

    def state(self, name: str) -> HeldState:
        held = self.held(name)
        if isinstance(held, HeldGroup):
            raise UnknownState(f"{name!r} is a group of tables, not a state", state=name)
        return held

    def group(self, name: str) -> HeldGroup:
        held = self.held(name)
        if isinstance(held, HeldState):
            raise UnknownState(f"{name!r} is a state, not a group of tables", state=name)
        return held

    # An epoch's way in

    def stage(self, message: Stage, batches: Iterator[SlicedBatch]) -> Staged:
        """Keeps rows aside. The same attempt sent again replaces what it sent before."""
        held = self.held(message.state)
        kept: list[SlicedBatch] = []
        digest = 0
        for sliced in batches:
            digest += held.digest(sliced)
            kept.append(sliced)
        digest %= 1 << 64
        with self._lock:
            # What comes after its epoch was applied is a zombie's, and nobody will ask for it.
            if message.epoch > self.vector[message.state].get(message.writer, -1):
                # An epoch begins when the one before is decided: nobody will ask for that one's any more.
                self._forget_staged(message.state, message.writer, message.epoch - 1)
                parts = self._staged.setdefault((message.state, message.writer, message.epoch), {})
                parts[message.partition, message.attempt] = StagedPart(kept, digest)
                others = [key for key in parts if key[0] == message.partition]
                for key in others[:-ATTEMPTS_KEPT]:
                    del parts[key]
        return Staged(rows=sum(sliced.batch.num_rows for sliced in kept), digest=digest)

    def prepare(self, message: Prepare) -> Append | Prepared:
        """The record to append, or the answer itself if the same rows are prepared already."""
        self.held(message.state)
        with self._lock:
            applied = self.vector[message.state].get(message.writer, -1)
            if message.epoch <= applied:
                raise BadMessage(f"epoch {message.epoch} of {message.writer} is applied already")
            parts = self._staged.get((message.state, message.writer, message.epoch), {})
            chosen = [parts.get(attempt) for attempt in sorted(message.attempts.items())]
            if None in chosen:
                raise StageLost(
                    f"container {self.container} does not hold what was staged for epoch {message.epoch}",
                    container=self.container,
                )
            record = Record(
                message.state,
                message.writer,
                message.epoch,
                sum(part.digest for part in chosen if part) % (1 << 64),
                [sliced for part in chosen if part for sliced in part.batches],
                message.transactions,
            )
            pending = self._pending.get((message.state, message.writer))
            # Records run again in the order of the log: one that others were logged after is logged once more.
            if pending and pending.seq == self._seq and _same(pending.record, record):
                return self._prepared(pending.record)
            self._seq += 1
            return Append(self._seq, record)

    def appended(self, append: Append) -> Prepared:
        """The record is durable. A record of the same epoch that was prepared before is void."""
        with self._lock:
            record = append.record
            self._pending[record.state, record.writer] = append
            # The attempts that count are in the record now; the others were zombies'.
            self._forget_staged(record.state, record.writer, record.epoch)
            return self._prepared(record)

    def discard(self, state: str, writer: str, epoch: int) -> None:
        """Forgets a prepared epoch. Its record stays in the log, undecided, until the log is truncated."""
        with self._lock:
            pending = self._pending.get((state, writer))
            if pending is not None and pending.record.epoch == epoch:
                del self._pending[state, writer]
            self._forget_staged(state, writer, epoch)

    def append_failed(self, append: Append) -> None:
        """The record may or may not be in the log: the next one takes its number and replaces it."""
        with self._lock:
            self._seq = append.seq - 1

    def apply(self, message: Apply) -> int:
        """Makes a prepared epoch visible; an epoch that is visible already changes nothing. Returns its rows."""
        held = self.held(message.state)
        with self._lock:
            if message.epoch <= self.vector[message.state].get(message.writer, -1):
                return 0
            pending = self._pending.get((message.state, message.writer))
        if pending is None or pending.record.epoch != message.epoch:
            raise StageLost(
                f"container {self.container} has not prepared epoch {message.epoch}", container=self.container
            )
        rows = held.apply(pending.record, self.owned, self._run)
        with self._lock:
            self.vector[message.state][message.writer] = message.epoch
            if self._pending.get((message.state, message.writer)) is pending:
                del self._pending[message.state, message.writer]
            self._forget_staged(message.state, message.writer, message.epoch)
            self.rows_applied += rows
        return rows

    def replay(self, record: Record, logged: Iterable[int]) -> int:
        """Applies a decided record when recovering, from a log of the slices `logged`. Returns the rows that were new.

        The record tells nothing about other slices: their part of the epoch is in another log.
        """
        among = sorted(set(self.owned) & set(logged))
        try:
            rows = self.held(record.state).apply(record, among, self._run)
        except GroupBroken:
            rows = 0  # the group says so to whoever asks; all else here comes back
        vector = self.vector[record.state]
        vector[record.writer] = max(vector.get(record.writer, -1), record.epoch)
        return rows

    # Questions

    def fetch(self, state: str, rule: FetchRule, sliced: SlicedBatch) -> pa.RecordBatch:
        answer = self.state(state).fetch(sliced, rule, self._run)
        self.rows_fetched += answer.num_rows
        return answer

    # Checkpoints

    def plan_checkpoint(self) -> CheckpointPlan:
        with self._lock:
            covered = min((append.seq - 1 for append in self._pending.values()), default=self._seq)
            vector = {state: dict(writers) for state, writers in self.vector.items()}
        dirty = [
            (name, number)
            for name, state in sorted(self.states.items())
            for number in sorted(state.slices)
            if state.slices[number].dirty
        ]
        return CheckpointPlan(covered, dirty, vector)

    def broken(self) -> bool:
        """Whether a group could not run an epoch that was decided."""
        return any(
            isinstance(held, HeldGroup) and held.broken is not None for held in list(self.states.values())
        )

    def staged_rows(self) -> int:
        with self._lock:
            parts = [part for attempts in self._staged.values() for part in attempts.values()]
        return sum(sliced.batch.num_rows for part in parts for sliced in part.batches)

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for name, state in self.states.items():
            assert sorted(state.slices) == state.places(self.owned), name
            for number, held in state.slices.items():
                held.store.validate()
                for writer, epoch in held.vector.items():
                    assert epoch <= self.vector[name].get(writer, -1), (name, number, writer)
        for (name, writer), append in self._pending.items():
            assert append.record.epoch > self.vector[name].get(writer, -1), (name, writer)
            assert 0 < append.seq <= self._seq

    def _forget_staged(self, state: str, writer: str, epoch: int) -> None:
        """Lets go of what was staged up to that epoch. The caller holds the lock."""
        for key in [key for key in self._staged if key[:2] == (state, writer) and key[2] <= epoch]:
            del self._staged[key]

    def _prepared(self, record: Record) -> Prepared:
        return Prepared(term=self.term, rows=record.rows, digest=record.digest)


def _same(prepared: Record, record: Record) -> bool:
    """Whether two records of a writer are of the same epoch and content, and run by the same program."""
    return (prepared.epoch, prepared.digest, prepared.transactions) == (
        record.epoch,
        record.digest,
        record.transactions,
    )
