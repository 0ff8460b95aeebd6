"""The demos of programs: on a stream they do what the plain class does, and notice where it is not so."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from rich.console import Console

import millpond as mp
from millpond.apps import clusters, key_values, recommender, regression, word_count
from millpond.apps.program_demo import Application, Call, Told, plainly, streamed
from millpond.apps.ratings import drawn_ratings
from millpond.errors import BadOption

DATA = "196\t242\t3\t881250949\n186\t302\t3\t891717742\n22\t377\t1\t878887116\n196\t302\t2\t880606923\n"


def calls_of(name: str) -> tuple[Application, list[Call]]:
    if name == "recommender":
        many = drawn_ratings(800)
        few = {
            "user": [u % 4 for u in many["user"].to_pylist()],
            "item": [i % 10 for i in many["item"].to_pylist()],
        }
        ratings = pa.table({**few, "rating": many["rating"]})
        return recommender.APPLICATION, list(recommender.requests_of(ratings, 60))
    if name == "clusters":
        rows = list(clusters.points(30))
        return clusters.application(rows), [("add", row) for _ in range(2) for row in rows]
    if name == "word_count":
        return word_count.APPLICATION, [("add", row) for row in word_count.spoken(60, vocabulary=3)]
    return key_values.APPLICATION, list(key_values.requests(60, keys=10))


@pytest.mark.parametrize(
    "name",
    [
        "recommender",
        "word_count",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("clusters", "key_values")),
    ],
)
def test_a_stream_tells_what_the_plain_class_tells(
    name: str, spark: SparkSession, pond: mp.Pond, tmp_path: Path
) -> None:
    app, calls = calls_of(name)
    epochs = [calls[:30], calls[30:]]
    began_ms = int(time.time() * 1000)
    with open(tmp_path / "out", "w") as file:
        told = streamed(spark, pond, app, epochs, str(tmp_path), Console(file=file, soft_wrap=True))
    came_at = list(told.came_at.values())
    assert came_at == sorted(came_at)
    assert all(began_ms <= came_ms <= time.time() * 1000 for came_ms in came_at)
    assert len(came_at) == (0 if app.clock is None else 2)
    wanted = plainly(app, epochs, len(pond.placement()), told.came_at)
    assert told.differing(wanted) == (0, 0)
    assert len(told.returned) == 60
    assert sorted(told.direct) == [0, 1]
    assert any(told.returned.values())
    lines = (tmp_path / "out").read_text().splitlines()
    assert [line.partition(" calls,")[0] for line in lines] == ["epoch   0: 30", "epoch   1: 30"]


def test_what_is_wrong_is_counted() -> None:
    wanted = Told({0: "a", 1: None}, {0: 1.0}, {"values": {"x": 1}, "others": {}})
    assert wanted.differing(wanted) == (0, 0)
    told = Told({0: "b", 2: None}, {}, {"values": {}, "others": {}})
    assert told.differing(wanted) == (4, 1)


def test_ratings_come_in_their_order_and_questions_are_of_users_who_rated() -> None:
    ratings = drawn_ratings(50)
    calls = list(recommender.requests_of(ratings, 61))
    assert len(calls) == 61
    adds = [row for method, row in calls if method == "add_rating"]
    assert adds == ratings.slice(0, 31).to_pylist()
    users: set[int] = set()
    for method, row in calls:
        assert method == "add_rating" or row["user"] in users
        users.add(row["user"])


@pytest.mark.parametrize("app", [recommender, regression, clusters, key_values, word_count])
def test_options_out_of_range_are_refused(app: Any) -> None:
    with pytest.raises(BadOption, match="0 epochs of 500 calls"):
        app.run(seconds=0)
    with pytest.raises(BadOption, match="not within"):
        app.run(rate=10_000_000)


def test_fewer_points_than_centres_are_refused() -> None:
    with pytest.raises(BadOption, match="--rate 3 is below 4"):
        clusters.run(rate=3)


@pytest.mark.long
@pytest.mark.parametrize(
    "run",
    [recommender.run, regression.run, clusters.run, key_values.run, word_count.run],
    ids=lambda run: run.__module__.rpartition(".")[2],
)
def test_it_runs_to_its_end(
    run: Callable[..., bool],
    spark: SparkSession,  # it takes the session that there is, and stops it at its end
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    more = {}
    if run is recommender.run:
        (tmp_path / "u.data").write_text(DATA)
        more = {"data": tmp_path / "u.data"}
    assert run(seconds=2, rate=20, **more)
    assert "0 wrong; " in capsys.readouterr().out.splitlines()[-1]
