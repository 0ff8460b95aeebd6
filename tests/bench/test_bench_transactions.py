"""The schemes beside which transactions are measured give what serial execution gives, and the bench runs."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from millpond import cli
from millpond.bench import (
    transactions,
    transactions_cores,
    transactions_schemes,
    transactions_sensitivity,
)
from millpond.stores.threads import in_threads, timed_sections


def outcome(system: str, given: transactions.Case, executors: int) -> tuple[list[pa.Table], list[pa.Table]]:
    stores = given.stores()
    timing, outputs = transactions.run_once(system, given, executors, stores)
    assert 0 < timing.execution < timing.whole
    return outputs, [store.snapshot() for store in stores.values()]


@pytest.mark.long
@pytest.mark.parametrize("name", transactions.APPS)
def test_schemes_that_keep_the_order_equal_serial_execution(name: str) -> None:
    given = transactions.case(transactions.APPS[name], 3_000, 1_250, keys=40)
    assert [len(epoch) for epoch in given.epochs] == [1_250, 1_250, 500]
    wanted = outcome("serial", given, 2)
    for system in ("millpond", *transactions_schemes.ORDERED):
        for executors in (1, 2, 3):
            assert outcome(system, given, executors) == wanted, (system, executors)
    assert outcome("no-lock", given, 1) == wanted


@pytest.mark.long
def test_the_bench_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "EVENTS_QUICK", 2_000)
    monkeypatch.setattr(transactions, "APPS", {"tolls": transactions.APPS["tolls"]})
    monkeypatch.setattr(transactions.transactions_spark, "run_spark", lambda quick, progress: [])
    done = CliRunner().invoke(
        cli.app, ["bench", "transactions", "--quick", "--json", str(tmp_path / "found.json")]
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["bench"] == "transactions"
    results = [result for result in found["results"] if "system" in result]
    assert [result["system"] for result in results] == list(transactions.SYSTEMS)
    for result in results:
        assert result["app"] == "tolls"
        assert 0 < result["events_per_s"] < result["execution_events_per_s"]
    best = max(r["events_per_s"] for r in results if r["system"] in transactions_schemes.ORDERED)
    ours = results[0]
    assert ours["vs_best_scheme"] == pytest.approx(ours["events_per_s"] / best)
    assert (tmp_path / "found.png").stat().st_size > 1_000
    assert (tmp_path / "found.svg").stat().st_size > 1_000
    by_plan = [result for result in found["results"] if "serial_share" in result]
    assert [result["plan"] for result in by_plan] == ["serial", "groups", "rounds"]
    for result in by_plan:
        assert 0 < result["outside_share"] <= result["serial_share"] <= 1
        speedups = [result["amdahl_speedups"][cores] for cores in ("8", "16", "40")]
        assert 1 <= speedups[0] <= speedups[1] <= speedups[2] <= 1 / result["serial_share"] + 1e-9
    assert "Amdahl" in done.output
    assert "projection" in done.output
    assert (tmp_path / "found-cores.svg").stat().st_size > 1_000


def test_what_two_threads_do_not_shorten_is_serial() -> None:
    split = transactions_cores.Split
    assert transactions_cores.serial_share(split(6.0, 4.0), split(3.0, 4.0)) == pytest.approx(0.4)
    assert transactions_cores.serial_share(split(6.0, 4.0), split(5.0, 4.0)) == pytest.approx(0.8)
    assert transactions_cores.serial_share(split(6.0, 4.0), split(7.0, 4.0)) == 1
    assert transactions_cores.serial_share(split(6.0, 4.0), split(1.0, 4.0)) == pytest.approx(0.4)
    assert transactions_cores.amdahl(0.4, 40) == pytest.approx(10 / (4 + 6 / 40))
    assert transactions_cores.amdahl(1.0, 40) == 1
    assert transactions_cores.amdahl(0.0, 40) == pytest.approx(40)


def test_parallel_sections_are_timed_where_someone_measures() -> None:
    def busy(seconds: float) -> float:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        return seconds

    with timed_sections() as sections:
        assert in_threads([partial(busy, 0.01), partial(busy, 0.03)]) == [0.01, 0.03]
        assert in_threads([partial(busy, 0.02)]) == [0.02]
        assert in_threads([]) == []
        with pytest.raises(ZeroDivisionError):
            in_threads([lambda: 1 // 0])
    in_threads([partial(busy, 0.02)])
    assert sections.own == pytest.approx(0.03, abs=0.005)
    assert sections.longest == pytest.approx(0.05, abs=0.005)


@pytest.mark.long
def test_the_sensitivity_study_writes_tables_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transactions_sensitivity, "EVENTS_QUICK", 1_000)
    monkeypatch.setattr(
        transactions_sensitivity,
        "STUDIES",
        (
            transactions_sensitivity.Study("grep_sum", "interval", (500, 1_000)),
            transactions_sensitivity.Study("grep_sum", "skew", (0.0,)),
        ),
    )
    results = transactions_sensitivity.run(True, lambda _: None)
    assert {(r["parameter"], r["value"]) for r in results} == {("interval", 500), ("skew", 0.0)}
    transactions_sensitivity.print_table("transactions-sensitivity", results)
    assert "grep_sum: interval" in capsys.readouterr().out
    assert len(transactions_sensitivity.plot(tmp_path / "found", "x", results)) == 2
