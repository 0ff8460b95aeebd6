"""A user's own rules, compiled with numba where that is possible, else interpreted: `arithmetic` makes both the same.

Rules see numbers as they are held: longs, doubles, booleans; dates as days, timestamps as microseconds.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numba
import numpy as np
import pyarrow as pa
from numba.core import config, types
from numba.core.errors import NumbaWarning

from millpond.code.capture import OF_THE_MACHINE, Code
from millpond.errors import BadRule
from millpond.kernels._jit import JIT_ENABLED, NO_C_ENTRY, NO_ENTRY
from millpond.kernels.folding import FIRST, FOLLOWS
from millpond.stores import arithmetic
from millpond.stores.cells import Column, Layout

"""Errors that tell of the machine and not of the rule: elsewhere, or tomorrow, there may be none."""

_COMPILING = threading.Lock()


class UserRule(NamedTuple):
    """The function as Python, the kernel that was made of it, and why there is none."""

    function: Callable[..., Any]
    kernel: Callable[..., Any] | None
    reason: str

    def run(self, *arguments: Any, failed: Callable[[int, Exception], None]) -> None:
        """Run the kernel to its end. Where the rule fails on an item `failed` is told, and the next one follows."""
        assert self.kernel is not None
        at = np.zeros(1, np.int64)
        while True:
            try:
                self.kernel(*arguments, at)
            except OF_THE_MACHINE:
                raise
            except Exception as error:  # noqa: BLE001 - user code
                failed(int(at[0]), error)
                at[0] += 1
            else:
                return

    def interpret(
        self,
        items: Iterable[tuple[int, Sequence[Any]]],
        use: Callable[[int, Any], None],
        failed: Callable[[int, Exception], None],
    ) -> None:
        """The same without a kernel: call the function with the arguments of each item, and `use` what it gives."""
        with np.errstate(all="ignore"):
            for i, arguments in items:
                try:
                    use(i, self.function(*arguments))
                except OF_THE_MACHINE:
                    raise
                except Exception as error:  # noqa: BLE001 - user code
                    failed(i, error)


def fold_rule(code: Code, values: pa.Schema, layout: Layout) -> UserRule:
    """`rule(old, new)`: two values of the State, or rows of them, made into one.

    The kernel takes `(cells, doubles, positions, step, at)`. Here and below it begins with item `at[0]`, and leaves
    there the one at which it failed.
    """
    _check_arguments(code, ("old", "new"), exact=False)
    n = len(values)
    return _rule(code, _fold_source, values, layout.columns[:n], layout.columns[n:])


def range_rule(code: Code, values: pa.Schema, layout: Layout, returns: pa.DataType) -> UserRule:
    """`rule(times, column, ...)`: the versions of one range made into one value.

    The kernel takes `(cells, doubles, begin, end, out, valid, at)`.
    """
    _check_arguments(code, ("times", *values.names), exact=True)
    if returns not in (pa.int64(), pa.float64(), pa.bool_()):
        return _interpreted_once(_key(code), f"it returns {returns}")
    return _rule(code, _fetch_source, values, layout.columns[: len(values)], (), returns)


def keep_rule(code: Code, values: pa.Schema, layout: Layout) -> UserRule:
    """`rule(times, column, ...)`: which of a key's versions below F to keep, as an array of booleans.

    The kernel takes `(cells, doubles, begin, end, offsets, kept, at)`.
    """
    _check_arguments(code, ("times", *values.names), exact=True)
    return _rule(code, _keep_source, values, layout.columns[: len(values)], ())


def row_type(names: Sequence[str]) -> Callable[..., Any]:
    """What a rule is given for the values of one update: the value itself, or a row with a field for each."""
    if len(names) == 1:
        return lambda value: value
    return _row(names)


def fitting(value: Any, type_: pa.DataType, kind: Literal["long", "double", "heap"]) -> Any:
    """What a rule gave, as a column of that type holds it; it raises where that cannot be."""
    if kind == "heap":
        return pa.scalar(value.item() if isinstance(value, np.generic) else value, type_).as_py()
    if not isinstance(value, bool | int | float | np.bool_ | np.number):
        raise TypeError(f"a rule must give a number here, not {value!r:.100}")
    if kind == "double":
        number = np.float64(value)
        return np.float64(np.float32(number)) if pa.types.is_float32(type_) else number
    if pa.types.is_boolean(type_):
        return value != 0
    whole, limit = arithmetic.whole(value), 1 << (type_.bit_width - 1)
    if not -limit <= whole < limit:
        raise OverflowError(f"{whole} does not fit {type_}")
    return whole


def _row(names: Sequence[str]) -> Callable[..., Any]:
    return namedtuple("Row", names, rename=True)  # noqa: PYI024 - its fields are known only now


def _check_arguments(code: Code, wanted: tuple[str, ...], exact: bool) -> None:
    given = _parameters(_key(code))
    if len(given) != len(wanted) or (exact and given[1:] != wanted[1:]):
        raise BadRule(
            f"the rule {code.name!r} takes ({', '.join(given)}) and is given ({', '.join(wanted)})",
            hint=f"define it as: def {code.name}({', '.join(wanted)})",
            rule=code.name,
        )


def _key(code: Code) -> bytes:
    return msgspec.msgpack.encode(code, order="sorted")


def _code(key: bytes) -> Code:
    return msgspec.msgpack.decode(key, type=Code)


@lru_cache(maxsize=256)
def _parameters(key: bytes) -> tuple[str, ...]:
    """To read a rule's text takes longer than most answers."""
    return tuple(inspect.signature(_code(key).load()).parameters)


