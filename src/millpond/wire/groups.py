"""A group of tables on the wire: its spec, what its epochs bring, and what it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from millpond.code.tables import TableSpec, TransactionSetCode
from millpond.wire.base import Count, Done, Exchange, Name, Read, SliceId
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
    """The epoch's events run: the functions, the columns that tell kind, time and order, and the Arrow schema."""

    functions: TransactionSetCode
    kind: str
    at: str
    seq: str | None
    schema: bytes


class FindRows(Exchange[Done], frozen=True, tag=True):
    """Keys of a table follow as one batch. Answers are the rows of those that are there."""

    reads: ClassVar[bool] = True

    table: Name


class ReadTable(Read, frozen=True, tag=True):
    """Every row of a table, as whole epochs left it."""

    table: Name
