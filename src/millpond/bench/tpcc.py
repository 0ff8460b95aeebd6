"""`millpond bench tpcc`: New-Orders a second through Spark, beside PostgreSQL and SQLite on the same inputs.

The tables are loaded before, with the specification's numbers of items, customers and orders for each warehouse; events
come in its mix, in the order of their times. Nobody waits or thinks between them, so this is no tpmC.

- spark-identity: the stream with a function that adds a column and asks nobody.
- millpond: Parquet files by `readStream` through `foreachBatch(transactions.to(sink))` into Spark's noop sink; every
  micro-batch is durable before the sink gets its outcomes.
- postgresql: a session for each core, each with the events of its warehouses, a transaction for each event.
- postgresql-batched: one session in the order of times, pipelined, many events for each commit.
- sqlite: in memory, one process, a transaction for each event.

The peers take their events from memory, without Spark. They get the first `checked` events: Millpond's answers to these and
its tables after them must be SQLite's; so must those of PostgreSQL's one session. After the last event, all twelve consistency
conditions must hold of Millpond's tables; they must of PostgreSQL's with several sessions, whose order is open.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.table import Table

import millpond as mp
from millpond.apps import tpcc
from millpond.apps.spark_session import spark_session
from millpond.apps.tpcc_conditions import violations
from millpond.apps.tpcc_inputs import START_US, Scale, events, population
from millpond.bench import tpcc_peers, tpcc_postgres
from millpond.bench.frames import AddColumn, ddl_of, noop
from millpond.bench.report import plot_bars, wide_console
from millpond.bench.transactions_peers import find_postgres, postgres_server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILES = os.cpu_count() or 1
NEW_ORDER = "new_order"
# The results of each kind, in the order in which peers give them.
ANSWERS = {kind: ("reason", *function.result_names) for kind, function in tpcc.KINDS.items()}


class Work(NamedTuple):
    """How much is run."""

    scale: Scale
    checked: int  # events that all systems get
    batch: int
    warm_ups: int
    rounds: int
    per_commit: int = 100


FULL = Work(Scale(warehouses=4), checked=10_000, batch=400_000, warm_ups=1, rounds=3)
QUICK = Work(
    Scale(warehouses=2, items=10_000, customers=300), checked=5_000, batch=50_000, warm_ups=2, rounds=2
)


def run(quick: bool, progress: Callable[[str], None], work: Work | None = None) -> list[dict[str, Any]]:
    """The results of all systems. Raises where their answers or their tables differ."""
    work = work or (QUICK if quick else FULL)
    scale = work.scale
    progress(
        f"{scale.warehouses} warehouses, {scale.items:,} items, {10 * scale.customers:,} customers in each"
    )
    before = population(scale)
    happening = events(work.checked + work.batch * (work.warm_ups + work.rounds), scale)
    first = happening.slice(0, work.checked)
    postgres = find_postgres(progress)
    results: list[dict[str, Any]] = []

    def add(system: str, seconds: float, ran: pa.Table, note: str) -> None:
        orders = pc.sum(pc.equal(ran["kind"], NEW_ORDER)).as_py()
        results.append(
            {
                "system": system,
                "new_orders_per_s": orders / seconds,
                "events_per_s": len(ran) / seconds,
                "events": len(ran),
                "warehouses": scale.warehouses,
                "threads": os.cpu_count() or 1,
                "note": note,
            }
        )

    timed = happening.slice(work.checked + work.warm_ups * work.batch)
    with (
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        spark_session("millpond bench tpcc") as spark,
    ):
        _write(happening, work, Path(folder) / "events")
        stream = _Stream(spark, Path(folder), work)
        progress("spark-identity")
        add("spark-identity", stream.identity(), timed, "the same stream, asking nobody")
        progress("sqlite")
        sqlite = tpcc_peers.Sqlite(before)
        began = time.perf_counter()
        answers = sqlite.run(first)
        lite_seconds = time.perf_counter() - began
        wanted = {name: sqlite.table(name) for name in before}
        sqlite.close()
        progress("millpond: loading its tables")
        with mp.open(os.path.join(folder, "pond"), spark=spark) as pond:
            transactions = tpcc.open_tables(pond, before)
            progress("millpond")

            def compare(outputs: pa.Table) -> None:
                _same_answers("millpond", first, answers_in(outputs), answers)
                _same_tables("millpond", wanted, {name: pond.table(name).snapshot() for name in before})

            seconds = stream.millpond(transactions, compare)
            progress("checking its tables after all events")
            _consistent("millpond", {name: pond.table(name).snapshot() for name in before}, scale)
    add(
        "millpond",
        seconds,
        timed,
        f"durable; answers and tables equal to sqlite's after {work.checked:,} events, all conditions hold after"
        f" {len(happening):,}",
    )
    add(
        "sqlite",
        lite_seconds,
        first,
        "in memory, prepared statements, a transaction for each event, no Spark",
    )
    if postgres is not None:
        with postgres_server(postgres) as address:
            progress("postgresql-batched")
            server = tpcc_postgres.Postgres(address, before)
            began = time.perf_counter()
            batched_answers = server.run(first, work.per_commit)
            batched = time.perf_counter() - began
            _same_answers("postgresql-batched", first, batched_answers, answers)
            _same_tables("postgresql-batched", wanted, {name: server.table(name) for name in before})
            progress("postgresql")
            server = tpcc_postgres.Postgres(address, before)
            began = time.perf_counter()
            server.run_at_once(first, FILES)
            single = time.perf_counter() - began
            _consistent("postgresql", {name: server.table(name) for name in before}, scale)
        how = "stored functions, prepared, default settings, synchronous_commit on, no Spark"
        add("postgresql", single, first, f"{how}; {FILES} sessions, a transaction for each event")
        add(
            "postgresql-batched",
            batched,
            first,
            f"{how}; one session, pipelined, {work.per_commit} events for each commit; answers and tables equal to"
            " sqlite's",
        )
    ours = next(result["new_orders_per_s"] for result in results if result["system"] == "millpond")
    for result in results:
        result["millpond_is"] = ours / result["new_orders_per_s"]
    return results


class _Stream:
    """A batch of checked events, some to warm up, and those that are timed, as files that a stream reads."""

    def __init__(self, spark: SparkSession, folder: Path, work: Work) -> None:
        self._spark = spark
        self._folder = folder
        self._work = work

    def identity(self) -> float:
        def sink(frame: DataFrame, epoch: int) -> None:
            noop(frame.mapInArrow(AddColumn("seen", "ts"), f"{ddl_of(frame)}, seen timestamp"))

        return self._run("identity", sink)

    def millpond(self, transactions: Any, compare: Callable[[pa.Table], None]) -> float:
        """`compare` gets the outputs of the first batch."""

        def sink(frame: DataFrame, epoch: int) -> None:
            if epoch == 0:
                compare(frame.toArrow())
            else:
                noop(frame)

        return self._run("millpond", transactions.to(sink))

    def _run(self, name: str, function: Callable[[DataFrame, int], None]) -> float:
        """The seconds of the micro-batches that are timed, from their planning to their commit."""
        source = str(self._folder / "events")
        self._spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1000")
        query = (
            self._spark.readStream.schema(self._spark.read.parquet(source).schema)
            .option("maxFilesPerTrigger", FILES)
            .parquet(source)
            .writeStream.foreachBatch(function)
            .option("checkpointLocation", str(self._folder / f"checkpoint-{name}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        took: dict[int, int] = {
            p["batchId"]: p["durationMs"]["triggerExecution"] for p in query.recentProgress
        }
        first = 1 + self._work.warm_ups
        return sum(took[batch] for batch in range(first, first + self._work.rounds)) / 1000


def _write(happening: pa.Table, work: Work, folder: Path) -> None:
    """Of each batch, the rows in turns to its files, as in the partitions of a log. Files are read by age."""
    folder.mkdir()
    starts = [0, *range(work.checked, len(happening), work.batch)]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], len(happening)], strict=True)):
        batch = happening.slice(start, stop - start)
        for part in range(FILES):
            path = folder / f"{number:06d}-{part}.parquet"
            pq.write_table(batch.take(pa.array(np.arange(part, len(batch), FILES))), path)
            os.utime(path, (START_US // 10**6 + number,) * 2)


def answers_in(outputs: pa.Table) -> list[tuple[Any, ...]]:
    """Millpond's answers in the order of times, as peers give them."""
    names = dict.fromkeys(name for names in ANSWERS.values() for name in names)
    rows = outputs.sort_by("ts")
    columns = {name: rows[name].to_pylist() for name in names}
    return [
        tuple(columns[name][place] for name in ANSWERS[kind])
        for place, kind in enumerate(rows["kind"].to_pylist())
    ]


