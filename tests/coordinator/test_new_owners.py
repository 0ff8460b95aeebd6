"""Slices go to a container to which the next epoch brings no rows: it hears of the epoch all the same."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.ops import committing
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond


def test_an_owner_without_rows_hears_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing, "STAGE_ATTEMPTS", 1)
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    pond.coordinator.place([0] * 4)
    feed(pa.table({"k": [1], "t": [1], "v": [1]}), 0)
    own = next(n for n in range(4) if pond.slice_metrics(n)["s"]["keys"])
    pond.coordinator.place([0 if number == own else 1 for number in range(4)])
    feed(pa.table({"k": [1], "t": [2], "v": [2]}), 1)
    assert state.progress().update == 2
