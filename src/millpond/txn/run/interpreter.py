"""Transactions as plain Python over the same cells, for what numba is not given.

Integers are held to 64 bits at every step, as compiled code holds them, so that the two give the same results.
"""

from __future__ import annotations

import ast
import copy
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Context, Decimal, localcontext
from typing import Any

import numpy as np

from millpond.code.capture import MODULES, OF_THE_MACHINE, OF_USER_CODE, described
from millpond.code.tables import Type
from millpond.errors import Aborted, BadTransaction
from millpond.stores.tables import Column, KeyColumn, TableStore
from millpond.stores.undo import TableUndo, Undo
from millpond.txn.compiler.arithmetic import HIGHEST, LOWEST, RANGE_STEPS_MAX
from millpond.txn.compiler.facts import Analysis
from millpond.txn.compiler.statements import constants_of
from millpond.txn.compiler.syntax import abort_call
from millpond.txn.compiler.values import BEYOND, OVERFLOW, REASONS, ROUNDS, STEPS, ZERO, is_decimal, scale_of
from millpond.txn.functions import TransactionFunction, abort

_CONTEXT = Context(prec=40, rounding=ROUND_HALF_EVEN)  # room for the product of two longs


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
        column = table.column(name)
        cell, type_ = column.cell, column.type
        if not store.layout.has_default:
            table.check_there(row)
        if type_ == "double":
            return float(store.doubles[row, cell])
        value = int(store.cells[row, cell])
        if type_ == "string":
            return store.strings.text(value)
        if is_decimal(type_):
            return Decimal(value).scaleb(-scale_of(type_))
        return value != 0 if type_ == "bool" else value

    def __setattr__(self, name: str, value: Any) -> None:
        table, row, log = self._table, self._number, self._log
        column = table.column(name)
        if not _is_of(value, column.type):
            raise TypeError(
                f"{table.name}.{name} is a {column.type} column, the value is a {type(value).__name__}"
            )
        # A quotient of decimals has many digits, and is rounded to those of the column.
        value = value if is_decimal(column.type) else _checked(value)
        fits = _fitted(value, column, f"overflow: {table.name}.{name} is {column.ddl}")
        table.undo.keep_row(table.store, row)
        if table.store.cells[row, 0] == 0:
            log.set(table.store, row, 0, 1)
        log.set(table.store, row, column.cell, table.store.encoded(fits, column.type))


_TAKES: dict[str, tuple[type, ...]] = {
    "long": (int, bool), "double": (int, float, bool), "bool": (bool,), "string": (str,), "decimal": (int, bool, Decimal)
}  # fmt: skip


def _is_of(value: Any, type_: Type) -> bool:
    return isinstance(value, _TAKES["decimal" if is_decimal(type_) else type_])


def _fitted(value: Any, column: Column, overflow: str) -> Any:
    """The value as a column holds it: decimals rounded to its scale, floats to its digits. Aborts where it does not fit."""
    units = value
    if is_decimal(column.type):
        scale = scale_of(column.type)
        rounded = Decimal(value).scaleb(scale).to_integral_value(ROUND_HALF_UP)
        units, value = int(rounded), rounded.scaleb(-scale)
    elif column.type == "double":
        with np.errstate(over="ignore"):
            return float(np.float32(value)) if column.is_float else value
    if column.is_narrow and not column.lowest <= units <= column.highest:
        abort(overflow)
    return value


class UserTable:
    """A table as user code sees it."""

    def __init__(self, name: str, store: TableStore, undo: TableUndo, log: WriteLog) -> None:
        self.name = name
        self.store = store
        self.undo = undo
        self._log = log
        self._rows: dict[tuple[int, ...], int] = {}

    def __getitem__(self, key: Any) -> UserRow:
        return UserRow(self, self._row(self._numbers(key)), self._log)

    def __contains__(self, key: Any) -> bool:
        row = self.store.find_one(self._numbers(key))
        return row >= 0 and bool(self.store.cells[row, 0])

    def get(self, key: Any) -> UserRow | None:
        return self[key] if self.__contains__(key) else None

    def __delitem__(self, key: Any) -> None:
        row = self._row(self._numbers(key))
        self.check_there(row)
        self.undo.keep_row(self.store, row)
        for cell, value in enumerate(self.store.first):
            self._log.set(self.store, row, cell, int(value))

    def check_there(self, row: int) -> None:
        if self.store.cells[row, 0] == 0:
            abort(f"no such key {self.store.key_of(row)!r} in {self.name}")

    def _row(self, key: tuple[int, ...]) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self.store.resolve_one(key)
        return row

    def _numbers(self, key: Any) -> tuple[int, ...]:
        """A key as the index knows it."""
        columns = self.store.layout.keys
        parts = key if len(columns) > 1 else (key,)
        if not isinstance(parts, tuple) or len(parts) != len(columns):
            raise TypeError(f"a key of {self.name} is a tuple of {len(columns)} values")
        return tuple(self._number(part, column) for part, column in zip(parts, columns, strict=True))

    def _number(self, part: Any, column: KeyColumn) -> int:
        if not isinstance(part, str if column.type == "string" else int):
            raise TypeError(f"a key of {self.name} is no {type(part).__name__}")
        if isinstance(part, str):
            return self.store.strings.number(part)
        number = int(_checked(part))
        if not column.lowest <= number <= column.highest:
            abort(REASONS[BEYOND])
        return number

    def column(self, name: str) -> Column:
        found = self.store.layout.columns.get(name)
        if found is None:
            raise AttributeError(f"table {self.name!r} has no column {name!r}")
        return found


