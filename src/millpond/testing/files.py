"""A file system in memory that, on a crash, loses what it was not told to keep."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NoReturn, TypeAlias

import pyarrow as pa

from millpond.durable.crashpoints import SimulatedCrash
from millpond.durable.files import AnyBuffer
from millpond.private import AnyPath

_dirname = lru_cache(maxsize=4096)(os.path.dirname)
_normalized = lru_cache(maxsize=4096)(os.path.abspath)
Loss: TypeAlias = Literal["nothing", "all", "content", "names", "some"]


@dataclass(eq=False)
class _Inode:
    """A file apart from its names. `synced` is what the disk holds for certain."""

    content: bytes
    synced: bytes


@dataclass(frozen=True)
class _NameChange:
    """One change to the names of a directory, not synced yet: `name` now stands for `inode`, or is gone.

    A rename inside a directory is one change, with `freed` as the old name: it is kept or lost as one.
    """

    directory: str
    name: str
    inode: _Inode | None
    freed: str | None = None

    def apply_to(self, names: dict[str, _Inode]) -> None:
        if self.freed is not None:
            names.pop(self.freed, None)
        if self.inode is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.inode

    def __str__(self) -> str:
        if self.inode is None:
            return f"removal of {self.name}"
        return f"creation of {self.name}" if self.freed is None else f"rename of {self.freed} to {self.name}"


@dataclass(frozen=True)
class _DirectoryRemoval:
    """An empty directory was removed, and its parent is not synced yet.

    If the removal is kept, whatever was in the directory is gone with it; if it is lost, the directory is
    back, with all the files in it whose own removal was not synced.
    """

    directory: str
    name: str

    def apply_to(self, names: dict[str, _Inode]) -> None:
        for name in [name for name in names if os.path.dirname(name) == self.name]:
            del names[name]

    def __str__(self) -> str:
        return f"removal of directory {self.name}"


class LossyFiles:
    """A `Files` that promises exactly what `Files` says and breaks everything beyond it.

    `crash()` gives the file system that the next process finds; this one is dead from then on: each call
    raises `SimulatedCrash`, so that a thread left over from before the crash can't write after it.
    With a seed, crashes lose some of what was not synced, chosen by the seed; without, all of it.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed
        self.crashes = 0
        self.losses: list[str] = []
        """What the crash that this file system came out of has lost, in words."""
        self._names: dict[str, _Inode] = {}
        self._durable_names: dict[str, _Inode] = {}
        self._pending: list[_NameChange | _DirectoryRemoval] = []
        self._directories = {"/", os.path.abspath(os.curdir)}
        self._halted: str | None = None
        self._lock = threading.RLock()

    # Files

    def write(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> None:
        content = b"".join(memoryview(buffer).cast("B") for buffer in buffers)
        with self._lock:
            path = self._path(path)
            self._check_directory(_dirname(path))
            if path in self._directories:
                raise IsADirectoryError(21, "Is a directory", path)
            if path not in self._names:
                self._change(path, _Inode(b"", b""))
            self._names[path].content = content

    def append(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> int:
        with self._lock:
            before = bytes(self.read(path)) if self._path(path) in self._names else b""
            self.write(path, [before, *buffers])
            return len(before)

    def sync(self, path: AnyPath) -> None:
        with self._lock:
            inode = self._inode(self._path(path))
            inode.synced = inode.content

    def rename(self, source: AnyPath, target: AnyPath, *, exclusive: bool = False) -> None:
        with self._lock:
            source, target = self._path(source), self._path(target)
            if exclusive and self.exists(target):
                raise FileExistsError(errno.EEXIST, "File exists", target)
            inode = self._inode(source)
            self._check_directory(_dirname(target))
            if source == target:
                return
            if _dirname(source) == _dirname(target):
                self._change(target, inode, freed=source)
            else:
                self._change(target, inode)
                self._change(source, None)

    def sync_dir(self, path: AnyPath) -> None:
        with self._lock:
            path = self._path(path)
            self._check_directory(path)
            self._settle([change for change in self._pending if change.directory == path])

    def read(self, path: AnyPath) -> pa.Buffer:
        with self._lock:
            return pa.py_buffer(self._inode(self._path(path)).content)

    def read_range(self, path: AnyPath, offset: int, length: int) -> pa.Buffer:
        with self._lock:
            return pa.py_buffer(self._inode(self._path(path)).content[offset : offset + length])

    def read_ranges(self, path: AnyPath, ranges: Sequence[tuple[int, int]]) -> pa.Buffer:
        with self._lock:
            self._inode(self._path(path))
            pieces = [self.read_range(path, offset, length) for offset, length in ranges]
        for (offset, length), piece in zip(ranges, pieces, strict=True):
            if piece.size < length:
                raise EOFError(f"{os.fspath(path)} ends before byte {offset + length}")
        return pa.py_buffer(b"".join(pieces))

    def copy_ranges(self, source: AnyPath, ranges: Sequence[tuple[int, int]], target: AnyPath) -> int:
        with self._lock:
            self._inode(self._path(source))
            begin = self.append(target, [])
            for offset, length in ranges:
                piece = self.read_range(source, offset, length)
                self.append(target, [piece])
                if piece.size < length:
                    raise EOFError(f"{os.fspath(source)} ends before byte {offset + length}")
            return begin

    def list(self, path: AnyPath) -> list[str]:
        with self._lock:
            path = self._path(path)
            if path in self._names:
                raise NotADirectoryError(20, "Not a directory", path)
            everything = [*self._names, *self._directories - {"/"}]
            return sorted(os.path.basename(name) for name in everything if _dirname(name) == path)

    def remove(self, path: AnyPath) -> bool:
        with self._lock:
            path = self._path(path)
            if path in self._directories:
                raise IsADirectoryError(21, "Is a directory", path)
            was_there = path in self._names
            if was_there:
                self._change(path, None)
            return was_there

    def remove_dir(self, path: AnyPath) -> None:
        with self._lock:
            path = self._path(path)
            if self.list(path):
                raise OSError(39, "Directory not empty", path)
            if path in self._directories:
                self._directories.remove(path)
                self._pending.append(_DirectoryRemoval(os.path.dirname(path), path))

    def make_dir(self, path: AnyPath) -> None:
        with self._lock:
            path = self._path(path)
            if path in self._names:
                raise FileExistsError(17, "File exists", path)
            if path not in self._directories:
                self.make_dir(os.path.dirname(path))
                self._directories.add(path)
                # It is new and durably so: what an earlier directory of that name held can't come back in it.
                self._settle(
                    [c for c in self._pending if isinstance(c, _DirectoryRemoval) and c.name == path]
                )

    def exists(self, path: AnyPath) -> bool:
        with self._lock:
            path = self._path(path)
            return path in self._names or path in self._directories

    def is_dir(self, path: AnyPath) -> bool:
        with self._lock:
            return self._path(path) in self._directories

    # Crashes

    def halt(self, point: str = "halt") -> NoReturn:
        """The process dies here: raises `SimulatedCrash`, and so does each later call but `crash`.

        Serves as the action of a crash point: `armed("log.sync.after", action=files.halt)`. No thread of
        the dead process can then undo the moment by writing on.
        """
        with self._lock:
            self._halted = point
        raise SimulatedCrash(point)

    def crash(self, lose: Loss | None = None) -> LossyFiles:
        """The file system that the next process finds. This one is dead.

        `"nothing"` is the death of the process alone: the operating system lives and keeps what it was
        given. The others are the death of the machine. `"all"`: of what was not synced nothing is left.
        `"content"`: every name is kept, but files hold only what was synced. `"names"`: files hold what
        was written, but names are as of the last `sync_dir`. `"some"`: for each file and each change of
        a name the seed decides; a file may be kept, lost, cut, or filled with zeros from some place on,
        and of several changes in a directory a later one may survive an earlier. The default is
        `"some"` with a seed, `"all"` without.
        """
        with self._lock:
            self._halted = self._halted or "crash"
            if lose is None:
                lose = "all" if self.seed is None else "some"
            after = LossyFiles(self.seed)
            after.crashes = self.crashes + 1
            after._directories = set(self._directories)
            # Not one generator for all crashes: what a crash loses must not hang on who asked before.
            chance = random.Random(f"{self.seed}/{after.crashes}")
            names = dict(self._durable_names)
            for change in self._pending:
                if lose in ("nothing", "content") or (lose == "some" and chance.random() < 0.5):
                    change.apply_to(names)
                else:
                    after.losses.append(str(change))
                    if isinstance(change, _DirectoryRemoval):
                        after._directories.add(change.name)
            # Sorted, a directory comes after its parent.
            for directory in sorted(after._directories):
                if os.path.dirname(directory) not in after._directories:
                    after._directories.remove(directory)
            names = {
                path: inode for path, inode in names.items() if os.path.dirname(path) in after._directories
            }
            survivors: dict[_Inode, _Inode] = {}
            for path, inode in sorted(names.items(), key=lambda item: item[0]):
                if inode not in survivors:
                    content = inode.content
                    if content != inode.synced and lose not in ("nothing", "names"):
                        content = inode.synced if lose != "some" else _damaged(inode, chance)
                    if content != inode.content:
                        after.losses.append(
                            f"content of {path}: {len(inode.content)} bytes became {len(content)}"
                        )
                    survivors[inode] = _Inode(content, content)
                after._names[path] = after._durable_names[path] = survivors[inode]
            return after

    def lose(self, path: AnyPath) -> None:
        """The disk has lost a file, or a directory with all that is in it: no crash brings anything of it back."""
        with self._lock:
            path = self._path(path)

            def is_left(name: str) -> bool:
                return name != path and not name.startswith(f"{path}{os.sep}")

            self._names = {name: inode for name, inode in self._names.items() if is_left(name)}
            self._durable_names = {
                name: inode for name, inode in self._durable_names.items() if is_left(name)
            }
            self._pending = [change for change in self._pending if is_left(change.name)]
            self._directories = {name for name in self._directories if is_left(name)}

    def unsynced(self) -> Sequence[str]:
        """What a crash could lose now, in words; empty where everything is durable."""
        with self._lock:
            content = [
                f"content of {path}"
                for path, inode in sorted(self._names.items())
                if inode.content != inode.synced
            ]
            return [str(change) for change in self._pending] + content

    def _path(self, path: AnyPath) -> str:
        if self._halted is not None:
            raise SimulatedCrash(self._halted)
        path = os.fspath(path)
        return _normalized(path) if os.path.isabs(path) else os.path.abspath(path)

    def _inode(self, path: str) -> _Inode:
        if path in self._directories:
            raise IsADirectoryError(21, "Is a directory", path)
        if path not in self._names:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self._names[path]

    def _check_directory(self, path: str) -> None:
        if path not in self._directories:
            raise FileNotFoundError(2, "No such file or directory", path)

    def _settle(self, changes: Sequence[_NameChange | _DirectoryRemoval]) -> None:
        """These changes are durable. With a directory go the changes of names in it."""
        for change in changes:
            change.apply_to(self._durable_names)
        gone = {change.name for change in changes if isinstance(change, _DirectoryRemoval)}
        settled = set(map(id, changes))
        self._pending = [
            change for change in self._pending if id(change) not in settled and change.directory not in gone
        ]

    def _change(self, path: str, inode: _Inode | None, freed: str | None = None) -> None:
        change = _NameChange(_dirname(path), path, inode, freed)
        change.apply_to(self._names)
        self._pending.append(change)


def _damaged(inode: _Inode, chance: random.Random) -> bytes:
    """What the disk may hold of content that was not synced: old, new, cut, or with zeros from some place."""
    cut = chance.randrange(len(inode.content) + 1)
    torn = inode.content[:cut]
    return chance.choice([inode.synced, inode.content, torn, torn + bytes(len(inode.content) - cut)])
