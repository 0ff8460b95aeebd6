"""What the NEXMark benchmark tells beside its queries on Spark: by Arrow tables, `nexmark_tables` says how.

- `stores`: for each pattern our store and RocksDB within the budget: CPU time of the store by what it did, and how long an epoch
  takes that moves the watermark, from its rows to its answers.
- `budget`: state from a tenth of the budget to ten times it, files out of the page cache, RocksDB with both compactions.
- `ratio` and `msa`: AUR's read batch ratio and space amplification, with ten times the budget.
- `checkpoints`: five of them within a run, beside none: each writes what is open, as `pond.checkpoint()` does.
- `growth`: keys, window length, disorder, size by slide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from millpond.bench.nexmark_over import ROW_BYTES
from millpond.bench.nexmark_tables import Load, bench
from millpond.bench.window_container import Means

HIT_RATIO_MIN = 0.93
SECOND = 1_000_000
WATCHES_S = 0.25
CHECKPOINTS = 5


class Part(NamedTuple):
    """One line: what varies, its value, and what is run."""

    part: str
    varied: str
    value: float
    load: Load
    means: Means
    checkpoints: int = 0


class Scale(NamedTuple):
    """How much of everything."""

    rows: int = 1_200_000
    batch: int = 20_000
    budget: int = 4 << 20
    """Of what is to be over it."""
    compared: Sequence[str] = ("q5", "q7-bidder", "q11", "q11-median")
    over: Sequence[str] = ("q11-median", "q7-bidder", "q11")
    shares: Sequence[float] = (0.1, 1, 10)
    """Of the budget, what is open at a time."""
    ratios: Sequence[float] = (0.002, 0.02, 0.1, 0.5)
    msas: Sequence[float] = (1.1, 1.5, 3.0)
    keys: Sequence[int] = (10_000, 100_000, 1_000_000, 10_000_000)
    seconds: Sequence[int] = (2, 10, 50)
    disorders: Sequence[int] = (1, 1_000, 100_000)
    slides: Sequence[int] = (2, 10, 60)


FULL = Scale()
QUICK = Scale(
    rows=150_000,
    batch=15_000,
    budget=1 << 20,
    compared=("q11-median",),
    over=("q11-median",),
    shares=(10,),
    ratios=(0.02,),
    msas=(),
    keys=(10_000,),
    seconds=(),
    disorders=(),
    slides=(60,),
)


def parts(scale: Scale) -> Iterator[Part]:
    rocksdb = Means(store="rocksdb")
    for query in scale.compared:
        load = Load(query, scale.rows, scale.batch, scale.rows // 30, warm=scale.rows // 6)
        for means in (Means(), rocksdb):
            yield Part("stores", "", 0, load, means)
    for query in scale.compared:
        load = Load(query, scale.rows, scale.batch, scale.rows // 30, warm=scale.rows // 6)
        for count in (0, CHECKPOINTS):
            yield Part("checkpoints", "checkpoints", count, load, Means(), count)
    over = Means(budget=scale.budget, uncached=True)
    for query in scale.over:
        for share in scale.shares:
            load = over_budget(query, scale, share)
            yield Part("budget", "state / budget", share, load, over)
            yield Part("budget", "state / budget", share, load, over._replace(store="rocksdb"))
            if share == max(scale.shares) and query == "q11-median" and len(scale.shares) > 1:
                universal = over._replace(store="rocksdb", compaction="universal")
                yield Part("budget", "state / budget", share, load, universal)
    load = over_budget("q11-median", scale, max(scale.shares))
    for ratio in scale.ratios:
        yield Part("ratio", "read batch ratio", ratio, load, over._replace(ratio=ratio))
    for msa in scale.msas:
        yield Part("msa", "space amplification", msa, load, over._replace(msa=msa))
    yield from _growth(scale)


def over_budget(query: str, scale: Scale, share: float) -> Load:
    """What is open at a time takes `share` of the budget; twice as many rows come in all.

    Of sessions and cells as many keys as it takes, each of which has one row in a gap.
    """
    open_rows = round(share * scale.budget / ROW_BYTES[query])
    rows = max(2 * open_rows, scale.rows // 2)
    size = 10 * SECOND
    # A window is kept until its last row has come; a session from its first row until a gap after its last.
    rows_per_s = max(1, open_rows // 10)
    batch = max(scale.batch, rows // 50)
    keys = 0 if query == "q7-bidder" else max(1_000, 2 * open_rows)
    return Load(query, rows, batch, rows_per_s, size, uniform_keys=keys, warm=rows // 10 // batch * batch)


def _growth(scale: Scale) -> Iterator[Part]:
    rows, batch = scale.rows, 5 * scale.batch
    usual = Load("q11", rows, batch, rows // 30, warm=rows // 6 // batch * batch)
    for keys in scale.keys:
        # All keys come once before it counts, and stay open: a gap is longer than the stream.
        load = usual._replace(rows=rows + keys, warm=keys, uniform_keys=-keys, size=3600 * SECOND)
        yield Part("growth", "keys", keys, load, Means())
    for seconds in scale.seconds:
        load = usual._replace(query="q11-median", size=seconds * SECOND)
        yield Part("growth", "gap, s", seconds, load, Means())
    for disorder in scale.disorders:
        load = usual._replace(query="q11-median", disorder=disorder)
        yield Part("growth", "disorder", disorder, load, Means())
    for slides in scale.slides:
        load = usual._replace(query="q5", size=12 * SECOND, slide=12 * SECOND // slides)
        yield Part("growth", "size / slide", slides, load, Means())


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """All of them. Raises where an answer differs from DuckDB's."""
    wanted = list(parts(QUICK if quick else FULL))
    results: dict[int, dict[str, Any]] = {}
    for means in dict.fromkeys(each.means for each in wanted):
        with bench(means) as pond:
            for number, each in enumerate(wanted):
                if each.means == means:
                    progress(
                        f"{each.part}: {each.load.query}, {each.varied} {each.value:g}, {_system(means)}"
                    )
                    watches_s = WATCHES_S if means.uncached else 0.0
                    done = pond.measured(each.load, watches_s=watches_s, checkpoints=each.checkpoints)
                    result = done.as_result(_system(means), each.load, means)
                    results[number] = {
                        "part": each.part,
                        "varied": each.varied,
                        "value": each.value,
                        **result,
                    }
    in_order = [results[number] for number in range(len(wanted))]
    return [_with_ratios(result, in_order) for result in in_order]


def _system(means: Means) -> str:
    return means.store if means.compaction == "level" else f"{means.store}-{means.compaction}"


def _with_ratios(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of ours, beside RocksDB's of the same load: by the clock, by the container's CPU time and by the store's. With checkpoints,
    beside none."""
    if result["part"] == "checkpoints":
        none = next(
            each
            for each in results
            if (each["part"], each["load"], each["value"]) == (result["part"], result["load"], 0)
        )
        return result | {"vs_none": result["rows_per_s"] / none["rows_per_s"]}
    peers = [
        other
        for other in results
        if (other["part"], other["load"]) == (result["part"], result["load"]) and other["system"] == "rocksdb"
    ]
    if result["system"] != "millpond" or not peers:
        return result
    peer = peers[0]
    return result | {
        "vs_rocksdb": result["rows_per_s"] / peer["rows_per_s"],
        "container_vs_rocksdb": peer["container_s"] / result["container_s"],
        "store_vs_rocksdb": peer["store_s"] / max(result["store_s"], 1e-9),
        "p95_vs_rocksdb": peer["fired_p95_ms"] / result["fired_p95_ms"],
    }
