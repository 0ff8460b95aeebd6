"""User code in real containers: it prints, asks for input, crashes and eats memory, and the pond goes on."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.client import client
from millpond.container.printing import PART_BYTES_MAX
from millpond.errors import BadOption, MillpondError

# Limits of memory are met by what a container of users takes.
pytestmark = pytest.mark.usefixtures("started_as_ever")

LINE = 200_000
LINES = 300  # of 200 KB: twice what the log may hold


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mp.RuleInterpreted)
        yield


@mp.transaction(results="told")
def tell(accounts, key, size):
    accounts[key].balance += 1
    print("t" * size)  # noqa: T201 - what is tested
    return 1


def join_aloud(old, new):
    print("u" * LINE)  # noqa: T201
    return old + new


def telling_events(epoch: int) -> pa.Table:
    return pa.table(
        {"ts": range(epoch * LINES, (epoch + 1) * LINES), "key": [1] * LINES, "size": [LINE] * LINES}
    )


def log_bytes(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in root.glob("container-*.log*")}


def test_what_user_code_prints_goes_to_a_log_with_a_bound(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    with mp.open(root) as pond:
        accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
        ledger = pond.transactions("ledger", [accounts], {"tell": tell})
        assert ledger(telling_events(0), 0)["told"].to_pylist() == [1] * LINES
        texts = pond.state("texts", key="long", value="string", update=join_aloud)
        update = texts.update(key="k", at="t", value="v", name="feed")
        update(pa.table({"k": [1] * LINES, "t": range(LINES), "v": ["a"] * LINES}), 0)
        texts.finish("feed")
    sizes = log_bytes(root)
    assert sizes.keys() == {"container-0.log", "container-0.log.1"}
    assert all(size <= PART_BYTES_MAX + (2 << 20) for size in sizes.values()), sizes
    # What was not in a snapshot runs again.
    with mp.open(root) as pond:
        assert pond.table("accounts").snapshot().to_pylist() == [{"key": 1, "balance": LINES}]
        assert pond.state("texts").snapshot()["value"].to_pylist() == ["a" * LINES]


def reach_out(times, value) -> float:
    far = np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 45,))
    far[1 << 44] = 1.0
    return far[0]


def hoard(times, value) -> float:
    kept = []
    while True:
        kept.append(list(range(1000)))


def ask(times, value) -> str:
    return input()


def grab(times, value) -> float:
    return np.ones(1 << 40).sum()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[mp.State]:
    with mp.open(tmp_path / "pond", memory=1 << 30) as pond:
        state = pond.state("s", key="long", value="string")
        state.update(key="k", at="t", value="v", name="feed")(
            pa.table({"k": [1, 2], "t": [1, 1], "v": ["a", "b"]}), 0
        )
        state.finish("feed")
        yield state


def test_user_code_that_crashes_or_eats_memory_leaves_the_pond_serving(
    state: mp.State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = pa.table({"k": [1], "low": [0], "t": [5]})

    def answer(rule: Any) -> Any:
        return state.fetch(key="k", between=("low", "t"), into="v", rule=rule).now(questions)["v"].to_pylist()

    with pytest.raises(MillpondError, match="EOFError"):
        answer(ask)
    for greedy in (hoard, grab):
        with pytest.raises(MillpondError, match=r"MemoryError|ran out of memory"):
            answer(greedy)
        assert answer(mp.latest()) == ["a"]
    log = tmp_path / "pond" / "container-0.log"
    assert "Fatal" not in log.read_text()
    monkeypatch.setattr(client, "RETRY_S_MAX", 0.0)
    with pytest.raises(MillpondError):
        answer(reach_out)
    monkeypatch.undo()
    assert answer(mp.latest()) == ["a"]
    said = log.read_text()
    assert re.search("Fatal Python error: (Segmentation fault|Bus error)", said)
    assert "in reach_out" in said


@pytest.mark.parametrize(
    "option",
    [{"code_seconds": value} for value in (0, -1.0, float("nan"), True, "60", None)]
    + [{"memory": value} for value in (0, 1 << 20, 1e9, "much", True)],
    ids=str,
)
def test_limits_that_are_none_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(BadOption) as raised:
        mp.open(tmp_path / "pond", **option)
    assert raised.value.option == next(iter(option))
    assert not (tmp_path / "pond").exists()


STANDSTILL = """
import os, sys, threading, time
from millpond.container import process
from millpond.container.printing import Printed
process.STANDSTILL_S = 0.5
threading.Thread(target=process._watch, args=(os.getppid(), Printed(sys.argv[1]), 0.5), daemon=True).start()
time.sleep(0.2)
sum(range(10**15))  # holds the interpreter, and cannot be interrupted
"""


def test_code_that_keeps_the_interpreter_to_itself_ends_its_process(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STANDSTILL, str(tmp_path / "log")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr
