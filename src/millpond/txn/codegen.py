"""The kernels of a program, as source text: one that finds the keys of each kind, one that runs all kinds.

Kernels take arrays and numbers only, in the order of their parameters' names. The text alone decides what a kernel
does, so equal programs share one compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from millpond.kernels._jit import JIT_ENABLED
from millpond.txn._arithmetic import NAMES
from millpond.txn._bodycode import BodyCode
from millpond.txn._code import FIRST_ABORT, CannotCompile, Field, Type, Writer
from millpond.txn._keycode import UNKNOWN, KeyCode
from millpond.txn._statements import TableLayout
from millpond.txn.facts import Analysis
from millpond.usercode import Code

ABORTS_PER_KIND = 1024
_LOG_FIRST = 256


@dataclass(frozen=True)
class Function:
    """A function and the types of its fields: what is compiled."""

    found: Analysis
    code: Code
    fields: Mapping[str, Field]


@dataclass(frozen=True)
class KeyKernel:
    """`(lo, hi, room, strings, fields...)` gives `flat, end, offsets` and, unless dense, `keys, places, count` per table.

    A place is doubled, plus one where the function may write to the row. `room` is for that many places, more is
    made if need be.
    """

    source: str
    parameters: tuple[str, ...]
    tables: tuple[int, ...]
    dense: bool


@dataclass(frozen=True)
class BodyKernel:
    """`(todo, kinds, index, status, detail, strings, parts, part, cells..., kinds...)`; changes cells and outputs."""

    source: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class Compiled:
    """All that is known of a program before its first event."""

    keys: tuple[KeyKernel, ...]
    body: BodyKernel
    apart: BodyKernel | None
    reasons: Mapping[int, str]
    results: tuple[tuple[Type, ...], ...]
    strings: tuple[str, ...]


def generate(
    functions: Sequence[Function], tables: Mapping[str, TableLayout], decoupled: bool, alone: bool
) -> Compiled:
    """The kernels of functions that can all be compiled; CannotCompile says which line cannot.

    `decoupled` asks for the form whose operations run apart. `alone` says that no other kind is in the epoch.
    """
    strings: list[str] = []
    keys = tuple(_key_kernel(kind, function, tables, strings) for kind, function in enumerate(functions))
    made = [_body(kind, function, tables, strings, False) for kind, function in enumerate(functions)]
    apart = None
    if decoupled:
        parts = [_body(kind, function, tables, strings, True) for kind, function in enumerate(functions)]
        apart = _body_kernel(functions, tables, parts, alone)
    reasons = {
        FIRST_ABORT + ABORTS_PER_KIND * kind + number: text
        for kind, one in enumerate(made)
        for number, text in enumerate(one.reasons)
    }
    results = tuple(one.results for one in made)
    return Compiled(
        keys, _body_kernel(functions, tables, made, alone), apart, reasons, results, tuple(strings)
    )


def check(function: Function, tables: Mapping[str, TableLayout]) -> CannotCompile | None:
    """Why the function cannot be compiled. BadTransaction if it cannot run at all."""
    try:
        _key_kernel(0, function, tables, [])
        _body(0, function, tables, [], False)
    except CannotCompile as finding:
        return finding
    return None


@lru_cache(maxsize=256)
def kernel(source: str, name: str) -> Callable[..., Any]:
    """The function of that text, compiled on its first call; without the compiler, as it is."""
    given: dict[str, Any] = {**NAMES, "longer": longer}
    exec(compile(source, f"<{name} of transactions>", "exec"), given)  # noqa: S102 - our own text
    if not JIT_ENABLED:
        return _quiet(given[name])
    found: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(given[name])
    return found


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's scalars warn of what doubles do silently."""

    def interpreted(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return interpreted


def _longer(array: NDArray[np.int64], used: int, room: int, fill: int) -> NDArray[np.int64]:
    """The array with more room, `fill` in it."""
    out = np.full(room, fill, np.int64)
    out[:used] = array[:used]
    return out


longer = numba.njit(nogil=True)(_longer) if JIT_ENABLED else _longer


def field_parameters(kind: int, function: Function) -> list[str]:
    """The names of the arrays of an event's fields; `o...` are the offsets of a list."""
    out = []
    for name, field in function.fields.items():
        out.append(f"k{kind}_{name}")
        if field.is_list:
            out.append(f"o{kind}_{name}")
    return out


def _key_kernel(
    kind: int, function: Function, tables: Mapping[str, TableLayout], strings: list[str]
) -> KeyKernel:
    def event(dense: bool) -> tuple[KeyCode, list[str], bool]:
        write = Writer(depth=2)
        code = KeyCode(kind, function.found, function.code, function.fields, tables, write, strings)
        found = code.event(dense)
        return code, write.lines, found

    code, lines, dense = event(False)
    if dense:
        code, lines, _ = event(True)
    numbers = tuple(sorted({tables[slot.table].number for slot in function.found.slots}))
    fields = field_parameters(kind, function)
    size = code.first_frame
    out = Writer()
    with out.under(f"def keys(lo, hi, room, strings, {', '.join(fields)}):"):
        out(f"flat = np.full({'room' if code.has_frames else f'(hi - lo) * {size}'}, {UNKNOWN}, np.int64)")
        out(f"offsets = np.empty({'hi - lo' if code.has_frames else '0'}, np.int64)")
        if not dense:
            for number in numbers:
                out(f"key_{number} = np.empty(flat.shape[0], np.int64)")
                out(f"at_{number} = np.empty(flat.shape[0], np.int64)")
                out(f"m_{number} = 0")
        out("end = 0")
        out("st = 0")
        with out.under("for i in range(lo, hi):"):
            out("fr0 = end")
            if code.has_frames:
                out("offsets[i - lo] = end")
                with out.under(f"if end + {size} > flat.shape[0]:"):
                    out(f"room = 2 * (end + {size})")
                    out(f"flat = longer(flat, end, room, {UNKNOWN})")
                    for number in numbers:
                        out(f"key_{number} = longer(key_{number}, m_{number}, room, 0)")
                        out(f"at_{number} = longer(at_{number}, m_{number}, room, 0)")
            out(f"end += {size}")
            out("st = 0")
            out.lines += lines
        found = ["flat", "end", "offsets"]
        if not dense:
            found += [f"{name}_{number}" for number in numbers for name in ("key", "at", "m")]
        out(f"return {', '.join(found)}")
    return KeyKernel("\n".join(out.lines), ("lo", "hi", "room", "strings", *fields), numbers, dense)


@dataclass
class _Body:
    write: Writer
    code: BodyCode
    reasons: list[str]
    results: tuple[Type, ...]


def _body(
    kind: int,
    function: Function,
    tables: Mapping[str, TableLayout],
    strings: list[str],
    apart: bool,
) -> _Body:
    """The code of one kind. The first pass finds the types of the results, and whether a log is needed."""

    def event(results: list[Type] | None, logs: bool) -> _Body:
        # Variables of all kinds share one kernel, where each has one type: the numbers of no two meet.
        write = Writer(depth=3, count=kind * 1_000_000)
        code = BodyCode(kind, function.found, function.code, function.fields, tables, write, strings)
        code.apart_by_row, code.logs = apart, logs
        code.first_abort = FIRST_ABORT + ABORTS_PER_KIND * kind
        code.event(results)
        return _Body(write, code, code.reasons, tuple(results or ()))

    first = event(None, True).code
    results: list[Type] = []
    for types in zip(*first.returned, strict=True):
        results += [first.ex.joined(function.found.tree, list(types))]
    return event(results, first.needs_log)


def _body_kernel(
    functions: Sequence[Function], tables: Mapping[str, TableLayout], made: Sequence[_Body], alone: bool
) -> BodyKernel:
    numbers = sorted(layout.number for layout in tables.values())
    parameters = ["todo", "kinds", "index", "status", "detail", "strings", "parts", "part"]
    parameters += [f"{name}_{number}" for number in numbers for name in ("c", "d")]
    for kind, (function, one) in enumerate(zip(functions, made, strict=True)):
        parameters += [*field_parameters(kind, function), f"flat_{kind}", f"events_{kind}"]
        parameters += [f"out{kind}_{place}" for place in range(len(one.results))]
    out = Writer()
    with out.under(f"def body({', '.join(parameters)}):"):
        out(f"log_at = np.empty({_LOG_FIRST}, np.int64)")
        out(f"log_old = np.empty({_LOG_FIRST}, np.int64)")
        with out.under("for q in range(todo.shape[0]):"):
            out("e = todo[q]")
            out("i = e" if alone else "i = index[e]")
            out("n_log = 0")
            out("st = 0")
            if len(made) > 1:
                out("k = kinds[e]")
            for kind, one in enumerate(made):
                with out.under(
                    f"{'if' if kind == 0 else 'elif'} {f'k == {kind}' if len(made) > 1 else 'True'}:"
                ):
                    out.lines += one.write.lines
            with out.under("if st != 0:"):
                out("status[e] = st")
                with out.under("while st > 0 and n_log > 0:"):
                    _undo(out, tables)
    return BodyKernel("\n".join(out.lines), tuple(parameters))


def _undo(out: Writer, tables: Mapping[str, TableLayout]) -> None:
    width = max(layout.width for layout in tables.values())
    out("n_log -= 1")
    out(f"place = log_at[n_log] // {len(tables)}")
    out(f"of = log_at[n_log] % {len(tables)}")
    for layout in tables.values():
        with out.under(f"if of == {layout.number}:"):
            out(f"c_{layout.number}[place // {width}, place % {width}] = log_old[n_log]")
