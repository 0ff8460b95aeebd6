"""What containers are told of residents, by what they know of them."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from millpond.code.tables import TableSpec
from millpond.coordinator import catalogue
from millpond.coordinator.telling import news_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.dedups import DedupSpec
from millpond.wire.groups import GroupSpec
from millpond.wire.house import AddResident, Advance, DropResident
from millpond.wire.specs import Resident

TABLE = TableSpec("k long", "x long", {"x": 0})


def group(born: int, *tables: str, fetch: float = -math.inf) -> Resident:
    return Resident(GroupSpec("g", 0, dict.fromkeys(tables, TABLE)), born, fetch, -math.inf)


@pytest.mark.parametrize(
    ("known", "now", "news"),
    [
        (None, None, []),
        (None, group(1, "a"), [AddResident(group(1, "a"))]),
        (group(1, "a"), group(1, "a"), []),
        (group(1, "a"), group(1, "a", fetch=5), []),
        (group(1, "a"), group(1, "a", "b"), [AddResident(group(1, "a", "b"))]),
        (group(1, "a"), None, [DropResident("g", 1)]),
        (group(1, "a"), group(2, "a"), [DropResident("g", 1), AddResident(group(2, "a"))]),
    ],
)
def test_news(known: Resident | None, now: Resident | None, news: list[object]) -> None:
    assert news_of(known, now) == news


def test_a_container_that_left_is_told_nothing_any_more() -> None:
    pond = LocalPond(LossyFiles(), "/pond", 2, 4)
    coordinator = pond.coordinator
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="at", value="v", name="feed")
    state.report("reader", fetch=0)
    scaling = coordinator.elasticity.scale(1)
    assert (scaling.error, coordinator.elasticity.containers) == (None, [0])
    containers = coordinator._containers
    told: list[int] = []
    ask = containers.ask

    def listen(container: int, message: Any) -> Any:
        if isinstance(message, Advance):
            told.append(container)
        return ask(container, message)

    containers.ask = listen
    feed(pa.table({"k": [1], "at": [10], "v": [1]}), 0)
    state.report("reader", fetch=5)
    assert set(told) == {0}


def test_an_epoch_begins_once_all_know_the_resident_as_clients_read_it() -> None:
    pond = LocalPond(LossyFiles(), "/pond", 2, 4)
    firsts = pond.dedup("firsts", key="k long")
    learnt = replace(pond._client.specs(DedupSpec)["firsts"], value="k long, ts long")
    # Another client's rows have told the types, and containers are just being told.
    pond.coordinator._memory.change(lambda record: catalogue.open_resident(record, learnt))
    rows = pa.table({"k": [1, 2, 3, 4, 1], "ts": [1, 2, 3, 4, 5]})
    assert sorted(firsts.over(key="k", at="ts")(rows, 0)["k"].to_pylist()) == [1, 2, 3, 4]
