"""The applications in a pond of three containers: streamed, then called directly, equal to the plain class."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pyarrow as pa
import pytest
from both_ways import graph, plainly
from test_program_plain import entries, in_pond

import millpond as mp
from millpond.apps import clusters, key_values, recommender, regression, word_count
from millpond.programs.local import Call
from millpond.programs.plain import state_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 8


def k_means() -> list[Call]:
    rows = list(clusters.points(60, clusters=3, seed=5))
    places = mp.DenseMatrix([row["x"] for row in rows[:3]])
    turns: list[Call] = [*(("add", row) for row in rows), ("move", {})]
    return [("start", {"places": places}), *turns, *turns]


def logistic() -> list[Call]:
    rows = list(regression.points(60, features=4, seed=2))
    turns: list[Call] = [*(("learn", row) for row in rows), ("average", {})]
    return [*turns, *turns, ("model", {"length": 5}), ("predict", {"features": rows[0]["features"]})]


def words() -> list[Call]:
    rows = list(word_count.spoken(90, vocabulary=15, seed=6))
    asked: list[Call] = [("count", row) for row in rows[::4]]
    return [*(("add", row) for row in rows[:50]), *asked, *(("add", row) for row in rows[50:]), *asked]


APPS: dict[str, tuple[type, list[Call]]] = {
    "recommender": (recommender.Recommender, list(recommender.requests(120, seed=3))),
    "key_values": (key_values.KeyValues, list(key_values.requests(150, keys=20, seed=4))),
    "word_count": (
        word_count.WordCount,
        words(),
    ),
    "k_means": (clusters.KMeans, k_means()),
    "regression": (regression.LogisticRegression, logistic()),
}


def streamed(program: Any, calls: Sequence[Call]) -> list[Any]:
    """Calls of one method that come one after the other are an epoch. A matrix is in no column: it comes directly."""
    given, epochs = [], dict.fromkeys((method.name for method in program.graph.methods), 0)
    for method, group in groupby(calls, key=lambda call: call[0]):
        rows = [dict(arguments) for _, arguments in group]
        if any(isinstance(value, mp.DenseMatrix) for row in rows for value in row.values()):
            given += [program.ask(method, **row) for row in rows]
            continue
        if rows[0]:
            given += [value for value, _ in in_pond(program, method, rows, epochs[method])]
        else:
            into = "out" if program.graph.method(method).returns else None
            turns = program.call(method, into=into)(pa.table({"turn": range(len(rows))}), epochs[method])
            given += turns["out"].to_pylist() if into else [None] * len(rows)
        epochs[method] += 1
    return given


@pytest.mark.parametrize("way", ["streamed", "direct"])
@pytest.mark.parametrize("name", APPS)
def test_an_application_in_a_pond(name: str, way: str) -> None:
    cls, calls = APPS[name]
    assert {method for method, _ in calls} == {method.name for method in graph(cls).methods}, "all of it"
    plain = mp.plain(cls, slices=SLICES)
    wanted = [each.value for each in plainly(plain, calls)]
    with LocalPond(LossyFiles(1), containers=3, slices=SLICES) as pond:
        program = pond.program(name, cls)
        given = streamed(program, calls) if way == "streamed" else [program.ask(m, **row) for m, row in calls]
        assert given == wanted
        assert entries(program) == state_of(plain)
        pond.validate()
