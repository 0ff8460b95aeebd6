"""Transactions through Spark: a pond beside Redis, PostgreSQL, SQLite, and asking nobody.

The same events for all, in Parquet files, through the system into Spark's noop sink, all columns of the events with their
outcomes. The rows of a batch lie in turns in as many files as there are cores, as in the partitions of a log. What a
system gets fewer of, its result says.

- spark-identity: a stream by `readStream` through `foreachBatch`, with a checkpoint, whose function adds a column and asks
  nobody, as fast as Spark moves events through Python.
- millpond: the same stream through `pond.transactions(...).to(sink)`, durable before the sink gets the outcomes. The two
  take turns, some micro-batches each. What counts is Spark's own `triggerExecution`, the median of all micro-batches.
- redis, postgresql, postgresql-1000, sqlite: see `transactions_peers`; each within `mapInArrow` over static frames, so that
  nothing of a stream's own cost is theirs; the best of three batches.

Millpond's outcomes of the first batch and its tables after the last are compared with serial execution in time order; so
are those of the peers, on the events that they get before those that are timed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.table import Table

import millpond as mp
from millpond.apps import bidding, ledger
from millpond.apps.spark_session import spark_session
from millpond.bench import transactions_peers as peers
from millpond.bench.adcamp import timed
from millpond.bench.adcamp_peers import find_redis, redis_server
from millpond.bench.cpu import cpu_seconds
from millpond.bench.frames import AddColumn, ddl_of, noop
from millpond.bench.report import save_figure, wide_console
from millpond.stores.tables import TableStore
from millpond.txn import TransactionSet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

APPS: dict[str, ModuleType] = {"ledger": ledger, "bidding": bidding}
KEYS = 10_000
WARM_UPS = 3  # Spark compiles its own code over the first runs
ROUNDS = 3
STREAM_ROUNDS = (WARM_UPS, 3, 3, 3)  # micro-batches of each system; the first do not count
FILES = os.cpu_count() or 1


class Work(NamedTuple):
    """How many events a batch has; peers get smaller batches, so that the run ends."""

    batch: int = 1_000_000
    redis: int = 60_000
    postgres: int = 6_000
    postgres_1000: int = 30_000
    sqlite: int = 100_000
    checked: int = 5_000  # by each peer


FULL = Work()
QUICK = Work(batch=100_000, redis=20_000, postgres=2_000, postgres_1000=10_000, sqlite=30_000, checked=2_000)


def run_spark(quick: bool, progress: Callable[[str], None], work: Work | None = None) -> list[dict[str, Any]]:
    """The results of both applications by all systems. Raises where an outcome differs from serial execution's."""
    work = work or (QUICK if quick else FULL)
    results = []
    with (
        spark_session("millpond bench transactions") as spark,
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
        ExitStack() as servers,
    ):
        redis_path, postgres_path = find_redis(progress), peers.find_postgres(progress)
        port = None if redis_path is None else servers.enter_context(redis_server(redis_path))
        address = (
            None if postgres_path is None else servers.enter_context(peers.postgres_server(postgres_path))
        )
        for name in APPS:
            progress(f"{name} through Spark: batches of {work.batch:,} events")
            bench = _Bench(spark, name, work, Path(folder) / name, progress)
            bench.whole(pond)
            bench.sqlite()
            if port is not None:
                bench.redis(port)
            if address is not None:
                bench.postgres(address)
            results += bench.results()
    return results


