"""What it costs to keep rows that wait and to read them back, by each way: `python -m millpond.bench.waiting`.

By who sees the pond's root, and through the pond at its Unix sockets and at its TCP port. All in one run, by turns; medians.
Figures of CPU are of this process and of the containers together: on a busy machine they say more than those of the clock.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.client.waiting import WaitingRowsAway
from millpond.stores.waiting import WaitingRows
from millpond.wire.base import Epoch, Turn
from millpond.wire.questions import Pin

SIZES = (1_000, 1_000_000)
ROUNDS = 9
PLACE = ("s", "views", "q")
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = os.path.join(folder, "pond")
        with mp.open(root, containers=2, threads=1, port=0) as pond, _joined(pond, root) as joined:
            state = pond.state("s", key="long", value="long")
            state.fetch(key="k", at="t", name="views").to(lambda rows, epoch: None)
            pond._client.call(Pin(*PLACE, Turn(Epoch(0)), "new"))  # noqa: SLF001 - else it is tidied away
            ways = {
                "root seen": WaitingRows(root, *PLACE),
                "Unix sockets": WaitingRowsAway(pond._client, root, *PLACE),  # noqa: SLF001 - as operators do
                "TCP port": WaitingRowsAway(joined._client, root, *PLACE),  # noqa: SLF001
            }
            pids = [info.pid for info in pond.containers()]
            for size in SIZES:
                _measure(ways, _rows(size), pids)


@contextmanager
def _joined(pond: mp.Pond, root: str) -> Iterator[mp.Pond]:
    with open(os.path.join(root, "token")) as token, mp.connect(pond.address, token.read()) as joined:
        yield joined


def _rows(size: int) -> pa.Table:
    chance = np.random.default_rng(1)
    return pa.table({name: pa.array(chance.integers(0, 10**9, size)) for name in ("k", "t", "x", "id")})


def _measure(ways: dict[str, WaitingRows], rows: pa.Table, pids: list[int]) -> None:
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, way in ways.items():
            figures[name].append(_once(way, rows, Turn(Epoch(number)), pids))
    print(f"{len(rows):,} rows of {rows.nbytes // len(rows)} bytes")
    for name, every in figures.items():
        kept, read, cpu = np.median(every, axis=0)
        print(
            f"  {name:12}  kept {len(rows) / kept:12,.0f} rows/s  read {len(rows) / read:12,.0f} rows/s"
            f"  CPU {1e3 * cpu:7.1f} ms for both"
        )


def _once(way: WaitingRows, rows: pa.Table, turn: Turn, pids: list[int]) -> tuple[float, float, float]:
    token, cpu = way.token(), _cpu_s(pids)
    began = time.perf_counter()
    way.list_files(turn, token, "", way.keep(turn, token, rows.to_batches()))
    kept = time.perf_counter()
    listed = way.listed(turn, token)
    if sum(way.read(listed, file).num_rows for file in listed.files) != len(rows):
        raise RuntimeError("not all rows came back")
    return kept - began, time.perf_counter() - kept, _cpu_s(pids) - cpu


def _cpu_s(pids: list[int]) -> float:
    """Of this process and of those."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            ticks += sum(map(int, stat.read().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / _TICKS


if __name__ == "__main__":
    main()
