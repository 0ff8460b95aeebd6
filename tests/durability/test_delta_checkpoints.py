"""Delta checkpoints of whole ponds: after each one, the files hold what memory holds, as far as it is decided."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
import txn_driving
from crashes import after
from txn_driving import MAIN, NUMBERS, SLOW, Model, World, event

import millpond.stores.compaction
from millpond.container.holdings import group_files
from millpond.container.holdings.base import HeldSlice, Holding
from millpond.container.holdings.group_store import GroupStore
from millpond.container.layout import read_snapshot
from millpond.durable.crashpoints import armed
from millpond.errors import CorruptFile, WriteFailed
from millpond.stores.delayed import DelayedEvents
from millpond.stores.parts import unpack
from millpond.stores.undo import TableUndo
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond


def held_slices(pond: LocalPond) -> Iterator[tuple[Holding[Any], int, HeldSlice[Any]]]:
    for service in pond.hosting.services.values():
        for holding in service.core.holdings.values():
            for number, held in holding.slices.items():
                yield holding, number, held


def picture(rows: pa.RecordBatch) -> Any:
    """All that an export holds, in an order of its own where order does not count."""
    if rows.schema.names[0] == "kind":
        parts = [(kind, name, table.to_pylist()) for kind, name, table in unpack(rows)]
        tables = sorted(
            (name, sorted(map(repr, own))) for kind, name, own in parts if kind == "table" and own
        )
        return tables, [part for part in parts if part[0] != "table"]
    return sorted(map(repr, rows.to_pylist()))


def check_files(world: Any, files: Any) -> int:
    """Compares files with memory. How many deltas there are."""
    found = 0
    for holding, number, held in held_slices(world.pond):
        if held.saved is None or held.dirty:
            continue
        schema = holding.snapshot_schema
        batches = read_snapshot(files, "/pond", held.saved.files, holding.resident.id, number, schema)  # type: ignore[arg-type]
        store = holding.new_store()
        store.load(holding.merged(batches, whole=True))
        assert picture(store.export()) == picture(held.decided_copy().export()), f"{holding.name} {number}"
        found += len(held.saved.deltas)
    return found


def some_events(chance: random.Random, epoch: int, kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        event(
            chance.choice(kinds),
            5 * epoch + chance.randrange(9),
            seq,
            i=chance.randrange(12),
            j=chance.randrange(4),
            n=chance.randrange(1, 4),
            g=chance.choice("xyzuvw"),
            parts=[1] * chance.randrange(3),
        )
        for seq in range(chance.randrange(1, 7))
    ]


def check_transactions(seed: int) -> int:
    """A random history of tables, outputs and events that wait; with crashes in between. How many deltas were seen."""
    chance = random.Random(seed)
    world, model = World(LossyFiles()), Model()
    epochs, seen = dict.fromkeys(("main", "numbers", "slow"), 0), 0
    world.start(1)
    for name in txn_driving.TABLES:
        if name != "e":
            txn_driving.Open(name).on_pond(world)
            model.open(name)
    for program in (MAIN, NUMBERS, SLOW):
        world.operator(program)
        model.groups[program.group].register(program.name)
    for _ in range(40):
        what = chance.random()
        if what < 0.6:
            program = chance.choice((MAIN, NUMBERS, NUMBERS, SLOW))
            epoch = epochs[program.name]
            epochs[program.name] += 1
            events = some_events(chance, epoch, tuple(kind for kind in program.kinds if kind != "tag"))
            ran: list[int] = []

            def checkpoint(_: str, world: World = world, ran: list[int] = ran) -> None:
                # The containers' own: whoever asks the coordinator waits until it has decided.
                for service in world.pond.hosting.services.values():
                    service.checkpoint()
                ran.append(check_files(world, world.files))

            if chance.random() < 0.3:
                # The epoch has run, and is not decided.
                with armed("journal.append.before", action=checkpoint):
                    got = world.run(program, epoch, events)
                assert ran
            else:
                got = world.run(program, epoch, events)
            assert got == model.run(program, epoch, events)
        elif what < 0.85:
            world.pond.checkpoint()
            seen += check_files(world, world.files)
        elif what < 0.93:
            world.pond.maintain()
            check_files(world, world.files)
        else:
            world = World(after(world.files, "all", 0))  # type: ignore[arg-type]
            world.start(1)
            txn_driving.check_same(model, world.pond, f"seed {seed}")
    world = World(after(world.files, "all", 0))  # type: ignore[arg-type]
    world.start(1)
    txn_driving.check_same(model, world.pond, f"seed {seed}, at the end")
    return seen


def check_all() -> None:
    for seed in range(4):
        check_transactions(seed)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are compacted between any two epochs."""
    sound = millpond.stores.compaction.compact
    monkeypatch.setattr("millpond.container.holdings.group.compact", lambda stores: sound(stores, 0))


