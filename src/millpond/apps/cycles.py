"""Cycle detection in a graph that changes (Nova, section 5.3): which cycles does a new edge close?

One stream adds edges and deletes them, out of order. A State holds the neighbours of every vertex: where its edges
lead, and where they come from. An edge u -> v closes a cycle with every path from v back to u in the graph as it was
just before: of length 3 with edges of the last 48 hours, of 4 with those of 24, of 5 with those of 12. The updates and
the search for paths are one flow: one streaming query with one checkpoint. At the end every cycle is compared with what
networkx finds in the same windows.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import networkx as nx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption
from millpond.times import MICROS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SPANS_H = {3: 48, 4: 24, 5: 12}
"""The length of a cycle, and how many hours before its last edge the others may be."""

SECONDS, RATE, KEYS = 20, 1_000, 10_000
HOURS_A_SECOND = 8  # of event time
LINE_EVERY_S = 2
START_S = 1_767_225_600  # event time begins at 2026-01-01T00:00:00Z
HOUR_S = 3_600
DISORDER_H = 2
PLANTED, DELETED = 0.2, 0.04  # shares of the edges
LIMIT = 100_000  # cycles that one edge closes

SCHEMA = pa.schema(
    [("time", pa.timestamp("s", "UTC")), ("src", pa.int64()), ("dst", pa.int64()), ("added", pa.bool_())]
)


def run(seconds: int = SECONDS, rate: int = RATE, keys: int = KEYS) -> bool:
    """Edges at `rate` a second for so long, among `keys` vertices; True if the cycles are those of networkx."""
    for option, value, least, most in (
        ("seconds", seconds, 1, 3_600),
        ("rate", rate, 1, 100_000),
        ("keys", keys, max(3, rate), 1 << 40),  # among fewer there are more cycles than one can count
    ):
        if not least <= value <= most:
            raise BadOption(
                f"--{option} {value} is not within {least:,} and {most:,}",
                hint="give at least as many --keys as --rate" if option == "keys" else "",
                option=f"--{option}",
            )
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    edges = edge_stream(seconds * rate, seconds * HOURS_A_SECOND, keys)
    with tempfile.TemporaryDirectory(prefix="millpond-cycles-") as folder:
        out.print("starting Spark and a pond (the first time, kernels are compiled) ...")
        with (
            spark_session("cycles", compiled=False) as spark,
            mp.open(os.path.join(folder, "pond"), spark=spark) as pond,
        ):
            detection = Detection(spark, pond, folder)
            try:
                detection.send(edges[:rate])
                detection.query.processAllAvailable()  # the first epoch takes longer: it loads code
                for second in range(1, seconds):
                    detection.send(edges[second * rate : (second + 1) * rate])
                    detection.wait(1)
                    if second % LINE_EVERY_S == 0:
                        out.print(f"  {detection.line()}")
                out.print("  all edges are sent")
                while not detection.is_up_to_date():
                    detection.wait(LINE_EVERY_S)
                    out.print(f"  {detection.line()}")
                detection.finish()
                out.print(f"  {detection.line()}")
            finally:
                detection.query.stop()
        out.print("comparing every cycle with networkx on the same windows ...")
        found = compare(cycles_in(folder), edges)
    out.print(
        f"{len(edges):,} edges, {found.lengths.total():,} cycles ({_by_length(found.lengths)}),"
        f" [bold]{found.wrong} wrong, {found.missing} missing[/bold] ({time.perf_counter() - began:.0f} s)"
    )
    return found.wrong == found.missing == 0


# The edges


class Edge(NamedTuple):
    """`src -> dst` is added to the graph, or deleted from it, at `time`, in seconds."""

    time: int
    src: int
    dst: int
    added: bool


def edge_stream(edges: int, hours: int, keys: int, seed: int = 1) -> list[Edge]:
    """About so many edges, some hours of them, in the order of their arrival.

    A few vertices have many edges. A fifth of all are planted as rings within the span of their length, and some are
    deleted within half a day. Edges come up to `DISORDER_H` late. No edge changes twice in the same second.
    """
    rng = np.random.default_rng(seed)
    end = hours * HOUR_S
    deleted = int(edges * DELETED)
    rings = {length: int(edges * PLANTED / len(SPANS_H) / length) for length in SPANS_H}
    strays = edges - deleted - sum(length * count for length, count in rings.items())
    # With squares of random numbers a hundredth of the vertices have a tenth of the edges.
    src, dst = (keys * rng.random((2, strays)) ** 2).astype(np.int64)
    times = rng.integers(0, end, strays)
    for length, count in rings.items():
        ring = rng.integers(0, keys, (count, length))
        begin = rng.integers(0, end, (count, 1))
        src, dst = np.append(src, ring), np.append(dst, np.roll(ring, -1, axis=1))
        times = np.append(times, begin + rng.integers(0, SPANS_H[length] * HOUR_S, ring.shape))
    dst = np.where(src == dst, (dst + 1) % keys, dst)
    gone = rng.choice(len(times), deleted, replace=False)
    src, dst = np.append(src, src[gone]), np.append(dst, dst[gone])
    times = START_S + np.append(times, times[gone] + rng.integers(1, 12 * HOUR_S, deleted))
    added = np.arange(edges) < edges - deleted
    arrival = np.argsort(times + rng.integers(0, DISORDER_H * HOUR_S, edges), kind="stable")
    rows = zip(*(column[arrival].tolist() for column in (times, src, dst, added)), strict=True)
    once = {(time, src, dst): added for time, src, dst, added in rows}
    return [Edge(*edge, added) for edge, added in once.items()]


# The flow


def graph_of(pond: mp.Pond, name: str = "graph") -> mp.State:
    """Each edge at both its ends, for as long as a cycle may ask for it."""
    return pond.state(
        name,
        key="vertex long, outgoing boolean",
        value="neighbour long, added boolean",
        update=mp.edges(),
        compact=mp.ttl(f"{max(SPANS_H.values())} hours"),
    )


def detect(
    graph: mp.State, arriving: mp.Stream, sink: Callable[[DataFrame, int], object], delay: str
) -> None:
    """Each edge goes into the graph, and is asked which paths lead from its end back to its beginning.

    `sink(frame, epoch)` gets the edges with their `paths`. Edges may come late by `delay`.
    """
    arriving.map(at_both_ends).into(
        graph.update(
            key=["vertex", "outgoing"], at="time", value=["neighbour", "added"], delay=delay, name="edges"
        )
    )
    hops = {length - 1: f"{hours} hours" for length, hours in SPANS_H.items()}
    fetch = graph.fetch(
        key="dst",
        at="until",
        rule=mp.paths(to="src", hops=hops, limit=LIMIT),
        into="paths",
        delay=delay,
        name="cycles",
    )
    arriving.map(additions).ask(fetch).to(sink)


def at_both_ends(edges: DataFrame) -> DataFrame:
    ends = "stack(2, src, true, dst, dst, false, src) AS (vertex, outgoing, neighbour)"
    return edges.selectExpr("time", "added", ends)


def additions(edges: DataFrame) -> DataFrame:
    """New edges ask for the graph as it was just before; all in one task, which asks about each vertex once."""
    asking = edges.where("added").selectExpr("time", "src", "dst", "time - INTERVAL 1 MICROSECOND AS until")
    return asking.coalesce(1)


def cycles_of(answered: DataFrame) -> DataFrame:
    """The time of the edge that closed it and the vertices of each cycle, that edge's two first."""
    return answered.selectExpr("time", "src", "explode(paths) AS path").selectExpr(
        "unix_seconds(time) AS time", "concat(array(src), slice(path, 1, size(path) - 1)) AS cycle"
    )


