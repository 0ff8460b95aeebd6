"""Entries of fields by column, as compiled code has them and as Arrow takes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.kernels.cells import NULL, PRESENT
from millpond.programs.decided import ABSENT, Place

Longs = NDArray[np.int64]
Doubles = NDArray[np.float64]
Flags = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Columns:
    """Rows (0 where there are none), keys, words (the 64 bits of a number), and flags: 0 where an entry is deleted, PRESENT,
    and NULL beside it where the value is None.
    """

    rows: Longs
    keys: Longs
    words: Longs
    flags: Flags

    def __len__(self) -> int:
        return len(self.keys)


def columns_of(kind: str, value: str, items: Sequence[tuple[Place, Any]]) -> Columns:
    """The same of places and values, of a field of that kind whose values are of that type."""
    places = [place if kind == "matrix" else (0, place) for place, _ in items]
    words, flags = words_of(value, [None if each is ABSENT else each for _, each in items])
    flags[[each is ABSENT for _, each in items]] = 0
    rows, keys = (np.array([place[i] for place in places], np.int64) for i in (0, 1))
    return Columns(rows, keys, words, flags)


def pairs_in(kind: str, value: str, columns: Columns) -> list[tuple[Place, Any]]:
    """Places and values, of columns in which nothing is deleted."""
    keys = columns.keys.tolist()
    places = list(zip(columns.rows.tolist(), keys, strict=True)) if kind == "matrix" else keys
    return list(zip(places, values_of(value, columns.words, columns.flags), strict=True))


def present(count: int) -> Flags:
    return np.full(count, PRESENT, np.uint8)


def values_of(kind: str, words: Longs, flags: Flags) -> list[Any]:
    """Words as values of that type; of matrices and vectors, which have none, as doubles."""
    if kind in ("long", "boolean"):
        values: list[Any] = words.astype(bool).tolist() if kind == "boolean" else words.tolist()
    else:
        values = words.view(np.float64).tolist()
    if (flags & NULL).any():
        return [None if null else value for value, null in zip(values, (flags & NULL).tolist(), strict=True)]
    return values


def words_of(kind: str, values: list[Any]) -> tuple[Longs, Flags]:
    """The words and flags of such values."""
    flags = np.array([PRESENT | NULL if value is None else PRESENT for value in values], np.uint8)
    plain = [0 if value is None else value for value in values]
    if kind in ("long", "boolean"):
        return np.array(plain, np.int64), flags
    return np.array(plain, np.float64).view(np.int64), flags
