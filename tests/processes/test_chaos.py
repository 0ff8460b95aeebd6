"""A pond at work while containers are killed, stopped, moved, added and taken away, and disks and connections fail.

`make chaos SECONDS=600 SEED=7` runs it for as long as asked, from a seed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

import pytest
from chaos import KINDS, chaotic
from chaos_load import await_true
from test_kill import await_none_at, handles_to

pytestmark = pytest.mark.usefixtures("started_as_ever")

SECONDS = float(os.environ.get("MILLPOND_CHAOS_SECONDS", "60"))
SEED = int(os.environ.get("MILLPOND_CHAOS_SEED", "1"))


@pytest.mark.timeout(SECONDS + 400)
def test_whatever_happens_nothing_is_lost_doubled_or_told_wrong(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    threads = set(threading.enumerate())
    try:
        with chaotic(root, SEED) as faults:
            faults.run(SECONDS)
    finally:
        await_none_at(tmp_path)
    sys.stdout.write("\n".join([*faults.log, ""]))
    for worker in faults.load.workers:
        refused = dict(worker.refused) or "never"
        sys.stdout.write(
            f"{worker.name}: {worker.done} times, longest gap {worker.gap_s_max:.1f} s, refused {refused}\n"
        )
    assert set(faults.happened) == set(KINDS), "a kind of fault that was planned did not happen"
    # Connections to containers that have ended are let go of, and end when they are collected.
    gc.collect()
    assert handles_to(root) == []

    def left() -> list[str]:
        ours = [each.name for each in threading.enumerate() if each not in threads]
        return [name for name in ours if name.startswith(("chaos", "millpond"))]

    await_true(lambda: not left(), 10, lambda: f"threads {left()} are left")
