"""The arguments of generated kernels: what they hold, and how the code calls them.

A kernel takes arrays and numbers, in the order of its `parameters`. Whoever calls it has a mapping of them by name.
Kinds and tables go by their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from millpond.txn.compiler.values import EventField

KEYS: Final = {
    "lo": "the first event to do, of those of the kind",
    "hi": "the one after the last",
    "flat": "filled by the kernel: row numbers, or what is in place of one, as `slots` takes them",
    "offsets": "filled by the kernel, where loops have frames: as `first_slots` takes them",
    "strings": "the numbers of constant strings",
}
BODY: Final = {
    "todo": "the events to run, in order",
    "room": "cells that the log of one transaction has room for",
    "kinds": "the kind of each event",
    "index": "its place among those of its kind",
    "status": "filled by the kernel: how each event ended",
    "detail": "filled by the kernel: the row that was missing",
    "strings": "the numbers of constant strings",
    "parts": "into how many parts rows are shared out, a power of two",
    "part": "the part whose operations are done",
}


def field(kind: int, name: str) -> str:
    """The values of a field, of all rows of the table that the kind's events are in; of a list, its items."""
    return f"k{kind}_{name}"


def list_offsets(kind: int, name: str) -> str:
    """Where the items of each row's list begin, and end."""
    return f"o{kind}_{name}"


def event_rows(kind: int) -> str:
    """The row of each event of the kind in that table."""
    return f"rows_{kind}"


def slots(kind: int) -> str:
    """The number of the row of each slot of each event: the frame of the event, and those of its loops."""
    return f"flat_{kind}"


def first_slots(kind: int) -> str:
    """Where the slots of each event begin; empty where all events have equally many."""
    return f"events_{kind}"


def result(kind: int, place: int) -> str:
    """Filled by the kernel: one of the values that each event returned."""
    return f"out{kind}_{place}"


def null_result(kind: int, place: int) -> str:
    """Filled by the kernel: 1 where that value is None."""
    return f"nul{kind}_{place}"


def cells(table: int) -> str:
    """The rows of a table."""
    return f"c_{table}"


def doubles(table: int) -> str:
    """The same memory, as doubles."""
    return f"d_{table}"


def known_rows(table: int) -> str:
    """The rows of small keys, by key."""
    return f"known_{table}"


def row_slots(table: int) -> str:
    """The slots of its row index."""
    return f"ix_{table}"


def row_keys(table: int) -> str:
    """The keys of its rows, and place for more."""
    return f"kk_{table}"


def row_count(table: int) -> str:
    """How many rows have keys."""
    return f"xc_{table}"


def first_row(table: int) -> str:
    """What a row that is not there holds."""
    return f"first_{table}"


def kept(table: int) -> tuple[str, str, str, str]:
    """What undoes the epoch: marks of rows, rows, their cells, and how many."""
    return f"km_{table}", f"kr_{table}", f"kc_{table}", f"kn_{table}"


def of_fields(kind: int, fields: Mapping[str, EventField]) -> list[str]:
    out = [event_rows(kind)]
    for name, found in fields.items():
        out += [field(kind, name), list_offsets(kind, name)] if found.is_list else [field(kind, name)]
    return out


def of_key_kernel(kind: int, fields: Mapping[str, EventField], tables: Iterable[int]) -> tuple[str, ...]:
    return (*KEYS, *of_fields(kind, fields), *map(known_rows, tables))


def of_body_kernel(
    tables: Iterable[int],
    fields: Sequence[Mapping[str, EventField]],
    results: Sequence[int],
    late: Sequence[bool],
    others: Iterable[str],
) -> tuple[str, ...]:
    """`fields`, numbers of `results` and whether rows are found late, by kind; and what `others` they use."""
    out = [*BODY, *sorted(others)]
    for table in tables:
        out += [cells(table), doubles(table)]
    for kind, (own, count) in enumerate(zip(fields, results, strict=True)):
        out += of_fields(kind, own) if late[kind] else [*of_fields(kind, own), slots(kind), first_slots(kind)]
        out += [result(kind, place) for place in range(count)]
    return tuple(out)
