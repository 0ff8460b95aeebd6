"""`millpond bench cycles` measures what it says, and refuses answers that networkx does not give."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

pytest.importorskip("networkx")

from millpond.apps.cycles import HOUR_S, SPANS_H
from millpond.bench import cycles
from millpond.bench.cycles import Edges, Graph
from millpond.errors import MillpondError
from millpond.times import MICROS

PHASES = ("wait", "update", "walk")


def answers(edges: Edges, row: int, paths: list[list[int]]) -> pa.Table:
    return (
        edges.part(row, row + 1)
        .table()
        .append_column("paths", pa.array([paths], pa.list_(pa.list_(pa.int64()))))
    )


def test_the_check_sees_what_is_missing_wrong_old_and_there_twice() -> None:
    hours = np.array([0, 50, 60, 70, 71, 71.5]) * HOUR_S * MICROS
    edges = Edges(hours.astype(np.int64), np.array([0, 0, 1, 1, 3, 2]), np.array([1, 1, 2, 3, 2, 0]))
    paths = [[0, 1, 2], [0, 1, 3, 2]]
    cycles._check(edges, answers(edges, 5, paths))
    for wrong in ([], paths[:1], [*paths, [0, 3, 2]], [*paths, paths[0]]):
        with pytest.raises(MillpondError, match="closes 2 cycles by networkx"):
            cycles._check(edges, answers(edges, 5, wrong))
    late = edges._replace(times=edges.times + np.array([0, 0, 0, 0, 0, 30 * HOUR_S * MICROS]))
    with pytest.raises(MillpondError, match="closes 0 cycles"):
        cycles._check(late, answers(late, 5, paths))


def test_the_graph_has_a_few_vertices_with_many_edges() -> None:
    edges = Graph(10_000).edges(np.arange(35_000))
    assert not (edges.src == edges.dst).any()
    for ends in (edges.src, edges.dst):
        degrees = np.sort(np.bincount(ends, minlength=10_000))[::-1]
        assert degrees[0] > 30 * degrees.mean()
        assert np.count_nonzero(degrees) > 4_000


@pytest.mark.long
def test_every_rate_is_measured(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles, "QUICK_EDGES", 10_000)
    monkeypatch.setattr(cycles, "QUICK_RATES", (200,))
    lines: list[str] = []
    [result] = cycles.run(True, lines.append)
    assert len(lines) == 2
    assert result["rate"] == 200
    assert sum(result[f"cycles_{length}"] for length in SPANS_H) > 0
    assert 0 < result["latency_p50_ms"] <= result["latency_p99_ms"]
    assert all(0 < result[f"{phase}_p50_ms"] <= result[f"{phase}_p99_ms"] for phase in PHASES)
    cycles.print_table("cycles", [result])
