"""A process without a handle left still writes its journal and its log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# In a process of its own: who has no handle left cannot even report a failure.
DRIVER = """
import os, resource, sys
import pyarrow as pa
import millpond as mp
root, whose = sys.argv[1:]
with mp.open(root, threads=1, slices=4) as pond:
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(pa.table({"k": [0], "t": [0], "v": [0]}), 0)
    pond.checkpoint()  # all code that it takes is loaded now
    pid = pond.containers()[0].pid if whose == "container" else os.getpid()
    used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    taken = []
    if whose == "driver":
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            assert error.errno == 24, error
    for epoch in range(1, 6):
        feed(pa.table({"k": [epoch], "t": [epoch], "v": [epoch]}), epoch)
    pond.checkpoint()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for handle in taken:
        os.close(handle)
    assert pond.containers()[0].pid == pid or whose == "driver"
    state.finish("feed")
    assert sorted(state.snapshot()["key"].to_pylist()) == list(range(6))
print("done")
"""


@pytest.mark.parametrize("whose", ["driver", "container"])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs prlimit")
def test_commits_go_on_without_a_handle_left(tmp_path: Path, whose: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path / "pond"), whose],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.stdout.strip() == "done", found.stderr
