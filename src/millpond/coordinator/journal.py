"""The journal: what the coordinator remembers, durable before anyone is told.

Each entry holds all of it, as one file that replaces the one before: the newest file is the truth, and
there is nothing to replay.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress

import msgspec
import pyarrow as pa

from millpond.coordinator.records import PondRecord
from millpond.durable.arrow_files import durable_names, read_table_file, remove_leftovers, write_table_file
from millpond.durable.crashpoints import reach
from millpond.durable.files import Files
from millpond.errors import CorruptFile

JOURNAL = "journal"
_ENTRY = re.compile(r"(\d{12})\.arrow")
_SCHEMA = pa.schema([("record", pa.binary())])


class Journal:
    """Entries are numbered; at most the newest and, after a crash, the one before it exist."""

    def __init__(self, files: Files, root: str) -> None:
        self._files = files
        self._directory = os.path.join(root, JOURNAL)
        self._number = 0
        self.entries_written = 0

    def load(self) -> PondRecord | None:
        """The newest entry; None in a root that has none."""
        self._files.make_dir(self._directory)
        remove_leftovers(self._files, self._directory)
        numbers = [
            int(match[1])
            for name in durable_names(self._files, self._directory)
            if (match := _ENTRY.fullmatch(name))
        ]
        if not numbers:
            return None
        self._number = max(numbers)
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
        """Durable on return."""
        batch = pa.record_batch([pa.array([msgspec.msgpack.encode(record)], pa.binary())], schema=_SCHEMA)
        entry = {"entry": str(self._number + 1)}
        write_table_file(self._files, self._path(self._number + 1), "journal", _SCHEMA, [batch], entry)
        self._number += 1
        self.entries_written += 1
        reach("truncate.before")
        # The newest entry counts: one that cannot be removed does no harm.
        with suppress(OSError):
            self._files.remove(self._path(self._number - 1))
        reach("truncate.after")

    def _path(self, number: int) -> str:
        return os.path.join(self._directory, f"{number:012d}.arrow")
