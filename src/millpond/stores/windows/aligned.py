"""Rows of windows that all keys share: few groups of many rows each, every one taken as a whole."""

from __future__ import annotations

import itertools
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.durable.crashpoints import around
from millpond.durable.files import AnyBuffer, Files, remove_tree
from millpond.errors import CorruptFile
from millpond.private import AnyPath
from millpond.stores.keys import Keys
from millpond.stores.windows.pinned import PinnedFiles
from millpond.stores.windows.rowlog import SHARES_WRITTEN, check_groups, no_figures, repeated, share_of

Longs = NDArray[np.int64]
PIECE_BYTES = 1 << 20
"""About what one piece of a file has: the least that is read at once."""
_RUN_BYTES = 4 << 20
"""What is written at once by shares of the keys."""
_SHARED_BYTES = 4 << 10
"""A share of less than this, about, is not worth a piece of its own: all shares read what has none."""
_BATCHES_MAX = 64
"""So many small batches of a group become one."""
_SMALL_BYTES = PIECE_BYTES // _BATCHES_MAX
"""Below that a batch is small. All slices join theirs in the same epoch, and the holes that this leaves in memory are no use
for what is joined: together they make no more than a piece.
"""


class _Piece(NamedTuple):
    """Rows in a file."""

    path: str
    offset: int
    length: int
    rows: int
    checksum: int
    share: int
    """Of keys; -1 for all."""


