"""Transactions as plain Python over the same cells, for what numba is not given.

Integers are held to 64 bits at every step, as compiled code holds them, so that the two give the same results.
"""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millpond.code.capture import MODULES, OF_THE_MACHINE, OF_USER_CODE, described
from millpond.code.tables import Type
from millpond.errors import Aborted, BadTransaction
from millpond.stores.tables import TableStore
from millpond.stores.undo import TableUndo, Undo
from millpond.txn.compiler.arithmetic import HIGHEST, LOWEST, RANGE_STEPS_MAX
from millpond.txn.compiler.facts import Analysis
from millpond.txn.compiler.statements import constants_of
from millpond.txn.compiler.syntax import abort_call
from millpond.txn.compiler.values import BEYOND, OVERFLOW, REASONS, STEPS, ZERO
from millpond.txn.functions import TransactionFunction, abort


class WriteLog:
    """What the running transaction changed."""

    def __init__(self) -> None:
        self.entries: list[tuple[TableStore, int, int, int]] = []

    def set(self, store: TableStore, row: int, cell: int, value: int) -> None:
        self.entries.append((store, row, cell, int(store.cells[row, cell])))
        store.cells[row, cell] = value

    def undo(self) -> None:
        while self.entries:
            store, row, cell, old = self.entries.pop()
            store.cells[row, cell] = old


class UserRow:
    """A row as user code sees it."""

    __slots__ = ("_log", "_number", "_table")

    def __init__(self, table: UserTable, number: int, log: WriteLog) -> None:
        object.__setattr__(self, "_table", table)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_log", log)

    def __getattr__(self, name: str) -> Any:
        table, row = self._table, self._number
        store: TableStore = table.store
        cell, type_ = table.cell(name)
        if not store.layout.has_default and store.cells[row, 0] == 0:
            abort(f"no such key {store.key_of(row)!r} in {table.name}")
        if type_ == "double":
            return float(store.doubles[row, cell])
        value = int(store.cells[row, cell])
        if type_ == "string":
            return store.strings.text(value)
        return value != 0 if type_ == "bool" else value

    def __setattr__(self, name: str, value: Any) -> None:
        table, row, log = self._table, self._number, self._log
        cell, type_ = table.cell(name)
        fits: dict[Type, tuple[type, ...]] = {
            "long": (int, bool), "double": (int, float, bool), "bool": (bool,), "string": (str,)
        }  # fmt: skip
        if not isinstance(value, fits[type_]):
            raise TypeError(f"{table.name}.{name} is a {type_} column, the value is a {type(value).__name__}")
        table.undo.keep_row(table.store, row)
        if table.store.cells[row, 0] == 0:
            log.set(table.store, row, 0, 1)
        log.set(table.store, row, cell, table.store.encoded(_checked(value), type_))


class UserTable:
    """A table as user code sees it."""

    def __init__(self, name: str, store: TableStore, undo: TableUndo, log: WriteLog) -> None:
        self.name = name
        self.store = store
        self.undo = undo
        self._log = log
        self._rows: dict[int, int] = {}

    def __getitem__(self, key: Any) -> UserRow:
        store = self.store
        wanted = str if store.layout.key == "string" else int
        if not isinstance(key, wanted):
            raise TypeError(f"a key of {self.name} is no {type(key).__name__}")
        number = store.strings.number(key) if isinstance(key, str) else int(_checked(key))
        lowest, highest = store.layout.key_range
        if wanted is int and not lowest <= number <= highest:
            abort(REASONS[BEYOND])
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = store.resolve_one(number)
        return UserRow(self, row, self._log)

    def cell(self, name: str) -> tuple[int, Type]:
        found = self.store.layout.columns.get(name)
        if found is None:
            raise AttributeError(f"table {self.name!r} has no column {name!r}")
        return found


_TYPE_OF: dict[type, Type] = {bool: "bool", int: "long", float: "double", str: "string"}


class ResultTypes:
    """The types of result columns. One that is not declared is that of the first value that it gets."""

    def __init__(self, declared: Mapping[str, Type]) -> None:
        self._declared = declared
        self.types: dict[str, Type] = dict(declared)

    def fit(self, names: Sequence[str], values: Sequence[Any]) -> tuple[Any, ...]:
        """The values, if their columns can take them: longs make place for doubles where nothing is declared."""
        types: dict[str, Type] = {}
        out = []
        for name, value in zip(names, values, strict=True):
            plain = value.item() if isinstance(value, np.generic) else value
            given = _TYPE_OF.get(type(plain))
            wanted = self.types.get(name, given)
            widened = (given, wanted) == ("double", "long") and name not in self._declared
            if given is None or not (given == wanted or widened or (given, wanted) == ("long", "double")):
                raise TypeError(f"the result {name} is a {type(value).__name__}, not {wanted or 'a number'}")
            if given == "string":
                plain.encode()
            types[name] = given if widened or wanted is None else wanted
            out.append(plain)
        # Only now: a transaction that one of its results ends leaves no types behind.
        self.types |= types
        return tuple(out)


