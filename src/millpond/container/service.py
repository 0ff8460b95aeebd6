"""The container's shell: files, threads and messages around the core."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from millpond.code.rules import FetchRule
from millpond.container.core import Append, Core
from millpond.container.group import HeldGroup, in_batches
from millpond.container.held import HeldSlice, HeldState, Record, Runner, run_serially
from millpond.container.layout import (
    CONTAINERS,
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
from millpond.container.recovery import recover
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import BadMessage, Unavailable
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.messages import (
    AddState,
    Advance,
    Apply,
    Assign,
    Checkpoint,
    ContainerReport,
    ContainerStatus,
    Discard,
    Done,
    Fetch,
    FindRows,
    Message,
    Prepare,
    Prepared,
    ReadOutputs,
    ReadSlices,
    ReadTable,
    Stage,
)

LOG_BYTES_MAX = 128 << 20
LOG_RECORDS_MAX = 512
LOG_PER_OUTPUTS = 4
SWEEP_ENTRIES = 4096


class ContainerService:
    """Serves one container's slices (a `Handler`). Idle until `Assign` tells it which."""

    def __init__(self, files: Files, root: str, run: Runner = run_serially, threads: int = 1) -> None:
        self._files = files
        self._root = root
        self._run = run
        self._threads = threads
        self._core: Core | None = None
        self._manifest: Manifest | None = None
        self._directory = ""
        # Records are numbered and appended one at a time; a checkpoint is planned between two of them.
        self._log_lock = threading.Lock()
        self._checkpoint_lock = threading.Lock()
        self._checkpoints = 0
        self._log_bytes = 0
        self._snapshot_pause_s_max = 0.0
        self._log_seconds = 0.0
        self.upkeep_failures = 0

    # Handler

    def call(self, message: Any) -> Message:
        match message:
            case Assign():
                return self._assign(message)
            case AddState(spec):
                self.core.add_state(spec)
                self._files.make_dir(snapshot_directory(self._root, spec.name))
            case Prepare():
                return self._prepare(message)
            case Discard(state, writer, epoch):
                self.core.discard(state, writer, epoch)
            case Apply():
                reach("apply.before")
                self.core.apply(message)
                reach("apply.after")
            case Advance(state, fetch_progress, final_below):
                self.core.held(state).advance(fetch_progress, final_below)
            case Checkpoint():
                self.checkpoint()
            case ContainerStatus():
                return self._report()
            case _:
                raise BadMessage(f"a container does not answer {type(message).__name__}")
        return Done()

    def exchange(self, message: Any, batches: Iterator[SlicedBatch]) -> Answer:
        match message:
            case Stage():
                return Answer(self.core.stage(message, batches))
            case Fetch(state, rule, code, returns):
                sliced = next(batches, None)
                if sliced is None or next(batches, None) is not None:
                    raise BadMessage("questions come as one batch")
                return Answer(Done(), self.core.fetch(state, FetchRule(rule, code, returns), sliced))
            case FindRows(group, table):
                sliced = next(batches, None)
                if sliced is None:
                    raise BadMessage("keys come as one batch")
                return Answer(Done(), self.core.group(group).find(table, sliced.batch))
        raise BadMessage(f"a container does not exchange rows for {type(message).__name__}")

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        match message:
            case ReadSlices(state, at):
                held = self.core.state(state)
                return held.rows_schema, (held.newest(number, at) for number in self.core.owned)
            case ReadTable(group, table):
                rows = self.core.group(group).read(table)
                return rows.schema, in_batches(rows)
            case ReadOutputs(group, writer, epoch, start, stop):
                return self.core.group(group).read_outputs(writer, epoch, start, stop)
        raise BadMessage(f"a container does not read for {type(message).__name__}")

    @property
    def core(self) -> Core:
        if self._core is None:
            raise Unavailable("the container is still recovering", hint="try again in a moment", address="")
        return self._core

    # Epochs

    def _assign(self, message: Assign) -> Message:
        if self._core is not None:
            raise BadMessage(f"container {self._core.container} has its slices already")
        core = Core(
            message.container, message.term, message.slices, message.pond_slices, self._run, self._threads
        )
        recovered = recover(core, self._files, self._root, message)
        self._directory = directory_name(message.term, message.container)
        self._files.make_dir(os.path.join(self._root, CONTAINERS, self._directory))
        for name in core.states:
            self._files.make_dir(snapshot_directory(self._root, name))
        write_manifest(self._files, self._root, recovered.manifest)
        self._manifest = recovered.manifest
        self._remove_leftovers(core)
        self._core = core
        return recovered.summary

    def _remove_leftovers(self, core: Core) -> None:
        """Removes snapshots of our slices that no manifest will name again: older ones, and unfinished rounds'."""
        for name, state in core.states.items():
            directory = snapshot_directory(self._root, name)
            current = {held.snapshot for held in state.slices.values()}
            for file in self._files.list(directory):
                if file not in current and slice_of_snapshot(file) in state.slices:
                    self._files.remove(os.path.join(directory, file))

    def _prepare(self, message: Prepare) -> Prepared:
        core = self.core
        with self._log_lock:
            started = time.perf_counter()
            step = core.prepare(message)
            if isinstance(step, Prepared):
                return step
            try:
                self._check_and_append(step)
            except Exception:
                # Whatever it was: a number that is left out would make the log look as if a record were lost.
                core.append_failed(step)
                raise
            self._log_bytes += sum(sliced.batch.nbytes for sliced in step.record.batches)
            prepared = core.appended(step)
            self._log_seconds += time.perf_counter() - started
        reach("acknowledge.before")
        reach("acknowledge.after")
        return prepared

    def _check_and_append(self, step: Append) -> None:
        """Both at once. A record that was refused stays in the log, undecided, until the next takes its number."""
        held = self.core.held(step.record.state)
        if not isinstance(held, HeldGroup):
            held.check_epoch(step.record)
            self._append(step.seq, step.record)
            return
        with ThreadPoolExecutor(1, "millpond-check") as pool:
            checked = pool.submit(held.check_epoch, step.record)
            self._append(step.seq, step.record)
        checked.result()

    def _append(self, seq: int, record: Record) -> None:
        names = record.batches[0].batch.schema.names if record.batches else ()
        schema = self.core.held(record.state).schema_of(names, record.transactions)
        write_record(self._files, self._root, self._directory, seq, record, schema)

    # Upkeep

    def maintain(self) -> bool:
        """One bounded piece of upkeep: a step of compaction, and a checkpoint when the log has grown.

        True when there was nothing to do.
        """
        if self._core is None or self._manifest is None:
            return True
        idle = True
        for state in list(self._core.states.values()):
            for number in self._core.owned:
                idle &= state.sweep(number, SWEEP_ENTRIES)
        plan = self._core.plan_checkpoint()
        grown = (
            self._log_bytes > self._log_bytes_max() or plan.covered - self._manifest.covered > LOG_RECORDS_MAX
        )
        if grown or self._manifest.needs:
            self.checkpoint()
        return idle

    def _log_bytes_max(self) -> int:
        """Checkpoints write outputs too, whether or not they changed: the log may be some times as large as those."""
        groups = [held for held in list(self.core.states.values()) if isinstance(held, HeldGroup)]
        outputs = sum(held.store.outputs_bytes for group in groups for held in group.slices.values())
        return LOG_BYTES_MAX + LOG_PER_OUTPUTS * outputs

    def checkpoint(self) -> None:
        """Snapshots every dirty slice, one by one, then lets go of the log that they make unnecessary.

        A slice is held only while it is copied. A crash anywhere leaves either the old or the new manifest,
        and all that it names.
        """
        with self._checkpoint_lock:
            core, files, root = self.core, self._files, self._root
            if core.broken():
                return  # the log has what could not be applied
            before = self._manifest
            assert before is not None
            with self._log_lock:
                plan = core.plan_checkpoint()
                self._log_bytes = 0
            if plan.covered == before.covered and not plan.dirty and not before.needs:
                return
            self._checkpoints += 1
            replaced: list[str] = []
            for state_name, number in plan.dirty:
                name = snapshot_name(number, core.term, self._checkpoints)
                old = self._snapshot_slice(state_name, number, name)
                if old:
                    replaced.append(os.path.join(snapshot_directory(root, state_name), old))
            after = Manifest(
                term=core.term,
                container=core.container,
                slices=core.owned,
                covered=plan.covered,
                vector=plan.vector,
                snapshots={
                    name: {number: held.snapshot for number, held in state.slices.items() if held.snapshot}
                    for name, state in list(core.states.items())
                },
                needs={},
            )
            write_manifest(files, root, after)
            self._manifest = after
            reach("truncate.before")
            for seq in range(before.covered + 1, after.covered + 1):
                files.remove(record_path(root, self._directory, seq))
            for path in replaced:
                files.remove(path)
            reach("truncate.after")

    def _snapshot_slice(self, state_name: str, number: int, name: str) -> str | None:
        """Writes one slice; returns the name of the snapshot that it replaces."""
        state = self.core.held(state_name)
        held: HeldSlice[Any] = state.slices[number]
        with held.lock:
            started = time.perf_counter()
            copy = held.store.copy()
            vector = dict(held.vector)
            held.dirty = False
            self._snapshot_pause_s_max = max(self._snapshot_pause_s_max, time.perf_counter() - started)
        try:
            self._files.make_dir(snapshot_directory(self._root, state_name))
            head = SnapshotHead(state_name, number, vector)
            write_snapshot(self._files, self._root, name, head, state.rows_schema, [copy.export()])
        except BaseException:
            # Whatever it was: the slice must be in the next snapshot, or its log would be let go.
            held.dirty = True
            raise
        old, held.snapshot = held.snapshot, name
        return old

    def _report(self) -> ContainerReport:
        core = self.core
        assert self._manifest is not None
        stores = {
            name: [held.store for held in state.slices.values()]
            for name, state in list(core.states.items())
            if isinstance(state, HeldState)
        }
        return ContainerReport(
            term=core.term,
            needs=sorted(self._manifest.needs),
            metrics={
                "slices": len(core.owned),
                "rows_staged": core.staged_rows(),
                "rows_applied": core.rows_applied,
                "rows_fetched": core.rows_fetched,
                "checkpoints": self._checkpoints,
                "log_records": core.plan_checkpoint().covered - self._manifest.covered,
                "log_seconds": self._log_seconds,
                "upkeep_failures": self.upkeep_failures,
                "snapshot_pause_ms_max": self._snapshot_pause_s_max * 1e3,
            },
            states={
                name: {
                    "keys": sum(store.keys for store in held),
                    "versions": sum(store.versions for store in held),
                    "bytes": sum(store.nbytes for store in held),
                    "rule_failures": core.state(name).rules.failures,
                }
                for name, held in stores.items()
            },
            groups={
                name: state.report()
                for name, state in list(core.states.items())
                if isinstance(state, HeldGroup) and state.slices
            },
        )

    def validate(self) -> None:
        self.core.validate()
