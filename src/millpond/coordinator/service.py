"""The coordinator's shell: it carries out what the decisions ask for, in the order that makes them safe.

An epoch is *prepared* by every container, then *decided* by one journal entry, then *applied* by every
container, and only then *published*: U moves. Before the journal entry it never happened; after it, it will.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from msgspec.structs import replace

from millpond.container.layout import CONTAINERS, MANIFEST, directory_name, incarnations, term_of
from millpond.coordinator import decisions, opening
from millpond.coordinator.hosting import Hosting
from millpond.coordinator.journal import JOURNAL, Journal
from millpond.coordinator.membership import Membership
from millpond.coordinator.records import PondRecord
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import (
    BadMessage,
    BadOption,
    CorruptFile,
    MillpondError,
    StageLost,
    Unavailable,
)
from millpond.times import Progress
from millpond.wire.connection import Answer, Dialer, SlicedBatch
from millpond.wire.messages import (
    AddState,
    Advance,
    Answered,
    Apply,
    AskMetrics,
    AskPending,
    AskProgress,
    Assign,
    BeginEpoch,
    Checkpoint,
    CommitEpoch,
    ContainerInfo,
    ContainerReport,
    ContainerStatus,
    Discard,
    Done,
    EpochCommitted,
    GroupSpec,
    ListStates,
    Locate,
    Message,
    OpenState,
    OpenTable,
    Pin,
    Pinned,
    Placement,
    PondMetrics,
    Prepare,
    Prepared,
    Register,
    Report,
    Spec,
    StateList,
    StateProgress,
    writer_id,
)

TIDY_S = 2.0


class _Unseen(NamedTuple):
    """An epoch that is decided: how to apply it, which incarnations hold it, and where its updater stood before."""

    apply: Apply
    terms: dict[int, int]
    held_back: dict[str, Progress]


class CoordinatorService:
    """One per pond (a `Handler`). Its requests may come from several threads at once."""

    def __init__(self, files: Files, root: str, containers: int, dial: Dialer, parallel: bool = True) -> None:
        self._files = files
        self._root = root
        self._journal = Journal(files, root)
        self._record = PondRecord(slices=0)
        self._containers = Membership(containers, dial, self._assignment, parallel)
        self._owners: list[int] = []
        self._open = False
        # Guards what is remembered: the record, the terms, what is held back.
        self._lock = threading.Lock()
        self._terms: dict[int, int] = {}
        # By State, the epoch that is decided and not yet visible.
        self._unseen: dict[str, _Unseen] = {}
        # Whether the journal may hold an entry that is not what is remembered.
        self._in_doubt = False
        self._commit_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)
        # States and groups, as every container has been told of them.
        self._told: dict[str, Spec] = {}
        self._advanced: dict[str, Advance] = {}
        # Whether every directory of an earlier incarnation is gone; asked at most every TIDY_S.
        self._tidy = False
        self._tidy_next_s = 0.0
        self._epochs_committed = 0
        self._epochs_replayed = 0

    # Life

    def start(self, hosting: Hosting, slices: int) -> None:
        """Loads the journal, starts the containers and lets them recover."""
        found = self._journal.load()
        count = len(self._containers.ids)
        # Before anything is written: a refusal must not fix the slices of a new pond.
        if count > (slices if found is None else found.slices):
            raise BadOption(
                f"{count} containers cannot share {slices if found is None else found.slices} slices",
                hint="a container serves at least one slice",
                option="containers",
            )
        if found is None:
            if self._files.list(os.path.join(self._root, CONTAINERS)):
                path = os.path.join(self._root, JOURNAL)
                raise CorruptFile(
                    f"{path} is gone or empty, but {self._root} holds containers' files",
                    hint="restore the journal directory from a backup copy",
                    path=path,
                )
            self._record = PondRecord(slices=slices)
            self._journal.write(self._record)
        else:
            self._record = found
            self._check_whole()
        self._owners = decisions.place(self._record.slices, count)
        self._containers.start(hosting)
        self.remove_unneeded()
        self._open = True

    def _check_whole(self) -> None:
        """The journal and the directories of containers must be of one time."""
        present = incarnations(self._files, self._root)
        for name in present:
            # Terms are journalled before anything is written in their name.
            if term_of(name) > self._record.term:
                path = os.path.join(self._root, JOURNAL)
                raise CorruptFile(
                    f"{path} is older than the containers' files: it knows nothing of {name}",
                    hint="restore the journal and the containers' files from one backup copy",
                    path=path,
                )
        for name in self._record.rests_on:
            if name not in present:
                path = os.path.join(self._root, CONTAINERS, name, MANIFEST)
                raise CorruptFile(
                    f"{path} is missing, and acknowledged epochs rest on it",
                    hint="restore the directory from a backup copy",
                    path=path,
                )

    def close(self) -> None:
        self._containers.close()

    def recover(self, container: int) -> None:
        """A container has ended: brings it back."""
        self._containers.recover(container)

    def _assignment(self, container: int) -> Assign:
        with self._lock:
            # From here on, nothing that an earlier incarnation prepared counts unless it is decided.
            record = replace(self._record, term=self._record.term + 1)
            self._write(record)
            self._terms[container] = record.term
        self._tidy = False
        return Assign(
            term=record.term,
            container=container,
            slices=self._slices_of(container),
            pond_slices=record.slices,
            states=[state.spec for state in record.states.values()],
            decided=record.decided(),
            fetch_progress={name: state.fetch_progress for name, state in record.states.items()},
            # Recovery applies all that is decided before it takes note of this.
            final_below={name: state.update_progress for name, state in record.states.items()},
        )

    # Handler

    def call(self, message: Any) -> Message:
        if not self._open:
            raise Unavailable("the pond is still opening", hint="try again in a moment", address="")
        match message:
            case OpenState() | OpenTable():
                self._open_state(message)
            case ListStates():
                return StateList([state.spec for state in self._record.states.values()])
            case Locate():
                return self._placement()
            case Register():
                self._change(lambda record: decisions.register(record, message))
            case BeginEpoch():
                return decisions.begin_epoch(self._record, message)
            case CommitEpoch():
                return self._commit(message)
            case Report(state):
                self._move_progress(state, lambda record: decisions.report(record, message))
            case Pin():
                return self._pin(message)
            case Answered(state):
                self._move_progress(state, lambda record: decisions.answered(record, message))
            case AskProgress(state):
                with self._lock:
                    return self._progress(state)
            case AskPending(state):
                with self._lock:
                    return decisions.pending(self._record, message, self._progress(state).update)
            case AskMetrics():
                return self._metrics()
            case Checkpoint():
                self._containers.map(
                    lambda c: self._containers.ask_patiently(c, Checkpoint()), self._containers.ids
                )
                self.remove_unneeded()
            case _:
                raise BadMessage(f"the coordinator does not answer {type(message).__name__}")
        return Done()

    def _open_state(self, message: OpenState | OpenTable) -> None:
        """Remembers the State, then tells the containers; what failed half-way is done by opening it again."""
        with self._containers.lock:
            if isinstance(message, OpenTable):
                name = message.group
                self._change(lambda record: opening.open_table(record, message, self._owners))
            else:
                name = message.spec.name
                self._change(lambda record: opening.open_state(record, message.spec))
            spec = self._record.states[name].spec
            if self._told.get(name) != spec:
                self._containers.tell_all(AddState(spec))
                self._told[name] = spec

    def exchange(self, message: Any, batches: Iterator[SlicedBatch]) -> Answer:
        raise BadMessage("the coordinator takes no rows: they go to the containers")

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        raise BadMessage("the coordinator holds no rows: ask the containers")

    # Epochs

    def _commit(self, message: CommitEpoch) -> EpochCommitted:
        """Prepare, decide, apply, publish. One epoch of a State at a time: containers log in the order of decisions."""
        decisions.state_of(self._record, message.state)
        with self._commit_locks[message.state]:
            self._make_visible(message.state)
            if decisions.begin_epoch(self._record, message).replayed:
                self._epochs_replayed += 1
                return decisions.replay_epoch(self._record, message)
            writer = writer_id(message.updater, message.query)
            attempts = {receipt.partition: receipt.attempt for receipt in message.receipts}
            prepare = Prepare(message.state, writer, message.epoch, attempts, message.transactions)
            try:
                committed = self._decide(message, prepare)
            except MillpondError:
                # In doubt, the journal may hold the decision after all: then what was prepared must stay.
                if not self._in_doubt:
                    discard = Discard(message.state, writer, message.epoch)
                    self._containers.map(partial(self._discard, discard), list(self._containers.live))
                raise
            self._make_visible(message.state)
            self._epochs_committed += 1
        if not self._tidy and time.monotonic() > self._tidy_next_s:
            self.remove_unneeded()
        return committed

    def _make_visible(self, state: str) -> None:
        """Has every container apply the State's decided epoch, if there is one that is not visible yet; publishes U."""
        unseen = self._unseen.get(state)
        if unseen is None:
            return
        self._containers.map(
            lambda c: self._ask_until_applied(c, unseen.apply, unseen.terms[c]), list(unseen.terms)
        )
        reach("publish.before")
        with self._lock:
            del self._unseen[state]
        reach("publish.after")
        if self._record.states[state].fetch_progress > -math.inf:
            with self._containers.lock:
                self._tell_progress(state)

    def _decide(self, message: CommitEpoch, prepare: Prepare) -> EpochCommitted:
        """Has every container prepare the epoch, then writes the journal entry that decides it."""
        if self._in_doubt:
            # An entry that failed may be on the disk. It must not come to decide what is prepared from here on.
            with self._lock:
                if self._in_doubt:
                    self._write(self._record)
        prepared: dict[int, Prepared] = dict(
            self._containers.map(
                lambda c: (c, self._ask_or_stage_again(c, prepare)), self._holders(message.state)
            )
        )
        digest = sum(answer.digest for answer in prepared.values()) % (1 << 64)
        rows = sum(answer.rows for answer in prepared.values())
        if (digest, rows) != (decisions.digest_of(message), decisions.rows_of(message)):
            raise BadMessage("what the containers prepared is not what the receipts tell of")
        with self._lock:
            for container, answer in prepared.items():
                if self._terms[container] != answer.term:
                    raise StageLost(
                        f"container {container} was restarted before the epoch was decided",
                        container=container,
                    )
            watermark = self._record.states[message.state].updaters[message.updater].watermark
            record, committed = decisions.commit_epoch(self._record, message)
            took_part = {directory_name(answer.term, c) for c, answer in prepared.items()}
            self._write(replace(record, rests_on=tuple(sorted({*record.rests_on, *took_part}))))
            self._unseen[message.state] = _Unseen(
                Apply(message.state, prepare.writer, message.epoch),
                {container: answer.term for container, answer in prepared.items()},
                {message.updater: watermark},
            )
        return committed

    def _holders(self, state: str) -> list[int]:
        """The containers that take part in an epoch of a State: all. Of a group, the one that has its home."""
        spec = self._record.states[state].spec
        return [self._owners[spec.home]] if isinstance(spec, GroupSpec) else self._containers.ids

    def _discard(self, discard: Discard, container: int) -> None:
        """A container that is away has nothing prepared when it comes back."""
        with suppress(Unavailable):
            self._containers.ask(container, discard)

    def _ask_or_stage_again(self, container: int, message: Message) -> Any:
        """What the container answers; StageLost if it is gone, with all that was staged there."""
        term = self._terms[container]
        try:
            return self._containers.ask(container, message)
        except Unavailable:
            self._containers.await_back(container, term)
            raise StageLost(f"container {container} was restarted", container=container) from None

    def _ask_until_applied(self, container: int, apply: Apply, term: int) -> None:
        """The epoch is decided: an incarnation later than `term` has applied it by recovering."""
        while True:
            live = self._containers.live.get(container)
            if live is not None and live.term > term:
                return
            try:
                self._containers.ask(container, apply)
                return
            except Unavailable:
                self._containers.await_back(container, term)
            except MillpondError:
                # It holds the record and could not apply it: let it begin anew from its log.
                self._containers.recover(container, term, broken=True)
                self._containers.await_back(container, term)

    def _progress(self, state: str) -> StateProgress:
        """Progress as it is published: an epoch that is not visible everywhere does not count."""
        unseen = self._unseen.get(state)
        return decisions.progress(
            decisions.state_of(self._record, state), unseen.held_back if unseen is not None else {}
        )

    def _pin(self, message: Pin) -> Pinned:
        with self._lock:
            record, pinned = decisions.pin(self._record, message, self._progress(message.state).update)
            moved = record is not self._record and (
                record.states[message.state].fetch_progress
                != self._record.states[message.state].fetch_progress
            )
            if record is not self._record:
                self._write(record)
        if moved:
            with self._containers.lock:
                self._tell_progress(message.state)
        return pinned

    def _move_progress(self, state: str, decide: Callable[[PondRecord], PondRecord]) -> None:
        """Carries out a decision that may move U or F; if it does, every container learns it."""
        with self._containers.lock:
            decisions.state_of(self._record, state)
            self._change(decide)
            self._tell_progress(state)

    def _tell_progress(self, state: str) -> None:
        """Tells the containers F and U as they are published, if compaction may go on by it. Holds their lock."""
        with self._lock:
            published = self._progress(state)
        advance = Advance(state, published.fetch, published.update)
        before = self._advanced.get(state)
        if before is None or (before.fetch_progress, _compactable(before)) != (
            advance.fetch_progress,
            _compactable(advance),
        ):
            self._containers.tell_all(advance)
            self._advanced[state] = advance

    # What is remembered

    def _change(self, decide: Callable[[PondRecord], PondRecord]) -> bool:
        """Carries out a decision; True if it changed anything."""
        with self._lock:
            after = decide(self._record)
            if after is self._record:
                return False
            self._write(after)
            return True

    def _write(self, record: PondRecord) -> None:
        """Journal first; only what is durable is remembered. The caller holds the lock."""
        self._in_doubt = True
        self._journal.write(record)
        self._in_doubt = False
        self._record = record

    # Containers

    def remove_unneeded(self) -> None:
        """Removes directories of earlier incarnations that no container needs any more.

        What cannot be removed now is tried again later: it is in nobody's way.
        """
        with self._containers.lock, suppress(OSError):
            try:
                reports: list[ContainerReport] = self._containers.map(
                    lambda c: self._containers.ask(c, ContainerStatus()), list(self._containers.live)
                )
            except Unavailable:
                return
            needed = {name for report in reports for name in report.needs}
            self._tidy = not needed
            self._tidy_next_s = time.monotonic() + TIDY_S
            kept = needed | {
                directory_name(live.term, container) for container, live in self._containers.live.items()
            }
            base = os.path.join(self._root, CONTAINERS)
            unneeded = [name for name in self._files.list(base) if name not in kept and name.startswith("t")]
            self._change(lambda record: decisions.rest_no_more_on(record, unneeded))
            for name in unneeded:
                directory = os.path.join(base, name)
                # Without its manifest a directory is nothing: a crash half-way leaves no half log.
                self._files.remove(os.path.join(directory, MANIFEST))
                self._files.sync_dir(directory)
                for file in self._files.list(directory):
                    self._files.remove(os.path.join(directory, file))
                self._files.remove_dir(directory)

    def _slices_of(self, container: int) -> list[int]:
        return [number for number, owner in enumerate(self._owners) if owner == container]

    def _placement(self) -> Placement:
        containers = [
            ContainerInfo(container, live.host.pid, live.host.address, tuple(self._slices_of(container)))
            for container, live in sorted(self._containers.live.items())
        ]
        return Placement(
            root=self._root, slices=self._record.slices, owners=self._owners, containers=containers
        )

    def _metrics(self) -> PondMetrics:
        reports: dict[int, ContainerReport] = {}
        for container in sorted(self._containers.live):
            try:
                reports[container] = self._containers.ask(container, ContainerStatus())
            except Unavailable:
                continue
        states: dict[str, dict[str, float]] = {}
        for report in reports.values():
            for name, figures in report.states.items():
                total = states.setdefault(name, dict.fromkeys(figures, 0.0))
                for key, value in figures.items():
                    total[key] += value
        return PondMetrics(
            coordinator={
                "epochs_committed": self._epochs_committed,
                "epochs_replayed": self._epochs_replayed,
                "container_restarts": self._containers.restarts,
                "recovery_s_last": self._containers.recovery_s_last,
                "journal_entries": self._journal.entries_written,
                "term": self._record.term,
            },
            containers={container: report.metrics for container, report in reports.items()},
            states=states,
            groups={name: figures for report in reports.values() for name, figures in report.groups.items()},
        )


def _compactable(advance: Advance) -> Progress:
    """Below this no fetch asks and no update comes."""
    return min(advance.fetch_progress, advance.final_below)
