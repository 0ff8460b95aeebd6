"""Many times its budget streamed through the open windows of one container, which has `memory` and no more.

`python tests/windows/memory_attack.py CASE [TIMES [MEMORY]]` runs one of them, says what it took, and fails if the
container took more than it may, or an answer is wrong. Answers are compared with what NumPy makes of the same rows.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import millpond as mp
from millpond.container.process import OWN_BYTES, WINDOWS_SHARE

MIB = 1 << 20
EPOCH_ROWS = 200_000
ROW_BYTES = 48
"""Of a row as it is kept: a key, a time, four values."""
RSS_SHARE_MAX = 1.15


class Case(NamedTuple):
    """A window, and the rows of its epochs; `expected` is what all of them come to, by window and key."""

    window: Callable[[int], Any]
    aggregate: dict[str, Any]
    keys: Callable[[int], int]
    """Of so many rows."""
    expected: Callable[[pa.Table, int], pa.Table]
    pattern: str
    windows: int = 1
    firing: Mapping[str, Any] = {}
    """How often a window gives its results. Of several the last counts, which must come with the end."""


class Peak(NamedTuple):
    """What a container took at most, in bytes."""

    rss: int
    limit: int
    seconds: float
    rows: int
    fired: int
    spilled: int


def rows_of(case: Case, epoch: int, epochs: int) -> pa.Table:
    """Times go on from epoch to epoch, in disorder within one. Keys are spread over all that there are."""
    random = np.random.default_rng(epoch)
    keys = case.keys(epochs * EPOCH_ROWS)
    each = -(-epochs // case.windows)
    return pa.table(
        {
            "k": random.integers(0, keys, EPOCH_ROWS) * 7919,
            "ts": (epoch // each) * 1000 + random.integers(0, 1000, EPOCH_ROWS),
            "a": random.integers(0, 1 << 40, EPOCH_ROWS),
            "b": random.random(EPOCH_ROWS),
            "c": random.integers(0, 1000, EPOCH_ROWS),
            "d": random.integers(0, 1 << 20, EPOCH_ROWS),
        }
    )


def _grouped(rows: pa.Table) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns by window and key, and where each group begins."""
    columns = {name: rows.column(name).to_numpy() for name in rows.column_names}
    columns["w"] = columns["ts"] // 1000
    order = np.lexsort((columns["k"], columns["w"]))
    columns = {name: values[order] for name, values in columns.items()}
    new = (np.diff(columns["k"]) != 0) | (np.diff(columns["w"]) != 0)
    return columns, np.concatenate(([0], np.flatnonzero(new) + 1))


