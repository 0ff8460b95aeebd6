"""Epochs of calls: a replay is one in any partitioning, readers see what is decided, and what is too much is said."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from program_graphs import recommender, store
from test_program_calls import as_rows, failing, ratings

from millpond.container import round_book
from millpond.errors import EpochChanged, MessageTooLarge
from millpond.kernels.cells import ROWS_IN_USE
from millpond.ops.committing import commit_staged
from millpond.ops.intake import Part
from millpond.programs.decided import ABSENT
from millpond.programs.elements import DenseMatrix, Map
from millpond.programs.tracked_cells import TrackedCells, tracked
from millpond.programs.tracking import ENTRY_BYTES, Tracked
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import Apply, EpochPlan, Receipt

SLICES = 8


def commit_in_parts(pond: LocalPond, call: Any, epoch: int, parts: list[pa.Table]) -> pa.Table:
    """As Spark does with the partitions of a batch."""
    intake, turn, client = call.intake(parts[0].schema), Turn.of(epoch), call._client

    def stage(plan: EpochPlan) -> list[Receipt]:
        staged = [
            intake.stage(client, rows, plan, Part(LOCAL_QUERY, turn, n)) for n, rows in enumerate(parts)
        ]
        return random.Random(epoch).sample(staged, len(staged))

    commit_staged(client, intake, LOCAL_QUERY, turn, stage, "", call.work(intake), "continue")
    return call.returned_in(LOCAL_QUERY, epoch, parts[0].schema)


def shown(rows: pa.Table) -> list[Any]:
    return sorted(map(repr, rows.to_pylist()))


def test_a_replay_may_be_partitioned_otherwise() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        rec = pond.program("rec", recommender(2))
        rec.call("add_rating", name="feed")(as_rows(ratings(1, 80)), 0)
        ask = rec.call("get_rec", into="items", name="asked")
        rows = pa.table({"user": [3, 1, 2, 3, 5, 4], "why": list("abcaef")})
        first = commit_in_parts(pond, ask, 0, [rows])
        seen = rec.progress().seen
        again = rows.take([5, 0, 3, 1, 4, 2])
        for parts in (
            [again],
            [again.slice(0, 2), again.slice(2)],
            [rows.slice(0, 0), *(rows.slice(n, 1) for n in range(6))],
        ):
            assert shown(commit_in_parts(pond, ask, 0, parts)) == shown(first)
        assert rec.progress().seen == seen
        with pytest.raises(EpochChanged):
            commit_in_parts(pond, ask, 0, [rows.slice(1)])
        # The first run in several partitions, and the replay in one.
        first = commit_in_parts(pond, ask, 1, [again.slice(0, 2), again.slice(2)])
        assert shown(commit_in_parts(pond, ask, 1, [rows])) == shown(first)
        assert shown(first.drop_columns(["items"])) == shown(rows)


def test_readers_see_what_is_decided_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last round of an epoch and its decision, and again when some have applied it."""
    with LocalPond(LossyFiles(1), containers=3, slices=SLICES) as pond:
        rec = pond.program("rec", recommender(3))
        kept = pond.program("kv", store())
        feed, put = rec.call("add_rating", name="feed"), kept.call("put", name="puts")
        drop = kept.call("drop", into="was", name="drops")
        feed(as_rows(ratings(1, 60)), 0)
        put(pa.table({"key": [1, 2, 3], "value": ["a", "b", "c"]}), 0)
        commits = pond.coordinator._commits
        decide = commits._decide
        looks: list[Any] = []

        def look() -> Any:
            return [rec.get_rec(user=user) for user in range(12)], [kept.get(key=key) for key in range(5)]

        def looking(*given: Any) -> Any:
            before = rec._client.runtime.now()
            looks.append(look())
            assert rec._client.runtime.now() == before, "nobody waits"
            return decide(*given)

        monkeypatch.setattr(commits, "_decide", looking)
        for work in (
            lambda: feed(as_rows(ratings(2, 60)), 1),
            lambda: put(pa.table({"key": [3, 4], "value": ["x", "y"]}), 1),
            lambda: drop(pa.table({"key": [1, 1]}), 0),
        ):
            before, count = look(), len(looks)
            work()
            assert looks[count:] == [before]
            assert look() != before
        pond.validate()


