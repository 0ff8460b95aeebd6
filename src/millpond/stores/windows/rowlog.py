"""What a window operator asks of a store of rows, whichever way that keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.errors import BadOption
from millpond.stores.keys import Keys

GROUP_MAX = 1 << 32
"""Groups are numbers from 0 on: stores keep tables by them."""


SHARES_WRITTEN = 16
"""By so many shares of the keys rows lie in files."""
SHARES_MAX = 1 << 12
"""In so many they can be read: of more than are written, each reads what it shares with others."""
SHARE_BYTES = 8 << 20
"""What of a window is read at once where it has many keys: it takes some times its size until it is a result."""
_LARGE_SHARE_BYTES = 4
"""Before anything is read twice, a share is so many times as large."""


def shares_for(nbytes: int) -> int:
    """In how many shares rows of a window are read, so that each takes no more than is good."""
    needed = -(-nbytes // SHARE_BYTES)
    if needed > SHARES_WRITTEN:
        needed = max(SHARES_WRITTEN, -(-needed // _LARGE_SHARE_BYTES))
    return min(SHARES_MAX, 1 << max(0, needed - 1).bit_length())


def share_of(keys: Keys, shares: int) -> NDArray[np.uint16]:
    """In which of so many shares each key is, by bits of its hash that slices do not go by. A share is part of one of fewer."""
    finest = (keys.hashes >> np.uint64(24)) & np.uint64(SHARES_MAX - 1)
    return (finest // np.uint64(SHARES_MAX // shares)).astype(np.uint16)


class InMemory(Protocol):
    """What shares the memory of windows, and can leave some of it."""

    @property
    def memory_bytes(self) -> int: ...

    def spill(self, nbytes: int) -> int: ...


class Spillable(InMemory, Protocol):
    """Rows or cells of open windows."""

    @property
    def disk_bytes(self) -> int: ...

    @property
    def live_bytes(self) -> int: ...

    def close(self) -> None: ...


class RowLog(Protocol):
    """Rows of open windows of one slice. The operator names each window of a key by a `group`, a number that it chooses.

    Groups are dense: a store's tables are as long as the largest. A group exists from its first row to its `take`, and
    its number can be another's then. Nothing here is durable: files are scratch, gone with `close`, and rows come back
    by a replay of the log of epochs. One caller at a time. After an error of the disk, all rows are where they were.
    """

    @property
    def memory_bytes(self) -> int:
        """What it holds in memory, with its tables."""

    @property
    def staying_bytes(self) -> int:
        """What of its memory cannot leave it."""

    @property
    def disk_bytes(self) -> int:
        """The size of its files."""

    @property
    def live_bytes(self) -> int:
        """What the rows that it holds take, wherever they are, without what is taken but not yet tidied up."""

    def append(self, groups: NDArray[np.int64], rows: pa.RecordBatch) -> None:
        """Rows with the group of each, in any order. The schema is the store's."""

    def expect(self, groups: NDArray[np.int64], triggers: NDArray[np.int64]) -> None:
        """When these groups are likely to be taken, on any clock that all groups share; later calls replace earlier ones."""

    def merge(self, into: NDArray[np.int64], gone: NDArray[np.int64]) -> None:
        """Rows of `gone[i]` follow those of `into[i]` from now on, and `gone[i]` ceases to be; one pair after another.

        The trigger stays that of `into[i]`.
        """

    def take(self, groups: NDArray[np.int64]) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """The rows of these groups, which have none from then on. No group may be named twice.

        Rows of `groups[i]` are `offsets[i]..offsets[i + 1]` of the batch, in the order in which they were appended, and
        those of a merged group behind those of the group that it went into. A group without rows is no error. Of a log
        by key, that is the order of the rows of each key.
        """

    def peek(self, groups: NDArray[np.int64]) -> tuple[pa.RecordBatch, NDArray[np.int64]]:
        """The same, and nothing changes."""

    def drop(self, groups: NDArray[np.int64]) -> None:
        """These groups have no rows from then on."""

    def sizes_of(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many bytes the rows of each of these groups take, about, wherever they are."""

    def peek_share(self, groups: NDArray[np.int64], share: int, shares: int) -> pa.RecordBatch:
        """As `peek`, rows of some keys alone, where rows begin with one: of one in so many shares of all that there may be.

        `shares` is a power of two, up to `SHARES_MAX`.
        """

    def frozen(self, groups: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
        """What `peek` gives now, some rows after the others, and of each row the place of its group in `groups`.

        What is on disk is read when it is asked for: from any thread, whatever becomes of it here meanwhile. No group's
        rows are torn apart, but where all keys share a group.
        """

    def spill(self, nbytes: int) -> int:
        """Moves at least so many bytes from memory to disk, or all that can be; how many it were."""

    def groups(self) -> NDArray[np.int64]:
        """All groups that have rows, in ascending order."""

    def figures(self) -> dict[str, float]:
        """Since its beginning, by the names in `FIGURES`: CPU seconds, events and bytes."""

    def close(self) -> None:
        """Removes its files. Nothing can be done with it after."""

    def validate(self) -> None:
        """Check every invariant; slow."""


FIGURES = (
    *("write_s", "read_s", "compact_s"),
    *("hits", "misses", "evictions", "compactions", "written_bytes", "read_bytes"),
)


def no_figures() -> dict[str, float]:
    return dict.fromkeys(FIGURES, 0.0)


class Figured(Protocol):
    """What tells what it has done."""

    @property
    def disk_bytes(self) -> int: ...

    def figures(self) -> dict[str, float]: ...


def figures_of(logs: Sequence[Figured]) -> dict[str, float]:
    """What these logs hold on disk, and what they have done, as a resident tells it."""
    did = [log.figures() for log in logs]
    return {
        "spilled_bytes": sum(log.disk_bytes for log in logs),
        **{f"store_{name}": sum(each[name] for each in did) for name in FIGURES},
    }


def with_keys(
    keys: Keys, frozen: Iterator[tuple[NDArray[np.int64], pa.RecordBatch]], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Rows of groups, each with the key of its group before it."""
    for places, rows in frozen:
        yield pa.RecordBatch.from_arrays([keys.take(places).to_arrow(), *rows.columns], schema=schema)


def peeked(rows: RowLog, groups: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], pa.RecordBatch]]:
    """What `RowLog.frozen` gives, of rows that are read at once."""
    batch, offsets = rows.peek(groups)
    return iter([(np.repeat(np.arange(len(groups)), np.diff(offsets)), batch)] if batch.num_rows else [])


