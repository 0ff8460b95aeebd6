"""Programs whose fields and lanes change between two epochs: all of it or nothing, and as plain Python has it."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_program_plain import Recommender, draw_recommender, entries

import millpond as mp
from millpond.container.holdings import program_migrate
from millpond.durable.crashpoints import SimulatedCrash, armed, counted
from millpond.errors import BadOption, ProgramFailed, SchemaMismatch
from millpond.ops import migration
from millpond.programs.migrating import merged, order_of
from millpond.programs.plain import state_of
from millpond.programs.slicing import slice_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.programs import FieldSpec

SLICES = 8


@mp.program(lanes=2)
class Shop:
    stock: mp.Partitioned[mp.Map[int, int]]
    sales: mp.Partial[mp.Vector]

    def sell(self, what: int, count: int) -> int:
        self.stock[what] -= count
        left = self.stock[what]
        self.sales[what % 3] += count
        return left

    def sold(self, what: int) -> float:
        parts = mp.everywhere(self.sales).get(what)
        return mp.total(parts)


@mp.program(lanes=3)
class NewShop:
    """Other keys and values, partitioned and partial the other way round, other lanes, and a field that is made of another."""

    stock: mp.Partial[mp.Map[str, float]]
    sales: mp.Partitioned[mp.Map[int, int]]
    sellers: mp.Partitioned[mp.Map[str, int]]

    def sell(self, what: int, count: int) -> int:
        self.sales[what % 3] += count
        return self.sales[what % 3]

    def sold(self, what: int) -> int:
        return self.sales[what]


CHANGES: dict[str, Any] = {
    "stock": lambda key, value: [(f"item-{key}", value / 2), ("all", value)],
    "sales": lambda key, value: (key, int(value)),
    "sellers": mp.Migration(
        lambda key, value: (f"by {key % 2}", value) if value < -2 else None,
        source="stock",
        merge=lambda left, right: left - right,
    ),
}
SOLD = pa.table({"what": [*range(10), *range(4)], "count": [*range(10), 5, 5, 5, 5]})
STOCK = {what: -what - 5 * (what < 4) for what in range(10)}
SALES = {what: float(sum(range(what, 10, 3)) + (10 if what == 0 else 5)) for what in range(3)}
FIELDS = ("stock", "sales", "sellers")


def made_new() -> dict[str, Any]:
    """What the change makes of `SOLD`, in plain Python."""
    lanes: dict[int, dict[str, float]] = {}
    sellers: dict[str, int] = {}
    for key, value in STOCK.items():
        lane = lanes.setdefault(slice_of(key, SLICES) % 3, {})
        lane[f"item-{key}"] = value / 2
        lane["all"] = lane.get("all", 0.0) + value
        if value < -2:
            name = f"by {key % 2}"
            sellers[name] = sellers[name] - value if name in sellers else value
    return {"stock": lanes, "sales": {what: int(count) for what, count in SALES.items()}, "sellers": sellers}


def sold_in(pond: mp.Pond) -> Any:
    shop = pond.program("shop", Shop)
    shop.call("sell", into="left", name="feed")(SOLD, 0)
    return shop


def check(pond: mp.Pond) -> str:
    """Whether the program is as it was, or as the change makes it: all of it is the one or the other."""
    shop = pond.program("shop", NewShop) if is_migrated(pond) else pond.program("shop", Shop)
    assert [shop.sold(what) for what in range(3)] == list(SALES.values())
    found = {field: shop.entries(field) for field in FIELDS if field in shop._spec.fields}
    if shop.graph.name == "NewShop":
        assert found == made_new()
        return "new"
    assert found["stock"] == STOCK
    assert {what: sum(lane.get(what, 0.0) for lane in found["sales"].values()) for what in range(3)} == SALES
    return "old"


def is_migrated(pond: mp.Pond) -> bool:
    try:
        pond.program("shop", NewShop)
    except SchemaMismatch:
        return False
    return True


def test_lanes_change_between_two_epochs_and_streams_go_on() -> None:
    plain = mp.plain(Recommender, slices=SLICES)
    with LocalPond(LossyFiles(3), containers=3, slices=SLICES) as pond:
        program = pond.program("rec", Recommender)
        feed = program.call("add_rating", name="feed")
        for epoch, (_, calls) in enumerate(draw_recommender(random.Random(4))[::2]):
            feed(pa.Table.from_pylist(calls), epoch)
            for call in calls:
                plain.add_rating(**call)
            recommended = [plain.get_rec(user) for user in range(9)]
            for lanes in (5, 2, 5 - epoch):
                graph = Recommender.__millpond_graph__._replace(lanes=lanes)
                again = pond.program("rec", graph, migrate=True)
                plain = relaned(plain, lanes)
                assert entries(again) == state_of(plain)
                assert [program.get_rec(user=user) for user in range(9)] == recommended
        pond.validate()


def relaned(plain: Any, lanes: int) -> Any:
    """What a plain program is with other lanes: lane l is added to lane l modulo their number."""
    before = plain.__millpond_state__.elements
    again = mp.plain(Recommender, lanes=lanes, slices=SLICES)
    after = again.__millpond_state__.elements
    after["user_item"][0].assign(before["user_item"][0])
    for number, lane in enumerate(before["co_occ"]):
        after["co_occ"][number % lanes].add(lane)
    return again


@pytest.mark.parametrize("containers", [1, 3])
def test_fields_become_what_a_function_makes_of_their_entries(
    containers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if containers > 1:
        # So much that it takes several rounds.
        monkeypatch.setattr(program_migrate, "BATCH_ROWS", 2)
        monkeypatch.setattr(program_migrate, "ROUND_BYTES", 0)
    files = LossyFiles(3)
    with LocalPond(files, containers=containers, slices=SLICES, backups=containers // 2) as pond:
        pond.coordinator.maintain()
        old = sold_in(pond)
        feed = old.call("sell", into="left", name="feed")
        assert check(pond) == "old"
        if containers > 1:
            pond.checkpoint()
        shop = pond.program("shop", NewShop, migrate=CHANGES)
        assert check(pond) == "new"
        # Said again it is done, and what was decided is what it was.
        seen = shop.progress().seen
        assert pond.program("shop", NewShop, migrate=CHANGES).progress().seen == seen
        replayed = shop.call("sell", into="left", name="feed")(SOLD, 0)
        assert replayed["left"].to_pylist()[:3] == [0, -1, -2]
        for call in (
            lambda: feed(SOLD, 1),
            lambda: old.sold(what=1),
            lambda: old.sell(what=1, count=1),
            lambda: pond.program("shop", Shop),
        ):
            with pytest.raises(SchemaMismatch, match="shop") as refused:
                call()
            assert refused.value.hint
        assert check(pond) == "new"
        for container in range(containers):
            pond.hosting.kill(container)
            pond.coordinator.recover(container)
            assert check(pond) == "new"
            if container == 0 and containers > 1:
                pond.move(range(SLICES), to=2)
                pond.checkpoint()
        pond.validate()
    with LocalPond(files.crash(), containers=2, slices=SLICES) as pond:
        assert check(pond) == "new"
        shop = pond.program("shop", NewShop, migrate=CHANGES)
        assert shop.sell(what=1, count=4) == SALES[1] + 4
        more = shop.call("sell", into="left", name="feed")(pa.table({"what": [1], "count": [1]}), 1)
        assert more["left"].to_pylist() == [SALES[1] + 5]
        pond.validate()


def test_a_crash_leaves_the_old_program_or_the_new_one() -> None:
    _, plans = crashed_at(None)
    hits = [(point, hit) for point, plan in plans.items() for hit in range(1, plan.hits + 1)]
    assert {"log.sync.before", "journal.sync.after", "apply.before"} <= {point for point, _ in hits}
    left = set()
    for at in hits:
        files, plan = crashed_at(at)
        assert plan.fired, at
        with LocalPond(files, containers=2, slices=SLICES) as pond:
            left.add(check(pond))
            pond.program("shop", NewShop, migrate=CHANGES)
            assert check(pond) == "new"
            pond.validate()
    assert left == {"old", "new"}


def crashed_at(at: tuple[str, int] | None) -> tuple[LossyFiles, Any]:
    """What a crash in the middle of the change leaves; or which points it comes by."""
    files = LossyFiles(3)
    pond = LocalPond(files, containers=2, slices=SLICES, backups=1)
    pond.coordinator.maintain()
    sold_in(pond)
    with counted() if at is None else armed(*at) as plans, suppress(SimulatedCrash):
        pond.program("shop", NewShop, migrate=CHANGES)
    return files.crash(), plans


def test_a_migration_that_fails_changes_nothing() -> None:
    with LocalPond(LossyFiles(3), containers=2, slices=SLICES) as pond:
        sold_in(pond)
        for changes, why in (
            (
                {**CHANGES, "sales": lambda key, value: (key, 1 // (value > 26))},
                r"'sales'.* at 0: ZeroDivisionError",
            ),
            ({**CHANGES, "sales": lambda key, value: (key, "many")}, "'many' is no long"),
            ({**CHANGES, "sales": lambda key, value: key}, "a tuple of two is expected"),
            (True, "'sales'.*26.0 is no long|'stock'.* is no string"),
        ):
            with pytest.raises(ProgramFailed, match=why):
                pond.program("shop", NewShop, migrate=changes)
            assert check(pond) == "old"
        for changes, why in (
            ({"sales": True}, "exists otherwise"),
            ({**CHANGES, "owners": True}, "no field 'owners'"),
            ({**CHANGES, "sellers": True}, "'sellers' .* is new"),
            ({**CHANGES, "stock": lambda key: key}, "does not say"),
            ({**CHANGES, "stock": int}, "does not say"),
            ("all", "does not say"),
        ):
            with pytest.raises((BadOption, SchemaMismatch), match=why) as refused:
                pond.program("shop", NewShop, migrate=changes)  # type: ignore[arg-type] # what is refused
            assert "migrate" in refused.value.hint or "sales" in refused.value.hint
        assert check(pond) == "old"
        pond.validate()


@pytest.mark.parametrize(
    ("element", "kind", "old", "new", "both"),
    [
        ("vector", "double", 1.0, 2.0, 3.0),
        ("map", "long", 1, 2, 3),
        ("map", "array<long>", [1, 2], [3], [4, 2]),
        ("map", "vector", mp.Vector([1.0]), mp.Vector([2.0, 1.0]), mp.Vector([3.0, 1.0])),
        ("map", "double", None, 2.0, 2.0),
        ("dense", "double", np.array([1.0]), np.array([1.0, 2.0]), np.array([2.0, 2.0])),
        ("map", "string", "a", "b", None),
        ("map", "boolean", True, False, None),
        ("map", "array<string>", ["a"], ["b"], None),
        ("map", "long", (1 << 63) - 1, 1, None),
    ],
)
def test_what_is_added(element: Any, kind: str, old: Any, new: Any, both: Any) -> None:
    spec = FieldSpec("partial", element, "long", kind)
    if both is None:
        with pytest.raises((TypeError, OverflowError)):
            merged(None, spec, old, new)
    else:
        found = merged(None, spec, old, new)
        assert np.array_equal(found, both) if element == "dense" else found == both
    assert np.array_equal(merged(lambda left, right: left, spec, old, new), old) or element == "map"


def test_old_entries_come_in_order_of_their_places() -> None:
    for places in ([-(1 << 63), -1, 0, 5, (1 << 63) - 1], ["", "a", "ab", "b", "\u00e4", "\U0001f600"]):
        assert [order_of(place) for place in places] == sorted(map(order_of, places))
    pairs = [(-1, 7), (0, -3), (0, 2), (4, -9)]
    assert [order_of(place) for place in pairs] == sorted(map(order_of, pairs))


def test_programs_with_nothing_in_them() -> None:
    files = LossyFiles(3)
    with LocalPond(files, containers=2, slices=SLICES, backups=1) as pond:
        pond.coordinator.maintain()
        pond.program("shop", Shop)
        assert pond.program("shop", NewShop, migrate=CHANGES).entries("stock") == {}
        pond.hosting.kill(1)
        pond.coordinator.recover(1)
        assert pond.program("shop", NewShop).sell(what=1, count=2) == 2
    with LocalPond(files.crash(), containers=1, slices=SLICES) as pond:
        # One that there is not yet is made as the class has it.
        assert pond.program("other", NewShop, migrate=CHANGES)._spec.revision == 0
        assert pond.program("shop", NewShop).entries("sales") == {1: 2}


def test_somebody_else_was_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was planned for a program that has changed since is planned anew."""
    with LocalPond(LossyFiles(3), containers=2, slices=SLICES) as pond:
        rec = pond.program("rec", Recommender)
        rec.add_rating(user=1, item=1, rating=1.0)
        rec.add_rating(user=1, item=2, rating=1.0)
        graph, plan_of, planned = Recommender.__millpond_graph__, migration.plan_of, []

        def slow(*given: Any) -> Any:
            plan = plan_of(*given)
            planned.append(plan)
            if len(planned) == 2:
                pond.program("rec", graph._replace(lanes=2), migrate=True)
            return plan

        monkeypatch.setattr(migration, "plan_of", slow)
        assert pond.program("rec", graph._replace(lanes=5), migrate=True)._spec.revision == 2
        lanes = rec.entries("co_occ")
        assert [entry for lane in lanes.values() for entry in lane.items()] == [((1, 2), 1.0), ((2, 1), 1.0)]
        assert rec.get_rec(user=1) == []


