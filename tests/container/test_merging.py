"""How many files a slice has, and how much they take: bounds hold after each checkpoint, however long changes go on."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from millpond.container.checkpoints import DELTAS_TIMES_MAX
from millpond.container.holdings.base import Bounds, HeldSlice, Saved
from millpond.container.merging import choose
from millpond.testing import LossyFiles, local
from millpond.testing.local import LocalPond
from millpond.wire.base import SliceId

BASE = 1 << 20
FILE_BYTES = 4 << 10
"""What a file takes beside its rows: head, schema, checksum."""


def chosen(saved: Saved, bounds: Bounds, slices: int = 1) -> list[bool]:
    """Of each slice that is merged, whether that is done with its base."""
    holding: Any = SimpleNamespace(name="s", resident=SimpleNamespace(id="s.1"))
    holding.slices = {SliceId(n): SimpleNamespace(saved=saved, anew=False) for n in range(slices)}
    core: Any = SimpleNamespace(holdings={"s": holding}, term=3)
    ground: Any = SimpleNamespace(files_of=lambda resident: saved.files)
    grounds = dict.fromkeys(holding.slices, ground)
    return [merge.whole for merge in choose(core, grounds, (), bounds, iter(range(10_000)))]


def saved(deltas: int, delta_bytes: int, base_bytes: int = BASE) -> Saved:
    return Saved("base", base_bytes, tuple(f"d{n}" for n in range(deltas)), delta_bytes)


def test_the_bounds_are_those_that_are_told() -> None:
    assert (Bounds().deltas, Bounds().deltas_share, Bounds().deltas_bytes) == (16, 0.5, 64 << 10)
    assert DELTAS_TIMES_MAX == 2


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (saved(16, BASE // 2 + (64 << 10)), []),
        (saved(17, 100), [False]),
        (saved(1, BASE // 2 + (64 << 10) + 1), [True]),
        (saved(17, BASE), [True]),
        (saved(17, 100, base_bytes=64 << 10), [True]),  # all of it takes less than a small delta may
        (saved(0, 0), []),
    ],
)
def test_what_is_too_many_or_too_large_is_merged(files: Saved, expected: list[bool]) -> None:
    assert chosen(files, Bounds()) == expected


def test_a_step_of_merging_is_bounded() -> None:
    """It takes a slice more than its share at most, and the next step the others."""
    large = saved(1, 48 << 20, base_bytes=16 << 20)
    assert len(chosen(large, Bounds(), slices=10)) == 2


def held_slices(pond: LocalPond) -> Iterator[HeldSlice[Any]]:
    for service in pond.hosting.services.values():
        for holding in service.core.holdings.values():
            yield from holding.slices.values()


def bytes_of(files: LossyFiles, folder: str) -> tuple[int, int]:
    """How many files there are, and what they take."""
    sizes = [
        files.read(os.path.join(folder, resident, name)).size
        for resident in files.list(folder)
        for name in files.list(os.path.join(folder, resident))
    ]
    return len(sizes), sum(sizes)


@pytest.mark.parametrize("upkeep", [True, False])
def test_files_stay_within_bounds_however_long_changes_go_on(
    monkeypatch: pytest.MonkeyPatch, upkeep: bool
) -> None:
    bounds = Bounds(deltas=4, deltas_bytes=8 << 10)
    monkeypatch.setattr(local, "BOUNDS", bounds)
    files, chance = LossyFiles(), random.Random(11)
    pond = LocalPond(files, slices=2)
    state = pond.state("s", key="long", value="string")
    feed = state.update(key="k", at="t", value="v", name="feed")
    keys, most = 1_000, 0
    for epoch in range(60):
        some = range(keys) if epoch == 0 else chance.sample(range(keys), 30)
        values = [f"{epoch:04d}" * 25 for _ in some]
        feed(pa.table({"k": list(some), "t": [epoch] * len(values), "v": values}), epoch)
        pond.checkpoint()
        if upkeep:
            pond.maintain()
            pond.checkpoint()  # and what is needed no more goes
        for held in held_slices(pond):
            assert held.saved is not None
            count, times = len(held.saved.deltas), 1 if upkeep else DELTAS_TIMES_MAX
            most = max(most, count)
            assert count <= times * bounds.deltas
            if upkeep:
                own = bounds.deltas_share * held.saved.base_bytes + bounds.deltas_bytes
                assert held.saved.delta_bytes <= own
        if upkeep:
            live = sum(held.store.export().nbytes for held in held_slices(pond))
            count, nbytes = bytes_of(files, "/pond/snapshots")
            slack = len(list(held_slices(pond))) * bounds.deltas_bytes + count * FILE_BYTES
            assert nbytes <= (1 + bounds.deltas_share) * live + slack, f"{nbytes} in {count} files for {live}"
    assert most >= bounds.deltas, "it came to that"
    state.finish("feed")
    assert state.snapshot().num_rows == keys
    pond.close()
    reopened = LocalPond(files, slices=2)
    assert reopened.state("s").snapshot().num_rows == keys
    reopened.close()
