"""A key is hashed once on the way in and once at the check, whatever becomes of it in between."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from millpond.client.client import Client
from millpond.errors import Moved
from millpond.kernels import hashing
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

ROWS = 200


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many keys each call of a hash was given. Values are longs: whatever is hashed is a key."""
    counts: list[int] = []
    hash_longs, hash_bytes = hashing.hash_longs, hashing.hash_bytes

    def count_longs(keys: Any) -> Any:
        counts.append(len(keys))
        return hash_longs(keys)

    def count_bytes(offsets: Any, data: Any) -> Any:
        counts.append(len(offsets) - 1)
        return hash_bytes(offsets, data)

    monkeypatch.setattr(hashing, "hash_longs", count_longs)
    monkeypatch.setattr(hashing, "hash_bytes", count_bytes)
    return counts


@pytest.fixture
def pond() -> Iterator[LocalPond]:
    # One container: of several, those that are not asked again would have checked already.
    with LocalPond(LossyFiles(), slices=8) as opened:
        yield opened
        opened.validate()


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Containers that the client is told have moved away, when it first turns to one of them."""
    told: list[int] = []
    connection = Client._connection

    def first_moved(client: Client, placement: Any, container: int) -> Any:
        if told:
            raise Moved("elsewhere", slice_id=told.pop())
        return connection(client, placement, container)

    monkeypatch.setattr(Client, "_connection", first_moved)
    return told


@pytest.mark.parametrize("key", ["long", "string"])
@pytest.mark.parametrize("retried", [False, True], ids=["at-once", "retried"])
@pytest.mark.parametrize("seq", [None, "s"])
def test_keys_are_hashed_twice_in_all(
    pond: LocalPond, hashed: list[int], moved: list[int], key: str, retried: bool, seq: str | None
) -> None:
    state = pond.state("s", key=key, value="long")
    update = state.update(key="k", at="t", value="v", seq=seq, name="feed")
    numbers = list(range(ROWS))
    keys = pa.array([n % 50 for n in numbers], pa.int64()).cast(
        pa.string() if key == "string" else pa.int64()
    )
    rows = pa.table({"k": keys, "t": numbers, "v": numbers, "s": numbers[::-1]})
    moved.extend([0] if retried else [])
    update(rows, 0)
    assert sum(hashed) == 2 * ROWS
    state.finish("feed")
    hashed.clear()
    moved.extend([0] if retried else [])
    answers = state.fetch(key="k", at="t", into="a").now(rows.select(["k", "t"]))
    assert answers["a"].to_pylist() == numbers
    assert sum(hashed) == 2 * ROWS
