"""What the NEXMark benchmark tells beside its queries on Spark: by Arrow tables, `nexmark_tables` says how.

- `stores`: for each pattern our store and RocksDB within the budget: CPU time of the store by what it did, and how long an epoch
  takes that moves the watermark, from its rows to its answers.
- `budget`: state from a tenth of the budget to ten times it, files out of the page cache, RocksDB with both compactions. There are 20
  windows of event time or more, but for windows that follow each other and are ten times the budget each: of those there are three.
- `ratio` and `msa`: AUR's read batch ratio and space amplification, with so much open.
- `checkpoints`: five of them within a run, beside none: each writes what is open, as `pond.checkpoint()` does.
- `growth`: keys, window length, disorder, size by slide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from millpond.bench.nexmark_over import SESSIONS, volume
from millpond.bench.nexmark_pond import loops_share, options_text
from millpond.bench.nexmark_tables import Load, bench
from millpond.bench.window_container import Means

HIT_RATIO_MIN = 0.93
SECOND = 1_000_000
WATCHES_S = 0.25
CHECKPOINTS = 5
WINDOWS, FEW_WINDOWS = 20, 3
BATCH_MIN, BATCHES = 10_000, 16
"""Few: what is known in memory of each batch of a session's rows on disk counts for the budget."""
PARTS = ("stores", "checkpoints", "budget", "ratio", "msa", "growth")


class Part(NamedTuple):
    """One line: what varies, its value, and what is run."""

    part: str
    varied: str
    value: float
    load: Load
    means: Means
    checkpoints: int = 0


class OverBudget(NamedTuple):
    """Of a query: its budget, and how much of it is open at a time."""

    query: str
    budget: int = 64 << 20
    shares: Sequence[float] = (0.1, 1, 10)
    windows: int = WINDOWS
    """Of event time."""


class Scale(NamedTuple):
    """How much of everything."""

    rows: int = 1_200_000
    batch: int = 20_000
    compared: Sequence[str] = ("q5", "q7-bidder", "q11", "q11-median")
    over: Sequence[OverBudget] = (
        OverBudget("q7-session-whole"),
        # Windows that follow each other take many more rows. RocksDB reads every cell that it changes, too.
        OverBudget("q7-bidder-whole", 16 << 20),
        OverBudget("q12", 16 << 20),
    )
    curves: OverBudget = OverBudget("q7-session-whole", 16 << 20, (10,), 60)
    """Of `ratio` and `msa`: so long that sessions come and go, and something is to be compacted."""
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
    compared=("q11-median",),
    over=(OverBudget("q7-session-whole", 2 << 20, (10,)),),
    curves=OverBudget("q7-session-whole", 2 << 20, (10,)),
    ratios=(0.02, 0.5),
    msas=(1.5,),
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
    for over in scale.over:
        means = Means(budget=over.budget, uncached=True)
        for share in over.shares:
            load = over_budget(over, share)
            stores = [means, means._replace(store="rocksdb")]
            if share == max(over.shares):
                stores.append(means._replace(store="rocksdb", compaction="universal"))
            for each in stores:
                yield Part("budget", "state / budget", share, load, each)
    curves = scale.curves
    load = over_budget(curves, max(curves.shares))
    means = Means(budget=curves.budget, uncached=True)
    for ratio in scale.ratios:
        yield Part("ratio", "read batch ratio", ratio, load, means._replace(ratio=ratio))
    for msa in scale.msas:
        yield Part("msa", "space amplification", msa, load, means._replace(msa=msa))
    yield from _growth(scale)


def over_budget(over: OverBudget, share: float) -> Load:
    """What is open at a time takes `share` of the budget."""
    query = over.query
    windows = FEW_WINDOWS if share > 1 and query not in SESSIONS else over.windows
    rows, per_window, keys = volume(query, share * over.budget, windows)
    batch = max(BATCH_MIN, rows // BATCHES)
    # Cells have a key for each row, more or less.
    uniform = 4 * per_window if query == "q12" else keys
    warm = batch
    return Load(query, rows + warm, batch, max(1, per_window // 10), uniform_keys=uniform, warm=warm)


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


def run(quick: bool, progress: Callable[[str], None], only: Sequence[str] = PARTS) -> list[dict[str, Any]]:
    """These of them. Raises where an answer differs from DuckDB's."""
    wanted = [each for each in parts(QUICK if quick else FULL) if each.part in only]
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
                    if "rocksdb" in result:
                        progress(f"  {options_text(result['rocksdb'])}")
                    progress(f"  {result['rows_per_s'] / 1e6:.3f} M rows/s in {done.seconds:.1f} s")
                    results[number] = {
                        "part": each.part,
                        "varied": each.varied,
                        "value": each.value,
                        **result,
                        **loops_share([result]),
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
