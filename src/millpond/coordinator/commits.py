"""Commits epochs: carries out what the machine of each asks for, and tells progress only when all of it is visible."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from millpond.coordinator import catalogue, epochs, updates
from millpond.coordinator.backing import Backing
from millpond.coordinator.deaths import Deaths
from millpond.coordinator.epochs import EpochCommit
from millpond.coordinator.idleness import Idleness
from millpond.coordinator.latency import UpdateSteps
from millpond.coordinator.membership import Membership
from millpond.coordinator.memory import Memory
from millpond.coordinator.telling import Telling
from millpond.durable.crashpoints import reach
from millpond.errors import BackupLost, CodeFailed, MillpondError, StageLost, Unavailable
from millpond.runtime import Locks, Runtime
from millpond.wire.base import Call, SliceId, Term
from millpond.wire.epochs import BeginEpoch, CommitEpoch, EpochCommitted, EpochPlan, Prepare
from millpond.wire.house import Register
from millpond.wire.questions import ResidentProgress
from millpond.wire.rounds import Peer
from millpond.wire.specs import Spec

# How long those who ask for progress wait for an epoch that its driver did not wait for, and how often they look.
VISIBLE_S_MAX = 5.0
LOOK_S = 0.01


class Unseen(NamedTuple):
    """An epoch that is decided and not yet visible everywhere, and since when."""

    commit: EpochCommit
    since_s: float


class Commits:
    """Epochs of one resident come one at a time: containers log them in the order of decisions."""

    def __init__(
        self, memory: Memory, containers: Membership, telling: Telling, backing: Backing, runtime: Runtime
    ) -> None:
        self.committed = 0
        self.replayed = 0
        self._memory = memory
        self._containers = containers
        self._telling = telling
        self._backing = backing
        self._runtime = runtime
        self._locks: Locks[str] = Locks(runtime)
        # By resident, the epoch that is decided and not yet visible.
        self._unseen: dict[str, Unseen] = {}
        self._idleness = Idleness()
        self._ballot = 0
        self._deaths = Deaths()
        self.update_steps = UpdateSteps()

    def barrier(self, residents: Iterable[str]) -> None:
        """Returns when no epoch of these residents is under way that had begun before, and all that were decided are
        visible; raises what hinders that.
        """
        for name in sorted(residents):
            with self.paused([name]):
                pass

    @contextmanager
    def paused_soon(self, residents: Iterable[str], seconds: float) -> Iterator[bool]:
        """As `paused`, if that can be had within so many seconds; else False, and nothing is held up any more."""
        deadline = self._runtime.now() + seconds
        with ExitStack() as stack:
            for name in sorted(residents):
                if not self._acquire_visible(name, deadline):
                    stack.close()
                    yield False
                    return
                stack.callback(self._locks[name].release)
            yield True

    def _acquire_visible(self, name: str, deadline: float) -> bool:
        """Holds the resident's epochs up, once what was decided is visible; False, and it does not, if that takes longer."""
        shown: Unseen | None = None
        while self._locks[name].acquire(timeout=max(0.0, deadline - self._runtime.now())):
            unseen = self._unseen.get(name)
            if unseen is None:
                return True
            if shown is not None and unseen is not shown:
                # One is visible, and another is decided already: to make these visible is quick.
                try:
                    self._make_visible(name)
                except BaseException:
                    self._locks[name].release()
                    raise
                return True
            self._locks[name].release()
            if self._runtime.now() >= deadline:
                break
            if shown is None:
                # By another hand: it takes as long as it takes, and epochs of others are held up here.
                self._show_later(unseen)
                shown = unseen
            self._runtime.sleep(LOOK_S)
        return False

    @contextmanager
    def paused(self, residents: Iterable[str]) -> Iterator[None]:
        """No epoch of these residents is committed; what was decided of them is visible."""
        with ExitStack() as stack:
            for name in sorted(residents):
                stack.enter_context(self._locks[name])
                self._make_visible(name)
            yield

    def register(self, message: Register) -> None:
        with self._memory.lock:
            self._memory.change(lambda record: catalogue.register(record, message))
            if message.role == "updater":
                resident = self._memory.record.residents[message.resident]
                self._idleness.heard(resident, message.name, self._runtime.now())

    def begin(self, message: BeginEpoch) -> EpochPlan:
        """How the rows of an epoch are to be treated. Its updater counts from now on, if it was left out."""
        record = self._memory.record
        plan = updates.begin_epoch(record, message)
        if plan.replayed or not message.brings_rows:
            return plan
        # First, so that it is not left out any more; one that was counts again in the journal, before any row is staged.
        resident = record.residents[message.resident]
        self._idleness.begun(resident, message.updater, message.query, self._runtime.now())
        self._memory.change(lambda record: updates.awaken(record, message))
        return updates.begin_epoch(self._memory.record, message)

    def leave_out_silent(self) -> None:
        """U goes on without updaters that have been silent for longer than they may be."""
        self._idleness.keep_only(self._memory.record)
        for name in list(self._memory.record.residents):
            with self._memory.lock:
                record = self._memory.record
                if name not in record.residents:
                    continue
                silent = self._idleness.silent(record.residents[name], self._runtime.now())
                if silent:
                    self._memory.write(updates.leave_out(record, name, silent))
            if silent:
                self.tell_progress(name)

    def commit(self, message: CommitEpoch) -> EpochCommitted:
        catalogue.resident_of(self._memory.record, message.resident)
        with self.paused([message.resident]):
            record = self._memory.record
            if updates.begin_epoch(record, message).replayed:
                self.replayed += 1
                return self._seen_with(updates.replay_epoch(record, message), message.resident)
            updates.check_epoch(record, message)
            commit = self._begin(message)
            self._drive(commit, until_decided=message.early)
            if commit.error is not None:
                raise commit.error
            assert commit.committed is not None
            self.committed += 1
            unseen = self._unseen.get(message.resident)
            if unseen is not None:
                self._show_later(unseen)
            return self._seen_with(commit.committed, message.resident)

    def _seen_with(self, committed: EpochCommitted, name: str) -> EpochCommitted:
        born, seen = self.seen().get(name, (0, 0))
        return replace(committed, born=born, seen=seen)

    def await_visible(self, name: str) -> None:
        """Waits for an epoch that was answered early, for so long after its decision. Not while the memory is locked."""
        unseen = self._unseen.get(name)
        if unseen is None or not unseen.commit.message.early:
            return
        deadline = unseen.since_s + VISIBLE_S_MAX
        while self._unseen.get(name) is unseen and self._runtime.now() < deadline:
            # Whoever is at the resident's epochs has made it visible when it lets go, or will be told why not.
            if self._locks[name].acquire(timeout=LOOK_S):
                self._locks[name].release()
                if self._unseen.get(name) is unseen:
                    self._runtime.sleep(LOOK_S)

    def await_all_visible(self) -> None:
        """The same of all residents."""
        for name in list(self._unseen):
            self.await_visible(name)

    def show_early(self) -> None:
        """Tries again to make visible what was answered early, where all containers serve: the others are brought back first."""
        for unseen in list(self._unseen.values()):
            if unseen.commit.message.early and set(self._containers.ids) <= set(self._containers.live):
                self._show_later(unseen, seconds=0)

    def progress(self, name: str) -> ResidentProgress:
        """Progress as it is published: an epoch that is not visible everywhere does not count."""
        with self._memory.lock:
            unseen = self._unseen.get(name)
            resident = catalogue.resident_of(self._memory.record, name)
            return updates.progress(
                resident,
                unseen.commit.held_back if unseen is not None else {},
                self._idleness.silent_s(resident, self._runtime.now()),
            )

    def seen(self) -> dict[str, tuple[int, int]]:
        """When each resident was born, and how many epochs of it are visible: one at a time is decided and not yet."""
        with self._memory.lock:
            residents = self._memory.record.residents.items()
            return {name: (each.born, each.epochs - (name in self._unseen)) for name, each in residents}

    def tell_progress(self, name: str) -> None:
        published = self.progress(name)
        self.update_steps.note(name, published.update, self._runtime.now())
        self._telling.tell_progress(self._containers, name, published.fetch, published.update)

    def _note_end(self, message: CommitEpoch) -> None:
        with self._memory.lock:
            resident = self._memory.record.residents.get(message.resident)
            if resident is None:
                return
            if updates.has_rows(message):
                self._idleness.heard(resident, message.updater, self._runtime.now())
            self._idleness.ended(resident, message.updater, message.query)

    def _begin(self, message: CommitEpoch) -> EpochCommit:
        """The machine for an epoch: of the containers that own a slice of the resident, in the order of ballots."""
        with self._memory.lock:
            self._ballot += 1
            backups = self._backing.plan(message.resident)
            record = self._memory.record
            resident = record.residents[message.resident]
            owners = {record.owners[n] for n in resident.spec.places(record.slices)}
            holders = {c: self._containers.members.term_of(c) for c in sorted(owners)}
            before = {message.updater: resident.updaters[message.updater].watermark}
            return EpochCommit(
                message,
                holders,
                self._ballot,
                before,
                self._memory.in_doubt,
                backups,
                resident.decided(),
                resident.epochs + 1,
                self._peers(holders, resident.spec) if resident.spec.runs_rounds else (),
            )

    def _peers(self, holders: Mapping[int, Term], spec: Spec) -> list[Peer]:
        """Who has which slices of a resident, for those who run its epochs together. The caller holds the memory's lock."""
        owners = self._memory.record.owners
        slices: dict[int, list[SliceId]] = {container: [] for container in holders}
        for number in spec.places(self._memory.record.slices):
            slices[owners[number]].append(number)
        live = {c: self._containers.live.get(c) for c in holders}
        addresses = {
            c: one.host.address if one is not None and one.term == holders[c] else ""
            for c, one in live.items()
        }
        return [Peer(c, term, addresses[c], slices[c]) for c, term in holders.items()]

    def _make_visible(self, resident: str) -> None:
        """Has every container apply the resident's decided epoch, if there is one that is not visible yet."""
        unseen = self._unseen.get(resident)
        if unseen is not None:
            unseen.commit.resume()
            self._drive(unseen.commit)
            if unseen.commit.error is not None:
                raise unseen.commit.error

    def _show_later(self, unseen: Unseen, seconds: float = -1) -> None:
        # Where no thread can be started, as when an interpreter ends, whoever comes next does it, or recovery.
        with suppress(RuntimeError):
            self._runtime.spawn(partial(self._show, unseen, seconds), "millpond-show")

    def _show(self, unseen: Unseen, seconds: float) -> None:
        """Makes the epoch visible, unless others do, or are at the resident's epochs for so long."""
        name = unseen.commit.message.resident
        lock = self._locks[name]
        if not lock.acquire(timeout=seconds):
            return
        try:
            if self._unseen.get(name) is unseen:
                # Whatever it is: whoever comes next tries again, and is told.
                with suppress(Exception):
                    self._make_visible(name)
        finally:
            lock.release()

    def _drive(self, commit: EpochCommit, *, until_decided: bool = False) -> None:
        while effects := commit.effects():
            if until_decided and commit.committed is not None:
                return
            for event in self._runtime.map(lambda effect: self._carry_out(commit, effect), effects):
                commit.on(event)

    def _carry_out(self, commit: EpochCommit, effect: epochs.Effect) -> epochs.Event:
        match effect:
            case epochs.Ask(container, term, message):
                try:
                    return epochs.Replied(container, self._containers.ask(container, message))
                except BackupLost as error:
                    # Without it, when the epoch comes again.
                    self._backing.lose(error.attributes()["container"], error.attributes()["term"])
                    return epochs.Failed(container, StageLost(error.message, container=container))
                except MillpondError as error:
                    return epochs.Failed(container, self._explained(error, container, term, message))
            case epochs.Bring(container, term, broken):
                return self._bring(commit.message.resident, container, term, broken)
            case epochs.Settle():
                try:
                    self._memory.settle()
                except Exception as error:  # noqa: BLE001 - whatever it is: the entry may be on disk
                    return epochs.Failed(None, self._memory.not_written(error), in_doubt=True)
                return epochs.Settled()
            case epochs.Decide(terms):
                return self._decide(commit, terms)
            case epochs.Publish():
                reach("publish.before")
                with self._memory.lock:
                    self._unseen.pop(commit.message.resident, None)
                self._note_end(commit.message)
                reach("publish.after")
                self.tell_progress(commit.message.resident)
                return epochs.Published()

    def _bring(self, resident: str, container: int, term: Term, broken: bool) -> epochs.Event:
        def is_needed() -> bool:
            """Whether it has slices of the resident, as far as the journal knows."""
            record = self._memory.record
            known = record.residents.get(resident)
            return known is None or container in {record.owners[n] for n in known.spec.places(record.slices)}

        try:
            if broken:
                self._containers.recover(container, term, broken=True)
            back = self._containers.await_back(container, term, is_needed)
        except MillpondError as error:
            return epochs.Failed(container, error)
        return epochs.Relieved(container) if back is None else epochs.Back(container, back)

    def _explained(
        self, error: MillpondError, container: int, term: Term, message: Call[Any]
    ) -> MillpondError:
        """A container that ends again and again over one epoch of user code: that is the code's doing."""
        if not isinstance(message, Prepare) or not isinstance(error, Unavailable):
            return error
        resident = self._memory.record.residents.get(message.resident)
        if resident is None or not resident.spec.runs_code:
            return error
        if not self._containers.await_end(container, term):
            return error
        words = self._containers.last_words(container)
        with self._memory.lock:
            self._deaths, blamed = self._deaths.after(message, words)
        if not blamed:
            return error
        return CodeFailed(
            f"container {container} {words}, while it ran epoch {message.turn} of {message.writer}",
            hint="nothing was changed; mend the function, or give the pond more memory",
            resident=message.resident,
        )

    def _decide(self, commit: EpochCommit, terms: Mapping[int, Term]) -> epochs.Event:
        with self._memory.lock:
            for container, term in terms.items():
                if not self._containers.members.serves(container, term):
                    lost = StageLost(
                        f"container {container} was restarted before the epoch was decided",
                        container=container,
                    )
                    return epochs.Failed(None, lost)
            record = self._memory.record
            places = record.residents[commit.message.resident].spec.places(record.slices)
            if not {record.owners[number] for number in places} <= set(terms):
                return epochs.Failed(None, StageLost("slices went to other containers", container=None))
            if not self._backing.is_covered(commit.message.resident, commit.backups):
                return epochs.Failed(
                    None, StageLost("other backups must hold the epoch, too", container=None)
                )
            try:
                record, committed = updates.commit_epoch(self._memory.record, commit.message)
            except MillpondError as error:
                return epochs.Failed(None, error)
            # From the moment it is decided it is unseen: U must not be told before it is visible.
            self._unseen[commit.message.resident] = Unseen(commit, self._runtime.now())
            try:
                self._memory.write(record)
            except Exception as error:  # noqa: BLE001 - whatever it is: the entry may be on disk
                del self._unseen[commit.message.resident]
                return epochs.Failed(None, self._memory.not_written(error), in_doubt=True)
            return epochs.Decided(committed)
