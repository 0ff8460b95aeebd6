"""Flink as a contender of the NEXMark benchmark: its statements, its files and its option; and, where it is there, its answers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from test_bench_nexmark import TINY, Answering, contenders, no_spark
from typer.testing import CliRunner

pytest.importorskip("duckdb")
from millpond import cli
from millpond.apps.nexmark import START
from millpond.bench import flink_environment, nexmark, nexmark_flink
from millpond.bench.nexmark_flink_sql import TIMES, Statement, interval, origin_us, statement
from millpond.bench.nexmark_load import QUERIES, Workload, compare, fingerprint
from millpond.errors import MillpondError
from millpond.times import time_of

DAY_US = 86_400_000_000


def made_of(workload: Workload, query: str) -> Statement:
    return statement(query, workload.parameters(query), workload.delay_us(query))


# Statements


def test_a_microsecond_is_a_millisecond_to_flink() -> None:
    assert interval(10_000_000) == "INTERVAL '0 02:46:40.000' DAY TO SECOND(3)"
    assert interval(1) == "INTERVAL '0 00:00:00.001' DAY TO SECOND(3)"
    assert interval(2 * DAY_US // 1_000 + 61_001) == "INTERVAL '2 00:01:01.001' DAY TO SECOND(3)"


def test_times_begin_where_windows_of_all_sizes_do() -> None:
    began = time_of(START)
    assert origin_us(10_000_000, 2_000_000) == began
    for sizes in ((7_000_000,), (7_000_000, 3_000_000)):
        origin = origin_us(*sizes)
        assert began - origin < 21_000_000
        assert all(origin % size == 0 for size in sizes)


def test_statements_have_the_windows_of_the_workload(tmp_path: Path) -> None:
    workload = Workload(tmp_path, TINY._replace(size="4 seconds", slide="1 second", gap="3 seconds"))
    [(columns, query)] = made_of(workload, "q5").sinks.values()
    assert "HOP(TABLE bids, DESCRIPTOR(at_time), INTERVAL '0 00:16:40.000'" in query
    assert "INTERVAL '0 01:06:40.000' DAY TO SECOND(3))" in query
    assert columns.startswith("window_start TIMESTAMP(3), window_end TIMESTAMP(3), `auction` BIGINT, `bids`")
    made = made_of(workload, "q11")
    assert made.origin_us % 3_000_000 == 0
    assert f"DESCRIPTOR(at_time), {interval(3_000_000)}" in made.sinks["answers"][1]
    # A thousand events at a hundred a second arrive in any order.
    assert made.behind == workload.delay_us("q11") + 1 == 9_990_001
    assert made.sources["bids"].endswith(f"WATERMARK FOR at_time AS at_time - {interval(made.behind)}")
    assert made.drops["no_bids"] == (
        "`bidder` BIGINT, `date_time` BIGINT",
        "SELECT `bidder`, `date_time` FROM bids",
    )


@pytest.mark.parametrize("query", ["q7-bidder", "q8", "q11-median"])
def test_files_hold_all_rows_and_answers_come_back(tmp_path: Path, query: str) -> None:
    workload = Workload(tmp_path / "events", TINY)
    made = made_of(workload, query)
    staged = workload.stage(query)
    written = nexmark_flink.write_files(staged, query, tmp_path / "flink", made, 2)
    rows = 0
    for source in QUERIES[query].columns:
        kept = pa.concat_tables(pq.read_table(file) for file in staged.folder(source).rglob("*.parquet"))
        times = kept["date_time"].cast(pa.int64()).to_numpy() - made.origin_us
        found = []
        for phase in ("warm", "timed"):
            files = sorted((tmp_path / "flink" / "staged" / phase / source).iterdir())
            assert [file.name for file in files] == ["0.csv", "1.csv"]
            for file in files:
                lines = file.read_text().splitlines()
                rows += len(lines)
                if phase == "timed":
                    assert lines.pop().split(",")[-1] == str(written.closing)
                found += [int(line.rsplit(",", 1)[1]) for line in lines]
        assert sorted(found) == np.sort(times).tolist()
        # Its watermark ends all windows, and none of its own.
        assert written.closing - made.behind > times.max() + 10_000_000
    assert sum(written.rows.values()) == rows

    expected = workload.truth(query)
    assert set(made.columns) == {*expected.column_names, "said"}
    answered = expected.select([name for name in made.columns if name != "said"])
    for place, name in enumerate(answered.column_names):
        if name in TIMES:
            numbers = pa.array(answered[name].cast(pa.int64()).to_numpy() - made.origin_us)
            as_said = numbers if name == "date_time" else numbers.view(pa.timestamp("ms"))
            answered = answered.set_column(place, name, as_said)
    answered = answered.append_column("said", pa.array(["2026-01-02 03:04:05.006Z"] * len(answered)))
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / ".part.inprogress").write_text("nothing to read\n")
    csv.write_csv(answered, tmp_path / "answers" / "part-0", nexmark_flink.NO_HEADER)
    (tmp_path / "answers" / "part-1").write_text("")
    read = nexmark_flink.read_answers(tmp_path / "answers", made.columns)
    back = nexmark_flink.as_answered(read.drop_columns(["said"]), made.origin_us)
    assert compare(query, back, expected) == fingerprint(expected)


# The option


def test_nexmark_is_told_of_the_option_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(progress: object) -> Path:
        raise MillpondError("no Flink today")

    monkeypatch.setattr(flink_environment, "prepare", refuse)
    monkeypatch.setattr(nexmark, "spark_session", lambda name, memory: pytest.fail("Spark was started"))
    ended = CliRunner().invoke(cli.app, ["bench", "nexmark", "--quick", "--flink"])
    assert isinstance(ended.exception, MillpondError)
    assert ended.exception.message == "no Flink today"


def test_flink_is_one_more_contender(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    @contextmanager
    def opened(python: Path, folder: Path, progress: object) -> Iterator[Answering]:
        assert (python, folder.name) == (tmp_path, "flink")
        yield Answering("flink", 3.0)

    monkeypatch.setattr(flink_environment, "prepare", lambda progress: tmp_path)
    monkeypatch.setattr(nexmark, "flink_sql", opened)
    monkeypatch.setattr(nexmark, "spark_session", no_spark)
    said: list[str] = []
    taking = contenders(Answering("millpond", 1.0), Answering("spark-native", 2.0), Answering("other", 9.0))
    results = nexmark.run(True, said.append, ["q11"], TINY, taking, flink=True)
    assert [result["system"] for result in results] == [
        *("q11 millpond", "q11 spark-native", "q11 other", "q11 flink")
    ]
    assert results[0]["vs_flink"] == results[0]["per_core_s_vs_flink"] == 3
    assert said[0].startswith("flink: apache-flink==2.3.*, RocksDB, ")
    assert "execution.checkpointing.interval=2 s" in said[0]
    nexmark.print_table("nexmark", results)
    printed = capsys.readouterr().out
    assert "flink\n" in printed.replace(" ", "\n")
    assert "…" not in printed  # nothing is cut


def test_a_job_that_dies_tells_why(tmp_path: Path) -> None:
    job = nexmark_flink.FlinkJob(Path(sys.executable), tmp_path)
    try:
        with pytest.raises(
            MillpondError, match="Flink's job failed: ModuleNotFoundError: No module named 'py"
        ):
            job.run({})
    finally:
        job.close()


# Flink itself


@pytest.mark.long
@pytest.mark.timeout(900)
def test_flink_answers_as_duckdb_does(tmp_path: Path) -> None:
    python = flink_environment.installed_python()
    if python is None:
        pytest.skip("Flink's environment is not there: `millpond bench nexmark --flink` makes it")
    workload = Workload(tmp_path / "events", TINY)
    with nexmark_flink.flink_sql(python, tmp_path, lambda line: None) as contender:
        assert [query for query in QUERIES if not contender.supports(query)] == ["q5-append", "q12"]
        for query in ("q5", "q7-session", "q8", "q11-median"):  # of each form one
            done = contender.run(workload, query)
            assert workload.check("flink", query, done).rows == len(workload.truth(query)) > 0
            assert 0 < done.seconds < 300
            assert done.cpu_seconds > done.extras["reading_cpu_s"] / 10 > 0
            assert done.events == workload.events(query)
