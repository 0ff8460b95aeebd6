"""Rows that wait at a fetch: files of a turn of a query, and the list of those that count.

    waiting/<state>/<fetcher>/<query>/<epoch>.<drain>/<token>-<random>.arrow    rows of one task
    waiting/<state>/<fetcher>/<query>/<epoch>.<drain>/list-<token>.arrow        the names of those that count

Tasks write the files, perhaps twice; the driver collects the names of the attempts that count and writes the list last.
Two drivers that run the same turn write files and lists with tokens of their own; the journal says whose counts. A file
that is listed and is missing or damaged is a `CorruptFile`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from millpond.durable.arrow_files import read_table_file, write_table_file
from millpond.durable.files import Files, OsFiles
from millpond.errors import CorruptFile
from millpond.wire.base import Epoch, Turn, check_name, check_query

WAITING = "waiting"
LIST_SCHEMA = pa.schema([("name", pa.string()), ("rows", pa.int64())])


class WaitingFile(NamedTuple):
    name: str
    rows: int


class WaitingList(NamedTuple):
    """The files of a turn that count, and the schema of their rows as the writer described it."""

    turn: Turn
    token: str
    schema: str
    files: list[WaitingFile]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)


class WaitingRows:
    """What waits in one query at one fetcher. Plain data that tasks can carry."""

    def __init__(
        self,
        root: str,
        state: str,
        fetcher: str,
        query: str,
        files: Files | None = None,
        bits: Callable[[int], int] | None = None,
    ) -> None:
        self._files = OsFiles() if files is None else files
        self._random_bits = bits
        self.folder = os.path.join(
            root,
            WAITING,
            check_name(state, "the state"),
            check_name(fetcher, "the fetcher"),
            check_query(query),
        )

    def _bits(self, count: int) -> int:
        return secrets.randbits(count) if self._random_bits is None else self._random_bits(count)

    def token(self) -> str:
        """A new one, for the files of one run of a turn."""
        return f"{self._bits(64):016x}"

    def write(self, turn: Turn, token: str, batches: Sequence[pa.RecordBatch]) -> WaitingFile:
        """Writes rows as a file of their own, which counts once it is listed."""
        name = f"{token}-{self._bits(64):016x}.arrow"
        metadata = {"turn": _name_of(turn), "token": token}
        self._files.make_dir(self._path(turn))
        write_table_file(self._files, self._path(turn, name), WAITING, batches[0].schema, batches, metadata)
        return WaitingFile(name, sum(batch.num_rows for batch in batches))

    def list_files(self, turn: Turn, token: str, schema: str, files: Iterable[WaitingFile]) -> None:
        """These files are what waits after the turn, as the run that has the token saw it."""
        batch = pa.RecordBatch.from_pylist([file._asdict() for file in files], LIST_SCHEMA)
        metadata = {"turn": _name_of(turn), "token": token, "schema": schema}
        self._files.make_dir(self._path(turn))
        write_table_file(
            self._files, self._path(turn, _list_of(token)), WAITING, LIST_SCHEMA, [batch], metadata
        )

    def listed(self, turn: Turn, token: str) -> WaitingList:
        name = _list_of(token)
        batches, schema, metadata = read_table_file(self._files, self._path(turn, name))
        self._check(turn, name, metadata, token)
        if not schema.equals(LIST_SCHEMA):
            raise self._corrupt(turn, name, "it is not a list of files")
        files = [WaitingFile(**row) for batch in batches for row in batch.to_pylist()]
        own = re.compile(rf"{re.escape(token)}-[0-9a-f]{{16}}\.arrow")
        if not all(file.name is not None and own.fullmatch(file.name) for file in files):
            raise self._corrupt(turn, name, "it names files that no task of its run wrote")
        return WaitingList(turn, metadata["token"], metadata["schema"], files)

    def read(self, listed: WaitingList, file: WaitingFile) -> pa.Table:
        """The rows of one file of a list."""
        batches, schema, metadata = read_table_file(self._files, self._path(listed.turn, file.name))
        self._check(listed.turn, file.name, metadata, listed.token)
        return pa.Table.from_batches(batches, schema)

    def remove_before(self, oldest: Turn, answered: Turn) -> None:
        """Removes what no turn asks for any more: of turns before the oldest, and of drains before that which was answered
        but the one before it. What cannot be removed now is tried again after the next turn.
        """
        for folder in self._files.list(self.folder):
            turn = _turn_of(folder)
            if turn is not None and (turn < oldest or _is_passed(turn, answered)):
                with suppress(OSError):
                    for name in self._files.list(self._path(turn)):
                        self._files.remove(self._path(turn, name))
                    self._files.remove_dir(self._path(turn))

    def _path(self, turn: Turn, *name: str) -> str:
        return os.path.join(self.folder, _name_of(turn), *name)

    def _check(self, turn: Turn, name: str, metadata: dict[str, str], token: str) -> None:
        """A file that is whole, but another one, is found out."""
        if (metadata.get("turn"), metadata.get("token")) != (_name_of(turn), token):
            raise self._corrupt(turn, name, "it holds the rows of another turn or driver")

    def _corrupt(self, turn: Turn, name: str, why: str) -> CorruptFile:
        path = self._path(turn, name)
        return CorruptFile(
            f"{path} cannot be read: {why}", hint="restore the file from a backup copy", path=path
        )


def _list_of(token: str) -> str:
    return f"list-{token}.arrow"


def _name_of(turn: Turn) -> str:
    return f"{turn.epoch:012d}.{turn.drain:04d}"


def _is_passed(turn: Turn, answered: Turn) -> bool:
    return turn.epoch == answered.epoch and 0 < turn.drain < answered.drain - 1


def _turn_of(name: str) -> Turn | None:
    epoch, _, drain = name.partition(".")
    return Turn(Epoch(int(epoch)), int(drain)) if epoch.isdecimal() and drain.isdecimal() else None
