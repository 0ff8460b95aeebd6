"""The slices of one incarnation of a container: how they come, go and change roles, and what they rest on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

from millpond.container.backup_core import BackupCore
from millpond.container.backups import Backups, closed
from millpond.container.checkpoints import Checkpoints
from millpond.container.core import Core
from millpond.container.holdings.base import Means
from millpond.container.layout import (
    backup_directory_name,
    container_of_snapshot,
    directory_name,
    term_of_snapshot,
)
from millpond.container.log import Log
from millpond.container.marks import Marks
from millpond.container.quiet import Quiet
from millpond.container.recovery import rebuild
from millpond.durable.files import Files
from millpond.errors import BadMessage, StageLost
from millpond.runtime import Runtime
from millpond.wire.backups import Copy, Demote, Dismiss, Enlist, GetReady, Promote
from millpond.wire.base import ResidentId, SliceId
from millpond.wire.connection import Dialer
from millpond.wire.house import Adopt, Assign, Confirm, LetGo, Release

READY_S_MAX = 0.5
"""Who is at work for longer than this is not ready for slices to change hands."""


class Placing:
    """Two cores, each with a log and a manifest: of the slices that are served, and of those that are held for others.

    Orders of the coordinator are numbered: one that comes after a newer one about the same slice counts no more.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        assigned: Assign,
        means: Means,
        runtime: Runtime,
        dial: Dialer | None,
        is_leased: Callable[[], bool],
    ) -> None:
        self._files = files
        self._root = root
        container, term = assigned.container, assigned.term
        lock, numbers = runtime.lock, count(1)
        self._quiet = Quiet(runtime)

        def rests(core: Core, directory: str, *, backup: bool) -> tuple[Log, Checkpoints]:
            log = Log(files, root, directory, core, lock())
            checkpoints = Checkpoints(
                *(files, root, core, log, lock(), numbers, means.bounds),
                backup=backup,
                may_remove=is_leased,
                run=runtime.map,
                work=self._quiet.work,
            )
            return log, checkpoints

        self.core = Core(container, term, assigned.pond_slices, means)
        self.log, self.checkpoints = rests(self.core, directory_name(term, container), backup=False)
        held = BackupCore(container, term, assigned.pond_slices, means)
        held_log, held_checkpoints = rests(held, backup_directory_name(term, container), backup=True)
        self.backups = Backups(held, held_log, held_checkpoints, runtime, dial)
        for resident in assigned.residents:
            self.core.add(resident)
            held.add(resident)
            self.checkpoints.make_room(resident.id)
        self.log.make_room()
        # Of each slice the newest order, and the one by which it came to be served.
        self._orders: dict[SliceId, int] = {}
        self._promotions: dict[SliceId, int] = {}
        self._newest_order = 0
        self._order_lock = lock()
        self.rebuilt: Counter[str] = Counter()
        """Snapshots loaded and records replayed, as slices were adopted."""

    @property
    def both(self) -> list[tuple[Core, Checkpoints]]:
        """What is served, and what is held for others."""
        return [(self.core, self.checkpoints), (self.backups.core, self.backups.checkpoints)]

    def is_there(self) -> bool:
        """Whether the manifests are that were written."""
        return all(checkpoints.is_there() for _, checkpoints in self.both)

    def place(self, message: Any) -> None:
        match message:
            case Adopt():
                self._adopt(message)
            case Confirm(order, slices):
                self._confirm(order, slices)
            case Release(order, slices):
                self._release(order, slices)
            case LetGo():
                self._let_go(message)
            case Enlist(order, slices):
                with self.backups.checkpoints.lock:
                    self._check_order(order, slices)
                    self.backups.enlist(slices)
            case Copy(order, _, slices):
                self._check_order(order, slices)
                self.backups.copy(message)
            case Promote():
                self._promote(message)
            case Demote(order, slices):
                self._demote(order, slices)
            case Dismiss(order, slices):
                with self.backups.checkpoints.lock:
                    self._check_order(order, slices)
                    self.backups.dismiss(slices)
            case _:
                raise BadMessage(f"a container is not placed by {type(message).__name__}")

    def _adopt(self, message: Adopt) -> None:
        """Rebuilds slices beside those that are served; they are served once what they rest on is written down."""
        core = self.core
        with self._quiet.work(self.checkpoints.lock):
            self._check_order(message.order, list(message.slices))
            wanted = {n: directory for n, directory in message.slices.items() if n not in core.owned}
            adopt = Adopt(message.order, wanted, message.decided, message.careful)
            with Marks(core, self._files, self._root, message.careful) as marks:
                marks.spoil()
                rebuilt = rebuild(core, self._files, self._root, adopt, marks.set)
            for one in (one for held in rebuilt.slices.values() for one in held.values()):
                files = one.saved.files if one.saved is not None else ()
                if any(container_of_snapshot(file) not in (None, core.container) for file in files):
                    # What another container wrote goes with its disk.
                    one.write_anew()
            self.checkpoints.add(rebuilt.grounds)
            core.install(rebuilt.slices)
            self._learn(message.epochs)
            self.rebuilt.update(rebuilt.figures)

    def get_ready(self, message: GetReady) -> bool:
        """What comes next to change hands here waits for nothing that takes long; False if it would."""
        if not message.quiet_s:
            self._quiet.end()
            return True
        self.backups.settle(message.decided)
        locks = [checkpoints.lock for _, checkpoints in self.both]
        return self._quiet.keep(locks, message.quiet_s, READY_S_MAX)

    def _learn(self, epochs: Mapping[str, int]) -> None:
        """How many epochs residents have whose slices came with all of them."""
        for name, number in epochs.items():
            holding = self.core.holdings.get(name)
            if holding is not None:
                holding.epochs = max(holding.epochs, number)

    def _confirm(self, order: int, slices: list[SliceId]) -> None:
        with self.checkpoints.lock, self.backups.checkpoints.lock:
            self._check_order(order, slices)
            self.checkpoints.confirm(slices)
            self.backups.checkpoints.confirm(slices)

    def _promote(self, message: Promote) -> None:
        """Slices that are held as a backup are served from now on."""
        with self.checkpoints.lock, self.backups.checkpoints.lock:
            self._check_order(message.order, message.slices)
            wanted = [number for number in message.slices if number not in self.core.owned]
            for number in set(message.slices) - set(wanted):
                # By an order whose switch has failed since: what it serves may be old.
                if self._promotions.get(number) != message.order:
                    raise StageLost(f"slice {number} is served here already", container=self.core.container)
            if not wanted:
                return
            slices, grounds = self.backups.give_up(wanted, message.decided)
            try:
                self.checkpoints.add(grounds)
            except BaseException:
                self.backups.core.take_in(slices)
                raise
            self.core.install(slices)
            self._promotions.update(dict.fromkeys(wanted, message.order))
            self._learn(message.epochs)
            self.rebuilt["slices_promoted"] += len(wanted)

    def _demote(self, order: int, numbers: list[SliceId]) -> None:
        """Slices that are served here are held as a backup from now on."""
        with self.checkpoints.lock, self.backups.checkpoints.lock:
            self._check_order(order, numbers)
            wanted = [number for number in numbers if number in self.core.owned]
            grounds = {number: closed(self.checkpoints.grounds[number], self.log) for number in wanted}
            slices = self.core.release(wanted)
            self.checkpoints.release(set(wanted), gone=False)
            self.backups.take_in(slices, grounds)

    def snapshots_of_others(self, resident: ResidentId) -> list[str]:
        """Those that incarnations before this one wrote."""
        names = {name for _, checkpoints in self.both for name in checkpoints.files(resident)}
        return sorted(name for name in names if term_of_snapshot(name) != self.core.term)

    def _check_order(self, order: int, slices: Collection[SliceId]) -> None:
        """Whoever sent an older one about a slice has been told that it failed, and has gone on.

        Checked under the lock of what is to be done: one may have to wait for that until it is an older one.
        """
        with self._order_lock:
            if any(order < self._orders.get(number, 0) for number in slices):
                raise StageLost("this came too late", container=self.core.container)
            self._orders.update(dict.fromkeys(slices, order))
            self._newest_order = max(order, self._newest_order)

    def _release(self, order: int, slices: list[SliceId]) -> None:
        with self.checkpoints.lock:
            self._check_order(order, slices)
            self.core.release(slices)
            self.checkpoints.release(set(slices), gone=False)

    def _let_go(self, message: LetGo) -> None:
        """Removes what slices rested on that went, as far as nobody rests on it."""
        logs = (self.log, self.backups.log)
        with self._quiet.work(self.checkpoints.lock), self._quiet.work(self.backups.checkpoints.lock):
            with self._order_lock:
                # Since a slice went, somebody may have come to need what it left: also while this waited for the locks.
                if message.order < self._newest_order:
                    raise StageLost("this came too late", container=self.core.container)
            for log, (_, checkpoints) in zip(logs, self.both, strict=True):
                # What changed roles here since rests on it.
                needed = {*self.checkpoints.needs(), *self.backups.checkpoints.needs()}
                if log.directory in message.directories and log.directory not in needed:
                    checkpoints.let_go()
            named = {file for _, checkpoints in self.both for _, file in checkpoints.named()}
            for _, checkpoints in self.both:
                checkpoints.remove_left({*named, *message.needed})
