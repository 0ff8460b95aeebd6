"""What the pond holds, as messages and files tell of it: a tagged spec for each kind, and a tagged work for its epochs.

A *resident* is a named thing in the pond, of any kind: a State, a group of tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import msgspec
import pyarrow as pa

from millpond.code.rules import CompactRule, UpdateRule
from millpond.code.tables import TableSpec, TransactionSetCode
from millpond.schema import KEY, LOW, SEQ, TIME, KeyKind, key_kind, parse_ddl
from millpond.times import Progress
from millpond.wire.base import Count, Name, ResidentId, SliceId


class StateShape:
    """What everyone who handles a State's rows needs to know of them; derived once from its spec."""

    def __init__(self, key: str, value: str) -> None:
        self.keys: pa.Schema = parse_ddl(key, "key")
        self.values: pa.Schema = parse_ddl(value, "value")
        self.key_kind: KeyKind = key_kind(self.keys)
        self.key_type: pa.DataType = pa.int64() if self.key_kind == "i64" else pa.binary()
        self.rows = pa.schema([(KEY, self.key_type), (TIME, pa.int64()), *self.values])
        """A row in the pond's terms."""
        self.sequenced_rows = self.rows.append(pa.field(SEQ, pa.int64()))
        """The same with its place among those of one key and time."""
        self.questions = pa.schema([(KEY, self.key_type), (TIME, pa.int64())])
        self.ranged_questions = self.questions.append(pa.field(LOW, pa.int64()))


class ResidentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a resident of any kind says of itself; a kind adds what only its own holding and operators know.

    `kind` is the word for it, `plural` the word under which figures of all of them stand.
    """

    kind: ClassVar[str]
    plural: ClassVar[str]

    name: Name

    def places(self, slices: int) -> Sequence[SliceId]:
        """The slices that it lives in, of so many."""
        raise NotImplementedError

    @property
    def runs_code(self) -> bool:
        """Whether its epochs run user code: they may take long, and end their container."""
        raise NotImplementedError

    @property
    def span_kind(self) -> str:
        """The kind of time that its rules ask for; empty for any."""
        return ""


class StateSpec(ResidentSpec, frozen=True, tag="state", forbid_unknown_fields=True, dict=True):
    """What a State is: its types as canonical DDL, and its rules. It lives in all slices."""

    kind: ClassVar[str] = "state"
    plural: ClassVar[str] = "states"

    key: str
    value: str
    update: UpdateRule
    compact: CompactRule

    @cached_property
    def shape(self) -> StateShape:
        return StateShape(self.key, self.value)

    def places(self, slices: int) -> Sequence[SliceId]:
        return [SliceId(number) for number in range(slices)]

    @property
    def runs_code(self) -> bool:
        return self.update.code is not None

    @property
    def span_kind(self) -> str:
        return self.compact.span_kind


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


Spec = StateSpec | GroupSpec


class RowsWork(msgspec.Struct, frozen=True, tag="rows", forbid_unknown_fields=True):
    """The epoch's rows are inserted into a State."""


class TransactionWork(msgspec.Struct, frozen=True, tag="transactions", forbid_unknown_fields=True):
    """The epoch's events run: the functions, the columns that tell kind, time and order, and the Arrow schema."""

    functions: TransactionSetCode
    kind: str
    at: str
    seq: str | None
    schema: bytes


Work = RowsWork | TransactionWork


class Resident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A resident as containers learn of it. `born` tells it from an earlier one of the same name."""

    spec: Spec
    born: Count
    fetch_progress: Progress
    final_below: Progress

    @property
    def id(self) -> ResidentId:
        return ResidentId(f"{self.spec.name}.{self.born}")
