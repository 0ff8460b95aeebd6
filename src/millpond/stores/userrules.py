"""A user's own rules, compiled with numba where that is possible, else interpreted.

Rules see numbers as they are held: longs, doubles, booleans; dates as days, timestamps as microseconds.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numba
import numpy as np
import pyarrow as pa
from numba.core.errors import NumbaError

from millpond.code.capture import Code
from millpond.errors import BadRule
from millpond.kernels._jit import JIT_ENABLED
from millpond.kernels.folding import FIRST, FOLLOWS
from millpond.stores.cells import Column, Layout


class UserRule(NamedTuple):
    """The function as Python, the kernel that was made of it, and why there is none."""

    function: Callable[..., Any]
    kernel: Callable[..., Any] | None
    reason: str


def fold_rule(code: Code, values: pa.Schema, layout: Layout) -> UserRule:
    """`rule(old, new)`: two values of the State, or rows of them, made into one.

    The kernel takes `(cells, doubles, positions, step)`, and returns on how many updates the rule failed.
    """
    _check_arguments(code, ("old", "new"), exact=False)
    n = len(values)
    return _rule(code, _fold_source, values, layout.columns[:n], layout.columns[n:])


def fetch_rule(code: Code, values: pa.Schema, layout: Layout, returns: pa.DataType) -> UserRule:
    """`rule(times, column, ...)`: the versions of one range made into one value.

    The kernel takes `(cells, doubles, begin, end, out, valid)`.
    """
    _check_arguments(code, ("times", *values.names), exact=True)
    if not (returns in (pa.int64(), pa.float64()) or pa.types.is_boolean(returns)):
        return _interpreted(code, f"it returns {returns}")
    out = "f8" if pa.types.is_float64(returns) else "i8"
    return _rule(code, _fetch_source, values, layout.columns[: len(values)], (), out)


def keep_rule(code: Code, values: pa.Schema, layout: Layout) -> UserRule:
    """`rule(times, column, ...)`: which of a key's versions below F to keep, as an array of booleans.

    The kernel takes `(cells, doubles, begin, end, offsets, kept)`.
    """
    _check_arguments(code, ("times", *values.names), exact=True)
    return _rule(code, _keep_source, values, layout.columns[: len(values)], ())


def row_type(names: Sequence[str]) -> Callable[..., Any]:
    """What a rule is given for the values of one update: the value itself, or a row with a field for each."""
    if len(names) == 1:
        return lambda value: value
    return _row(names)


def _row(names: Sequence[str]) -> Callable[..., Any]:
    return namedtuple("Row", names, rename=True)  # noqa: PYI024 - its fields are known only now


def _check_arguments(code: Code, wanted: tuple[str, ...], exact: bool) -> None:
    given = tuple(inspect.signature(code.load()).parameters)
    if len(given) != len(wanted) or (exact and given[1:] != wanted[1:]):
        raise BadRule(
            f"the rule {code.name!r} takes ({', '.join(given)}) and is given ({', '.join(wanted)})",
            hint=f"define it as: def {code.name}({', '.join(wanted)})",
            rule=code.name,
        )


def _interpreted(code: Code, reason: str) -> UserRule:
    return UserRule(code.load(), None, reason)


def _rule(
    code: Code,
    source: Callable[..., str],
    values: pa.Schema,
    updates: Sequence[Column],
    folded: Sequence[Column],
    out: str = "",
) -> UserRule:
    """The slices of a State share one compilation."""
    key = msgspec.msgpack.encode(code, order="sorted")
    return _compiled(key, source, tuple(values.names), tuple(updates), tuple(folded), out)


@lru_cache(maxsize=256)
def _compiled(
    key: bytes,
    source: Callable[..., str],
    names: tuple[str, ...],
    updates: tuple[Column, ...],
    folded: tuple[Column, ...],
    out: str,
) -> UserRule:
    code = msgspec.msgpack.decode(key, type=Code)
    if not JIT_ENABLED:
        return _interpreted(code, "numba's compiler is switched off")
    for column in (*updates, *folded):
        if column.kind == "heap":
            return _interpreted(code, f"column {column.field.name!r} is {column.field.type}")
    text = source(updates, folded)
    given: dict[str, Any] = {"np": np, "FIRST": FIRST, "FOLLOWS": FOLLOWS}
    given["Row"] = _row(names)
    given["rule"] = code.load(lambda function: numba.njit(function, nogil=True, boundscheck=True))
    exec(text, given)  # noqa: S102 - our own text
    kernel = numba.njit(given["kernel"], nogil=True)
    try:
        kernel(*_example(source, max(c.cell for c in (*updates, *folded)) + 1, out))
    except NumbaError as error:
        return _interpreted(code, _first_line(error))
    except Exception as error:  # noqa: BLE001 - a rule that fails on the example compiles, and may fail on real rows
        if not kernel.signatures:
            return _interpreted(code, f"{type(error).__name__}: {error}")
    return UserRule(code.load(), kernel, "")


def _first_line(error: NumbaError) -> str:
    """The part of numba's message that tells the cause, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Failed in", "During:", "File "))]
    return (telling or lines or ["numba could not compile it"])[0][:300]


