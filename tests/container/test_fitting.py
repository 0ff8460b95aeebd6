"""A slice may come, from what the same container holds for others, of a resident that has grown since: it is made fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from millpond.code import windows
from millpond.container.core import Core
from millpond.wire.base import SliceId, Term
from millpond.wire.dedups import DedupSpec
from millpond.wire.programs import FieldSpec, ProgramSpec
from millpond.wire.specs import Resident, Spec
from millpond.wire.windows import WindowSpec

FIRST = FieldSpec("partitioned", "map", "long", "long")
GROWING: dict[str, tuple[Spec, dict[str, Any]]] = {
    "dedup": (DedupSpec("it", "k long", None), {"value": "k long, t long"}),
    "window": (
        WindowSpec("it", "k long", None, windows.tumbling(10), {"all": windows.median("v")}),
        {"value": "v long"},
    ),
    "program": (ProgramSpec("it", 1, {"a": FIRST}), {"fields": {"a": FIRST, "b": FIRST}}),
}


def shown(core: Core, number: int) -> Any:
    """What a slice knows of its resident."""
    store = core.holdings["it"].slices[SliceId(number)].store
    return sorted(store.fields) if hasattr(store, "fields") else store.shape.staged


@pytest.mark.parametrize("kind", GROWING)
def test_a_slice_that_missed_how_its_resident_grew_knows_it_where_it_comes_to(kind: str) -> None:
    spec, more = GROWING[kind]
    small = Resident(spec, 1, -math.inf, -math.inf)
    grown = replace(small, spec=replace(spec, **more))
    serving, backing = (Core(0, Term(1), pond_slices=2) for _ in range(2))
    for core, owned in ((serving, 0), (backing, 1)):
        core.add(small)
        core.install({SliceId(owned): {}})
    serving.add(grown)
    moved = backing.release([SliceId(1)])
    serving.install(moved)
    backing.add(grown)
    assert shown(serving, 1) == shown(serving, 0)
    serving.validate()
