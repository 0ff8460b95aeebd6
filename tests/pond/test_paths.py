"""Paths by `mp.paths`: whole histories against plain Python, which looks at every edge; limits and bad input by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millpond as mp
from millpond.code.rules import FetchRule
from millpond.errors import (
    BadDuration,
    BadOption,
    BadRule,
    BelowFetchProgress,
    MessageTooLarge,
    MillpondError,
    NullKey,
    WrongColumn,
)
from millpond.ops import walking
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

VALUE = "neighbour long, added boolean"


@pytest.fixture
def pond() -> Iterator[LocalPond]:
    with LocalPond(LossyFiles(), containers=2, slices=4) as opened:
        yield opened
        opened.validate()


class Edge(NamedTuple):
    src: Any
    dst: Any
    time: Any
    added: bool = True


class Row(NamedTuple):
    start: Any
    target: Any
    at: Any
    low: Any = None


def graph_of(pond: mp.Pond, type_: str = "long", compact: Any = None, name: str = "graph") -> mp.State:
    return pond.state(
        name,
        key=f"vertex {type_}, outgoing boolean",
        value=f"neighbour {type_}, added boolean",
        update=mp.edges(),
        compact=compact,
    )


def send(state: mp.State, edges: list[Edge], epoch: int = 0, delay: Any = 0, vertex: Any = None) -> None:
    """Each edge at both its ends."""
    vertex = vertex or pa.int64()
    ends = [(e.src, True, e.dst, e) for e in edges] + [(e.dst, False, e.src, e) for e in edges]
    rows = pa.table(
        {
            "vertex": pa.array([end[0] for end in ends], vertex),
            "outgoing": pa.array([end[1] for end in ends], pa.bool_()),
            "neighbour": pa.array([end[2] for end in ends], vertex),
            "time": pa.array([end[3].time for end in ends], None if ends else pa.int64()),
            "added": pa.array([end[3].added for end in ends], pa.bool_()),
        }
    )
    columns = {"key": ["vertex", "outgoing"], "value": ["neighbour", "added"]}
    state.update(**columns, at="time", delay=delay, name="edges")(rows, epoch)


def ask(state: mp.State, rows: list[Row], rule: FetchRule, vertex: Any = None) -> list[list[tuple[Any, ...]]]:
    vertex = vertex or pa.int64()
    asked = pa.table(
        {
            "start": pa.array([row.start for row in rows], vertex),
            "target": pa.array([row.target for row in rows], vertex),
            "at": [row.at for row in rows],
            "low": [row.at if row.low is None else row.low for row in rows],
        }
    )
    when: dict[str, Any] = {"at": "at"} if rows[0].low is None else {"between": ("low", "at")}
    answers = state.fetch(key="start", **when, rule=rule, into="p").now(asked)["p"]
    assert answers.type == pa.list_(pa.list_(vertex))
    return [[tuple(path) for path in paths] for paths in answers.to_pylist()]


def expected(edges: list[Edge], row: Row, spans: dict[int, Any]) -> set[tuple[Any, ...]]:
    """Every sequence of vertices that is a path, by what each edge's last change up to the time says."""
    last: dict[tuple[Any, Any], Edge] = {}
    for edge in sorted(edges, key=lambda edge: edge.time):  # stable: the later of one time counts
        if edge.time <= row.at:
            last[edge.src, edge.dst] = edge
    vertices = {end for edge in edges for end in edge[:2]}
    paths = set()
    for hops, span in spans.items():
        there = {
            ends
            for ends, edge in last.items()
            if edge.added
            and (span is None or edge.time > row.at - span)
            and (row.low is None or edge.time > row.low)
        }
        for between in itertools.permutations(vertices - {row.start, row.target}, hops - 1):
            path = (row.start, *between, row.target)
            if row.start != row.target and there.issuperset(itertools.pairwise(path)):
                paths.add(path)
    return paths


def same(
    answers: list[list[tuple[Any, ...]]], edges: list[Edge], rows: list[Row], spans: dict[int, Any]
) -> None:
    for paths, row in zip(answers, rows, strict=True):
        assert len(paths) == len(set(paths))
        assert set(paths) == expected(edges, row, spans), row
        assert [len(path) for path in paths] == sorted(len(path) for path in paths)


VERTICES = st.integers(0, 5)
TIMES = st.integers(0, 30)
EDGES = st.builds(Edge, VERTICES, VERTICES, TIMES, st.sampled_from([True, True, True, False]))
HOPS = st.sets(st.integers(1, 5), min_size=1)


