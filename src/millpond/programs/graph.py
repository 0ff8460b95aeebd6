"""What a program is translated into."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from millpond.code.capture import Code

Access = Literal["partitioned", "lane", "everywhere", "none"]
BY_COLUMN = "column"
"""In place of the type of a field's keys: it is a matrix by column, whose entries have the column before the row."""
RETURNS, REJECTS = -1, -2
"""What a task names instead of the next one, when the call ends: with a result, or with a reason."""


class Field(NamedTuple):
    """A state element. `key` and `value` are types: of a matrix those of its rows' numbers, and of its numbers."""

    name: str
    kind: Literal["partitioned", "partial"]
    element: Literal["map", "vector", "matrix", "dense"]
    key: str
    value: str
    level: int
    line: int

    @property
    def by_column(self) -> bool:
        return self.key == BY_COLUMN


class Variable(NamedTuple):
    """What goes along an edge: `type` is one of `programs.values`."""

    name: str
    type: str


class Parameter(NamedTuple):
    """Of a method: `default` counts where `optional`."""

    name: str
    type: str
    optional: bool
    default: Any


class Task(NamedTuple):
    """A task element: code that accesses one field in one place, or none.

    `source` defines `te(state, *inputs)`, which returns the number of the next task and a tuple of its inputs, or
    RETURNS and a tuple of the result, or REJECTS and a tuple of the reason. `state` is the slice's part of the field, the
    lane's element, or None. `key` names the input whose slice, or whose slice's lane, it is. A task `everywhere` runs in all
    lanes; all give the same next task, which `gathers`: the first value of each is put into a list, its first input, in the
    order of the lanes; the other values are the same in all. A task without a field runs wherever its inputs are.
    `lines` has the line in the file for each line of `source`.
    """

    number: int
    field: str | None
    access: Access
    key: str | None
    inputs: tuple[Variable, ...]
    source: str
    lines: tuple[int, ...]
    writes: bool
    line: int
    gathers: bool
    level: int
    next: tuple[int, ...]


class Method(NamedTuple):
    """What can be called. The inputs of task 0 are among `parameters`; `returns` is None where there is no result."""

    name: str
    parameters: tuple[Parameter, ...]
    returns: str | None
    tasks: tuple[Task, ...]
    read_only: bool
    rejects: bool
    line: int


def first_key(kinds: Mapping[str, str]) -> str:
    """Of parameters by their types: the one whose value is a call's key until it accesses one; empty if there is none."""
    return next((name for name, kind in kinds.items() if kind in ("long", "string")), "")


class OwnClass(NamedTuple):
    """A state class of the user's, and the fields that are of it: methods over a map. `constants` are numbers and texts.

    `merged` makes one of two values of a key, where lanes become one.
    """

    name: str
    fields: tuple[str, ...]
    methods: tuple[Code, ...]
    constants: tuple[tuple[str, bool | int | float | str], ...]
    merged: Code | None = None


def across(entries: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of a matrix by column with the row first, ascending."""
    found = {(row, column): value for (column, row), value in entries.items()}
    return {place: found[place] for place in sorted(found)}


class Graph(NamedTuple):
    """A program: `levels` are the names of fields, round by round.

    `serial` says that an epoch equals its calls one after the other; `why` says what it rests on. `functions` are the
    plain functions that tasks call, by name.
    """

    name: str
    file: str
    lanes: int
    max_rounds: int
    fields: tuple[Field, ...]
    methods: tuple[Method, ...]
    levels: tuple[tuple[str, ...], ...]
    serial: bool
    why: tuple[str, ...]
    functions: tuple[Code, ...]
    own: tuple[OwnClass, ...] = ()

    @property
    def version(self) -> str:
        """What tells this code from other code of the program, wherever its file is and on which lines of it."""
        fields = [field._replace(line=0) for field in self.fields]
        methods = [
            method._replace(line=0, tasks=tuple(task._replace(line=0, lines=()) for task in method.tasks))
            for method in self.methods
        ]
        told = (self.lanes, self.max_rounds, fields, methods, self.functions, self.own)
        return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=8).hexdigest()

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    @property
    def merges(self) -> dict[str, Code]:
        """By field, how its class merges two values of a key."""
        return {field: own.merged for own in self.own if own.merged is not None for field in own.fields}

    def class_of(self, field: str) -> OwnClass | None:
        """The user's own class that the field is of."""
        return next((own for own in self.own if field in own.fields), None)

    def method(self, name: str) -> Method:
        return next(method for method in self.methods if method.name == name)
