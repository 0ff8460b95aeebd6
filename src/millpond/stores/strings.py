"""Strings and their numbers: what the tables of one group share."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import control as at
from millpond.stores import views
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys

_INDEX_BYTES = 48  # of one string: its entry, and the slots that it takes


class Strings:
    """Strings and their numbers. The empty one is number 0. None is forgotten, until `compact` rebuilds them."""

    def __init__(self) -> None:
        self._index = KeyIndex("bytes", np.zeros(at.SIZE, np.int64))
        self.size_when_looked_at = 0  # by `compact`: bytes, of all that share these strings
        self.intern(pa.array([""]))

    def __len__(self) -> int:
        return len(self._index)

    def intern(self, array: pa.Array) -> NDArray[np.int64]:
        """The numbers of strings, without nulls; new ones are given where there are none."""
        # Not by Arrow's dictionaries first: their hash is no secret.
        return self._index.assign(Keys.from_arrow(array))

    def find(self, array: pa.Array) -> NDArray[np.int64]:
        """The numbers of strings, without nulls; -1 for one that was never seen."""
        return self._index.find(Keys.from_arrow(array))

    def copy(self) -> Strings:
        """The strings as they are now, to be read while this one goes on."""
        other = Strings()
        other._index = self._index.copy(self._index.control.copy())
        return other

    def number(self, text: str) -> int:
        return int(self.intern(pa.array([text]))[0])

    def take(self, numbers: NDArray[np.int64]) -> pa.Array:
        found = self._index.stored_keys().take(views.plain(numbers)).to_arrow()
        return found.cast(pa.large_string() if pa.types.is_large_binary(found.type) else pa.string())

    def size_of(self, numbers: NDArray[np.int64]) -> int:
        """How many bytes the strings of these numbers have."""
        offsets = self._index.stored_keys().offsets
        return int((offsets[numbers + 1] - offsets[numbers]).sum())

    def text(self, number: int) -> str:
        return str(self.take(np.array([number]))[0])

    @property
    def used_bytes(self) -> int:
        """Of the strings and their index, without room to grow, roughly."""
        return self._index.stored_keys().nbytes + _INDEX_BYTES * len(self)

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    def only(self, used: NDArray[np.bool_]) -> Strings:
        """The strings that are used, the empty one among them, numbered anew in their order."""
        other = Strings()
        other._index.assign(self._index.stored_keys().take(np.flatnonzero(used)))
        return other

    def take_over(self, other: Strings) -> None:
        self._index = other._index
