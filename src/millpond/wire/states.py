"""A State on the wire: its spec, what its epochs bring, and what it is asked."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import msgspec
import pyarrow as pa

from millpond.code.capture import Code
from millpond.code.rules import CompactRule, FetchName, UpdateRule
from millpond.schema import KEY, LOW, SEQ, TIME, KeyKind, key_kind, parse_ddl
from millpond.times import Progress
from millpond.wire.base import CALL_S, LONG_CALL_S, Ask, Done, Read, SliceId, check_progress
from millpond.wire.resident import ResidentSpec


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

    @property
    def runs_code(self) -> bool:
        return self.update.code is not None

    @property
    def span_kind(self) -> str:
        return self.compact.span_kind


class RowsWork(msgspec.Struct, frozen=True, tag="rows", forbid_unknown_fields=True):
    """The epoch's rows are inserted into a State."""


class Question(Ask[Done], frozen=True, tag=True):
    """Questions to a State follow as one batch grouped by slice, with its per-slice counts.

    Answers come in the same order. A read-only token may ask, but sends no code.
    """

    rule: FetchName
    code: Code | None = None
    returns: str = ""

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """A rule of the user's own takes as long as it may."""
        return CALL_S if self.code is None else LONG_CALL_S

    @property
    def brings_code(self) -> bool:  # type: ignore[override]
        return self.code is not None


class ReadSlices(Read, frozen=True, tag=True):
    """One row per key of these slices: the newest version with time <= `at`; of all its versions if `at` is +inf."""

    at: Progress
    slices: list[SliceId]

    def __post_init__(self) -> None:
        check_progress(self.at)
