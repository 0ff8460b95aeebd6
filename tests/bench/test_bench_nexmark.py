"""The NEXMark benchmark runs on a tiny work, its contenders answer as DuckDB does, and a wrong answer ends it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb")
from millpond.apps.nexmark import TIMESTAMP, Nexmark
from millpond.bench import nexmark, nexmark_load, nexmark_over
from millpond.bench.nexmark_load import CLOSING_AT, QUERIES, Contender, Run, Work, Workload, compare
from millpond.bench.nexmark_spark import SparkNative
from millpond.bench.window_container import Means
from millpond.errors import BadOption

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("started_as_ever")
TINY = Work(
    events=20_000,
    batch_events=5_000,
    warm_files=1,
    events_per_s=100,
    arrival_size="100 milliseconds",
    disorder=1_000,
    uncounted_rounds=0,
    rounds=1,
)


@pytest.mark.parametrize("query", ["q7", "q11"])
def test_spark_answers_as_duckdb_does(spark: SparkSession, tmp_path: Path, query: str) -> None:
    check_spark(spark, tmp_path, query)


@pytest.mark.long
@pytest.mark.parametrize("query", [query for query in QUERIES if query not in ("q7", "q11")])
def test_spark_answers_the_other_queries_as_duckdb_does(
    spark: SparkSession, tmp_path: Path, query: str
) -> None:
    check_spark(spark, tmp_path, query)


def check_spark(spark: SparkSession, folder: Path, query: str) -> None:
    workload = Workload(folder, TINY)
    contender = SparkNative(spark)
    if not contender.supports(query):
        pytest.skip("this Spark cannot say it")
    done = contender.run(workload, query)
    assert workload.check("spark-native", query, done).rows == len(workload.truth(query, done.arrivals)) > 0
    timed_share = (TINY.files - TINY.warm_files) / TINY.files
    # Files of people and auctions span more events, so that they have about as many rows.
    assert done.events == pytest.approx(TINY.events * timed_share * 0.92, rel=0.05)
    assert done.seconds > 0
    assert done.cpu_seconds > 0
    assert len(done.extras["batch_ms"]) == pytest.approx(TINY.files + nexmark_load.CLOSING_FILES, abs=1)

    # The comparison can fail.
    for wrong in (done.result.slice(1), pa.concat_tables([done.result, done.result.slice(0, 1)])):
        with pytest.raises(RuntimeError, match=f"DuckDB answers spark-native in {query} lacks"):
            workload.check("spark-native", query, replace(done, result=wrong))


@pytest.mark.long
@pytest.mark.parametrize("query", ["q11", "q11-median"])
def test_a_pond_over_rocksdb_answers_as_duckdb_does(spark: SparkSession, tmp_path: Path, query: str) -> None:
    pytest.importorskip("rocksdict")
    said: list[str] = []
    workload = Workload(tmp_path / "events", TINY)
    setting = nexmark.Setting(spark, tmp_path, said.append)
    with nexmark.CONTENDERS["millpond-rocksdb"](setting) as contender:
        done = contender.run(workload, query)
    assert workload.check(contender.name, query, done).rows > 0
    assert done.extras["rocksdb"]["write_ahead_log"] is False
    assert f"budget_bytes={done.extras['rocksdb']['budget_bytes']}" in said[0]


def test_files_hold_the_events_in_order_and_close_all_windows(tmp_path: Path) -> None:
    workload = Workload(tmp_path, TINY)
    staged = workload.stage("q11")
    assert not list(staged.folder("bids").iterdir())
    for phase in nexmark_load.PHASES:
        staged.put(phase)
    files = sorted(staged.folder("bids").rglob("*.parquet"), key=lambda file: file.name)
    assert [file.stat().st_mtime for file in files] == list(range(1, 7))
    assert [file.parent.name for file in files] == ["warm", *["timed"] * 3, *["closing"] * 2]
    rows = pa.concat_tables(pq.read_table(file) for file in files[:4])
    generator = Nexmark(events_per_s=100, disorder=1_000)
    assert rows.equals(pa.concat_tables(generator.bids(n * 5_000, 5_000) for n in range(4)))
    assert workload.events("q11") == sum(pq.read_metadata(file).num_rows for file in files[1:4])
    for file in files[4:]:
        assert pq.read_table(file).to_pylist() == [
            {"auction": -1, "bidder": -1, "price": -1, "date_time": CLOSING_AT}
        ]
    # No event is later than the watermark would let it be.
    times = rows["date_time"].cast(pa.int64()).to_numpy()
    assert (np.maximum.accumulate(times) - times).max() <= workload.delay_us("q11")


def test_each_size_has_windows_enough() -> None:
    for work in (nexmark_load.FULL, nexmark_load.QUICK):
        timed_events = (work.files - work.warm_files) * work.batch_events
        assert timed_events / work.events_per_s >= 20 * 10
        assert work.size == work.gap == "10 seconds"
        assert work.files - work.warm_files >= 5


def test_streams_over_the_budget_have_so_much_open(tmp_path: Path) -> None:
    scale = nexmark_over.FULL
    for over in nexmark_over.works(scale):
        work = over.work
        per_window = work.events_per_s * nexmark_over.BIDS * nexmark_over.GAP_S
        timed = (work.files - work.warm_files) * work.batch_events * nexmark_over.BIDS
        assert timed / per_window >= 20 * 0.99
        assert work.rounds == 3
        assert work.files - work.warm_files >= 5
        row_bytes = nexmark_over.ROW_BYTES[over.query]
        if over.query not in nexmark_over.SESSIONS:
            assert per_window * row_bytes == pytest.approx(over.share * scale.budget, rel=0.01)
    assert {over.share for over in nexmark_over.works(scale)} == {0.1, 1, 10}
    assert scale.budget >= 64 << 20
    workload = Workload(tmp_path, TINY._replace(uniform_bidders=50))
    bidders = workload.truth("q11")["bidder"]
    assert set(bidders.to_pylist()) == set(range(50))


@pytest.mark.parametrize("query", list(QUERIES))
def test_a_wrong_answer_is_noticed(tmp_path: Path, query: str) -> None:
    workload = Workload(tmp_path, TINY)
    arrivals = [number * 70_000 for number in range(TINY.files)] if query == "q12" else None
    expected = workload.truth(query, arrivals)
    shuffled = expected.take(np.random.default_rng(0).permutation(len(expected)))
    done = Run(1.0, 1.0, 1, closed(shuffled), arrivals)
    assert workload.check("it", query, done).rows == len(expected)

    last = expected.column_names[-1]
    values = expected[last].to_pylist()
    values[3] = values[3] + one(values[3])
    place = len(expected.column_names) - 1
    changed = expected.set_column(place, last, pa.array(values, expected[last].type))
    with pytest.raises(RuntimeError, match=r"lacks 1, and it has 1 others"):
        workload.check("it", query, replace(done, result=changed))
    # As many rows, one of them twice instead of another.
    twice = pa.concat_tables([expected.slice(1), expected.slice(1, 1)])
    with pytest.raises(RuntimeError, match=r"lacks 1, and it has 1 others"):
        workload.check("it", query, replace(done, result=twice))
    with pytest.raises(RuntimeError, match=f"lack {last}"):
        compare("it", expected.drop_columns([last]), expected)


def one(value: object) -> Any:
    """The least that can be added to such a value."""
    if isinstance(value, str):
        return "x"
    return timedelta(microseconds=1) if isinstance(value, datetime) else 1


def closed(rows: pa.Table) -> pa.Table:
    """With what a closing row may bring."""
    row = nexmark_load.closing_row(
        pa.schema([column.with_type(wide(column.type)) for column in rows.schema])
    ).cast(rows.schema)
    after = pa.array([CLOSING_AT + timedelta(seconds=1)], TIMESTAMP)
    return pa.concat_tables([rows, row.set_column(1, "window_end", after.cast(rows["window_end"].type))])


def wide(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    return pa.string() if pa.types.is_string(kind) else pa.int64()


def test_arrivals_belong_to_q12_alone(tmp_path: Path) -> None:
    workload = Workload(tmp_path, TINY)
    expected = workload.truth("q11")
    with pytest.raises(RuntimeError, match="record arrivals for q12, and for nothing else"):
        workload.check("it", "q11", Run(1.0, 1.0, 1, expected, arrivals=[1]))
    with pytest.raises(RuntimeError, match="3 arrivals were recorded of 4 files"):
        workload.check("it", "q12", Run(1.0, 1.0, 1, expected, arrivals=[1, 2, 3]))


class Answering:
    """A contender that knows the truth, and takes so long for it."""

    def __init__(self, name: str, seconds: float, wrong: bool = False) -> None:
        self.name = name
        self._seconds = seconds
        self._wrong = wrong

    def supports(self, query: str) -> bool:
        return query != "q8" or self.name == "millpond"

    def run(self, workload: Workload, query: str) -> Run:
        expected = workload.truth(query)
        cpu = {"java": self._seconds, "containers": self._seconds}
        return Run(
            self._seconds,
            2 * self._seconds,
            workload.events(query),
            expected.slice(int(self._wrong)),
            extras={"cpu_by_kind": cpu},
        )


def contenders(*answering: Answering) -> dict[str, nexmark.Factory]:
    def factory(contender: Answering) -> nexmark.Factory:
        @contextmanager
        def opened(setting: nexmark.Setting) -> Iterator[Contender]:
            assert setting.folder.is_dir()
            yield contender

        return opened

    return {contender.name: factory(contender) for contender in answering}


def test_contenders_take_turns_and_are_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nexmark, "spark_session", no_spark)
    said: list[str] = []
    work = TINY._replace(rounds=2, uncounted_rounds=1)
    taking = contenders(Answering("millpond", 1.0), Answering("spark-native", 4.0))
    results = nexmark.run(True, said.append, query=["q11", "q8"], work=work, contenders=taking)
    assert [result["system"] for result in results] == ["q11 millpond", "q11 spark-native", "q8 millpond"]
    own, beside, _ = results
    assert own["vs_spark-native"] == own["per_core_s_vs_spark-native"] == 4
    assert beside["vs_millpond"] == 0.25
    assert own["events_per_core_s"] == own["events_per_s"] / 2 == own["events_per_core_s_max"]
    assert own["note"].startswith("reached, 4.00: at least 3.0 of spark-native; not reached, 0.0")
    assert own["result_hash"] == beside["result_hash"]
    assert len(own["seconds"]) == 2
    order = [line.split()[1] for line in said if line.startswith("q11")]
    forth = ["millpond,", "spark-native,"]
    assert order == forth + forth[::-1] + forth
    nexmark.print_table("nexmark", results)
    printed = capsys.readouterr().out
    assert "spark-native" in printed
    assert "4.00" in printed
    pytest.importorskip("matplotlib")
    files = nexmark.plot(tmp_path / "nexmark", "nexmark", results)
    assert [file.name for file in files] == ["nexmark.png", "nexmark.svg"]


def test_a_wrong_contender_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexmark, "spark_session", no_spark)
    taking = contenders(Answering("millpond", 1.0), Answering("spark-native", 4.0, wrong=True))
    with pytest.raises(RuntimeError, match="spark-native in q5 lacks 1, and it has 0 others"):
        nexmark.run(True, lambda line: None, query=["q5"], work=TINY, contenders=taking)


@contextmanager
def no_spark(name: str, memory: str) -> Iterator[None]:
    yield


@pytest.mark.long
def test_whole_bids_are_answered_as_duckdb_does(spark: SparkSession, tmp_path: Path) -> None:
    workload = Workload(tmp_path / "events", TINY._replace(whole_bids=True))
    setting = nexmark.Setting(spark, tmp_path / "own", lambda _: None, Means(budget=8 << 20, uncached=True))
    for name in ("millpond", "spark-native"):
        with nexmark.CONTENDERS[name](setting) as contender:
            for query in nexmark_load.WHOLE:
                if contender.supports(query):
                    done = contender.run(workload, query)
                    assert "extra" in done.result.column_names
                    assert workload.check(name, query, done).rows > 0
                    assert done.extras["checkpoints"] > 0


def test_parts_alone_run_no_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexmark, "spark_session", lambda *_, **__: pytest.fail("Spark was started"))
    monkeypatch.setattr(nexmark.nexmark_parts, "run", lambda quick, progress, only: [{"ran": list(only)}])
    assert nexmark.run(True, lambda _: None, only=["ratio", "msa"]) == [{"ran": ["ratio", "msa"]}]
    with pytest.raises(BadOption, match="there is no part 'store'"):
        nexmark.run(True, lambda _: None, only=["store"])
    with pytest.raises(BadOption, match="queries are no part of ratio"):
        nexmark.run(True, lambda _: None, query=["q7"], only=["ratio"])


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="there is no query 'q99'") as error:
        nexmark.run(True, lambda line: pytest.fail("it ran"), query=["q99"])
    assert "q5, q5-append, q7" in str(error.value.hint)
    with pytest.raises(BadOption, match="4 to warm up"):
        Workload(tmp_path, TINY._replace(warm_files=4))
