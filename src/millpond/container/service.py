"""The container's shell: files, threads and messages around the core."""

from __future__ import annotations

import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from millpond.container.core import BUSY_S_MAX, CheckpointPlan, Core
from millpond.container.figures import by_resident, process_figures, slice_figures
from millpond.container.holdings.base import Holding, Means, Ready, Record
from millpond.container.layout import (
    CONTAINERS,
    Ground,
    LogSpan,
    Manifest,
    SnapshotHead,
    directory_name,
    record_path,
    slice_of_snapshot,
    snapshot_directory,
    snapshot_name,
    write_manifest,
    write_record,
    write_snapshot,
)
from millpond.container.marks import Marks
from millpond.container.recovery import rebuild
from millpond.container.room import ROOM_SHARE, Room
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import BadMessage, StageLost, Unavailable
from millpond.runtime import Locks, Runtime, Serial
from millpond.wire.base import Done, Exchange, Message, Read, ResidentId, SliceId, Turn
from millpond.wire.connection import Answer, Dialer, SlicedBatch
from millpond.wire.epochs import Apply, Discard, Prepare, Prepared, Stage
from millpond.wire.figures import AskFigures, AskSlice, ContainerFigures
from millpond.wire.house import (
    AddResident,
    Adopt,
    Advance,
    Assign,
    Checkpoint,
    Confirm,
    ContainerReport,
    ContainerStatus,
    DropResident,
    ForgetWriters,
    Ping,
    Release,
)

LOG_BYTES_MAX = 128 << 20
LOG_RECORDS_MAX = 512
LOG_PER_OUTPUTS = 4
SWEEP_ENTRIES = 4096