class Detection:
    """The flow on files of edges, which keeps the cycles it finds as files."""

    def __init__(self, spark: SparkSession, pond: mp.Pond, folder: str) -> None:
        self._folder = folder
        self._sent = 0
        self._newest_s = START_S
        self._lengths: dict[int, Counter[int]] = {}
        self.graph = graph_of(pond)
        for part in ("edges", "cycles"):
            os.makedirs(os.path.join(folder, part))
        arriving = spark.readStream.schema("time timestamp, src long, dst long, added boolean").parquet(
            os.path.join(folder, "edges")
        )
        self._flow = pond.flow("cycles")
        detect(self.graph, self._flow.source(arriving), self._keep, delay=f"{DISORDER_H} hours")
        self.query = self._flow.start(
            checkpoint=os.path.join(folder, "checkpoint"), processingTime="1 second"
        )

    def _keep(self, answered: DataFrame, epoch: int) -> None:
        """A file for each epoch, drains among them: their numbers are below zero."""
        cycles = cycles_of(answered).toArrow()
        pq.write_table(cycles, os.path.join(self._folder, "cycles", f"{epoch}.parquet"))
        self._lengths[epoch] = Counter(pc.list_value_length(cycles["cycle"]).to_pylist())

    def send(self, edges: list[Edge]) -> None:
        """One more file for the query to read; it is there whole or not at all."""
        table = pa.Table.from_pylist([edge._asdict() for edge in edges], schema=SCHEMA)
        hidden, file = (
            os.path.join(self._folder, "edges", f"{dot}{self._sent:09d}.parquet") for dot in (".", "")
        )
        pq.write_table(table, hidden, coerce_timestamps="us")
        os.rename(hidden, file)
        self._sent += len(edges)
        self._newest_s = max([self._newest_s, *(edge.time for edge in edges)])

    def wait(self, seconds: int) -> None:
        """Lets the query work; raises what ended it."""
        self.query.awaitTermination(seconds)

    def is_up_to_date(self) -> bool:
        """Whether all edges sent are in the graph."""
        return self.graph.progress().update >= (self._newest_s - DISORDER_H * HOUR_S) * MICROS

    def finish(self) -> None:
        """When all edges are sent: U passes everything, and the edges that still wait are answered."""
        self.query.processAllAvailable()
        self.query.stop()
        self.graph.finish("edges")
        self._flow.drain()

    def line(self) -> str:
        """How far it is."""
        progress = self.graph.progress()
        lengths = sum(list(self._lengths.values()), Counter[int]())
        return (
            f"{self._sent:,} edges sent, up to {_hours(self._newest_s * MICROS)}; U {_hours(progress.update)},"
            f" F {_hours(progress.fetch)}; cycles found: {_by_length(lengths)}"
        )


