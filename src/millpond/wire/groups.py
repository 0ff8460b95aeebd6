"""A group of tables on the wire: its spec, what its epochs bring, and what it is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from millpond.code.tables import TableSpec, TransactionSetCode
from millpond.times import Progress
from millpond.wire.base import Ask, Count, Done, Name, Read, SliceId, check_progress
from millpond.wire.resident import ResidentSpec


class GroupSpec(ResidentSpec, frozen=True, tag="group", forbid_unknown_fields=True):
    """Tables that live together, in the slice `home`: a transaction may touch any of them.

    `home` is the coordinator's to choose: none as long as nobody has.
    """

    kind: ClassVar[str] = "group"
    plural: ClassVar[str] = "groups"

    home: Count | None
    tables: dict[Name, TableSpec]

    @property
    def home_slice(self) -> SliceId:
        """Where it lives, once it was opened."""
        assert self.home is not None, "a group that was opened has a home"
        return SliceId(self.home)

    def places(self, slices: int) -> Sequence[SliceId]:
        return [] if self.home is None else [self.home_slice]

    @property
    def runs_code(self) -> bool:
        return True


class TransactionWork(msgspec.Struct, frozen=True, tag="transactions", forbid_unknown_fields=True):
    """The epoch's events run: the functions, the columns that tell kind, time and order, and the Arrow schema.

    Those below `late_below` do not, and have outputs that say so. Those that are not below `watermark` wait; without one
    all run, and those that waited up to the newest of their times. `takes_over`: what waited for other queries of the
    operator waits for this one now.
    The events may run for `seconds_max`, and take `memory_max` bytes; when they run again from the log, what they take.
    """

    functions: TransactionSetCode
    kind: str
    at: str
    seq: str | None
    schema: bytes
    late_below: Progress = -math.inf
    watermark: Progress | None = None
    takes_over: bool = False
    seconds_max: float | None = None
    memory_max: Count | None = None

    def __post_init__(self) -> None:
        check_progress(self.late_below)
        check_progress(self.watermark)


class FindRows(Ask[Done], frozen=True, tag=True):
    """Keys of a table follow as one batch. Answers are the rows of those that are there."""

    table: Name


class ReadTable(Read, frozen=True, tag=True):
    """Every row of a table, as whole epochs left it."""

    table: Name


class ReadDelayed(Read, frozen=True, tag=True):
    """Of each writer of an operator that has events which wait: how many, their oldest and newest time, and their schema."""

    operator: Name
