"""The journal: what the coordinator remembers, durable before anyone is told.

Each entry holds all of it, as one file that replaces the one before: the newest file is the truth, and
there is nothing to replay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress

import msgspec
import pyarrow as pa

from millpond.coordinator.records import PondRecord
from millpond.durable.arrow_files import durable_names, read_table_file, remove_leftovers, write_table_file
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import CorruptFile, PondInUse

JOURNAL = "journal"
_ENTRY = re.compile(r"(\d{12})\.arrow")
_SCHEMA = pa.schema([("record", pa.binary())])


class Journal:
    """Entries are numbered; the newest counts, and older ones go. A number is used once, by one coordinator: another one
    that has the root open, past every lock, finds the next entry taken, or the last one removed, and writes no more.
    Of two that make a new root at once, that holds once each has written.
    """

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._directory = os.path.join(root, JOURNAL)
        self._number = 0
        self._older: list[int] = []
        self._last: int | None = None
        """The newest entry that is there for certain: whoever writes a later one removes it."""
        self.is_taken = False
        """Whether it is known that another coordinator writes here."""
        self.entries_written = 0

    def load(self) -> PondRecord | None:
        """The newest entry; None in a root that has none."""
        self._files.make_dir(self._directory)
        remove_leftovers(self._files, self._directory)
        numbers = _numbers(durable_names(self._files, self._directory))
        if not numbers:
            return None
        self._number = max(numbers)
        self._last = self._number
        self._older = sorted(set(numbers) - {self._number})
        path = self._path(self._number)
        batches, schema, metadata = read_table_file(self._files, path)
        if metadata.get("entry") != str(self._number):
            raise CorruptFile(
                f"{path} is another file: entry {metadata.get('entry')} of a journal", path=path
            )
        if not schema.equals(_SCHEMA) or sum(batch.num_rows for batch in batches) != 1:
            raise CorruptFile(f"{path} is not a journal entry", path=path)
        try:
            return msgspec.msgpack.decode(batches[0].column(0)[0].as_py(), type=PondRecord)
        except msgspec.DecodeError as error:
            raise CorruptFile(f"{path} is not a journal entry: {error}", path=path) from None

    def write(self, record: PondRecord) -> None:
        """Durable on return. One that fails may be there or not: the next one has another number, and counts."""
        if self.is_taken:
            raise self.taken()
        batch = pa.record_batch([pa.array([msgspec.msgpack.encode(record)], pa.binary())], schema=_SCHEMA)
        before, self._number = self._number, self._number + 1
        self._older.append(before)
        entry, path = {"entry": str(self._number)}, self._path(self._number)
        try:
            write_table_file(self._files, path, "journal", _SCHEMA, [batch], entry, exclusive=True)
        except FileExistsError:
            self.is_taken = True
            raise self.taken() from None
        reach("truncate.before")
        # The newest entry counts: one that cannot be removed does no harm.
        with suppress(OSError):
            while self._older:
                number = self._older[-1]
                if not self._files.remove(self._path(number)) and number == self._last:
                    self._check_newest()
                self._older.pop()
        self._last = self._number
        self.entries_written += 1
        reach("truncate.after")

    def look(self) -> None:
        """PondInUse if another coordinator has written. For any thread: who decides nothing hears of it only so."""
        if not self.is_taken:
            newest = max(_numbers(self._files.list(self._directory)), default=0)
            # Looked at last: one's own entry has its number before it is written.
            self.is_taken = newest > self._number
        if self.is_taken:
            raise self.taken()

    def _check_newest(self) -> None:
        """The last entry is gone: if another coordinator wrote later ones, what was just written counts for nothing."""
        if max(_numbers(self._files.list(self._directory)), default=0) > self._number:
            self.is_taken = True
            with suppress(OSError):
                self._files.remove(self._path(self._number))
            raise self.taken()

    def taken(self) -> PondInUse:
        root = os.path.dirname(self._directory)
        return PondInUse(
            f"another coordinator has written to the journal of {root}: this one decides nothing any more",
            hint="close this pond; the other one goes on",
            root=root,
        )

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"{number:012d}.arrow")


def _numbers(names: Iterable[str]) -> list[int]:
    """Of entries, by the names of files."""
    return [int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))]
