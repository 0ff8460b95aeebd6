"""The only way by which log, snapshots, manifests, journal, marks, waiting and spilled rows touch a disk.

`Files` is what they need of a file system, and no more, so that a test can put one in its place that loses
whatever was not synced (`millpond.testing.LossyFiles`). `OsFiles` is the real one.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

import pyarrow as pa

from millpond import private
from millpond.private import AnyPath

AnyBuffer: TypeAlias = bytes | memoryview | pa.Buffer


class Files(Protocol):
    """What survives the end of the process or the machine is what was synced, and no promise goes further.

    The content of a file is durable after `sync` of that file. That a name exists, is gone, or stands for
    another file is durable after `sync_dir` of the directory that holds the name. A path that is not there
    is a `FileNotFoundError`, except where a method says otherwise. Safe to call from several threads, as
    long as no two write the same path.
    """

    def write(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> None:
        """Makes the file hold these buffers, one after another, in place of what it held. Not durable yet."""

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        """Adds these buffers to the end of the file, which is made where there is none: where they begin.

        Not durable yet. Where an error comes out, some of them may be there, and the next append goes behind them.
        """

    def sync(self, path: AnyPath) -> None:
        """The content of the file is durable on return."""

    def rename(self, source: AnyPath, target: AnyPath, *, exclusive: bool = False) -> None:
        """Within one file system, atomic: replaces `target` where it exists; `exclusive`, that is a FileExistsError.

        Not durable yet.
        """

    def sync_dir(self, path: AnyPath) -> None:
        """The names in the directory, as they are now, are durable on return."""

    def read(self, path: AnyPath) -> pa.Buffer:
        """The whole content, in memory: what happens to the file later does not change the buffer."""

    def read_range(self, path: AnyPath, offset: int, length: int) -> pa.Buffer:
        """So many bytes of the content, in memory; fewer where the file ends before."""

    def read_ranges(self, path: AnyPath, ranges: Sequence[tuple[int, int]]) -> pa.Buffer:
        """The same of several ranges `(offset, length)`, one after another; EOFError where the file ends before."""

    def copy_ranges(self, source: AnyPath, ranges: Sequence[tuple[int, int]], target: AnyPath) -> int:
        """Appends ranges `(offset, length)` of one file to another, as `append` does: where they begin there.

        EOFError where `source` ends before.
        """

    def list(self, path: AnyPath) -> list[str]:
        """Sorted names in the directory; none where there is no directory."""

    def remove(self, path: AnyPath) -> bool:
        """Whether it was there. Not durable yet: the file may come back after a crash."""

    def remove_dir(self, path: AnyPath) -> None:
        """Removes an empty directory. Not durable yet. A directory that is not there is no error."""

    def make_dir(self, path: AnyPath) -> None:
        """Creates the directory and its parents where missing; they are durable on return."""

    def exists(self, path: AnyPath) -> bool:
        """Whether there is a file or a directory of that name."""

    def is_dir(self, path: AnyPath) -> bool:
        """Whether there is a directory of that name; a link to one is none."""


HANDLES_RESERVED = 16
# What is written past the system's cache, in pieces of this size: it is synced at once, and not read again soon.
DIRECT_BYTES_MIN = 4 << 20
_PIECE_BYTES = 4 << 20
_BLOCK_BYTES = 4096
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_copy_file_range: Callable[[int, int, int, int], int] | None = getattr(os, "copy_file_range", None)
# How a system says that it cannot do so between these files.
_NO_COPY = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF)
_T = TypeVar("_T")
_P = ParamSpec("_P")


class _Reserve:
    """Handles kept back: where the process has no other left, what must be written or read still can be."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: list[int] = []

    def fill(self) -> None:
        with self._lock, suppress(OSError):
            while len(self._handles) < HANDLES_RESERVED:
                self._handles.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def free_one(self) -> bool:
        with self._lock:
            if not self._handles:
                return False
            os.close(self._handles.pop())
            return True


_reserve = _Reserve()