@lru_cache(maxsize=256)
def _interpreted_once(key: bytes, reason: str) -> UserRule:
    """A fetch asks for its rule in every slice; it is read only once."""
    return _interpreted(_code(key), reason)


def _interpreted(code: Code, reason: str) -> UserRule:
    return UserRule(arithmetic.interpreted(code), None, reason)


def _rule(
    code: Code,
    source: Callable[..., str],
    values: pa.Schema,
    updates: Sequence[Column],
    folded: Sequence[Column],
    returns: pa.DataType | None = None,
) -> UserRule:
    """The slices of a State share one compilation."""
    return _compiled(_key(code), source, tuple(values.names), tuple(updates), tuple(folded), returns)


@lru_cache(maxsize=256)
def _compiled(
    key: bytes,
    source: Callable[..., str],
    names: tuple[str, ...],
    updates: tuple[Column, ...],
    folded: tuple[Column, ...],
    returns: pa.DataType | None,
) -> UserRule:
    code = _code(key)
    if not JIT_ENABLED:
        return _interpreted(code, "numba's compiler is switched off")
    for column in (*updates, *folded):
        if column.kind == "heap":
            return _interpreted(code, f"column {column.field.name!r} is {column.field.type}")
    functions: list[Any] = []

    def wrap(function: Callable[..., Any]) -> Any:
        functions.append(numba.njit(function, nogil=True, boundscheck=True, error_model="python", **NO_ENTRY))
        return functions[-1]

    rule, difference = arithmetic.compiled(code, names if len(folded) > 1 else (), wrap)
    if difference:
        return _interpreted(code, difference)
    given: dict[str, Any] = {"np": np, "FIRST": FIRST, "FOLLOWS": FOLLOWS, "whole": arithmetic.whole}
    given |= {"Row": _row(names), "rule": rule}
    exec(source(updates, folded, returns), given)  # noqa: S102 - our own text
    kernel = numba.njit(given["kernel"], nogil=True, error_model="python", **NO_C_ENTRY)
    try:
        with _names_must_be_set():
            kernel.compile(_arguments(source, returns))
    except OF_THE_MACHINE:
        raise
    except Exception as error:  # noqa: BLE001 - numba has errors of its own, and others where it is taken by surprise
        return _interpreted(code, _first_line(error))
    if any(map(arithmetic.mixes, functions)):
        return _interpreted(code, "one name in it stands for longs and for doubles")
    for compilation in rule.overloads.values():
        if not _fits(compilation.signature.return_type, source, len(folded)):
            return _interpreted(code, f"it returns {compilation.signature.return_type}")
    return UserRule(arithmetic.interpreted(code), kernel, "")


@contextmanager
def _names_must_be_set() -> Iterator[None]:
    """A name that may not have been set is an error in Python; compiled, it would be anything."""
    settings: Any = config
    with _COMPILING, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected uninitialized variable", NumbaWarning)
        # In the rule itself: functions of numba have such names, too, and set them.
        warnings.filterwarnings("error", "(?s)Detected uninitialized variable.*<rule ", NumbaWarning)
        before, settings.ALWAYS_WARN_UNINIT_VAR = settings.ALWAYS_WARN_UNINIT_VAR, 1
        try:
            yield
        finally:
            settings.ALWAYS_WARN_UNINIT_VAR = before


def _first_line(error: Exception) -> str:
    """The part of numba's message that tells the cause, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("Failed in", "During:", "File "))]
    return (telling or lines or ["numba could not compile it"])[0][:300]


def _arguments(source: Callable[..., str], returns: pa.DataType | None) -> tuple[types.Type, ...]:
    """The types of a kernel's arguments."""
    cells, doubles = types.int64[:, ::1], types.float64[:, ::1]
    longs, flags = types.int64[::1], types.uint8[::1]
    if source is _fold_source:
        return cells, doubles, longs, flags, longs
    if source is _keep_source:
        return cells, doubles, longs, longs, longs, flags, longs
    out = types.float64[::1] if returns == pa.float64() else longs
    return cells, doubles, longs, longs, out, flags, longs


