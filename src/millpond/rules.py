"""Rules: what runs beside the state when a row updates it, a row asks it, or old values are compacted.

A rule is a small frozen value that travels by name; user code never does.
"""

from __future__ import annotations

from typing import Literal

import msgspec

UpdateName = Literal["put"]
CompactName = Literal["keep_latest", "keep_all"]
FetchName = Literal["latest", "values", "count", "total", "smallest", "largest"]


class UpdateRule(msgspec.Struct, frozen=True):
    name: UpdateName


class CompactRule(msgspec.Struct, frozen=True):
    name: CompactName


class FetchRule(msgspec.Struct, frozen=True):
    name: FetchName


def put() -> UpdateRule:
    """Add `(time, value)` to the key's value set; a value at the same time is replaced."""
    return UpdateRule("put")


def keep_latest() -> CompactRule:
    """Below fetch progress F keep only the newest value of each key; from F on keep all."""
    return CompactRule("keep_latest")


def keep_all() -> CompactRule:
    """Keep every value for ever."""
    return CompactRule("keep_all")


def latest() -> FetchRule:
    """The newest value of the range; null if there is none."""
    return FetchRule("latest")


def values() -> FetchRule:
    """All values of the range in time order, as an array; empty if there is none."""
    return FetchRule("values")


def count() -> FetchRule:
    """How many values the range holds, null ones included."""
    return FetchRule("count")


def total() -> FetchRule:
    """The sum of the range's values; nulls are ignored, null if nothing is left."""
    return FetchRule("total")


def smallest() -> FetchRule:
    """The smallest value of the range; nulls are ignored, null if nothing is left."""
    return FetchRule("smallest")


def largest() -> FetchRule:
    """The largest value of the range (NaN above all numbers); nulls are ignored, null if nothing is left."""
    return FetchRule("largest")
