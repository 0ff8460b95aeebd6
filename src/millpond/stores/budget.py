"""What answers may take. It is claimed before the memory is asked for, and counted whether or not it is then used."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.stores import views


class Budget(Protocol):
    """Safe to share between threads."""

    def claim(self, nbytes: int) -> None:
        """Raises if there is not so much left, and then takes nothing."""


class _Unlimited:
    def claim(self, nbytes: int) -> None:
        pass


UNLIMITED = _Unlimited()


def bytes_of_ranges(array: pa.Array, begin: NDArray[np.int64], end: NDArray[np.int64]) -> int:
    """How many bytes the rows from begin to end of each range take, roughly, without a look at the rows themselves."""
    type_, types = array.type, pa.types
    rows = int((end - begin).sum())
    if rows == 0:
        return 0
    if types.is_struct(type_):
        return rows + sum(bytes_of_ranges(array.field(n), begin, end) for n in range(type_.num_fields))
    if views.is_bytes(type_) or types.is_list(type_) or types.is_map(type_):
        offsets = views.view(array.buffers()[1], np.int32, array.offset, len(array) + 1)
        begin, end = offsets[begin].astype(np.int64), offsets[end].astype(np.int64)
        if views.is_bytes(type_):
            return 4 * rows + int((end - begin).sum())
        children = [array.keys, array.items] if types.is_map(type_) else [array.values]
        return 4 * rows + sum(bytes_of_ranges(child, begin, end) for child in children)
    return rows * (16 if types.is_decimal(type_) else 8)