def _example(source: Callable[..., str], width: int, out: str) -> tuple[Any, ...]:
    """Arguments of the types that the kernel will meet: two versions of ones."""
    cells = np.ones((2, width), np.int64)
    doubles = cells.astype(np.float64)
    positions = np.arange(2)
    if source is _fold_source:
        return cells, doubles, positions, np.array([FIRST, FOLLOWS], np.uint8)
    begin, end = np.zeros(1, np.int64), np.full(1, 2)
    if source is _keep_source:
        return cells, doubles, begin, end, np.array([0, 2]), np.zeros(2, np.uint8)
    return cells, doubles, begin, end, np.zeros(1, out), np.zeros(1, np.uint8)


def _read(column: Column, at: str) -> str:
    if column.kind == "double":
        return f"doubles[{at}, {column.cell}]"
    if pa.types.is_boolean(column.field.type):
        return f"(cells[{at}, {column.cell}] != 0)"
    return f"cells[{at}, {column.cell}]"


def _write(column: Column, value: str) -> str:
    type_ = column.field.type
    if pa.types.is_float32(type_):
        return f"doubles[p, {column.cell}] = np.float32({value})"
    if column.kind == "double":
        return f"doubles[p, {column.cell}] = {value}"
    if pa.types.is_boolean(type_):
        return f"cells[p, {column.cell}] = {value} != 0"
    return f"cells[p, {column.cell}] = np.int{type_.bit_width}({value})"


def _fold_source(updates: Sequence[Column], folded: Sequence[Column]) -> str:
    pairs = list(zip(updates, folded, strict=True))
    old = ", ".join(_read(column, "q") for column in folded)
    new = ", ".join(_read(column, "p") for column in updates)
    if len(pairs) > 1:
        old, new = f"Row({old})", f"Row({new})"
        results = [_write(column, f"r[{i}]") for i, (_, column) in enumerate(pairs)]
    else:
        results = [_write(folded[0], "r")]
    copies = [f"cells[p, {to.cell}] = cells[p, {of.cell}]" for of, to in pairs]
    stays = [f"cells[p, {column.cell}] = cells[q, {column.cell}]" for column in folded]
    lines = [
        "def kernel(cells, doubles, positions, step):",
        "    failures = 0",
        "    for i in range(positions.shape[0]):",
        "        p = positions[i]",
        "        if step[i] == FIRST:",
        *(f"            {line}" for line in copies),
        "        elif step[i] == FOLLOWS:",
        "            q = positions[i - 1]",
        "            try:",
        f"                r = rule({old}, {new})",
        *(f"                {line}" for line in results),
        "            except Exception:",
        "                failures += 1",
        *(f"                {line}" for line in stays),
        "    return failures",
    ]
    return "\n".join(lines)


def _ranged(updates: Sequence[Column]) -> str:
    """The arguments of a rule over a range: the times, then each column; copies, for the rule may write to them."""
    return ", ".join(["cells[b:e, 0].copy()", *(f"{_read(column, 'b:e')}.copy()" for column in updates)])


def _fetch_source(updates: Sequence[Column], folded: Sequence[Column]) -> str:
    lines = [
        "def kernel(cells, doubles, begin, end, out, valid):",
        "    for i in range(begin.shape[0]):",
        "        b, e = begin[i], end[i]",
        "        valid[i] = b < e",
        "        out[i] = 0",
        "        if b < e:",
        f"            out[i] = rule({_ranged(updates)})",
    ]
    return "\n".join(lines)


def _keep_source(updates: Sequence[Column], folded: Sequence[Column]) -> str:
    lines = [
        "def kernel(cells, doubles, begin, end, offsets, kept):",
        "    for i in range(begin.shape[0]):",
        "        b, e = begin[i], end[i]",
        "        if b < e:",
        f"            mask = rule({_ranged(updates)})",
        "            if len(mask) != e - b:",
        "                raise ValueError('the rule must give one boolean for each version')",
        "            for j in range(e - b):",
        "                kept[offsets[i] + j] = mask[j]",
    ]
    return "\n".join(lines)
