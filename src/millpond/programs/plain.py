"""A program as plain Python: one call after the other, in this process, with as many lanes as one likes.

This is what a program means; every other way to run it is compared with it.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from types import FunctionType
from typing import Any

from millpond.errors import BadOption
from millpond.programs.annotations import Kind, ProgramOptions
from millpond.programs.elements import Element, Map, StateElement
from millpond.programs.elements.own import Bound
from millpond.programs.graph import Graph, Parameter, across, first_key
from millpond.programs.merging import READING_EVERYWHERE, WRITING_EVERYWHERE, Collection
from millpond.programs.slicing import SLICES, lane_of
from millpond.programs.values import fit

_TYPES = {int: "long", float: "double", bool: "boolean", str: "string"}


def plain(cls: type, *, lanes: int | None = None, slices: int = SLICES) -> Any:
    """An empty instance of a program, whose methods run as they are written."""
    options: ProgramOptions | None = getattr(cls, "__millpond_program__", None)
    if options is None:
        raise BadOption(f"{cls!r} is no program", hint="put @mp.program above the class", option="cls")
    made: Any = object.__new__(plain_class(cls))
    made.__millpond_state__ = _State(cls, options.lanes if lanes is None else lanes, slices)
    return made


@cache
def plain_class(cls: type) -> type:
    """A subclass whose fields hold state, and which knows where a call begins."""
    if hasattr(cls, "__millpond_plain__"):
        return cls
    members: dict[str, Any] = {name: property(_reader(name)) for name in _fields(cls)}
    for name, method in vars(cls).items():
        if not name.startswith("__") and inspect.isfunction(method):
            members[name] = _method(method)
    return type(cls.__name__, (cls,), {**members, "__module__": cls.__module__, "__millpond_plain__": True})


def state_of(instance: Any) -> dict[str, Any]:
    """What the fields of a plain instance hold: entries of partitioned ones, a list with those of each lane of partial ones."""
    return _state(instance).entries()


class _State:
    """The elements of all fields, and what the call under way accessed last."""

    def __init__(self, cls: type, lanes: int, slices: int) -> None:
        self.lanes = lanes
        self.slices = slices
        self.depth = 0
        self.last_key: int | str | None = None
        self.elements: dict[str, list[Element]] = {}
        for name, (kind, element) in _fields(cls).items():
            count = 1 if kind == "partitioned" else lanes
            self.elements[name] = [_made(element) for _ in range(count)]
        self.partitioned = {name for name, (kind, _) in _fields(cls).items() if kind == "partitioned"}

        graph: Graph = cls.__millpond_graph__  # type: ignore[attr-defined] # a program's
        self.by_column = {field.name for field in graph.fields if field.by_column}

    def field(self, name: str) -> Any:
        if name in self.partitioned:
            by = _ByColumn if name in self.by_column else _Keyed
            return by(self, self.elements[name][0])
        return _Lane(self, self.elements[name])

    def lane(self) -> int:
        """That of the call, as it is now."""
        if self.last_key is None:
            raise TypeError("a partial field is reached in the lane of a key, and the call has none yet")
        return lane_of(self.last_key, self.slices, self.lanes)

    def entries(self) -> dict[str, Any]:
        return {
            name: [each.entries() for each in elements]
            if name not in self.partitioned
            else across(elements[0].entries())
            if name in self.by_column
            else elements[0].entries()
            for name, elements in self.elements.items()
        }


class _Keyed:
    """A partitioned field: it notes which key is accessed."""

    def __init__(self, state: _State, element: Any) -> None:
        self._state = state
        self._element = element

    def _at(self, place: Any) -> Any:
        self._state.last_key = place[0] if isinstance(place, tuple) else place
        return self._element

    def __getitem__(self, place: Any) -> Any:
        return self._at(place)[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._at(place)[place] = value

    def __delitem__(self, place: Any) -> None:
        del self._at(place)[place]

    def __contains__(self, place: Any) -> bool:
        return place in self._at(place)

    def get(self, place: Any, *default: Any) -> Any:
        return self._at(place).get(place, *default)

    def pop(self, place: Any, *default: Any) -> Any:
        return self._at(place).pop(place, *default)

    def __getattr__(self, name: str) -> Any:
        """A method of a class of the user's: its first argument is the key."""
        if not isinstance(self._element, StateElement):
            raise AttributeError(name)  # noqa: TRY004 - what Python asks for

        def method(key: Any, *given: Any) -> Any:
            element = self._at(key)
            return getattr(Bound(type(element), element.state, by_key=True), name)(key, *given)

        return method


class _ByColumn(_Keyed):
    """A matrix of which columns are accessed: it is kept turned."""

    def __getitem__(self, place: Any) -> Any:
        return super().__getitem__(_turned(place))

    def __setitem__(self, place: Any, value: Any) -> None:
        super().__setitem__(_turned(place), value)

    def __delitem__(self, place: Any) -> None:
        super().__delitem__(_turned(place))

    def __contains__(self, place: Any) -> bool:
        return super().__contains__(_turned(place))

    def column(self, column: Any) -> Any:
        return super().__getitem__(column).copy()


def _turned(place: Any) -> Any:
    row, column = place
    return column if isinstance(row, slice) else (column, row)


