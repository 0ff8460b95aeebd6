"""The container's shell: files, threads and messages around the core."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, TypeVar

import pyarrow as pa

from millpond.container.checkpoints import Checkpoints
from millpond.container.core import Core
from millpond.container.holdings.base import Holding, Means, Ready
from millpond.container.layout import CONTAINERS, directory_name
from millpond.container.log import Log
from millpond.container.marks import Marks
from millpond.container.recovery import rebuild
from millpond.container.room import ROOM_SHARE, Room
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import BadMessage, StageLost, Unavailable
from millpond.runtime import Locks, Runtime, Serial
from millpond.wire.base import Done, Exchange, Message, Read, SliceId
from millpond.wire.connection import Answer, Dialer, SlicedBatch
from millpond.wire.epochs import Apply, Discard, Prepare, Prepared, Stage
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

SWEEP_ENTRIES = 4096
_T = TypeVar("_T")


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
        # These come together, by `Assign`.
        self._core: Core | None = None
        self._log: Log | None = None
        self._checkpoints: Checkpoints | None = None
        self._assign_lock = self._runtime.lock()
        # Steps of one resident's epochs do not overlap.
        self._epoch_locks: Locks[str] = Locks(self._runtime)
        self._order = 0
        # Snapshots loaded and records replayed, as slices were adopted.
        self._rebuilt: Counter[str] = Counter()
        self._unswept: set[str] = set()
        self.upkeep_failures = 0

    # Handler

    def call(self, message: Any) -> Message:
        match message:
            case Assign():
                with self._assign_lock:
                    self._assign(message)
            case Adopt():
                self._adopt(message)
            case Confirm(order, slices):
                self._confirm(order, slices)
            case Release(order, slices, gone):
                self._release(order, slices, gone)
            case AddResident(resident):
                self.core.add(resident)
                self.checkpoints.make_room(resident.id)
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
            case Ping():
                _ = self.core  # one that recovers is not there yet
            case ContainerStatus():
                return self._report()
            case _:
                raise BadMessage(f"a container does not answer {type(message).__name__}")
        return Done()

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
        return _there(self._core)

    @property
    def log(self) -> Log:
        return _there(self._log)

    @property
    def checkpoints(self) -> Checkpoints:
        return _there(self._checkpoints)

    # Slices

    def _assign(self, message: Assign) -> None:
        if self._core is not None:
            if self._core.term == message.term:
                return
            raise BadMessage(f"this is container {self._core.container} in term {self._core.term} already")
        core = Core(message.container, message.term, message.pond_slices, self._means)
        directory = directory_name(message.term, message.container)
        lock = self._runtime.lock
        log = Log(self._files, self._root, directory, core, lock())
        checkpoints = Checkpoints(self._files, self._root, core, log, lock(), count(1), self._means.bounds)
        for resident in message.residents:
            core.add(resident)
            checkpoints.make_room(resident.id)
        self._files.make_dir(os.path.join(self._root, CONTAINERS, directory))
        self._log, self._checkpoints, self._core = log, checkpoints, core

    def _adopt(self, message: Adopt) -> None:
        """Rebuilds slices beside those that are served; they are served once what they rest on is written down."""
        core = self.core
        with self.checkpoints.lock:
            self._check_order(message.order)
            wanted = {n: directory for n, directory in message.slices.items() if n not in core.owned}
            adopt = Adopt(message.order, wanted, message.decided, message.careful)
            with Marks(core, self._files, self._root, message.careful) as marks:
                marks.spoil()
                rebuilt = rebuild(core, self._files, self._root, adopt, marks.set)
            self.checkpoints.add(rebuilt.grounds)
            core.install(rebuilt.slices)
            self._rebuilt.update(rebuilt.figures)

    def _confirm(self, order: int, slices: list[SliceId]) -> None:
        with self.checkpoints.lock:
            self._check_order(order)
            self.checkpoints.confirm(slices)

    def _check_order(self, order: int) -> None:
        """Whoever sent an older one has been told that it failed, and has gone on."""
        if order < self._order:
            raise StageLost("this came too late", container=self.core.container)
        self._order = order

    def _release(self, order: int, slices: list[SliceId], gone: bool) -> None:
        with self.checkpoints.lock:
            self._check_order(order)
            self.core.release(slices)
            self.checkpoints.release(set(slices), gone)

    def _drop(self, name: str, born: int) -> None:
        # An epoch that runs for long holds up nobody's checkpoints.
        with self._epoch_locks[name], self.checkpoints.lock:
            dropped = self.core.drop(name, born)
            if dropped is not None:
                self.checkpoints.drop(dropped.resident.id)

    def _forget(self, holding: Holding[Any], writers: set[str]) -> None:
        # In memory first, and not under the lock: this waits for an epoch that runs.
        holding.forget(sorted(writers))
        with self.checkpoints.lock:
            self.checkpoints.forget(holding.resident.id, writers)

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
            lambda: logged.append(self.log.append(record, holding)),
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
        if self.checkpoints.is_due():
            self.checkpoint()
        return self.checkpoints.merge() and idle

    def checkpoint(self) -> None:
        self.checkpoints.checkpoint()

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

    def _report(self) -> ContainerReport:
        core = self.core
        residents: dict[str, dict[str, dict[str, Any]]] = {}
        for name, holding in list(core.holdings.items()):
            if holding.slices:
                residents.setdefault(holding.spec.plural, {})[name] = holding.report()
        return ContainerReport(
            needs=self.checkpoints.needs(),
            behind=self.checkpoints.behind(),
            metrics={
                "slices": len(core.owned),
                "rows_staged": core.rows_staged,
                "rows_applied": core.rows_applied,
                "rows_fetched": core.rows_fetched,
                "checkpoints": self.checkpoints.taken,
                "checkpoint_bytes": self.checkpoints.bytes_written,
                "merges": self.checkpoints.merges,
                **self._rebuilt,
                "log_records": self.log.records,
                "log_seconds": self.log.seconds,
                "upkeep_failures": self.upkeep_failures,
                "snapshot_pause_ms_max": self.checkpoints.pause_s_max * 1e3,
            },
            residents=residents,
        )

    def validate(self) -> None:
        self.core.validate()


def _there(part: _T | None) -> _T:
    if part is None:
        raise Unavailable("the container is still recovering", hint="try again in a moment", address="")
    return part
