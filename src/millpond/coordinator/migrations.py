"""Slices that go to another container while all goes on: copied where they must be, then switched between two epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType

from millpond.container.layout import backup_directory_name
from millpond.coordinator import copies, placement
from millpond.coordinator.backing import Backing, wanted_backups
from millpond.coordinator.commits import Commits
from millpond.coordinator.copies import Copying
from millpond.coordinator.memory import Memory
from millpond.coordinator.slices import Slices
from millpond.coordinator.switches import Phase, Switch
from millpond.errors import MillpondError, Unavailable
from millpond.runtime import Lock, Locks, Runtime
from millpond.wire.backups import SWITCH_S, AskLag, Copy, Dismiss, Enlist, GetReady
from millpond.wire.base import LONG_CALL_S, SliceId, Term
from millpond.wire.moves import Stage

LAG_RECORDS_MAX = 2
LAG_BYTES_MAX = 4 << 20
"""A backup that has no more than this to apply is near enough to switch."""
CATCH_UP_S_MAX = 60.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""How long epochs may be waited for before slices switch, while others wait: longer each time."""
LOOK_S = 0.01
COPIED_AT_ONCE = 8
ENTRY_S_MAX = 0.5
"""Where the journal takes longer for an entry, no epochs are made to wait for one more."""
JOURNAL_TRIED_S = 1.0
"""An entry that is older than this does not tell how quick the journal's disk is now."""


class Watch:
    """Is told how far a move is; it may raise, and then the move is broken off."""

    def reaches(self, stage: Stage) -> None:
        pass

    def copies(self, share: float) -> None:
        pass


