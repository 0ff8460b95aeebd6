"""A user's own incremental aggregate, `(zero, add, merge)`: compiled over all rows where it can be, else interpreted."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.capture import OF_THE_MACHINE, Code, described
from millpond.code.windows import Aggregate
from millpond.errors import RuleFailed
from millpond.kernels._jit import JIT_ENABLED, NO_C_ENTRY, NO_ENTRY
from millpond.stores import arithmetic

Place = tuple[str, int]
"""`longs` or `doubles`, and the number of a cell."""


class UserFold(NamedTuple):
    """`add` and `merge` over columns of cells; `reason` says why they are interpreted, if they are."""

    name: str
    cells: tuple[Place, ...]
    is_tuple: bool
    adding: Callable[..., None]
    merging: Callable[..., None]
    reason: str

    def add(
        self,
        groups: NDArray[np.int64],
        values: NDArray[Any],
        valid: NDArray[np.uint8],
        longs: NDArray[np.int64],
        doubles: NDArray[np.float64],
    ) -> None:
        self._run(self.adding, groups, values, valid, longs, doubles)

    def merge(
        self,
        entries: NDArray[np.int64],
        other_longs: NDArray[np.int64],
        other_doubles: NDArray[np.float64],
        longs: NDArray[np.int64],
        doubles: NDArray[np.float64],
    ) -> None:
        self._run(self.merging, entries, other_longs, other_doubles, longs, doubles)

    def _run(self, kernel: Callable[..., None], *arguments: Any) -> None:
        try:
            with np.errstate(all="ignore"):
                kernel(*arguments)
        except OF_THE_MACHINE:
            raise
        except Exception as error:  # noqa: BLE001 - user code
            raise RuleFailed(
                f"the aggregate {self.name!r} failed: {described(error)}", rule=self.name
            ) from None

    def result(self, longs: NDArray[np.int64], doubles: NDArray[np.float64]) -> pa.Array:
        columns = [
            pa.array((longs if kind == "longs" else doubles)[:, cell].copy()) for kind, cell in self.cells
        ]
        if not self.is_tuple:
            return columns[0]
        return pa.StructArray.from_arrays(columns, names=[f"_{n}" for n in range(1, len(columns) + 1)])


def user_fold(aggregate: Aggregate, is_double: bool, cells: tuple[Place, ...]) -> UserFold:
    """The user's aggregate, kept in these cells, of a column of doubles or of longs."""
    assert aggregate.code is not None
    assert aggregate.merge is not None
    is_tuple = not aggregate.returns
    codes = msgspec.msgpack.encode(aggregate.code), msgspec.msgpack.encode(aggregate.merge)
    adding, merging, reason = _kernels(*codes, is_double, cells, is_tuple)
    return UserFold(aggregate.code.name, cells, is_tuple, adding, merging, reason)


@lru_cache(maxsize=64)
def _kernels(
    add: bytes, merge: bytes, is_double: bool, cells: tuple[Place, ...], is_tuple: bool
) -> tuple[Callable[..., None], Callable[..., None], str]:
    """All slices of a window share one compilation."""
    codes = [msgspec.msgpack.decode(each, type=Code) for each in (add, merge)]
    add_source, merge_source = _add_source(cells, is_tuple), _merge_source(cells, is_tuple)
    interpreted = [arithmetic.interpreted(code) for code in codes]
    plain = (_defined(add_source, interpreted[0]), _defined(merge_source, interpreted[1]))
    if not JIT_ENABLED:
        return *plain, "numba's compiler is switched off"

    def wrap(function: Callable[..., Any]) -> Any:
        return numba.njit(function, nogil=True, boundscheck=True, error_model="python", **NO_ENTRY)

    kernels = []
    for code, source in zip(codes, (add_source, merge_source), strict=True):
        rule, difference = arithmetic.compiled(code, (), wrap)
        if difference:
            return *plain, f"{code.name}: {difference}"
        kernels.append(numba.njit(_defined(source, rule), nogil=True, error_model="python", **NO_C_ENTRY))
    longs, doubles = numba.int64[:, ::1], numba.float64[:, ::1]
    rows, flags = numba.int64[::1], numba.uint8[::1]
    values = numba.float64[::1] if is_double else numba.int64[::1]
    try:
        kernels[0].compile((rows, values, flags, longs, doubles))
        kernels[1].compile((rows, longs, doubles, longs, doubles))
    except OF_THE_MACHINE:
        raise
    except Exception as error:  # noqa: BLE001 - numba has errors of its own, and others where it is taken by surprise
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return *plain, first[:300] or "numba could not compile it"
    return kernels[0], kernels[1], ""


def _defined(source: str, rule: Callable[..., Any]) -> Any:
    names: dict[str, Any] = {"rule": rule}
    exec(source, names)  # noqa: S102 - our own text
    return names["kernel"]


def _kept(cells: tuple[Place, ...], is_tuple: bool, row: str, prefix: str = "") -> str:
    read = [f"{prefix}{kind}[{row}, {cell}]" for kind, cell in cells]
    return f"({', '.join(read)},)" if is_tuple else read[0]


def _writes(cells: tuple[Place, ...], is_tuple: bool) -> list[str]:
    results = [f"r[{n}]" for n in range(len(cells))] if is_tuple else ["r"]
    return [f"        {kind}[g, {cell}] = {r}" for (kind, cell), r in zip(cells, results, strict=True)]


def _add_source(cells: tuple[Place, ...], is_tuple: bool) -> str:
    return "\n".join(
        [
            "def kernel(groups, values, valid, longs, doubles):",
            "    for i in range(groups.shape[0]):",
            "        if valid.shape[0] != 0 and valid[i] == 0:",
            "            continue",
            "        g = groups[i]",
            f"        r = rule({_kept(cells, is_tuple, 'g')}, values[i])",
            *_writes(cells, is_tuple),
        ]
    )


def _merge_source(cells: tuple[Place, ...], is_tuple: bool) -> str:
    return "\n".join(
        [
            "def kernel(entries, other_longs, other_doubles, longs, doubles):",
            "    for i in range(entries.shape[0]):",
            "        g = entries[i]",
            f"        r = rule({_kept(cells, is_tuple, 'g')}, {_kept(cells, is_tuple, 'i', 'other_')})",
            *_writes(cells, is_tuple),
        ]
    )