def _fits(given: Any, source: Callable[..., str], columns: int) -> bool:
    """Whether what a rule returns can be nothing but numbers, as many as are needed."""
    parts = [given]
    if source is _keep_source:
        if not (isinstance(given, types.List) or (isinstance(given, types.Array) and given.ndim == 1)):
            return False
        parts = [given.dtype]
    elif columns > 1:
        parts = list(getattr(given, "types", ()))
        if len(parts) != columns:
            return False
    plain = (types.int64, types.float64, types.boolean)
    return all(getattr(part, "literal_type", part) in plain for part in parts)


def _read(column: Column, at: str) -> str:
    if column.kind == "double":
        return f"doubles[{at}, {column.cell}]"
    if pa.types.is_boolean(column.field.type):
        return f"(cells[{at}, {column.cell}] != 0)"
    return f"cells[{at}, {column.cell}]"


def _write(column: Column, value: str) -> list[str]:
    """As `fitting`."""
    type_ = column.field.type
    if pa.types.is_float32(type_):
        return [f"doubles[p, {column.cell}] = np.float32(np.float64({value}))"]
    if column.kind == "double":
        return [f"doubles[p, {column.cell}] = {value}"]
    if pa.types.is_boolean(type_):
        return [f"cells[p, {column.cell}] = {value} != 0"]
    limit = 1 << (type_.bit_width - 1)
    return [
        f"n = whole({value})",
        f"if n < {-limit} or n > {limit - 1}:",
        f"    raise OverflowError('the number does not fit {type_}')",
        f"cells[p, {column.cell}] = n",
    ]


def _fold_source(updates: Sequence[Column], folded: Sequence[Column], returns: None) -> str:
    pairs = list(zip(updates, folded, strict=True))
    old = ", ".join(_read(column, "q") for column in folded)
    new = ", ".join(_read(column, "p") for column in updates)
    results = ["r"]
    if len(pairs) > 1:
        old, new = f"Row({old})", f"Row({new})"
        results = [f"r[{i}]" for i in range(len(pairs))]
    copies = [f"cells[p, {to.cell}] = cells[p, {of.cell}]" for of, to in pairs]
    writes = [line for column, value in zip(folded, results, strict=True) for line in _write(column, value)]
    lines = [
        "def kernel(cells, doubles, positions, step, at):",
        "    for i in range(at[0], positions.shape[0]):",
        "        at[0] = i",
        "        p = positions[i]",
        "        if step[i] == FIRST:",
        *(f"            {line}" for line in copies),
        "        elif step[i] == FOLLOWS:",
        "            q = positions[i - 1]",
        f"            r = rule({old}, {new})",
        *(f"            {line}" for line in writes),
    ]
    return "\n".join(lines)


def _ranged(updates: Sequence[Column]) -> str:
    """The arguments of a rule over a range: the times, then each column; copies, for the rule may write to them."""
    return ", ".join(["cells[b:e, 0].copy()", *(f"{_read(column, 'b:e')}.copy()" for column in updates)])


def _fetch_source(updates: Sequence[Column], folded: Sequence[Column], returns: pa.DataType) -> str:
    result = {pa.int64(): "whole(r)", pa.float64(): "r", pa.bool_(): "r != 0"}[returns]
    lines = [
        "def kernel(cells, doubles, begin, end, out, valid, at):",
        "    for i in range(at[0], begin.shape[0]):",
        "        at[0] = i",
        "        b, e = begin[i], end[i]",
        "        valid[i] = b < e",
        "        out[i] = 0",
        "        if b < e:",
        f"            r = rule({_ranged(updates)})",
        f"            out[i] = {result}",
    ]
    return "\n".join(lines)


def _keep_source(updates: Sequence[Column], folded: Sequence[Column], returns: None) -> str:
    lines = [
        "def kernel(cells, doubles, begin, end, offsets, kept, at):",
        "    for i in range(at[0], begin.shape[0]):",
        "        at[0] = i",
        "        b, e = begin[i], end[i]",
        "        if b < e:",
        f"            mask = rule({_ranged(updates)})",
        "            if len(mask) != e - b:",
        "                raise ValueError('the rule must give one boolean for each version')",
        "            for j in range(e - b):",
        "                kept[offsets[i] + j] = mask[j] != 0",
    ]
    return "\n".join(lines)
