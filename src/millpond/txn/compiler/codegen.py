"""The kernels of a set of transactions, as source text: one that finds the keys of each kind, one that runs all kinds.

`arguments` says what kernels take. The text alone decides what a kernel
does, so equal sets share one compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.code.capture import Code
from millpond.code.tables import Type
from millpond.kernels._jit import JIT_ENABLED
from millpond.stores.tables import Column, TableLayout
from millpond.txn.compiler import arguments
from millpond.txn.compiler.arithmetic import NAMES
from millpond.txn.compiler.bodycode import LOG_FIRST, BodyCode
from millpond.txn.compiler.cache import digest, kept_source, lazily_compiled
from millpond.txn.compiler.facts import Analysis
from millpond.txn.compiler.keycode import UNKNOWN, KeyCode
from millpond.txn.compiler.latecode import LateCode
from millpond.txn.compiler.values import FIRST_ABORT, FULL, NO_ROOM, CannotCompile, CodeWriter, EventField

ABORTS_PER_KIND = 1024


@dataclass(frozen=True)
class TypedFunction:
    """A function and the types of its fields: what is compiled."""

    found: Analysis
    code: Code
    fields: Mapping[str, EventField]
    results: tuple[Column | None, ...] = ()  # what they were said to be


@dataclass(frozen=True)
class KeyKernel:
    """Gives `end, touches`, and for each table `keys, places, count`.

    Rows that are known are put in their places in `flat` at once; the others' keys are given, with their places, doubled,
    plus one where the function may write to the row. Where `flat` is too short, the end is minus what the next event
    needs at least.
    """

    source: str
    parameters: tuple[str, ...]
    tables: tuple[int, ...]


@dataclass(frozen=True)
class BodyKernel:
    """Changes cells and outputs; gives how many events it has done. It has not done all where `room` cells are too few
    to undo the next one; where a row has no place, it gives ~done.
    """

    source: str
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class CompiledSet:
    """All that is known of functions before its first event."""

    keys: tuple[KeyKernel | None, ...]  # none for a kind that finds its rows late
    body: BodyKernel
    apart: BodyKernel | None
    reasons: Mapping[int, str]
    results: tuple[tuple[Type, ...], ...]
    strings: tuple[str, ...]


def generate(
    functions: Sequence[TypedFunction], tables: Mapping[str, TableLayout], decoupled: bool, alone: bool
) -> CompiledSet:
    """The kernels of functions that can all be compiled; CannotCompile says which line cannot.

    `decoupled` asks for the form whose operations run apart. `alone` says that no other kind is in the epoch.
    """
    strings: list[str] = []
    keys = tuple(
        None if function.found.is_late else _key_kernel(kind, function, tables, strings)
        for kind, function in enumerate(functions)
    )
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
    return CompiledSet(
        keys, _body_kernel(functions, tables, made, alone), apart, reasons, results, tuple(strings)
    )


def check(function: TypedFunction, tables: Mapping[str, TableLayout]) -> CannotCompile | None:
    """Why the function cannot be compiled. BadTransaction if it cannot run at all."""
    try:
        if not function.found.is_late:
            _key_kernel(0, function, tables, [])
        _body(0, function, tables, [], False)
    except CannotCompile as finding:
        return finding
    return None


@lru_cache(maxsize=256)
def kernel(source: str, name: str) -> Callable[..., Any]:
    """The function of that text, compiled on its first call; without the compiler, as it is."""
    given = {**NAMES, "__name__": __name__}
    if not JIT_ENABLED:
        exec(compile(source, f"<{name} of transactions>", "exec"), given)  # noqa: S102 - our own text
        return _quiet(given[name])
    file = kept_source(source)
    exec(compile(source, file or f"<{name} of transactions>", "exec"), given)  # noqa: S102 - our own text
    # Numba links what functions refer to by their names and a number that counts per process: of two that were compiled
    # by two processes and are loaded into a third, one would get the other's constants.
    given[name].__qualname__ = f"{name}_{digest(source)}"
    return lazily_compiled(given[name], file)


def _quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """NumPy's scalars warn of what doubles do silently."""

    def interpreted(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*args)

    return interpreted


