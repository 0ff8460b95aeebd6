"""Which entries of a store have changed since they were last saved: a byte for each, set by whoever touches it anyway."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Dirty:
    """`flags` are there for `room` entries at least; kernels set them. All are clean at first."""

    __slots__ = ("flags",)

    def __init__(self) -> None:
        self.flags: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def fit(self, room: int) -> None:
        """Makes room. To be called before entries are touched that were not there."""
        if room > len(self.flags):
            flags = np.zeros(max(room, 2 * len(self.flags)), np.uint8)
            flags[: len(self.flags)] = self.flags
            self.flags = flags

    def ids(self) -> NDArray[np.int64]:
        """The entries that have changed, in their order."""
        return np.flatnonzero(self.flags.view(np.bool_))

    def clear(self) -> None:
        self.flags[:] = 0

    def only(self, ids: NDArray[np.int64]) -> Dirty:
        """As if there were just these entries, numbered anew in their order."""
        other = Dirty()
        self.fit(int(ids.max(initial=-1)) + 1)
        other.flags = self.flags[ids]
        return other
