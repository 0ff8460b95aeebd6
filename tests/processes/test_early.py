"""Epochs that are answered once they are decided: on streams, what is brought to its place while Spark plans its next batch."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

import millpond as mp
from millpond.ops.committing import commit
from millpond.wire.states import RowsWork

ROWS = 20_000


class Feed:
    """Commits as a stream does, without Spark."""

    def __init__(self, pond: mp.Pond) -> None:
        self.state = pond.state("s", key="long", value="long")
        self._update = self.state.update(key="k", at="t", value="v", name="feed")
        self._client = pond._client

    def __call__(self, epoch: int) -> None:
        rows = pa.table({"k": range(ROWS), "t": [epoch] * ROWS, "v": [epoch] * ROWS})
        commit(self._client, self._update._intake, rows, epoch, RowsWork(), "continue", early=True)


def test_whoever_asks_for_u_finds_the_rows(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", containers=2) as pond:
        feed = Feed(pond)
        for epoch in range(12):
            feed(epoch)
            assert feed.state.progress().update == epoch
            if epoch:
                asked = pa.table({"k": range(ROWS), "t": [epoch - 1] * ROWS})
                answers = feed.state.fetch(key="k", at="t", into="v").now(asked)
                assert answers["v"].unique().to_pylist() == [epoch - 1]
        feed.state.finish("feed")
        assert feed.state.snapshot()["value"].unique().to_pylist() == [11]


def test_it_counts_also_if_its_container_dies_before_it_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CRASH", "apply.before:3")
    with mp.open(tmp_path / "pond") as pond:
        monkeypatch.delenv("MILLPOND_CRASH")
        feed = Feed(pond)
        for epoch in range(5):
            feed(epoch)
        feed.state.finish("feed")
        assert pond.metrics()["coordinator"]["container_restarts"] == 1
        assert feed.state.snapshot()["value"].unique().to_pylist() == [4]


def test_a_pond_that_closes_at_once_has_it_when_it_is_opened_again(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond") as pond:
        Feed(pond)(0)
    with mp.open(tmp_path / "pond") as pond:
        state = pond.state("s")
        assert pond.metrics()["containers"][0]["records_replayed"] == 0, "it was visible, and in the snapshot"
        state.finish("feed")
        assert state.snapshot().num_rows == ROWS
