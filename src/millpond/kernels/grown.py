"""Arrays that grow in compiled code: what tasks of programs hand on, of lists and vectors the items of all calls."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numba import types
from numba.experimental import structref
from numpy.typing import NDArray

from millpond.kernels._jit import JIT_ENABLED, jit

_FIELDS: list[tuple[str, Any]] = [
    ("longs", types.int64[::1]),
    ("doubles", types.float64[::1]),
    ("used", types.int64),
]


class Grown(structref.StructRefProxy):
    """What Python holds of them."""


@structref.register
class GrownType(types.StructRef):
    """What compiled code holds of them."""


_structref: Any = structref  # without types
_structref.define_boxing(GrownType, Grown)
GROWN: Any = cast(Any, GrownType)(_FIELDS)

if JIT_ENABLED:

    @jit
    def new_grown(longs: NDArray[np.int64], doubles: NDArray[np.float64]) -> Any:
        grown: Any = _structref.new(GROWN)
        grown.longs = longs
        grown.doubles = doubles
        grown.used = 0
        return grown

else:

    class _Plain:
        """The same where nothing is compiled."""

    def new_grown(longs: NDArray[np.int64], doubles: NDArray[np.float64]) -> Any:
        grown: Any = _Plain()
        grown.longs, grown.doubles, grown.used = longs, doubles, 0
        return grown


@jit
def contents(grown: Any) -> Any:
    """Its arrays, and how much of them is used."""
    return grown.longs, grown.doubles, grown.used


@jit
def cut(grown: Any, used: int) -> None:
    """Only so much of it is used."""
    grown.used = used


@jit
def put_longs(grown: Any, longs: NDArray[np.int64]) -> None:
    used = grown.used
    end = used + len(longs)
    if end > len(grown.longs):
        more = np.empty(max(end, 2 * len(grown.longs)), np.int64)
        more[:used] = grown.longs[:used]
        grown.longs = more
    grown.longs[used:end] = longs
    grown.used = end


@jit
def put_doubles(grown: Any, doubles: NDArray[np.float64]) -> None:
    used = grown.used
    end = used + len(doubles)
    if end > len(grown.doubles):
        more = np.empty(max(end, 2 * len(grown.doubles)), np.float64)
        more[:used] = grown.doubles[:used]
        grown.doubles = more
    grown.doubles[used:end] = doubles
    grown.used = end


@jit
def put_entries(grown: Any, keys: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    used = grown.used
    put_longs(grown, keys)
    grown.used = used
    put_doubles(grown, values)
