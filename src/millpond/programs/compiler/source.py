"""The text of a class, found by where its methods begin, and errors that name their place in it."""

from __future__ import annotations

import ast
import inspect
import linecache
import re
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

from millpond.errors import BadProgram

_WORD = re.compile(r"\bmp_(everywhere|reject|total|average|Vector|Matrix|DenseMatrix)\b")
"""As the code of tasks calls what methods use of Millpond: see `names.WORDS`."""

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*_\d+\b")
"""As the translator calls its own variables, among others."""
_OPEN = (ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Lambda, ast.Tuple, ast.UnaryOp)
"""What is another thing once something stands beside it."""
NESTED_MAX = 8
"""So deep may variables of the translator's be in the code of others."""


@dataclass(frozen=True)
class ProgramSource:
    """A class as text. `methods` are those that it defines itself, `functions` the same as they run."""

    cls: type
    file: str
    tree: ast.ClassDef
    methods: dict[str, ast.FunctionDef]
    functions: dict[str, FunctionType]
    attributes: dict[str, Any] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    """Of the method that is translated: what the user wrote where there is a variable of the translator's now."""

    @property
    def name(self) -> str:
        return self.tree.name

    def refuse(self, node: ast.AST | int, why: str, hint: str = "", method: str = "") -> BadProgram:
        """The error for what cannot be at that node, or line; in it, code stands as it was written."""
        why, hint = (_WORD.sub(r"mp.\1", self.as_said(text)) for text in (why, hint))
        line = node if isinstance(node, int) else getattr(node, "lineno", self.tree.lineno)
        where = f"{self.name}.{method}" if method else self.name
        return BadProgram(
            f'program {where} (file "{self.file}", line {line}): {why}',
            hint=hint,
            program=self.name,
            method=method,
            file=self.file,
            line=line,
        )

    def as_said(self, text: str) -> str:
        """Code without the translator's variables."""
        for _ in range(NESTED_MAX if self.said else 0):
            text = _NAME.sub(lambda found: self._said(found[0]), text)
        return text

    def _said(self, name: str) -> str:
        text = self.said.get(name, name)
        is_open = isinstance(ast.parse(text, mode="eval").body, _OPEN)
        return f"({text})" if is_open else text

    def globals_of(self, method: str) -> dict[str, Any]:
        """What global and enclosing names stand for in a method."""
        function = self.functions[method]
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        enclosing = {}
        for name, cell in cells:
            try:
                enclosing[name] = cell.cell_contents
            except ValueError:  # not set yet: the class itself, most likely
                continue
        return {**function.__globals__, **enclosing}


def source_of(cls: type) -> ProgramSource:
    """The text of a class. BadProgram if there is none, or it is no plain class."""
    members = {name: value for name, value in vars(cls).items() if not _is_made_by_python(name)}
    unwrapped = {
        name: getattr(value, "__func__", getattr(value, "fget", value)) for name, value in members.items()
    }
    functions = {name: value for name, value in unwrapped.items() if isinstance(value, FunctionType)}
    if not functions:
        raise BadProgram(
            f"program {cls.__name__!r} has no methods",
            hint="write what can be called as methods: def name(self, key: int): ...",
            program=cls.__name__,
        )
    first = next(iter(functions.values()))
    code: CodeType = inspect.unwrap(first).__code__
    lines = linecache.getlines(code.co_filename, first.__globals__)
    tree = _class_at(
        lines, cls.__name__, {inspect.unwrap(f).__code__.co_firstlineno for f in functions.values()}
    )
    if tree is None:
        raise BadProgram(
            f"the source of program {cls.__name__!r} cannot be found",
            hint="define it in a file or a notebook cell, not in text that is executed",
            program=cls.__name__,
        )
    methods = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    attributes = {
        name: value
        for name, value in members.items()
        if name not in functions and isinstance(value, bool | int | float | str)
    }
    source = ProgramSource(cls, code.co_filename, tree, methods, functions, attributes)
    for base in cls.__bases__:
        if base is not object:
            raise source.refuse(
                tree,
                f"it inherits from {base.__name__}",
                "write the fields and methods of the base into the class",
            )
    return source


def _class_at(lines: list[str], name: str, first_lines: set[int]) -> ast.ClassDef | None:
    try:
        module = ast.parse("".join(lines))
    except SyntaxError:
        return None
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            starts = {
                min([d.lineno for d in member.decorator_list] + [member.lineno])
                for member in node.body
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            if first_lines <= starts:
                return node
    return None


def _is_made_by_python(name: str) -> bool:
    return name.startswith("__") and name not in ("__init__", "__post_init__", "__call__")