def test_tables_outputs_and_events_that_wait_through_random_histories() -> None:
    assert sum(check_transactions(seed) for seed in range(4)) > 20


# Promises that are broken on purpose


def not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableUndo, "mark", lambda self, store: None)


def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GroupStore.delta
    monkeypatch.setattr(GroupStore, "delta", lambda self, undecided=None: sound(self))


def forgotten_deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = group_files.GroupDelta.export

    def export(self: group_files.GroupDelta) -> pa.RecordBatch:
        return sound(self._replace(tables=[part for part in self.tables if part.kind != "gone"]))

    monkeypatch.setattr(group_files.GroupDelta, "export", export)


def deleted_rows_that_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compaction takes rows that were deleted, and no file knows yet."""
    sound = GroupStore.keep

    def keep(self: GroupStore, *given: Any) -> None:
        sound(self, *given)
        for table in self.tables.values():
            table.dirty.fit(table.count)
            table.dirty.flags[: table.count][table.cells[: table.count, 0] == 0] = 0

    monkeypatch.setattr(GroupStore, "keep", keep)


def all_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that have run since the last file wait again."""
    sound = DelayedEvents.changed
    monkeypatch.setattr(
        DelayedEvents,
        "changed",
        lambda self, checkpoint: (
            found := sound(self, checkpoint),
            found if found.stay_from is None else found._replace(stay_from=-(2**62)),
        )[1],
    )


def wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = group_files.merged_group
    monkeypatch.setattr(
        "millpond.container.holdings.group.merged_group",
        lambda files, tables, whole: sound([*files[:1], *files[:0:-1]] if whole else files, tables, whole),
    )


@pytest.mark.parametrize(
    "broken", [not_marked, undecided, forgotten_deletions, deleted_rows_that_go, all_stay, wrong_order]
)
def test_a_broken_promise_is_found(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    # What fails while the journal is written comes as its failure.
    with pytest.raises((AssertionError, WriteFailed), match=r"assert|Assertion"):
        check_all()


# Files that are not what they should be


def test_a_delta_that_is_missing_or_another_is_refused_by_its_path() -> None:
    files = LossyFiles()
    pond = LocalPond(files, slices=1)
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    keys = list(range(200))
    for epoch in range(3):
        some = keys if epoch == 0 else [epoch]
        feed(pa.table({"k": some, "t": [epoch] * len(some), "v": some}), epoch)
        pond.checkpoint()
    (held,) = (held for _, _, held in held_slices(pond))
    assert held.saved is not None
    _, first, second = held.saved.files
    pond.hosting.kill(0)
    directory = "/pond/snapshots/s.1"
    whole = {name: bytes(files.read(f"{directory}/{name}")) for name in (first, second)}

    def refused(name: str, content: bytes | None) -> str:
        damaged = after(files, "none", 0)
        damaged.remove(f"{directory}/{name}")
        if content is not None:
            damaged.write(f"{directory}/{name}", [content])
        with pytest.raises(CorruptFile) as caught:
            LocalPond(damaged, slices=1)
        assert caught.value.path == f"{directory}/{name}"
        return str(caught.value)

    assert "missing" in refused(first, None)
    assert "checksum" in refused(second, whole[second][:100] + b"?" + whole[second][101:])
    assert "another file" in refused(second, whole[first])
    assert LocalPond(after(files, "none", 0), slices=1).state("s").progress()
