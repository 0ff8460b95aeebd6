"""`millpond bench programs`: every answer is right, every part tells its figures, ratings are read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import millpond as mp
from millpond.apps.ratings import MOVIELENS, NETFLIX, drawn_ratings, movielens_file, read_ratings
from millpond.apps.recommender import Recommender
from millpond.bench import (
    programs,
    programs_cf,
    programs_durable,
    programs_kv,
    programs_lr,
    programs_stream,
    programs_words,
)
from millpond.bench.programs_cf import ByItem, Mixed, Requests
from millpond.bench.programs_kernel import Filtering
from millpond.bench.programs_pond import QUICK
from millpond.errors import BadOption

TINY = QUICK._replace(
    seconds=0.2,
    cf_ratings=300,
    cf_loaded=100,
    cf_batch=30,
    cf_by_item=240,
    kv_keys=60,
    kv_batch=50,
    lr_points=200,
    lr_iterations=2,
    words_per_s=500,
    windows_ms=(500,),
    entries=(60,),
    checkpoint_every_s=0.1,
)


def test_the_loop_is_the_recommender() -> None:
    ratings = drawn_ratings(600, MOVIELENS, seed=3)
    plain, filtering = mp.plain(Recommender), Filtering(943, 1_682)
    part = ratings.slice(0, 400)
    for turn in (ratings, part):  # ratings that come again count once
        for row in turn.to_pylist():
            plain.add_rating(**row)
        filtering.add(*(turn[name].to_numpy() for name in ("user", "item", "rating")))
    users = np.arange(8)
    expected = [plain.get_rec(user) for user in users.tolist()]
    assert [[item for item in row if item >= 0] for row in filtering.ask(users).tolist()] == expected
    assert any(expected)


@pytest.mark.parametrize("cls", [Recommender, ByItem])
def test_wrong_answers_are_noticed(pond: mp.Pond, cls: type) -> None:
    requests = Requests.of(drawn_ratings(800).slice(0, 300), 200)
    mixed = Mixed(pond, cls, f"rec_{cls.__name__.lower()}", requests)
    mixed.load()
    mixed.turn(5, 10)
    assert mixed.wrong() == 0
    told = mixed.turns[-1].answers.to_pylist()
    turned = pa.array([row[::-1] for row in told], pa.list_(pa.int64()))
    mixed.turns[-1] = mixed.turns[-1]._replace(answers=turned)
    assert mixed.wrong() == sum(len(row) > 1 for row in told) > 0


def test_every_mix_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(programs, "QUICK", TINY)
    monkeypatch.setattr(programs_cf, "MIXES", programs_cf.MIXES[1:2])
    monkeypatch.setattr(programs_cf, "movielens_file", lambda: None)
    monkeypatch.setattr(programs_cf, "DIRECT", 3)
    lines: list[str] = []
    results = programs.run(True, lines.append, only=["cf"])
    assert "pip install --no-deps recbole" in lines[0]
    assert [each["work"] for each in results] == ["generated 1:1", "netflix 1:1", "few 1:1", "few 1:1"]
    for each in results:
        assert each["wrong"] == 0
        assert each["requests_per_s"] > 0
        assert each["get_p95_ms"] >= each["get_p50_ms"] > 0
        assert each["stale_p95_ms"] >= 0
    programs.print_table("programs", results)
    assert "not reached" in capsys.readouterr().out


def test_a_part_that_there_is_not() -> None:
    with pytest.raises(BadOption, match="no part 'no'"):
        programs.run(True, print, only=["no"])


def test_ratings_as_movielens_has_them(tmp_path: Path) -> None:
    by_tabs, by_commas, typed, other = (tmp_path / name for name in ("u.data", "ratings.csv", "x.inter", "o"))
    by_tabs.write_text("196\t242\t3\t881250949\n186\t302\t4\t881250940\n")
    by_commas.write_text("userId,movieId,rating,timestamp\n196,242,3.0,881250949\n186,302,4.0,881250940\n")
    typed.write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n186\t302\t4\t1\n196\t242\t3\t2\n"
    )
    expected = {"user": [186, 196], "item": [302, 242], "rating": [4.0, 3.0]}
    for file in (by_tabs, by_commas, typed):
        assert read_ratings(file).to_pydict() == expected
    other.write_text("a,b\n1,2\n")
    for file in (other, tmp_path / "none", tmp_path):
        with pytest.raises(BadOption, match="could not be read as ratings") as caught:
            read_ratings(file)
        assert "u.data" in caught.value.hint


def test_the_package_is_found_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert movielens_file() is None or movielens_file().exists()
    folder = tmp_path / "recbole" / "dataset_example" / "ml-100k"
    folder.mkdir(parents=True)
    (tmp_path / "recbole" / "__init__.py").write_text("raise ImportError('what it needs is not there')")
    (folder / "ml-100k.inter").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert movielens_file() == folder / "ml-100k.inter"


@pytest.mark.parametrize("shape", [MOVIELENS, NETFLIX])
def test_drawn_ratings_have_the_shape(shape: Any) -> None:
    ratings = drawn_ratings(20_000, shape, seed=2)
    assert ratings.equals(drawn_ratings(20_000, shape, seed=2))
    pairs = set(zip(ratings["user"].to_pylist(), ratings["item"].to_pylist(), strict=True))
    assert len(pairs) == len(ratings) == 20_000
    assert ratings["item"].to_numpy().max() < shape.items
    users = len(set(ratings["user"].to_pylist()))
    assert 20_000 / users == pytest.approx(shape.per_user, rel=0.4)


def test_values_beside_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines: list[str] = []
    results = programs_kv.run(TINY, lines.append)
    assert [line for line in lines if "skipped" in line] == [
        "kv: Redis skipped, its client is not installed (pip install 'millpond[bench]')",
        "kv: Ray skipped, it is not installed (pip install ray)",
    ]
    assert [each["system"] for each in results] == [
        "millpond, streamed, batches of 50",
        "millpond, direct, 1 at once",
        "millpond, direct, 20 at once",
    ]
    assert results[1]["read_p50_ms"] > 0
    assert results[1]["write_p50_ms"] > 0
    assert len(results[1]["aims"]) == 2
    programs.print_table("programs", results)
    shown = capsys.readouterr().out
    assert "read p50 <= 2 ms: " in shown


def test_what_lasts_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_durable, "SHAPES", programs_durable.SHAPES[1:2])
    [without, held] = programs_durable.checkpoints(TINY, lambda _: None)
    assert held["checkpoints"] >= 1
    assert held["cost"] == 1 - held["calls_per_s"] / without["calls_per_s"]
    results = programs_durable.recovery(TINY, lambda _: None)
    assert [(each["work"], each["entries"]) for each in results] == [("2-to-1", 60)]
    assert results[0]["without_answers_s"] > 0
    programs.print_table("programs", [without, held, *results])
    assert "cost <= 5%" in capsys.readouterr().out


def test_words_by_tables(pond: mp.Pond) -> None:
    count = programs_words.Tables(pond)
    for window_ms in (40, 20):
        tables = list(programs_words.windows(TINY, window_ms))
        assert len(tables) == max(4, 200 // window_ms)
        took = count(tables, window_ms)
        assert len(took) == len(tables)
        assert min(took) > 0
    with pytest.raises(RuntimeError, match="window 0 was not counted right"):
        programs_words.check(tables[0], {})


def test_a_log_loss_is_what_it_says() -> None:
    x, y = np.array([[1.0, 2.0], [0.5, -1.0]]), np.array([1.0, 0.0])
    weights = np.array([0.3, -0.2])
    likely = 1 / (1 + np.exp(-(x @ weights)))
    expected = -(y * np.log(likely) + (1 - y) * np.log(1 - likely)).mean()
    assert programs_lr.log_loss(weights, x, y) == pytest.approx(expected)


@pytest.mark.long
def test_beside_spark(spark: SparkSession) -> None:
    """It takes the session that there is, and stops it at its end."""
    [own, mllib] = programs_lr.run(TINY, lambda _: None)
    assert own["loss"] < 0.69
    assert mllib["loss"] < 0.69
    results = programs_words.run(TINY, lambda _: None)
    assert [each["system"] for each in results] == [
        "millpond, Arrow tables",
        "millpond, Spark stream",
        "spark groupBy",
    ]
    assert all("window_ms" in each or "note" in each for each in results)


@pytest.mark.long
def test_filtering_as_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs_stream, "MIXES", [(1, 1)])
    monkeypatch.setattr(programs_stream, "ratings_of_movielens", lambda progress: None)
    [found] = programs_stream.run(TINY._replace(cf_file=20), lambda _: None)
    assert found["work"] == "generated 1:1"
    assert found["wrong"] == 0
    assert found["requests"] % 20 == 0 < found["requests"]
