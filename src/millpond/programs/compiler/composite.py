"""Types as text, and what two of them have in common. Those that do not travel are `dict<K,V>`, `set<T>` and `tuple<A,B>`.

None is of every type, a long beside doubles is a double. A type, or a part of one, is empty where it cannot be told.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from typing import Any

from millpond.programs.values import inner_of

NULL, UNKNOWN, EMPTY = "null", "", "array<null>"
DICT, SET, TUPLE = "dict", "set", "tuple"
_HEADS = {dict: DICT, set: SET, frozenset: SET, tuple: TUPLE}


def made(head: str, *parts: str) -> str:
    return f"{head}<{','.join(parts)}>"


def head_of(kind: str) -> str:
    """Which of them it is; empty for all other types."""
    head = kind.split("<", 1)[0]
    return head if head in (DICT, SET, TUPLE) else ""


def parts_of(kind: str) -> list[str]:
    """The types inside of one of them."""
    inner = kind.split("<", 1)[1][:-1] if head_of(kind) else ""
    found, depth = [""], 0
    for letter in inner:
        depth += {"<": 1, ">": -1}.get(letter, 0)
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def shown(kind: str) -> str:
    """As messages tell it."""
    return head_of(kind) or kind


def is_set(kind: str) -> bool:
    return head_of(kind) == SET


def composite_of(hint: Any, type_of: Callable[[Any], str]) -> str:
    """The type that an annotation stands for, if it is one of them; `type_of` tells all other ones."""
    head = _HEADS.get(typing.get_origin(hint) or hint, "")
    args = typing.get_args(hint)
    if not head or ... in args:
        return ""
    parts = [composite_of(arg, type_of) or type_of(arg) for arg in args]
    return made(head, *(parts or [""] * {DICT: 2, SET: 1, TUPLE: 1}[head]))


def join(left: str, right: str) -> str | None:
    """The type of what is one or the other; None if there is none."""
    if right in (left, NULL):
        return left
    if left == NULL:
        return right
    if {left, right} == {"long", "double"}:
        return "double"
    for kind in ("array", "collection"):
        if left.startswith(f"{kind}<") and right.startswith(f"{kind}<"):
            inner = join(inner_of(left), inner_of(right))
            return f"{kind}<{inner}>" if inner is not None else None
    if head_of(left) and head_of(left) == head_of(right):
        pairs = list(zip(parts_of(left), parts_of(right), strict=False))
        if len(parts_of(left)) != len(parts_of(right)):
            return UNKNOWN
        return made(head_of(left), *(join(a, b) or UNKNOWN for a, b in pairs))
    return None if left and right else UNKNOWN


def as_list(kind: str) -> str:
    """The type of the list that a tuple becomes where a list is wanted; of all else its own."""
    if head_of(kind) != TUPLE:
        return kind
    inner = joined(parts_of(kind))
    return f"array<{inner}>" if inner else UNKNOWN


def joined(kinds: Iterable[str]) -> str:
    found = NULL
    for kind in kinds:
        both = join(found, kind)
        if not both:
            return UNKNOWN
        found = both
    return found
