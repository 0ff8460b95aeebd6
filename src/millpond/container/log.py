"""The log of one incarnation of a container: records are numbered and appended one at a time, and let go from the front."""

from __future__ import annotations

import time
from typing import Any

from millpond.container.core import Core
from millpond.container.holdings.base import Holding, Record
from millpond.container.layout import LogSpan, record_path, write_record
from millpond.durable.files import Files
from millpond.runtime import Lock


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

    @property
    def records(self) -> int:
        """How many there are on disk."""
        return self.core.seq - self._truncated

    def append(self, record: Record, holding: Holding[Any]) -> int:
        """Makes the record durable; its number. One that may or may not be there gives its number to the next."""
        names = record.parts[0].batch.schema.names if record.parts else ()
        schema = holding.schema_of(names, record.work)
        with self._lock:
            started = time.perf_counter()
            seq = self.core.number(record.resident)
            write_record(self._files, self._root, self.directory, seq, record, holding.resident.id, schema)
            self.core.seq = seq
            self.bytes += sum(part.batch.nbytes for part in record.parts)
            self.seconds += time.perf_counter() - started
        return seq

    def span(self) -> LogSpan:
        """All that is appended from now on."""
        with self._lock:
            return LogSpan(self.directory, self.core.seq)

    def take_bytes(self) -> int:
        taken, self.bytes = self.bytes, 0
        return taken

    def truncate(self, covered: int) -> None:
        """Removes records up to that number."""
        for seq in range(self._truncated + 1, covered + 1):
            self._files.remove(record_path(self._root, self.directory, seq))
        self._truncated = max(self._truncated, covered)
