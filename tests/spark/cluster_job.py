"""A driver whose pond has its containers on a cluster, by TLS, `python cluster_job.py WHERE`: it loses a machine, and tells
what is right after that, and where a secret shows.

It searches all places twice: after all kinds of work, and again once it has told the token in each of them on purpose.
What was found is a line of JSON. What it logs must go to a file, which it reads.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark.serializers
from cluster import JAVA_OPTIONS, use_home
from hosting_checks import is_gone, wait_until
from hosting_job import Watched
from pyspark.sql import SparkSession

import millpond as mp
from millpond.coordinator.passes import Passes
from millpond.errors import NoTaskSlots
from millpond.wire.authority import Authority, Bundle
from millpond.wire.handshake import bearer

# Off loopback, so that the pond is reached by TLS.
HOST = "127.0.0.2"
KEPT_IN = {"token", "token.read", "tasks.json", "client.pem", "client.read.pem", "grants"}
SETTINGS = {
    "spark.driver.host": HOST,
    "spark.driver.bindAddress": HOST,
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.task.maxFailures": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.default.parallelism": "1",
    "spark.sql.shuffle.partitions": "1",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.compress": "false",
    "spark.broadcast.UDFCompressionThreshold": "1b",  # every function travels by a broadcast, in a file
}
# All that Spark says, to a file.
LOG4J = """
appender.file.type = File
appender.file.name = file
appender.file.fileName = {path}
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %p %c %m%n%ex
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""
pickled: list[bytes] = []
issued: list[Bundle] = []


def record_all() -> None:
    """Every pickle that Spark makes of a function, and every key; containers listen by TLS, as on other machines."""
    dumps = pyspark.serializers.CloudPickleSerializer.dumps
    issue, container = Authority.issue, Passes.container

    def recorded_dumps(self: Any, thing: Any) -> bytes:
        pickled.append(dumps(self, thing))
        return pickled[-1]

    def recorded_issue(self: Any, *args: Any, **options: Any) -> Bundle:
        issued.append(issue(self, *args, **options))
        return issued[-1]

    replaced: list[tuple[Any, str, Any]] = [
        (pyspark.serializers.CloudPickleSerializer, "dumps", recorded_dumps),
        (Authority, "issue", recorded_issue),
        (Passes, "container", lambda self, number, term, host: container(self, number, term, "127.0.0.1")),
    ]
    for owner, name, value in replaced:
        setattr(owner, name, value)


def secrets_of(pond: mp.Pond, root: Path) -> dict[str, bytes]:
    owner: Any = pond._owner
    keyring = owner._passes.keyring
    task = json.loads((root / "tasks.json").read_text())["token"]
    texts = {
        "any key": "PRIVATE KEY",
        "coordinator": keyring.coordinator.split()[-1],
        "container": keyring.container.split()[-1],
        "tasks": base64.b64encode(keyring.tasks).decode(),
        **{
            f"grant {path.name}, line {number}": line
            for path in (root / "grants").iterdir()
            for number, line in enumerate(path.read_text().splitlines())
            if len(line) > 40
        },
        **{f"key {number}": bundle.key.splitlines()[1] for number, bundle in enumerate(issued)},
    }
    for name, token in (
        ("token", (root / "token").read_text().strip()),
        ("reader", (root / "token.read").read_text().strip()),
        ("task", task),
    ):
        texts |= {name: token, f"bearer of {name}": bearer(token).split()[-1]}
    return {"tasks, raw": keyring.tasks, **{name: text.encode() for name, text in texts.items()}}


