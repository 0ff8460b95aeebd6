"""Cells that memory has no room for, in scratch files: runs, each in parts that are read one by one.

A run is written once, and goes as a whole. Nothing here is durable: cells come back by a replay of the log of epochs.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.durable.crashpoints import around
from millpond.durable.files import Files, remove_tree
from millpond.errors import CorruptFile
from millpond.private import AnyPath
from millpond.stores.windows.pinned import Pin, PinnedFiles
from millpond.stores.windows.rowlog import no_figures

Longs = NDArray[np.int64]


class Run(NamedTuple):
    """A file of rows in parts: part i is bytes `offsets[i]..offsets[i + 1]`."""

    path: str
    rows: int
    offsets: Longs
    checksums: Longs

    @property
    def nbytes(self) -> int:
        """On disk."""
        return int(self.offsets[-1])


class RunWriter:
    """A run that is being written. After an error of the disk it has the parts that were added before."""

    def __init__(self, runs: CellRuns, files: Files, path: str) -> None:
        self.path = path
        self._runs = runs
        self._files = files
        self._offsets, self._checksums, self._rows = [0], list[int](), 0

    def add(self, part: pa.RecordBatch) -> None:
        begin = time.thread_time()
        message = part.serialize()
        with around("scratch.flush"):
            self._files.append(self.path, [message])
        self._offsets.append(self._offsets[-1] + message.size)
        self._checksums.append(zlib.crc32(message))
        self._rows += part.num_rows
        self._runs.figures["write_s"] += time.thread_time() - begin

    def done(self) -> Run:
        size = self._offsets[-1]
        self._runs.disk_bytes += size
        self._runs.figures["written_bytes"] += size
        return Run(self.path, self._rows, np.array(self._offsets), np.array(self._checksums, np.int64))


class CellRuns:
    """The runs of one slice of a window. One caller at a time. After an error of the disk all runs are what they were."""

    def __init__(self, files: Files, directory: AnyPath) -> None:
        self._files = files
        self._directory = os.fspath(directory)
        self._serial = 0
        self._has_directory = False
        self.disk_bytes = 0
        self.figures = no_figures()
        self._pinned = PinnedFiles(files, directory)
        remove_tree(files, directory)

    def write(self, parts: Iterable[pa.RecordBatch]) -> Run:
        """A run of these parts, which are made one by one. One may be empty; all have the same schema."""
        writing = self.begin()
        try:
            for part in parts:
                writing.add(part)
        except BaseException:
            self._files.remove(writing.path)
            raise
        return writing.done()

    def begin(self) -> RunWriter:
        """A run whose parts come one by one. Of one that is never done, the file goes with the others."""
        if not self._has_directory:
            self._files.make_dir(self._directory)
            self._has_directory = True
        self._serial += 1
        return RunWriter(self, self._files, os.path.join(self._directory, f"{self._serial}.run"))

    def read(self, run: Run, part: int, schema: pa.Schema) -> pa.RecordBatch:
        begin = time.thread_time()
        offset = int(run.offsets[part])
        length = int(run.offsets[part + 1]) - offset
        try:
            with around("scratch.read"):
                message = self._files.read_range(run.path, offset, length)
        except FileNotFoundError:
            message = pa.py_buffer(b"")
        if message.size < length or zlib.crc32(message) != run.checksums[part]:
            raise CorruptFile(
                f"{run.path}: checksum mismatch in the {length} bytes from {offset} on",
                hint="what the disk holds of open windows is damaged; restart the container: it rebuilds them from its log",
                path=run.path,
            )
        batch = pa.ipc.read_record_batch(message, schema)
        self.figures["read_bytes"] += length
        self.figures["read_s"] += time.thread_time() - begin
        return batch

    def drop(self, runs: Iterable[Run]) -> None:
        for run in runs:
            with around("scratch.fire"):
                self._pinned.remove(run.path)
            self.disk_bytes -= run.nbytes

    def close(self) -> None:
        """Removes all files. Nothing can be done with it after."""
        self.disk_bytes = 0
        self._pinned.close()

    def pin(self, runs: Iterable[Run]) -> Pin:
        """These can be read as long as the pin is there, by whoever has it; also once they are dropped."""
        return self._pinned.pin(run.path for run in runs)
