"""Tables that could not be put back: nobody looks at them, the container ends, and another rebuilds them from its log."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.container.guard import Guard
from millpond.stores.undo import Undo
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.txn.run.execution import EpochRun


@mp.transaction
def add(t, k, v):
    t[k].x += v


def events(time: int) -> pa.Table:
    return pa.table({"ts": [time, time], "k": [1, 2], "v": [time, 10 * time]})


@pytest.mark.parametrize("where", ["in the epoch", "when it is taken back"])
def test_a_container_that_cannot_put_tables_back_ends(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pond = LocalPond(LossyFiles())
    pond.table("t", key="long", value="x long", default={"x": 0})
    op = pond.transactions("op", ["t"], {"add": add})
    op(events(1), 0)
    ended: list[str] = []

    def end(why: str) -> None:
        ended.append(why)
        pond.hosting.kill(0)

    (holding,) = [h for h in pond.hosting.services[0].core.holdings.values() if h.name == "tables"]
    holding.means = holding.means._replace(limits=Guard(60, end, linger_s=0))

    def short_of_memory(sound: Any) -> Any:
        """As long as the container lives that is to end."""

        def short(*given: Any) -> Any:
            if not ended:
                raise MemoryError
            return sound(*given)

        return short

    with monkeypatch.context() as patch:
        patch.setattr(Undo, "put_back", short_of_memory(Undo.put_back))
        if where == "in the epoch":
            patch.setattr(EpochRun, "outputs", short_of_memory(EpochRun.outputs))
        else:
            patch.setattr(holding, "_check_room", short_of_memory(holding._check_room))
        # Its next incarnation, which has memory, runs the epoch.
        op(events(2), 1)
    assert len(ended) == 1
    assert "could not be put back" in ended[0]
    op(events(3), 2)
    assert {row["key"]: row["x"] for row in pond.table("t").snapshot().to_pylist()} == {1: 6, 2: 60}
    pond.validate()
