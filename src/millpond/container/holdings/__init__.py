"""What a container holds of each kind of resident: one module a kind, and the one registry that finds it."""

from __future__ import annotations

from typing import Any

from millpond.container.holdings.base import Holding, Means
from millpond.container.holdings.dedup import DedupHolding
from millpond.container.holdings.group import GroupHolding
from millpond.container.holdings.join import JoinHolding
from millpond.container.holdings.program import ProgramHolding
from millpond.container.holdings.state import StateHolding
from millpond.container.holdings.window import WindowHolding
from millpond.wire.dedups import DedupSpec
from millpond.wire.groups import GroupSpec
from millpond.wire.joins import JoinSpec
from millpond.wire.programs import ProgramSpec
from millpond.wire.specs import Resident, Spec
from millpond.wire.states import StateSpec
from millpond.wire.windows import WindowSpec

KINDS: dict[type[Any], type[Holding[Any]]] = {
    StateSpec: StateHolding,
    GroupSpec: GroupHolding,
    WindowSpec: WindowHolding,
    JoinSpec: JoinHolding,
    DedupSpec: DedupHolding,
    ProgramSpec: ProgramHolding,
}


def kind_of(spec: Spec) -> type[Holding[Any]]:
    return KINDS[type(spec)]


def holding_of(resident: Resident, pond_slices: int, means: Means) -> Holding[Any]:
    return kind_of(resident.spec)(resident, pond_slices, means)