def whole(rows: pa.Table, windows: int) -> pa.Table:
    columns, starts = _grouped(rows)
    counts = np.diff(np.append(starts, len(columns["k"])))
    groups = np.repeat(np.arange(len(starts)), counts)
    by_value = columns["a"][np.lexsort((columns["a"], groups))]
    middle = (by_value[starts + (counts - 1) // 2] + by_value[starts + counts // 2]) / 2
    return pa.table(
        {
            "window_start": columns["w"][starts] * 1000,
            "k": columns["k"][starts],
            "m": middle,
            "b": np.maximum.reduceat(columns["b"], starts),
            "c": np.add.reduceat(columns["c"], starts),
            "d": np.minimum.reduceat(columns["d"], starts),
        }
    )


def slid(rows: pa.Table, windows: int) -> pa.Table:
    """Of windows of 2000 every 1000: a row is in two."""
    later = rows.set_column(1, "ts", pc.add(rows.column("ts"), 1000))
    both = whole(pa.concat_tables([rows, later]), windows)
    return both.set_column(0, "window_start", pc.subtract(both.column("window_start"), 1000))


def is_paired(keys: np.ndarray) -> np.ndarray:
    """Of these keys, which have a row on the right side."""
    return keys // 7919 % 50 == 0


def paired(rows: pa.Table, windows: int) -> pa.Table:
    """Left rows whose key is on the right side, too."""
    rows = rows.filter(pa.array(is_paired(rows.column("k").to_numpy())))
    start = pc.multiply(pc.divide(rows.column("ts"), 1000), 1000)
    return rows.add_column(0, "window_start", start).drop_columns(["ts", "d"])


def cells(rows: pa.Table, windows: int) -> pa.Table:
    columns, starts = _grouped(rows)
    return pa.table(
        {
            "window_start": columns["w"][starts] * 1000,
            "k": columns["k"][starts],
            "n": np.diff(np.append(starts, len(columns["k"]))),
            "b": np.maximum.reduceat(columns["b"], starts),
            "c": np.add.reduceat(columns["c"], starts),
            "d": np.minimum.reduceat(columns["d"], starts),
        }
    )


ROWS = {"m": mp.median("a"), "b": mp.largest("b"), "c": mp.total("c"), "d": mp.smallest("d")}
CELLS = {"n": mp.count(), "b": mp.largest("b"), "c": mp.total("c"), "d": mp.smallest("d")}
CASES = {
    # All rows in one window, which fires at the end.
    "aar": Case(lambda _: mp.tumbling(1000), ROWS, lambda rows: rows // 8, whole, "aar"),
    # Windows that fire one after the other.
    "aar-several": Case(lambda _: mp.tumbling(1000), ROWS, lambda rows: rows // 40, whole, "aar", windows=5),
    # A session for each key, all of them open until the end: as many as may be, and no more.
    "aur": Case(lambda _: mp.session(100_000), ROWS, lambda rows: rows // 80, whole, "aur"),
    # The same of sessions that may be cut, and of windows that count.
    "cut": Case(lambda _: mp.session(100_000, longest=10**9), ROWS, lambda rows: rows // 80, whole, "aur"),
    "counted": Case(lambda _: mp.counted(10**9), ROWS, lambda rows: rows // 80, whole, "aur"),
    # Each row is in two windows, and kept once.
    "sliding": Case(lambda _: mp.sliding(2000, 1000), ROWS, lambda rows: rows // 8, slid, "aar", windows=3),
    # What has changed is known in memory for each window and key until it is sent, in the end.
    "update": Case(
        lambda _: mp.tumbling(1000),
        ROWS,
        lambda rows: rows // 80,
        whole,
        "aar",
        firing={"every": "1 hour", "lateness": 500},
    ),
    "update-cells": Case(
        lambda _: mp.tumbling(1000), CELLS, lambda rows: rows // 80, cells, "rmw", firing={"every": "1 hour"}
    ),
    # One key of fifty has a row on the other side; the left one has nearly all rows.
    "join": Case(lambda _: mp.tumbling(1000), {}, lambda rows: rows // 8, paired, "join", windows=2),
    # Nearly every row a key of its own.
    "rmw": Case(lambda _: mp.tumbling(1000), CELLS, lambda rows: 4 * rows, cells, "rmw"),
    "rmw-session": Case(lambda _: mp.session(100_000), CELLS, lambda rows: 4 * rows, cells, "rmw"),
}


def container_of_this_process() -> int:
    """The one container of the pond that is open here."""
    own = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == os.getpid()]
    (found,) = [pid for pid in own if "millpond.container.process" in _line(pid)]
    return found


def _parent(pid: int) -> int:
    try:
        return int(status_of(pid)["PPid"][0])
    except (OSError, KeyError):
        return 0


def _line(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def status_of(pid: int) -> dict[str, list[str]]:
    with open(f"/proc/{pid}/status") as file:
        return {name: rest.split() for name, _, rest in (line.partition(":") for line in file)}


def bytes_of(pid: int, name: str) -> int:
    return 1024 * int(status_of(pid)[name][0])


def budget_of(memory: int) -> int:
    """For open windows, of a container with so much memory."""
    return max(memory - OWN_BYTES, memory // 4) // WINDOWS_SHARE


def opened(pond: mp.Pond, case: Case, epochs: int) -> Any:
    window = pond.window(
        "w",
        key="k long",
        window=case.window(epochs),
        aggregate=case.aggregate,
        pattern=case.pattern,  # type: ignore[arg-type]
        **case.firing,
    )
    return window.over(key="k", at="ts", delay=0)


class Pairs:
    """A join, fed as a window is: before the left rows of a window come those of the right side."""

    def __init__(self, pond: mp.Pond, case: Case, epochs: int) -> None:
        join = pond.join(
            "w", key="k long", left="a long, b double, c long", right="e long", window=case.window(epochs)
        )
        self._left, self._right = join.left(key="k", at="ts", delay=0), join.right(key="k", at="ts", delay=0)
        self._each = -(-epochs // case.windows)
        keys = np.arange(case.keys(epochs * EPOCH_ROWS)) * 7919
        self._keys = keys[is_paired(keys)]

    def __call__(self, rows: pa.Table, epoch: int) -> pa.Table:
        parts = []
        if epoch % self._each == 0:
            window = epoch // self._each
            times = np.full(len(self._keys), window * 1000 + 999)
            right = pa.table({"k": self._keys, "ts": times, "e": times})
            parts.append(self._right(right, window))
        parts.append(self._left(rows, epoch))
        return pa.concat_tables(parts).drop_columns(["e", "window_end"])

    def finish(self) -> pa.Table:
        parts = [self._left.finish(), self._right.finish()]
        return pa.concat_tables(parts).drop_columns(["e", "window_end"])


def run(name: str, times: float, memory: int, root: str, say: Callable[[str], None] = lambda _: None) -> Peak:
    """`times` the budget for open windows, in rows or cells."""
    case = CASES[name]
    budget = budget_of(memory)
    epochs = max(1, int(times * budget) // (ROW_BYTES * EPOCH_ROWS))
    begin = time.perf_counter()
    with mp.open(root, memory=memory) as pond:
        feed = Pairs(pond, case, epochs) if case.pattern == "join" else opened(pond, case, epochs)
        pid = container_of_this_process()
        fired: list[pa.Table] = []
        spilled = 0
        for epoch in range(epochs):
            fired.append(feed(rows_of(case, epoch, epochs), epoch))
            if epoch % 20 == 19 or epoch == epochs - 1:
                figures = pond.metrics()["joins" if case.pattern == "join" else "windows"]["w"]
                spilled = max(spilled, int(figures["spilled_bytes"]))
                say(
                    f"epoch {epoch + 1} of {epochs}: {bytes_of(pid, 'VmRSS') // MIB} MiB now,"
                    f" {bytes_of(pid, 'VmHWM') // MIB} at most, {bytes_of(pid, 'VmData') // MIB} data,"
                    f" {spilled // MIB} on disk, {time.perf_counter() - begin:.0f} s"
                )
        fired.append(feed.finish())
        assert container_of_this_process() == pid, "the container ended and began anew"
        seconds = time.perf_counter() - begin
        peak = bytes_of(pid, "VmHWM")
    results = pa.concat_tables([each for each in fired if each is not None and each.num_rows])
    if case.firing:
        results = last_of_each(results)
    say(f"{results.num_rows} results, {peak // MIB} MiB at most of {memory // MIB}, {seconds:.0f} s")
    check(case, epochs, results)
    return Peak(peak, memory, seconds, epochs * EPOCH_ROWS, results.num_rows, spilled)


def last_of_each(results: pa.Table) -> pa.Table:
    """Of each window and key the result that came last."""
    order = results.append_column("place", pa.array(np.arange(results.num_rows)))
    last = order.group_by(["window_start", "k"]).aggregate([("place", "max")])
    return results.take(last.column("place_max"))


def check(case: Case, epochs: int, results: pa.Table) -> None:
    rows = pa.concat_tables([rows_of(case, epoch, epochs) for epoch in range(epochs)])
    expected = case.expected(rows, epochs)
    columns = expected.column_names
    if case.pattern == "aur" or "session" in str(case.window(epochs)):
        columns = [name for name in columns if name != "window_start"]
        # Of one window only: a session begins where its first row is.
        assert case.windows == 1
    keys = columns if case.pattern == "join" else ("window_start", "k")
    order = [(name, "ascending") for name in columns if name in keys]
    got = results.select(columns).sort_by(order)
    want = expected.select(columns).sort_by(order)
    assert got.num_rows == want.num_rows, f"{got.num_rows} results, not {want.num_rows}"
    for column in columns:
        same = pc.equal(got.column(column), want.column(column).cast(got.column(column).type))
        assert pc.all(same).as_py(), f"column {column} is not what it should be"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("times", type=float, nargs="?", default=10, help="of the budget for open windows")
    parser.add_argument("memory", type=int, nargs="?", default=900, help="of the container, in MiB")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        peak = run(chosen.case, chosen.times, chosen.memory * MIB, os.path.join(root, "pond"), print)
    assert peak.rss <= RSS_SHARE_MAX * peak.limit, f"{peak.rss:,} bytes of {peak.limit:,}"


if __name__ == "__main__":
    main()
