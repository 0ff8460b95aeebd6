"""What a container holds of a deduplication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from msgspec.structs import replace

from millpond.container.holdings.base import HeldSlice, Means
from millpond.container.holdings.firing import FiringHolding, exists_otherwise
from millpond.errors import BadMessage
from millpond.schema import check_key_types, format_ddl
from millpond.stores.windows.firsts import DedupShape, DedupStore
from millpond.wire.dedups import DedupSpec
from millpond.wire.specs import Resident, Spec


class DedupHolding(FiringHolding[DedupStore]):
    """One deduplication's slices in this container. Until its types are known nothing can come for it."""

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        assert isinstance(resident.spec, DedupSpec)
        self._shape = DedupShape(resident.spec)

    @staticmethod
    def opened(
        spec: DedupSpec, existing: DedupSpec | None, others: Sequence[Spec], owners: Sequence[int]
    ) -> DedupSpec:
        """Types that were not known yet may come later, and stay."""
        if existing is None:
            _check_spec(spec)
            return spec
        known = replace(spec, value=existing.value) if spec.value is None else spec
        if existing.value is None and known == replace(existing, value=known.value):
            _check_spec(known)
            return known
        if known != existing:
            raise exists_otherwise(spec.name, "dedup", described(existing), described(spec))
        return existing

    def extend(self, resident: Resident) -> None:
        """Its types have become known: until now it held nothing."""
        if resident.spec == self.resident.spec:
            return
        assert isinstance(resident.spec, DedupSpec)
        self.resident = resident
        self._shape = DedupShape(resident.spec)
        for held in list(self.slices.values()):
            with held.lock:
                self.fit(held)

    def fit(self, held: HeldSlice[DedupStore]) -> None:
        if held.store.shape.staged != self._shape.staged:
            held.store = self.new_store()

    @property
    def may_rest(self) -> bool:
        # Whether a row passed hangs on rows before it that are forgotten, and so on: only a snapshot tells.
        return False

    def staged(self, names: Sequence[str]) -> pa.Schema:
        return self._shape.staged

    @property
    def keys(self) -> pa.Schema:
        return self._shape.keys

    def new_store(self) -> DedupStore:
        return DedupStore(self._shape, self.new_outputs())

    def figures(self) -> dict[str, Any]:
        dropped = sum(held.store.dropped for held in list(self.slices.values()))
        return {**super().figures(), "dropped": dropped}


def described(spec: DedupSpec) -> str:
    return f"key={spec.key!r}, value={spec.value!r}, within={spec.within or None}"


def _check_spec(spec: DedupSpec) -> None:
    """A spec that containers could not read must never get into the journal."""
    shape = DedupShape(spec)
    check_key_types(shape.keys)
    if format_ddl(shape.keys) != spec.key or (spec.value and format_ddl(shape.values) != spec.value):
        raise BadMessage(f"the types of dedup {spec.name!r} are not in their canonical form")