def family() -> Iterator[int]:
    """The processes that descend from this one, and this one."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for pid in parents:
        above = pid
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        if above:
            yield pid


def files(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if not KEPT_IN.intersection(path.relative_to(folder).parts):
            with suppress(OSError):  # a directory, or one that has just gone
                yield path.read_bytes()


def contents(where: Path) -> Iterator[tuple[str, bytes]]:
    """Everything that somebody else may read, by its place."""
    for pid in family():
        for name, place in (("cmdline", "arguments"), ("environ", "environment")):
            try:
                yield place, Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
    for each in pickled:
        yield "pickles", each
    for folder in ("events", "local", "pond", "spark-home/work"):
        for text in files(where / folder):
            yield folder, text
    yield "spark log", (where / "spark.log").read_bytes()
    yield "log", Path("/proc/self/fd/2").read_bytes()


def found(where: Path, secrets: dict[str, bytes]) -> dict[str, list[str]]:
    seen: dict[str, set[str]] = {}
    for place, text in contents(where):
        seen.setdefault(place, set()).update(name for name, secret in secrets.items() if secret in text)
    return {place: sorted(names) for place, names in seen.items()}


def lose_a_machine(pond: mp.Pond, root: Path) -> dict[str, Any]:
    """The Java machine of an executor is killed, and its container with it; another one takes its place."""
    watched = Watched(pond, root)
    state = pond.state("more", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")

    def epoch(number: int) -> pa.Table:
        return pa.table({"k": range(64), "t": [number] * 64, "v": range(number, number + 64)})

    feed(epoch(0), 0)
    lost = watched.executor(0)
    told = watched.back_after(lambda: os.kill(lost, signal.SIGKILL))
    for number in (0, 1):  # what comes again counts once
        feed(epoch(number), number)
    state.finish("feed")
    answers = state.fetch(key="k", at="t", into="w").now(pa.concat_tables([epoch(0), epoch(1)]))
    told["right"] = answers["w"].to_pylist() == [*range(64), *range(1, 65)]
    told["kept"] = sorted(pond.state("counts").snapshot()["value"].to_pylist()) == [40, 50]
    told["elsewhere"] = watched.executor(0) != lost
    return told


def refused(pond: mp.Pond) -> list[int]:
    """More containers than leave slots for queries."""
    try:
        pond.scale(containers=4, threads=3)
    except NoTaskSlots as error:
        threads = {int(own["threads"]) for own in pond.metrics()["containers"].values()}
        return [error.slots, error.taken, error.left, max(threads)]
    return []


def work(spark: SparkSession, pond: mp.Pond) -> list[Any]:
    """Functions of all kinds go to tasks."""
    state = pond.state("counts", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    frame = spark.createDataFrame([(1, 4, 40), (2, 5, 50)], "k long, t long, v long")
    feed(frame, 0)
    rows: list[Any] = []
    asking = state.fetch(key="k", at="t", into="w", name="ask").to(lambda f, _: rows.extend(f.collect()))
    asking(frame, 0)
    state.finish("feed")
    asking.drain()  # the row that waited
    source = spark.read.format("millpond").option("state", "counts").load()
    return sorted((row.k, row.w) for row in rows) + sorted(map(tuple, source.collect()))


def tell(spark: SparkSession, where: Path, token: str) -> subprocess.Popen[bytes]:
    """In every place, once."""
    context = spark.sparkContext
    context.setJobDescription(f"token {token}")
    context.parallelize([0], 1).map(lambda _: len(token)).count()
    context.broadcast(token)
    context._jvm.org.apache.logging.log4j.LogManager.getLogger("told").info(f"token {token}")
    logging.getLogger("millpond").debug("token %s", token)
    (where / "pond" / "told").write_text(token)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()", token], env={"TOKEN": token}, stdin=subprocess.PIPE
    )
    wait_until(lambda: token.encode() in Path(f"/proc/{child.pid}/cmdline").read_bytes(), 5)
    return child


def main(where: Path) -> None:
    record_all()
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("py4j").setLevel(
        logging.INFO
    )  # it repeats all that goes to Java: `pickles`, and settings
    for folder in ("events", "local"):
        (where / folder).mkdir(parents=True)
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    use_home(where)
    builder = SparkSession.builder.master("local-cluster[2,2,1024]").appName("cluster")
    log4j = where / "log4j2.properties"
    log4j.write_text(LOG4J.format(path=where / "spark.log"))
    folders = {
        "spark.eventLog.dir": (where / "events").as_uri(),
        "spark.local.dir": str(where / "local"),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()}",
    }
    for key, value in {**SETTINGS, **folders}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    root = where / "pond"
    with mp.open(root, spark=spark, hosting="spark", containers=2, threads=1) as pond:
        addresses = [container.address for container in pond.containers()]
        slots = pond.metrics()["task_slots"]
        scaled = refused(pond)
        answers = work(spark, pond)
        pids, secrets = [container.pid for container in pond.containers()], secrets_of(pond, root)
        lost = lose_a_machine(pond, root)
        pids += [container.pid for container in pond.containers()]
        secrets |= secrets_of(pond, root)
        wait_until(lambda: b"millpond-container-0" in b"".join(files(where / "events")), 10)
        clean = found(where, secrets)
        child = tell(spark, where, secrets["token"].decode())
        token = secrets["token"]
        wait_until(lambda: token in b"".join(files(where / "events")), 10)
        told = found(where, secrets)
        child.kill()
        child.wait()
    left = sum(not is_gone(pid) for pid in pids)
    jobs = len(spark.sparkContext.statusTracker().getActiveJobsIds())
    spark.stop()
    line = {
        "answers": answers,
        "addresses": addresses,
        "slots": slots,
        "refused": scaled,
        "lost": lost,
        "left": left,
        "jobs": jobs,
        "secrets": sorted(secrets),
        "clean": clean,
        "told": told,
    }
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
