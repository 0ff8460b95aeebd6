"""An updater of another process falls silent, in a pond of processes: U goes on without it, by itself."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pyarrow as pa

import millpond as mp


def rows(*times: int) -> pa.Table:
    return pa.table({"k": [1] * len(times), "t": list(times), "v": list(times)})


def test_u_goes_on_without_an_updater_that_is_silent(tmp_path: Path) -> None:
    with (
        mp.open(tmp_path / "pond") as pond,
        mp.connect(pond.address, (tmp_path / "pond" / "token").read_text()) as joined,
    ):
        state = pond.state("s", key="long", value="long")
        busy = state.update(key="k", at="t", value="v", name="busy")
        quiet = joined.state("s").update(key="k", at="t", value="v", name="quiet", idle="1 second")
        began = time.monotonic()
        quiet(rows(10), 0)
        busy(rows(100), 0)
        fetch = state.fetch(key="k", at="t", into="v")
        while state.progress().update < 100:
            assert state.progress().update in (-math.inf, 10, 100)
            time.sleep(0.05)
            assert time.monotonic() - began < 60
        assert time.monotonic() - began > 1
        # The containers know of it, too.
        assert fetch.now(pa.table({"k": [1], "t": [99]}))["v"].to_pylist() == [10]
        assert quiet(rows(50, 150), 1).late == 1
        busy(rows(200), 1)
        assert state.progress().update == 150
        assert fetch.now(pa.table({"k": [1], "t": [149]}))["v"].to_pylist() == [100]