def _same_answers(
    system: str, first: pa.Table, answers: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]
) -> None:
    """Of one that was rolled back, only the reason counts."""
    if len(answers) != len(wanted):
        raise RuntimeError(f"{system} gives {len(answers):,} answers where sqlite gives {len(wanted):,}")
    for place, (answer, expected) in enumerate(zip(answers, wanted, strict=True)):
        if answer[: len(expected)] != expected:
            kind = first["kind"][place].as_py()
            names = ", ".join(ANSWERS[kind][: len(expected)])
            raise RuntimeError(f"event {place}, a {kind}: {system} gives other {names} than {expected}")


def _same_tables(system: str, wanted: Mapping[str, pa.Table], tables: Mapping[str, pa.Table]) -> None:
    for name, table in tables.items():
        if not tpcc.same_rows(table, wanted[name]):
            raise RuntimeError(f"table {name!r} of {system} differs from sqlite's")


def _consistent(system: str, tables: Mapping[str, pa.Table], scale: Scale) -> None:
    broken = {number: count for number, count in violations(tables, scale.delivered).items() if count}
    if broken:
        raise RuntimeError(f"the tables of {system} break consistency conditions: {broken}")


def print_table(name: str, results: list[dict[str, Any]]) -> None:
    """A line for each system."""
    table = Table(title=f"millpond bench {name}", title_justify="left")
    table.add_column("system", no_wrap=True)
    for heading in ("New-Orders/s", "events/s", "millpond is\nx times as fast"):
        table.add_column(heading, justify="right")
    table.add_column("what ran")
    for result in results:
        rates = [f"{result['new_orders_per_s']:,.0f}", f"{result['events_per_s']:,.0f}"]
        table.add_row(result["system"], *rates, f"{result['millpond_is']:,.2f}", result["note"])
    wide_console().print(table)


def plot(path_base: Path, name: str, results: list[dict[str, Any]]) -> list[Path]:
    """New-Orders per second of each system as bars; nothing without matplotlib."""
    return plot_bars(path_base, name, results, "new_orders_per_s", "New-Orders per second")
