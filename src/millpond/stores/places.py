"""Where the arrays of a slice lie, as `kernels.sliced` wants to know it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from millpond.kernels import sliced
from millpond.stores.arena import Arena
from millpond.stores.key_index import KeyIndex


class Places:
    """Keeps the arrays alive; that they are still those of the slice is asked before each use."""

    __slots__ = (
        "_cells",
        "_control",
        "_data",
        "_entries",
        "_flags",
        "_heads",
        "_keys",
        "_old",
        "_places",
        "_table",
        "address",
    )

    def __init__(self, index: KeyIndex, arena: Arena, flags: NDArray[np.uint8]) -> None:
        self._table, self._old, self._entries = index.table, index.old, index.entries
        self._control, (self._keys, self._data) = index.control, index.key_arrays
        self._cells, self._heads, self._flags = arena.cells, arena.heads, flags
        places = np.zeros(sliced.PLACES, np.int64)
        arrays: dict[int, NDArray[np.generic]] = {
            sliced.TABLE: self._table,
            sliced.OLD: self._old,
            sliced.HELD: self._entries,
            sliced.CELLS: self._cells,
            sliced.DIRTY: self._flags,
            sliced.KEY_LONGS: self._keys,
            sliced.KEY_BYTES: self._data,
        }
        for place, array in arrays.items():
            places[place], places[place + 1] = array.ctypes.data, len(array)
        places[sliced.WIDTH] = self._cells.shape[1]
        places[sliced.HEADS] = self._heads.ctypes.data
        places[sliced.CONTROL] = self._control.ctypes.data
        self._places = places
        self.address = int(places.ctypes.data)

    def are_of(self, index: KeyIndex, arena: Arena, flags: NDArray[np.uint8]) -> bool:
        keys, data = index.key_arrays
        return (
            self._cells is arena.cells
            and self._table is index.table
            and self._old is index.old
            and self._entries is index.entries
            and self._keys is keys
            and self._data is data
            and self._heads is arena.heads
            and self._control is index.control
            and self._flags is flags
        )
