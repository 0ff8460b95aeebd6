"""A mark on disk before each record that is applied, so that a record that ends the process is known the next time.

Written only by a start that follows one which ended half-way.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import TracebackType
from typing import Self

import msgspec
import pyarrow as pa

from millpond.container.core import Core, broken
from millpond.container.layout import CONTAINERS, directory_name, is_directory_of, record_path, term_of
from millpond.durable.arrow_files import read_metadata, write_table_file
from millpond.durable.files import Files
from millpond.errors import CorruptFile
from millpond.wire.base import Count, Directory, Term


class Mark(msgspec.Struct, frozen=True):
    """The record that is being applied."""

    directory: Directory
    seq: Count


class Marks:
    """Of one incarnation, while it adopts slices. A resident that comes out of it broken keeps its mark."""

    def __init__(self, core: Core, files: Files, root: str, careful: Term) -> None:
        self._core = core
        self._files = files
        self._root = root
        self._careful = careful
        self._marked: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):
            for name in self._marked:
                if self._core.holdings[name].broken is None:
                    self._files.remove(
                        self._path(directory_name(self._core.term, self._core.container), name)
                    )

    def set(self, directory: str, seq: int, resident: str) -> None:
        if self._careful:
            self._marked.add(resident)
            path = self._path(directory_name(self._core.term, self._core.container), resident)
            mark = msgspec.json.encode(Mark(directory, seq)).decode()
            write_table_file(self._files, path, "manifest", pa.schema([]), [], {"mark": mark})

    def spoil(self) -> None:
        """Residents whose records ended earlier starts come up broken."""
        if not self._careful:
            return
        for directory in self._files.list(os.path.join(self._root, CONTAINERS)):
            if not is_directory_of(directory, self._core.container):
                continue
            if not self._careful <= term_of(directory) < self._core.term:
                continue
            for name, holding in self._core.holdings.items():
                path = self._path(directory, name)
                if not self._files.exists(path):
                    continue
                with suppress(CorruptFile, msgspec.DecodeError):
                    mark = msgspec.json.decode(read_metadata(self._files, path)["mark"], type=Mark)
                    record = record_path(self._root, mark.directory, mark.seq)
                    error = RuntimeError("the process ended while it was applied")
                    holding.broken = broken(name, f"record {record} cannot be applied", error)

    def _path(self, directory: str, resident: str) -> str:
        return os.path.join(self._root, CONTAINERS, directory, f"mark-{resident}.arrow")