class InterpretedFunction:
    """A function made ready to run over stores, event by event."""

    def __init__(
        self,
        function: TransactionFunction,
        found: Analysis,
        stores: Mapping[str, TableStore],
        undo: Undo,
        results: ResultTypes,
    ) -> None:
        self._log = WriteLog()
        self._names = function.result_names
        self._results = results
        self._tables = {
            name: UserTable(name, stores[name], undo.tables[name], self._log) for name in found.tables
        }
        self._found = found
        self._function = _loaded(function)

    def run(self, fields: Mapping[str, Any]) -> tuple[str | None, tuple[Any, ...] | None]:
        """The reason of an abort, or None, and the results if there are any."""
        self._log.entries.clear()
        try:
            out = self._function(**self._tables, **fields)
            results = None if out is None else out if isinstance(out, tuple) else (out,)
            if results is not None and len(results) != self._found.width:
                raise TypeError(f"{len(results)} values returned, not {self._found.width}")
            if results is not None:
                results = self._results.fit(self._names, [_checked(value) for value in results])
        except Aborted as aborted:
            reason = aborted.message
        except ZeroDivisionError:
            reason = REASONS[ZERO]
        except OverflowError:
            reason = REASONS[OVERFLOW]
        except OF_THE_MACHINE:
            # No outcome: the same transaction may commit when it runs again. So it is with an interrupt.
            raise
        except OF_USER_CODE as error:
            reason = described(error)
        else:
            return None, results
        self._log.undo()
        return reason, None


def _checked(value: Any) -> Any:
    """The value, if it is one that compiled code could hold."""
    if isinstance(value, int) and not LOWEST <= value <= HIGHEST:
        abort(REASONS[OVERFLOW])
    return value


def _shifted(value: Any, by: Any) -> Any:
    """`value << by`, unless that would take memory only to be too large."""
    if isinstance(value, int) and isinstance(by, int) and value and by >= 64:
        abort(REASONS[OVERFLOW])
    return value << by


def _power(value: Any, exponent: Any) -> Any:
    """`value ** exponent`, unless that would take memory only to be too large."""
    if isinstance(value, int) and isinstance(exponent, int) and abs(value) > 1 and exponent >= 64:
        abort(REASONS[OVERFLOW])
    return value**exponent


def _range(*args: int) -> range:
    found = range(*args)
    if found and abs(found[-1] - found[0]) // abs(found.step) + 1 > RANGE_STEPS_MAX:
        abort(REASONS[STEPS])
    return found


HELPERS = {"_checked": _checked, "_shifted": _shifted, "_power": _power}


class _Checks(ast.NodeTransformer):
    """Puts a check around every step, and calls abort by its own name."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return self._around(self._step(node.left, node.op, node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        literal = isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
        return node if literal else self._around(self.generic_visit(node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if abort_call(node) is not None:
            node.func = ast.Name("abort", ast.Load())
            return node
        return self._around(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name | ast.Attribute):
            return node
        before = copy.copy(node.target)  # to name a row twice changes nothing
        before.ctx = ast.Load()
        return ast.Assign([node.target], self._around(self._step(before, node.op, node.value)))

    @staticmethod
    def _step(left: ast.expr, op: ast.operator, right: ast.expr) -> ast.expr:
        function = {ast.LShift: "_shifted", ast.Pow: "_power"}.get(type(op))
        if function is None:
            return ast.BinOp(left, op, right)
        return ast.Call(ast.Name(function, ast.Load()), [left, right], [])

    @staticmethod
    def _around(node: ast.AST) -> ast.Call:
        return ast.Call(ast.Name("_checked", ast.Load()), [node], [])  # type: ignore[list-item]


def _loaded(function: TransactionFunction) -> Callable[..., Any]:
    code = function.code
    names: dict[str, Any] = {**constants_of(code), "abort": abort, **HELPERS, "range": _range}
    for alias, module in code.modules.items():
        if module not in MODULES:
            raise BadTransaction(f"a transaction may not import {module!r}", transaction=code.name)
        names[alias] = importlib.import_module(module)
    tree = ast.fix_missing_locations(_Checks().visit(ast.parse(code.source)))
    exec(compile(tree, f"<transaction {code.name}>", "exec"), names)  # noqa: S102 - what a transaction is
    found: Callable[..., Any] = names[code.name]
    return found
