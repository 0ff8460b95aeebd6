"""Values that travel from task to task, and are kept in maps: their types, and copies that fit them.

A type is Spark's DDL for `long`, `double`, `boolean`, `string` and arrays of these; an element, `vector`, `matrix` or
`dense`; or `collection<...>` of one of them. None fits every type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

NUMBERS = ("long", "double", "boolean")
SCALARS = ("long", "double", "boolean", "string")
ELEMENTS = ("vector", "matrix", "dense", "map")
LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1
_INNER = re.compile(r"(array|collection)<(.*)>")


def inner_of(kind: str) -> str:
    """The type of the items of an array or collection; empty where it is none."""
    match = _INNER.fullmatch(kind)
    return match[2] if match else ""


def travels(kind: str) -> bool:
    """Whether values of the type can go from task to task."""
    if kind in SCALARS or kind in ELEMENTS[:3]:
        return True
    if kind.startswith("array<"):
        return inner_of(kind) in SCALARS
    return (
        kind.startswith("collection<")
        and not inner_of(kind).startswith("collection")
        and travels(inner_of(kind))
    )


def zero_of(kind: str) -> Any:
    """What an absent value of the type reads as."""
    return {"long": 0, "double": 0.0}.get(kind)


def fit(value: Any, kind: str) -> Any:
    """A copy of the value as one of the type. If it is none a TypeError, an OverflowError for a long beyond 64 bits, or a
    UnicodeEncodeError for a text with half a character.
    """
    if value is None:
        return None
    if kind in SCALARS:
        return _SCALAR[kind](value)
    if kind in ELEMENTS:
        if getattr(type(value), "TYPE", kind) != kind or not hasattr(value, "entries"):
            raise TypeError(f"{value!r} is no {kind}")
        return value.copy()
    inner = inner_of(kind)
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is no {kind}")
    return [fit(item, inner) for item in value]


def _long(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{value!r} is no long")
    number = int(value)
    if not LONG_MIN <= number <= LONG_MAX:
        raise OverflowError(f"{number} is beyond the 64 bits of a long")
    return number


def _double(value: Any) -> float:
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{value!r} is no double")
    return float(value)


def _boolean(value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{value!r} is no boolean")
    return bool(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    if not value.isascii():
        value.encode()  # half of a surrogate pair is no text that can be kept
    return str(value)


_SCALAR: dict[str, Callable[[Any], Any]] = {
    "long": _long,
    "double": _double,
    "boolean": _boolean,
    "string": _string,
}