class Migrations:
    """Copies and switches. Several may be under way; of one slice only one."""

    def __init__(
        self,
        memory: Memory,
        slices: Slices,
        commits: Commits,
        backing: Backing,
        placing: Lock,
        runtime: Runtime,
    ) -> None:
        self.copied = 0
        self.switched = 0
        self.pause_s_last = 0.0
        self.wanted = 0
        """How many backups a slice should have."""
        self._memory = memory
        self._slices = slices
        self._containers = slices.containers
        self._commits = commits
        self._backing = backing
        self._placing = placing
        self._replicating = runtime.lock()
        # Of one container, copies are made one after the other: of two of the same slice, one would undo the other.
        self._copying: Locks[int] = Locks(runtime)
        self._admitting = runtime.lock()
        # Containers to which one is under way.
        self._copies: set[int] = set()
        self._runtime = runtime

    # Copies

    def copy(
        self, source: int, container: int, slices: Sequence[SliceId], watch: Watch | None = None
    ) -> None:
        """On return the container holds a backup of the slices, which the source serves."""
        with self._copying[container]:
            held = self._backing.held()
            missing = [number for number in slices if container not in held[number]]
            if missing:
                self._copy_missing(Copying(source, container, missing), watch)

    def _copy_missing(self, copying: Copying, watch: Watch | None) -> None:
        with self._admitting:
            self._copies.add(copying.container)
        try:
            while effects := copying.effects():
                for effect in effects:
                    if isinstance(effect, copies.Copy):
                        copying.on(self._copy_in_steps(effect, watch))
                    else:
                        copying.on(self._copy(effect))
        finally:
            self._copies.discard(copying.container)
        if copying.error is not None:
            raise copying.error
        self.copied += len(copying.slices)

    @contextmanager
    def without_copies(self) -> Iterator[None]:
        """None is under way, and none begins."""
        with self._admitting:
            while self._copies:
                self._runtime.sleep(LOOK_S)
            yield

    def _copy_in_steps(self, effect: copies.Copy, watch: Watch | None) -> copies.Event:
        """A few slices at a time, so that it can be told how far it is, and be broken off."""
        event: copies.Event = copies.Failed(Unavailable("there is nothing to copy", address=""))
        for start in range(0, len(effect.slices), COPIED_AT_ONCE):
            try:
                if watch is not None:
                    watch.copies(start / len(effect.slices))
            except MillpondError as error:
                return copies.Failed(error)
            event = self._copy(effect._replace(slices=effect.slices[start : start + COPIED_AT_ONCE]))
            if isinstance(event, copies.Failed):
                return event
        return event

    def _copy(self, effect: copies.Effect) -> copies.Event:
        try:
            match effect:
                case copies.Enlist(container, slices):
                    term = self._slices.ask(container, Enlist(self._slices.order(), list(slices)))
                    self._backing.enlist(container, term, slices)
                    self._commits.barrier(self._memory.record.residents)
                case copies.Copy(source, container, slices):
                    live = self._containers.live.get(source)
                    if live is None:
                        raise Unavailable(f"container {source} is not up", address="")
                    ids = [known.resident.id for known in self._memory.record.residents.values()]
                    order = self._slices.order()
                    term = self._slices.ask(container, Copy(order, live.host.address, list(slices), ids))
                case copies.Enter(container, term, slices):
                    self._enter_backup(container, term, slices)
                case copies.Dismiss(container, slices):
                    # An order from before: whoever enlists it meanwhile is not undone.
                    order = self._slices.order()
                    term = self._containers.members.term_of(container)
                    self._backing.lose(container, term, slices)
                    # An entry that failed may be on disk: it must not name one that lets go.
                    self._memory.settle()
                    term = self._slices.ask(container, Dismiss(order, list(slices)))
        except MillpondError as error:
            return copies.Failed(error)
        except OSError as error:
            return copies.Failed(self._memory.not_written(error))
        return copies.Done(term)

    def _enter_backup(self, container: int, term: Term, slices: Sequence[SliceId]) -> None:
        with self._memory.lock:
            if not self._containers.members.serves(container, term):
                raise Unavailable(f"container {container} was restarted", address="")
            if not self._backing.is_enlisted(container, term, slices):
                raise Unavailable(f"container {container} missed an epoch", address="")
            record = self._memory.record
            if any(record.owners[number] == container for number in slices):
                raise Unavailable("the slices went there", address="")
            directory = backup_directory_name(term, container)
            self._memory.write(placement.backed_up_in(record, directory, slices))
            self._backing.discharge(container, term, slices)

    # Moves

    def move(self, source: int, target: int, slices: Sequence[SliceId], watch: Watch | None = None) -> None:
        """On return the target serves the slices, and the source holds a backup of them; or nothing has changed.

        The caller sees to it that the source serves them. Raises what hindered it.
        """
        watch = watch or Watch()
        # Who may serve what the journal does not know of begins anew first.
        self._slices.call_home()
        held = self._backing.held()
        if any(target not in held[number] for number in slices):
            watch.reaches("copying")
            self.copy(source, target, slices, watch)
        watch.reaches("catching up")
        self._catch_up(target, slices)
        for limit_s in PAUSES_S:
            self._await_ready(source, target, watch)
            watch.reaches("switching")
            with self._slices.moving:
                try:
                    switch = self._switch_soon(source, target, slices, limit_s)
                    if switch is not None and switch.phase is Phase.CONFIRM:
                        # It holds nobody up, and is done before anything that takes long.
                        self._slices.drive(switch)
                finally:
                    self._runtime.map(self._go_on, (source, target))
                if switch is not None:
                    break
            self._runtime.sleep(limit_s)
        else:
            raise Unavailable(
                "epochs or upkeep take so long that slices cannot move between them",
                hint="try again when they are done",
                address="",
            )
        if not switch.moved:
            raise switch.error or Unavailable("the slices could not be switched", address="")
        self.switched += len(slices)

    def _go_on(self, container: int) -> None:
        """It may do what takes long again. One that does not hear of it begins by itself."""
        with suppress(MillpondError):
            self._containers.ask(container, GetReady({}, 0))

    def _await_ready(self, source: int, target: int, watch: Watch) -> None:
        """Returns when neither is at work that would hold a switch up."""
        deadline = self._runtime.now() + CATCH_UP_S_MAX
        while True:
            busy = self._busy(source, target, LOOK_S)
            if not busy and self._is_journal_quick():
                return
            if self._runtime.now() > deadline:
                why = (
                    f"container {busy[0]} writes down or rebuilds what it has for long"
                    if busy
                    else f"the disk of the journal is slow: an entry takes {self._memory.write_s:.1f} s"
                )
                raise Unavailable(why, address="")
            watch.reaches("catching up")
            # Of the journal nothing is known before the next entry.
            self._runtime.sleep(LOOK_S if busy else JOURNAL_TRIED_S)

    def _is_journal_quick(self) -> bool:
        """Whether an entry is written as soon as slices may switch; epochs wait for it, and nobody can break it off."""
        try:
            self._memory.try_disk(JOURNAL_TRIED_S)
        except OSError as error:
            raise self._memory.not_written(error) from None
        return self._memory.write_s <= ENTRY_S_MAX

    def _busy(self, source: int, target: int, quiet_s: float, seconds_max: float = LONG_CALL_S) -> list[int]:
        """Those that are at such work; the others begin none for so many seconds."""
        decided = self._memory.record.decided()

        def is_ready(container: int) -> bool:
            # Who has a slow disk may be left.
            ask = GetReady(decided, quiet_s, container == target, seconds_max)
            return self._containers.ask(container, ask).is_ready

        sides = (source, target)
        answers = self._runtime.map(is_ready, sides)
        return [container for container, ready in zip(sides, answers, strict=True) if not ready]

    def _switch_soon(
        self, source: int, target: int, slices: Sequence[SliceId], limit_s: float
    ) -> Switch | None:
        """Switches the slices, but for what need not be done while epochs wait. None if that could not begin in time: then
        nothing has happened.
        """
        quiet_s = limit_s + 3 * SWITCH_S
        quiet_until_s = self._runtime.now() + quiet_s
        if self._busy(source, target, quiet_s):
            return None
        residents = self._concerned(slices)
        with self._commits.paused_soon(residents, limit_s) as is_paused, self._placing:
            # One that has come since has no epoch that would be waited for.
            if not is_paused or residents != self._concerned(slices):
                return None
            started = self._runtime.now()
            if started + 2 * SWITCH_S > quiet_until_s:
                return None
            # What was decided meanwhile is applied, too: it may be long, and then nobody is ended for it.
            if not self._are_ready_soon(source, target, quiet_until_s - started):
                return None
            if self._memory.write_s > ENTRY_S_MAX:
                return None
            switch = Switch(source, {target: slices}, live=True)
            self._slices.drive(switch, until=Phase.CONFIRM)
            self.pause_s_last = self._runtime.now() - started
            return switch

    def _are_ready_soon(self, source: int, target: int, quiet_s: float) -> bool:
        with suppress(MillpondError):
            return not self._busy(source, target, quiet_s, SWITCH_S)
        return False

    def _concerned(self, slices: Sequence[SliceId]) -> list[str]:
        """Residents that live in one of the slices."""
        record = self._memory.record
        return [
            name
            for name, known in record.residents.items()
            if set(slices).intersection(known.spec.places(record.slices))
        ]

    def _catch_up(self, target: int, slices: Sequence[SliceId]) -> None:
        """Waits until the target has applied almost all that was decided."""
        deadline = self._runtime.now() + CATCH_UP_S_MAX
        while True:
            lag = self._containers.ask(target, AskLag(list(slices)))
            if lag.records <= LAG_RECORDS_MAX and lag.nbytes <= LAG_BYTES_MAX:
                return
            if self._runtime.now() > deadline:
                raise Unavailable(
                    f"container {target} does not catch up: {lag.records} records wait", address=""
                )
            self._runtime.sleep(LOOK_S)

    # Backups that are wanted

    def replicate(
        self,
        wanted: int,
        leaving: Collection[int] = (),
        bound: Mapping[SliceId, int] = MappingProxyType({}),
    ) -> bool:
        """One step: a copy that is missing is made, or what is too much is let go. False when there was nothing to do.

        Those that are `leaving` hold none in the end. Slices that are `bound` for a container need what it holds of them.
        """
        with self._replicating:
            return self._replicate(wanted, leaving, bound)

    def _replicate(self, wanted: int, leaving: Collection[int], bound: Mapping[SliceId, int]) -> bool:
        record = self._memory.record
        live = {c: each for c, each in self._containers.live.items() if c not in leaving}
        held = self._backing.held()
        hosts = {container: each.host.host for container, each in live.items()}
        want = wanted_backups(record, live, hosts, wanted, held)
        missing: dict[tuple[int, int], list[SliceId]] = {}
        surplus: dict[int, list[SliceId]] = {}
        for number, containers in want.items():
            owner = record.owners[number]
            lacking = [container for container in containers if container not in held[number]]
            for container in lacking:
                if owner in self._containers.live:
                    missing.setdefault((owner, container), []).append(number)
            if not lacking:
                for container in set(held[number]).difference([*containers, bound.get(number)]):
                    surplus.setdefault(container, []).append(number)
        for container, slices in surplus.items():
            self._let_go(container, slices)
        failures: list[MillpondError] = []
        for (owner, container), slices in missing.items():
            # One that takes none keeps no other from them.
            try:
                self.copy(owner, container, slices)
            except MillpondError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return bool(missing or surplus)

    def _let_go(self, container: int, slices: Collection[SliceId]) -> None:
        order = self._slices.order()
        term = self._containers.members.term_of(container)
        self._backing.lose(container, term, slices)
        with suppress(MillpondError):
            self._slices.ask(container, Dismiss(order, sorted(slices)))
