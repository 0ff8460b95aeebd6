"""Transactions on Spark DataFrames: what is in the tables and in the sink is what a serial model gives."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import TaskContext
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from test_exactly_once import run_job
from transactions_job import DEATHS, SCHEMA, START, operator_of

import millpond as mp
from millpond.errors import EpochChanged, LateRows, UnknownKind, WrongColumn

JOB = Path(__file__).with_name("transactions_job.py")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DAY = datetime(2026, 3, 1, tzinfo=UTC)
NAMES = ["", "a", "b", "ü", "long " * 20]
Event = tuple[datetime, int, str, str, int, list[int]]
COLUMNS = ["ts", "seq", "src", "dst", "amount", "parts"]


def events_of(epoch: int, count: int = 60) -> list[Event]:
    """Out of order, some before the epoch: those are late once the one before it has run."""
    chance = random.Random(epoch)
    seqs = chance.sample(range(count), count)
    return [
        (
            DAY + timedelta(seconds=60 * epoch + chance.randrange(-10, 60), microseconds=chance.randrange(3)),
            seq,
            chance.choice(NAMES),
            chance.choice(NAMES),
            chance.randrange(1, 80),
            [chance.randrange(9) for _ in range(chance.randrange(3))],
        )
        for seq in seqs
    ]


class Ledger:
    """The serial model, over dicts."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.mark: datetime | None = None
        self.late = 0

    def run(self, events: Sequence[Event]) -> list[dict[str, Any]]:
        timely = [event for event in events if self.mark is None or event[0] >= self.mark]
        self.late += len(events) - len(timely)
        self.mark = max([event[0] for event in timely], default=self.mark)
        out = [
            dict(zip(COLUMNS, event, strict=True))
            | {"committed": False, "reason": "late", "left": None, "at": None}
            for event in events
            if event not in timely
        ]
        for event in sorted(timely, key=lambda event: event[:2]):
            row = dict(zip(COLUMNS, event, strict=True))
            rows = {name: dict(found) for name, found in self.rows.items()}
            for name in (row["src"], row["dst"]):
                rows.setdefault(name, {"balance": START, "parts": 0.5, "seen": EPOCH})
            rows[row["src"]]["balance"] -= row["amount"]
            rows[row["dst"]]["balance"] += row["amount"]
            rows[row["dst"]]["parts"] += sum(row["parts"])
            rows[row["dst"]]["seen"] = row["ts"]
            poor = rows[row["src"]]["balance"] < 0
            row |= {"committed": not poor, "reason": "poor" if poor else None}
            row |= {"left": None if poor else rows[row["src"]]["balance"]}
            row |= {"at": None if poor else rows[row["src"]]["seen"]}
            out.append(row)
            self.rows = self.rows if poor else rows
        return out


def in_order(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["ts"], row["seq"]))


def with_zone(row: dict[str, Any]) -> dict[str, Any]:
    """Spark collects timestamps in the zone of this process, without saying so."""
    return {
        name: value.astimezone(UTC) if isinstance(value, datetime) else value for name, value in row.items()
    }


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    return in_order([with_zone(row.asDict()) for row in frame.collect()])


def held(pond: mp.Pond) -> dict[str, dict[str, Any]]:
    rows = [with_zone(row) for row in pond.table("accounts").snapshot().to_pylist()]
    return {row.pop("name"): row for row in rows}


def frame_of(spark: SparkSession, events: Sequence[Event], partitions: int = 3) -> DataFrame:
    return spark.createDataFrame(list(events), SCHEMA).repartition(partitions)