class _Lane:
    """A partial field, in the lane that the call has at the first operation; `everywhere` can ask for the others.

    `self.field[i] += x` is two operations on one of these: both are in the lane that the first one had.
    """

    def __init__(self, state: _State, lanes: list[Element]) -> None:
        self._state = state
        self._lanes = lanes
        self._own: Any = None

    def __millpond_lanes__(self) -> _Everywhere:
        return _Everywhere(self._lanes)

    @property
    def _element(self) -> Any:
        if self._own is None:
            self._own = self._lanes[self._state.lane()]
        return self._own

    def __getattr__(self, name: str) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            element = self._element  # arguments come first, and their keys
            if isinstance(element, StateElement):
                element = Bound(type(element), element.state, by_key=False)
            return getattr(element, name)(*map(_value, args), **kwargs)

        return operation

    def __add__(self, other: Any) -> Any:
        return self._element + _value(other)

    def __sub__(self, other: Any) -> Any:
        return self._element - _value(other)

    def __mul__(self, number: float) -> Any:
        return self._element * number

    __rmul__ = __mul__

    def __truediv__(self, number: float) -> Any:
        return self._element / number

    def __getitem__(self, place: Any) -> Any:
        return self._element[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._element[place] = value

    def __delitem__(self, place: Any) -> None:
        del self._element[place]

    def __contains__(self, place: Any) -> bool:
        return place in self._element

    def __iter__(self) -> Any:
        return iter(self._element)

    def __len__(self) -> int:
        return len(self._element)


def _value(given: Any) -> Any:
    """What an operation is given, a partial field in the lane that the call has now."""
    return given._element if isinstance(given, _Lane) else given  # noqa: SLF001 - of this module


class _Everywhere:
    def __init__(self, lanes: list[Element]) -> None:
        self._lanes = lanes

    def __getattr__(self, name: str) -> Callable[..., Any]:
        own = [lane for lane in self._lanes if isinstance(lane, StateElement)]
        if own:
            lanes = [Bound(type(lane), lane.state, by_key=False) for lane in own]
            return lambda *args: Collection([getattr(lane, name)(*args) for lane in lanes])
        if name not in READING_EVERYWHERE | WRITING_EVERYWHERE:
            raise TypeError(f"{name} cannot be done everywhere: what is done there changes nothing")
        return lambda *args: Collection([getattr(lane, name)(*args) for lane in self._lanes])

    def __getitem__(self, place: Any) -> Any:
        values = [lane[place] for lane in self._lanes]  # type: ignore[index] # elements have it
        return Collection([value.copy() if isinstance(value, Element) else value for value in values])

    def __iter__(self) -> Any:
        raise TypeError(
            "everywhere is followed by what is done there, as in mp.everywhere(self.field).copy()"
        )


def _state(instance: Any) -> _State:
    if "__millpond_state__" not in instance.__dict__:
        cls = type(instance)
        instance.__millpond_state__ = _State(cls.__mro__[1], cls.__millpond_program__.lanes, SLICES)
    state: _State = instance.__millpond_state__
    return state


def _reader(name: str) -> Callable[[Any], Any]:
    return lambda instance: _state(instance).field(name)


def _method(method: FunctionType) -> Any:
    signature = inspect.signature(method)
    defaults = {name: p.default for name, p in signature.parameters.items() if p.default is not p.empty}

    @functools.wraps(method)
    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        state = _state(instance)
        bound = signature.bind(instance, *args, **kwargs)
        # A default is the same for every call, whatever an earlier one has done to it.
        bound.arguments |= {name: deepcopy(d) for name, d in defaults.items() if name not in bound.arguments}
        if state.depth == 0:
            for parameter in _parameters(instance, method.__name__):
                bound.arguments[parameter.name] = fit(bound.arguments[parameter.name], parameter.type)
            # Until the first access by key, a row goes by its first argument that can be one.
            state.last_key = bound.arguments.get(_first_key(instance, method.__name__))
        state.depth += 1
        try:
            result = method(*bound.args, **bound.kwargs)
        finally:
            state.depth -= 1
        # What is returned from a call is no part of the state any more.
        return result.copy() if state.depth == 0 and isinstance(result, Element) else result

    return call


def _parameters(instance: Any, name: str) -> tuple[Parameter, ...]:
    """Those of a method that can be called from outside."""
    graph: Graph = instance.__millpond_graph__
    return next((m.parameters for m in graph.methods if m.name == name), ())


def _first_key(instance: Any, name: str) -> str:
    return first_key({p.name: p.type for p in _parameters(instance, name)})


@cache
def _fields(cls: type) -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    methods = [value for value in vars(cls).values() if inspect.isfunction(value)]
    names = {**inspect.getclosurevars(methods[0]).nonlocals, **methods[0].__globals__} if methods else None
    for name, hint in typing.get_type_hints(cls, globalns=names, include_extras=True).items():
        kind = next((k for k in getattr(hint, "__metadata__", ()) if isinstance(k, Kind)), None)
        if kind is not None:
            found[name] = (kind.name, hint.__origin__)
    return found


def _made(element: Any) -> Any:
    if typing.get_origin(element) is Map:
        key, value = typing.get_args(element)
        return Map(_name_of(key), _name_of(value))
    return element()


def _name_of(kind: Any) -> str:
    """The DDL of a type that a Map is given."""
    if typing.get_origin(kind) is list:
        return f"array<{_name_of(typing.get_args(kind)[0])}>"
    if isinstance(kind, type) and issubclass(kind, Element):
        return kind.TYPE
    return _TYPES[kind]
