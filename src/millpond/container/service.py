"""The container's shell: files, threads and messages around the core."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Any, TypeVar

import pyarrow as pa

from millpond.container.backup_core import BackupCore
from millpond.container.backups import Backups, closed, read_held
from millpond.container.checkpoints import Checkpoints
from millpond.container.core import Core
from millpond.container.figures import by_resident, process_figures, slice_figures
from millpond.container.holdings.base import Holding, Means, Ready, Record
from millpond.container.layout import (
    backup_directory_name,
    container_of_snapshot,
    directory_name,
    term_of_snapshot,
)
from millpond.container.log import Log
from millpond.container.marks import Marks
from millpond.container.recovery import rebuild
from millpond.container.room import ROOM_SHARE, Room
from millpond.container.waiting import WaitingFiles
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.durable.landmark import check_root
from millpond.errors import BackupLost, BadMessage, MillpondError, StageLost, Unavailable, not_trusted
from millpond.runtime import Locks, Runtime, Serial
from millpond.wire.backups import (
    AskLag,
    BackUp,
    Backup,
    Copy,
    Demote,
    Dismiss,
    Enlist,
    Lag,
    Promote,
    ReadHeld,
)
from millpond.wire.base import Done, Exchange, Message, Read, ResidentId, SliceId
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
    Pulse,
    Release,
    SnapshotList,
)
from millpond.wire.moves import SetThreads
from millpond.wire.waiting import KeepWaiting, ReadWaiting

SWEEP_ENTRIES = 4096
# Connections to other containers that are kept; of those that ended, too, until there are more.
PEERS_MAX = 64
# Answers to the coordinator whose times are remembered: more than it asks for in the time of a lease.
PULSES_MAX = 64
_T = TypeVar("_T")


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
        self._means = (means or Means())._replace(lock=self._runtime.lock)
        self.dial = dial
        self._room = Room(self._means.memory // ROOM_SHARE)
        self._waiting = WaitingFiles(files, root, self._room, self._runtime.bits)
        # These come together, by `Assign`.
        self._core: Core | None = None
        self._log: Log | None = None
        self._checkpoints: Checkpoints | None = None
        self._backups: Backups | None = None
        self._assign_lock = self._runtime.lock()
        # Steps of one resident's epochs do not overlap.
        self._epoch_locks: Locks[str] = Locks(self._runtime)
        self._lease_until_s: float | None = None
        self._pulses = count(1)
        self._answered_s: dict[int, float] = {}
        self._writing_since_s: float | None = None
        self._write_s = 0.0
        # Of each slice the newest order, and the one by which it came to be served.
        self._orders: dict[SliceId, int] = {}
        self._promotions: dict[SliceId, int] = {}
        self._newest_order = 0
        self._order_lock = self._runtime.lock()
        self._peers: dict[str, Connection] = {}
        self._peers_lock = self._runtime.lock()
        # Snapshots loaded and records replayed, as slices were adopted.
        self._rebuilt: Counter[str] = Counter()
        self._unswept: set[str] = set()
        self.upkeep_failures = 0
        self._since_s = self._runtime.now()

    # Handler

    def call(self, message: Any) -> Message:
        match message:
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
            case Checkpoint(decided):
                self.backups.settle(decided)
                self.checkpoint()
            case SetThreads(threads):
                self._means.run.resize(threads)
            case Ping() | ContainerStatus() | AskLag() | ListSnapshots() | AskFigures() | AskSlice():
                return self._tell_about(message)
            case (
                Assign()
                | Adopt()
                | Confirm()
                | Release()
                | LetGo()
                | Enlist()
                | Copy()
                | Promote()
                | Demote()
                | Dismiss()
            ):
                self._place(message)
            case _:
                self._learn_of(message)
        return Done()

    def _place(self, message: Any) -> None:
        """Slices come, go and change roles."""
        match message:
            case Assign():
                with self._assign_lock:
                    self._assign(message)
            case Adopt():
                self._adopt(message)
            case Confirm(order, slices):
                self._confirm(order, slices)
            case Release(order, slices):
                self._release(order, slices)
            case LetGo(order, directories):
                self._let_go(order, directories)
            case Enlist(order, slices):
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
                self._check_order(order, slices)
                self.backups.dismiss(slices)

    def _learn_of(self, message: Any) -> None:
        """Residents come, go and go on."""
        match message:
            case AddResident(resident):
                for core, _ in self._both:
                    core.add(resident)
                self.checkpoints.make_room(resident.id)
            case DropResident(name, born):
                self._drop(name, born)
            case ForgetWriters(resident, writers):
                for core, checkpoints in self._both:
                    self._forget(core.holding(resident), checkpoints, set(writers))
            case Advance(resident, fetch_progress, final_below):
                self.core.holding(resident).advance(fetch_progress, final_below)
            case _:
                raise BadMessage(f"a container does not answer {type(message).__name__}")

    def _tell_about(self, message: Any) -> Message:
        """Answers what changes nothing."""
        match message:
            case Ping(lease_s, heard):
                return self._pulse(lease_s, heard)
            case ContainerStatus():
                return self._report()
            case AskLag(slices):
                return Lag(*self.backups.core.lag(slices))
            case ListSnapshots(resident):
                return SnapshotList(self._snapshots_of_others(resident))
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
        if isinstance(message, KeepWaiting):
            if not self._means.runs_code:
                raise not_trusted("rows that wait would be kept")
            self.core.holding(message.resident)  # one that was forgotten keeps nothing
            return self._waiting.keep(message, batches)
        if not isinstance(message, Exchange):
            raise BadMessage(f"a container does not exchange rows for {type(message).__name__}")
        self._check_lease()
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
        self._check_lease()
        if isinstance(message, ReadHeld):
            return read_held(self.core.holding(message.resident), message.slice)
        if isinstance(message, ReadWaiting):
            return self._waiting.read(message)
        return self.core.holding(message.resident).read(message)

    def _pulse(self, lease_s: float | None, heard: int) -> Pulse:
        _ = self.core  # one that recovers is not there yet
        now_s = self._runtime.now()
        number = next(self._pulses)
        if lease_s is not None:
            # The first has nothing that it could go on from; of answers that are forgotten by now, none counts.
            since_s = self._answered_s.get(heard, now_s if not self._answered_s else -math.inf)
            self._lease_until_s = max(self._lease_until_s or -math.inf, since_s + lease_s)
            self._answered_s[number] = now_s
            self._answered_s.pop(number - PULSES_MAX, None)
        began_s, took_s = self._writing_since_s, self._write_s
        return Pulse(took_s if began_s is None else max(took_s, now_s - began_s), number)

    def beat(self) -> None:
        """Writes a little to the disk, and notes how long that takes. In a thread of its own."""
        log = self._log
        if log is None:
            return
        self._writing_since_s = started_s = self._runtime.now()
        try:
            log.probe()
        except OSError:
            return  # one that is full is there; one that is not there, or hangs, takes long
        finally:
            self._write_s = self._runtime.now() - started_s
            self._writing_since_s = None

    def _is_leased(self) -> bool:
        """Who was not asked for long may have been stopped, and its slices be served elsewhere, from the same files."""
        return self._lease_until_s is None or self._runtime.now() <= self._lease_until_s

    def _check_lease(self) -> None:
        if not self._is_leased():
            raise Unavailable(
                "the container has not heard of its coordinator for long",
                hint="try again in a moment",
                address="",
            )

    @property
    def core(self) -> Core:
        return _there(self._core)

    @property
    def log(self) -> Log:
        return _there(self._log)

    @property
    def checkpoints(self) -> Checkpoints:
        return _there(self._checkpoints)

    @property
    def backups(self) -> Backups:
        return _there(self._backups)

    @property
    def _both(self) -> list[tuple[Core, Checkpoints]]:
        """What is served, and what is held for others."""
        return [(self.core, self.checkpoints), (self.backups.core, self.backups.checkpoints)]

    # Slices

    def _assign(self, message: Assign) -> None:
        if self._core is not None:
            if self._core.term == message.term:
                return
            raise BadMessage(f"this is container {self._core.container} in term {self._core.term} already")
        if message.threads:
            self._means.run.resize(message.threads)
        if message.landmark:
            check_root(self._root, message.landmark, f"container {message.container}", self._files)
        core = Core(message.container, message.term, message.pond_slices, self._means)
        directory = directory_name(message.term, message.container)
        lock, numbers = self._runtime.lock, count(1)
        log = Log(self._files, self._root, directory, core, lock())
        bounds = self._means.bounds
        checkpoints = Checkpoints(
            self._files, self._root, core, log, lock(), numbers, bounds, may_remove=self._is_leased
        )
        held = BackupCore(message.container, message.term, message.pond_slices, self._means)
        held_log = Log(
            self._files, self._root, backup_directory_name(message.term, message.container), held, lock()
        )
        held_checkpoints = Checkpoints(
            *(self._files, self._root, held, held_log, lock(), numbers, bounds),
            backup=True,
            may_remove=self._is_leased,
        )
        for resident in message.residents:
            core.add(resident)
            held.add(resident)
            checkpoints.make_room(resident.id)
        log.make_room()
        self._backups = Backups(held, held_log, held_checkpoints, self._runtime, self.dial)
        self._log, self._checkpoints, self._core = log, checkpoints, core

    def _adopt(self, message: Adopt) -> None:
        """Rebuilds slices beside those that are served; they are served once what they rest on is written down."""
        core = self.core
        with self.checkpoints.lock:
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
            self._rebuilt.update(rebuilt.figures)

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
            self._rebuilt["slices_promoted"] += len(wanted)

    def _demote(self, order: int, numbers: list[SliceId]) -> None:
        """Slices that are served here are held as a backup from now on."""
        with self.checkpoints.lock, self.backups.checkpoints.lock:
            self._check_order(order, numbers)
            wanted = [number for number in numbers if number in self.core.owned]
            grounds = {number: closed(self.checkpoints.grounds[number], self.log) for number in wanted}
            slices = self.core.release(wanted)
            self.checkpoints.release(set(wanted), gone=False)
            self.backups.take_in(slices, grounds)

    def _snapshots_of_others(self, resident: ResidentId) -> list[str]:
        """Those that incarnations before this one wrote."""
        names = {name for _, checkpoints in self._both for name in checkpoints.files(resident)}
        return sorted(name for name in names if term_of_snapshot(name) != self.core.term)

    def _check_order(self, order: int, slices: Collection[SliceId]) -> None:
        """Whoever sent an older one about a slice has been told that it failed, and has gone on."""
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

    def _let_go(self, order: int, directories: list[str]) -> None:
        """Of what is here, nobody else rests on what is in these directories."""
        with self._order_lock:
            # Since a slice went, somebody may have come to need what it left.
            if order < self._newest_order:
                raise StageLost("this came too late", container=self.core.container)
        for log, checkpoints in (
            (self.log, self.checkpoints),
            (self.backups.log, self.backups.checkpoints),
        ):
            with checkpoints.lock:
                # What changed roles here since rests on it.
                needed = {*self.checkpoints.needs(), *self.backups.checkpoints.needs()}
                if log.directory in directories and log.directory not in needed:
                    checkpoints.let_go()

    def _drop(self, name: str, born: int) -> None:
        # An epoch that runs for long holds up nobody's checkpoints.
        with self._epoch_locks[name]:
            for core, checkpoints in self._both:
                with checkpoints.lock:
                    dropped = core.drop(name, born)
                    if dropped is not None:
                        checkpoints.drop(dropped.resident.id)

    def _forget(self, holding: Holding[Any], checkpoints: Checkpoints, writers: set[str]) -> None:
        # In memory first, and not under the lock: this waits for an epoch that runs.
        holding.forget(sorted(writers))
        with checkpoints.lock:
            checkpoints.forget(holding.resident.id, writers)

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
            *(partial(self._back_up, backup, record, message, holding) for backup in message.backups),
        ]
        try:
            if holding.spec.runs_code or message.backups:
                # At the same time. A record whose epoch then cannot run stays in the log, undecided.
                self._runtime.map(lambda step: step(), steps)
            else:
                for step in steps:
                    step()
        except BaseException:
            for ready in made:
                holding.undo(ready)
            self.core.refused(record, *logged)
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
        core = self._core
        if core is None:
            return True
        core.expire(self._runtime.now())
        if not self._is_leased():
            return True
        idle = self.backups.maintain()
        for each, _ in self._both:
            for holding in list(each.holdings.values()):
                idle &= self._sweep(holding)
        if core.owned and self.checkpoints.is_due():
            self.checkpoints.checkpoint()
        for _, checkpoints in self._both:
            idle &= checkpoints.merge()
        return idle

    def checkpoint(self) -> None:
        for _, checkpoints in self._both:
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
                **self._rebuilt,
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


def _there(part: _T | None) -> _T:
    if part is None:
        raise Unavailable("the container is still recovering", hint="try again in a moment", address="")
    return part