class _Bench:
    """One application."""

    def __init__(
        self, spark: SparkSession, name: str, work: Work, folder: Path, progress: Callable[[str], None]
    ) -> None:
        self._spark = spark
        self._name = name
        self._work = work
        self._folder = folder
        self._progress = progress
        self._app = APPS[name]
        self._program: TransactionSet = TransactionSet(self._app.KINDS, self._app.TABLES)
        self._rates: dict[str, float] = {}
        self._cpu_rates: dict[str, float] = {}
        self._facts: dict[str, dict[str, Any]] = {}

    def whole(self, pond: mp.Pond) -> None:
        """The two systems that take all events, as streams, in turns."""
        events = self._app.events(self._work.batch * sum(STREAM_ROUNDS), keys=KEYS)
        batches = self._batches("whole", events, self._work.batch)
        del events
        for name, spec in self._app.TABLES.items():
            pond.table(name, spec.key, spec.value, spec.default, group=self._name)
        transactions = pond.transactions(self._name, list(self._app.TABLES), self._app.KINDS, kind="kind")
        answered: list[pa.Table] = []

        def sink(frame: DataFrame, epoch: int) -> None:
            if epoch:
                noop(frame)
            else:
                answered.append(frame.toArrow())

        def identity(frame: DataFrame, epoch: int) -> None:
            noop(frame.mapInArrow(AddColumn("seen", "ts"), f"{ddl_of(frame)}, seen long"))

        streams = [("spark-identity", identity), ("millpond", transactions.to(sink))]
        ms: dict[str, list[int]] = {system: [] for system, _ in streams}
        cpu_s: dict[str, float] = dict.fromkeys(ms, 0.0)
        first = 0
        for number, count in enumerate(STREAM_ROUNDS):
            self._progress(f"  round {number} of {len(STREAM_ROUNDS) - 1}" if number else "  warming up")
            for system, function in streams if number % 2 else streams[::-1]:
                before_s = cpu_seconds()
                durations = self._stream(system, batches[first : first + count], function)
                if number:
                    ms[system] += durations
                    cpu_s[system] += cpu_seconds() - before_s
            first += count
        for system, durations in ms.items():
            self._rates[system] = self._work.batch / float(np.median(durations)) * 1e3
            if cpu_s[system] > 0:
                self._cpu_rates[system] = self._work.batch * len(durations) / cpu_s[system]
        self._progress("  comparing with serial execution")
        stores = self._program.stores()
        for turn, batch in enumerate(batches):
            wanted = self._serial(_in_time_order(batch), stores)
            if turn == 0:
                outcomes = answered[0].sort_by("ts").select(wanted.column_names)
                _compare("the outcomes of millpond", outcomes, wanted)
        for name, store in stores.items():
            wanted = store.snapshot()
            rows = pond.table(name).snapshot().rename_columns(wanted.column_names)
            _compare(f"millpond's table {name!r}", rows, wanted)
        count = self._work.batch * len(batches)
        self._facts["spark-identity"] = {"note": "the same stream, asking nobody"}
        self._facts["millpond"] = {
            "note": f"durable; tables equal to those of serial execution after {count:,} events"
        }

    def _stream(
        self, system: str, batches: Sequence[Path], function: Callable[[DataFrame, int], Any]
    ) -> list[int]:
        """One micro-batch for each batch, from where the stream stopped; how many milliseconds each took."""
        source = self._folder / f"source-{system}"
        source.mkdir(exist_ok=True)
        for batch in batches:
            for file in sorted(batch.iterdir()):
                stamp = 1 + int(batch.name) + int(file.stem)  # the source takes the oldest first
                os.utime(file, (stamp, stamp))
                os.link(file, source / f"{batch.name}-{file.name}")
        query = (
            self._spark.readStream.schema(self._frame(batches[0]).schema)
            .option("maxFilesPerTrigger", FILES)
            .parquet(str(source))
            .writeStream.foreachBatch(function)
            .option("checkpointLocation", str(self._folder / f"checkpoint-{system}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        durations = [epoch["durationMs"] for epoch in query.recentProgress]
        ms = [each["triggerExecution"] for each in durations if "addBatch" in each]
        if len(ms) != len(batches):
            raise RuntimeError(f"{len(ms)} micro-batches of {system} where there were {len(batches)}")
        return ms

    def sqlite(self) -> None:
        task = peers.SqliteTask(self._name, KEYS)
        database = task.database()
        self._peer(
            "sqlite",
            self._work.sqlite,
            task,
            partial(_only, partial(task.run, database)),
            lambda: task.tables(database),
            "in memory, prepared statements, a transaction for each event; in one task, as processes share none",
            tasks=1,
        )

    def redis(self, port: int) -> None:
        task = peers.RedisTask(self._name, port)
        task.load(KEYS)
        self._peer(
            "redis",
            self._work.redis,
            task,
            partial(_only, task),
            task.tables,
            "a Lua script for each event, EVALSHA pipelined from the same workers, nothing durable",
        )

    def postgres(self, address: str) -> None:
        """By one session where many events are a transaction: two would wait for each other's rows for ever."""
        for system, per_commit, events, tasks, how in (
            ("postgresql", 1, self._work.postgres, FILES, "a transaction for each event"),
            (
                "postgresql-1000",
                1_000,
                self._work.postgres_1000,
                1,
                "one session, 1,000 events for each commit",
            ),
        ):
            task = peers.PostgresTask(self._name, address, per_commit)
            task.load(KEYS)
            self._peer(
                system,
                events,
                task,
                partial(_only, task),
                task.tables,
                f"a stored function, {how}, pipelined; default settings, synchronous_commit on",
                tasks=tasks,
            )

    def _peer(
        self,
        system: str,
        count: int,
        task: peers.Peer,
        ask: Callable[[pa.RecordBatch], pa.RecordBatch],
        tables: Callable[[], peers.Rows],
        note: str,
        tasks: int = FILES,
    ) -> None:
        """Compares its outcomes for the first events, then times those after them."""
        self._progress(f"  {system}")
        checked = self._work.checked
        events = self._app.events(checked + count * (1 + ROUNDS), keys=KEYS)
        (first,) = events.slice(0, checked).combine_chunks().to_batches()
        stores = self._program.stores()
        wanted = self._serial(events.slice(0, checked), stores)
        found = pa.Table.from_batches([ask(first)]).select(wanted.column_names)
        _compare(f"the outcomes of {system}", found, wanted)
        rows = tables()
        for name, store in stores.items():
            keys, *columns = (column.to_pylist() for column in store.snapshot().columns)
            written = dict(zip(keys, zip(*columns, strict=True), strict=True))
            if any(rows[name][key] != row for key, row in written.items()):
                raise RuntimeError(f"table {name!r} of {system} differs from that of serial execution")
        results = "".join(f", {name} long" for name in peers.APPS[self._name].results)
        for turn, batch in enumerate(self._batches(system, events.slice(checked), count)):
            frame = self._frame(batch)
            if tasks == 1:
                frame = frame.coalesce(1)
            ran = frame.mapInArrow(task, f"{ddl_of(frame)}, committed boolean, reason string{results}")
            self._time(system, count, partial(noop, ran), counts=turn > 0)
        self._facts[system] = {
            "events": count,
            "note": f"{note}; {checked:,} outcomes equal to those of serial execution",
        }

    def results(self) -> list[dict[str, Any]]:
        found = []
        for system in ("spark-identity", "millpond", "redis", "postgresql", "postgresql-1000", "sqlite"):
            if system not in self._rates:
                continue
            result: dict[str, Any] = {
                "app": self._name,
                "system": system,
                "through": "spark",
                "events_per_s": self._rates[system],
                "of_identity": self._rates[system] / self._rates["spark-identity"],
                "events": self._work.batch,
                "keys": KEYS,
                "threads": os.cpu_count() or 1,
            }
            if system in ("spark-identity", "millpond") and system in self._cpu_rates:
                result["events_per_cpu_s"] = self._cpu_rates[system]
                result["of_identity_per_cpu_s"] = self._cpu_rates[system] / self._cpu_rates["spark-identity"]
            found.append({**result, **self._facts[system]})
        return found

    def _batches(self, system: str, events: pa.Table, count: int) -> list[Path]:
        """Writes the events, `count` in a batch; of each batch the rows in turns to its files."""
        found = []
        for start in range(0, len(events), count):
            batch = events.slice(start, count)
            folder = self._folder / system / f"{start:012d}"
            folder.mkdir(parents=True)
            for part in range(FILES):
                rows = pa.array(range(part, len(batch), FILES), pa.int64())
                pq.write_table(batch.take(rows), folder / f"{part}.parquet", row_group_size=count)
            found.append(folder)
        return found

    def _frame(self, batch: Path) -> DataFrame:
        return self._spark.read.parquet(str(batch))

    def _serial(self, events: pa.Table, stores: dict[str, TableStore]) -> pa.Table:
        outcome = self._program.run(events, stores, kind="kind", at="ts", plan="serial")
        return outcome.outputs.drop_columns(["event"])

    def _time(self, system: str, events: int, work: Callable[[], object], counts: bool) -> None:
        seconds = timed(work)
        if counts:
            self._rates[system] = max(self._rates.get(system, 0.0), events / seconds)


def _only(task: peers.Peer, batch: pa.RecordBatch) -> pa.RecordBatch:
    (answer,) = task(iter([batch]))
    return answer


def _in_time_order(batch: Path) -> pa.Table:
    return pq.read_table(batch).sort_by("ts")


def _compare(what: str, found: pa.Table, wanted: pa.Table) -> None:
    if len(found) != len(wanted):
        raise RuntimeError(f"{what} have {len(found):,} rows where serial execution gives {len(wanted):,}")
    for name in wanted.column_names:
        if found[name] != wanted[name]:
            same = pc.fill_null(pc.equal(found[name], wanted[name]), False)
            neither = pc.and_(found[name].is_null(), wanted[name].is_null())
            differing = len(found) - pc.sum(pc.or_(same, neither)).as_py()
            raise RuntimeError(f"{what} differ from serial execution's in {differing:,} rows of {name!r}")


def print_table(name: str, results: list[dict[str, Any]]) -> None:
    """A line for each application and system."""
    table = Table(title=f"millpond bench {name}, through Spark", title_justify="left")
    for heading in ("app", "system"):
        table.add_column(heading, no_wrap=True)
    for heading in ("events/s", "identity\n= 1", "millpond is\nx times as fast"):
        table.add_column(heading, justify="right")
    table.add_column("what ran")
    ours = {result["app"]: result["events_per_s"] for result in results if result["system"] == "millpond"}
    for place, result in enumerate(results):
        if place and result["app"] != results[place - 1]["app"]:
            table.add_section()
        rate = result["events_per_s"]
        cells = [f"{rate:,.0f}", f"{result['of_identity']:.3f}", f"{ours[result['app']] / rate:,.2f}"]
        table.add_row(result["app"], result["system"], *cells, result["note"])
    wide_console().print(table)


def plot(path_base: Path, name: str, results: list[dict[str, Any]]) -> list[Path]:
    """Events per second of each system, an application beside the other; nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    apps = list(dict.fromkeys(result["app"] for result in results))
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, app in zip(figure.subplots(1, len(apps), squeeze=False)[0], apps, strict=True):
        rate = {result["system"]: result["events_per_s"] for result in results if result["app"] == app}
        colours = ["#2a6f97" if system == "millpond" else "#9aa5ac" for system in rate]
        bars = axes.barh(list(rate), list(rate.values()), color=colours)
        axes.bar_label(bars, labels=[f"{number:,.0f}" for number in rate.values()], padding=4)
        axes.invert_yaxis()
        # Systems differ by factors of a hundred and more.
        axes.set_xscale("log")
        axes.set_xlim(min(rate.values()) / 3, max(rate.values()) * 10)
        axes.set_xlabel("events per second through Spark")
        axes.set_title(app, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"millpond bench {name}")
    return save_figure(figure, path_base)