def in_portions(
    rows: RowLog, groups: NDArray[np.int64], together: NDArray[Any] | None = None
) -> Iterator[NDArray[np.int64]]:
    """These groups, in their order, so many at a time that their rows may be in memory at once: one at least.

    Neighbours that `together` has the same number for are in one portion.
    """
    if not len(groups):
        return
    ends = np.cumsum(rows.sizes_of(groups))
    numbers = np.maximum(ends - 1, 0) // SHARE_BYTES
    if together is not None:
        begins = np.flatnonzero(np.concatenate(([True], together[1:] != together[:-1])))
        numbers = np.repeat(numbers[begins], np.diff(np.append(begins, len(groups))))
    yield from np.split(groups, np.flatnonzero(np.diff(numbers)) + 1)


def check_groups(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same numbers as kernels want them; BadOption for one that no group can have."""
    groups = np.ascontiguousarray(groups, np.int64)
    if len(groups) and (int(groups.min()) < 0 or int(groups.max()) >= GROUP_MAX):
        wrong = groups[(groups < 0) | (groups >= GROUP_MAX)][0]
        raise BadOption(
            f"{wrong} cannot be a group of rows",
            hint=f"groups count from 0 to {GROUP_MAX - 1}",
            option="groups",
        )
    return groups


def repeated(group: int) -> BadOption:
    return BadOption(f"group {group} is to be taken twice", hint="name each group once", option="groups")
