"""A driver on a cluster, `python hosting_job.py WHERE MASTER SCENARIO`: containers on Spark, and what may befall them.

It says what it found in a line of JSON; a line before that has the processes that must end with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

from cluster import JAVA_OPTIONS, use_home
from hosting_checks import CHECKS, answers, counts, is_gone, wait_until
from pyspark.sql import SparkSession
from rich.console import Console

import millpond as mp
from millpond.apps import adcamp
from millpond.errors import NoTaskSlots

PATIENCE_S = 60.0
COMMON = {
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.sql.shuffle.partitions": "2",
    "spark.task.maxFailures": "2",
}
# A second attempt beside every task that runs for a second; Spark starts those on other hosts only.
SPECULATING = {
    "spark.speculation": "true",
    "spark.speculation.interval": "500ms",
    "spark.speculation.task.duration.threshold": "1s",
}
DYNAMIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.shuffleTracking.enabled": "true",
    "spark.dynamicAllocation.minExecutors": "0",
    "spark.dynamicAllocation.maxExecutors": "4",
    "spark.dynamicAllocation.executorIdleTimeout": "2s",
    "spark.executor.cores": "1",
    "spark.decommission.enabled": "true",
}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Watched:
    """A pond on Spark, with what its hosting knows."""

    def __init__(self, pond: mp.Pond, where: Path) -> None:
        self.pond = pond
        self.where = where
        service: Any = pond._owner
        self.hosting = service._coordinator._containers._hosting

    def pid(self, container: int) -> int:
        return next(info.pid for info in self.pond.containers() if info.id == container)

    def slices(self, container: int) -> list[int]:
        return [number for number, owner in self.pond.placement().items() if owner == container]

    def worker(self, container: int) -> int:
        return int(self.hosting._places[container].line.arrived.pid)

    def executor(self, container: int) -> int:
        """Its Java machine's process."""
        return parent_of(int(self.hosting._places[container].line.arrived.executor))

    def back_after(self, harm: Callable[[], object], container: int = 0) -> dict[str, Any]:
        """Seconds until the container's process was gone, and until another served."""
        before = self.pid(container)
        harm()
        started = time.monotonic()
        gone_s = wait_until(lambda: is_gone(before), PATIENCE_S)
        wait_until(lambda: self._serves(container, before), PATIENCE_S)
        return {
            "gone_s": gone_s,
            "back_s": time.monotonic() - started,
            "words": self.hosting.last_words(container),
        }

    def _serves(self, container: int, before: int) -> bool:
        return any(info.id == container and info.pid != before for info in self.pond.containers())


def kill(pid: int, number: int = signal.SIGKILL) -> Callable[[], None]:
    return lambda: os.kill(pid, number)


def at_a_time(session: SparkSession) -> int:
    """How many tasks of a query run at the same time."""

    def nap(_: int) -> list[tuple[float, int]]:
        started = time.time()
        time.sleep(2)
        return [(started, 1), (time.time(), -1)]

    events = session.sparkContext.parallelize(range(20), 20).flatMap(nap).collect()
    return max(accumulate(change for _, change in sorted(events)))


def on_local_cluster(session: SparkSession, watched: Watched) -> dict[str, Any]:
    """Speculation is on. Containers take two cores each, of ten."""
    told: dict[str, Any] = {}
    told["at_a_time"] = at_a_time(session)
    told["executors"] = [watched.executor(container) for container in (0, 1)]
    told["checks"] = [check.__name__ for check in CHECKS if check(watched.pond) is None]
    told["deaths"] = [watched.back_after(kill(watched.pid(0))) for _ in range(6)]
    told["workers"] = [
        watched.back_after(lambda: os.kill(watched.worker(0), signal.SIGKILL)) for _ in range(2)
    ]
    told["executor"] = watched.back_after(lambda: os.kill(watched.executor(0), signal.SIGKILL))
    with counts(watched.pond) as (state, feed, _):
        feed(0)
        feed(1)
        frame = session.createDataFrame([(key, 0) for key in range(9)], "k long, t long")
        rows = state.fetch(key="k", at="t", into="v").now(frame).collect()
        told["rows"] = sorted((row.k, row.v) for row in rows) == [(key, key) for key in range(9)]
    return told


