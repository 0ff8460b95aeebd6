"""Functions of the user's that are called for each row, of gaps and of ends: compiled over columns where it is worth it.

Compiled or not, a function says the same of a row: so processes that have had few rows may interpret what others have compiled.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.capture import OF_THE_MACHINE, Code
from millpond.code.windows import WindowCode
from millpond.kernels._jit import JIT_ENABLED, NO_C_ENTRY, NO_ENTRY
from millpond.stores import arithmetic, views
from millpond.stores.windows.shape import parameters

Wanted = Literal["long", "flag"]
Kind = Literal["long", "double", ""]
COMPILED_FROM_ROWS = 200_000
"""A function that so many rows have been given is compiled: that takes as long as about as many."""
_LOOPS = (ast.While, ast.For, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class RowFunction:
    """A function of value columns of these kinds, whose results are read as longs or as flags. `reason` is why it is never
    compiled, if it is not.
    """

    def __init__(self, code: Code, kinds: tuple[Kind, ...], wanted: Wanted) -> None:
        self._code, self._kinds, self._wanted = code, kinds, wanted
        self.reason = _reason(code, kinds)
        # What is never compiled is Python's alone.
        self._plain = code.load() if self.reason else arithmetic.interpreted(code)
        self._kernel: Callable[..., None] | None = None
        self._rows = 0

    def __call__(self, columns: Sequence[pa.Array], rows: int) -> NDArray[Any]:
        """What it gives for each row. Whatever it raises comes out."""
        self._rows += rows
        if self._rows >= COMPILED_FROM_ROWS and self._kernel is None and not self.reason:
            self._compile()
        if self._kernel is None or any(column.null_count for column in columns):
            return self._interpreted(columns, rows)
        out: NDArray[Any] = np.empty(rows, np.int64 if self._wanted == "long" else np.bool_)
        with np.errstate(all="ignore"):
            self._kernel(out, *map(_numbers, columns, self._kinds))
        return out

    def _interpreted(self, columns: Sequence[pa.Array], rows: int) -> NDArray[Any]:
        function, typed = self._plain, arithmetic.whole if self._wanted == "long" else bool
        lists = [column.to_pylist() for column in columns]
        with np.errstate(all="ignore"):
            made = (
                [typed(function(*row)) for row in zip(*lists, strict=True)]
                if lists
                else [typed(function()) for _ in range(rows)]
            )
        return np.array(made, np.int64 if self._wanted == "long" else np.bool_)

    def _compile(self) -> None:
        functions = []

        def wrap(function: Callable[..., Any]) -> Any:
            functions.append(numba.njit(function, nogil=True, error_model="python", **NO_ENTRY))
            return functions[-1]

        rule, _ = arithmetic.compiled(self._code, (), wrap)
        typed = arithmetic.whole if self._wanted == "long" else bool
        names: dict[str, Any] = {"rule": rule, "typed": typed}
        exec(_source(len(self._kinds)), names)  # noqa: S102 - our own text
        kernel = numba.njit(names["kernel"], nogil=True, error_model="python", **NO_C_ENTRY)
        numbers = {"long": numba.int64[::1], "double": numba.float64[::1]}
        out = numba.int64[::1] if self._wanted == "long" else numba.boolean[::1]
        try:
            kernel.compile((out, *(numbers[kind] for kind in self._kinds)))
        except OF_THE_MACHINE:
            raise
        except Exception as error:  # noqa: BLE001 - numba has errors of its own, and others where it is taken by surprise
            lines = (line.strip() for line in str(error).splitlines())
            self.reason = next(filter(None, lines), "")[:300] or "numba could not compile it"
            return
        if any(map(arithmetic.mixes, functions)):
            self.reason = "one name in it stands for longs and for doubles"
            return
        self._kernel = kernel


def row_function(code: Code, schema: pa.Schema, wanted: Wanted) -> RowFunction:
    """All windows of a process share one compilation. The function's parameters are columns of the schema."""
    kinds = tuple(_kind(schema.field(name).type) for name in parameters(code))
    return _row_function(msgspec.msgpack.encode(code), kinds, wanted)


@lru_cache(maxsize=64)
def _row_function(code: bytes, kinds: tuple[Kind, ...], wanted: Wanted) -> RowFunction:
    return RowFunction(msgspec.msgpack.decode(code, type=Code), kinds, wanted)


def interpreted_reasons(window: WindowCode, schema: pa.Schema) -> list[str]:
    """Why functions of a window are called row by row, where they are, however many there are."""
    functions = ((window.gap, "long"), (window.ends_when, "flag"))
    made = [
        row_function(code, schema, wanted)  # type: ignore[arg-type]
        for code, wanted in functions
        if code is not None and set(parameters(code)) <= set(schema.names)
    ]
    return [each.reason for each in made if each.reason]


def _kind(type_: pa.DataType) -> Kind:
    if pa.types.is_signed_integer(type_):
        return "long"
    return "double" if views.is_double(type_) else ""


def _numbers(column: pa.Array, kind: Kind) -> NDArray[Any]:
    return views.plain(views.longs(column)) if kind == "long" else np.ascontiguousarray(views.floats(column))


def _reason(code: Code, kinds: tuple[Kind, ...]) -> str:
    if not JIT_ENABLED:
        return f"{code.name}: numba's compiler is switched off"
    if not kinds or "" in kinds:
        return f"{code.name}: its columns are not all numbers"
    if any(isinstance(node, _LOOPS) for node in ast.walk(ast.parse(code.source))):
        # Compiled, one that never ends could not be ended.
        return f"{code.name}: it has a loop"
    _, difference = arithmetic.compiled(code, (), lambda function: function)
    return f"{code.name}: {difference}" if difference else ""


def _source(columns: int) -> str:
    names = [f"c{number}" for number in range(columns)]
    called = ", ".join(f"{name}[i]" for name in names)
    return "\n".join(
        [
            f"def kernel(out, {', '.join(names)}):",
            "    for i in range(out.shape[0]):",
            f"        out[i] = typed(rule({called}))",
        ]
    )
