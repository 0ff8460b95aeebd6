"""Slices that go to another container while all goes on: copied where they must be, then switched between two epochs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from millpond.container.layout import backup_directory_name
from millpond.coordinator import copies, placement
from millpond.coordinator.backing import Backing, wanted_backups
from millpond.coordinator.commits import Commits
from millpond.coordinator.copies import Copying
from millpond.coordinator.memory import Memory
from millpond.coordinator.slices import Slices
from millpond.coordinator.switches import Switch
from millpond.errors import MillpondError, Unavailable
from millpond.runtime import Lock, Locks, Runtime
from millpond.wire.backups import AskLag, Copy, Dismiss, Enlist
from millpond.wire.base import Call, SliceId, Term
from millpond.wire.moves import Stage

LAG_RECORDS_MAX = 2
LAG_BYTES_MAX = 4 << 20
"""A backup that has no more than this to apply is near enough to switch."""
CATCH_UP_S_MAX = 60.0
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""How long epochs may be waited for before slices switch, while others wait: longer each time."""
LOOK_S = 0.01
COPIED_AT_ONCE = 8


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
        self._copies = 0
        self._destinations: list[tuple[int, frozenset[SliceId]]] = []
        """Of each move under way the target and its slices: what it holds of them is not too much."""
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
            self._copies += 1
        try:
            while effects := copying.effects():
                for effect in effects:
                    if isinstance(effect, copies.Copy):
                        copying.on(self._copy_in_steps(effect, watch))
                    else:
                        copying.on(self._copy(effect))
        finally:
            self._copies -= 1
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
                    term = self._ask(container, Enlist(self._slices.order(), list(slices)))
                    self._backing.enlist(container, term, slices)
                    self._commits.barrier(self._memory.record.residents)
                case copies.Copy(source, container, slices):
                    live = self._containers.live.get(source)
                    if live is None:
                        raise Unavailable(f"container {source} is not up", address="")
                    ids = [known.resident.id for known in self._memory.record.residents.values()]
                    order = self._slices.order()
                    term = self._ask(container, Copy(order, live.host.address, list(slices), ids))
                case copies.Enter(container, term, slices):
                    self._enter_backup(container, term, slices)
                case copies.Dismiss(container, slices):
                    # An order from before: whoever enlists it meanwhile is not undone.
                    order = self._slices.order()
                    term = self._containers.members.term_of(container)
                    self._backing.lose(container, term, slices)
                    # An entry that failed may be on disk: it must not name one that lets go.
                    self._memory.settle()
                    term = self._ask(container, Dismiss(order, list(slices)))
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

    def _ask(self, container: int, message: Call[Any]) -> Term:
        """Asks the incarnation that serves now; which it was."""
        live = self._containers.live.get(container)
        if live is None:
            raise Unavailable(f"container {container} is not up", address="")
        live.connection.call(message)
        return live.term

    # Moves

    def move(self, source: int, target: int, slices: Sequence[SliceId], watch: Watch | None = None) -> None:
        """On return the target serves the slices, and the source holds a backup of them; or nothing has changed.

        The caller sees to it that the source serves them. Raises what hindered it.
        """
        destination = target, frozenset(slices)
        self._destinations.append(destination)
        try:
            self._move(source, target, slices, watch or Watch())
        finally:
            self._destinations.remove(destination)

    def _move(self, source: int, target: int, slices: Sequence[SliceId], watch: Watch) -> None:
        # Who may serve what the journal does not know of begins anew first.
        self._slices.call_home()
        held = self._backing.held()
        if any(target not in held[number] for number in slices):
            watch.reaches("copying")
            self.copy(source, target, slices, watch)
        watch.reaches("catching up")
        self._catch_up(target, slices)
        watch.reaches("switching")
        for limit_s in PAUSES_S:
            with self._slices.moving:
                residents = self._concerned(slices)
                with self._commits.paused_soon(residents, limit_s) as is_paused, self._placing:
                    # One that has come since has no epoch that would be waited for.
                    if is_paused and residents == self._concerned(slices):
                        return self._switch(source, target, slices)
            self._runtime.sleep(limit_s)
        raise Unavailable(
            f"epochs of {', '.join(residents)} take so long that slices cannot move between them",
            hint="try again when they are done",
            address="",
        )

    def _switch(self, source: int, target: int, slices: Sequence[SliceId]) -> None:
        started = self._runtime.now()
        switch = Switch(source, {target: slices}, live=True)
        self._slices.drive(switch)
        if not switch.moved:
            raise switch.error or Unavailable("the slices could not be switched", address="")
        self.switched += len(slices)
        self.pause_s_last = self._runtime.now() - started

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

    def replicate(self, wanted: int, leaving: Collection[int] = ()) -> bool:
        """One step: a copy that is missing is made, or what is too much is let go. False when there was nothing to do.

        Those that are `leaving` hold none in the end.
        """
        with self._replicating:
            return self._replicate(wanted, leaving)

    def _replicate(self, wanted: int, leaving: Collection[int]) -> bool:
        record = self._memory.record
        live = {c: each for c, each in self._containers.live.items() if c not in leaving}
        held = self._backing.held()
        hosts = {container: each.host.host for container, each in live.items()}
        want = wanted_backups(record, live, hosts, wanted, held)
        destinations = list(self._destinations)
        missing: dict[tuple[int, int], list[SliceId]] = {}
        surplus: dict[int, list[SliceId]] = {}
        for number, containers in want.items():
            owner = record.owners[number]
            lacking = [container for container in containers if container not in held[number]]
            for container in lacking:
                if owner in self._containers.live:
                    missing.setdefault((owner, container), []).append(number)
            if not lacking:
                awaited = {target for target, moved in destinations if number in moved}
                for container in set(held[number]).difference(containers, awaited):
                    surplus.setdefault(container, []).append(number)
        for container, slices in surplus.items():
            self._let_go(container, slices)
        for (owner, container), slices in missing.items():
            self.copy(owner, container, slices)
        return bool(missing or surplus)

    def _let_go(self, container: int, slices: Collection[SliceId]) -> None:
        order = self._slices.order()
        term = self._containers.members.term_of(container)
        self._backing.lose(container, term, slices)
        with suppress(MillpondError):
            self._ask(container, Dismiss(order, sorted(slices)))