def run_body(
    body: BodyKernel,
    given: Mapping[str, Any],
    todo: NDArray[np.int64],
    more: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Runs events, in this order. `more` makes room for rows, and gives the arguments that have changed."""
    room = LOG_FIRST
    while True:
        args = {**given, "todo": todo, "room": room}
        done = kernel(body.source, "body")(*(args[name] for name in body.parameters))
        if done == len(todo):
            return
        if done >= 0:
            todo, room = todo[done:], 4 * room
        else:
            assert more is not None, "a kind that finds its rows late runs serially"
            todo, given = todo[~done:], {**given, **more()}


def _key_kernel(
    kind: int, function: TypedFunction, tables: Mapping[str, TableLayout], strings: list[str]
) -> KeyKernel:
    numbers = tuple(sorted({tables[slot.table].number for slot in function.found.slots}))
    found = ["end", "touches"]
    found += [f"{name}_{number}" for number in numbers for name in ("key", "at", "m")]
    give_up = f"return {', '.join(found)}"
    write = CodeWriter(depth=2)
    code = KeyCode(kind, function.found, function.code, function.fields, tables, write, strings)
    code.give_up = give_up
    code.event()
    size = code.first_frame
    parameters = arguments.of_key_kernel(kind, function.fields, numbers)
    out = CodeWriter()
    with out.under(f"def keys({', '.join(parameters)}):"):
        for number in numbers:
            parts = next(len(layout.keys) for layout in tables.values() if layout.number == number)
            out(f"key_{number} = np.empty((flat.shape[0], {parts}), np.int64)")
            out(f"at_{number} = np.empty(flat.shape[0], np.int64)")
            out(f"m_{number} = 0")
        out("touches = 0")
        out("end = 0")
        out("st = 0")
        with out.under("for i in range(lo, hi):"):
            out("fr0 = end")
            if code.has_frames:
                out("offsets[i - lo] = end")
                with out.under(f"if end + {size} > flat.shape[0]:"):
                    out(f"end = -(end + {size})")
                    out(give_up)
            out(f"end += {size}")
            with out.under("for at in range(fr0, end):"):
                out(f"flat[at] = {UNKNOWN}")
            out("st = 0")
            out.lines += write.lines
        out(give_up)
    return KeyKernel("\n".join(out.lines), parameters, numbers)


@dataclass
class _Body:
    write: CodeWriter
    code: BodyCode
    reasons: list[str]
    results: tuple[Type, ...]


def _body(
    kind: int,
    function: TypedFunction,
    tables: Mapping[str, TableLayout],
    strings: list[str],
    apart: bool,
) -> _Body:
    """The code of one kind. The first pass finds the types of the results, and whether a log is needed."""

    def event(results: list[Type] | None, logs: bool) -> _Body:
        # Variables of all kinds share one kernel, where each has one type: the numbers of no two meet.
        write = CodeWriter(depth=3, count=kind * 1_000_000)
        made = LateCode if function.found.is_late else BodyCode
        code = made(kind, function.found, function.code, function.fields, tables, write, strings)
        code.apart_by_row, code.logs = apart, logs
        code.declared = function.results or (None,) * function.found.width
        code.first_abort = FIRST_ABORT + ABORTS_PER_KIND * kind
        code.event(results)
        return _Body(write, code, code.reasons, tuple(results or ()))

    first = event(None, True).code
    results: list[Type] = []
    for place in range(function.found.width):
        joined = first.ex.joined(function.found.tree, first.returned.get(place, ["long"]))
        results.append("double" if joined == "number" else joined)
    return event(results, first.needs_log)


def _body_kernel(
    functions: Sequence[TypedFunction], tables: Mapping[str, TableLayout], made: Sequence[_Body], alone: bool
) -> BodyKernel:
    numbers = sorted(layout.number for layout in tables.values())
    parameters = arguments.of_body_kernel(
        numbers,
        [function.fields for function in functions],
        [len(one.results) for one in made],
        [function.found.is_late for function in functions],
        set().union(*(one.code.uses for one in made)),
    )
    out = CodeWriter()
    with out.under(f"def body({', '.join(parameters)}):"):
        out("log_at = np.empty(room, np.int64)")
        out("log_old = np.empty(room, np.int64)")
        with out.under("for q in range(todo.shape[0]):"):
            out("e = todo[q]")
            out("i = e" if alone else "i = index[e]")
            out("status[e] = 0")  # it begins: whoever watches finds the last that has
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
                with out.under("while st > 0 and n_log > 0:"):
                    _undo(out, tables)
                with out.under(f"if st == {FULL}:"):
                    out("return q")
                with out.under(f"if st == {NO_ROOM}:"):
                    out("return -1 - q")
                out("status[e] = st")
        out("return todo.shape[0]")
    return BodyKernel("\n".join(out.lines), parameters)


def _undo(out: CodeWriter, tables: Mapping[str, TableLayout]) -> None:
    width = max(layout.width for layout in tables.values())
    out("n_log -= 1")
    out(f"place = log_at[n_log] // {len(tables)}")
    out(f"of = log_at[n_log] % {len(tables)}")
    for layout in tables.values():
        with out.under(f"if of == {layout.number}:"):
            cells = arguments.cells(layout.number)
            out(f"{cells}[place // {width}, place % {width}] = log_old[n_log]")
