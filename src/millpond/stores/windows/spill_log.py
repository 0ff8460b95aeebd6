"""Rows on disk that are nobody's promise: a log of words, and a log of entries that say whose they are."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.durable.crashpoints import around
from millpond.durable.files import Files, remove_tree
from millpond.errors import CorruptFile, WriteFailed
from millpond.kernels import spilled
from millpond.private import AnyPath
from millpond.stores import views
from millpond.stores.windows.pinned import Pin, PinnedFiles
from millpond.stores.windows.rowlog import no_figures

Longs = NDArray[np.int64]
ENTRY_BYTES = 8 * spilled.ENTRY_FIELDS
READ_BYTES_MAX = 8 << 20
"""What is read, or copied through memory, at once."""
_FRAME_ENTRIES = 1 << 16
_GAP_BYTES = 16 << 10
"""To read so many bytes for nothing costs less than to ask a second time."""
_COPIED_BYTES_MIN = 16 << 10
"""From file to file go ranges that have so much on average; shorter ones go through memory, many at once."""
_DAMAGED = (
    "what the disk holds of open windows is damaged; restart the container: it rebuilds them from its log"
)


class _Frame(NamedTuple):
    """Entries of the index that were written at once."""

    offset: int
    entries: int
    checksum: int


class _Pair:
    """The two files of one generation, and how far they go."""

    def __init__(self, files: Files, pinned: PinnedFiles, directory: str, serial: int) -> None:
        self.files = files
        self.pinned = pinned
        self.data = os.path.join(directory, f"data-{serial}")
        self.index = os.path.join(directory, f"index-{serial}")
        self.data_bytes = 0
        self.index_bytes = 0
        self.frames: list[_Frame] = []

    def add_words(self, words: Longs) -> int:
        """Where they begin, in bytes."""
        try:
            with around("scratch.flush"):
                begin = self.files.append(self.data, [pa.py_buffer(words)])
        except OSError as error:
            raise _not_written(self.data, error) from error
        self.data_bytes = begin + words.nbytes
        return begin

    def add_entries(self, entries: Longs) -> None:
        content = pa.py_buffer(np.ascontiguousarray(entries))
        try:
            with around("scratch.index"):
                begin = self.files.append(self.index, [content])
        except OSError as error:
            raise _not_written(self.index, error) from error
        self.index_bytes = begin + content.size
        self.frames.append(_Frame(begin, len(entries), _checksum(entries)))

    def copy(self, source: str, ranges: list[tuple[int, int]]) -> int:
        try:
            with around("scratch.compact"):
                begin = self.files.copy_ranges(source, ranges, self.data)
        except EOFError:
            raise _damaged(source, "it ends too early") from None
        except OSError as error:
            raise _not_written(self.data, error) from error
        self.data_bytes = begin + sum(length for _, length in ranges)
        return begin

    def entries(self) -> Iterator[Longs]:
        """Of one frame after another."""
        for frame in self.frames:
            size = frame.entries * ENTRY_BYTES
            try:
                with around("scratch.read"):
                    content = self.files.read_range(self.index, frame.offset, size)
            except FileNotFoundError:
                raise _damaged(self.index, "it is missing") from None
            whole = content.size == size
            entries = (
                views.view(content, np.int64, 0, size // 8).reshape(-1, spilled.ENTRY_FIELDS)
                if whole
                else None
            )
            if entries is None or _checksum(entries) != frame.checksum:
                raise _damaged(self.index, f"checksum mismatch in the {size} bytes from {frame.offset} on")
            yield entries

    def words(self, entries: Longs) -> Iterator[tuple[Longs, Longs, Longs]]:
        """Some of these entries at a time, which come by offset: `(entries, words, places)`, checked."""
        sizes = np.cumsum(8 * entries[:, spilled.WORDS])
        start = 0
        while start < len(entries):
            before = int(sizes[start - 1]) if start else 0
            span_end = int(entries[start, spilled.OFFSET]) + 2 * READ_BYTES_MAX
            stop = int(np.searchsorted(sizes, before + READ_BYTES_MAX, "right"))
            stop = min(stop, int(np.searchsorted(entries[:, spilled.OFFSET], span_end)))
            stop = max(start + 1, stop)
            chosen = np.ascontiguousarray(entries[start:stop])
            begins, ends, places = (np.empty(len(chosen), np.int64) for _ in range(3))
            count = spilled.spans(chosen, _GAP_BYTES, begins, ends, places)
            lengths = (ends[:count] - begins[:count]).tolist()
            try:
                with around("scratch.read"):
                    content = self.files.read_ranges(
                        self.data, list(zip(begins[:count].tolist(), lengths, strict=True))
                    )
            except FileNotFoundError:
                raise _damaged(self.data, "it is missing") from None
            except EOFError:
                raise _damaged(self.data, "it ends too early") from None
            words = views.view(content, np.int64, 0, content.size // 8)
            actual = np.empty(len(chosen), np.int64)
            spilled.checksums(words, places, np.ascontiguousarray(chosen[:, spilled.WORDS]), actual)
            wrong = np.flatnonzero(actual != chosen[:, spilled.CHECKSUM])
            if len(wrong):
                _, offset, size, _, _ = chosen[wrong[0]].tolist()
                raise _damaged(self.data, f"checksum mismatch in the {8 * size} bytes from {offset} on")
            yield chosen, words, places
            start = stop

    def remove(self) -> None:
        self.pinned.remove(self.data)
        self.pinned.remove(self.index)

    def frozen(self) -> tuple[_Pair, Pin]:
        """The same as it is now, to be read as long as the pin is there: files only grow."""
        other = copy(self)
        other.frames = list(self.frames)
        return other, self.pinned.pin([self.data, self.index])


class SpillLog:
    """One data log and one index log. What a scan finds dead is left out of the next two."""

    def __init__(self, files: Files, directory: AnyPath, figures: dict[str, float]) -> None:
        self._files = files
        self._directory = os.fspath(directory)
        self._figures = figures
        self._serial = -1
        self._has_directory = False
        self._pinned = PinnedFiles(files, directory)
        self._pair = self._new_pair()
        remove_tree(files, directory)

    @property
    def nbytes(self) -> int:
        return self._pair.data_bytes + self._pair.index_bytes

    def append(self, names: Longs, rows: Longs, words: Longs, bounds: Longs) -> None:
        """An entry for each name, a part with its generation: its rows are words `bounds[i]..bounds[i + 1]`."""
        if not self._has_directory:
            self._files.make_dir(self._directory)
            self._has_directory = True
        entries = np.empty((len(names), spilled.ENTRY_FIELDS), np.int64)
        counts, checks = np.diff(bounds), np.empty(len(names), np.int64)
        spilled.checksums(words, bounds[:-1].copy(), counts, checks)
        begin = self._pair.add_words(words)
        for field, values in (
            (spilled.PART, names),
            (spilled.OFFSET, begin + 8 * bounds[:-1]),
            (spilled.WORDS, counts),
            (spilled.ROWS, rows),
            (spilled.CHECKSUM, checks),
        ):
            entries[:, field] = values
        self._pair.add_entries(entries)
        self._figures["written_bytes"] += words.nbytes + entries.nbytes

    def scan(self, parts: Longs, wanted: NDArray[np.uint8], compact: bool) -> Longs:
        """The entries of parts that are wanted, by offset, in one pass over the index.

        `compact`: the same pass writes what is live to new logs, which take the place of these. A disk that is full
        leaves all as it was.
        """
        found: list[Longs] = []
        target = self._new_pair() if compact else None
        try:
            waiting: list[Longs] = []
            names = np.empty(len(wanted), np.int64)
            spilled.name_live(parts, wanted, names)
            for entries in self._pair.entries():
                selected, live = np.empty(len(entries), np.int64), np.empty(len(entries), np.int64)
                selects, lives = spilled.scan(entries, names, selected, live)
                self._figures["read_bytes"] += entries.nbytes
                chosen = entries[selected[:selects]]
                if target is not None:
                    begin = time.thread_time()
                    try:
                        moved = self._move(np.ascontiguousarray(entries[live[:lives]]), target)
                        waiting.append(moved)
                        if sum(map(len, waiting)) >= _FRAME_ENTRIES:
                            target.add_entries(np.concatenate(waiting))
                            waiting = []
                        chosen = moved[wanted[moved[:, spilled.PART] & spilled.PART_MASK] != 0]
                    except WriteFailed:
                        # Space is what there is none of: what was found so far is in the old logs, too.
                        target.remove()
                        return self.scan(parts, wanted, compact=False)
                    finally:
                        self._charge(begin)
                found.append(chosen)
            if target is not None:
                if any(map(len, waiting)):
                    try:
                        target.add_entries(np.concatenate(waiting))
                    except WriteFailed:
                        target.remove()
                        return self.scan(parts, wanted, compact=False)
                with around("scratch.compact"):
                    self._pair.remove()
                self._pair = target
                self._figures["compactions"] += 1
        except BaseException:
            if target is not None:
                target.remove()
            raise
        return np.concatenate(found) if found else np.empty((0, spilled.ENTRY_FIELDS), np.int64)

    def load(self, entries: Longs) -> Iterator[tuple[Longs, Longs, Longs]]:
        """`(entries, words, places)`: some entries of a scan at a time, and at which word each begins. Checked."""
        for some in self._pair.words(entries):
            self._figures["read_bytes"] += some[1].nbytes
            yield some

    def clear(self) -> None:
        """Nothing in it is live."""
        if self.nbytes:
            with around("scratch.fire"):
                self._pair.remove()
            self._pair = self._new_pair()

    def close(self) -> None:
        self._pinned.close()

    def frozen(self) -> tuple[SpillLog, Pin]:
        """The same as it is now, to be scanned and loaded from as long as the pin is there."""
        other: SpillLog = copy(self)
        other._figures = no_figures()
        other._pair, pin = self._pair.frozen()
        return other, pin

    def _move(self, live: Longs, target: _Pair) -> Longs:
        """The entries as they are in the target, which has their words."""
        if not len(live):
            return live
        moved = live.copy()
        begins, ends, places = (np.empty(len(live), np.int64) for _ in range(3))
        count = spilled.spans(live, 0, begins, ends, places)
        lengths = ends[:count] - begins[:count]
        if int(lengths.sum()) >= count * _COPIED_BYTES_MIN:
            begin = target.copy(
                self._pair.data, list(zip(begins[:count].tolist(), lengths.tolist(), strict=True))
            )
            moved[:, spilled.OFFSET] = begin + 8 * places
            self._figures["written_bytes"] += int(lengths.sum())
            return moved
        done = 0
        for some, words, where in self._pair.words(live):
            bounds = np.zeros(len(some) + 1, np.int64)
            np.cumsum(some[:, spilled.WORDS], out=bounds[1:])
            dense = np.empty(int(bounds[-1]), np.int64)
            spilled.copy_words(words, where, bounds, dense)
            moved[done : done + len(some), spilled.OFFSET] = target.add_words(dense) + 8 * bounds[:-1]
            self._figures["written_bytes"] += dense.nbytes
            done += len(some)
        return moved

    def _charge(self, begin: float) -> None:
        """CPU time that counts for compaction, within a read."""
        spent = time.thread_time() - begin
        self._figures["compact_s"] += spent
        self._figures["read_s"] -= spent

    def _new_pair(self) -> _Pair:
        self._serial += 1
        return _Pair(self._files, self._pinned, self._directory, self._serial)


def _checksum(entries: Longs) -> int:
    words, out = np.ascontiguousarray(entries).reshape(-1), np.empty(1, np.int64)
    spilled.checksums(words, np.zeros(1, np.int64), np.array([len(words)]), out)
    return int(out[0])


def _damaged(path: str, why: str) -> CorruptFile:
    return CorruptFile(f"{path}: {why}", hint=_DAMAGED, path=path)


def _not_written(path: str, error: OSError) -> WriteFailed:
    return WriteFailed(
        f"{path}: {error.strerror or error}",
        hint="make room on the container's disk, or raise memory= so that windows need less of it",
        path=path,
    )
