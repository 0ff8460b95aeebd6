"""The only way by which log, snapshots, manifests, journal, marks and waiting rows touch a disk.

`Files` is what they need of a file system, and no more, so that a test can put one in its place that loses
whatever was not synced (`millpond.testing.LossyFiles`). `OsFiles` is the real one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeAlias

import pyarrow as pa

from millpond import private

AnyPath: TypeAlias = str | os.PathLike[str]
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

    def sync(self, path: AnyPath) -> None:
        """The content of the file is durable on return."""

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        """Within one file system, atomic: replaces `target` where it exists. Not durable yet."""

    def sync_dir(self, path: AnyPath) -> None:
        """The names in the directory, as they are now, are durable on return."""

    def read(self, path: AnyPath) -> pa.Buffer:
        """The whole content, in memory: what happens to the file later does not change the buffer."""

    def list(self, path: AnyPath) -> list[str]:
        """Sorted names in the directory; none where there is no directory."""

    def remove(self, path: AnyPath) -> None:
        """Not durable yet: the file may come back after a crash. A file that is not there is no error."""

    def remove_dir(self, path: AnyPath) -> None:
        """Removes an empty directory. Not durable yet. A directory that is not there is no error."""

    def make_dir(self, path: AnyPath) -> None:
        """Creates the directory and its parents where missing; they are durable on return."""

    def exists(self, path: AnyPath) -> bool:
        """Whether there is a file or a directory of that name."""

    def is_dir(self, path: AnyPath) -> bool:
        """Whether there is a directory of that name; a link to one is none."""


class OsFiles:
    """The file system of the machine. What it makes is this user's alone, whatever the umask; it follows no links."""

    def write(self, path: AnyPath, buffers: Sequence[AnyBuffer]) -> None:
        with open(private.create(path), "wb", buffering=0) as file:
            for buffer in buffers:
                rest = memoryview(buffer).cast("B")
                while len(rest):
                    rest = rest[file.write(rest) :]

    def sync(self, path: AnyPath) -> None:
        private.sync(path, os.O_NOFOLLOW)

    def rename(self, source: AnyPath, target: AnyPath) -> None:
        os.replace(source, target)

    def sync_dir(self, path: AnyPath) -> None:
        private.sync(path, os.O_NOFOLLOW | os.O_DIRECTORY)

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

    def list(self, path: AnyPath) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []

    def remove(self, path: AnyPath) -> None:
        with suppress(FileNotFoundError):
            os.remove(path)

    def remove_dir(self, path: AnyPath) -> None:
        with suppress(FileNotFoundError):
            os.rmdir(path)

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
