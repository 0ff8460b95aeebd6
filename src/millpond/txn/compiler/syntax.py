"""Questions about the text of a transaction function that need no walk through it."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Sequence

from millpond.errors import BadTransaction

REFUSED: dict[type[ast.AST], str] = {
    ast.Try: "try would hide an abort",
    ast.With: "with has no place in a transaction",
    ast.FunctionDef: "a function cannot be defined inside a transaction",
    ast.AsyncFunctionDef: "a function cannot be defined inside a transaction",
    ast.ClassDef: "a class cannot be defined inside a transaction",
    ast.Lambda: "a function cannot be defined inside a transaction",
    ast.Global: "a transaction keeps its state in tables",
    ast.Nonlocal: "a transaction keeps its state in tables",
    ast.Import: "import belongs outside of the transaction",
    ast.ImportFrom: "import belongs outside of the transaction",
    ast.Yield: "a transaction returns its result",
    ast.YieldFrom: "a transaction returns its result",
    ast.Await: "a transaction waits for nothing",
    ast.NamedExpr: "write := as an assignment of its own",
    ast.Starred: "write the values out instead of *",
    ast.Match: "write match as if and elif",
}

UNREPEATABLE = {
    **dict.fromkeys(("hash", "id"), "differs from process to process"),
    **dict.fromkeys(("open", "input", "breakpoint"), "reaches out of the transaction"),
    **dict.fromkeys(
        ("eval", "exec", "compile", "__import__", "globals", "locals", "vars"), "hides what is done"
    ),
    **dict.fromkeys(("exit", "quit"), "would end the container"),
}
"""Names that no transaction may use: it must give the same when it runs again, elsewhere and later."""


def check_repeatable(tree: ast.FunctionDef, source: str) -> None:
    """Refuses what would not give the same again, in a function and in those that come with it."""
    others = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name != tree.name
    ]
    for function in (tree, *others):
        own = {a.arg for a in function.args.args} | set(bound_names(function))
        for node in ast.walk(function):
            match node:
                case ast.Name(id=name) if name in UNREPEATABLE and name not in own:
                    raise refuse(tree, node, f"{name} {UNREPEATABLE[name]}")
                case ast.Attribute(value=ast.Name(id=name), attr="random") if name not in own:
                    raise refuse(tree, node, "chance would fall otherwise when the transaction runs again")
                case ast.Constant(value=str() as text) if not _is_text(text):
                    raise refuse(tree, node, f"{text!a} is no text")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def abort_call(node: ast.AST) -> ast.Call | None:
    """The call, if the node is `abort(...)` or `<anything>.abort(...)`."""
    if isinstance(node, ast.Call):
        called = node.func
        if getattr(called, "id", None) == "abort" or getattr(called, "attr", None) == "abort":
            return node
    return None


def reason_of(call: ast.Call) -> str | None:
    """The constant reason of an abort; None where it is not one."""
    if len(call.args) > 1 or call.keywords:
        return None
    if not call.args:
        return "aborted"
    value = call.args[0]
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def tables_in(tree: ast.FunctionDef) -> tuple[str, ...]:
    """The parameters that are used as tables: `p[key].column`, or a row of them held in a variable."""
    names = [a.arg for a in tree.args.args]
    attributed = {
        n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        rows: list[ast.expr] = []
        if isinstance(node, ast.Attribute) or (
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id in attributed for t in node.targets)
        ):
            rows = [node.value]
        if isinstance(node, ast.Delete):
            rows = node.targets
        found |= {r.value.id for r in rows if isinstance(r, ast.Subscript) and isinstance(r.value, ast.Name)}
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get")):
                found.add(name)
    return tuple(name for name in names if name in found)


def table_row(node: ast.AST, tables: Collection[str]) -> ast.Name | None:
    """The table, if the node is a row of one: `table[key]` or `table.get(key)`."""
    match node:
        case ast.Subscript(value=ast.Name(id=name) as table) if name in tables:
            return table
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name) as table, attr="get")) if name in tables:
            return table
    return None


def table_asked(node: ast.AST, tables: Collection[str]) -> ast.Name | None:
    """The table, if the node is `key in table` or `key not in table`."""
    match node:
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Name(id=name) as table]) if (
            name in tables
        ):
            return table
    return None


def key_of(node: ast.AST) -> ast.expr:
    """The key in `table[key]`, `table.get(key)` or `key in table`."""
    match node:
        case ast.Subscript():
            return node.slice
        case ast.Compare():
            return node.left
        case ast.Call():
            return node.args[0]
    raise AssertionError(ast.dump(node))


def key_parts(node: ast.AST) -> list[ast.expr]:
    """Its columns."""
    key = key_of(node)
    return key.elts if isinstance(key, ast.Tuple) else [key]


def key_text(node: ast.AST) -> str:
    return ", ".join(ast.unparse(part) for part in key_parts(node))


def is_collection(node: ast.expr) -> bool:
    """Whether it makes a list or a set."""
    match node:
        case ast.List() | ast.Set() | ast.Call(func=ast.Name(id="set" | "list")):
            return True
    return False


def names_made_of_calls(tree: ast.AST) -> set[str]:
    """The variables that are set to what a call gives, as they are or through other variables."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    found: set[str] = set()
    while True:
        more = {
            name
            for name, given in values.items()
            if any(isinstance(value, ast.Call) or getattr(value, "id", None) in found for value in given)
        }
        if more == found:
            return found
        found = more


def changes_list(body: Sequence[ast.stmt], name: str) -> bool:
    """Whether a list may be another, or have other items, after these statements."""
    return any(
        (isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == name)
        for statement in body
        for node in ast.walk(statement)
    )


def refuse(tree: ast.FunctionDef, node: ast.AST, why: str, hint: str = "") -> BadTransaction:
    line = getattr(node, "lineno", tree.lineno)
    return BadTransaction(
        f"transaction {tree.name!r}, line {line}: {why}", hint=hint, transaction=tree.name, line=line
    )


def bound_names(node: ast.AST) -> Counter[str]:
    """How often each name is set below the node."""
    return Counter(
        n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
    )
