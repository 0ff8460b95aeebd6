"""What compiled bodies know of values: their kinds, and what cannot be compiled."""

from __future__ import annotations

import ast
from typing import NamedTuple

NUMBERS = ("long", "double", "boolean")
ARRAYS = ("array<long>", "array<double>", "array<boolean>")
VECTORS = ("vector", "row")
"""A free vector, and one that is a row of the state."""
MAPS = ("map<long>", "map<double>", "map<boolean>")
STATES = ("matrix", "row", *MAPS)
INPUTS = (*NUMBERS, *ARRAYS[:2], "vector")
GATHERED = ("collection<long>", "collection<double>", "collection<vector>")
OUTPUTS = (*NUMBERS, *ARRAYS[:2], "vector")


class CannotCompile(Exception):
    """The body stays interpreted."""

    def __init__(self, node: ast.AST | int, why: str) -> None:
        super().__init__(why)
        self.line: int = node if isinstance(node, int) else getattr(node, "lineno", 1)
        self.why = why


class Value(NamedTuple):
    """An expression in the text of a kernel, and its kind."""

    text: str
    kind: str


def item_of(kind: str) -> str:
    """Of an array, a map or a collection."""
    return kind[kind.index("<") + 1 : -1] if "<" in kind else ""