_TYPE_OF: dict[type, Type] = {bool: "bool", int: "long", float: "double", str: "string"}


def _type_of(value: Any) -> Type | None:
    if isinstance(value, Decimal) and value.is_finite():
        return f"decimal{max(0, -int(value.as_tuple().exponent))}"
    return _TYPE_OF.get(type(value))


class ResultTypes:
    """The types of result columns. One that is not declared is that of the first value that it gets."""

    def __init__(self, known: Mapping[str, Type], declared: Mapping[str, Column]) -> None:
        self._known = known
        self._declared = declared
        self.types: dict[str, Type] = dict(known)

    def fit(self, names: Sequence[str], values: Sequence[Any]) -> tuple[Any, ...]:
        """The values, if their columns can take them: longs make place for doubles where nothing is declared."""
        types: dict[str, Type] = {}
        out = []
        for name, value in zip(names, values, strict=True):
            plain = value.item() if isinstance(value, np.generic) else value
            if plain is not None:
                plain, types[name] = self._one(name, plain)
            out.append(plain)
        # Only now: a transaction that one of its results ends leaves no types behind.
        self.types |= types
        return tuple(out)

    def _one(self, name: str, value: Any) -> tuple[Any, Type]:
        given = _type_of(value)
        wanted = self.types.get(name, given)
        column = self._declared.get(name)
        if column is not None and given is not None and _is_of(value, column.type) and column.type != "bool":
            value = _fitted(value, column, f"overflow: a result is {column.ddl}")
            given = column.type if column.type != "double" else given
        value = _checked(value)
        if given is None or wanted is None:
            raise TypeError(f"the result {name} is a {type(value).__name__}, not {wanted or 'a number'}")
        if given == "string":
            value.encode()
        if (given, wanted) == ("long", "double") or given == wanted:
            return value, wanted
        if name not in self._known and (given, wanted) == ("double", "long"):
            return value, given
        if all(type_ == "long" or is_decimal(type_) for type_ in (given, wanted)) and name not in self._known:
            return value, f"decimal{max(scale_of(given), scale_of(wanted))}"
        raise TypeError(f"the result {name} is a {type(value).__name__}, not {wanted}")


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
            with localcontext(_CONTEXT):
                out = self._function(**self._tables, **fields)
                results = None if out is None else out if isinstance(out, tuple) else (out,)
                if results is not None and len(results) != self._found.width:
                    raise TypeError(f"{len(results)} values returned, not {self._found.width}")
                if results is not None:
                    results = self._results.fit(self._names, results)
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
    if isinstance(value, Decimal) and value.is_finite():
        scale = max(0, -int(value.as_tuple().exponent))
        if not LOWEST <= int(value.scaleb(scale)) <= HIGHEST:
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


def _rounds() -> Iterator[None]:
    """The rounds of a `while`, as many as compiled code allows."""
    for _ in range(RANGE_STEPS_MAX + 1):
        yield
    abort(REASONS[ROUNDS])


HELPERS = {"_checked": _checked, "_shifted": _shifted, "_power": _power, "_rounds": _rounds}


class _Checks(ast.NodeTransformer):
    """Puts a check around every step, and calls abort by its own name. The loops of the transaction itself have a bound."""

    def __init__(self, transaction: str) -> None:
        self._transaction = transaction
        self._is_transaction = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._is_transaction = node.name == self._transaction
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Div):
            return node  # a double, or a decimal of many digits, to be rounded
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
        step = self._step(before, node.op, node.value)
        return ast.Assign([node.target], step if isinstance(node.op, ast.Div) else self._around(step))

    def visit_While(self, node: ast.While) -> ast.AST:
        self.generic_visit(node)
        if not self._is_transaction:
            return node
        ends = ast.If(ast.UnaryOp(ast.Not(), node.test), [ast.Break()], [])
        rounds = ast.Call(ast.Name("_rounds", ast.Load()), [], [])
        return ast.For(ast.Name(".round", ast.Store()), rounds, [ends, *node.body], [])

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
    tree = ast.fix_missing_locations(_Checks(code.name).visit(ast.parse(code.source)))
    exec(compile(tree, f"<transaction {code.name}>", "exec"), names)  # noqa: S102 - what a transaction is
    found: Callable[..., Any] = names[code.name]
    return found
