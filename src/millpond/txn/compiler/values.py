"""What generated code is made of: types, values, lines, and the statuses that events end with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from millpond.code.tables import Type
from millpond.txn.compiler.arithmetic import RANGE_STEPS_MAX

ValueType = str
"""The type of a value in the code: one of `Type`, or "number", which is a long on some paths and a double on others, and
says which it is."""

# Why an event ended: the values of its status. Missing keys and the user's own reasons follow.
COMMITTED = 0
RETURNED = -1
RETURNED_NOTHING = -2
OVERFLOW, ZERO, INDEX, NAN, DOMAIN, SHIFT, STEP, STEPS, NULL, BEYOND, ROUNDS = range(1, 12)
NO_ROOM = 14  # a row that it needs has no place: it is undone, and done again when tables have grown
FULL = 15  # its log was too short: it is undone, and done again with a longer one
REASONS = {
    OVERFLOW: "overflow",
    ZERO: "ZeroDivisionError: division by zero",
    INDEX: "IndexError: list index out of range",
    NAN: "ValueError: cannot convert float NaN to integer",
    DOMAIN: "ValueError: math domain error",
    SHIFT: "ValueError: negative shift count",
    STEP: "ValueError: range() arg 3 must not be zero",
    STEPS: f"a range of more than {RANGE_STEPS_MAX} steps",
    BEYOND: "a key that the type of the table's keys does not hold",
    ROUNDS: f"a loop of more than {RANGE_STEPS_MAX} rounds",
}
FIRST_MISSING = 16
FIRST_ABORT = 1024


def is_decimal(type_: ValueType) -> bool:
    return type_.startswith("decimal")


def scale_of(type_: ValueType) -> int:
    """Digits after the point; a long has none."""
    return int(type_.removeprefix("decimal")) if is_decimal(type_) else 0


class CannotCompile(Exception):
    """What numba is not given, and the line."""

    def __init__(self, node: ast.AST, why: str) -> None:
        super().__init__(why)
        self.line: int = getattr(node, "lineno", 0)
        self.why = why


@dataclass(frozen=True)
class Value:
    """A typed value: a variable that nothing changes any more within the expression, or a literal.

    Of a number, `text` is what the names of its three variables begin with.
    """

    type: ValueType
    text: str

    @property
    def is_double(self) -> str:
        return f"{self.text}_isdouble"

    @property
    def double(self) -> Value:
        return Value("double", f"{self.text}_asdouble")

    @property
    def long(self) -> Value:
        return Value("long", f"{self.text}_aslong")


@dataclass(frozen=True)
class EventField:
    """A field of the event."""

    name: str
    type: Type
    is_list: bool = False


@dataclass
class CodeWriter:
    """Lines of code under growing and shrinking indentation."""

    lines: list[str] = field(default_factory=list)
    depth: int = 0
    fails: int = 0
    count: int = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def fresh(self, letter: str = "x") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    @contextmanager
    def under(self, line: str) -> Iterator[None]:
        self(line)
        self.depth += 1
        before = len(self.lines)
        yield
        if len(self.lines) == before:
            self("pass")
        self.depth -= 1

    def fail(self, condition: str, status: int) -> None:
        """Leave the event where the condition holds."""
        self.fails += 1
        with self.under(f"if {condition}:"):
            self(f"st = {status}")
            self("break")