def _by_length(counts: Counter[int]) -> str:
    return "length " + ", ".join(f"{length}: {counts[length]:,}" for length in SPANS_H)


def _hours(progress: float) -> str:
    """Hours of event time since it began."""
    return f"{progress:+}" if math.isinf(progress) else f"{(progress / MICROS - START_S) / HOUR_S:.1f} h"


# The check

Cycle: TypeAlias = tuple[int, ...]
"""The time of the edge that closed it, in seconds, and its vertices, that edge's two first."""


class Window:
    """The edges of the last hours, as a graph of networkx."""

    def __init__(self, hours: int) -> None:
        self._span_s = hours * HOUR_S
        self._graph = nx.DiGraph()
        self._additions: deque[Edge] = deque()

    def move(self, now: int) -> None:
        """Forgets edges that were added too long before."""
        while self._additions and self._additions[0].time < now - self._span_s:
            old = self._additions.popleft()
            if self._graph.get_edge_data(old.src, old.dst) == {"time": old.time}:
                self._graph.remove_edge(old.src, old.dst)

    def closed_by(self, edge: Edge, length: int) -> Iterator[Cycle]:
        if edge.src in self._graph and edge.dst in self._graph:
            for path in nx.all_simple_paths(self._graph, edge.dst, edge.src, cutoff=length - 1):
                if len(path) == length:
                    yield (edge.time, edge.src, *path[:-1])

    def change(self, edge: Edge) -> None:
        if edge.added:
            self._graph.add_edge(edge.src, edge.dst, time=edge.time)
            self._additions.append(edge)
        elif self._graph.has_edge(edge.src, edge.dst):
            self._graph.remove_edge(edge.src, edge.dst)


def reference(edges: Iterable[Edge]) -> set[Cycle]:
    """The cycles that networkx finds. An edge sees what was there before its time, not what comes with it."""
    found: set[Cycle] = set()
    windows = {length: Window(hours) for length, hours in SPANS_H.items()}
    for now, changes in groupby(sorted(edges), key=lambda edge: edge.time):
        together = list(changes)
        for length, window in windows.items():
            window.move(now)
            for edge in together:
                if edge.added:
                    found.update(window.closed_by(edge, length))
            for edge in together:
                window.change(edge)
    return found


class Comparison(NamedTuple):
    """Cycles found, by their length. Wrong are those that networkx does not find, and those found twice."""

    lengths: Counter[int]
    wrong: int
    missing: int


def compare(found: list[Cycle], edges: Iterable[Edge]) -> Comparison:
    expected = reference(edges)
    right = expected.intersection(found)
    return Comparison(
        lengths=Counter(len(cycle) - 1 for cycle in found),
        wrong=len(found) - len(right),
        missing=len(expected) - len(right),
    )


def cycles_in(folder: str) -> list[Cycle]:
    """What the query kept."""
    table = pq.read_table(os.path.join(folder, "cycles"), columns=["time", "cycle"])
    return [(row["time"], *row["cycle"]) for row in table.to_pylist()]