def test_epochs_from_any_partitions_in_any_order_give_what_serial_execution_gives(
    pond: mp.Pond, spark: SparkSession
) -> None:
    op, model = operator_of(pond), Ledger()
    sink: dict[int, Any] = {}

    def keep(outcomes: DataFrame, epoch: int) -> None:
        """Uses the frame twice; it must be the same both times."""
        sink[epoch] = collected(outcomes)
        assert outcomes.filter("committed").count() == sum(row["committed"] for row in sink[epoch])

    into = op.to(keep)
    for epoch in range(3):
        events = [] if epoch == 1 else events_of(epoch // 2)
        expected = in_order(model.run(events))
        into(frame_of(spark, events, partitions=epoch + 1), epoch)
        assert sink[epoch] == expected
        assert held(pond) == model.rows
    # Again, and cut otherwise.
    into(frame_of(spark, events_of(1)[::-1], partitions=5), 2)
    assert sink[2] == expected
    # And by a deployment with another choice for late events.
    operator_of(pond, late="drop").to(keep)(frame_of(spark, events_of(1), partitions=4), 2)
    assert sink[2] == expected
    assert held(pond) == model.rows
    assert op.progress().late == {"ledger": model.late}
    assert model.late > 0
    assert {row["reason"] for rows in sink.values() for row in rows} == {None, "poor", "late"}
    with pytest.raises(EpochChanged):
        into(frame_of(spark, events_of(1)[1:]), 2)
    read = spark.read.format("millpond").option("table", "accounts").load()
    found = {row.pop("name"): row for row in (with_zone(row.asDict()) for row in read.collect())}
    assert found == model.rows
    assert read.filter("balance > 50").count() == sum(row["balance"] > 50 for row in model.rows.values())
    assert dict(read.dtypes)["seen"] == "timestamp"


@mp.transaction(results="number int, left decimal(9,2)")
def order(counters, orders, shop, day, price):
    number = counters[shop].next
    counters[shop].next += 1
    orders[shop, number].day = day
    orders[shop, number].price += price
    return number, None if price < 1 else 10 - price


def test_keys_of_several_columns_dates_and_decimals(pond: mp.Pond, spark: SparkSession) -> None:
    counters = pond.table("counters", "shop string", "next int", {"next": 1}, group="shops")
    orders = pond.table("orders", "shop string, number int", "day date, price decimal(9,2)", group="shops")
    op = pond.transactions("shops", tables=[counters, orders], kinds={"order": order}, at="ts")
    events = spark.sql(
        """select id as ts, concat('s', id % 2) as shop, date_add(date'2024-02-28', int(id)) as day,
                  cast(id * 0.75 as decimal(5, 2)) as price from range(4)"""
    )
    sink: list[Any] = []
    op.to(lambda outcomes, _: sink.extend(outcomes.orderBy("ts").collect()))(events, 0)
    assert [(row["number"], row["left"]) for row in sink] == [
        (1, None), (1, None), (2, Decimal("8.50")), (2, Decimal("7.75"))
    ]  # fmt: skip
    read = spark.read.format("millpond").option("table", "orders").load()
    assert read.dtypes == [("shop", "string"), ("number", "int"), ("day", "date"), ("price", "decimal(9,2)")]
    assert [tuple(row) for row in read.filter("shop = 's0'").orderBy("number").collect()] == [
        ("s0", 1, date(2024, 2, 28), Decimal("0.00")),
        ("s0", 2, date(2024, 3, 1), Decimal("1.50")),
    ]


def test_a_task_that_fails_and_is_retried_counts_once(pond: mp.Pond, spark: SparkSession) -> None:
    """Also one that fails after its events were sent."""
    op, model = operator_of(pond), Ledger()

    def fails_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.attemptNumber() == 0 and context.partitionId() == 1:
            raise RuntimeError("the first attempt fails")

    events = events_of(0)
    frame = frame_of(spark, events).mapInArrow(fails_once, SCHEMA)
    assert collected(op(frame, 0)) == in_order(model.run(events))
    assert held(pond) == model.rows


def test_a_container_that_is_killed_while_tasks_run(pond: mp.Pond, spark: SparkSession) -> None:
    op, model = operator_of(pond), Ledger()
    home = pond.placement()[pond.table("accounts")._group.home]
    pids = {info.id: info.pid for info in pond.containers()}

    def kills(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 2:
            with suppress(ProcessLookupError):
                os.kill(pids[home], signal.SIGKILL)
        yield from batches

    events = events_of(0)
    outcomes = op(frame_of(spark, events).mapInArrow(kills, SCHEMA), 0)
    expected = in_order(model.run(events))
    assert collected(outcomes) == expected
    os.kill(next(info.pid for info in pond.containers() if info.id == home), signal.SIGKILL)
    # What is lazy reads from the container that came back.
    assert collected(outcomes) == expected
    assert held(pond) == model.rows


def test_bad_events_change_nothing(pond: mp.Pond, spark: SparkSession) -> None:
    op, model = operator_of(pond, late="error"), Ledger()
    op(frame_of(spark, events_of(0)), 0)
    model.run(events_of(0))
    with pytest.raises(LateRows):
        op(frame_of(spark, events_of(0)), 1)
    with pytest.raises(WrongColumn):
        op(frame_of(spark, events_of(9)).drop("amount"), 1)
    with pytest.raises(UnknownKind):
        op(frame_of(spark, events_of(9)).selectExpr("*", "'steal' as type"), 1)
    assert held(pond) == model.rows
    events = [event for event in events_of(1) if model.mark is not None and event[0] >= model.mark]
    assert collected(op(frame_of(spark, events), 1)) == in_order(model.run(events))
    with pytest.raises(AnalysisException, match="there is no table 'nothing'"):
        spark.read.format("millpond").option("table", "nothing").load()


def write_events(directory: Path, epochs: int) -> None:
    """A file for each epoch of a stream."""
    directory.mkdir()
    for number in range(epochs):
        listed = [dict(zip(COLUMNS, event, strict=True)) for event in events_of(number)]
        schema = pa.schema(
            [
                ("ts", pa.timestamp("us", "UTC")), ("seq", pa.int64()), ("src", pa.string()), ("dst", pa.string()),
                ("amount", pa.int64()), ("parts", pa.list_(pa.int64())),
            ]
        )  # fmt: skip
        path = directory / f"{number}.parquet"
        pq.write_table(pa.Table.from_pylist(listed, schema=schema), path)
        # Spark takes files by their age; of one age, in any order.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def test_a_stream_with_disorder_loses_nothing(pond: mp.Pond, spark: SparkSession, tmp_path: Path) -> None:
    """Each event runs once, in the order of all; what is left in the end runs in a finish."""
    write_events(tmp_path / "events", 3)
    late: list[Any] = []
    op = operator_of(pond, delay="10 seconds", late=lambda rows, epoch: late.append((epoch, rows.count())))
    sink: dict[int, list[dict[str, Any]]] = {}
    stops = True

    def keep(outcomes: DataFrame, epoch: int) -> None:
        sink[epoch] = collected(outcomes)
        if epoch < 0 and stops:
            raise RuntimeError("it stops after it wrote")

    into = op.to(keep)
    source = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(tmp_path / "events"))
    stream = source.writeStream.foreachBatch(lambda frame, epoch: into(frame.repartition(3), epoch))
    stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    stream.start().awaitTermination()
    assert sorted(sink) == [0, 1, 2]
    waiting = op.pending()
    assert waiting.rows == 180 - sum(map(len, sink.values())) > 0
    with pytest.raises(RuntimeError, match="it stops"):
        op.finish()
    first = sink[-(2 * 1024 + 1)]
    assert len(first) == waiting.rows
    stops = False
    op.finish()
    op.finish()
    assert sink[-(2 * 1024 + 1)] == first
    model = Ledger()
    expected = in_order(model.run([event for epoch in range(3) for event in events_of(epoch)]))
    assert in_order([row for epoch in sorted(sink) for row in sink[epoch]]) == expected
    assert held(pond) == model.rows
    assert (op.progress().late, late) == ({"ledger": 0}, [])
    # The stream goes on: what comes below what has run is late.
    write_events(tmp_path / "more", 1)
    shutil.move(tmp_path / "more" / "0.parquet", tmp_path / "events" / "late.parquet")
    stream.start().awaitTermination()
    assert late == [(3, 60)]
    assert sink[3] == []
    assert op.progress().late == {"ledger": 60}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_driver_killed_at_every_step_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The Java machines live for seconds: to optimise what they run would take them longer.
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1")
    write_events(tmp_path / "events", 3)
    for _ in DEATHS:
        killed = run_job(tmp_path, JOB)
        assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    finished = run_job(tmp_path, JOB)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert len(list(tmp_path.glob("died *"))) == len(DEATHS)
    model = Ledger()
    for epoch in range(3):
        expected = in_order(model.run(events_of(epoch)))
        rows = pq.read_table(tmp_path / "out" / f"epoch={epoch}", partitioning=None).to_pylist()
        assert in_order([with_zone(row) for row in rows]) == expected, epoch
    with mp.open(tmp_path / "pond") as pond:
        assert held(pond) == model.rows
        assert operator_of(pond).progress().late == {"ledger": model.late}