class ContainerService:
    """Serves one container's slices (a `Handler`). Idle until `Assign` tells it who it is, and `Adopt` what it has.

    `dial` is how it reaches its peers, for what containers ask of one another. So far they ask nothing.
    """

    def __init__(
        self,
        files: Files,
        root: str,
        means: Means | None = None,
        runtime: Runtime | None = None,
        dial: Dialer | None = None,
    ) -> None:
        self._files = files
        self._root = root
        self._runtime = runtime or Serial()
        # Slices' locks are the runtime's, too.
        self._means = (means or Means())._replace(lock=self._runtime.lock)
        self.dial = dial
        self._room = Room(self._means.memory // ROOM_SHARE)
        self._core: Core | None = None
        self._grounds: dict[SliceId, Ground] = {}
        self._directory = ""
        # Steps of one resident's epochs do not overlap.
        self._epoch_locks: Locks[str] = Locks(self._runtime)
        # Records are numbered and appended one at a time.
        self._log_lock = self._runtime.lock()
        # What slices rest on changes by one hand at a time.
        self._ground_lock = self._runtime.lock()
        self._order = 0
        # Slices that the journal does not give to this incarnation yet, as far as is known here.
        self._unconfirmed: set[SliceId] = set()
        self._checkpoints = 0
        # Snapshots loaded and records replayed, as slices were adopted.
        self._rebuilt: Counter[str] = Counter()
        self._covered = 0
        # Snapshots that no manifest names, once the next one is written.
        self._replaced: list[str] = []
        self._truncated = 0
        self._log_bytes = 0
        self._snapshot_pause_s_max = 0.0
        self._log_seconds = 0.0
        self._unswept: set[str] = set()
        self.upkeep_failures = 0
        self._since_s = self._runtime.now()

    # Handler

    def call(self, message: Any) -> Message:
        match message:
            case Assign():
                with self._ground_lock:
                    self._assign(message)
            case Adopt():
                self._adopt(message)
            case Confirm(order, slices):
                self._confirm(order, set(slices))
            case Release(order, slices, gone):
                self._release(order, slices, gone)
            case AddResident(resident):
                self.core.add(resident)
                self._files.make_dir(snapshot_directory(self._root, resident.id))
            case DropResident(name, born):
                self._drop(name, born)
            case ForgetWriters(resident, writers):
                self._forget(self.core.holding(resident), set(writers))
            case Prepare(resident):
                with self._epoch_locks[resident]:
                    return self._prepare(message)
            case Discard(resident, ballot):
                with self._epoch_locks[resident]:
                    self.core.discard(resident, ballot)
            case Apply(resident):
                with self._epoch_locks[resident]:
                    reach("apply.before")
                    self.core.apply(message)
                    reach("apply.after")
            case Advance(resident, fetch_progress, final_below):
                self.core.holding(resident).advance(fetch_progress, final_below)
            case Checkpoint():
                self.checkpoint()
            case _:
                return self._tell_about(message)
        return Done()

    def _tell_about(self, message: Any) -> Message:
        """Answers what changes nothing."""
        match message:
            case Ping():
                _ = self.core  # one that recovers is not there yet
                return Done()
            case ContainerStatus():
                return self._report()
            case AskFigures():
                return self._figures()
            case AskSlice(number):
                return by_resident(self.core, SliceId(number))
        raise BadMessage(f"a container does not answer {type(message).__name__}")

    def exchange(self, message: Any, batches: Iterator[SlicedBatch], reads_only: bool = False) -> Answer[Any]:
        if isinstance(message, Stage):
            return Answer(self.core.stage(message, batches, self._runtime.now()))
        if not isinstance(message, Exchange):
            raise BadMessage(f"a container does not exchange rows for {type(message).__name__}")
        rows = next(batches, None)
        if rows is None or next(batches, None) is not None:
            raise BadMessage("questions come as one batch")
        share = self._room.share(rows.batch.nbytes + rows.counts.nbytes, reads_only)
        try:
            answer = self.core.holding(message.resident).exchange(message, rows, share)
        except BaseException:
            share.close()
            raise
        self.core.rows_fetched += rows.batch.num_rows
        return answer._replace(sent=share.close)

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if not isinstance(message, Read):
            raise BadMessage(f"a container does not read for {type(message).__name__}")
        return self.core.holding(message.resident).read(message)

    @property
    def core(self) -> Core:
        if self._core is None:
            raise Unavailable("the container is still recovering", hint="try again in a moment", address="")
        return self._core

    # Slices

    def _assign(self, message: Assign) -> None:
        if self._core is not None:
            if self._core.term == message.term:
                return
            raise BadMessage(f"this is container {self._core.container} in term {self._core.term} already")
        core = Core(message.container, message.term, message.pond_slices, self._means)
        for resident in message.residents:
            core.add(resident)
            self._files.make_dir(snapshot_directory(self._root, resident.id))
        self._directory = directory_name(message.term, message.container)
        self._files.make_dir(os.path.join(self._root, CONTAINERS, self._directory))
        self._core = core

    def _adopt(self, message: Adopt) -> None:
        """Rebuilds slices beside those that are served; they are served once what they rest on is written down."""
        with self._ground_lock:
            core = self.core
            self._check_order(message.order)
            wanted = {n: directory for n, directory in message.slices.items() if n not in core.owned}
            adopt = Adopt(message.order, wanted, message.decided, message.careful)
            with Marks(core, self._files, self._root, message.careful) as marks:
                marks.spoil()
                rebuilt = rebuild(core, self._files, self._root, adopt, marks.set)
            with self._log_lock:
                own = LogSpan(self._directory, core.seq)
            new = {
                number: Ground(
                    ground.snapshots,
                    ground.vectors,
                    [*ground.logs, own],
                    {resident_id: [*spans, own] for resident_id, spans in ground.behind.items()},
                )
                for number, ground in rebuilt.grounds.items()
            }
            self._write_manifest({**self._grounds, **new})
            self._unconfirmed |= set(new)
            core.install(rebuilt.slices)
            self._rebuilt.update(rebuilt.figures)

    def _confirm(self, order: int, slices: set[SliceId]) -> None:
        with self._ground_lock:
            self._check_order(order)
            self._unconfirmed -= slices
            self._remove_leftovers(slices & self.core.owned)

    def _check_order(self, order: int) -> None:
        """Whoever sent an older one has been told that it failed, and has gone on."""
        if order < self._order:
            raise StageLost("this came too late", container=self.core.container)
        self._order = order

    def _release(self, order: int, slices: list[SliceId], gone: bool) -> None:
        """The manifest goes on telling what they rest on, until nobody needs it: the journal says who has them."""
        with self._ground_lock:
            self._check_order(order)
            self.core.release(slices)
            self._unconfirmed.difference_update(slices)
            left = {number: ground for number, ground in self._grounds.items() if number not in slices}
            if gone and len(left) < len(self._grounds):
                self._write_manifest(left)
                self._truncate()

    def _remove_leftovers(self, slices: Any) -> None:
        """Removes snapshots of these slices that no manifest will name again: older ones, and unfinished rounds'."""
        for holding in list(self.core.holdings.values()):
            directory = snapshot_directory(self._root, holding.resident.id)
            current = {held.snapshot for held in holding.slices.values()}
            current |= {ground.snapshots.get(holding.resident.id) for ground in self._grounds.values()}
            for file in self._files.list(directory):
                if file not in current and slice_of_snapshot(file) in slices:
                    self._files.remove(os.path.join(directory, file))

    def _drop(self, name: str, born: int) -> None:
        # An epoch that runs for long holds up nobody's checkpoints.
        with self._epoch_locks[name], self._ground_lock:
            dropped = self.core.drop(name, born)
            if dropped is not None:
                directory = snapshot_directory(self._root, dropped.resident.id)
                for file in self._files.list(directory):
                    if slice_of_snapshot(file) in self.core.owned:
                        self._files.remove(os.path.join(directory, file))

    def _forget(self, holding: Holding[Any], writers: set[str]) -> None:
        """On disk as well: a writer of the same name begins at 0, and must not be taken for the one before."""
        resident_id = holding.resident.id
        # In memory first, and not under the lock: this waits for an epoch that runs.
        holding.forget(sorted(writers))
        with self._ground_lock:
            grounds = {}
            for number, ground in self._grounds.items():
                seen = ground.vectors.get(resident_id, {})
                left = {writer: turn for writer, turn in seen.items() if writer not in writers}
                grounds[number] = replace(ground, vectors={**ground.vectors, resident_id: left})
            self._write_manifest(grounds)

    def _write_manifest(self, grounds: dict[SliceId, Ground]) -> None:
        """What slices rest on is as it was, unless it is written down."""
        core = self.core
        write_manifest(self._files, self._root, Manifest(core.term, core.container, grounds))
        self._grounds = grounds

    # Epochs

    def _prepare(self, message: Prepare) -> Prepared:
        record = self.core.begin(message)
        if isinstance(record, Prepared):
            return record
        holding = self.core.holding(record.resident)
        made: list[Ready] = []
        logged: list[int] = []
        steps: list[Callable[[], None]] = [
            lambda: made.append(holding.prepare(record)),
            lambda: logged.append(self._append(record, holding)),
        ]
        try:
            if holding.spec.runs_code:
                # At the same time. A record whose epoch then cannot run stays in the log, undecided.
                self._runtime.map(lambda step: step(), steps)
            else:
                for step in steps:
                    step()
        except BaseException:
            for ready in made:
                holding.undo(ready)
            self.core.refused(record)
            raise
        prepared = self.core.logged(logged[0], made[0])
        reach("acknowledge.before")
        reach("acknowledge.after")
        return prepared

    def _append(self, record: Record, holding: Holding[Any]) -> int:
        """Makes the record durable; its number. One that may or may not be there gives its number to the next."""
        names = record.parts[0].batch.schema.names if record.parts else ()
        schema = holding.schema_of(names, record.work)
        with self._log_lock:
            started = time.perf_counter()
            seq = self.core.number(record.resident)
            write_record(self._files, self._root, self._directory, seq, record, holding.resident.id, schema)
            self.core.seq = seq
            self._log_bytes += sum(part.batch.nbytes for part in record.parts)
            self._log_seconds += time.perf_counter() - started
        return seq

    # Upkeep

    def maintain(self) -> bool:
        """One bounded piece of upkeep: a step of compaction, and a checkpoint when the log has grown.

        True when there was nothing to do.
        """
        core = self._core
        if core is None or not core.owned:
            return True
        core.expire(self._runtime.now())
        idle = True
        for holding in list(core.holdings.values()):
            idle &= self._sweep(holding)
        # How much is too much takes time to find out.
        is_long = self._log_bytes > LOG_BYTES_MAX and self._log_bytes > self._log_bytes_max()
        if (
            is_long
            or core.seq - self._covered > LOG_RECORDS_MAX
            or (self._inherits() and not self._unconfirmed)
        ):
            self.checkpoint()
        return idle

    def _sweep(self, holding: Holding[Any]) -> bool:
        """Compacts a bounded part of a resident's slices. One whose own rule fails is compacted no more, as long as we live."""
        if holding.resident.id in self._unswept:
            return True
        try:
            idle = [holding.sweep(number, SWEEP_ENTRIES) for number in list(holding.slices)]
            return all(idle)
        except Exception:
            if not holding.sweeps_code:
                raise
            # Whatever user code does, the rest of upkeep goes on.
            traceback.print_exc()
            self._unswept.add(holding.resident.id)
            self.upkeep_failures += 1
            return True

    def _log_bytes_max(self) -> int:
        """A checkpoint writes slices whole: the log may be as large as the snapshots that it replaces, so that a byte is
        written so many times at most, whatever the pond holds. Outputs are written whether or not they changed.
        """
        holdings = list(self.core.holdings.values())
        outputs = sum(holding.outputs_bytes for holding in holdings)
        snapshots = sum(held.snapshot_bytes for holding in holdings for held in list(holding.slices.values()))
        return LOG_BYTES_MAX + snapshots + LOG_PER_OUTPUTS * outputs

    def _inherits(self) -> bool:
        """Whether slices here rest on logs of others that a checkpoint would make unnecessary."""
        return any(
            span.directory != self._directory
            for number, ground in list(self._grounds.items())
            if number in self.core.owned
            for span in ground.logs
        )

    def _needs(self) -> list[str]:
        """The directories of earlier incarnations that slices here still rest on."""
        return sorted(
            {
                span.directory
                for number, ground in list(self._grounds.items())
                if number in self.core.owned
                for span in ground.spans
                if span.directory != self._directory
            }
        )

    def checkpoint(self) -> None:
        """Snapshots every dirty slice, one by one, then lets go of the log that they make unnecessary.

        A slice is held only while it is copied. A crash anywhere leaves either the old or the new manifest,
        and all that it names.
        """
        with self._ground_lock:
            core = self.core
            plan = core.plan_checkpoint()
            if plan.covered == self._covered and not plan.dirty and not self._inherits():
                return
            log_bytes, self._log_bytes = self._log_bytes, 0
            self._checkpoints += 1
            vectors = plan.clean
            try:
                for holding, number in plan.dirty:
                    if number in holding.slices and number not in self._unconfirmed:
                        self._snapshot(holding, number, plan, vectors)
                self._write_manifest(self._new_grounds(plan, vectors))
            except BaseException:
                self._log_bytes += log_bytes
                raise
            self._covered = plan.covered
            reach("truncate.before")
            self._truncate()
            # A slice that went meanwhile may still rest on what was to be replaced.
            named = {
                os.path.join(snapshot_directory(self._root, resident_id), file)
                for ground in self._grounds.values()
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
        grounds = dict(self._grounds)
        own = LogSpan(self._directory, plan.covered)
        for number in self.core.owned - self._unconfirmed:
            before = grounds[number]
            behind = [resident_id for resident_id, at in plan.behind if at == number]
            seen = {resident_id: vector for (resident_id, at), vector in vectors.items() if at == number}
            held = {h.resident.id: h.slices.get(number) for h in list(self.core.holdings.values())}
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

    def _truncate(self) -> None:
        """Removes log records that no slice rests on: neither one that is here, nor one that went."""
        afters = [
            span.after
            for ground in self._grounds.values()
            for span in ground.spans
            if span.directory == self._directory
        ]
        covered = min(afters, default=0)
        for seq in range(self._truncated + 1, covered + 1):
            self._files.remove(record_path(self._root, self._directory, seq))
        self._truncated = max(self._truncated, covered)

    def _snapshot(
        self,
        holding: Holding[Any],
        number: SliceId,
        plan: CheckpointPlan,
        vectors: dict[tuple[ResidentId, SliceId], dict[str, Turn]],
    ) -> None:
        """Writes one slice, and notes where its writers stand in it. What it replaces goes with the manifest.

        One in which an epoch has begun to run since the plan was made stays behind.
        """
        held = holding.held(number)
        if not held.lock.acquire(timeout=BUSY_S_MAX):
            plan.behind.add((holding.resident.id, number))
            return
        try:
            started = time.perf_counter()
            copy = held.decided_copy()
            vector = dict(held.vector)
            held.dirty = False
            self._snapshot_pause_s_max = max(self._snapshot_pause_s_max, time.perf_counter() - started)
        finally:
            held.lock.release()
        name = snapshot_name(number, self.core.term, self._checkpoints)
        head = SnapshotHead(holding.resident.id, number)
        try:
            rows = copy.export()
            self._files.make_dir(snapshot_directory(self._root, holding.resident.id))
            write_snapshot(self._files, self._root, name, head, holding.snapshot_schema, [rows])
        except BaseException:
            # Whatever it was: the slice must be in the next snapshot, or its log would be let go.
            held.dirty = True
            raise
        if held.snapshot is not None:
            self._replaced.append(
                os.path.join(snapshot_directory(self._root, holding.resident.id), held.snapshot)
            )
        held.snapshot, held.snapshot_bytes = name, int(rows.nbytes)
        vectors[holding.resident.id, number] = vector

    def _report(self) -> ContainerReport:
        _ = self.core
        return ContainerReport(
            needs=self._needs(),
            behind=sorted(
                {resident_id for ground in list(self._grounds.values()) for resident_id in ground.behind}
            ),
        )

    def _figures(self) -> ContainerFigures:
        core = self.core
        residents: dict[str, dict[str, dict[str, Any]]] = {}
        for name, holding in list(core.holdings.items()):
            if holding.slices:
                residents.setdefault(holding.spec.plural, {})[name] = holding.report()
        return ContainerFigures(
            metrics={
                "up_s": self._runtime.now() - self._since_s,
                "term": core.term,
                **process_figures(self._means),
                "slices": len(core.owned),
                "rows_staged": core.rows_staged,
                "rows_applied": core.rows_applied,
                "rows_fetched": core.rows_fetched,
                "checkpoints": self._checkpoints,
                **self._rebuilt,
                "log_records": core.seq - self._truncated,
                "log_seconds": self._log_seconds,
                "upkeep_failures": self.upkeep_failures,
                "snapshot_pause_ms_max": self._snapshot_pause_s_max * 1e3,
            },
            residents=residents,
            slices=slice_figures(core),
        )

    def validate(self) -> None:
        self.core.validate()
