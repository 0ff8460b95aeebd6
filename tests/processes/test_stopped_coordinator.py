"""A coordinator that stands still, and wakes up: nobody was away but itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest
from chaos_load import await_true

import millpond as mp
from millpond.coordinator.detector import SILENT_S_MAX
from millpond.pond.figures import too_few_backups

SERVE = [sys.executable, "-c", "from millpond.cli import main; main()", "serve"]
STOPPED_S = 30.0
"""Longer than a container may be silent, be busy or have a disk that hangs, and much longer than its lease."""


def rows(epoch: int) -> pa.Table:
    return pa.table({"k": range(50), "t": [epoch] * 50, "v": range(epoch, epoch + 50)})


@pytest.mark.long
def test_on_waking_it_declares_nobody_dead(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    command = [*SERVE, "--root", str(root), "--containers", "2", "--threads", "1", "--backups", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" at ")[1].partition(",")[0]
            with mp.connect(address, (root / "token").read_text()) as pond:
                state = pond.state("s", key="long", value="long")
                feed = state.update(key="k", at="t", value="v", name="feed")
                feed(rows(0), 0)
                await_true(
                    lambda: not too_few_backups(pond.metrics()["slices"]), 60, lambda: "backups are missing"
                )
                before = [each.pid for each in pond.containers()], pond.placement()
                for epoch in (1, 2):
                    os.kill(server.pid, signal.SIGSTOP)
                    time.sleep(STOPPED_S)
                    os.kill(server.pid, signal.SIGCONT)
                    feed(rows(epoch), epoch)
                    time.sleep(SILENT_S_MAX + 1.0)  # and no later, either
                    assert ([each.pid for each in pond.containers()], pond.placement()) == before
                assert pond.metrics()["coordinator"]["container_restarts"] == 0
                state.finish("feed")
                assert sorted(state.snapshot()["value"].to_pylist()) == list(range(2, 52))
        finally:
            server.terminate()
