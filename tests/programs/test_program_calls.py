"""Streamed calls of programs in a pond: what they return and leave is what plain Python would."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest
from program_graphs import graph, method, recommender, store, task

from millpond.errors import (
    BadOption,
    MillpondError,
    NullKey,
    ProgramFailed,
    SchemaMismatch,
    WrongColumn,
    WrongType,
)
from millpond.programs.graph import Field
from millpond.programs.slicing import lane_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 8


class PlainRecommender:
    """The same without anything of Millpond but where a key belongs."""

    def __init__(self, lanes: int) -> None:
        self.rows: dict[int, dict[int, float]] = defaultdict(dict)
        self.lanes: list[dict[tuple[int, int], float]] = [defaultdict(float) for _ in range(lanes)]

    def add_rating(self, user: int, item: int, rating: float) -> None:
        row = self.rows[user]
        others = [] if item in row else sorted(row)
        row[item] = rating
        counts = self.lanes[lane_of(user, SLICES, len(self.lanes))]
        for other in others:
            counts[item, other] += 1
            counts[other, item] += 1

    def get_rec(self, user: int, k: int = 10) -> list[int]:
        row, sums = self.rows.get(user, {}), defaultdict(float)
        for lane in self.lanes:
            for (left, right), count in lane.items():
                if right in row:
                    sums[left] += count * row[right]
        return sorted((item for item in sums if item not in row), key=lambda item: (-sums[item], item))[:k]

    def entries(self) -> tuple[dict[Any, float], dict[int, dict[Any, float]]]:
        rated = {(user, item): x for user, row in self.rows.items() for item, x in row.items()}
        return dict(sorted(rated.items())), {
            n: dict(sorted(lane.items())) for n, lane in enumerate(self.lanes) if lane
        }


def ratings(seed: int, count: int, users: int = 12, items: int = 15) -> list[tuple[int, int, float]]:
    draw = random.Random(seed)
    return [(draw.randrange(users), draw.randrange(items), float(draw.randint(1, 5))) for _ in range(count)]


def as_rows(rated: list[tuple[int, int, float]]) -> pa.Table:
    users, items, numbers = zip(*rated, strict=True)
    return pa.table({"user": users, "item": items, "rating": numbers})


@pytest.mark.parametrize("containers", [1, 2, 3])
def test_a_store_keeps_and_gives_back(containers: int) -> None:
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        kept = pond.program("kv", store())
        put = kept.call("put", value="text", name="puts")
        get = kept.call("get", key="key", into="found", name="gets")
        assert put(pa.table({"key": [1, 2, 3, 1], "text": ["a", "b", "c", "d"]}), 0).to_pydict() == {
            "key": [1, 2, 3, 1],
            "text": ["a", "b", "c", "d"],
        }
        asked = pa.table({"key": [3, 1, 9], "why": ["x", "y", "z"]})
        assert get(asked, 0).to_pydict() == {
            "key": [3, 1, 9],
            "why": ["x", "y", "z"],
            "found": ["c", "d", None],
        }
        # The same epoch again gives the same, whatever has happened since.
        put(pa.table({"key": [3], "text": ["e"]}), 1)
        assert get(asked, 0)["found"].to_pylist() == ["c", "d", None]
        assert get(asked, 1)["found"].to_pylist() == ["e", "d", None]
        assert kept.entries("kept") == {1: "d", 2: "b", 3: "e"}
        assert get(asked.slice(0, 0), 2).schema == get(asked, 1).schema
        pond.validate()


def test_a_call_that_is_rejected_says_why_and_changes_nothing() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        kept = pond.program("kv", store("double", "string"))
        kept.call("put", name="puts")(pa.table({"key": ["a"], "value": [1.5]}), 0)
        drop = kept.call("drop", into="was", name="drops")
        given = drop(pa.table({"key": ["a", "b", "a"]}), 0)
        assert given.to_pydict() == {
            "key": ["a", "b", "a"],
            "was": [1.5, None, None],
            "error": [None, "unknown", "unknown"],
        }
        assert kept.entries("kept") == {}


@pytest.mark.parametrize(("containers", "lanes"), [(1, 1), (1, 3), (2, 2), (3, 2), (3, 5)])
def test_a_recommender_is_the_plain_one(containers: int, lanes: int) -> None:
    plain = PlainRecommender(lanes)
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        rec = pond.program("rec", recommender(lanes))
        add = rec.call("add_rating", name="feed")
        ask = rec.call("get_rec", into="items", name="asked")
        for epoch in range(4):
            rated = ratings(epoch, 40)
            add(as_rows(rated), epoch)
            for each in rated:
                plain.add_rating(*each)
            given = ask(pa.table({"user": list(range(14))}), epoch)
            assert given["items"].to_pylist() == [plain.get_rec(user) for user in range(14)]
            assert (rec.entries("user_item"), rec.entries("co_occ")) == plain.entries()
        pond.validate()


def test_everything_comes_back_after_a_crash_from_log_and_snapshots() -> None:
    files = LossyFiles(1)
    plain = PlainRecommender(2)
    for opening in range(4):
        pond = LocalPond(files, containers=2, slices=SLICES)
        rec = pond.program("rec", recommender())
        assert (rec.entries("user_item"), rec.entries("co_occ")) == plain.entries()
        add = rec.call("add_rating", name="feed")
        for epoch in range(3 * opening, 3 * opening + 3):
            rated = ratings(epoch, 20)
            add(as_rows(rated), epoch)
            for each in rated:
                plain.add_rating(*each)
            if epoch % 3 == opening % 2:
                pond.checkpoint()
                pond.maintain()
        # What was acknowledged is there; the same epoch again is a replay.
        assert add(as_rows(rated), epoch).num_rows == len(rated)
        assert (rec.entries("user_item"), rec.entries("co_occ")) == plain.entries()
        files = files.crash()


def failing() -> Any:
    """Fails at the second field, after it has written to the first."""
    put = [
        task(
            0,
            "state[key] = value\nreturn 1, (key, value)",
            "key long, value long",
            "first",
            "partitioned",
            "key",
            writes=True,
        ),
        task(
            1,
            "state[key + 1] += 1\nif value < 0:\n    raise ValueError('below')\nstate[key] = 10 // value\nreturn -1, (None,)",
            "key long, value long",
            "second",
            "lane",
            "key",
            writes=True,
            level=1,
        ),
    ]
    turn = [task(0, "return 0, (key,)", "key long", "first", "partitioned", "key")]
    return graph(
        "Failing",
        [
            Field("first", "partitioned", "map", "long", "long", 0, 1),
            Field("second", "partial", "map", "long", "long", 1, 2),
        ],
        [method("put", "key long, value long", None, put), method("turn", "key long", None, turn)],
        lanes=3,
        max_rounds=20,
    )


@pytest.mark.parametrize("containers", [1, 3])
def test_an_epoch_that_fails_changes_nothing_and_says_where(containers: int) -> None:
    with LocalPond(LossyFiles(1), containers=containers, slices=SLICES) as pond:
        program = pond.program("p", failing())
        put = program.call("put", name="feed")
        put(pa.table({"key": [1, 2, 3], "value": [1, 2, 5]}), 0)
        before = program.entries("first"), program.entries("second")
        with pytest.raises(ProgramFailed, match="ValueError: below") as caught:
            put(pa.table({"key": [1, 2, 9], "value": [7, -1, 3]}), 1)
        assert (caught.value.method, caught.value.row, caught.value.line) == ("put", 1, 103)
        with pytest.raises(ProgramFailed, match="ZeroDivisionError"):
            put(pa.table({"key": [1, 2], "value": [7, 0]}), 1)
        assert (program.entries("first"), program.entries("second")) == before
        pond.validate()
        put(pa.table({"key": [1], "value": [2]}), 1)
        assert program.entries("first") == {1: 2, 2: 2, 3: 5}
        with pytest.raises(ProgramFailed, match="20 tasks"):
            program.call("turn", name="turns")(pa.table({"key": [1, 2]}), 0)
        pond.validate()


def test_bad_rows_and_bad_names_are_refused() -> None:
    with LocalPond(LossyFiles(1), slices=SLICES) as pond:
        program = pond.program("kv", store())
        cases: list[tuple[type[MillpondError], Any]] = [
            (BadOption, lambda: program.call("take", name="x")),
            (BadOption, lambda: program.call("put", text="x", name="x")),
            (BadOption, lambda: program.call("put", into="x", name="x")),
            (WrongColumn, lambda: program.call("get", name="a")(pa.table({"k": [1]}), 0)),
            (WrongType, lambda: program.call("get", name="b")(pa.table({"key": ["one"]}), 0)),
            (NullKey, lambda: program.call("get", name="c")(pa.table({"key": [1, None]}), 0)),
            (WrongColumn, lambda: program.call("get", into="key", name="d")(pa.table({"key": [1]}), 0)),
            (BadOption, lambda: pond.program("kv", int)),
            (SchemaMismatch, lambda: pond.program("kv", store("long"))),
        ]
        for kind, work in cases:
            with pytest.raises(kind) as caught:
                work()
            assert caught.value.hint
        assert program.entries("kept") == {}
        assert pond.programs() == ["kv"]


def test_a_field_that_is_added_is_empty() -> None:
    files = LossyFiles(1)
    with LocalPond(files, slices=SLICES) as pond:
        pond.program("p", store()).call("put", name="feed")(pa.table({"key": [1], "value": ["a"]}), 0)
        more = store()._replace(
            fields=(*store().fields, Field("more", "partial", "vector", "long", "double", 0, 9)),
        )
        program = pond.program("p", more)
        assert (program.entries("kept"), program.entries("more")) == ({1: "a"}, {})
        # Code without a field lets it be.
        pond.program("p", store())
        assert pond.program("p", more).entries("kept") == {1: "a"}
