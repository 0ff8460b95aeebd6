"""A container that held much and ends, or stops: how long until it is noticed, and until its slices answer again.

Container 0 serves all slices but one for each of its peers. A client asks keys of its slices, 256 at a time, so that hardly
any question is without a slice that has to come back first; another updates. Noticed is when the coordinator takes it off
those that serve; rebuilt, when the client is answered again: the client tries again every 20 ms to 0.5 s, and that counts.
From backups each peer takes over the slices that it holds a backup of; from the root, peers read them, each its share. Who has
just done so is not relieved that way: so every time from the root has a pond of its own.

An executor is lost where Spark hosts the containers, each on an executor of its own of a local cluster, whose Java machines are
processes of their own: that of container 0 is killed.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from millpond.apps.spark_session import spark_session
from millpond.bench.elastic_load import BUCKET_S, SLICES, Clients, Loaded, await_backups, loaded_pond
from millpond.wire.house import ContainerInfo

QUESTION_ROWS = 256
EPOCH_ROWS = 1_000
LOOK_S = 0.001
WAIT_S = 120.0
WAYS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
LOST_EXECUTOR = "lost executor"
CLUSTER = "local-cluster[{},2,1024]"


def run(
    mb: float,
    seconds: float,
    progress: Callable[[str], None],
    peers: Sequence[int],
    ways: Sequence[str] = tuple(WAYS),
    from_root: bool = True,
) -> list[dict[str, Any]]:
    """With each number of peers, in all `ways`."""
    plans = [(1, count, ways) for count in peers]
    plans += [(0, count, [way]) for count in peers for way in ways if from_root]
    results = []
    for backups, count, own_ways in plans:
        owners = [0] * (SLICES - count) + [1 + number for number in range(count)]
        progress(f"recovery, backups={backups}, {count} peers: loading {mb:,.0f} MB")
        with loaded_pond(owners, mb, backups) as loaded:
            for way in own_ways:
                progress(f"recovery: {way}")
                results.append(_recovered(loaded, way, backups, count, seconds))
    return results


def run_on_spark(
    mb: float, seconds: float, progress: Callable[[str], None], peers: Sequence[int]
) -> list[dict[str, Any]]:
    """An executor that is lost, from backups and from the root; each container has an executor of its own."""
    results = []
    for backups, count in itertools.product((1, 0), peers):
        progress(f"recovery, hosted by Spark, backups={backups}, {count} peers: loading {mb:,.0f} MB")
        owners = [0] * (SLICES - count) + [1 + number for number in range(count)]
        with (
            spark_session("millpond bench elastic", master=CLUSTER.format(count + 1)) as spark,
            loaded_pond(owners, mb, backups, spark=spark) as loaded,
        ):
            progress(f"recovery: {LOST_EXECUTOR}")
            results.append(_recovered(loaded, LOST_EXECUTOR, backups, count, seconds))
    return results


def _end(loaded: Loaded, victim: ContainerInfo, way: str) -> None:
    if way == LOST_EXECUTOR:
        hosting = loaded.coordinator._containers._hosting  # noqa: SLF001 - the bench looks inside
        daemon = int(hosting._places[victim.id].line.arrived.executor)  # noqa: SLF001
        # Its parent is the executor's Java machine.
        stat = Path(f"/proc/{daemon}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    else:
        os.kill(victim.pid, WAYS[way])


def _recovered(loaded: Loaded, way: str, backups: int, peers: int, seconds: float) -> dict[str, Any]:
    pond = loaded.pond
    # After the first time, another one has most of it.
    victim = max(pond.containers(), key=lambda info: len(loaded.slices_of(info.id)))
    slices = loaded.slices_of(victim.id)
    held_mb = loaded.bytes_of(victim.id) / 1e6
    with Clients(loaded) as clients:
        clients.start("ask", kind="ask", slices=slices, rows=QUESTION_ROWS)
        clients.start("update", kind="update", rows=EPOCH_ROWS)
        clients.await_ready()
        time.sleep(seconds)
        looks = _Looks(loaded, victim.id)
        moment = time.monotonic()
        _end(loaded, victim, way)
        looks.join()
        time.sleep(seconds)
        over = time.monotonic()
        await_up(loaded, victim.id)
    asks, updates = clients.notes["ask"], clients.notes["update"]
    # One of which the executor is lost may answer for a moment longer: what others serve counts.
    again = float(min(asks.ended[asks.ended > looks.served], default=over))
    owners = pond.placement()
    taken = {info.id: sum(owners[number] == info.id for number in slices) for info in pond.containers()}
    rebuild_s = again - looks.noticed
    result = {
        "system": f"millpond, {way}, {'from backups' if backups else 'from the root'}, peers={peers}",
        "section": "recovery",
        "setup": f"{peers + 1} containers of 1 thread, backups={backups}; it served {len(slices)} of {SLICES} slices",
        "held_mb": held_mb,
        "detection_ms": (looks.noticed - moment) * 1e3,
        "journal_ms": (looks.served - looks.noticed) * 1e3,
        "rebuild_ms": rebuild_s * 1e3,
        "without_answers_ms": asks.gap_ms(moment, again + 0.01),
        "update_gap_ms": updates.gap_ms(moment, again + 0.01),
        "process_back_s": pond.metrics()["coordinator"]["recovery_s_last"],
        "slices_taken": {str(container): count for container, count in taken.items() if count},
        "failures": asks.failures + updates.failures,
        "aim": f"rebuild_ms < {1_000 if backups else 5_000}",
        "reached": rebuild_s < (1 if backups else 5),
        "timeline": {
            "bucket_s": BUCKET_S,
            "series": {
                "answers/s": asks.timeline(moment - seconds, over),
                "epochs/s": updates.timeline(moment - seconds, over),
            },
            "spans": [
                ["detection", seconds, seconds + looks.noticed - moment],
                ["rebuild", seconds + looks.noticed - moment, seconds + again - moment],
            ],
        },
    }
    if backups:
        began = time.monotonic()
        await_backups(pond)
        result["backups_whole_again_s"] = time.monotonic() - began + over - again
    return result


class _Looks:
    """When the coordinator takes a container off those that serve, and when others serve its slices, or it does again."""

    def __init__(self, loaded: Loaded, container: int) -> None:
        coordinator = loaded.coordinator
        self._live: dict[int, Any] = coordinator._containers.live  # noqa: SLF001
        self._term = self._live[container].term
        self._container = container
        self._memory = coordinator._memory  # noqa: SLF001
        self._owners = self._memory.record.owners
        self.noticed = self.served = 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._is_there():
            time.sleep(LOOK_S)
        self.noticed = time.monotonic()
        while self._memory.record.owners == self._owners and not self._is_back():
            time.sleep(LOOK_S)
        self.served = time.monotonic()

    def _is_there(self) -> bool:
        live = self._live.get(self._container)
        return live is not None and live.term == self._term

    def _is_back(self) -> bool:
        live = self._live.get(self._container)
        return live is not None and live.term > self._term

    def join(self) -> None:
        self._thread.join(WAIT_S)
        if not self.served:
            raise RuntimeError(f"container {self._container} was not relieved within {WAIT_S:.0f} s")


def await_up(loaded: Loaded, container: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while container not in loaded.coordinator._containers.live:  # noqa: SLF001
        if time.monotonic() > deadline:
            raise RuntimeError(f"container {container} does not come back")
        time.sleep(0.01)
