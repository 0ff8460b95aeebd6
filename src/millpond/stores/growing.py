"""Arrays that grow."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)


def grown(array: NDArray[T], used: int, needed: int) -> NDArray[T]:
    """The array with room for `needed` elements along its first axis; the first `used` are kept."""
    if needed <= len(array):
        return array
    # Memory that was not written to yet costs nothing, so room may be generous.
    out = np.empty((max(needed, 2 * len(array), 16), *array.shape[1:]), array.dtype)
    out[:used] = array[:used]
    return out
