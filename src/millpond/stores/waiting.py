"""Rows that wait at a fetch: files of a turn of a query, and the list of those that count.

    waiting/<state>/<fetcher>/<query>/<epoch>.<drain>/<token>-<random>.arrow    rows of one task
    waiting/<state>/<fetcher>/<query>/<epoch>.<drain>/list-<token>.arrow        the names of those that count

Tasks write the files, perhaps twice; the driver collects the names of the attempts that count and writes the list last.
Two drivers that run the same turn write files and lists with tokens of their own; the journal says whose counts. A file
that is listed and is missing or damaged is a `CorruptFile`.

Whoever does not see the root has the same files written and read by the pond (`client.waiting`).
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa

from millpond.durable.arrow_files import put_content, read_content, table_content, table_in
from millpond.durable.files import AnyBuffer, Files, OsFiles
from millpond.errors import CorruptFile
from millpond.wire.base import Epoch, Turn, check_name, check_query

WAITING = "waiting"
FILE_BYTES_MAX = 16 << 20
"""Of rows in one file, roughly: what a container must be able to hold in order to pass it on."""
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
    """What waits in one query at one fetcher, as whoever sees the root keeps and reads it."""

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
        self._bits = secrets.randbits if bits is None else bits
        self.folder = os.path.join(
            root,
            WAITING,
            check_name(state, "the state"),
            check_name(fetcher, "the fetcher"),
            check_query(query),
        )

    def token(self) -> str:
        """A new one, for the files of one run of a turn."""
        return new_token(self._bits)

    def keep(self, turn: Turn, token: str, batches: Iterable[pa.RecordBatch]) -> list[WaitingFile]:
        """Writes rows of one schema to as many files as it takes."""
        return [self.write(turn, token, part) for part in _parts(batches)]

    def write(self, turn: Turn, token: str, batches: Sequence[pa.RecordBatch]) -> WaitingFile:
        """Writes rows as a file of their own, which counts once it is listed."""
        name = f"{token}-{self._bits(64):016x}.arrow"
        metadata = {"turn": _name_of(turn), "token": token}
        self.put(turn, name, table_content(batches[0].schema, batches, metadata))
        return WaitingFile(name, sum(batch.num_rows for batch in batches))

    def list_files(self, turn: Turn, token: str, schema: str, files: Iterable[WaitingFile]) -> None:
        """These files are what waits after the turn, as the run that has the token saw it."""
        batch = pa.RecordBatch.from_pylist([file._asdict() for file in files], LIST_SCHEMA)
        metadata = {"turn": _name_of(turn), "token": token, "schema": schema}
        self.put(turn, _list_of(token), table_content(LIST_SCHEMA, [batch], metadata))

    def listed(self, turn: Turn, token: str) -> WaitingList:
        name = _list_of(token)
        batches, schema, metadata = table_in(self.get(turn, name), self._path(turn, name))
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
        content = self.get(listed.turn, file.name)
        batches, schema, metadata = table_in(content, self._path(listed.turn, file.name))
        self._check(listed.turn, file.name, metadata, listed.token)
        return pa.Table.from_batches(batches, schema)

    def put(self, turn: Turn, name: str, content: Sequence[AnyBuffer], writer: str = "") -> None:
        """Makes a file hold this content; durable on return. `writer` tells apart those who may write it at once."""
        self._files.make_dir(self._path(turn))
        put_content(self._files, self._path(turn, name), WAITING, content, writer)

    def get(self, turn: Turn, name: str) -> pa.Buffer:
        """What a file holds, unchecked."""
        return read_content(self._files, self._path(turn, name))

    def files_of(self, is_meant: Callable[[Turn], bool]) -> dict[Turn, list[str]]:
        """All files of these turns, leftovers as well, as far as they can be listed now."""
        files: dict[Turn, list[str]] = {}
        for folder in self._files.list(self.folder):
            turn = _turn_of(folder)
            if turn is not None and is_meant(turn):
                with suppress(OSError):
                    files[turn] = self._files.list(self._path(turn))
        return files

    def remove(self, files: Mapping[Turn, Iterable[str]]) -> None:
        """Removes these files, and what has none left. What cannot be removed now is tried again later."""
        for turn, names in files.items():
            with suppress(OSError):
                for name in names:
                    self._files.remove(self._path(turn, name))
                self._files.remove_dir(self._path(turn))

    def remove_before(self, oldest: Turn, answered: Turn) -> None:
        """Removes what no turn asks for any more: of turns before the oldest, and of drains before that which was answered
        but the one before it. What cannot be removed now is tried again after the next turn.
        """
        self.remove(self.files_of(lambda turn: turn < oldest or _is_passed(turn, answered)))

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


def new_token(bits: Callable[[int], int] = secrets.randbits) -> str:
    return f"{bits(64):016x}"


def _parts(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """The rows in parts of a file each. A row that is larger has one of its own."""
    part: list[pa.RecordBatch] = []
    nbytes = 0
    for batch in batches:
        step = max(1, batch.num_rows * FILE_BYTES_MAX // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, step):
            piece = batch.slice(start, step)
            if part and nbytes + piece.nbytes > FILE_BYTES_MAX:
                yield part
                part, nbytes = [], 0
            part.append(piece)
            nbytes += piece.nbytes
    if part:
        yield part


def _list_of(token: str) -> str:
    return f"list-{token}.arrow"


def _name_of(turn: Turn) -> str:
    return f"{turn.epoch:012d}.{turn.drain:04d}"


def _is_passed(turn: Turn, answered: Turn) -> bool:
    return turn.epoch == answered.epoch and 0 < turn.drain < answered.drain - 1


def _turn_of(name: str) -> Turn | None:
    epoch, _, drain = name.partition(".")
    return Turn(Epoch(int(epoch)), int(drain)) if epoch.isdecimal() and drain.isdecimal() else None
