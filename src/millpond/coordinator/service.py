"""The coordinator's shell: it carries out what the machines ask for, in the order that makes it safe."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa

from millpond.container.layout import (
    CONTAINERS,
    MANIFEST,
    SNAPSHOTS,
    directory_name,
    incarnations,
    is_directory,
    term_of,
)
from millpond.coordinator import catalogue, epochs, fetches, placement, updates
from millpond.coordinator.epochs import EpochCommit
from millpond.coordinator.hosting import Hosting
from millpond.coordinator.journal import JOURNAL, Journal
from millpond.coordinator.membership import Membership
from millpond.coordinator.records import PondRecord
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files, remove_tree
from millpond.errors import (
    BadMessage,
    BadOption,
    CodeFailed,
    CorruptFile,
    MillpondError,
    StageLost,
    Unavailable,
    WriteFailed,
)
from millpond.runtime import Locks, Runtime, Serial
from millpond.stores.waiting import WAITING
from millpond.times import Progress
from millpond.wire.base import Call, Done, Message, SliceId, Term
from millpond.wire.connection import Answer, Connection, Dialer, SlicedBatch
from millpond.wire.epochs import BeginEpoch, CommitEpoch, EpochCommitted, Prepare
from millpond.wire.house import (
    AddResident,
    Adopt,
    Advance,
    AskMetrics,
    Assign,
    Checkpoint,
    Confirm,
    ContainerInfo,
    ContainerReport,
    ContainerStatus,
    DropResident,
    Forget,
    ForgetWriters,
    ListResidents,
    Locate,
    OpenResident,
    Placement,
    PondMetrics,
    Register,
    Release,
    ResidentList,
)
from millpond.wire.questions import Answered, AskPending, AskProgress, Pin, Pinned, Report, StateProgress
from millpond.wire.specs import Resident

TIDY_S = 2.0
CLOSE_S_MAX = 30.0
# Starts that an epoch of user code may cost before it is refused.
DEATHS_MAX = 3
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")


class CoordinatorService:
    """One per pond (a `Handler`). Its requests may come from several threads at once."""

    def __init__(self, files: Files, root: str, dial: Dialer, runtime: Runtime | None = None) -> None:
        self._files = files
        self._root = root
        self._runtime = runtime or Serial()
        self._journal = Journal(files, root)
        self._record = PondRecord(owners=())
        self._containers = Membership(dial, self, self._runtime)
        self._open = False
        # Guards what is remembered: the record, and what containers have been told.
        self._lock = self._runtime.lock()
        # Whether the journal may hold an entry that is not what is remembered.
        self._in_doubt = False
        # Epochs of one resident come one at a time: containers log them in the order of decisions.
        self._commit_locks: Locks[str] = Locks(self._runtime)
        # Residents are opened and forgotten, and slices placed, by one hand at a time.
        self._catalogue_lock = self._runtime.lock()
        # By resident, the epoch that is decided and not yet visible.
        self._unseen: dict[str, EpochCommit] = {}
        self._ballot = 0
        self._orders = 0
        # Containers that may serve other slices than the journal says.
        self._astray: set[int] = set()
        self._deaths: dict[tuple[str, str, str], int] = {}
        # What each container knows: residents by name, and their progress.
        self._told: dict[int, dict[str, Resident]] = {}
        # Whether there may be files that nobody needs.
        self._untidy = True
        self._tidy_next_s = 0.0
        self._epochs_committed = 0
        self._epochs_replayed = 0

    # Life

    def start(self, hosting: Hosting, containers: int, slices: int) -> None:
        """Loads the journal, starts the containers and lets them adopt their slices."""
        record = self._journal.load()
        slices = slices if record is None else record.slices
        # Before anything is written: a refusal must not fix the slices of a new pond.
        if containers > slices:
            raise BadOption(
                f"{containers} containers cannot share {slices} slices",
                hint="a container serves at least one slice",
                option="containers",
            )
        owners = placement.place(slices, range(containers))
        if record is None:
            if self._files.list(os.path.join(self._root, CONTAINERS)):
                path = os.path.join(self._root, JOURNAL)
                raise CorruptFile(
                    f"{path} is gone or empty, but {self._root} holds containers' files",
                    hint="restore the journal directory from a backup copy",
                    path=path,
                )
            self._write(PondRecord(owners=owners))
        else:
            self._record = record
            self._check_whole()
            self._change(lambda pond: placement.placed(pond, owners))
        self._containers.start(hosting, range(containers))
        self._tidy()
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
        for name in self._record.grounds:
            if name not in present:
                path = os.path.join(self._root, CONTAINERS, name, MANIFEST)
                raise CorruptFile(
                    f"{path} is missing, and acknowledged epochs rest on it",
                    hint="restore the directory from a backup copy",
                    path=path,
                )

    def close(self, checkpoint: bool = True) -> None:
        """Ends the containers; what they have in their logs is snapshotted first, so that the next start is quick."""
        if self._open and checkpoint:
            self._open = False
            self._checkpoint_for(CLOSE_S_MAX)
        self._open = False
        self._containers.close()

    def _checkpoint_for(self, seconds: float) -> None:
        """Checkpoints every container, if that does not take longer: it is only to save time later."""
        done: list[bool] = []

        def work() -> None:
            with suppress(MillpondError):
                self._containers.map(
                    lambda c: self._containers.ask(c, Checkpoint()), list(self._containers.live)
                )
            done.append(True)

        self._runtime.spawn(work, "millpond-close")
        deadline = self._runtime.now() + seconds
        while not done and self._runtime.now() < deadline:
            self._runtime.sleep(0.01)

    def recover(self, container: int) -> None:
        """A container has ended: brings it back."""
        self._containers.recover(container)

    def maintain(self) -> None:
        """One piece of upkeep: what did not come back is tried again, what is needed no more goes."""
        if self._open:
            self._containers.retry()
            if self._astray:
                with self._catalogue_lock:
                    self._call_home()
            if self._untidy and self._runtime.now() >= self._tidy_next_s:
                self._tidy()

    # Containers that come up (an `Assignment`)

    def next_term(self) -> Term:
        with self._lock:
            # From here on, nothing that an earlier incarnation prepared counts unless it is decided.
            self._write(placement.next_term(self._record))
            return self._record.term

    def assign(self, container: int, term: Term, connection: Connection, careful: Term) -> None:
        with self._lock:
            record = self._record
        known = {name: resident.resident for name, resident in record.residents.items()}
        slices = record.slices_of(container)
        connection.call(Assign(term, container, record.slices, list(known.values())))
        connection.call(
            Adopt(self._order(), dict(placement.grounds_of(record, slices)), record.decided(), careful)
        )
        while True:
            with self._lock:
                now = self._record
                mine = [number for number in now.slices_of(container) if number in slices]
                news = self._news(known)
                if not news and mine == slices:
                    self._write(placement.grounded(now, directory_name(term, container), slices))
                    self._told[container] = known
                    self._untidy = True
                    break
            # Something changed while it came up.
            for call in news:
                connection.call(call)
            known = {name: resident.resident for name, resident in now.residents.items()}
            if mine != slices:
                connection.call(Release(self._order(), [number for number in slices if number not in mine]))
                slices = mine
        connection.call(Confirm(self._order(), [int(number) for number in slices]))

    def _news(self, known: dict[str, Resident]) -> list[Call[Done]]:
        """What a container that knows these residents has to learn."""
        news: list[Call[Done]] = []
        for name, resident in known.items():
            if name not in self._record.residents or self._record.residents[name].born != resident.born:
                news.append(DropResident(name, resident.born))
        for name, record in self._record.residents.items():
            resident = record.resident
            before = known.get(name)
            if before is None or (before.spec, before.born) != (resident.spec, resident.born):
                news.append(AddResident(resident))
        return news

    # Handler

    def call(self, message: Any) -> Message:
        if not self._open:
            raise Unavailable("the pond is still opening", hint="try again in a moment", address="")
        if getattr(message, "reads", False):
            return self._tell_about(message)
        match message:
            case OpenResident(spec):
                self._open_resident(lambda record: catalogue.open_resident(record, spec))
            case Forget():
                self._forget(message)
            case Register():
                self._change(lambda record: catalogue.register(record, message))
            case BeginEpoch():
                return updates.begin_epoch(self._record, message)
            case CommitEpoch():
                return self._commit(message)
            case Report(resident):
                self._move_progress(resident, lambda record: updates.report(record, message))
            case Pin():
                return self._pin(message)
            case Answered(state):
                self._move_progress(state, lambda record: fetches.answered(record, message))
            case Checkpoint():
                self._checkpoint_all()
                self._tidy()
            case _:
                raise BadMessage(f"the coordinator does not answer {type(message).__name__}")
        return Done()

    def _tell_about(self, message: Any) -> Message:
        """Answers what changes nothing."""
        match message:
            case ListResidents(kind):
                residents = self._record.residents.values()
                return ResidentList([known.spec for known in residents if known.spec.kind == kind])
            case Locate():
                return self._locate()
            case AskProgress(resident):
                with self._lock:
                    return self._progress(resident)
            case AskPending(state):
                with self._lock:
                    return fetches.pending(self._record, message, self._progress(state).update)
            case AskMetrics():
                return self._metrics()
        raise BadMessage(f"the coordinator does not answer {type(message).__name__}")

    def exchange(self, message: Any, batches: Iterator[SlicedBatch]) -> Answer:
        raise BadMessage("the coordinator takes no rows: they go to the containers")

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        raise BadMessage("the coordinator holds no rows: ask the containers")

    # Residents

    def _open_resident(self, decide: Callable[[PondRecord], PondRecord]) -> None:
        """Remembers it, then tells the containers. One that comes up meanwhile learns it then."""
        with self._catalogue_lock:
            self._change(decide)
            self._containers.map(self._tell, self._containers.ids)

    def _tell(self, container: int) -> None:
        """Tells a container what it does not know of residents yet; waits for one that is away."""
        while True:
            with self._lock:
                known = self._told.get(container)
                news = [] if known is None else self._news(known)
                now = {name: record.resident for name, record in self._record.residents.items()}
            if known is None or not news:
                return
            for call in news:
                self._containers.ask_patiently(container, call)
            with self._lock:
                # A new incarnation has learnt it by itself.
                if self._told.get(container) is known:
                    self._told[container] = now

    def _forget(self, message: Forget) -> None:
        """Lets go of a name, and of all that is kept for it. What it did stays."""
        with self._catalogue_lock, self._commit_locks[message.resident]:
            self._make_visible(message.resident)
            before = self._record
            catalogue.forget(before, message)
            if message.name is not None or message.table is not None:
                # Records of a writer that is not known count for nothing: they must be in snapshots before.
                self._checkpoint_all()
                self._check_not_behind(message.resident)
            self._change(lambda record: catalogue.forget(record, message))
            after = self._record
            self._containers.map(self._tell, self._containers.ids)
            if message.table is not None:
                # A table of the same name must not find the rows of this one in a snapshot.
                self._checkpoint_all()
            writers = catalogue.forgotten_writers(before, after, message.resident)
            if message.resident in after.residents and writers:
                forget = ForgetWriters(message.resident, writers)
                self._containers.map(
                    lambda c: self._containers.ask_patiently(c, forget), self._containers.ids
                )
        if message.resident in after.residents:
            self._tell_progress(message.resident)
        if message.table is None:
            parts = (message.resident, message.name, message.query)
            remove_tree(self._files, os.path.join(self._root, WAITING, *(part for part in parts if part)))
        self._untidy = True

    def _check_not_behind(self, name: str) -> None:
        """Whether all that was decided is in snapshots."""
        resident = self._record.residents[name].resident.id
        for container in self._containers.ids:
            if resident in self._containers.ask_patiently(container, ContainerStatus()).behind:
                raise Unavailable(
                    f"{name!r} is broken or busy in container {container}: its epochs are in no snapshot yet",
                    hint="try again when it answers; nothing was forgotten",
                    address="",
                )

    # Epochs

    def _commit(self, message: CommitEpoch) -> EpochCommitted:
        catalogue.resident_of(self._record, message.resident)
        with self._commit_locks[message.resident]:
            self._make_visible(message.resident)
            if updates.begin_epoch(self._record, message).replayed:
                self._epochs_replayed += 1
                return updates.replay_epoch(self._record, message)
            updates.check_epoch(self._record, message)
            commit = self._begin(message)
            self._drive(commit)
            if commit.is_unseen:
                self._unseen[message.resident] = commit
            if commit.error is not None:
                raise commit.error
            assert commit.committed is not None
            self._epochs_committed += 1
            return commit.committed

    def _begin(self, message: CommitEpoch) -> EpochCommit:
        """The machine for an epoch: of the containers that own a slice of the resident, in the order of ballots."""
        with self._lock:
            self._ballot += 1
            resident = self._record.residents[message.resident]
            owners = {self._record.owners[n] for n in resident.spec.places(self._record.slices)}
            holders = {c: self._containers.members.members[c].term for c in sorted(owners)}
            before = {message.updater: resident.updaters[message.updater].watermark}
            return EpochCommit(message, holders, self._ballot, before, self._in_doubt)

    def _make_visible(self, resident: str) -> None:
        """Has every container apply the resident's decided epoch, if there is one that is not visible yet."""
        commit = self._unseen.get(resident)
        if commit is not None:
            commit.resume()
            self._drive(commit)
            if commit.error is not None:
                raise commit.error

    def _drive(self, commit: EpochCommit) -> None:
        while effects := commit.effects():
            for event in self._runtime.map(lambda effect: self._carry_out(commit, effect), effects):
                commit.on(event)

    def _carry_out(self, commit: EpochCommit, effect: epochs.Effect) -> epochs.Event:
        match effect:
            case epochs.Ask(container, term, message):
                try:
                    return epochs.Replied(container, self._containers.ask(container, message))
                except MillpondError as error:
                    return epochs.Failed(container, self._explained(error, container, term, message))
            case epochs.Bring(container, term, broken):
                try:
                    if broken:
                        self._containers.recover(container, term, broken=True)
                    return epochs.Back(container, self._containers.await_back(container, term))
                except MillpondError as error:
                    return epochs.Failed(container, error)
            case epochs.Settle():
                try:
                    with self._lock:
                        if self._in_doubt:
                            self._write(self._record)
                except Exception as error:  # noqa: BLE001 - whatever it is: the entry may be on disk
                    return epochs.Failed(None, self._not_written(error), in_doubt=True)
                return epochs.Settled()
            case epochs.Decide(terms):
                return self._decide(commit, terms)
            case epochs.Publish():
                reach("publish.before")
                with self._lock:
                    self._unseen.pop(commit.message.resident, None)
                reach("publish.after")
                self._tell_progress(commit.message.resident)
                return epochs.Published()

    def _explained(
        self, error: MillpondError, container: int, term: Term, message: Call[Any]
    ) -> MillpondError:
        """A container that ends again and again over one epoch of user code: that is the code's doing."""
        if not isinstance(message, Prepare) or not isinstance(error, Unavailable):
            return error
        resident = self._record.residents.get(message.resident)
        if resident is None or not resident.spec.runs_code:
            return error
        if not self._containers.await_end(container, term):
            return error
        words = self._containers.last_words(container)
        key = (message.resident, message.writer, str(message.turn))
        self._deaths = {**dict(list(self._deaths.items())[-100:]), key: self._deaths.get(key, 0) + 1}
        # A kill may come from outside, again and again. A crash is of its own making.
        if self._deaths[key] < DEATHS_MAX and not any(crash in words for crash in CRASHES):
            return error
        del self._deaths[key]
        self._containers.recover(container, term)
        return CodeFailed(
            f"container {container} {words}, while it ran epoch {message.turn} of {message.writer}",
            hint="nothing was changed; mend the function, or give the pond more memory",
            resident=message.resident,
        )

    def _decide(self, commit: EpochCommit, terms: Any) -> epochs.Event:
        with self._lock:
            for container, term in terms.items():
                if not self._containers.members.serves(container, term):
                    lost = StageLost(
                        f"container {container} was restarted before the epoch was decided",
                        container=container,
                    )
                    return epochs.Failed(None, lost)
            try:
                record, committed = updates.commit_epoch(self._record, commit.message)
            except MillpondError as error:
                return epochs.Failed(None, error)
            # From the moment it is decided it is unseen: U must not be told before it is visible.
            self._unseen[commit.message.resident] = commit
            try:
                self._write(record)
            except Exception as error:  # noqa: BLE001 - whatever it is: the entry may be on disk
                del self._unseen[commit.message.resident]
                return epochs.Failed(None, self._not_written(error), in_doubt=True)
            return epochs.Decided(committed)

    def _not_written(self, error: Exception) -> MillpondError:
        if isinstance(error, MillpondError):
            return error
        path = os.path.join(self._root, JOURNAL)
        return WriteFailed(f"{path} cannot be written: {type(error).__name__}: {error}", path=path)

    # Progress

    def _progress(self, name: str) -> StateProgress:
        """Progress as it is published: an epoch that is not visible everywhere does not count."""
        unseen = self._unseen.get(name)
        return updates.progress(
            catalogue.resident_of(self._record, name), unseen.held_back if unseen is not None else {}
        )

    def _pin(self, message: Pin) -> Pinned:
        with self._lock:
            before = self._record
            record, pinned = fetches.pin(before, message, self._progress(message.state).update)
            if record is not before:
                self._write(record)
        self._tell_progress(message.state)
        return pinned

    def _move_progress(self, resident: str, decide: Callable[[PondRecord], PondRecord]) -> None:
        """Carries out a decision that may move U or F; if it does, every container learns it."""
        catalogue.resident_of(self._record, resident)
        self._change(decide)
        self._tell_progress(resident)

    def _tell_progress(self, resident: str) -> None:
        """Tells containers F and U as they are published, if compaction may go on by it.

        One that does not hear it compacts less, and hears it the next time.
        """
        with self._lock:
            published = self._progress(resident)
            advance = Advance(resident, published.fetch, published.update)
            behind = [
                container
                for container, known in self._told.items()
                if resident in known
                and _compactable(known[resident]) != min(published.fetch, published.update)
            ]
        for container in behind if published.fetch > -math.inf else ():
            with suppress(MillpondError):
                self._containers.ask(container, advance)
                with self._lock:
                    known = self._told.get(container, {}).get(resident)
                    if known is not None:
                        self._told[container] = {
                            **self._told[container],
                            resident: Resident(known.spec, known.born, published.fetch, published.update),
                        }

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

    # Slices

    def place(self, owners: Sequence[int]) -> None:
        """Gives slices to those owners. While they change hands, no epoch of any resident is committed."""
        with ExitStack() as stack:
            stack.enter_context(self._catalogue_lock)
            for name in sorted(self._record.residents):
                stack.enter_context(self._commit_locks[name])
                self._make_visible(name)
            self._call_home()
            try:
                for (source, target), slices in placement.moves(self._record.owners, owners).items():
                    self._hand_over(source, target, slices)
            except MillpondError:
                with suppress(MillpondError):
                    self._call_home()
                raise

    def _hand_over(self, source: int, target: int, slices: list[SliceId]) -> None:
        """Release, adopt, journal. Before the entry the slices are the source's, after it the target's."""
        numbers = [int(number) for number in slices]
        self._astray |= {source, target}
        self._containers.ask_patiently(source, Release(self._order(), numbers))
        grounds = dict(placement.grounds_of(self._record, slices))
        adopt = Adopt(self._order(), grounds, self._record.decided())
        try:
            term, _ = self._containers.ask_incarnation(target, adopt)
        except CorruptFile as error:
            # A source that began anew meanwhile wrote down elsewhere what they rest on, and tidied up.
            if grounds == placement.grounds_of(self._record, slices):
                raise
            raise Unavailable(f"container {source} was restarted", address="") from error
        with self._lock:
            if not self._containers.members.serves(target, term):
                raise Unavailable(f"container {target} was restarted", address="")
            after = [target if n in slices else owner for n, owner in enumerate(self._record.owners)]
            record = placement.placed(self._record, after)
            self._write(placement.grounded(record, directory_name(term, target), slices))
        self._containers.ask_patiently(target, Confirm(self._order(), numbers))
        # An incarnation that came up meanwhile took them for its own.
        self._containers.ask_patiently(source, Release(self._order(), numbers))
        self._astray -= {source, target}
        self._untidy = True

    def _call_home(self) -> None:
        """Containers that may serve other slices than the journal says begin anew, with those that it says."""
        if self._astray:
            with self._lock:
                if self._in_doubt:
                    self._write(self._record)
            for container in sorted(self._astray):
                self._containers.recover(container, broken=True)
                self._astray.discard(container)

    def _order(self) -> int:
        """Numbers what containers are told of slices: what comes late counts no more."""
        with self._lock:
            self._orders += 1
            return self._orders

    def _locate(self) -> Placement:
        """Whoever asks may have missed a container."""
        if self._containers.members.due(self._runtime.now()):
            self._runtime.spawn(self._containers.retry, "millpond-retry")
        with self._lock:
            record = self._record
        live = dict(self._containers.live)
        return Placement(
            root=self._root,
            version=record.version,
            owners=list(record.owners),
            containers=[
                ContainerInfo(c, each.host.pid, each.host.address, tuple(record.slices_of(c)))
                for c, each in sorted(live.items())
            ],
        )

    def _checkpoint_all(self) -> None:
        self._containers.map(lambda c: self._containers.ask_patiently(c, Checkpoint()), self._containers.ids)

    def _tidy(self) -> None:
        """Removes files that nobody needs any more: of earlier incarnations, and of residents that were forgotten.

        What cannot be removed now is tried again later: it is in nobody's way.
        """
        self._tidy_next_s = self._runtime.now() + TIDY_S
        with self._catalogue_lock, suppress(OSError, Unavailable):
            with self._lock:
                if self._in_doubt:
                    # Nothing goes that an entry which may be on disk tells of.
                    self._write(self._record)
                record = self._record
            live = dict(self._containers.live)
            # Only who serves all that the journal gives it can tell what is needed.
            if set(live) != set(self._containers.ids) or self._astray:
                return
            reports: dict[int, ContainerReport] = {
                c: self._containers.ask(c, ContainerStatus()) for c in live
            }
            needed = {name for report in reports.values() for name in report.needs}
            own = {directory_name(each.term, container) for container, each in live.items()}
            base = os.path.join(self._root, CONTAINERS)
            for name in self._files.list(base):
                kept = name in needed | own | set(record.grounds)
                # A later term is of a container that is coming up.
                if is_directory(name) and not kept and term_of(name) <= record.term:
                    self._remove_directory(os.path.join(base, name))
            self._tidy_waiting()
            for container, each in live.items():
                directory = directory_name(each.term, container)
                gone = [n for n in range(record.slices) if n not in record.slices_of(container)]
                if directory not in needed and gone:
                    self._containers.ask(container, Release(self._order(), gone, gone=True))
            known = {resident.resident.id for resident in record.residents.values()}
            for name in self._files.list(os.path.join(self._root, SNAPSHOTS)):
                if name not in known:
                    remove_tree(self._files, os.path.join(self._root, SNAPSHOTS, name))
            self._untidy = bool(needed) or bool(set(record.grounds) - own)

    def _tidy_waiting(self) -> None:
        """Removes rows that wait for queries which nobody knows any more."""
        base = os.path.join(self._root, WAITING)
        every = [
            (state, name, query)
            for state in self._files.list(base)
            for name in self._files.list(os.path.join(base, state))
            for query in self._files.list(os.path.join(base, state, name))
        ]
        # Only now: a query is in the journal before it has files.
        with self._lock:
            known = {
                (state, name, query)
                for state, resident in self._record.residents.items()
                for name, fetcher in resident.fetchers.items()
                for query in fetcher.queries
            }
        for parts in every:
            if parts not in known:
                remove_tree(self._files, os.path.join(base, *parts))

    def _remove_directory(self, directory: str) -> None:
        # Without its manifest a directory is nothing: a crash half-way leaves no half log.
        self._files.remove(os.path.join(directory, MANIFEST))
        self._files.sync_dir(directory)
        remove_tree(self._files, directory)

    def _metrics(self) -> PondMetrics:
        reports: dict[int, ContainerReport] = {}
        for container in sorted(self._containers.live):
            with suppress(Unavailable):
                reports[container] = self._containers.ask(container, ContainerStatus())
        residents: dict[str, dict[str, dict[str, Any]]] = {}
        for report in reports.values():
            for plural, figures in report.residents.items():
                for name, own in figures.items():
                    total = residents.setdefault(plural, {}).setdefault(name, {})
                    for key, value in own.items():
                        total[key] = (
                            total[key] + value if key in total and isinstance(value, int | float) else value
                        )
        return PondMetrics(
            coordinator={
                "epochs_committed": self._epochs_committed,
                "epochs_replayed": self._epochs_replayed,
                "container_restarts": self._containers.members.restarts,
                "recovery_s_last": self._containers.recovery_s_last,
                "journal_entries": self._journal.entries_written,
                "term": self._record.term,
            },
            containers={container: report.metrics for container, report in reports.items()},
            residents=residents,
        )


def _compactable(resident: Resident) -> Progress:
    """Below this no fetch asks and no update comes, as far as a container knows."""
    return min(resident.fetch_progress, resident.final_below)