def _has_handles(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """`work`, which opens and closes files, with handles from the reserve if need be. It may begin anew."""

    @functools.wraps(work)
    def reserved(*args: _P.args, **named: _P.kwargs) -> _T:
        took = False
        try:
            while True:
                try:
                    return work(*args, **named)
                except OSError as error:
                    # Another thread may be faster in taking what was freed: then one more is.
                    if error.errno != errno.EMFILE or not _reserve.free_one():
                        raise
                    took = True
        finally:
            if took:
                _reserve.fill()

    return reserved


def _write_all(file: FileIO, rest: memoryview) -> None:
    while len(rest):
        rest = rest[file.write(rest) :]


def _read_into(file: FileIO, room: memoryview, offset: int) -> int:
    """Fills `room` from that place on, as far as the file goes; how many bytes it were."""
    count = 0
    while count < len(room) and (size := os.preadv(file.fileno(), [room[count:]], offset + count)):
        count += size
    return count


def _copy(source: FileIO, offset: int, length: int, target: FileIO) -> int:
    """Adds so many bytes to the end of `target`, as far as `source` goes; how many it were."""
    count = 0
    if _copy_file_range is not None:
        try:
            while count < length and (
                size := _copy_file_range(source.fileno(), target.fileno(), length - count, offset + count)
            ):
                count += size
            return count
        except OSError as error:
            if error.errno not in _NO_COPY:
                raise
    piece = memoryview(bytearray(min(length - count, _PIECE_BYTES)))
    while count < length and (size := _read_into(source, piece[: length - count], offset + count)):
        _write_all(target, piece[:size])
        count += size
    return count


def _ends_before(path: AnyPath, end: int) -> EOFError:
    return EOFError(f"{os.fspath(path)} ends before byte {end}")


class _Direct:
    """Writes past the system's cache. To put megabytes there first costs more than to bring them to the disk: each page
    is asked for anew. One at a time, from memory that is kept.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._piece: mmap.mmap | None = None  # as aligned as a disk asks for

    def write(self, file: FileIO, views: Sequence[memoryview]) -> bool:
        """False where nothing was written: another is at it, or the file system has no such way."""
        if not _O_DIRECT or not self._lock.acquire(blocking=False):
            return False
        try:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            try:
                fcntl.fcntl(file, fcntl.F_SETFL, flags | _O_DIRECT)
                self._write(file, views)
            except OSError as error:
                if error.errno != errno.EINVAL or file.tell():
                    raise
                fcntl.fcntl(file, fcntl.F_SETFL, flags)
                return False
            return True
        finally:
            self._lock.release()

    def _write(self, file: FileIO, views: Sequence[memoryview]) -> None:
        if self._piece is None:
            self._piece = mmap.mmap(-1, _PIECE_BYTES)
        piece = memoryview(self._piece)
        used = 0
        for view in views:
            rest = view
            while len(rest):
                size = min(len(rest), len(piece) - used)
                piece[used : used + size] = rest[:size]
                rest, used = rest[size:], used + size
                if used == len(piece):
                    _write_all(file, piece)
                    used = 0
        whole = -(-used // _BLOCK_BYTES) * _BLOCK_BYTES
        _write_all(file, piece[:whole])
        file.truncate(sum(map(len, views)))


_direct = _Direct()


class OsFiles:
    """The file system of the machine. What it makes is this user's alone, whatever the umask; it follows no links."""

    def __init__(self) -> None:
        _reserve.fill()

    @_has_handles
    def write(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        with open(private.create(path), "wb", buffering=0) as file:
            if sum(map(len, views)) < DIRECT_BYTES_MIN or not _direct.write(file, views):
                for view in views:
                    _write_all(file, view)

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        with self._open_to_append(path) as file:
            begin = file.seek(0, os.SEEK_END)
            for buffer in buffers:
                _write_all(file, memoryview(buffer).cast("B"))
            return begin

    @_has_handles
    def sync(self, path: AnyPath) -> None:
        private.sync(path, os.O_NOFOLLOW)

    def rename(self, source: AnyPath, target: AnyPath, *, exclusive: bool = False) -> None:
        if exclusive:
            os.link(source, target)
            os.unlink(source)
        else:
            os.replace(source, target)

    @_has_handles
    def sync_dir(self, path: AnyPath) -> None:
        private.sync(path, os.O_NOFOLLOW | os.O_DIRECTORY)

    @_has_handles
    def read(self, path: AnyPath) -> pa.Buffer:
        # Not a memory map: what was checked must be what is used, and a map of a file that
        # someone shortens ends the process.
        handle = private.open_to_read(path)
        try:
            content = pa.allocate_buffer(os.fstat(handle).st_size)
            rest = memoryview(content).cast("B")
            while len(rest) and (count := os.readv(handle, [rest])):
                rest = rest[count:]
            return content.slice(0, content.size - len(rest))
        finally:
            os.close(handle)

    def read_range(self, path: AnyPath, offset: int, length: int) -> pa.Buffer:
        with self._open_to_read(path) as file:
            content = pa.allocate_buffer(length)
            return content.slice(0, _read_into(file, memoryview(content).cast("B"), offset))

    def read_ranges(self, path: AnyPath, ranges: Sequence[tuple[int, int]]) -> pa.Buffer:
        with self._open_to_read(path) as file:
            content = pa.allocate_buffer(sum(length for _, length in ranges))
            rest = memoryview(content).cast("B")
            for offset, length in ranges:
                if _read_into(file, rest[:length], offset) < length:
                    raise _ends_before(path, offset + length)
                rest = rest[length:]
            return content

    def copy_ranges(self, source: AnyPath, ranges: Sequence[tuple[int, int]], target: AnyPath) -> int:
        with self._open_to_read(source) as origin, self._open_to_append(target) as file:
            begin = file.seek(0, os.SEEK_END)
            for offset, length in ranges:
                if _copy(origin, offset, length, file) < length:
                    raise _ends_before(source, offset + length)
            return begin

    # What is appended must not be there twice: these take a handle from the reserve before anything is done.

    @_has_handles
    def _open_to_read(self, path: AnyPath) -> FileIO:
        return FileIO(private.open_to_read(path), "r")

    @_has_handles
    def _open_to_append(self, path: AnyPath) -> FileIO:
        return FileIO(private.open_to_append(path), "r+")

    @_has_handles
    def list(self, path: AnyPath) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def remove(self, path: AnyPath) -> bool:
        try:
            os.remove(path)
        except FileNotFoundError:
            return False
        return True

    def remove_dir(self, path: AnyPath) -> None:
        with suppress(FileNotFoundError):
            os.rmdir(path)

    @_has_handles
    def make_dir(self, path: AnyPath) -> None:
        path = os.path.abspath(path)
        if os.path.isdir(path):
            return
        self.make_dir(os.path.dirname(path))
        private.make_dir(path)

    def exists(self, path: AnyPath) -> bool:
        return os.path.exists(path)

    def is_dir(self, path: AnyPath) -> bool:
        return os.path.isdir(path) and not os.path.islink(path)


def remove_tree(files: Files, path: AnyPath) -> None:
    """Removes a directory and all that is in it; what is not there is no error. Not durable yet."""
    for name in files.list(path):
        inside = os.path.join(path, name)
        if files.is_dir(inside):
            remove_tree(files, inside)
        else:
            files.remove(inside)
    files.remove_dir(path)