def on_master(session: SparkSession, watched: Watched) -> dict[str, Any]:
    """Executors come and go, and are decommissioned."""
    told: dict[str, Any] = {}
    cluster = watched.hosting._cluster
    told["checks"] = [check.__name__ for check in CHECKS if check(watched.pond) is None]
    session.range(0, 40, 1, 40).foreach(lambda _: time.sleep(0.2))
    told["at_most"] = len(cluster.executors())
    told["idle_s"] = wait_until(lambda: len(cluster.executors()) == 2, PATIENCE_S)
    told["alive"] = [watched.hosting.alive(container) for container in (0, 1)]
    with counts(watched.pond) as (state, feed, oracle):
        feed(0)
        feed(1)
        place = watched.hosting._places[0]
        wait_until(lambda: place.located is place.line, PATIENCE_S)
        left = watched.executor(0)
        told["decommissioned"] = watched.back_after(kill(left, signal.SIGPWR))
        told["moved"] = watched.executor(0) != left
        told["answers"] = answers(state, 0) == [(key, oracle.fetch_latest(key, 0)) for key in range(51)]
    told["executor"] = watched.back_after(lambda: os.kill(watched.executor(1), signal.SIGKILL), 1)
    return told


def on_two_hosts(session: SparkSession, watched: Watched) -> dict[str, Any]:
    """Speculation is on, and second attempts have a host to run on."""
    place = watched.hosting._places[0]
    told: dict[str, Any] = {"twins_s": wait_until(lambda: len(place.lines) == 2, PATIENCE_S)}
    told["hosts"] = sorted(executor.host for executor in watched.hosting._cluster.executors())
    before = [line.arrived.pid for line in place.lines]
    told["worker"] = watched.back_after(lambda: os.kill(watched.worker(0), signal.SIGKILL))
    told["took_over"] = watched.worker(0) == before[1]
    told["jobs"] = len(watched.hosting._jobs)
    return told


def on_all_at_once(session: SparkSession, watched: Watched) -> dict[str, Any]:
    """Speculation and dynamic allocation are on, and executors are decommissioned."""
    place = watched.hosting._places[0]
    told: dict[str, Any] = {"twins_s": wait_until(lambda: len(place.lines) == 2, PATIENCE_S)}
    with counts(watched.pond) as (state, feed, oracle):
        feed(0)
        for epoch, signal_number in enumerate((signal.SIGKILL, signal.SIGPWR, signal.SIGKILL), 1):
            wait_until(lambda: place.located is place.line, PATIENCE_S)
            back = watched.back_after(lambda number=signal_number: os.kill(watched.executor(0), number))
            told.setdefault("executors", []).append(back)
            feed(epoch)
        told["deaths"] = [watched.back_after(kill(watched.pid(0))) for _ in range(5)]
        session.range(0, 8, 1, 8).foreach(lambda _: time.sleep(0.5))  # a query has slots beside all of that
        feed(4)
        told["answers"] = all(
            answers(state, at) == [(key, oracle.fetch_latest(key, at)) for key in range(51)] for at in (0, 3)
        )
    return told


RATE, SECONDS, KEYS = 500, 150, 5_000


