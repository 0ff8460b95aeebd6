"""What the coordinator remembers, as it is in the journal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from millpond.coordinator.journal import JOURNAL, Journal
from millpond.coordinator.records import PondRecord
from millpond.durable.files import Files
from millpond.errors import MillpondError, WriteFailed
from millpond.runtime import Runtime


class Memory:
    """Only what is durable is remembered. `lock` guards the record, and all that must go with it.

    While it is `in_doubt`, the journal may hold an entry that is not what is remembered.
    """

    def __init__(self, files: Files, root: str, runtime: Runtime) -> None:
        self.lock = runtime.lock()
        self.record = PondRecord(owners=())
        self.in_doubt = False
        self.journal = Journal(files, root)
        self._path = os.path.join(root, JOURNAL)
        self._runtime = runtime
        self._writing_since_s: float | None = None
        self._written_s = -math.inf
        self._write_s = 0.0

    def change(self, decide: Callable[[PondRecord], PondRecord]) -> None:
        """Carries out a decision. One that changes nothing is not written."""
        with self.lock:
            after = decide(self.record)
            if after is not self.record:
                self.write(after)

    def write(self, record: PondRecord) -> None:
        """Journal first. The caller holds the lock."""
        self.in_doubt = True
        self._writing_since_s = began_s = self._runtime.now()
        try:
            self.journal.write(record)
        finally:
            self._written_s = self._runtime.now()
            self._write_s, self._writing_since_s = self._written_s - began_s, None
        self.in_doubt = False
        self.record = record

    @property
    def write_s(self) -> float:
        """How long the last entry took, or the one that is being written has taken so far. Nothing is waited for."""
        since_s, took_s = self._writing_since_s, self._write_s
        return took_s if since_s is None else max(took_s, self._runtime.now() - since_s)

    def try_disk(self, seconds: float) -> None:
        """Writes the record as it is if no entry was written for so long: `write_s` tells how the disk is now."""
        if self._writing_since_s is None and self._runtime.now() > self._written_s + seconds:
            with self.lock:
                self.write(self.record)

    def settle(self) -> None:
        """Writes the record as it is, if the journal may hold another."""
        with self.lock:
            if self.in_doubt:
                self.write(self.record)

    def not_written(self, error: Exception) -> MillpondError:
        """What whoever wanted to write is told. The entry may be on disk all the same."""
        if isinstance(error, MillpondError):
            return error
        return WriteFailed(
            f"{self._path} cannot be written: {type(error).__name__}: {error}", path=self._path
        )