@settings(max_examples=60)
@given(
    edges=st.lists(EDGES, min_size=5, max_size=60),
    asked=st.lists(st.builds(Row, VERTICES, VERTICES, TIMES, st.none()), min_size=1, max_size=12),
    low=st.none() | st.integers(-1, 30),
    hops=HOPS,
    spans=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    compact=st.sampled_from([mp.net_edges(), mp.keep_all(), mp.ttl(25)]),
    fetched=st.integers(0, 31),
)
def test_any_history_by_any_way(
    edges: list[Edge],
    asked: list[Row],
    low: int | None,
    hops: set[int],
    spans: list[int],
    compact: Any,
    fetched: int,
) -> None:
    """Edges out of order in two epochs, by two containers; before and after compaction."""
    rows = [row._replace(low=low) for row in asked]
    within = dict(zip(sorted(hops), spans, strict=False))
    lives = 25 if compact.name == "ttl" else None
    every = dict.fromkeys(hops, lives)
    limited = {n: span if lives is None else min(span, lives) for n, span in within.items()}
    with LocalPond(LossyFiles(), containers=2, slices=4) as pond:
        state = graph_of(pond, compact=compact)
        half = len(edges) // 2
        send(state, edges[:half], 0, delay=40)
        send(state, edges[half:], 1, delay=40)
        state.finish("edges")
        same(ask(state, rows, mp.paths(to="target", hops=sorted(hops))), edges, rows, every)
        same(ask(state, rows, mp.paths(to="target", hops=within)), edges, rows, limited)
        state.report("reader", fetch=fetched)
        pond.maintain()
        later = [row for row in rows if row.at >= fetched]
        if later:
            same(ask(state, later, mp.paths(to="target", hops=within)), edges, later, limited)
        if len(later) < len(rows):
            with pytest.raises(BelowFetchProgress):
                ask(state, rows, mp.paths(to="target", hops=within))
        pond.validate()


def test_vertices_are_strings_and_times_are_timestamps(pond: LocalPond) -> None:
    def hour(n: float) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=n)

    edges = [
        Edge("a", "b", hour(0)),
        Edge("b", "ç", hour(30)),
        Edge("ç", "d", hour(40)),
        Edge("b", "d", hour(47)),
    ]
    rows = [Row("a", "d", hour(47)), Row("b", "d", hour(48)), Row("x", "d", hour(48))]
    state = graph_of(pond, "string")
    send(state, edges, vertex=pa.string())
    state.finish("edges")
    rule = mp.paths(to="target", hops={3: "2 days", 2: timedelta(hours=24)})
    assert ask(state, rows, rule, pa.string()) == [[("a", "b", "ç", "d")], [("b", "ç", "d")], []]


def hub(spokes: int) -> list[Edge]:
    """0 leads to each of the spokes, and each of them to 1."""
    return [edge for n in range(2, spokes + 2) for edge in (Edge(0, n, n), Edge(n, 1, n))]


def test_of_too_many_paths_the_oldest_are_taken_shortest_first(pond: LocalPond) -> None:
    edges = [*hub(3_000), Edge(0, 1, 9_000), Edge(2, 9_999, 9_000), Edge(9_999, 1, 9_000)]
    state = graph_of(pond)
    send(state, edges)
    state.finish("edges")
    row = [Row(0, 1, 10_000)]
    [paths] = ask(state, row, mp.paths(to="target", hops=[1, 2, 3], limit=100))
    assert paths == [(0, 1), *((0, n, 1) for n in range(2, 101))]
    [paths] = ask(state, row, mp.paths(to="target", hops=[1, 2, 3], limit=10_000))
    assert len(paths) == 3_002
    assert paths[-1] == (0, 2, 9_999, 1)
    [paths] = ask(state, row, mp.paths(to="target", hops=[3, 2]))
    assert len(paths) == 1_000, "unless another limit is named"


