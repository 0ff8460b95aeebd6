"""What a container has to be told of a resident, by what it knows of it."""

from __future__ import annotations

import math

import pytest

from millpond.code.tables import TableSpec
from millpond.coordinator.telling import news_of
from millpond.wire.groups import GroupSpec
from millpond.wire.house import AddResident, DropResident
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
