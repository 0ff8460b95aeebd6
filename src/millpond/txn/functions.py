"""The decorator, and a transaction function as what it is made of: source text and facts."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, NoReturn, overload

import pyarrow as pa

from millpond.code.capture import capture
from millpond.code.tables import TransactionCode
from millpond.errors import Aborted, BadTransaction
from millpond.schema import parse_ddl
from millpond.txn.compiler.analysis import analyse
from millpond.txn.compiler.facts import Analysis
from millpond.txn.compiler.syntax import abort_call, check_repeatable, refuse


def abort(reason: str = "aborted") -> NoReturn:
    """End the transaction. All its writes are undone; the reason shows in its output."""
    text = str(reason)
    raise Aborted(text, reason=text)


class TransactionFunction:
    """A transaction function, analysed. Called as such it runs as plain Python, over whatever it is given."""

    def __init__(self, message: TransactionCode, tree: ast.FunctionDef, file: str = "") -> None:
        self.message = message
        self.code = message.code
        self.name = tree.name
        self.tree = tree
        self.file = file
        self.plain: Callable[..., Any] | None = None
        self.analysis = analyse(tree)
        check_repeatable(tree, message.code.source)
        self.result_names, self.result_types = _results(message.results, self.analysis)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.plain is None:
            raise TypeError(f"transaction {self.name!r} came as text: bind it to tables and run it there")
        return self.plain(*args, **kwargs)

    def bound(self, tables: Collection[str]) -> Analysis:
        """The facts, where the parameters that are tables are known."""
        return analyse(self.tree, list(tables))

    def explain(self) -> str:
        """What it reads and writes, what depends on what, and how it can run. The tables are guessed from its text."""
        from millpond.txn.explain import explain_function  # noqa: PLC0415 - it describes functions

        return explain_function(self, self.analysis)


def load(message: TransactionCode) -> TransactionFunction:
    """A function that came as text."""
    try:
        body = ast.parse(message.code.source).body
    except SyntaxError as error:
        raise BadTransaction(
            f"transaction {message.code.name!r} cannot be read: {error}", transaction=message.code.name
        ) from None
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == message.code.name:
            return TransactionFunction(message, node)
    raise BadTransaction(
        f"the source of transaction {message.code.name!r} does not define it", transaction=message.code.name
    )


@overload
def transaction(function: Callable[..., Any], /) -> TransactionFunction: ...
@overload
def transaction(*, results: str = "") -> Callable[[Callable[..., Any]], TransactionFunction]: ...
def transaction(
    function: Callable[..., Any] | None = None, /, *, results: str = ""
) -> TransactionFunction | Callable[[Callable[..., Any]], TransactionFunction]:
    """Make a plain function a transaction.

    Its parameters are tables, by name, and fields of the event. It may read and write columns (`t[k].col`), ask for rows
    (`k in t`, `t.get(k)`) and delete them, use if, for and while, local variables, lists and sets, arithmetic, and
    `abort("reason")`, and return one value or a tuple. What it may not do is a BadTransaction that names the line. Keys
    that do not follow from the event's fields alone are found as it runs, and nothing runs beside it.

    `results` names the result columns, as in `results="balance, fee"`, with types if wanted: `"balance long"`. They
    are called r0, r1, ... otherwise.
    """
    if function is None:
        return functools.partial(_made, results=results)
    return _made(function, results=results)


def _made(function: Any, results: str) -> TransactionFunction:
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise BadTransaction(
            f"{function!r} is no plain function", hint="write it as: def name(table, field): ..."
        )
    tree = _tree(function)
    code = capture(function, "transaction", "transaction", given=_given(tree))
    made = TransactionFunction(TransactionCode(code, results), tree, inspect.getfile(function))
    made.plain = function
    functools.update_wrapper(made, function)
    return made


def _tree(function: FunctionType) -> ast.FunctionDef:
    """The definition, with the lines of the file."""
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise BadTransaction(
            f"the source of transaction {function.__name__!r} cannot be found",
            hint="define it in a file or a notebook cell, not in text that is executed",
            transaction=function.__name__,
        ) from None
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, max(first, 1) - 1)
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise BadTransaction(
            f"transaction {function.__name__!r} is no plain function", transaction=function.__name__
        )
    if ast.get_docstring(found) is not None:
        found.body = found.body[1:] or [ast.Pass(lineno=found.lineno, col_offset=0)]
    return found


def _given(tree: ast.FunctionDef) -> set[str]:
    """The names that stand for this package: what the decorator and `abort` are taken from, or they themselves."""
    calls = [call for node in ast.walk(tree) if (call := abort_call(node)) is not None]
    aborts = [_root(call.func) for call in calls]
    found = {root.id for root in (*aborts, *map(_root, tree.decorator_list)) if isinstance(root, ast.Name)}
    for node in (node for statement in tree.body for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and node.id in found and node not in aborts:
            raise refuse(tree, node, f"of {node.id!r} a transaction may use abort only")
    return found


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _results(text: str, found: Analysis) -> tuple[tuple[str, ...], tuple[pa.DataType | None, ...]]:
    if not text:
        return tuple(f"r{i}" for i in range(found.width)), (None,) * found.width
    names, types = [], []
    for part in re.split(r",(?![^(]*\))", text):  # not within decimal(p,s)
        words = part.strip().split(maxsplit=1)
        names.append(words[0] if words else "")
        types.append(parse_ddl(words[1], "value").field(0).type if len(words) > 1 else None)
    taken = sorted({"event", "committed", "reason"}.intersection(names))
    if taken:
        raise BadTransaction(
            f"transaction {found.name!r}: the outputs have a column {taken[0]!r} of their own",
            hint="name the result otherwise",
            transaction=found.name,
            line=found.tree.lineno,
        )
    if len(names) != found.width or "" in names or len(set(names)) < len(names):
        raise BadTransaction(
            f"transaction {found.name!r} returns {found.width} values, results={text!r} names others",
            hint='one name for each value, as in results="balance, fee"',
            transaction=found.name,
            line=found.tree.lineno,
        )
    return tuple(names), tuple(types)
