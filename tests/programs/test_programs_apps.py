"""The applications, as plain Python and as graphs, beside computations that share nothing with them."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from both_ways import both, graph, plainly

import millpond as mp
from millpond.apps import clusters, key_values, recommender, regression, word_count
from millpond.programs.local import Call, LocalRun
from millpond.programs.plain import state_of
from millpond.programs.slicing import lane_of

PER_LANE = [1, 2, 5]


@pytest.mark.parametrize("lanes", PER_LANE)
def test_recommender(lanes: int) -> None:
    calls = list(recommender.requests(400, users=20, items=60, seed=3))
    ratings: dict[int, dict[int, float]] = defaultdict(dict)
    pairs: Counter[tuple[int, int]] = Counter()
    wanted: list[list[int] | None] = []
    for method, row in calls:
        mine = ratings[row["user"]]
        if method == "add_rating":
            if row["item"] not in mine:
                pairs.update({(row["item"], other): 1 for other in mine})
                pairs.update({(other, row["item"]): 1 for other in mine})
            mine[row["item"]] = row["rating"]
            wanted.append(None)
        else:
            scores: Counter[int] = Counter()
            for (item, other), often in pairs.items():
                if other in mine:
                    scores[item] += often * mine[other]  # type: ignore[assignment] # numbers
            ranked = sorted((-score, item) for item, score in scores.items() if item not in mine)
            wanted.append([item for _, item in ranked[:10]])
    instance = mp.plain(recommender.Recommender, lanes=lanes)
    assert [o.value for o in plainly(instance, calls)] == wanted
    run = LocalRun(graph(recommender.Recommender)._replace(lanes=lanes))
    assert [o.value for start in range(0, 400, 90) for o in run.epoch(calls[start : start + 90])] == wanted
    assert run.state() == state_of(instance)
    assert sum(1 for answer in wanted if answer) > 50


@pytest.mark.parametrize("lanes", PER_LANE)
def test_logistic_regression(lanes: int) -> None:
    rows = list(regression.points(600, features=5, seed=2))
    weights = np.zeros((lanes, 5))
    instance = mp.plain(regression.LogisticRegression, lanes=lanes)
    run = LocalRun(graph(regression.LogisticRegression)._replace(lanes=lanes))
    losses = []
    x = np.array([row["features"] for row in rows])
    y = np.array([row["label"] for row in rows])
    for _ in range(3):
        for row in rows:
            lane = lane_of(row["point"], 64, lanes)
            likely = 1 / (1 + np.exp(-weights[lane] @ row["features"]))
            weights[lane] += 0.1 * (row["label"] - likely) * np.array(row["features"])
        weights[:] = weights.mean(axis=0)
        losses.append(np.mean(np.logaddexp(0, x @ weights[0]) - y * (x @ weights[0])))
        plainly(instance, [("learn", row) for row in rows] + [("average", {})])
        run.epoch([("learn", row) for row in rows])
        run.call("average")
    assert losses[-1] < 0.6 < np.log(2)
    assert np.allclose(instance.model(5), weights[0], rtol=1e-9)
    assert np.isclose(instance.predict(rows[0]["features"]), 1 / (1 + np.exp(-x[0] @ weights[0])))
    assert run.state() == state_of(instance)
    assert run.call("model", length=5).value == instance.model(5)


@pytest.mark.parametrize("lanes", PER_LANE)
def test_k_means(lanes: int) -> None:
    rows = list(clusters.points(200, clusters=3, seed=5))
    x = np.array([row["x"] for row in rows])
    centres = x[:3].copy()
    instance = mp.plain(clusters.KMeans, lanes=lanes)
    run = LocalRun(graph(clusters.KMeans)._replace(lanes=lanes))
    first: Call = ("start", {"places": mp.DenseMatrix(centres.tolist())})
    plainly(instance, [first])
    run.epoch([first])
    for _ in range(6):
        nearest = ((x[:, None, :] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
        before = centres.copy()
        for c in range(3):
            if (nearest == c).any():
                centres[c] = x[nearest == c].mean(axis=0)
        calls: list[Call] = [("add", row) for row in rows]
        chosen = plainly(instance, calls)
        assert [o.value for o in chosen] == nearest.tolist()
        assert run.epoch(calls) == chosen
        went = instance.move()
        assert np.isclose(went, ((centres - before) ** 2).sum())
        assert run.call("move").value == went
        assert run.state() == state_of(instance)
    assert np.allclose([instance.__millpond_state__.elements["centres"][0][c] for c in range(3)], centres)


def test_key_values() -> None:
    calls = list(key_values.requests(600, keys=40, seed=4))
    held: dict[str, str] = {}
    wanted: list[object] = []
    for method, row in calls:
        key = row["key"]
        if method == "put":
            held[key] = row["value"]
            wanted.append(None)
        elif method == "get":
            wanted.append(held.get(key))
        elif method == "swap":
            wanted.append(held.get(key) == row["expected"])
            if wanted[-1]:
                held[key] = row["value"]
        else:
            wanted.append(held.pop(key, None) is not None)
    assert [o.value for o in both(key_values.KeyValues, calls)] == wanted
    assert {m.name for m in graph(key_values.KeyValues).methods if m.read_only} == {"get"}


def test_word_count() -> None:
    rows = list(word_count.spoken(3_000, vocabulary=80, seed=6))
    said: dict[str, list[int]] = defaultdict(list)
    wanted = []
    for row in rows:
        windows = said[row["word"]]
        window = row["at"] // 1_000
        windows.append(window)
        wanted.append(windows.count(window) if window >= max(windows) else 0)
    outcomes = both(word_count.WordCount, [("add", row) for row in rows])
    assert [o.value for o in outcomes] == wanted
    assert 0 in wanted
    asks: list[Call] = [("add", rows[0]), ("count", rows[0]), ("count", {"word": "never", "at": 5})]
    assert [o.value for o in both(word_count.WordCount, asks)] == [1, 1, 0]
