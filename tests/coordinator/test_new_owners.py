"""Slices go to a container to which the next epoch brings no rows: it hears of the epoch all the same."""

from __future__ import annotations

import pyarrow as pa
import pytest

from millpond.errors import MillpondError, Moved, Unavailable
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


@pytest.mark.parametrize(
    ("error", "told"),
    [(Moved("it is elsewhere", slice_id=1), False), (Unavailable("it is away", address=""), True)],
)
def test_only_a_backup_that_fails_is_told(
    error: MillpondError, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A slice that moves while it is copied has its backup at the next try."""
    pond = LocalPond(LossyFiles(), containers=2, slices=4, backups=1)

    def fails() -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(pond.coordinator.elasticity, "replicate", fails)
        pond.coordinator.maintain()
    assert [record.message for record in caplog.records if "fewer backups" in record.message] == (
        [f"slices have fewer backups than they should: {error}"] if told else []
    )
    pond.close()