def under_load(session: SparkSession, watched: Watched) -> dict[str, Any]:
    """AdCamp's two queries, on two of four slots, while all is done to containers that can be done by hand."""
    pond, folder, rows = watched.pond, str(watched.where / "adcamp"), RATE * SECONDS
    adcamp.warm_up(session, pond, folder)
    campaigns = pond.state("campaigns", key="long", value="string")
    streams = adcamp.Streams(session, campaigns, folder, RATE, KEYS, rows)
    told: dict[str, Any] = {"harms": []}

    def note(name: str, work: Callable[[], Any]) -> None:
        before, started = streams.answered.total, time.monotonic()
        what = work()
        wait_until(lambda: streams.answered.total > before, PATIENCE_S)  # and rows are answered after it
        seconds = round(time.monotonic() - started, 1)
        told["harms"].append([name, seconds, what if isinstance(what, dict) else None])

    def killed_while_it_takes_slices() -> dict[str, Any]:
        mover = threading.Thread(target=pond.move, args=(watched.slices(0),), kwargs={"to": 1})
        mover.start()
        back = watched.back_after(kill(watched.pid(1)), 1)
        mover.join(PATIENCE_S)
        return {"alive": mover.is_alive(), **back}

    def harm() -> None:
        try:
            note("container", lambda: watched.back_after(kill(watched.pid(0))))
            note("more", lambda: pond.scale(containers=3))
            note("move", lambda: pond.move(watched.slices(0), to=2))
            note("worker", lambda: watched.back_after(kill(watched.worker(1)), 1))
            note("executor", lambda: watched.back_after(kill(watched.executor(2)), 2))
            note("fewer", lambda: pond.scale(containers=2))
            note("move, killed", killed_while_it_takes_slices)
            note("even", lambda: pond.scale(containers=2))
            for _ in range(5):
                note("container", lambda: watched.back_after(kill(watched.pid(1)), 1))
            told["in_time"] = streams.updated.total < rows
        except Exception as error:  # noqa: BLE001 - the test tells of it
            told["harms"].append(["failed", repr(error)])

    harming = threading.Thread(target=harm, daemon=True)
    try:
        harming.start()
        adcamp.Watch(Console(file=sys.stderr), streams, rows).until_answered()
        harming.join()
    finally:
        streams.stop()
    compared = adcamp.compare(folder)
    late = sum(campaigns.progress().late.values()) + streams.waiting.late
    told |= {"rows": rows, **compared._asdict(), "lost": compared.lost(rows), "late": late}
    told["task_slots"] = pond.metrics()["task_slots"]
    try:
        pond.scale(containers=4)
    except NoTaskSlots as error:
        told["refused"] = [error.slots, error.taken, error.left]
    return told


SCENARIOS = {
    "speculating": on_local_cluster,
    "dynamic": on_master,
    "twins": on_two_hosts,
    "all": on_all_at_once,
    "adcamp": under_load,
}
SETTINGS = {"dynamic": DYNAMIC, "all": {**DYNAMIC, **SPECULATING}, "adcamp": {"spark.task.maxFailures": "4"}}


def main(where: Path, master: str, scenario: str) -> None:
    use_home(where)
    local = scenario == "speculating"
    builder = SparkSession.builder.master(master).appName("hosting")
    for key, value in {**COMMON, **SETTINGS.get(scenario, SPECULATING)}.items():
        builder = builder.config(key, value)
    events = where / "events"
    events.mkdir()
    session = builder.config("spark.eventLog.dir", events.as_uri()).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    sizes = {"containers": 1 if scenario in ("twins", "all") else 2, "threads": 2 if local else None}
    backups = int(scenario == "adcamp")
    pond = mp.open(where / "pond", spark=session, hosting="spark", backups=backups, **sizes)
    watched = Watched(pond, where)
    told = SCENARIOS[scenario](session, watched)
    grants = [
        line
        for path in (where / "pond" / "grants").iterdir()
        for line in path.read_text().splitlines()
        if len(line) > 40
    ]
    pids = [info.pid for info in pond.containers()]
    pids += [line.arrived.pid for place in watched.hosting._places.values() for line in place.lines]
    if not local:
        session.stop()  # before the pond, which need not wait for anybody then
        started = time.monotonic()
        pond.close()
        told["close_s"] = time.monotonic() - started
    logs = [path.read_text() for path in events.rglob("*") if path.is_file()]
    told["logged"] = sum("millpond-container-0" in log for log in logs)
    told["secrets"] = sum(grant in log or "PRIVATE KEY" in log for grant in grants for log in logs)
    sys.stdout.write(f"{json.dumps({'pids': pids, **told})}\n")
    sys.stdout.flush()
    if local:
        time.sleep(600)  # until it is killed


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