@pytest.mark.parametrize("kind", ["map", "vector", "matrix", "dense"])
@pytest.mark.parametrize("seed", range(20))
def test_an_element_as_it_was(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    field = tracked(kind, "long", "string" if kind == "map" else "double")
    for _ in range(6):
        before = field.element.copy()
        asked = [field.decided_element()]
        for _ in range(chance.randrange(25)):
            change(chance, kind, field.element)
            if chance.random() < 0.3:
                asked.append(field.decided_element())
                assert_same(kind, asked[-1], before)
        if field.is_changed:
            assert_same(kind, field.decided_element(), before)
        if chance.random() < 0.5:
            field.settle()
        else:
            field.put_back()
            assert field.element.entries() == before.entries()
        assert field.decided_element() is field.element
        field.validate()


def change(chance: random.Random, kind: str, element: Any) -> None:
    key, other = chance.randrange(6), chance.randrange(4)
    match kind, chance.randrange(6):
        case _, 0:
            del element[key]
        case _, 1 if chance.random() < 0.2:
            element.clear()
        case "map", _:
            element[key] = "x" * other
        case "vector", _:
            element[key] += 1
        case "matrix", 2:
            del element[key, other]
        case "matrix", 3:
            element[key].clear()
        case "dense", 2:
            element[key] = [1.0] * other
        case _:
            element[key, other] += 1


def assert_same(kind: str, found: Any, wanted: Any) -> None:
    assert found.entries() == wanted.entries()
    assert found.keys() == wanted.keys()
    assert found == wanted
    for key in range(6):
        assert (key in found, found[key]) == (key in wanted, wanted[key])
    if kind == "matrix":
        vector = wanted.column(1)
        assert (found.column(1), found.multiply(vector)) == (vector, wanted.multiply(vector))


def test_what_a_client_has_seen_it_sees_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch is applied by one container, and not yet by the other."""
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        kept = pond.program("kv", store())
        put = kept.call("put", name="puts")
        keys = list(range(20))
        put(pa.table({"key": keys, "value": ["old"] * 20}), 0)
        commits = pond.coordinator._commits
        carry_out = commits._carry_out
        looks: list[list[str]] = []

        def looking(commit: Any, effect: Any) -> Any:
            if isinstance(getattr(effect, "message", None), Apply) and effect.container == 1 and not looks:
                looks.append([kept.get(key=key) for key in keys])
            return carry_out(commit, effect)

        monkeypatch.setattr(commits, "_carry_out", looking)
        waits: list[Any] = []

        def await_visible(state: Any) -> None:
            waits.append(state)
            kept._reads._newest = {}

        monkeypatch.setattr(kept._reads, "_await_visible", await_visible)
        put(pa.table({"key": keys, "value": ["new"] * 20}), 1)
        assert waits, "a state that is older is asked about"
        assert set(looks[0]) == {"old", "new"}, "each of its own moment"
        assert [kept.get(key=key) for key in keys] == ["new"] * 20


def test_what_is_too_much_between_two_rounds_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_book, "ROWS_BYTES_MAX", 2000)
    with LocalPond(LossyFiles(1), containers=3, slices=SLICES) as pond:
        rec = pond.program("rec", recommender(3))
        feed = rec.call("add_rating", name="feed")
        before = pond.coordinator._commits._ballot
        with pytest.raises(MessageTooLarge, match="between two rounds") as caught:
            feed(as_rows(ratings(1, 200)), 0)
        assert "smaller batches" in caught.value.hint
        assert pond.coordinator._commits._ballot == before + 1, "it was staged once"
        assert rec.entries("user_item") == {}
        feed(as_rows(ratings(1, 3)), 0)
        assert len(rec.entries("user_item")) == 3
        pond.validate()


def test_rows_are_kept_only_where_something_comes_back() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        program = pond.program("p", failing())
        put = program.call("put", name="puts")
        rows = pa.table({"key": [1, 2, 3], "value": [1, 2, 3], "note": ["x" * 1000] * 3})
        assert put(rows, 0).equals(rows)
        assert put(rows, 0).equals(rows), "a replay"
        stores = [
            held.store
            for service in pond.hosting.services.values()
            for held in service.core.holding("p").slices.values()
        ]
        assert sum(each.outputs.nbytes for each in stores) == 0


def test_entries_are_counted_by_what_they_hold() -> None:
    text = tracked("map", "string", "string")
    text.element["k" * 1000] = "v" * 5000  # type: ignore[index] # a map
    assert text.nbytes == 0, "it is not decided"
    text.settle()
    assert text.nbytes == ENTRY_BYTES + 6000
    assert text.copy().nbytes == text.nbytes
    text.put([("k" * 1000, ABSENT)])
    assert text.nbytes == 0
    lists = tracked("map", "long", "array<string>")
    assert isinstance(lists.element, Map)
    lists.element[1] = ["x" * 100] * 10
    lists.settle()
    assert lists.nbytes > 1000
    dense = tracked("dense")
    assert isinstance(dense.element, DenseMatrix)
    dense.element[1] = [0.5] * 1000
    dense.settle()
    assert dense.nbytes == ENTRY_BYTES + 8000
    dense.element[1, 1999] = 1.0
    dense.put_back()
    assert dense.nbytes == ENTRY_BYTES + 8000
    dense.validate()


def rows_of(field: Tracked) -> int:
    assert isinstance(field, TrackedCells)
    return int(field._control[ROWS_IN_USE])


def test_rows_of_a_matrix_in_which_nothing_is_left_are_let_go_of() -> None:
    field = tracked("matrix")
    matrix: Any = field.element
    for row in range(100):
        matrix[row, 1] = 1.0
    field.settle()
    for row in range(100):
        del matrix[row, 1]
    matrix[200].assign([])
    field.settle()
    assert (rows_of(field), field.nbytes) == (0, 0)
    matrix[7, 7] = 1.0
    field.put_back()
    assert rows_of(field) == 0
    field.validate()
