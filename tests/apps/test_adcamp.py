"""The demonstration's rows are what it says they are, its check sees wrong answers, and it runs to its end."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

pytest.importorskip("duckdb")
from millpond.apps import adcamp
from millpond.apps.adcamp import Comparison, Meter, compare
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption, MillpondError
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond


@pytest.mark.parametrize("rate", [1, 2, 997, 1_000])
def test_rows_come_out_of_order_within_the_bound_and_share_no_time(spark: SparkSession, rate: int) -> None:
    source = spark.range(0, 3 * rate + 1, 1, 1).selectExpr("id AS value", "current_timestamp() AS timestamp")
    rows = adcamp.updates(source, rate, keys=50, rows=3 * rate).toPandas()
    times = rows["ts"].astype("int64").to_numpy()  # nanoseconds, in pandas
    assert len(rows) == len(np.unique(times)) == 3 * rate
    assert rows["ad"].between(0, 49).all()
    watermark = np.maximum.accumulate(times) - adcamp.DISORDER_S * 1_000_000_000
    assert (times[1:] >= watermark[:-1]).all()
    if rate > 2:
        assert (np.diff(times) < 0).sum() > rate / 2
    asked = adcamp.views(source, rate, keys=50, rows=3 * rate).toPandas()
    assert asked["view"].tolist() == list(range(3 * rate))
    assert asked.columns.tolist() == ["view", "ad", "ts", "arrived"]


def written(folder: Path, answers: dict[str, list[int | str | None]]) -> str:
    updates = {"ad": [1, 1, 2], "ts": [10, 20, 15], "campaign": ["a", "b", "c"]}
    for name, rows in (("updates", updates), ("answers", answers)):
        part = folder / name / "epoch=0"
        part.mkdir(parents=True)
        pq.write_table(pa.table(rows), part / "part-0.parquet")
    return str(folder)


RIGHT: dict[str, list[int | str | None]] = {
    "view": [0, 1, 2, 3],
    "ad": [1, 1, 1, 2],
    "ts": [9, 19, 20, 99],
    "campaign": [None, "a", "b", "c"],
}


def test_right_answers_pass(tmp_path: Path) -> None:
    found = compare(written(tmp_path, RIGHT))
    assert found == Comparison(updates=3, views=4, wrong=0, twice=0)
    assert found.lost(5) == 1


@pytest.mark.parametrize(
    ("view", "answer"), [(0, "a"), (1, "b"), (1, None), (2, "a")], ids=["early", "later", "none", "stale"]
)
def test_one_wrong_answer_is_seen(tmp_path: Path, view: int, answer: str | None) -> None:
    campaigns = list(RIGHT["campaign"])
    campaigns[view] = answer
    assert compare(written(tmp_path, {**RIGHT, "campaign": campaigns})).wrong == 1


def test_an_answer_given_twice_is_seen(tmp_path: Path) -> None:
    twice = {name: [*column, column[-1]] for name, column in RIGHT.items()}
    found = compare(written(tmp_path, twice))
    assert (found.wrong, found.twice, found.lost(4)) == (0, 1, 0)


def test_a_meter_counts_all_and_times_the_recent() -> None:
    meter = Meter()
    assert meter.latency_s(50) is None
    meter.add(3, np.array([1.0, 2.0, 9.0]))
    meter.add(4)
    assert meter.total == 7
    assert meter.rows_per_s() > 0
    assert meter.latency_s(50) == 2.0


@pytest.mark.parametrize("option", ["seconds", "rate", "keys", "containers"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadOption, match=f"--{option} 0"):
        adcamp.run(**{option: 0})  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="--hosting elsewhere"):
        adcamp.run(hosting="elsewhere")


def test_it_says_how_to_act_on_it_from_another_terminal() -> None:
    with LocalPond(LossyFiles(), containers=2) as pond:
        (watch, kill, _, *prompt) = adcamp.by_hand(pond, "/there/pond").splitlines()
        assert watch.endswith("millpond top /there/pond")
        assert f"kill -9 {pond.containers()[1].pid} " in kill
        code = "\n".join(line.strip() for line in prompt)
        joined: list[object] = []
        there = SimpleNamespace(connect=lambda address, token: joined.append((address, token)) or pond)
        names = {"open": lambda path: SimpleNamespace(read=lambda: path)}
        exec(code.replace("import millpond as mp", ""), {**names, "mp": there})
        assert joined == [(pond.address, "/there/pond/token")]
        assert [move.cause for move in pond.moves()].count("move") > 0
        assert len(pond.containers()) == 2, "up, and down again"


@pytest.mark.long
def test_it_runs_to_its_end(
    spark: SparkSession,  # it takes the session that there is, and stops it at its end
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert adcamp.run(seconds=2, rate=1_000, keys=200, containers=2, backups=1)
    printed = capsys.readouterr().out
    assert "2,000 updates (0 late), 2,000 views, 0 wrong (0 lost, 0 twice" in printed
    assert "U +inf" in printed
    assert not list(tmp_path.glob("millpond-adcamp-*"))


def test_without_java_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    active = SparkSession.getActiveSession()
    if active is not None:
        active.stop()
    # A JVM that runs already would serve again.
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_gateway", None)
    with pytest.raises(MillpondError, match="no Java") as caught, spark_session("none"):
        pytest.fail("it started")
    assert "Java 17" in caught.value.hint
