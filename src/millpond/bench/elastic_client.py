"""A client of `millpond bench elastic`, in a process of its own: asks or updates all the time, and notes when it was answered.

Started with one argument, JSON of a `Task`. Says "ready" once it has been answered, goes on until its standard input ends,
and leaves its notes in a file. What the bench does to the pond, it sees as any user would: by waiting.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import millpond as mp
from millpond.errors import MillpondError
from millpond.kernels.hashing import slices_of
from millpond.stores.keys import Keys

STATE = "s"
POOL = 200_000
"""Keys that a client knows."""


class Task(msgspec.Struct, frozen=True):
    """Whom to ask what, how often. Keys are those below `keys` that lie in one of `slices`."""

    kind: Literal["ask", "update"]
    root: str
    address: str
    name: str
    slices: list[int]
    slices_of_pond: int
    keys: int
    newest: int  # the time of the newest version that was loaded
    rows: int
    pause_s: float
    notes: str
    checkpoint_every_s: float = 0.0
    """Of one that updates: so often it has the pond take a checkpoint, and waits for it."""


def main(task: Task) -> None:
    ended = threading.Event()
    with (
        open(Path(task.root) / "token") as token,
        mp.connect(task.address, token.read()) as pond,
    ):
        work = _asking(task, pond) if task.kind == "ask" else _updating(task, pond)
        for number in range(5):
            work(number)
        threading.Thread(target=_await_end, args=[ended], daemon=True).start()
        print("ready", flush=True)
        began, took, failed = _go_on(task, work, ended)
    np.savez(task.notes, began=began, took=took, failed=failed)


def _await_end(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


def _go_on(
    task: Task, work: Callable[[int], None], ended: threading.Event
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """When each call began, how long it took, and whether it failed."""
    began, took, failed = [], [], []
    for number in itertools.count(5):
        if ended.is_set():
            break
        start = time.monotonic()
        try:
            work(number)
            failed.append(False)
        except MillpondError as error:
            print(error, file=sys.stderr)
            failed.append(True)
        began.append(start)
        took.append(time.monotonic() - start)
        if task.pause_s:
            time.sleep(task.pause_s)
    return np.array(began), np.array(took), np.array(failed, np.bool_)


def _asking(task: Task, pond: mp.Pond) -> Callable[[int], None]:
    fetch = pond.state(STATE).fetch(key="k", at="t", into="v")
    keys = _keys(task)
    chance = np.random.default_rng(2)

    def ask(_number: int) -> None:
        own = chance.choice(keys, task.rows)
        table = fetch.now(pa.table({"k": own, "t": np.full(task.rows, task.newest)}))
        # Every key was loaded with itself as its value; updates come later than what is asked for.
        if not np.array_equal(table["v"].to_numpy(), own):
            raise RuntimeError(f"wrong answers: {table.slice(0, 10).to_pydict()}")

    return ask


def _updating(task: Task, pond: mp.Pond) -> Callable[[int], None]:
    feed = pond.state(STATE).update(key="k", at="t", value="v", name=task.name)
    keys = _keys(task)
    chance = np.random.default_rng(3)
    next_checkpoint = time.monotonic() + task.checkpoint_every_s

    def update(number: int) -> None:
        nonlocal next_checkpoint
        own = chance.choice(keys, task.rows)
        feed(pa.table({"k": own, "t": np.full(task.rows, task.newest + 1 + number), "v": own}), number)
        if task.checkpoint_every_s and time.monotonic() > next_checkpoint:
            pond.checkpoint()
            next_checkpoint = time.monotonic() + task.checkpoint_every_s

    return update


def _keys(task: Task) -> npt.NDArray[np.int64]:
    some = np.random.default_rng(1).integers(0, task.keys, min(POOL * 4, task.keys * 4))
    slices = slices_of(Keys.from_longs(some).hashes, task.slices_of_pond)
    return some[np.isin(slices, task.slices)][:POOL]


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Task))