def test_many_rows_go_in_parts(pond: LocalPond, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = hub(40)
    state = graph_of(pond)
    send(state, edges)
    state.finish("edges")
    rows = [Row(0, 1, n) for n in range(50)]
    rule = mp.paths(to="target", hops=[2], limit=60)
    whole = ask(state, rows, rule)
    assert [len(paths) for paths in whole] == [max(0, min(n - 1, 40)) for n in range(50)]
    sizes = {"PATHS_AT_ONCE": 64, "VERTICES_AT_ONCE": 1, "EDGES_MAX": 90, "ROWS_A_THREAD": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(walking, name, value)
        assert ask(state, rows, rule) == whole
    monkeypatch.setattr(walking, "EDGES_MAX", 79)
    with pytest.raises(MessageTooLarge, match="one row lead by more than 79 edges") as caught:
        ask(state, rows[-2:], rule)
    assert "shorter spans" in caught.value.hint


def test_rows_wait_for_u_and_are_answered_as_of_their_time(pond: LocalPond) -> None:
    state = graph_of(pond)
    answered: list[dict[str, Any]] = []
    fetch = state.fetch(key="s", at="t", rule=mp.paths(to="e", hops=2), into="p", name="paths", delay=5)
    operator = fetch.to(lambda table, epoch: answered.extend(table.to_pylist()))
    send(state, [Edge(1, 2, 3), Edge(2, 3, 6)], 0, delay=2)
    operator(pa.table({"s": [1, 1, 2], "e": [3, 3, 1], "t": [6, 3, 3]}), 0)
    assert [(row["t"], row["p"]) for row in answered] == [(3, []), (3, [])]
    assert operator.pending().rows == 1
    send(state, [Edge(2, 3, 5, False), Edge(2, 3, 9)], 1, delay=2)
    operator(pa.table({"s": [1], "e": [3], "t": [4]}), 1)
    assert sorted((row["t"], row["p"]) for row in answered[2:]) == [(4, []), (6, [[1, 2, 3]])]
    assert state.progress().fetch == 1


def test_nothing_is_asked_and_nothing_is_there(pond: LocalPond) -> None:
    state = graph_of(pond)
    send(state, [Edge(1, 1, 1), Edge(1, 2, 1), Edge(2, 1, 1)])
    state.finish("edges")
    rule = mp.paths(to="target", hops=[1, 2, 3, 4, 5])
    assert ask(state, [Row(1, 1, 9), Row(7, 8, 9), Row(1, 2, 0), Row(1, 2, 9)], rule) == [
        [],
        [],
        [],
        [(1, 2)],
    ]
    longs = pa.array([], pa.int64())
    none = pa.table({"start": longs, "target": longs, "at": longs})
    assert state.fetch(key="start", at="at", rule=rule).now(none)["paths"].to_pylist() == []


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no hops": ({"hops": []}, "how many edges"),
    "no hop at all": ({"hops": 0}, "how many edges"),
    "too many hops": ({"hops": 6}, "how many edges"),
    "a truth": ({"hops": True}, "how many edges"),
    "text": ({"hops": "3"}, "how many edges"),
    "a span of nothing": ({"hops": {2: "0 hours"}}, "span of zero"),
    "spans of two kinds": ({"hops": {2: "1 hour", 3: 5}}, "durations and integers"),
    "no column": ({"hops": 2, "to": 5}, "name of a column"),
    "no limit": ({"hops": 2, "limit": 0}, "no number of paths"),
    "a limit beyond all": ({"hops": 2, "limit": 10**7}, "no number of paths"),
}


@pytest.mark.parametrize("case", BAD)
def test_rules_that_cannot_be(case: str) -> None:
    options, named = BAD[case]
    with pytest.raises(BadRule, match=named) as caught:
        mp.paths(**{"to": "target", **options})
    assert caught.value.hint


STATES: dict[str, dict[str, Any]] = {
    "values": {"key": "vertex long, outgoing boolean", "value": VALUE},
    "edges at one end": {"key": "long", "value": VALUE, "update": mp.edges()},
    "another second key": {"key": "v long, w long", "value": VALUE, "update": mp.edges()},
    "neighbours of another type": {"key": "v int, o boolean", "value": VALUE, "update": mp.edges()},
}


@pytest.mark.parametrize("case", STATES)
def test_states_that_hold_no_such_edges(pond: LocalPond, case: str) -> None:
    state = pond.state("s", **STATES[case])
    with pytest.raises(BadRule, match="paths") as caught:
        state.fetch(key="k", at="t", rule=mp.paths(to="e", hops=2))
    assert "outgoing boolean" in caught.value.hint


def test_rows_that_do_not_fit(pond: LocalPond) -> None:
    state = graph_of(pond)
    send(state, [Edge(1, 2, 1)])
    state.finish("edges")
    with pytest.raises(BadOption, match="names 2 columns"):
        state.fetch(key=["a", "b"], at="t", rule=mp.paths(to="e", hops=2))
    fetch = state.fetch(key="s", at="t", rule=mp.paths(to="e", hops={2: "1 hour"}))
    cases: list[tuple[type[MillpondError], dict[str, list[Any]]]] = [
        (WrongColumn, {"s": [1], "t": [1]}),
        (NullKey, {"s": [1], "e": [None], "t": [1]}),
        (BadDuration, {"s": [1], "e": [2], "t": [1]}),
    ]
    for kind, columns in cases:
        with pytest.raises(kind) as caught:
            fetch.now(pa.table(columns))
        assert caught.value.hint
