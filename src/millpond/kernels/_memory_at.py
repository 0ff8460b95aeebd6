"""Arrays by their addresses: what numba takes for an argument costs a fraction of a microsecond, and slices have many."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels._jit import JIT_ENABLED, inlined


def _emit_pointer(_typing: Any, _address: Any) -> Any:
    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), emit


def _interpreted_pointer(address: int) -> Any:
    """What `carray` takes without the compiler."""
    return ctypes.c_void_p(int(address))


_pointer = cast(Callable[[int], Any], intrinsic(_emit_pointer) if JIT_ENABLED else _interpreted_pointer)

_carray: Any = vars(numba)["carray"]


@inlined
def longs_at(address: int, count: int) -> NDArray[np.int64]:
    """The longs at an address. Whoever gives it keeps them where they are."""
    return _carray(_pointer(address), (count,), np.int64)  # type: ignore[no-any-return]


@inlined
def doubles_at(address: int, count: int) -> NDArray[np.float64]:
    return _carray(_pointer(address), (count,), np.float64)  # type: ignore[no-any-return]


@inlined
def rows_at(address: int, rows: int, width: int) -> NDArray[np.int64]:
    return _carray(_pointer(address), (rows, width), np.int64)  # type: ignore[no-any-return]


@inlined
def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    return _carray(_pointer(address), (count,), np.uint8)  # type: ignore[no-any-return]
