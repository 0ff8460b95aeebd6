"""The coordinator's shell: one per pond. It answers, and has its rooms do the rest: `slices`, `commits`, `telling`, `tidying`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from millpond.container.layout import CONTAINERS, MANIFEST, incarnations, term_of
from millpond.coordinator import catalogue, fetches, placement, updates
from millpond.coordinator.autoscale import Autoscaler, Limits
from millpond.coordinator.backing import Backing
from millpond.coordinator.balancing import Balancing
from millpond.coordinator.commits import Commits
from millpond.coordinator.elasticity import Elasticity
from millpond.coordinator.figures import Figures
from millpond.coordinator.hosting import Hosting
from millpond.coordinator.journal import JOURNAL
from millpond.coordinator.latency import Latencies
from millpond.coordinator.memory import Memory
from millpond.coordinator.migrations import Migrations
from millpond.coordinator.records import PondRecord
from millpond.coordinator.slices import Slices
from millpond.coordinator.telling import Telling
from millpond.coordinator.tidying import Tidying
from millpond.durable.files import Files
from millpond.durable.landmark import make_landmark, remove_landmarks
from millpond.errors import (
    BadMessage,
    BadOption,
    CorruptFile,
    MillpondError,
    Moved,
    PondInUse,
    Unavailable,
    not_trusted,
)
from millpond.runtime import Runtime, Serial
from millpond.wire.base import Call, Done, Message, R, SliceId, Term
from millpond.wire.connection import Answer, Dialer, SlicedBatch
from millpond.wire.epochs import AskTurns, BeginEpoch, CommitEpoch, EpochCommitted, HandedOver
from millpond.wire.figures import AskMetrics, AskSlice, MoveFigures, PondMetrics
from millpond.wire.house import (
    Checkpoint,
    CheckpointAll,
    ContainerStatus,
    Forget,
    ForgetWriters,
    ListResidents,
    Locate,
    OpenResident,
    Register,
    ResidentList,
)
from millpond.wire.moves import (
    AskMoves,
    Autoscale,
    CancelMoves,
    Moves,
    MoveSlices,
    Rebalance,
    Scale,
    SetThreads,
)
from millpond.wire.questions import Answered, AskPending, AskProgress, Pin, Pinned, Report
from millpond.wire.specs import Spec
from millpond.wire.waiting import TidyWaiting

CLOSE_S_MAX = 30.0
REPLICATE_PAUSE_S = 2.0
_log = logging.getLogger("millpond")


class CoordinatorService:
    """One per pond (a `Handler`). Its requests may come from several threads at once.

    One that `only_reads` refuses what would change what the pond holds.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        dial: Dialer,
        runtime: Runtime | None = None,
        *,
        only_reads: bool = False,
    ) -> None:
        self._only_reads = only_reads
        self._files = files
        self._root = root
        self._runtime = runtime or Serial()
        self._memory = Memory(files, root, self._runtime)
        self._telling = Telling(self._memory, self._runtime)
        self._slices = Slices(
            self._memory, self._telling, dial, lambda: incarnations(files, root), self._runtime
        )
        self._containers = self._slices.containers
        self._backing = backing = Backing(self._memory, self._containers)
        self._commits = Commits(self._memory, self._containers, self._telling, backing, self._runtime)
        self._tidying = Tidying(files, root, self._memory, self._slices, self._runtime)
        # No resident comes while slices change hands: its epochs would not be waited for.
        self._placing = self._runtime.lock()
        self._migrations = Migrations(
            self._memory, self._slices, self._commits, backing, self._placing, self._runtime
        )
        self.elasticity = Elasticity(self._memory, self._slices, backing, self._migrations, self._runtime)
        self._replicating = self._runtime.lock()
        self._replicate_at_s = 0.0
        self._replicate_error = ""
        self._latencies = Latencies()
        self.figures = Figures(self._memory, self._containers, self._commits, self._latencies, self._runtime)
        self._balancing = Balancing(
            self._memory,
            self._slices,
            backing,
            self._migrations,
            self.elasticity,
            self.figures,
            self._runtime,
        )
        self._open = False
        self._ended = False

    @property
    def _record(self) -> PondRecord:
        return self._memory.record

    # Life

    def start(self, hosting: Hosting, containers: int, slices: int, backups: int = 0) -> None:
        """Loads the journal, starts the containers and lets them adopt their slices.

        Of each slice `backups` other containers hold one, if there are so many.
        """
        self._migrations.wanted = backups
        record = self._memory.journal.load()
        slices = slices if record is None else record.slices
        # Before anything is written: a refusal must not fix the slices of a new pond.
        if containers > slices:
            raise BadOption(
                f"{containers} containers cannot share {slices} slices",
                hint="a container serves at least one slice",
                option="containers",
            )
        if record is None:
            if self._files.list(os.path.join(self._root, CONTAINERS)):
                path = os.path.join(self._root, JOURNAL)
                raise CorruptFile(
                    f"{path} is gone or empty, but {self._root} holds containers' files",
                    hint="restore the journal directory from a backup copy",
                    path=path,
                )
            self._memory.change(lambda _: PondRecord(owners=placement.place(slices, range(containers))))
        else:
            self._memory.record = record
            self._check_whole()
            self._memory.change(lambda pond: placement.opened(pond, range(containers)))
        self._slices.landmark = make_landmark(self._files, self._root, self._runtime.bits)
        self._containers.start(hosting, range(containers))
        self._tidying.tidy()
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
        every = [SliceId(number) for number in range(self._record.slices)]
        self._memory.record = placement.rest_on_backups(self._record, every, present)
        for name in self._record.directories:
            if name not in present:
                path = os.path.join(self._root, CONTAINERS, name, MANIFEST)
                raise CorruptFile(
                    f"{path} is missing, and acknowledged epochs rest on it",
                    hint="restore the directory from a backup copy",
                    path=path,
                )

    def close(self, checkpoint: bool = True) -> None:
        """Ends the containers; what they have in their logs is snapshotted first, so that the next start is quick.

        Once it `is_replaced`, the files under the root are another's, and stay as they are.
        """
        self.elasticity.close()
        if self._notice_another():
            return
        if self._open and checkpoint:
            self._open = False
            self._commits.await_all_visible()
            self._checkpoint_for(CLOSE_S_MAX)
        self._open = False
        self._containers.close()
        if self._slices.landmark:
            with suppress(OSError):
                remove_landmarks(self._files, self._root)

    @property
    def is_replaced(self) -> bool:
        """Whether another coordinator has the root: this one answers nobody, and its containers have ended."""
        return self._memory.journal.is_taken

    def _notice_another(self) -> bool:
        """Whether another coordinator has written to the journal. Then containers end: they would answer from what was."""
        try:
            self._memory.journal.look()
        except PondInUse as error:
            if not self._ended:
                self._ended = True
                _log.error("%s", error)
                self.elasticity.close()
                self._containers.close()
            return True
        except OSError:
            pass  # the root is away: the journal itself refuses whoever writes later
        return False

    def _checkpoint_for(self, seconds: float) -> None:
        """Checkpoints every container, if that does not take longer: it is only to save time later."""
        live = list(self._containers.live)
        done: list[int] = []

        def checkpoint(container: int) -> None:
            try:
                with suppress(MillpondError):
                    self._containers.ask(container, Checkpoint())
            finally:
                done.append(container)

        # Not `map`: when an interpreter ends, a pool of threads takes no work any more.
        for container in live:
            self._runtime.spawn(partial(checkpoint, container), "millpond-close")
        deadline = self._runtime.now() + seconds
        while len(done) < len(live) and self._runtime.now() < deadline:
            self._runtime.sleep(0.01)

    def recover(self, container: int) -> None:
        """A container has ended: brings it back."""
        self._containers.recover(container)

    def beat(self) -> None:
        """Asks who is there. To be called often, and by nothing that may be held up."""
        if self._open and not self.is_replaced:
            self._containers.beat()

    def maintain(self) -> None:
        """One piece of upkeep: what did not come back is tried again, what is needed no more goes."""
        if self._open and not self._notice_another():
            self._containers.retry()
            if self._slices.astray:
                self._slices.call_home()
            if not self._only_reads:
                self._commits.leave_out_silent()
            self._commits.show_early()
            if self._tidying.is_due:
                self._tidying.tidy()
            if self._migrations.wanted or self._record.backups:
                self._runtime.spawn(self._replicate, "millpond-replicate")
            if not self._only_reads:
                self._runtime.spawn(self._balancing.maintain, "millpond-balance")

    def _replicate(self) -> None:
        """Sees to it that slices have the backups they should have; after a failure, not at once again."""
        if self._only_reads or not self._replicating.acquire(timeout=0):
            return
        try:
            if self._runtime.now() >= self._replicate_at_s and self._open:
                self.elasticity.replicate()
                self._replicate_error = ""
        except (MillpondError, OSError) as error:
            # Told once, though it is tried again and again. A slice that a move took meanwhile has its copy at the next try.
            if not isinstance(error, Moved) and str(error) != self._replicate_error:
                self._replicate_error = str(error)
                _log.warning("slices have fewer backups than they should: %s", error)
            self._replicate_at_s = self._runtime.now() + REPLICATE_PAUSE_S
        finally:
            self._replicating.release()

    def _elastic(self, message: Any) -> Message:
        """Slices that are to be elsewhere, and more containers or fewer."""
        elasticity = self.elasticity
        match message:
            case MoveSlices(slices, to):
                return self._moves([ticket.id for ticket in elasticity.move(slices, to)])
            case Scale(containers, threads):
                set_threads = partial(self._set_threads, threads)
                if containers is None:
                    set_threads()
                else:
                    elasticity.scale(containers, first=set_threads)
                return self._moves([], scaling=containers is not None)
            case Rebalance(by):
                tickets, notes = self._balancing.rebalance(by, "rebalance")
                return self._moves([ticket.id for ticket in tickets], notes=notes)
            case CancelMoves(ids):
                elasticity.cancel(ids)
                return Done()
            case Autoscale():
                self._set_autoscale(message)
                return Done()
        raise BadMessage(f"the coordinator does not answer {type(message).__name__}")

    def _set_autoscale(self, message: Autoscale) -> None:
        self._balancing.autoscaler = (
            None
            if message.containers_min is None or message.containers_max is None
            else Autoscaler(
                Limits(
                    min(message.containers_min, self._record.slices),
                    min(message.containers_max, self._record.slices),
                    message.busy_min,
                    message.busy_max,
                    message.hold_s,
                )
            )
        )

    def _moves(self, ids: Sequence[int] | None, scaling: bool = False, notes: Sequence[str] = ()) -> Moves:
        change = self.elasticity.scaling if scaling else None
        if change is None:
            return Moves(self.elasticity.moves(ids), notes=list(notes))
        error = "" if change.error is None else str(change.error)
        return Moves(self.elasticity.moves(change.moves), change.what, error, list(notes))

    def _set_threads(self, threads: int | None) -> None:
        if threads is not None:
            self._slices.threads = threads
            self._ask_all(SetThreads(threads))

    def has_ended(self, container: int, term: Term) -> bool:
        return self._containers.members.has_ended(container, term)

    def tell(self, container: int, message: Call[R]) -> R:
        """Asks a container something that is about its process, and nothing that it holds."""
        return self._containers.ask(container, message)

    def place(self, owners: Sequence[int]) -> None:
        """Gives slices to those owners. While they change hands, no epoch of any resident is committed."""
        with self._slices.moving:
            while True:
                residents = set(self._record.residents)
                # Epochs may take long: none waits for them but whoever places slices.
                with self._commits.paused(residents), self._placing:
                    if residents >= set(self._record.residents):
                        return self._slices.place(owners)

    # Handler

    def call(self, message: Any) -> Message:
        if not self._open:
            raise Unavailable("the pond is still opening", hint="try again in a moment", address="")
        if self.is_replaced:
            raise self._memory.journal.taken()
        if getattr(message, "reads", False):
            return self._tell_about(message)
        if self._only_reads:
            self._check_changes_nothing(message)
            return Done()
        match message:
            case OpenResident(spec):
                self._open_resident(spec)
            case Forget():
                self._forget(message)
            case Register():
                self._commits.register(message)
            case BeginEpoch():
                # Whoever read of it what another client has just changed stages rows by that.
                self._telling.tell_rest(self._containers, message.resident)
                return self._commits.begin(message)
            case CommitEpoch():
                return self._commit(message)
            case AskTurns(resident):
                catalogue.resident_of(self._record, resident)
                with self._commits.paused([resident]):
                    return updates.turns_of(self._record, message)
            case HandedOver():
                self._memory.change(lambda record: updates.handed_over(record, message))
            case Report(resident):
                self._move_progress(resident, lambda record: updates.report(record, message))
            case Pin() | Answered() | TidyWaiting():
                return self._on_turn(message)
            case CheckpointAll():
                self._checkpoint_and_tidy()
            case _:
                return self._elastic(message)
        return Done()

    def _check_changes_nothing(self, message: Any) -> None:
        """To ask for what is there already, as programs do when they begin, changes nothing."""
        before, after = self._record, None
        match message:
            case OpenResident(spec):
                after = catalogue.open_resident(before, spec)
            case Register():
                after = catalogue.register(before, message)
        if after is not before:
            raise not_trusted(f"{type(message).__name__} would change the pond")

    def _tell_about(self, message: Any) -> Message:
        """Answers what changes nothing."""
        match message:
            case ListResidents(kind):
                residents = self._record.residents.values()
                return ResidentList([known.spec for known in residents if known.spec.kind == kind])
            case Locate(known):
                return replace(self._slices.locate(self._root, known), seen=self._commits.seen())
            case AskProgress(resident):
                if message.waits:
                    self._commits.await_visible(resident)
                return self._commits.progress(resident)
            case AskPending(resident):
                self._commits.await_visible(resident)
                with self._memory.lock:
                    progress = self._commits.progress(resident)
                    return fetches.pending(self._record, message, progress.update, progress.held_by)
            case AskMetrics():
                return self.metrics()
            case AskMoves(ids, scaling):
                return self._moves(ids, scaling)
            case AskSlice():
                return self.figures.of_slice(message)
        raise BadMessage(f"the coordinator does not answer {type(message).__name__}")

    def exchange(self, message: Any, batches: Iterator[SlicedBatch], reads_only: bool = False) -> Answer[Any]:
        raise BadMessage("the coordinator takes no rows: they go to the containers")

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        raise BadMessage("the coordinator holds no rows: ask the containers")

    def _commit(self, message: CommitEpoch) -> EpochCommitted:
        """Decides it, then tells the containers if it has changed what the resident is."""
        before = catalogue.resident_of(self._record, message.resident).spec
        committed = self._commits.commit(message)
        after = self._record.residents.get(message.resident)
        if after is not None and after.spec is not before:
            self._telling.tell(self._containers, message.resident)
        return committed

    # Residents

    def _open_resident(self, spec: Spec) -> None:
        """Remembers it, then tells the containers."""
        with self._placing:
            self._memory.change(lambda record: catalogue.open_resident(record, spec))
        self._telling.tell(self._containers, spec.name)

    def _forget(self, message: Forget) -> None:
        """Lets go of a name, and of all that is kept for it. What it did stays."""
        name = message.resident
        # No slice changes hands meanwhile, either: that waits for the resident's epochs. And none is copied: what a copy has
        # seen, it tells by writers that are known.
        with self._migrations.without_copies(), self._commits.paused([name]):
            before = self._record
            catalogue.forget(before, message)
            if message.name is not None or message.table is not None:
                # Records of a writer that is not known count for nothing: they must be in snapshots before.
                self._checkpoint_all()
                self._check_not_behind(name)
            self._memory.change(lambda record: catalogue.forget(record, message))
            after = self._record
            self._telling.tell(self._containers, name)
            if message.table is not None:
                # A table of the same name must not find the rows of this one in a snapshot.
                self._checkpoint_all()
            writers = catalogue.forgotten_writers(before, after, name)
            if name in after.residents and writers:
                self._ask_all(ForgetWriters(name, writers))
        if name in after.residents:
            self._commits.tell_progress(name)
        else:
            self._commits.update_steps.forget(name)
        self._latencies.forget(name, message.name)
        if message.table is None:
            parts = (name, message.name, message.query)
            self._tidying.remove_waiting(*(part for part in parts if part))

    def _check_not_behind(self, name: str) -> None:
        """Whether all that was decided is in snapshots."""
        resident_id = self._record.residents[name].resident.id
        for container in self._containers.ids:
            if resident_id in self._containers.ask_patiently(container, ContainerStatus()).behind:
                raise Unavailable(
                    f"{name!r} is broken or busy in container {container}: its epochs are in no snapshot yet",
                    hint="try again when it answers; nothing was forgotten",
                    address="",
                )

    # Progress

    def _on_turn(self, message: Pin | Answered | TidyWaiting) -> Message:
        """What fetchers say of their turns."""
        match message:
            case Pin():
                return self._pin(message)
            case Answered():
                self._answered(message)
            case TidyWaiting():
                self._tidying.tidy_turns(message)
        return Done()

    def _pin(self, message: Pin) -> Pinned:
        self._commits.await_visible(message.resident)
        with self._memory.lock:
            before = self._record
            progress = self._commits.progress(message.resident)
            record, pinned = fetches.pin(before, message, progress.update)
            pinned = replace(pinned, seen=progress.seen, born=progress.born)
            if record is not before:
                self._memory.write(record)
        pinned = replace(pinned, landmark=self._slices.landmark)
        self._commits.tell_progress(message.resident)
        if pinned.previous is None:
            return pinned
        passed = self._commits.update_steps.passed(
            message.resident,
            fetches.seen_before(record, message, pinned.previous),
            pinned.update,
            self._runtime.now(),
        )
        return replace(pinned, passed=passed)

    def _answered(self, message: Answered) -> None:
        self._move_progress(message.resident, lambda record: fetches.answered(record, message))
        if message.waits is not None:
            self._latencies.note(message.resident, message.fetcher, message.waits)

    def _move_progress(self, resident: str, decide: Callable[[PondRecord], PondRecord]) -> None:
        """Carries out a decision that may move U or F; if it does, every container learns it."""
        catalogue.resident_of(self._record, resident)
        self._memory.change(decide)
        self._commits.tell_progress(resident)

    # All containers

    def _ask_all(self, message: Call[Done]) -> None:
        """Waits for those that are away."""
        self._runtime.map(lambda c: self._containers.ask_patiently(c, message), self._containers.ids)

    def _checkpoint_all(self) -> None:
        self._ask_all(Checkpoint(self._record.decided()))

    def _checkpoint_and_tidy(self) -> None:
        self._commits.await_all_visible()
        self._checkpoint_all()
        self._tidying.tidy()

    def metrics(self) -> PondMetrics:
        """Figures of all that there is, as of now."""
        record, wanted = self._record, self._migrations.wanted
        if wanted or record.backups:
            self.figures.backups = [len(holders) for holders in self._backing.held().values()]
            # No more than there are others to hold them.
            self.figures.backups_wanted = [min(wanted, len(self._containers.ids) - 1)] * record.slices
        self.figures.moves = [
            MoveFigures(m.id, m.slices, m.source, m.target, m.stage, m.progress, m.cause, m.left_s, m.error)
            for m in self.elasticity.moves()
            if not m.is_over
        ]
        self.figures.task_slots = self._containers.task_slots()
        return self.figures.gather()
