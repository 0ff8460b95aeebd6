"""The container's shell: files, threads and messages around the core."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa

from millpond.container.backups import Backups, read_held
from millpond.container.checkpoints import Checkpoints
from millpond.container.core import Core
from millpond.container.figures import by_resident, process_figures, slice_figures
from millpond.container.holdings.base import Holding, Means, Ready, Record
from millpond.container.lease import Lease
from millpond.container.log import Log
from millpond.container.placing import READY_S_MAX, Placing
from millpond.container.room import ROOM_SHARE, Room
from millpond.container.rounds import Rounds
from millpond.container.waiting import WaitingFiles
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.durable.landmark import check_root
from millpond.errors import (
    BackupLost,
    BadMessage,
    MillpondError,
    StageLost,
    Unavailable,
    WriteFailed,
    not_trusted,
)
from millpond.runtime import Locks, Runtime, Serial
from millpond.wire.backups import (
    AskLag,
    BackUp,
    Backup,
    Copy,
    Demote,
    Dismiss,
    Enlist,
    GetReady,
    Lag,
    Promote,
    ReadHeld,
    Readiness,
)
from millpond.wire.base import Ask, Done, Message, Read, SliceId
from millpond.wire.connection import Answer, Connection, Dialer, SlicedBatch
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
    LetGo,
    ListSnapshots,
    Ping,
    Release,
    SnapshotList,
)
from millpond.wire.moves import SetThreads
from millpond.wire.rounds import RoundRows
from millpond.wire.waiting import KeepWaiting, ReadWaiting

SWEEP_ENTRIES = 4096
# Connections to other containers that are kept; of those that ended, too, until there are more.
PEERS_MAX = 64


class ContainerService:
    """Serves one container's slices (a `Handler`). Idle until `Assign` tells it who it is, and `Adopt` what it has.

    `dial` is how it reaches its peers: those that hold its slices as a backup, and those whose slices it holds.
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
        self._means = (means or Means())._replace(lock=self._runtime.lock, sleep=self._runtime.sleep)
        self.dial = dial
        self._room = Room(self._means.memory // ROOM_SHARE)
        self._waiting = WaitingFiles(files, root, self._room, self._runtime.bits)
        self._lease = Lease(self._runtime)
        # It comes by `Assign`.
        self._placing: Placing | None = None
        self._assign_lock = self._runtime.lock()
        # Steps of one resident's epochs do not overlap.
        self._epoch_locks: Locks[str] = Locks(self._runtime)
        self._peers: dict[str, Connection] = {}
        self._peers_lock = self._runtime.lock()
        self._rounds = Rounds(self._runtime, self._peer)
        self._unswept: set[str] = set()
        self.upkeep_failures = 0
        self._since_s = self._runtime.now()

    # Handler

    def call(self, message: Any) -> Message:
        match message:
            case Prepare(resident):
                if message.peers:
                    self._rounds.supersede(resident, message.ballot)
                with self._epoch_locks[resident]:
                    return self._prepare(message)
            case Discard(resident, ballot):
                self._rounds.supersede(resident, ballot + 1)
                with self._epoch_locks[resident]:
                    self.core.discard(resident, ballot)
            case Apply(resident):
                with self._epoch_locks[resident]:
                    reach("apply.before")
                    self.core.apply(message)
                    reach("apply.after")
            case Checkpoint(decided):
                self.backups.settle(decided)
                self.checkpoint()
            case SetThreads(threads):
                self._means.run.resize(threads)
            case GetReady():
                # Where the disk is slow, so is all that slices would wait for here.
                if message.quiet_s and message.disk_counts and self._lease.write_s > READY_S_MAX:
                    return Readiness(False)
                return Readiness(self._here.get_ready(message))
            case Ping() | ContainerStatus() | AskLag() | ListSnapshots() | AskFigures() | AskSlice():
                return self._tell_about(message)
            case Assign():
                with self._assign_lock:
                    self._assign(message)
            case (
                Adopt()
                | Confirm()
                | Release()
                | LetGo()
                | Enlist()
                | Copy()
                | Promote()
                | Demote()
                | Dismiss()
            ):
                self._here.place(message)
            case _:
                self._learn_of(message)
        return Done()

    def _learn_of(self, message: Any) -> None:
        """Residents come, go and go on."""
        match message:
            case AddResident(resident):
                for core, _ in self._here.both:
                    core.add(resident)
                self.checkpoints.make_room(resident.id)
            case DropResident(name, born):
                self._drop(name, born)
            case ForgetWriters(resident, writers):
                for core, checkpoints in self._here.both:
                    self._forget(core.holding(resident), checkpoints, set(writers))
            case Advance(resident, fetch_progress, final_below):
                self.core.holding(resident).advance(fetch_progress, final_below)
            case _:
                raise BadMessage(f"a container does not answer {type(message).__name__}")

    def _tell_about(self, message: Any) -> Message:
        """Answers what changes nothing."""
        match message:
            case Ping(lease_s, heard):
                _ = self.core  # one that recovers is not there yet
                return self._lease.pulse(lease_s, heard)
            case ContainerStatus():
                return self._report()
            case AskLag(slices):
                return Lag(*self.backups.core.lag(slices))
            case ListSnapshots(resident):
                return SnapshotList(self._here.snapshots_of_others(resident))
            case AskFigures():
                return self._figures()
            case AskSlice(number):
                return by_resident(self.core, SliceId(number))
        raise BadMessage(f"a container does not answer {type(message).__name__}")

    def exchange(self, message: Any, batches: Iterator[SlicedBatch], reads_only: bool = False) -> Answer[Any]:
        if isinstance(message, Stage):
            return Answer(self.core.stage(message, batches, self._runtime.now()))
        if isinstance(message, BackUp):
            self.backups.keep(message, batches)
            return Answer(Done())
        if isinstance(message, RoundRows):
            if message.term != self.core.term:
                raise StageLost("rows of a round came for another incarnation", container=self.core.container)
            self.core.holding(message.resident)  # one that was forgotten keeps nothing
            return Answer(self._rounds.take(message, list(batches)))
        if isinstance(message, KeepWaiting):
            if not self._means.runs_code:
                raise not_trusted("rows that wait would be kept")
            self.core.holding(message.resident)  # one that was forgotten keeps nothing
            return self._waiting.keep(message, batches)
        if not isinstance(message, Ask):
            raise BadMessage(f"a container does not exchange rows for {type(message).__name__}")
        rows = next(batches, None)
        if rows is None or next(batches, None) is not None:
            raise BadMessage("questions come as one batch")
        # Not before the rows have come, which may take long.
        holding = self._up_to_date(message)
        share = self._room.share(rows.batch.nbytes + rows.counts.nbytes, reads_only)
        try:
            answer = holding.exchange(message, rows, share)
            # Who was stopped meanwhile may have answered from what others have changed since.
            self._lease.check()
        except BaseException:
            share.close()
            raise
        self.core.rows_fetched += rows.batch.num_rows
        return answer._replace(sent=share.close)

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        if not isinstance(message, Read):
            raise BadMessage(f"a container does not read for {type(message).__name__}")
        if isinstance(message, ReadWaiting):
            self._lease.check()
            return self._waiting.read(message)  # files, which are what they are
        holding = self._up_to_date(message)
        if isinstance(message, ReadHeld):
            return read_held(holding, message.slice)
        return holding.read(message)

    def _up_to_date(self, message: Ask[Any] | Read) -> Holding[Any]:
        """What a question is about, if nobody else may know more of it."""
        self._lease.check()
        holding = self.core.holding(message.resident)
        holding.check_seen(message.born, message.seen)
        return holding

    def beat(self) -> None:
        """Writes a little to the disk, and notes how long that takes. In a thread of its own."""
        if self._placing is not None:
            self._lease.beat(self._placing.log, self._placing.is_there)

    @property
    def _here(self) -> Placing:
        if self._placing is None:
            raise Unavailable("the container is still recovering", hint="try again in a moment", address="")
        return self._placing

    @property
    def core(self) -> Core:
        return self._here.core

    @property
    def log(self) -> Log:
        return self._here.log

    @property
    def checkpoints(self) -> Checkpoints:
        return self._here.checkpoints

    @property
    def backups(self) -> Backups:
        return self._here.backups

    def _assign(self, message: Assign) -> None:
        if self._placing is not None:
            core = self._placing.core
            if core.term == message.term:
                return
            raise BadMessage(f"this is container {core.container} in term {core.term} already")
        if message.threads:
            self._means.run.resize(message.threads)
        if message.landmark:
            check_root(self._root, message.landmark, f"container {message.container}", self._files)
        self._placing = Placing(
            self._files, self._root, message, self._means, self._runtime, self.dial, self._lease.holds
        )

    # Residents

    def _drop(self, name: str, born: int) -> None:
        # An epoch that runs for long holds up nobody's checkpoints.
        with self._epoch_locks[name]:
            for core, checkpoints in self._here.both:
                with checkpoints.lock:
                    dropped = core.drop(name, born)
                    if dropped is not None:
                        checkpoints.drop(dropped.resident.id)
        self._rounds.forget(name)

    def _forget(self, holding: Holding[Any], checkpoints: Checkpoints, writers: set[str]) -> None:
        # In memory first, and not under the lock: this waits for an epoch that runs.
        holding.forget(sorted(writers))
        with checkpoints.lock:
            checkpoints.forget(holding.resident.id, writers)

    # Epochs

    def _prepare(self, message: Prepare) -> Prepared:
        try:
            return self._make_ready(message)
        except Exception as error:
            if message.peers:
                self._rounds.refuse(message, self.core.container, f"container {self.core.container}: {error}")
            raise

    def _run(self, message: Prepare, record: Record, holding: Holding[Any]) -> Ready:
        """An epoch that containers run together: what there is to be logged of it here."""
        rounds = self._rounds.begin(message, self.core.container)
        rounds.check_slices(list(holding.slices))
        ready = holding.run(record, rounds)
        self._rounds.end(message.resident, message.ballot)
        return ready

    def _make_ready(self, message: Prepare) -> Prepared:
        record = self.core.begin(message)
        if isinstance(record, Prepared):
            return record
        holding = self.core.holding(record.resident)
        made: list[Ready] = []
        logged: list[int] = []
        if message.peers:
            try:
                made.append(self._run(message, record, holding))
            except BaseException:
                self.core.refused(record)
                raise
            record = made[0].record
        else:
            record = holding.stamped(record)
        steps: list[Callable[[], None]] = [
            *([] if made else [lambda: made.append(holding.prepare(record))]),
            lambda: logged.append(self.log.append(record, holding)),
            *(partial(self._back_up, backup, record, message, holding) for backup in message.backups),
        ]
        try:
            if holding.spec.runs_code or message.backups:
                # At the same time. A record whose epoch then cannot run stays in the log, undecided.
                self._runtime.map(lambda step: step(), steps)
            else:
                for step in steps:
                    step()
        except BaseException as error:
            for ready in made:
                holding.undo(ready)
            self.core.refused(record, *logged)
            if isinstance(error, WriteFailed) and not self._here.is_there():
                # Not a disk that somebody has to make room on: the container is about to end for it.
                what = f"container {self.core.container} has lost its directory: {error.message}"
                raise StageLost(what, container=self.core.container) from error
            raise
        prepared = self.core.logged(logged[0], made[0])
        reach("acknowledge.before")
        reach("acknowledge.after")
        return prepared

    def _back_up(self, backup: Backup, record: Record, message: Prepare, holding: Holding[Any]) -> None:
        """Has a peer hold its part of the record, too. On return it is durable there."""
        part = record.cut(backup.slices)
        fetch_progress, final_below = holding.progress
        ask = BackUp(
            record.resident,
            owner=self.core.container,
            term=backup.term,
            writer=record.writer,
            turn=record.turn,
            ballot=record.ballot,
            digest=record.digest,
            slices=backup.slices,
            decided=message.decided,
            fetch_progress=fetch_progress,
            final_below=final_below,
            work=record.work,
        )
        try:
            rows = [SlicedBatch(each.batch, each.counts) for each in part.parts]
            self._peer(backup.address).exchange(ask, rows)
        except StageLost:
            raise
        except MillpondError as error:
            raise BackupLost(
                f"container {backup.container} did not back up epoch {record.turn}: {error.message}",
                container=backup.container,
                term=backup.term,
            ) from error

    def _peer(self, address: str) -> Connection:
        """A connection to another container, kept from one time to the next."""
        assert self.dial is not None
        with self._peers_lock:
            if address not in self._peers:
                self._peers[address] = self.dial(address)
                while len(self._peers) > PEERS_MAX:
                    self._peers.pop(next(iter(self._peers)))
            return self._peers[address]

    # Upkeep

    def maintain(self) -> bool:
        """One bounded piece of upkeep: a step of compaction, and a checkpoint when the log has grown.

        True when there was nothing to do.
        """
        if self._placing is None:
            return True
        core = self.core
        core.expire(self._runtime.now())
        if not self._lease.holds():
            return True
        idle = self.backups.maintain()
        for each, _ in self._here.both:
            for holding in list(each.holdings.values()):
                idle &= self._sweep(holding)
        if core.owned and self.checkpoints.is_due():
            self.checkpoints.checkpoint(rest=True)
        for _, checkpoints in self._here.both:
            idle &= checkpoints.merge()
        return idle

    def checkpoint(self) -> None:
        for _, checkpoints in self._here.both:
            checkpoints.checkpoint()

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
        _ = self.core
        return ContainerReport(
            needs=sorted({*self.checkpoints.needs(), *self.backups.checkpoints.needs()}),
            behind=sorted(
                {*self.checkpoints.behind(), *self.backups.checkpoints.behind(), *self.backups.unsettled()}
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
                "backups": len(self.backups.core.owned),
                "rows_staged": core.rows_staged,
                "rows_applied": core.rows_applied,
                "rows_fetched": core.rows_fetched,
                "checkpoints": self.checkpoints.taken,
                "checkpoint_bytes": self.checkpoints.bytes_written,
                "merges": self.checkpoints.merges,
                **self._here.rebuilt,
                "log_records": self.log.records,
                "log_seconds": self.log.seconds,
                "upkeep_failures": self.upkeep_failures,
                "snapshot_pause_ms_max": self.checkpoints.pause_s_max * 1e3,
            },
            residents=residents,
            slices=slice_figures(core),
        )

    def validate(self) -> None:
        self.core.validate()
        self.backups.core.validate()
        self._rounds.validate()
