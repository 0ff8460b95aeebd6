"""Cycles that new edges close, at the scale of Nova, section 5.3: a graph of 3.5 M edges, thousands of new ones a second.

The graph is random, by a power law: a few vertices have thousands of edges, out and in, and lie on most cycles. Its edges
are spread over 48 hours. Then edges come at a fixed rate, as files by `readStream`: each goes into the graph, and is asked
which cycles of length 3, 4 and 5 it closes, within 48, 24 and 12 hours. Event time runs as much faster as edges come faster
than those of the graph did, so that as many expire as come, and every rate meets the same graph. An edge counts as answered
when the sink has written its cycles down. Latency is counted from when an edge was due, so that a stream that falls behind shows it. Before
anything is counted, and after each rate, answers of a sample of edges are compared with networkx.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import networkx as nx
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from rich.table import Table

import millpond as mp
from millpond.apps.cycles import HOUR_S, LIMIT, SPANS_H, START_S, detect, graph_of
from millpond.apps.spark_session import spark_session
from millpond.bench import report
from millpond.bench.cpu import KINDS, cpu_seconds_by_kind
from millpond.errors import MillpondError
from millpond.times import MICROS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Longs = npt.NDArray[np.int64]

VERTICES, EDGES = 1_000_000, 3_500_000
OUT_EXPONENT, IN_EXPONENT = 2.5, 2.3
RATES = (2_000, 6_000, 10_000, 14_000)
HIGHER_RATES = (20_000, 28_000)  # as far as they are sustained
SECONDS, WARM_S = 22, 8
QUICK_EDGES, QUICK_RATES, QUICK_SECONDS = 50_000, (500,), 4
FILES_A_SECOND = 4
LOADED_AT_ONCE = 500_000
SAMPLE = 150
"""Edges of each rate whose cycles networkx looks for."""
GROWTH_MAX = 0.05
"""Seconds that latency may grow in each second: beyond that a backlog grows."""
DRAIN_S = 60


class Edges(NamedTuple):
    """Additions, in order of time; times in microseconds."""

    times: Longs
    src: Longs
    dst: Longs

    def table(self) -> pa.Table:
        count = len(self.times)
        return pa.table(
            {
                "time": pa.array(self.times, pa.timestamp("us", "UTC")),
                "src": self.src,
                "dst": self.dst,
                "added": np.ones(count, bool),
            }
        )

    def part(self, start: int, stop: int) -> Edges:
        return Edges(*(column[start:stop] for column in self))


class Graph:
    """Random edges: a vertex has out- and in-degrees by power laws, and those with many of one have many of the other."""

    def __init__(self, vertices: int, seed: int = 1) -> None:
        self._rng = np.random.default_rng(seed)
        self._names = self._rng.permutation(vertices)
        rank = np.arange(vertices) + 10.0
        self._out, self._in = (
            np.cumsum(rank ** (-1 / (exponent - 1))) for exponent in (OUT_EXPONENT, IN_EXPONENT)
        )

    def edges(self, times: Longs) -> Edges:
        src, dst = (
            self._names[np.searchsorted(sums, sums[-1] * self._rng.random(len(times)), side="right")]
            for sums in (self._out, self._in)
        )
        others = np.where(src == self._names[0], self._names[1], self._names[0])
        return Edges(times, src, np.where(src == dst, others, dst))


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    edges, rates, seconds = (QUICK_EDGES, QUICK_RATES, QUICK_SECONDS) if quick else (EDGES, RATES, SECONDS)
    with (
        tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder,
        spark_session("bench cycles") as spark,
        mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
    ):
        stream = _Stream(spark, pond, folder, edges, progress)
        try:
            stream.run(rates[0], min(WARM_S, seconds))  # code is loaded; and every sampled answer was right
            results: list[dict[str, Any]] = []
            for rate in (*rates, *(() if quick else HIGHER_RATES)):
                if rate > rates[-1] and not results[-1]["sustained"]:
                    break
                progress(f"{rate:,} edges a second for {seconds} s")
                results.append(stream.run(rate, seconds))
        finally:
            stream.query.stop()
    return results


class _Epoch(NamedTuple):
    """When it began, when its updates were committed and its questions planned, when its answers were written."""

    number: int
    began: float
    updated: float
    ended: float


class _Stream:
    """One flow for all rates."""

    def __init__(
        self, spark: SparkSession, pond: mp.Pond, folder: str, edges: int, progress: Callable[[str], None]
    ) -> None:
        self._graph = Graph(max(1_000, VERTICES * edges // EDGES))
        self._edges_folder = os.path.join(folder, "edges")
        self._answers_folder = os.path.join(folder, "answers")
        os.makedirs(self._edges_folder)
        self._now = (START_S + max(SPANS_H.values()) * HOUR_S) * MICROS
        self._apart = max(SPANS_H.values()) * HOUR_S * MICROS // edges
        self._files = 0
        self._began = 0.0
        self._epochs: list[_Epoch] = []
        state = graph_of(pond)
        progress(f"a graph of {edges:,} edges of {max(SPANS_H.values())} hours")
        self._edges = self._graph.edges(self._now + np.arange(-edges, 0) * self._apart)
        _load(state, self._edges)
        arriving = (
            spark.readStream.schema("time timestamp, src long, dst long, added boolean")
            .option("maxFilesPerTrigger", 1_000)
            .parquet(self._edges_folder)
        )
        flow = pond.flow("cycles")
        detect(state, flow.source(arriving).map(self._begin), self._write, delay="0 seconds")
        state.finish("start")
        self.query = flow.start(checkpoint=os.path.join(folder, "checkpoint"))

    def _begin(self, edges: DataFrame) -> DataFrame:
        """A flow maps its source first."""
        self._began = time.monotonic()
        return edges

    def _write(self, answered: DataFrame, epoch: int) -> None:
        updated = time.monotonic()
        answered.select("time", "src", "dst", "paths").write.mode("overwrite").parquet(
            os.path.join(self._answers_folder, str(epoch))
        )
        self._epochs.append(_Epoch(epoch, self._began, updated, time.monotonic()))

    def run(self, rate: int, seconds: int) -> dict[str, Any]:
        """Edges at that rate for so long; the figures of their answers, once a sample of these is right."""
        edges = self._graph.edges(self._now + np.arange(rate * seconds) * self._apart)
        self._now += rate * seconds * self._apart
        self._epochs.clear()
        cpu = cpu_seconds_by_kind()
        due = time.monotonic() + 0.5
        sender = threading.Thread(target=self._send, args=(edges, rate, due))
        sender.start()
        answers = self._collect(len(edges.times), due + seconds + DRAIN_S)
        used = {kind: after - cpu[kind] for kind, after in cpu_seconds_by_kind().items()}
        sender.join()
        self._edges = Edges(*(np.concatenate(pair) for pair in zip(self._edges, edges, strict=True)))
        _check(self._edges, answers.table)
        per_edge = {f"cpu_us_{kind}": spent * MICROS / len(edges.times) for kind, spent in used.items()}
        return {**_figures(rate, edges, due, answers), **per_edge}

    def _send(self, edges: Edges, rate: int, due: float) -> None:
        """A file at a time, when its last edge is due; it is there whole or not at all."""
        for stop in range(rate // FILES_A_SECOND, len(edges.times) + 1, rate // FILES_A_SECOND):
            name = f"{self._files:09d}.parquet"
            hidden = os.path.join(self._edges_folder, f".{name}")
            pq.write_table(edges.part(stop - rate // FILES_A_SECOND, stop).table(), hidden)
            time.sleep(max(0.0, due + stop / rate - time.monotonic()))
            os.rename(hidden, os.path.join(self._edges_folder, name))
            self._files += 1

    def _collect(self, expected: int, deadline: float) -> _Answers:
        epochs: list[_Epoch] = []
        tables: list[pa.Table] = []
        while sum(table.num_rows for table in tables) < expected:
            if self.query.exception() is not None or time.monotonic() > deadline:
                raise MillpondError(
                    f"{expected:,} edges were sent and {sum(t.num_rows for t in tables):,} answered",
                    hint="look at the query's error",
                ) from self.query.exception()
            time.sleep(0.05)
            while len(epochs) < len(self._epochs):
                epoch = self._epochs[len(epochs)]
                epochs.append(epoch)
                tables.append(pq.read_table(Path(self._answers_folder) / str(epoch.number)))
        return _Answers(epochs, tables)


class _Answers(NamedTuple):
    epochs: list[_Epoch]
    tables: list[pa.Table]

    @property
    def table(self) -> pa.Table:
        return pa.concat_tables(self.tables)


def _load(state: mp.State, edges: Edges) -> None:
    start = state.update(key=["vertex", "outgoing"], at="time", value=["neighbour", "added"], name="start")
    for epoch, first in enumerate(range(0, len(edges.times), LOADED_AT_ONCE)):
        part = edges.part(first, first + LOADED_AT_ONCE)
        outgoing = np.repeat([True, False], len(part.times))
        start(
            pa.table(
                {
                    "time": pa.array(np.tile(part.times, 2), pa.timestamp("us", "UTC")),
                    "vertex": np.concatenate((part.src, part.dst)),
                    "outgoing": outgoing,
                    "neighbour": np.concatenate((part.dst, part.src)),
                    "added": np.ones(len(outgoing), bool),
                }
            ),
            epoch,
        )


def _figures(rate: int, edges: Edges, due: float, answers: _Answers) -> dict[str, Any]:
    """Latency of each edge, and how it is made up, in milliseconds."""
    parts = []
    for epoch, table in zip(answers.epochs, answers.tables, strict=True):
        times = table["time"].cast(pa.int64()).to_numpy()
        arrived = due + np.searchsorted(edges.times, times) / rate
        phases = (epoch.began - arrived, epoch.updated - epoch.began, epoch.ended - epoch.updated)
        parts.append(np.stack([arrived, *np.broadcast_arrays(*phases)]))
    arrived, waited, updated, walked = np.concatenate(parts, axis=1)
    latency = waited + updated + walked
    growth = float(np.polyfit(arrived, latency, 1)[0])
    lengths = dict.fromkeys(SPANS_H, 0)
    for table in answers.tables:
        sizes, counts = np.unique(
            np.diff(table["paths"].combine_chunks().flatten().offsets.to_numpy()), return_counts=True
        )
        for vertices, count in zip(sizes.tolist(), counts.tolist(), strict=True):
            lengths[vertices] += count  # with the new edge, a cycle of as many edges
    seconds = answers.epochs[-1].ended - due
    return {
        "system": f"millpond-cycles, {rate:,}/s",
        "rate": rate,
        "rows_per_s": len(edges.times) / seconds,
        "threads": os.cpu_count() or 1,
        "sustained": growth <= GROWTH_MAX,
        "latency_growth_s_per_s": growth,
        "epochs": len(answers.epochs),
        **{
            f"{name}_p{part}_ms": float(np.percentile(values, part)) * 1e3
            for name, values in (
                ("latency", latency), ("wait", waited), ("update", updated), ("walk", walked)
            )
            for part in (50, 99)
        },
        **{f"cycles_{length}": count for length, count in lengths.items()},
    }  # fmt: skip


# The check


def _check(edges: Edges, answers: pa.Table) -> None:
    """Raises unless the paths of sampled edges are exactly those that networkx finds in the same windows."""
    by_src, by_dst = (np.argsort(column, kind="stable") for column in (edges.src, edges.dst))
    rows = np.random.default_rng(1).choice(answers.num_rows, min(SAMPLE, answers.num_rows), replace=False)
    for row in answers.take(np.sort(rows)).to_pylist():
        until = int(row["time"].timestamp()) * MICROS + row["time"].microsecond - 1
        expected = set()
        for length, hours in SPANS_H.items():
            low = until - hours * HOUR_S * MICROS
            expected |= _paths(edges, by_src, by_dst, row["dst"], row["src"], length - 1, low, until)
        answered = [tuple(path) for path in row["paths"]]
        if len(answered) >= LIMIT or len(answered) != len(set(answered)) or set(answered) != expected:
            raise MillpondError(
                f"the edge {row['src']} -> {row['dst']} closes {len(expected)} cycles by networkx, and {len(answered)} here"
            )


def _paths(
    edges: Edges, by_src: Longs, by_dst: Longs, start: int, target: int, hops: int, low: int, high: int
) -> set[tuple[int, ...]]:
    """By networkx, in the part of the graph that such paths can use: two edges from the start, or two to the target."""

    def near(column: Longs, order: Longs, vertices: Longs) -> Longs:
        begin, end = (np.searchsorted(column, vertices, side, sorter=order) for side in ("left", "right"))
        ranges = [order[b:e] for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
        positions = np.concatenate([np.empty(0, np.int64), *ranges])
        chosen: Longs = positions[(edges.times[positions] > low) & (edges.times[positions] <= high)]
        return chosen

    first, last = near(edges.src, by_src, np.array([start])), near(edges.dst, by_dst, np.array([target]))
    second = near(edges.src, by_src, np.unique(edges.dst[first]))
    before = near(edges.dst, by_dst, np.unique(edges.src[last]))
    # What is beyond two edges from the start must be the beginning of one of the last two.
    near_end = np.unique(edges.src[np.concatenate((last, before))])
    used = np.concatenate((first, second[np.isin(edges.dst[second], near_end)], last, before))
    graph = nx.DiGraph(zip(edges.src[used].tolist(), edges.dst[used].tolist(), strict=True))
    if start == target or start not in graph or target not in graph:
        return set()
    paths = nx.all_simple_paths(graph, start, target, cutoff=hops)
    return {tuple(path) for path in paths if len(path) == hops + 1}


# The report


def print_table(name: str, results: list[dict[str, Any]]) -> None:
    headings = {
        "latency": "arrival to\nanswer, ms",
        "wait": "of it: until its\nbatch begins",
        "update": "update and\nplanning",
        "walk": "walk and\nwriting",
    }
    table = Table(title=f"millpond bench {name}", title_justify="left")
    table.add_column("edges/s", justify="right")
    table.add_column("sustained")
    for heading in (
        *headings.values(),
        "CPU µs an edge: Spark's Java,\nits workers, containers",
        "cycles of\nlength 3",
        "4",
        "5",
    ):
        table.add_column(heading, justify="right")
    for result in results:
        spans = [f"{result[f'{key}_p50_ms']:,.0f}, {result[f'{key}_p99_ms']:,.0f}" for key in headings]
        spans.append(", ".join(f"{result[f'cpu_us_{kind}']:.0f}" for kind in KINDS.values()))
        counts = [f"{result[f'cycles_{length}']:,}" for length in SPANS_H]
        table.add_row(f"{result['rate']:,}", "yes" if result["sustained"] else "no", *spans, *counts)
    console = report.wide_console()
    console.print(table)
    best = max((result["rate"] for result in results if result["sustained"]), default=0)
    console.print(f"p50, p99. The highest rate sustained: {best:,} edges a second", markup=False)


plot = report.plot
