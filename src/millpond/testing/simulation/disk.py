"""The disk of a simulated machine: it takes time, fills up, and after a crash holds what was synced."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from millpond.durable.files import AnyBuffer
from millpond.private import AnyPath
from millpond.stores.waiting import WAITING
from millpond.testing.files import Loss, LossyFiles
from millpond.testing.simulation.faults import Faults
from millpond.testing.simulation.scheduler import STEP_S, Process, Scheduler


@dataclass(eq=False)
class _Strike:
    process: Process | None
    changes: int
    event: Callable[[], None]


class Disk:
    """Outlives the processes that use it."""

    def __init__(self, scheduler: Scheduler, faults: Faults, seed: int) -> None:
        self.content = LossyFiles(seed)
        self.scheduler = scheduler
        self.faults = faults
        self._full_until_s = 0.0
        self._strikes: list[_Strike] = []
        self.flipped: set[str] = set()
        """Files that were read with a bit flipped."""

    def files(self, process: Process) -> SimFiles:
        """The disk, as a process sees it."""
        return SimFiles(self, process)

    def fill(self, seconds: float) -> None:
        """There is no room for so long."""
        self._full_until_s = self.scheduler.now + seconds

    def make_room(self) -> None:
        self._full_until_s = 0.0

    @property
    def full(self) -> bool:
        return self.scheduler.now < self._full_until_s

    def strike(self, process: Process | None, changes: int, event: Callable[[], None]) -> None:
        """The event happens just before so many-th next change by that process, or by any."""
        self._strikes = [one for one in self._strikes if one.process is None or one.process.alive]
        self._strikes.append(_Strike(process, changes, event))

    def count(self, process: Process) -> None:
        """A process is about to change the disk."""
        for strike in [one for one in self._strikes if one.process in (None, process)]:
            strike.changes -= 1
            if strike.changes == 0:
                self._strikes.remove(strike)
                self.scheduler.at(0.0, strike.event)
                self.scheduler.sleep(STEP_S)  # the event comes first, and may be the end of this task

    def crash(self, lose: Loss | None = None) -> None:
        """The machine went down: what was not synced is lost. Whoever calls this has killed its processes."""
        self.content = self.content.crash(lose)
        for loss in self.content.losses:
            self.faults.fire("unsynced lost", loss)


class SimFiles:
    """A `Files` on a simulated disk. Others may run before every operation, and in the middle of a write."""

    def __init__(self, disk: Disk, process: Process) -> None:
        self._disk = disk
        self._process = process

    def write(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> None:
        disk = self._change("write", path)
        if disk.full or disk.scheduler.random.random() < disk.scheduler.switching:
            content = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
            disk.content.write(path, [content[: len(content) // 2]])
            self._pass_time()
        if disk.full:
            disk.faults.fire("disk full", str(path))
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        disk.content.write(path, buffers)

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        disk = self._change("append", path)
        content = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        if disk.full:
            disk.content.append(path, [content[: len(content) // 2]])
            disk.faults.fire("disk full", str(path))
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return disk.content.append(path, [content])

    def sync(self, path: AnyPath) -> None:
        disk = self._change("sync", path)
        self._be_slow()
        disk.content.sync(path)

    def rename(self, source: AnyPath, target: AnyPath, *, exclusive: bool = False) -> None:
        self._change("rename", target).content.rename(source, target, exclusive=exclusive)

    def sync_dir(self, path: AnyPath) -> None:
        disk = self._change("sync_dir", path)
        self._be_slow()
        disk.content.sync_dir(path)

    def read(self, path: AnyPath) -> pa.Buffer:
        content = self._look().read(path)
        faults = self._disk.faults
        if f"/{WAITING}/" in os.fspath(path) and faults.strikes(faults.weather.flipped):
            self._disk.flipped.add(os.fspath(path))
            faults.fire("bit flipped", str(path))
            bit = int(self._disk.scheduler.random.random() * content.size * 8)
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            return pa.py_buffer(bytes(damaged))
        return content

    def read_range(self, path: AnyPath, offset: int, length: int) -> pa.Buffer:
        return self._look().read_range(path, offset, length)

    def read_ranges(self, path: AnyPath, ranges: Sequence[tuple[int, int]]) -> pa.Buffer:
        return self._look().read_ranges(path, ranges)

    def copy_ranges(self, source: AnyPath, ranges: Sequence[tuple[int, int]], target: AnyPath) -> int:
        return self.append(target, [self._look().read_ranges(source, ranges)])

    def list(self, path: AnyPath) -> list[str]:
        return self._look().list(path)

    def remove(self, path: AnyPath) -> bool:
        return self._change("remove", path).content.remove(path)

    def remove_dir(self, path: AnyPath) -> None:
        self._change("remove_dir", path).content.remove_dir(path)

    def make_dir(self, path: AnyPath) -> None:
        self._change("make_dir", path).content.make_dir(path)

    def exists(self, path: AnyPath) -> bool:
        return self._look().exists(path)

    def is_dir(self, path: AnyPath) -> bool:
        return self._look().is_dir(path)

    def _look(self) -> LossyFiles:
        self._disk.scheduler.pause()
        return self._disk.content

    def _change(self, what: str, path: AnyPath) -> Disk:
        """The disk, at the moment of the change."""
        self._pass_time()
        self._disk.count(self._process)
        self._disk.scheduler.note(f"{what} {path}")
        return self._disk

    def _pass_time(self) -> None:
        scheduler, faults = self._disk.scheduler, self._disk.faults
        task = scheduler.task()
        assert task.process is self._process, f"{task} uses the files of {self._process.name}"
        if scheduler.random.random() < scheduler.switching:
            scheduler.sleep(faults.duration(faults.weather.disk_s))

    def _be_slow(self) -> None:
        faults = self._disk.faults
        if faults.strikes(faults.weather.slow):
            seconds = faults.duration(faults.weather.slow_s)
            faults.fire("slow sync", f"{seconds:.3f} s")
            self._disk.scheduler.sleep(seconds)


class ScratchFiles(LossyFiles):
    """Where a container's windows go that memory has no room for: its own, and gone with it. As full as the disk is."""

    def __init__(self, disk: Disk) -> None:
        super().__init__()
        self._disk = disk

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        if self._disk.full:
            self._disk.faults.fire("disk full", str(path))
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        if not self._disk.faults.fired["rows spilled"]:
            self._disk.faults.fire("rows spilled", str(path))
        return super().append(path, buffers)
