"""What slices rest on, on disk: the manifest, the snapshots that it names, and the log that goes on from them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from millpond.container.core import BUSY_S_MAX, CheckpointPlan, Core
from millpond.container.holdings.base import Holding
from millpond.container.layout import (
    BACKUPS,
    SNAPSHOTS,
    Ground,
    LogSpan,
    Manifest,
    SnapshotHead,
    backup_of_snapshot,
    slice_of_snapshot,
    snapshot_directory,
    snapshot_name,
    snapshot_path,
    write_manifest,
    write_snapshot,
)
from millpond.container.log import Log
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.runtime import Lock
from millpond.wire.base import ResidentId, SliceId, Turn

LOG_BYTES_MAX = 128 << 20
LOG_RECORDS_MAX = 512
LOG_PER_OUTPUTS = 4


class Checkpoints:
    """What the slices of one `core` rest on, told by the manifest beside its log. With `backup` they are not its own.

    `numbers` tell snapshots of one term apart, whoever writes them. `lock` is to be held by whoever changes what slices
    rest on, and while slices come and go.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        core: Core,
        log: Log,
        lock: Lock,
        numbers: Iterator[int],
        *,
        backup: bool = False,
    ) -> None:
        self.lock = lock
        self.grounds: dict[SliceId, Ground] = {}
        self.taken = 0
        self.pause_s_max = 0.0
        self.covered = 0
        self._files = files
        self._root = root
        self._core = core
        self._log = log
        self._numbers = numbers
        self._backup = core.container if backup else None
        self._base = os.path.join(BACKUPS, log.directory) if backup else SNAPSHOTS
        # Slices that the journal does not give to this incarnation yet, as far as is known here.
        self._unconfirmed: set[SliceId] = set()
        # Snapshots that no manifest names, once the next one is written.
        self._replaced: list[str] = []

    # Slices and residents that come and go. The caller holds the lock.

    def add(self, grounds: Mapping[SliceId, Ground]) -> None:
        """Slices that come with what they rest on so far; from now on their records are in this log."""
        own = self._log.span()
        new = {
            number: Ground(
                ground.snapshots,
                ground.vectors,
                [*ground.logs, own],
                {resident_id: [*spans, own] for resident_id, spans in ground.behind.items()},
            )
            for number, ground in grounds.items()
        }
        self._write_manifest({**self.grounds, **new})
        self._unconfirmed |= set(new)

    def confirm(self, slices: Collection[SliceId]) -> None:
        """The journal says that they are here: what they rested on before need not stay as it is."""
        self._unconfirmed.difference_update(slices)

    def release(self, slices: Collection[SliceId], gone: bool) -> None:
        """The manifest goes on telling what they rest on, until nobody needs it: the journal says who has them."""
        self._unconfirmed.difference_update(slices)
        left = {number: ground for number, ground in self.grounds.items() if number not in slices}
        if gone and len(left) < len(self.grounds):
            self._write_manifest(left)
            self._truncate()

    def make_room(self, resident_id: ResidentId) -> None:
        """There is a resident of which snapshots may come."""
        self._files.make_dir(self._directory(resident_id))

    def drop(self, resident_id: ResidentId) -> None:
        """Removes all snapshots of a resident that is gone."""
        for file in self._files.list(self._directory(resident_id)):
            if slice_of_snapshot(file) in self._core.owned:
                self._files.remove(self._path(resident_id, file))

    def forget(self, resident_id: ResidentId, writers: Collection[str]) -> None:
        """On disk as well: a writer of the same name begins at 0, and must not be taken for the one before."""
        grounds = {}
        for number, ground in self.grounds.items():
            seen = ground.vectors.get(resident_id, {})
            left = {writer: turn for writer, turn in seen.items() if writer not in writers}
            grounds[number] = replace(ground, vectors={**ground.vectors, resident_id: left})
        if grounds:
            self._write_manifest(grounds)

    def files(self, resident_id: ResidentId) -> set[str]:
        """The snapshots of a resident that slices here rest on."""
        grounds = list(self.grounds.values())
        return {ground.snapshots[resident_id] for ground in grounds if resident_id in ground.snapshots}

    # What slices rest on

    def inherits(self) -> bool:
        """Whether slices here rest on logs of others that a checkpoint would make unnecessary."""
        return any(
            span.directory != self._log.directory
            for number, ground in list(self.grounds.items())
            if number in self._core.owned
            for span in ground.logs
        )

    def needs(self) -> list[str]:
        """The directories of earlier incarnations that slices here still rest on."""
        grounds = [g for number, g in list(self.grounds.items()) if number in self._core.owned]
        logs = {span.directory for ground in grounds for span in ground.spans}
        backups = {backup_of_snapshot(name) for ground in grounds for name in ground.snapshots.values()}
        return sorted(name for name in {*logs, *backups} if name is not None and name != self._log.directory)

    def behind(self) -> list[ResidentId]:
        """Residents that could not be snapshotted."""
        return sorted(
            {resident_id for ground in list(self.grounds.values()) for resident_id in ground.behind}
        )

    # Checkpoints

    def is_due(self) -> bool:
        """Whether the log has grown so long, or is another's, that a checkpoint is worth what it costs."""
        # How much is too much takes time to find out.
        is_long = self._log.bytes > LOG_BYTES_MAX and self._log.bytes > self._log_bytes_max()
        return (
            is_long
            or self._core.seq - self.covered > LOG_RECORDS_MAX
            or (self.inherits() and not self._unconfirmed)
        )

    def _log_bytes_max(self) -> int:
        """A checkpoint writes slices whole: the log may be as large as the snapshots that it replaces, so that a byte is
        written so many times at most, whatever the pond holds. Outputs are written whether or not they changed.
        """
        holdings = list(self._core.holdings.values())
        outputs = sum(holding.outputs_bytes for holding in holdings)
        snapshots = sum(held.snapshot_bytes for holding in holdings for held in list(holding.slices.values()))
        return LOG_BYTES_MAX + snapshots + LOG_PER_OUTPUTS * outputs

    def checkpoint(self) -> None:
        """Snapshots every dirty slice, one by one, then lets go of the log that they make unnecessary.

        A slice is held only while it is copied. A crash anywhere leaves either the old or the new manifest,
        and all that it names.
        """
        with self.lock:
            plan = self._core.plan_checkpoint()
            if plan.covered == self.covered and not plan.dirty and not self.inherits():
                return
            log_bytes = self._log.take_bytes()
            self.taken += 1
            number_of_round = next(self._numbers)
            vectors = plan.clean
            try:
                for holding, number in plan.dirty:
                    if number in holding.slices and number not in self._unconfirmed:
                        name = snapshot_name(number, self._core.term, number_of_round, self._backup)
                        self._snapshot(holding, number, name, plan, vectors)
                self._write_manifest(self._new_grounds(plan, vectors))
            except BaseException:
                self._log.bytes += log_bytes
                raise
            self.covered = plan.covered
            reach("truncate.before")
            self._truncate()
            # A slice that went meanwhile may still rest on what was to be replaced.
            named = {
                self._path(resident_id, file)
                for ground in self.grounds.values()
                for resident_id, file in ground.snapshots.items()
            }
            for path in self._replaced:
                if path not in named:
                    self._files.remove(path)
            self._replaced.clear()
            reach("truncate.after")

    def _new_grounds(
        self, plan: CheckpointPlan, vectors: dict[tuple[ResidentId, SliceId], dict[str, Turn]]
    ) -> dict[SliceId, Ground]:
        """What slices rest on now: those that went as before, and so what could not be snapshotted."""
        grounds = dict(self.grounds)
        own = LogSpan(self._log.directory, plan.covered)
        for number in self._core.owned - self._unconfirmed:
            before = grounds[number]
            behind = [resident_id for resident_id, at in plan.behind if at == number]
            seen = {resident_id: vector for (resident_id, at), vector in vectors.items() if at == number}
            held = {h.resident.id: h.slices.get(number) for h in list(self._core.holdings.values())}
            snapshots = {
                resident_id: one.snapshot
                for resident_id, one in held.items()
                if resident_id in seen and one is not None and one.snapshot is not None
            }
            grounds[number] = Ground(
                {**snapshots, **{each: name for each, name in before.snapshots.items() if each in behind}},
                {**seen, **{each: vector for each, vector in before.vectors.items() if each in behind}},
                [own],
                {each: before.behind.get(each, before.logs) for each in behind},
            )
        return grounds

    def _snapshot(
        self,
        holding: Holding[Any],
        number: SliceId,
        name: str,
        plan: CheckpointPlan,
        vectors: dict[tuple[ResidentId, SliceId], dict[str, Turn]],
    ) -> None:
        """Writes one slice, and notes where its writers stand in it. What it replaces goes with the manifest.

        One in which an epoch has begun to run since the plan was made stays behind.
        """
        resident_id = holding.resident.id
        held = holding.held(number)
        if not held.lock.acquire(timeout=BUSY_S_MAX):
            plan.behind.add((resident_id, number))
            return
        try:
            started = time.perf_counter()
            copy = held.decided_copy()
            vector = dict(held.vector)
            held.dirty = False
            self.pause_s_max = max(self.pause_s_max, time.perf_counter() - started)
        finally:
            held.lock.release()
        try:
            rows = copy.export()
            self.make_room(resident_id)
            path = self._path(resident_id, name)
            head = SnapshotHead(resident_id, number)
            write_snapshot(self._files, path, head, holding.snapshot_schema, [rows])
        except BaseException:
            # Whatever it was: the slice must be in the next snapshot, or its log would be let go.
            held.dirty = True
            raise
        if held.snapshot is not None:
            self._replaced.append(self._path(resident_id, held.snapshot))
        held.snapshot, held.snapshot_bytes = name, int(rows.nbytes)
        vectors[resident_id, number] = vector

    def _write_manifest(self, grounds: dict[SliceId, Ground]) -> None:
        """What slices rest on is as it was, unless it is written down."""
        manifest = Manifest(self._core.term, self._core.container, grounds)
        write_manifest(self._files, self._root, self._log.directory, manifest)
        self.grounds = grounds

    def _truncate(self) -> None:
        """Removes log records that no slice rests on: neither one that is here, nor one that went."""
        afters = [
            span.after
            for ground in self.grounds.values()
            for span in ground.spans
            if span.directory == self._log.directory
        ]
        self._log.truncate(min(afters, default=0))

    def _directory(self, resident_id: ResidentId) -> str:
        return snapshot_directory(self._root, resident_id, self._base)

    def _path(self, resident_id: ResidentId, file: str) -> str:
        return snapshot_path(self._root, resident_id, file)
