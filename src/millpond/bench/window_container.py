"""Container processes whose windows have a memory budget, stores and settings of their own: for benchmarks alone.

`uncached` keeps the files of open windows out of the page cache, whichever store writes them: they are synced and dropped from
it all the time. What a store holds beyond its budget is then read from the disk, and not from memory that nobody counts.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from millpond.container import process
from millpond.coordinator.hosting import Embedded
from millpond.durable.files import OsFiles
from millpond.stores.windows.rocks_spilling import RocksSpilling
from millpond.stores.windows.rowlog import RowLog
from millpond.stores.windows.spilling import Spilling
from millpond.stores.windows.unaligned import READ_BATCH_RATIO, SPACE_AMPLIFICATION_MAX, UnalignedRows

UNCACHED_EVERY_S = 0.1
TOLD_EVERY_S = 0.1


class Means(NamedTuple):
    """What windows are kept in."""

    store: Literal["millpond", "rocksdb"] = "millpond"
    budget: int = 256 << 20
    """Bytes of memory for the rows and cells of open windows; of RocksDB, for its cache and its write buffers."""
    uncached: bool = False
    compaction: Literal["level", "universal"] = "level"
    ratio: float = READ_BATCH_RATIO
    msa: float = SPACE_AMPLIFICATION_MAX
    told: str = ""
    """A file to which a container with RocksDB writes how that is set up, and what calls for each key took so far."""

    def made(self, directory: str) -> Spilling:
        if self.store == "millpond":
            return Tuned(OsFiles(), directory, self.budget, self.ratio, self.msa)
        stores = RocksSpilling(OsFiles(), directory, self.budget, self.compaction)
        if self.told:
            _tell(stores, Path(self.told))
            threading.Thread(target=_keep_telling, args=[stores, Path(self.told)], daemon=True).start()
        return stores


class Tuned(Spilling):
    """With another read batch ratio, and another space amplification."""

    def __init__(self, files: OsFiles, directory: str, budget: int, ratio: float, msa: float) -> None:
        super().__init__(files, directory, budget)
        self._ratio, self._msa = ratio, msa

    def new_rows(self, schema: pa.Schema, pattern: str) -> RowLog:
        log = super().new_rows(schema, pattern)
        if isinstance(log, UnalignedRows):
            log.ratio, log.msa = self._ratio, self._msa
        return log


def main(means: Means, root: str, sockets: str, *rest: Any) -> None:
    usual = process._spilling  # noqa: SLF001 - there is no option for it: nobody else needs one

    def spilling(root: str, container: int, budget: int, memory: int) -> Spilling:
        usual(root, container, budget, memory)  # what processes before this one left goes
        directory = os.path.join(root, process.SCRATCH, f"c{container:04d}-{os.getpid()}")
        if means.uncached:
            threading.Thread(target=_keep_uncached, args=[directory], daemon=True).start()
        return means.made(directory)

    process._spilling = spilling  # noqa: SLF001
    process.main(root, sockets, *rest)


@contextmanager
def containers(means: Means) -> Iterator[None]:
    """Containers that are started meanwhile have these means."""
    usual = Embedded._command  # noqa: SLF001 - there is no option for it

    def command(self: Embedded, container: int) -> list[str]:
        words = usual(self, container)
        at = words.index("millpond.container.process")
        return [*words[:at], "millpond.bench.window_container", json.dumps(means), *words[at + 1 :]]

    Embedded._command = command  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        Embedded._command = usual  # type: ignore[method-assign]  # noqa: SLF001


def _keep_uncached(directory: str) -> None:
    while True:
        time.sleep(UNCACHED_EVERY_S)
        drop_cached(directory)


def drop_cached(directory: str) -> None:
    """Syncs all files there, and drops them from the page cache."""
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):  # it has gone meanwhile
                file = os.open(os.path.join(folder, name), os.O_RDONLY)
                try:
                    os.fdatasync(file)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(file)


def _tell(stores: RocksSpilling, file: Path) -> None:
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({"options": stores.options(), "loops": stores.loops()}))
    beside.replace(file)


def _keep_telling(stores: RocksSpilling, file: Path) -> None:
    told = stores.loops()
    while True:
        time.sleep(TOLD_EVERY_S)
        if told != stores.loops():
            told = stores.loops()
            with suppress(OSError):  # the benchmark is over
                _tell(stores, file)


def told_by(file: str, settled: bool = True) -> dict[str, dict[str, Any]]:
    """What a container last wrote there: `options` and `loops`; once it has written all, if `settled`."""
    if settled:
        time.sleep(3 * TOLD_EVERY_S)
    told: dict[str, dict[str, Any]] = json.loads(Path(file).read_text())
    return told


if __name__ == "__main__":
    _means, _root, _sockets, _container, _threads, _seconds, _memory, _trust, _line = sys.argv[1:]
    main(
        Means(*json.loads(_means)),
        *(_root, _sockets, int(_container), int(_threads), float(_seconds), int(_memory), _trust),
        socket.socket(fileno=int(_line)),
    )
