"""The log of one incarnation of a container: records are numbered and appended one at a time, and let go from the front."""

from __future__ import annotations

import os
import time
from typing import Any

from millpond.container.core import Core
from millpond.container.holdings.base import Holding, Record
from millpond.container.layout import CONTAINERS, LogSpan, record_path, write_record
from millpond.durable.files import Files
from millpond.runtime import Lock
from millpond.wire.base import SliceId


class Log:
    """Records of `core`'s epochs in one directory. `bytes` are those since they were last taken."""

    def __init__(self, files: Files, root: str, directory: str, core: Core, lock: Lock) -> None:
        self.directory = directory
        self.core = core
        self.bytes = 0
        self.seconds = 0.0
        self._files = files
        self._root = root
        self._lock = lock
        self._truncated = 0
        self._sizes: dict[int, int] = {}

    def bytes_after(self, seq: int) -> int:
        """Of all records after that one."""
        return sum(size for number, size in self._sizes.items() if number > seq)

    @property
    def records(self) -> int:
        """How many there are on disk."""
        return self.core.seq - self._truncated

    def make_room(self) -> None:
        """There are slices whose records may come."""
        self._files.make_dir(os.path.join(self._root, CONTAINERS, self.directory))

    def probe(self) -> None:
        """Writes and syncs a little beside the log: that takes as long as the disk takes."""
        path = os.path.join(self._root, CONTAINERS, self.directory, "pulse")
        self._files.write(path, [b"pulse"])
        self._files.sync(path)

    def append(self, record: Record, holding: Holding[Any], slices: list[SliceId] | None = None) -> int:
        """Makes the record durable; its number. One that may or may not be there gives its number to the next.

        `slices` are those that it is about, if not all.
        """
        names = record.parts[0].batch.schema.names if record.parts else ()
        schema = holding.schema_of(names, record.work)
        with self._lock:
            started = time.perf_counter()
            seq = self.core.number(record.resident)
            resident_id = holding.resident.id
            try:
                write_record(
                    self._files, self._root, self.directory, seq, record, resident_id, schema, slices
                )
            except BaseException:
                # Here, not by the caller: the number is the next one's.
                self.core.not_written(seq)
                raise
            self.core.seq = seq
            self._sizes[seq] = sum(part.batch.nbytes for part in record.parts)
            self.bytes += self._sizes[seq]
            self.seconds += time.perf_counter() - started
        return seq

    def span(self) -> LogSpan:
        """All that is appended from now on."""
        with self._lock:
            return LogSpan(self.directory, self.core.seq)

    def closed(self, span: LogSpan) -> LogSpan:
        """A span of this log that was open, as it ends now: what is undecided in it will never be decided for its slice."""
        with self._lock:
            # Not what is decided and waits for other slices: this one may rest on it.
            undecided = self.core.undecided()
            skipped = sorted(
                seq for seq in {*self.core.void, *undecided} if span.after < seq <= self.core.seq
            )
            return LogSpan(self.directory, span.after, max(span.after, self.core.seq), skipped)

    def take_bytes(self) -> int:
        taken, self.bytes = self.bytes, 0
        return taken

    def truncate(self, covered: int) -> None:
        """Removes records up to that number."""
        for seq in range(self._truncated + 1, covered + 1):
            self._files.remove(record_path(self._root, self.directory, seq))
            self._sizes.pop(seq, None)
        self._truncated = max(self._truncated, covered)
        self.core.void = {seq for seq in self.core.void if seq > self._truncated}
