"""What the NEXMark benchmark tells by Arrow tables: answers are DuckDB's, what it counts is there, and its tables show it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

pytest.importorskip("duckdb")
from millpond.apps.nexmark_truth import truth
from millpond.bench import nexmark_parts, nexmark_tables
from millpond.bench.cpu import thread_seconds
from millpond.bench.nexmark_over import ROW_BYTES, SESSIONS
from millpond.bench.nexmark_parts import FULL, PARTS, QUICK, OverBudget, Scale
from millpond.bench.nexmark_pond import SLICES
from millpond.bench.nexmark_report import plot, print_table
from millpond.bench.nexmark_tables import Load, answers_of, bench, rows_of
from millpond.bench.window_container import Means

pytestmark = pytest.mark.usefixtures("started_as_ever")
TINY = Scale(
    rows=6_000,
    batch=1_000,
    compared=("q11",),
    over=(OverBudget("q7-session-whole", 100_000, (10,)),),
    curves=OverBudget("q7-session-whole", 100_000, (10,)),
    ratios=(0.5,),
    msas=(),
    keys=(500,),
    seconds=(),
    disorders=(),
    slides=(60,),
)


def test_parts_are_measured_beside_rocksdb_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rocksdict")
    monkeypatch.setattr(nexmark_parts, "QUICK", TINY)
    monkeypatch.setattr(nexmark_parts, "WATCHES_S", 0.002)
    results = nexmark_parts.run(True, lambda _: None)
    assert [(each["part"], each["system"]) for each in results] == [
        ("stores", "millpond"),
        ("stores", "rocksdb"),
        ("checkpoints", "millpond"),
        ("checkpoints", "millpond"),
        ("budget", "millpond"),
        ("budget", "rocksdb"),
        ("budget", "rocksdb-universal"),
        ("ratio", "millpond"),
        ("growth", "millpond"),
        ("growth", "millpond"),
    ]
    for each in results:
        assert each["answer_rows"] > 0
        assert each["store"]["write_s"] > 0
        assert each["store"]["read_s"] > 0
        assert each["fired_p95_ms"] >= each["fired_p50_ms"] > 0
    none, some, over, peer, universal, ratio = results[2:8]
    assert (none["checkpoints"], some["checkpoints"]) == (0, 5)
    assert some["checkpoint_mb"] > 0
    assert some["vs_none"] == some["rows_per_s"] / none["rows_per_s"]
    assert over["spilled_mb_max"] > 0
    assert over["vs_rocksdb"] == over["rows_per_s"] / peer["rows_per_s"]
    assert [each["rocksdb"]["compaction"] for each in (peer, universal)] == ["level", "universal"]
    # A database, and a write batch in an epoch, for each slice.
    load = peer["load"]
    epochs = -(-load["rows"] // load["batch"])
    assert 0 < peer["loops"]["batches"] <= SLICES * epochs
    assert peer["loops"]["puts"] > 0
    assert 0 < peer["fill_share"] < 1
    assert 0 < peer["step_share"] < 1
    assert 0 < ratio["hit_ratio"] <= 1
    assert ratio["means"]["ratio"] == 0.5
    print_table("nexmark", results)
    shown = capsys.readouterr().out
    assert all(
        f"nexmark: {part}, by Arrow tables" in shown
        for part in ("stores", "checkpoints", "budget", "ratio", "growth")
    )
    pytest.importorskip("matplotlib")
    assert [file.name for file in plot(tmp_path / "nexmark", "nexmark", results)] == [
        "nexmark-stores.png",
        "nexmark-stores.svg",
    ]


def test_a_wrong_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(load: Load, fired: list[pa.Table]) -> pa.Table:
        return answers_of(load, fired).slice(1)

    monkeypatch.setattr(nexmark_tables, "answers_of", wrong)
    with bench(Means()) as pond, pytest.raises(RuntimeError, match="q7-bidder by tables lacks 1"):
        pond.measured(Load("q7-bidder", 4_000, 1_000, 400))


def test_parts_can_be_had_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nexmark_parts, "QUICK", TINY)
    assert [each["part"] for each in nexmark_parts.run(True, lambda _: None, ["ratio"])] == ["ratio"]
    assert {each.part for each in nexmark_parts.parts(FULL)} == set(PARTS)


def test_loads_are_what_they_say() -> None:
    for scale in (FULL, QUICK):
        for part in nexmark_parts.parts(scale):
            assert 0 <= part.load.warm < part.load.rows
            assert part.load.query in nexmark_tables.AGGREGATES
    rows = rows_of(Load("q11", 3_000, 1_000, 100, uniform_keys=-1_000))
    assert sorted(rows["bidder"].to_pylist()[:1_000]) == list(range(1_000))
    assert len(rows) == 3_000
    # What is open at a time has as many rows as its share of the budget: those of ten seconds.
    load = nexmark_parts.over_budget(OverBudget("q7-bidder-whole", 1 << 20), 10)
    assert load.rows_per_s * 10 * ROW_BYTES["q7-bidder-whole"] == pytest.approx(10 << 20, rel=0.01)
    assert load.size == 10_000_000
    for over in FULL.over:
        for share in over.shares:
            load = nexmark_parts.over_budget(over, share)
            windows = (load.rows - load.warm) / load.rows_per_s / 10
            assert windows >= (20 if share <= 1 or over.query in SESSIONS else 3)


def test_sessions_have_so_much_open_at_the_end() -> None:
    load = nexmark_parts.over_budget(OverBudget("q7-session-whole", 1 << 20), 10)
    bids = rows_of(load)
    last = bids["date_time"][-1]
    sessions = truth("q11", bids=bids, gap=f"{load.size} microseconds")
    still = sessions.filter(pc.greater(sessions["window_end"], last))
    assert pc.sum(still["bids"]).as_py() * ROW_BYTES["q7-session-whole"] == pytest.approx(10 << 20, rel=0.15)


def test_threads_are_told_apart_by_name() -> None:
    import os

    over = threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("rocksdb:low")
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        done.set()
        over.wait()

    done = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    done.wait()
    assert thread_seconds(os.getpid(), "rocksdb") == pytest.approx(0.1, abs=0.05)
    assert thread_seconds(os.getpid(), "nobody") == 0
    over.set()
    thread.join()
