"""The edges are what the demonstration says, networkx is asked rightly, and the flow finds the same cycles."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond as mp

pytest.importorskip("networkx")
import networkx as nx

from millpond.apps import cycles
from millpond.apps.cycles import (
    HOUR_S,
    SPANS_H,
    START_S,
    Comparison,
    Detection,
    Edge,
    compare,
    edge_stream,
    reference,
)
from millpond.errors import BadOption
from millpond.times import MICROS


def added(hour: float, src: int, dst: int) -> Edge:
    return Edge(int(hour * HOUR_S), src, dst, True)


def deleted(hour: float, src: int, dst: int) -> Edge:
    return Edge(int(hour * HOUR_S), src, dst, False)


def ring(length: int, hours: float) -> list[Edge]:
    """0 -> 1 -> ... -> 0; all but the last edge at hour 0, the last so many hours later."""
    return [*(added(0, n, n + 1) for n in range(length - 1)), added(hours, length - 1, 0)]


@pytest.mark.parametrize(("length", "hours"), SPANS_H.items())
def test_a_ring_is_found_when_its_last_edge_comes_within_the_span(length: int, hours: int) -> None:
    closing = (hours * HOUR_S, length - 1, *range(length - 1))
    assert reference(ring(length, hours)) == {closing}
    assert reference(ring(length, hours + 1 / HOUR_S)) == set()
    assert reference(ring(length, 0)) == set(), "an edge does not see those of its own second"


def test_a_deleted_edge_closes_nothing_until_it_is_added_again() -> None:
    triangle = [added(1, 0, 1), added(2, 1, 2)]
    assert reference([*triangle, deleted(3, 0, 1), added(4, 2, 0)]) == set()
    assert reference([*triangle, deleted(4, 0, 1), added(4, 2, 0)]) == {(4 * HOUR_S, 2, 0, 1)}
    again = [*triangle, deleted(3, 0, 1), added(4, 2, 0), added(5, 0, 1)]
    assert reference(again) == {(5 * HOUR_S, 0, 1, 2)}
    assert reference(reversed(again)) == reference(again), "the order of arrival does not matter"


def test_an_edge_added_again_counts_from_then_on() -> None:
    edges = [added(0, 0, 1), added(30, 0, 1), added(30, 1, 2), added(60, 2, 0)]
    assert reference(edges) == {(60 * HOUR_S, 2, 0, 1)}


def test_two_paths_and_two_lengths() -> None:
    edges = [added(1, 0, 1), added(2, 1, 2), added(3, 1, 3), added(4, 3, 0), added(5, 3, 2), added(6, 2, 0)]
    found = {cycle[1:] for cycle in reference(edges)}
    assert found == {(3, 0, 1), (2, 0, 1), (2, 0, 1, 3)}


def test_the_whole_graph_at_once_has_the_same_cycles() -> None:
    """Without deletions, within the shortest span: each cycle of the graph is closed once, by its newest edge."""
    edges = [edge._replace(time=second) for second, edge in enumerate(edge_stream(150, 1, 20)) if edge.added]
    edges = list({(edge.src, edge.dst): edge for edge in edges}.values())
    graph = nx.DiGraph([(edge.src, edge.dst) for edge in edges])
    expected = Counter(
        frozenset(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        for cycle in nx.simple_cycles(graph, length_bound=max(SPANS_H))
        if len(cycle) in SPANS_H
    )
    found = Counter(
        frozenset(zip(cycle[1:], [*cycle[2:], cycle[1]], strict=True)) for cycle in reference(edges)
    )
    assert found == expected
    assert {len(cycle) for cycle in found} == set(SPANS_H)


def test_the_stream_is_out_of_order_within_the_delay_and_has_cycles_of_every_length() -> None:
    edges = edge_stream(4_000, 48, 1_000)
    assert edges == edge_stream(4_000, 48, 1_000)
    assert 3_900 < len(edges) <= 4_000
    assert len({edge[:3] for edge in edges}) == len(edges)
    assert all(0 <= vertex < 1_000 for edge in edges for vertex in edge[1:3])
    newest, behind = 0, 0
    for edge in edges:
        assert edge.time >= newest - cycles.DISORDER_H * HOUR_S
        behind += edge.time < newest
        newest = max(newest, edge.time)
    assert behind > len(edges) / 2
    gone = sum(not edge.added for edge in edges)
    assert 0.03 < gone / len(edges) < 0.05
    lengths = Counter(len(cycle) - 1 for cycle in reference(edges))
    planted = {length: int(4_000 * cycles.PLANTED / 3 / length) for length in SPANS_H}
    assert all(lengths[length] > 0.75 * planted[length] for length in SPANS_H), (lengths, planted)


def test_deletions_take_cycles_away() -> None:
    edges = edge_stream(1_200, 48, 300)
    assert reference(edges) < reference(edge for edge in edges if edge.added)


def test_the_comparison_sees_what_is_wrong_missing_and_found_twice() -> None:
    edges = ring(3, 1)
    [right] = reference(edges)
    assert compare([right], edges) == Comparison(Counter({3: 1}), wrong=0, missing=0)
    assert compare([], edges) == Comparison(Counter(), wrong=0, missing=1)
    assert compare([right, right], edges) == Comparison(Counter({3: 2}), wrong=1, missing=0)
    assert compare([(0, 1, 2, 0, 5)], edges) == Comparison(Counter({4: 1}), wrong=1, missing=1)


@pytest.mark.parametrize("option", ["seconds", "rate", "keys"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(BadOption, match=f"--{option} 0"):
        cycles.run(**{option: 0})


def test_too_dense_a_graph_is_refused() -> None:
    with pytest.raises(BadOption, match="--keys 99 is not within 100") as caught:
        cycles.run(rate=100, keys=99)
    assert "as many --keys as --rate" in caught.value.hint


def test_the_flow_finds_what_networkx_finds_and_f_moves(spark: SparkSession, tmp_path: Path) -> None:
    edges = edge_stream(1_200, 120, 250)
    progress = []
    with mp.open(tmp_path / "pond", spark=spark) as pond:
        detection = Detection(spark, pond, str(tmp_path))
        try:
            for part in (edges[:600], edges[600:]):
                detection.send(part)
                detection.query.processAllAvailable()
                progress.append(detection.graph.progress())
            detection.finish()
            progress.append(detection.graph.progress())
        finally:
            detection.query.stop()
    found = compare(cycles.cycles_in(str(tmp_path)), edges)
    assert (found.wrong, found.missing) == (0, 0)
    assert all(found.lengths[length] > 10 for length in SPANS_H)
    # The last epoch may run again: its rows count from the next one on.
    first, second, last = (each.fetch for each in progress)
    assert first == -math.inf
    assert START_S * MICROS < second <= last


@pytest.mark.long
def test_it_runs_to_its_end(
    spark: SparkSession,  # it takes the session that there is, and stops it at its end
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cycles.run(seconds=2, rate=150, keys=150)
    printed = capsys.readouterr().out
    assert ", 0 wrong, 0 missing (" in printed.splitlines()[-1]
    assert "U +inf" in printed
    assert not list(tmp_path.glob("millpond-cycles-*"))
