"""Deduplication on the wire: its spec. Its epochs bring, and it is asked, what a window's do and is."""

from __future__ import annotations

from typing import ClassVar

from millpond.wire.base import Count, KindOfTime
from millpond.wire.resident import ResidentSpec


class DedupSpec(ResidentSpec, frozen=True, tag="dedup", forbid_unknown_fields=True):
    """The first row of each key passes, others at less than `within` from it do not; with 0, none ever does.

    Types are canonical DDL. `value` are all columns of the rows that pass; None until the first rows tell them.
    """

    kind: ClassVar[str] = "dedup"
    plural: ClassVar[str] = "dedups"

    key: str
    value: str | None
    within: Count = 0
    within_kind: KindOfTime = ""

    @property
    def runs_code(self) -> bool:
        return False

    @property
    def span_kind(self) -> str:
        return self.within_kind
