"""How the transaction applications are shown: a stream of events through Spark, then every outcome checked.

The check runs the same functions as what they are, plain Python, one event after the other in the order of time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.code.tables import TableSpec
from millpond.errors import Aborted, BadOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from millpond.ops.transactions import Transactions

SECONDS, RATE, KEYS = 10, 30_000, 10_000
EVENTS_MAX = 20_000_000
EVENTS = "events"  # the folder of their files
PARTS = 4


class Application(NamedTuple):
    """What a transaction application is made of."""

    name: str
    tables: Mapping[str, TableSpec]
    kinds: Mapping[str, Any]
    events: Callable[..., pa.Table]


def show(app: Application, seconds: int, rate: int, keys: int) -> bool:
    """`seconds` epochs of `rate` events each; True if all outcomes and all tables are right."""
    check_events(seconds, rate)
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    events = app.events(seconds * rate, keys=keys)
    with tempfile.TemporaryDirectory(prefix=f"millpond-{app.name}-") as folder:
        write_epochs(events, folder, rate)
        out.print("starting Spark and a pond (the first time, transactions are compiled) ...")
        with spark_session(app.name) as spark, mp.open(os.path.join(folder, "pond"), spark=spark) as pond:
            tables = [
                pond.table(name, key=spec.key, value=spec.value, default=spec.default)
                for name, spec in app.tables.items()
            ]
            op = pond.transactions(app.name, tables, app.kinds, kind="kind", at="ts")
            answers = run_stream(spark, pond, op, "tables", folder, rate, out)
            snapshots = {table.name: table.snapshot() for table in tables}
        out.print("running every event again, as plain Python ...")
        outcomes, rows = serially(app, events)
        wrong = differing(outcomes, answers)
        wrong_tables = sum(table.to_pylist() != rows[name] for name, table in snapshots.items())
    out.print(
        f"{len(events):,} transactions, [bold]{wrong} wrong[/bold]; {len(snapshots)} tables,"
        f" {wrong_tables} wrong ({time.perf_counter() - began:.0f} s)"
    )
    return wrong == 0 and wrong_tables == 0


def run_stream(
    spark: SparkSession,
    pond: mp.Pond,
    operator: Transactions,
    group: str,
    folder: str,
    rate: int,
    out: Console,
) -> pa.Table:
    """Has the operator run the events that `write_epochs` left in the folder, as a stream. All its outputs."""
    out.print(operator.explain(), markup=False)
    events, answers = os.path.join(folder, EVENTS), os.path.join(folder, "answers")
    before = pond.metrics()["groups"][group]
    clock = [time.perf_counter()]

    def keep(frame: DataFrame, epoch: int) -> None:
        frame.write.mode("overwrite").parquet(os.path.join(answers, f"{epoch:06d}"))
        figures = pond.metrics()["groups"][group]
        per_s = rate / (time.perf_counter() - clock.pop())
        clock.append(time.perf_counter())
        committed, aborted = (figures[name] - before[name] for name in ("committed", "aborted"))
        out.print(
            f"epoch {epoch:3}: {committed:,} committed, {aborted:,} aborted,"
            f" plan {figures['last']['plan']}, {per_s:,.0f} events/s"
        )

    query = (
        spark.readStream.schema(spark.read.parquet(events).schema)
        .option("maxFilesPerTrigger", PARTS)
        .parquet(events)
        .writeStream.foreachBatch(operator.to(keep))
        .option("checkpointLocation", os.path.join(folder, "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return pq.read_table(answers)


def check_events(seconds: int, rate: int) -> None:
    if not 1 <= seconds * rate <= EVENTS_MAX:
        raise BadOption(f"{seconds} epochs of {rate:,} events are too many", option="--rate")


def write_epochs(events: pa.Table, folder: str, rate: int) -> None:
    """`PARTS` files for each epoch, its events in any order. Spark reads files in the order of their age."""
    folder = os.path.join(folder, EVENTS)
    os.makedirs(folder)
    rng = np.random.default_rng(1)
    for start in range(0, len(events), rate):
        epoch = events.slice(start, rate)
        epoch = epoch.take(pa.array(rng.permutation(len(epoch))))
        size = -(-len(epoch) // PARTS)
        for part in range(PARTS):
            path = os.path.join(folder, f"{start:012d}-{part}.parquet")
            pq.write_table(epoch.slice(part * size, size), path)
            age = 1_700_000_000 + start
            os.utime(path, (age, age))


class _Row:
    """Columns as attributes; `written` holds those that the transaction has set."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(before=values, written={})

    def __getattr__(self, column: str) -> Any:
        return self.written[column] if column in self.written else self.before[column]

    def __setattr__(self, column: str, value: Any) -> None:
        self.written[column] = value


class _Table:
    """A table as plain Python has it: rows by key, made of the defaults."""

    def __init__(self, spec: TableSpec) -> None:
        self.rows: dict[Any, dict[str, Any]] = {}
        self._touched: dict[Any, _Row] = {}
        self._default = dict(spec.default or {})

    def __getitem__(self, key: Any) -> _Row:
        if key not in self._touched:
            self._touched[key] = _Row(self.rows.get(key, self._default))
        return self._touched[key]

    def end(self, keep: bool) -> None:
        for key, row in self._touched.items():
            if keep and row.written:
                self.rows[key] = row.before | row.written
        self._touched.clear()


def serially(app: Application, events: pa.Table) -> tuple[dict[int, Any], dict[str, list[dict[str, Any]]]]:
    """Every event's outcome by its time, and the tables at the end."""
    tables = {name: _Table(spec) for name, spec in app.tables.items()}
    outcomes: dict[int, Any] = {}
    takes = {kind: function.plain.__code__.co_varnames for kind, function in app.kinds.items()}
    takes = {kind: names[: app.kinds[kind].plain.__code__.co_argcount] for kind, names in takes.items()}
    for event in events.sort_by("ts").to_pylist():
        function = app.kinds[event["kind"]]
        try:
            result = function(*(tables.get(name, event.get(name)) for name in takes[event["kind"]]))
            outcomes[event["ts"]] = (True, None, result)
        except Aborted as error:
            outcomes[event["ts"]] = (False, error.attributes()["reason"], None)
        for table in tables.values():
            table.end(outcomes[event["ts"]][0])
    rows = {
        name: [{app.tables[name].keys.names[0]: key, **row} for key, row in sorted(table.rows.items())]
        for name, table in tables.items()
    }
    return outcomes, rows


def differing(outcomes: dict[int, Any], answers: pa.Table) -> int:
    """How many events have another outcome, or none, or several."""
    wrong = abs(len(answers) - len(outcomes))
    names = answers.column_names[answers.column_names.index("reason") + 1 :]
    for answer in answers.to_pylist():
        committed, reason, result = outcomes.pop(answer["ts"], (None, None, None))
        given = tuple(answer[name] for name in names)
        wanted = result if isinstance(result, tuple) else (result,) if names else ()
        wanted = (None,) * len(names) if result is None else wanted
        wrong += (answer["committed"], answer["reason"], given) != (committed, reason, wanted)
    return wrong
