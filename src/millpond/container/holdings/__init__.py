"""What a container holds of each kind of resident: one module a kind, and the one registry that finds it."""

from __future__ import annotations

from typing import Any

from millpond.container.holdings.base import Holding, Kind, Means
from millpond.container.holdings.group import GroupKind
from millpond.container.holdings.state import StateKind
from millpond.wire.specs import GroupSpec, Resident, Spec, StateSpec

KINDS: dict[type[Any], Kind] = {StateSpec: StateKind(), GroupSpec: GroupKind()}


def kind_of(spec: Spec) -> Kind:
    return KINDS[type(spec)]


def holding_of(resident: Resident, pond_slices: int, means: Means) -> Holding[Any]:
    return kind_of(resident.spec).holding(resident, pond_slices, means)