@dataclass
class _Group:
    """Rows in order: what is on disk, what is in memory, what came with groups that were merged into it."""

    pieces: list[_Piece | pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    trigger: int = np.iinfo(np.int64).max
    small: int = 0
    """How many batches at the end are small."""


class AlignedRows:
    """A `RowLog` with a file for each group that is not in memory. Such a file goes with its group: none is compacted.

    `by_key`: rows begin with a key. What is written together lies there by shares of the keys, which can be read one by one.
    """

    def __init__(self, schema: pa.Schema, files: Files, directory: AnyPath, by_key: bool = False) -> None:
        self.schema = schema
        self._by_key = by_key
        self._files = files
        self._directory = os.fspath(directory)
        self._groups: dict[int, _Group] = {}
        self._memory_bytes = 0
        self._disk_bytes = 0
        self._serial = 0
        self._has_directory = False
        self._figures = no_figures()
        self._pinned = PinnedFiles(files, directory)
        # Dictionaries are each batch's own: rows are kept without.
        self._plain = pa.schema(
            [field.with_type(_plain_type(field.type)) for field in schema], schema.metadata
        )
        remove_tree(files, directory)

    @property
    def memory_bytes(self) -> int:
        return self._memory_bytes

    staying_bytes = 0
    """Of each piece in a file some words."""

    @property
    def disk_bytes(self) -> int:
        return self._disk_bytes

    @property
    def live_bytes(self) -> int:
        return self._memory_bytes + self._disk_bytes

    def append(self, groups: Longs, rows: pa.RecordBatch) -> None:
        begin = time.thread_time()
        groups = check_groups(groups)
        if len(groups):
            if rows.schema != self._plain:
                rows = rows.cast(self._plain)
            order = _order(groups) if (groups[1:] < groups[:-1]).any() else None
            names = groups if order is None else groups[order]
            cuts = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), len(names)]
            for start, stop in itertools.pairwise(cuts):
                # A copy, in any case: a slice would keep all of the batch in memory.
                taken = np.arange(start, stop) if order is None else order[start:stop]
                self._add(int(names[start]), rows.take(pa.array(taken)))
        self._figures["write_s"] += time.thread_time() - begin

    def expect(self, groups: Longs, triggers: Longs) -> None:
        for name, trigger in zip(check_groups(groups).tolist(), np.asarray(triggers).tolist(), strict=True):
            if name in self._groups:
                self._groups[name].trigger = trigger

    def merge(self, into: Longs, gone: Longs) -> None:
        for name, other in zip(check_groups(into).tolist(), check_groups(gone).tolist(), strict=True):
            if name != other and other in self._groups:
                source = self._groups.pop(other)
                target = self._groups.setdefault(name, _Group())
                target.pieces += source.pieces
                target.rows += source.rows
                target.small = 0

    def take(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        names = check_groups(groups).tolist()
        if len(set(names)) < len(names):
            raise repeated(next(name for place, name in enumerate(names) if name in names[:place]))
        batch, offsets = self.peek(groups)
        self.drop(groups)
        return batch, offsets

    def drop(self, groups: Longs) -> None:
        for name in groups.tolist():
            if name in self._groups:
                self._drop(self._groups.pop(name).pieces)

    def sizes_of(self, groups: Longs) -> Longs:
        every = (self._groups.get(name, _NOTHING).pieces for name in groups.tolist())
        return np.array([sum(map(_size_of, pieces)) for pieces in every], np.int64)

    def peek_share(self, groups: Longs, share: int, shares: int) -> pa.RecordBatch:
        begin = time.thread_time()
        batches: list[pa.RecordBatch] = []
        for name in check_groups(groups).tolist():
            for piece in self._groups.get(name, _NOTHING).pieces:
                if isinstance(piece, _Piece) and piece.share >= 0:
                    if not _overlap(piece.share, share, shares):
                        continue
                    if shares <= SHARES_WRITTEN:
                        batches.append(self._read(piece))
                        continue
                batches.append(only_share(self._read(piece), share, shares))
        batch = pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], self._plain)
        self._figures["read_s"] += time.thread_time() - begin
        return self._typed(batch)

    def peek(self, groups: Longs) -> tuple[pa.RecordBatch, Longs]:
        begin = time.thread_time()
        batches: list[pa.RecordBatch] = []
        offsets = np.zeros(len(groups) + 1, np.int64)
        for place, name in enumerate(check_groups(groups).tolist()):
            group = self._groups.get(name, _NOTHING)
            batches += [self._read(piece) for piece in group.pieces]
            offsets[place + 1] = offsets[place] + group.rows
        batch = pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], self._plain)
        self._figures["read_s"] += time.thread_time() - begin
        return self._typed(batch), offsets

    def frozen(self, groups: Longs) -> Iterator[tuple[Longs, pa.RecordBatch]]:
        pieces = [
            (place, piece)
            for place, name in enumerate(check_groups(groups).tolist())
            for piece in self._groups.get(name, _NOTHING).pieces
        ]
        pin = self._pinned.pin(piece.path for _, piece in pieces if isinstance(piece, _Piece))

        def read() -> Iterator[tuple[Longs, pa.RecordBatch]]:
            for place, piece in pieces:
                rows = self._read(piece)
                yield np.full(rows.num_rows, place), self._typed(rows)
            pin.release()

        return read()

    def spill(self, nbytes: int) -> int:
        """Groups that are expected last go first, each with all its rows."""
        begin = time.thread_time()
        moved = 0
        try:
            for name in sorted(self._groups, key=lambda name: -self._groups[name].trigger):
                if moved >= nbytes:
                    break
                moved += self._spill(name, self._groups[name])
        finally:
            self._figures["write_s"] += time.thread_time() - begin
        return moved

    def groups(self) -> Longs:
        return np.array(sorted(self._groups), np.int64)

    def figures(self) -> dict[str, float]:
        return dict(self._figures)

    def close(self) -> None:
        self._groups.clear()
        self._memory_bytes = self._disk_bytes = 0
        self._pinned.close()

    def validate(self) -> None:
        """Check every invariant; slow."""
        pieces = [piece for group in self._groups.values() for piece in group.pieces]
        on_disk = [piece for piece in pieces if isinstance(piece, _Piece)]
        in_memory = [piece for piece in pieces if not isinstance(piece, _Piece)]
        assert self._disk_bytes == sum(piece.length for piece in on_disk)
        assert self._memory_bytes == sum(batch.nbytes for batch in in_memory)
        for group in self._groups.values():
            rows = [piece.rows if isinstance(piece, _Piece) else piece.num_rows for piece in group.pieces]
            assert group.rows == sum(rows) > 0
        names = {os.path.basename(piece.path) for piece in on_disk}
        assert names <= set(self._files.list(self._directory))
        for piece in on_disk:
            self._read(piece)

    def _add(self, name: int, rows: pa.RecordBatch) -> None:
        group = self._groups.setdefault(name, _Group())
        group.pieces.append(rows)
        group.rows += rows.num_rows
        self._memory_bytes += rows.nbytes
        group.small = group.small + 1 if rows.nbytes < _SMALL_BYTES else 0
        if group.small >= _BATCHES_MAX:
            joined = pa.concat_batches(group.pieces[-group.small :])
            self._memory_bytes += joined.nbytes - sum(
                _memory_of(piece) for piece in group.pieces[-group.small :]
            )
            group.pieces[-group.small :] = [joined]
            group.small = 0

    def _spill(self, name: int, group: _Group) -> int:
        """How many bytes of memory the group had."""
        moved = sum(map(_memory_of, group.pieces))
        if not moved:
            return 0
        if not self._has_directory:
            self._files.make_dir(self._directory)
            self._has_directory = True
        path = next((piece.path for piece in group.pieces if isinstance(piece, _Piece)), None)
        if path is None:
            self._serial += 1
            path = os.path.join(self._directory, f"{name}-{self._serial}.rows")
        pieces: list[_Piece | pa.RecordBatch] = []
        waiting = list(_runs(group.pieces, _RUN_BYTES if self._by_key else PIECE_BYTES))
        before = self._memory_bytes
        try:
            # Those that lie side by side are written as one: a group has many small batches, and a piece is read at once.
            while waiting:
                run = waiting[0]
                pieces += [run] if isinstance(run, _Piece) else self._write(path, pa.concat_batches(run))
                del waiting[0]
        finally:
            # What the disk did not take stays where it was.
            for run in waiting:
                pieces += [run] if isinstance(run, _Piece) else run
            in_memory = sum(map(_memory_of, pieces))
            self._memory_bytes += in_memory - moved
            group.pieces = pieces
            group.small = 0
        return before - self._memory_bytes

    def _write(self, path: str, rows: pa.RecordBatch) -> list[_Piece]:
        """Rows as pieces of the file: one for each share of the keys, where there are enough of them."""
        messages: list[AnyBuffer] = []
        pieces: list[_Piece] = []
        written = 0
        for share, part in _by_share(rows) if self._by_key else [(-1, rows)]:
            message = part.serialize()
            pieces.append(_Piece(path, written, message.size, part.num_rows, zlib.crc32(message), share))
            messages.append(message)
            written += message.size
        with around("scratch.flush"):
            begin = self._files.append(path, messages)
        self._disk_bytes += written
        self._figures["written_bytes"] += written
        return [piece._replace(offset=piece.offset + begin) for piece in pieces]

    def _read(self, piece: _Piece | pa.RecordBatch) -> pa.RecordBatch:
        if not isinstance(piece, _Piece):
            return piece
        try:
            with around("scratch.read"):
                message = self._files.read_range(piece.path, piece.offset, piece.length)
        except FileNotFoundError:
            message = pa.py_buffer(b"")
        self._figures["read_bytes"] += message.size
        if message.size < piece.length or zlib.crc32(message) != piece.checksum:
            raise CorruptFile(
                f"{piece.path}: checksum mismatch in the {piece.length} bytes from {piece.offset} on",
                hint="what the disk holds of open windows is damaged; restart the container: it rebuilds them from its log",
                path=piece.path,
            )
        return pa.ipc.read_record_batch(message, self._plain)

    def _drop(self, pieces: list[_Piece | pa.RecordBatch]) -> None:
        for piece in pieces:
            if isinstance(piece, _Piece):
                self._disk_bytes -= piece.length
            else:
                self._memory_bytes -= piece.nbytes
        for path in {piece.path for piece in pieces if isinstance(piece, _Piece)}:
            with around("scratch.fire"):
                self._pinned.remove(path)

    def _typed(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        return rows if self._plain == self.schema else rows.cast(self.schema)


_NOTHING = _Group()


def _order(groups: Longs) -> Longs:
    """Rows by group, each group's in their order."""
    least = groups.min()
    if int(groups.max() - least) <= np.iinfo(np.uint16).max:
        groups = (groups - least).astype(np.uint16)  # NumPy sorts short integers by radix
    return np.argsort(groups, kind="stable")


def _memory_of(piece: _Piece | pa.RecordBatch) -> int:
    return 0 if isinstance(piece, _Piece) else int(piece.nbytes)


def _size_of(piece: _Piece | pa.RecordBatch) -> int:
    return piece.length if isinstance(piece, _Piece) else int(piece.nbytes)


def _overlap(written: int, share: int, shares: int) -> bool:
    """Whether a share as it is written, and one of so many that are read, have keys in common."""
    if shares <= SHARES_WRITTEN:
        return written // (SHARES_WRITTEN // shares) == share
    return share // (shares // SHARES_WRITTEN) == written


def only_share(rows: pa.RecordBatch, share: int, shares: int) -> pa.RecordBatch:
    """The rows of one share of the keys, of so many shares."""
    if shares == 1:
        return rows
    mine = share_of(Keys.from_arrow(rows.column(0)), shares) == share
    return rows.take(pa.array(np.flatnonzero(mine)))


def _by_share(rows: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Rows by their share of the keys; all together if they are few."""
    if rows.nbytes < SHARES_WRITTEN * _SHARED_BYTES:
        yield -1, rows
        return
    shares = share_of(Keys.from_arrow(rows.column(0)), SHARES_WRITTEN)
    order = np.argsort(shares, kind="stable")
    ends = np.cumsum(np.bincount(shares, minlength=SHARES_WRITTEN)).tolist()
    for share, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if end > start:
            yield share, rows.take(pa.array(order[start:end]))


def _runs(pieces: list[_Piece | pa.RecordBatch], nbytes: int) -> Iterator[_Piece | list[pa.RecordBatch]]:
    """Pieces in files one by one, batches side by side together, up to about so many bytes."""
    run: list[pa.RecordBatch] = []
    size = 0
    for piece in pieces:
        if isinstance(piece, _Piece):
            if run:
                yield run
                run, size = [], 0
            yield piece
            continue
        rows = max(1, piece.num_rows * nbytes // max(piece.nbytes, 1))
        for start in range(0, piece.num_rows, rows):
            part = piece.slice(start, rows)
            if run and size + part.nbytes > nbytes:
                yield run
                run, size = [], 0
            run.append(part)
            size += part.nbytes
    if run:
        yield run


def _plain_type(type_: pa.DataType) -> pa.DataType:
    return type_.value_type if pa.types.is_dictionary(type_) else type_
