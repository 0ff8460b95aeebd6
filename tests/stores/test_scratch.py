"""Events of several chunks as one array each, in memory that one epoch hands to the next."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from millpond.stores import scratch
from millpond.stores.scratch import Scratch

FLOATS = pa.list_(pa.float64())


def chunked(seed: int, rows: int = 1000) -> pa.Table:
    """Of all kinds of columns, in chunks of uneven sizes that begin anywhere in their buffers."""
    rng = np.random.default_rng(seed)
    whole = pa.table(
        {
            "long": rng.integers(-9, 9, rows),
            "small": pa.array(rng.integers(0, 99, rows), pa.int16()),
            "double": rng.random(rows),
            "at": pa.array(rng.integers(0, 99, rows), pa.timestamp("us")),
            "flag": rng.random(rows) < 0.5,
            "text": [f"t{number}" for number in rng.integers(0, 99, rows)],
            "holes": pa.array(rng.integers(0, 9, rows), mask=rng.random(rows) < 0.2),
            "none": pa.nulls(rows),
            "list": [[number] for number in range(rows)],
            "lists": pa.array([[None, -1.5] * (n % 4) if n % 3 else None for n in range(rows)], FLOATS),
            "large": pa.array([[n] * (n % 5) for n in range(rows)], pa.large_list(pa.int32())),
            "texts": [[str(number)] for number in range(rows)],
        }
    )
    ends = [0, *sorted(rng.integers(0, rows + 1, 5).tolist()), rows]
    return pa.concat_tables([whole.slice(a, b - a) for a, b in pairwise(ends)])


def test_the_named_columns_come_in_one_chunk_and_the_others_are_left_alone() -> None:
    memory = Scratch()
    for seed, rows in enumerate((1000, 10, 3000, 0, 1000)):
        table = chunked(seed, rows)
        names = [name for name in table.column_names if name != "text"]
        joined = memory.joined(table, [*names, "long", "nowhere"])
        assert joined.schema == table.schema
        assert joined.equals(table)
        joined.validate(full=True)
        if rows:
            assert all(joined[name].num_chunks == 1 for name in names)
            assert joined["text"].num_chunks == table["text"].num_chunks > 1


def test_memory_is_used_again_and_the_chunks_that_came_stay_as_they_were() -> None:
    memory = Scratch()
    first, second = chunked(1), chunked(2)
    copy = pa.Table.from_pydict(first.to_pydict(), first.schema)
    addresses = [
        memory.joined(table, ["long"])["long"].chunk(0).buffers()[1].address for table in (first, second)
    ]
    assert addresses[0] == addresses[1]
    assert first.equals(copy)


def test_what_is_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "BYTES_MAX", 12_000)
    memory = Scratch()
    table = chunked(3)
    assert memory.joined(table, ["long", "double", "small"]).equals(table)
    assert 0 < memory.nbytes <= 12_000


def test_what_no_epoch_needs_is_let_go() -> None:
    memory = Scratch()
    memory.joined(chunked(4), ["long"])
    for _ in range(scratch.IDLE_MAX - 1):
        memory.rest()
    assert memory.nbytes > 0
    memory.joined(chunked(5), ["long"])
    for _ in range(scratch.IDLE_MAX):
        memory.rest()
    assert memory.nbytes == 0
