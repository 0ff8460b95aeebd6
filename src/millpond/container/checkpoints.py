"""What slices rest on, on disk: the manifest, the snapshots that it names, and the log that goes on from them.

A snapshot is a base and deltas. A checkpoint adds a delta, or writes a base where much has changed; merging makes fewer
files of many, from the files alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from millpond.container.core import BUSY_S_MAX, CheckpointPlan, Core
from millpond.container.holdings.base import Bounds, HeldSlice, Holding, Saved, pieces_of
from millpond.container.layout import (
    BACKUPS,
    CONTAINERS,
    MANIFEST,
    SNAPSHOTS,
    Ground,
    LogSpan,
    Manifest,
    SnapshotHead,
    backup_of_snapshot,
    container_of_snapshot,
    slice_of_snapshot,
    snapshot_directory,
    snapshot_name,
    snapshot_path,
    term_of_snapshot,
    write_manifest,
    write_snapshot,
    writer_name,
)
from millpond.container.log import Log
from millpond.container.merging import Merge, choose
from millpond.durable.arrow_files import Run, Written, in_turn, settle
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import CorruptFile
from millpond.runtime import Lock
from millpond.wire.base import ResidentId, SliceId, Turn

# A slice with so many times the deltas that it should have is written whole, if merging does not keep up.
DELTAS_TIMES_MAX = 2
SYNCED_AT_ONCE = 4
SPACE_AMPLIFICATION_MAX = 1.5
"""How much longer a log may be than what is needed of it, before that is written anew."""

Vectors = dict[tuple[ResidentId, SliceId], dict[str, Turn]]


class Checkpoints:
    """What the slices of one `core` rest on, told by the manifest beside its log. With `backup` they are not its own.

    `numbers` tell snapshots of one term apart, whoever writes them. `lock` is to be held by whoever changes what slices
    rest on, and while slices come and go, and for long only by `work`. What others may rest on by now is not `may_remove`'s to
    let go. `run` does pieces of work at the same time.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        core: Core,
        log: Log,
        lock: Lock,
        numbers: Iterator[int],
        bounds: Bounds | None = None,
        *,
        backup: bool = False,
        may_remove: Callable[[], bool] = lambda: True,
        run: Run = in_turn,
        work: Callable[[Lock], AbstractContextManager[object]] = lambda lock: lock,
    ) -> None:
        self.lock = lock
        self.grounds: dict[SliceId, Ground] = {}
        self.taken = 0
        self.merges = 0
        self.bytes_written = 0
        self.pause_s_max = 0.0
        self.covered = 0
        self._files = files
        self._root = root
        self._core = core
        self._log = log
        self._numbers = numbers
        self._bounds = bounds or Bounds()
        # What the last checkpoint has written.
        self._last_bytes = 0
        # Whether there may be files to merge.
        self._many = True
        self._writer = writer_name(core.container, is_backup=backup)
        self._may_remove = may_remove
        self._run = run
        self._work = work
        self._base = os.path.join(BACKUPS, log.directory) if backup else SNAPSHOTS
        # Slices that the journal does not give to this incarnation yet, as far as is known here.
        self._unconfirmed: set[SliceId] = set()
        # Snapshots that no manifest names, once the next one is written.
        self._replaced: list[str] = []
        # What slices rested on here before they went and came back otherwise: others may still rest on it.
        self._former: list[Ground] = []
        # Snapshots of slices that went, which this incarnation wrote.
        self._left: set[tuple[ResidentId, str]] = set()

    # Slices and residents that come and go. The caller holds the lock.

    def add(self, grounds: Mapping[SliceId, Ground]) -> None:
        """Slices that come with what they rest on so far; from now on their records are in this log."""
        own = self._log.span()
        new = {
            number: replace(
                ground,
                logs=[*ground.logs, own],
                behind={resident_id: [*spans, own] for resident_id, spans in ground.behind.items()},
            )
            for number, ground in grounds.items()
        }
        former = [self.grounds[number] for number in new if number in self.grounds]
        self._write_manifest({**self.grounds, **new})
        self._former += former
        self._unconfirmed |= set(new)

    def confirm(self, slices: Collection[SliceId]) -> None:
        """The journal says that they are here: what they rested on before need not stay as it is."""
        self._unconfirmed.difference_update(slices)
        self._many = True

    def release(self, slices: Collection[SliceId], gone: bool) -> None:
        """The manifest goes on telling what they rest on, until nobody needs it: the journal says who has them.

        Files stay where they are: whoever adopted a slice may rest on them. They go when this incarnation has ended.
        """
        self._unconfirmed.difference_update(slices)
        left = {number: ground for number, ground in self.grounds.items() if number not in slices}
        if gone and len(left) < len(self.grounds):
            self._write_manifest(left)
            self._truncate()

    def let_go(self) -> None:
        """Nobody rests on the log here but the slices that are here; on snapshots others may."""
        before = self.named()
        self._former.clear()
        self.release(set(self.grounds) - self._core.owned, gone=True)
        self._truncate()
        own = self._core.term
        self._left |= {each for each in before - self.named() if term_of_snapshot(each[1]) == own}

    def remove_left(self, needed: Collection[str]) -> None:
        """Removes snapshots of slices that went, but for those that somebody rests on."""
        if self._may_remove():
            for resident_id, file in sorted(self._left):
                if file not in needed:
                    self._files.remove(self._path(resident_id, file))
                    self._left.discard((resident_id, file))

    def make_room(self, resident_id: ResidentId) -> None:
        """There is a resident of which snapshots may come."""
        self._files.make_dir(self._directory(resident_id))

    def drop(self, resident_id: ResidentId) -> None:
        """Removes the snapshots of a resident that is gone: not those of others, who may not have heard of it yet."""
        own = self.files(resident_id)
        for file in self._files.list(self._directory(resident_id)):
            is_mine = file in own or container_of_snapshot(file) == self._core.container
            if is_mine and slice_of_snapshot(file) in self._core.owned:
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

    def named(self) -> set[tuple[ResidentId, str]]:
        """The snapshots that slices here rest on, by resident."""
        return {
            (resident_id, file)
            for ground in self._every()
            for resident_id in ground.snapshots
            for file in ground.files_of(resident_id)
        }

    def files(self, resident_id: ResidentId) -> set[str]:
        """The snapshots of a resident that slices here rest on."""
        return {file for ground in self._every() for file in ground.files_of(resident_id)}

    def _every(self) -> list[Ground]:
        return [*self.grounds.values(), *self._former]

    def is_there(self) -> bool:
        """Whether the manifest is, if one was written."""
        path = os.path.join(self._root, CONTAINERS, self._log.directory, MANIFEST)
        return not self.grounds or self._files.exists(path)

    # What slices rest on

    def inherits(self) -> bool:
        """Whether slices here rest on what others wrote, which a checkpoint would make unnecessary."""
        own = (None, self._core.container)
        for number, ground in list(self.grounds.items()):
            if number in self._core.owned:
                if any(span.directory != self._log.directory for span in ground.logs):
                    return True
                files = (file for each in ground.snapshots for file in ground.files_of(each))
                if any(container_of_snapshot(file) not in own for file in files):
                    return True
        return False

    def needs(self) -> list[str]:
        """The directories of earlier incarnations that slices here still rest on."""
        grounds = [g for number, g in list(self.grounds.items()) if number in self._core.owned]
        logs = {span.directory for ground in grounds for span in ground.spans}
        files = (file for ground in grounds for each in ground.snapshots for file in ground.files_of(each))
        backups = {backup_of_snapshot(file) for file in files}
        return sorted(name for name in {*logs, *backups} if name is not None and name != self._log.directory)

    def behind(self) -> list[ResidentId]:
        """Residents that could not be snapshotted."""
        return sorted(
            {resident_id for ground in list(self.grounds.values()) for resident_id in ground.behind}
        )

    # Checkpoints

    def is_due(self) -> bool:
        """Whether the log has grown so long, or is another's, that a checkpoint is worth what it costs."""
        # What a checkpoint writes follows what has changed. Where it is more than the log, as with keys of many versions,
        # the log may grow as long: a byte is written so many times at most.
        return (
            self._log.bytes > max(self._bounds.log_bytes, self._last_bytes)
            or self._core.seq - self.covered > self._bounds.log_records
            or (self.inherits() and not self._unconfirmed)
        )

    def checkpoint(self, rest: bool = False) -> None:
        """Snapshots every dirty slice, one by one, then lets go of the log that they make unnecessary.

        Those that may `rest` on the log, whose rows are there and needed for a while, are left to it: for them a checkpoint is
        to note from where on.
        A slice is held only while it is copied; its file becomes durable with all others. A crash anywhere leaves either the old or the new manifest,
        and all that it names.
        """
        with self._work(self.lock):
            plan = self._core.plan_checkpoint(self._may_rest if rest else None)
            if plan.covered == self.covered and not plan.dirty and not self.inherits():
                return
            log_bytes, bytes_before = self._log.take_bytes(), self.bytes_written
            self.taken += 1
            number_of_round = next(self._numbers)
            vectors = plan.clean
            written: list[tuple[HeldSlice[Any], Written]] = []
            try:
                for holding, number in plan.dirty:
                    if number in holding.slices and number not in self._unconfirmed:
                        written += self._snapshot(holding, number, number_of_round, plan, vectors)
                settle(self._files, [each for _, each in written], run=self._sync)
                written.clear()
                self._write_manifest(self._new_grounds(plan, vectors))
                self._leave_snapshots(plan)
            except BaseException:
                self._log.bytes += log_bytes
                # Whatever it was: these slices must be in the next snapshot, or their log would be let go.
                for held, _ in written:
                    held.write_anew()
                raise
            self.covered = plan.covered
            self._last_bytes = self.bytes_written - bytes_before
            self._many = True
            reach("truncate.before")
            self._truncate()
            self._remove_replaced()
            reach("truncate.after")

    def _leave_snapshots(self, plan: CheckpointPlan) -> None:
        """Of residents that rest on the log, slices whose snapshots the manifest does not name any more have none."""
        for holding in list(self._core.holdings.values()):
            resident_id = holding.resident.id
            for number, held in list(holding.slices.items()) if resident_id in plan.resting else ():
                if held.saved is not None and not self.grounds[number].files_of(resident_id):
                    self._replaced += [self._path(resident_id, file) for file in held.saved.files]
                    held.saved = None
                    held.write_anew()

    def _sync(self, work: Callable[[Written], None], files: Sequence[Written]) -> None:
        """A few at the same time: the disk makes one of them."""
        parts = [files[first::SYNCED_AT_ONCE] for first in range(SYNCED_AT_ONCE)]
        self._run(partial(in_turn, work), [part for part in parts if part])

    def _remove_replaced(self) -> None:
        # A slice that went meanwhile may still rest on what was to be replaced.
        named = {self._path(*each) for each in self.named()}
        for path in self._replaced:
            if path not in named and self._may_remove():
                self._files.remove(path)
        self._replaced.clear()

    def _new_grounds(self, plan: CheckpointPlan, vectors: Vectors) -> dict[SliceId, Ground]:
        """What slices rest on now: those that went as before, and so what could not be snapshotted."""
        grounds = dict(self.grounds)
        for number in self._core.owned - self._unconfirmed:
            before = grounds[number]
            # Of an epoch that nobody decided, a record may be unfinished that is older than the slice is here, and gone.
            since = [span.after for span in before.logs if span.last is None]
            own = LogSpan(self._log.directory, max([plan.covered, *since]))
            behind = [resident_id for resident_id, at in plan.behind if at == number]
            seen = {resident_id: vector for (resident_id, at), vector in vectors.items() if at == number}
            held = {h.resident.id: h.slices.get(number) for h in list(self._core.holdings.values())}
            files = {
                resident_id: list(one.saved.files)
                for resident_id, one in held.items()
                if resident_id in seen and one is not None and one.saved is not None
            }
            saved = [each for each in behind if not self._leaves_snapshot(before, each, plan)]
            files |= {each: before.files_of(each) for each in saved}
            grounds[number] = _with_files(
                Ground(
                    vectors={**seen, **{each: v for each, v in before.vectors.items() if each in saved}},
                    logs=[own],
                    behind={each: self._rests_on(before, each, plan) for each in behind},
                ),
                files,
            )
        return grounds

    def _rests_on(self, before: Ground, resident_id: ResidentId, plan: CheckpointPlan) -> list[LogSpan]:
        """The logs that a resident needs which is in no newer snapshot."""
        spans = before.behind.get(resident_id, before.logs)
        after = plan.resting.get(resident_id)
        return spans if after is None else [LogSpan(self._log.directory, max(spans[-1].after, after))]

    def _leaves_snapshot(self, before: Ground, resident_id: ResidentId, plan: CheckpointPlan) -> bool:
        """Whether all that a resident needs is in the log, and no longer in its snapshot and what came right after it."""
        spans = before.behind.get(resident_id, before.logs)
        return plan.resting.get(resident_id, 0) > spans[-1].after

    def _may_rest(self, holding: Holding[Any], after: int) -> bool:
        """Whether the log is the better place for a resident: its own, short, and not much longer than what it has."""
        resident_id, own = holding.resident.id, self._log.directory
        first = self._core.seq
        for number in holding.slices:
            ground = self.grounds.get(number)
            if ground is None or number in self._unconfirmed:
                return False
            spans = ground.behind.get(resident_id, ground.logs)
            if any(span.directory != own for span in spans):
                return False
            first = min(first, max(spans[-1].after, after))
        limit = SPACE_AMPLIFICATION_MAX * holding.live_bytes + self._bounds.log_bytes
        is_short = self._core.seq - first <= self._bounds.log_records
        return bool(holding.slices) and is_short and self._log.bytes_after(first) <= limit

    def _snapshot(
        self, holding: Holding[Any], number: SliceId, round_: int, plan: CheckpointPlan, vectors: Vectors
    ) -> list[tuple[HeldSlice[Any], Written]]:
        """Writes what has changed in one slice, or all of it, and notes where its writers stand in it; the file is to be
        settled.

        What it replaces goes with the manifest. A slice in which an epoch has begun to run since the plan was made stays
        behind.
        """
        resident_id = holding.resident.id
        held = holding.held(number)
        if not held.lock.acquire(timeout=BUSY_S_MAX):
            plan.behind.add((resident_id, number))
            return []
        try:
            started = time.perf_counter()
            held.check_whole()
            saved = held.saved if self._takes_delta(held) else None
            frozen = held.decided_copy() if saved is None else holding.delta(held)
            held.store.clean()
            vector = dict(held.vector)
            held.dirty = held.anew = False
            self.pause_s_max = max(self.pause_s_max, time.perf_counter() - started)
        finally:
            held.lock.release()
        name = snapshot_name(number, self._core.term, round_, self._writer, is_delta=saved is not None)
        follows = None if saved is None else saved.files[-1]
        try:
            head = SnapshotHead(resident_id, number, follows)
            written, nbytes = self._write(holding, name, head, pieces_of(frozen))
        except BaseException:
            held.write_anew()
            raise
        if saved is not None:
            held.saved = saved._replace(deltas=(*saved.deltas, name), delta_bytes=saved.delta_bytes + nbytes)
        else:
            self._replaced += (
                [self._path(resident_id, file) for file in held.saved.files] if held.saved else []
            )
            held.saved = Saved(name, nbytes)
        vectors[resident_id, number] = vector
        return [(held, written)]

    def _takes_delta(self, held: HeldSlice[Any]) -> bool:
        saved = held.saved
        return (
            saved is not None
            and not held.anew
            and len(saved.deltas) < DELTAS_TIMES_MAX * self._bounds.deltas
            and held.store.dirty_share <= self._bounds.delta_share
        )

    def _write(
        self, holding: Holding[Any], name: str, head: SnapshotHead, pieces: Iterator[pa.RecordBatch]
    ) -> tuple[Written, int]:
        """It is to be settled. And how many bytes of rows it has."""
        self.make_room(head.id)
        path = self._path(head.id, name)
        written, nbytes = write_snapshot(self._files, path, head, holding.snapshot_schema, pieces)
        self.bytes_written += nbytes
        return written, nbytes

    # Merging

    def merge(self) -> bool:
        """Makes fewer files of some slices that have many. True when there was nothing to do.

        Nobody waits for it but whoever else wants to merge. A crash anywhere leaves either the old or the new manifest,
        and all that it names.
        """
        if not self._many:
            return True
        with self.lock:
            chosen = choose(
                self._core, self.grounds, self._unconfirmed, self._bounds, self._numbers, self._writer
            )
            self._many = bool(chosen)
        done: list[tuple[Merge, int]] = []
        failure: Exception | None = None
        for merge in chosen:
            try:
                nbytes = self._merged(merge)
            except Exception as error:  # noqa: BLE001 - what was done before it counts
                failure = error
                break
            done += [] if nbytes is None else [(merge, nbytes)]
        if done:
            reach("merge.before")
        with self.lock:
            self._install(done)
        if done:
            reach("merge.after")
        if failure is not None:
            raise failure
        return not chosen

    def _merged(self, merge: Merge) -> int | None:
        """Writes one file for many. How many bytes it was; None if nobody needs it any more."""
        try:
            rows = merge.rows(self._files, self._root)
        except CorruptFile:
            with self.lock:
                if merge.after(0) is None or not self._is_here(merge):
                    return None  # the files were replaced, and are gone
                # Memory has it all: new files take the place of what is damaged.
                merge.held.write_anew()
            raise
        written, nbytes = self._write(merge.holding, merge.name, merge.head, iter([rows]))
        settle(self._files, [written])
        return nbytes

    def _is_here(self, merge: Merge) -> bool:
        return merge.is_of(self._core) and merge.number not in self._unconfirmed

    def _install(self, done: Iterable[tuple[Merge, int]]) -> None:
        """What was merged takes the place of what it was made of, where that still counts. The caller holds the lock."""
        grounds = dict(self.grounds)
        after = {}
        for merge, nbytes in done:
            resident_id, number = merge.holding.resident.id, merge.number
            saved = merge.after(nbytes) if self._is_here(merge) else None
            ground = grounds.get(number)
            before = [] if ground is None else ground.files_of(resident_id)
            if (
                ground is None
                or saved is None
                or tuple(before[: len(merge.saved.files)]) != merge.saved.files
            ):
                self._files.remove(self._path(resident_id, merge.name))
                continue
            # Deltas that the manifest does not name yet come with the next one.
            files = [saved.base, *saved.deltas]
            named = files[
                : len(files) - (len(merge.held.saved.files if merge.held.saved else ()) - len(before))
            ]
            grounds[number] = _with_files(ground, {resident_id: named})
            after[merge] = saved
        if not after:
            return
        try:
            self._write_manifest(grounds)
        except BaseException:
            # It may be there all the same. The next one will not name them.
            self._replaced += [self._path(merge.holding.resident.id, merge.name) for merge in after]
            raise
        for merge, saved in after.items():
            merge.held.saved = saved
            self._replaced += [self._path(merge.holding.resident.id, file) for file in merge.merged]
        self.merges += len(after)
        self._remove_replaced()

    def _write_manifest(self, grounds: dict[SliceId, Ground]) -> None:
        """What slices rest on is as it was, unless it is written down."""
        manifest = Manifest(self._core.term, self._core.container, grounds)
        write_manifest(self._files, self._root, self._log.directory, manifest)
        self.grounds = grounds

    def _truncate(self) -> None:
        """Removes log records that no slice rests on: neither one that is here, nor one that went."""
        afters = [
            span.after
            for ground in self._every()
            for span in ground.spans
            if span.directory == self._log.directory
        ]
        if self._may_remove():
            self._log.truncate(min(afters, default=self._core.seq))

    def _directory(self, resident_id: ResidentId) -> str:
        return snapshot_directory(self._root, resident_id, self._base)

    def _path(self, resident_id: ResidentId, file: str) -> str:
        return snapshot_path(self._root, resident_id, file)


def _with_files(ground: Ground, files: Mapping[ResidentId, list[str]]) -> Ground:
    """The ground with these files, each resident's oldest first, in the place of those that it had of them."""
    return replace(
        ground,
        snapshots={**ground.snapshots, **{each: names[0] for each, names in files.items() if names}},
        deltas={
            **{each: names for each, names in ground.deltas.items() if each not in files},
            **{each: names[1:] for each, names in files.items() if len(names) > 1},
        },
    )
