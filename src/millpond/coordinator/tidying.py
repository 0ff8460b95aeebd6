"""Removes files that nobody needs any more: of earlier incarnations, of what was forgotten."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from millpond.container.layout import (
    BACKUPS,
    CONTAINERS,
    MANIFEST,
    SNAPSHOTS,
    backup_directory_name,
    directory_name,
    is_directory,
    slice_of_snapshot,
    term_of,
    term_of_snapshot,
)
from millpond.coordinator.memory import Memory
from millpond.coordinator.records import PondRecord
from millpond.coordinator.slices import Slices
from millpond.durable.files import Files, remove_tree
from millpond.errors import StageLost, Unavailable
from millpond.runtime import Runtime
from millpond.stores.waiting import WAITING, WaitingRows
from millpond.wire.base import ResidentId, Term
from millpond.wire.house import ContainerStatus, LetGo, ListSnapshots
from millpond.wire.waiting import TidyWaiting

TIDY_S = 2.0


class Tidying:
    """What cannot be removed now is tried again later: it is in nobody's way."""

    def __init__(self, files: Files, root: str, memory: Memory, slices: Slices, runtime: Runtime) -> None:
        self._files = files
        self._root = root
        self._memory = memory
        self._slices = slices
        self._runtime = runtime
        # What was needed when nothing was left to remove.
        self._tidied: Any = None
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        return self._runtime.now() >= self._next_s and self._tidied != _needed(self._memory.record)

    def tidy(self) -> None:
        self._next_s = self._runtime.now() + TIDY_S
        self._tidied = None
        # A container that heard of a slice since would not let go: what it rests on may be another.
        with self._slices.moving, suppress(OSError, Unavailable, StageLost):
            # Nothing goes that an entry which may be on disk tells of, be it another coordinator's.
            self._memory.settle()
            self._memory.journal.look()
            record = self._memory.record
            self._tidied = _needed(record) if self._tidy_containers(record) else None

    def _tidy_containers(self, record: PondRecord) -> bool:
        """True if nothing is left that will not be needed one day."""
        containers = self._slices.containers
        live = dict(containers.live)
        # Only who serves all that the journal gives it can tell what is needed.
        if set(live) != set(containers.ids) or self._slices.astray:
            return False
        reports = [containers.ask(container, ContainerStatus()) for container in live]
        needed = {name for report in reports for name in report.needs}
        own = {directory_name(each.term, container) for container, each in live.items()}
        own |= {backup_directory_name(each.term, container) for container, each in live.items()}
        for base in (os.path.join(self._root, CONTAINERS), os.path.join(self._root, BACKUPS)):
            for name in self._files.list(base):
                kept = name in needed | own | set(record.directories) | set(record.backups)
                # A later term is of a container that is coming up.
                if is_directory(name) and not kept and term_of(name) <= record.term:
                    self._remove_directory(os.path.join(base, name))
        self._tidy_waiting()
        named = self._tidy_snapshots(record, {container: each.term for container, each in live.items()})
        for container, each in live.items():
            both = (directory_name(each.term, container), backup_directory_name(each.term, container))
            unneeded = [name for name in both if name not in needed]
            if unneeded:
                own_files = sorted(file for file in named if term_of_snapshot(file) == each.term)
                containers.ask(container, LetGo(self._slices.order(), unneeded, own_files))
        return not needed - own and not (set(record.directories) | set(record.backups)) - own

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
        known = _waiting(self._memory.record)
        for parts in every:
            if parts not in known:
                remove_tree(self._files, os.path.join(base, *parts))

    def tidy_turns(self, message: TidyWaiting) -> None:
        """Removes rows that waited in turns of a query which nobody asks for again. The message may come late."""
        rows = WaitingRows(self._root, message.resident, message.fetcher, message.query, self._files)
        files = rows.files_of(lambda turn: True)
        # Only now, and these files alone: a query of the same name that begins anew has others.
        record = self._memory.record.residents.get(message.resident)
        fetcher = None if record is None else record.fetchers.get(message.fetcher)
        asking = None if fetcher is None else fetcher.queries.get(message.query)
        if asking is not None and asking.pins:
            needed = {pin.turn for pin in asking.pins}
            last = asking.pins[-1].turn
            rows.remove({t: names for t, names in files.items() if t < last and t not in needed})

    def _tidy_snapshots(self, record: PondRecord, live: Mapping[int, Term]) -> set[str]:
        """Removes those of residents that were forgotten, and those that no slice rests on any more. Those that are left
        and that others rest on than wrote them.
        """
        base = os.path.join(self._root, SNAPSHOTS)
        every = self._files.list(base)
        # Only now: a resident is in the journal before it has files.
        known = {resident.resident.id for resident in self._memory.record.residents.values()}
        containers = self._slices.containers
        every_named: set[str] = set()
        for name in every:
            if name not in known:
                remove_tree(self._files, os.path.join(base, name))
                continue
            old = [
                file
                for file in self._files.list(os.path.join(base, name))
                if slice_of_snapshot(file) is not None
                # Those of who serves are its own to remove, those of a later term of one that comes up.
                and term_of_snapshot(file) not in live.values()
                and term_of_snapshot(file) <= record.term
            ]
            named = {
                file
                # All that served: of one that has ended since, nobody knows what it would rest on.
                for container in live
                for file in containers.ask(container, ListSnapshots(ResidentId(name))).names
            }
            for file in sorted(set(old) - named):
                self._files.remove(os.path.join(base, name, file))
            every_named |= named
        return every_named

    def _remove_directory(self, directory: str) -> None:
        # Without its manifest a directory is nothing: a crash half-way leaves no half log.
        self._files.remove(os.path.join(directory, MANIFEST))
        self._files.sync_dir(directory)
        remove_tree(self._files, directory)

    def remove_waiting(self, *parts: str) -> None:
        """Removes rows that wait for what was forgotten: a resident, an operator of it, or a query of that."""
        remove_tree(self._files, os.path.join(self._root, WAITING, *parts))


def _needed(record: PondRecord) -> Any:
    """While this does not change, there is nothing new to remove."""
    residents = {resident.resident.id for resident in record.residents.values()}
    return record.directories, record.owners, record.backups, residents, _waiting(record)


def _waiting(record: PondRecord) -> set[tuple[str, str, str]]:
    return {
        (state, name, query)
        for state, resident in record.residents.items()
        for name, fetcher in resident.fetchers.items()
        for query in fetcher.queries
    }