def test_which_code_ran_an_epoch() -> None:
    with LocalPond(LossyFiles(3), containers=1, slices=4) as pond:
        shop = pond.program("shop", Shop)
        shop.call("sell", name="feed")(SOLD, 0)
        other = pond.program("shop", Shop.__millpond_graph__._replace(max_rounds=7))
        assert other.version != shop.version
        other.call("sell", name="feed")(SOLD, 0)
        other.call("sell", name="feed")(SOLD, 1)
        moved = Shop.__millpond_graph__._replace(file="elsewhere.py")
        assert moved.version == shop.version
        assert shop.versions("feed") == {0: shop.version, 1: other.version}
        assert shop.versions("feed", "local") == shop.versions("feed")


@mp.program
class ByRow:
    m: mp.Partitioned[mp.Matrix]

    def put(self, r: int, c: int, x: float):
        self.m[r, c] = x

    def row(self, r: int) -> float:
        return self.m[r].total()


@mp.program
class ByColumn:
    m: mp.Partitioned[mp.Matrix]

    def put(self, r: int, c: int, x: float):
        self.m[r, c] = x

    def column(self, c: int) -> float:
        return self.m[:, c].total()


def test_a_matrix_by_row_becomes_one_by_column_and_back() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        rows = pond.program("m", ByRow)
        held = {(r, c): float(10 * r + c) for r in range(4) for c in range(r, 4)}
        for (r, c), x in held.items():
            rows.put(r=r, c=c, x=x)
        with pytest.raises(SchemaMismatch, match="column to double"):
            pond.program("m", ByColumn)
        columns = pond.program("m", ByColumn, migrate=True)
        assert columns.entries("m") == held
        assert [columns.column(c=c) for c in range(4)] == [
            sum(x for (_, column), x in held.items() if column == c) for c in range(4)
        ]
        columns.put(r=9, c=1, x=2.0)
        changes = {"m": lambda place, x: ((place[0], place[1] + 1), x)}
        rows = pond.program("m", ByRow, migrate=changes)
        assert rows.entries("m") == {(r, c + 1): x for (r, c), x in {**held, (9, 1): 2.0}.items()}
        assert rows.row(r=9) == 2.0
        pond.validate()
