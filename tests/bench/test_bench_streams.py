"""The streams benchmark runs on a tiny work, its systems agree with DuckDB, and a wrong answer ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb")
from millpond.bench import answers, report, streams, streams_systems
from millpond.bench.streams_rows import WINDOW_US, Rows, Source
from millpond.errors import BadOption

TINY = streams.Work(
    keys=500,
    versions=2_500,
    rows=2_000,
    warm_ups=1,
    rounds=1,
    batches=2,
    small_rows=1_000,
    small_batches=2,
    small_left_out=1,
    checked_rows=1_000,
)
SMALL = ("spark-identity", "millpond-fetch", "millpond-waiting", "spark-identity-in", "millpond-update")
LARGE = (
    *SMALL,
    *("spark-identity-strings", "millpond-fetch-strings", "millpond-waiting-strings"),
    *("spark-identity-in-strings", "millpond-update-strings"),
    *("spark-identity-both", "millpond-both"),
)


@pytest.mark.long
def test_all_systems_take_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    results = {result["system"]: result for result in streams.run(True, said.append, work=TINY)}
    assert list(results) == [*LARGE, *(f"{system}-small" for system in SMALL)]
    for system, result in results.items():
        assert result["rows_per_s"] > 0
        assert result["batch_rows"] == (1_000 if system.endswith("-small") else 2_000)
        assert result["source_reads"] == 1, system
        assert ("batch_p50_ms" in result) == (not system.endswith("-both"))
        if system.startswith("spark"):
            assert result["vs_identity"] == 1
    for system, identity in (("fetch", "identity"), ("waiting", "identity"), ("update", "identity-in")):
        for size in ("", "-small"):
            result, beside = results[f"millpond-{system}{size}"], results[f"spark-{identity}{size}"]
            assert result["vs_identity"] == pytest.approx(result["rows_per_s"] / beside["rows_per_s"])
    small = results["millpond-fetch-small"]
    assert small["reached"] == (small["p50_vs_identity"] <= small["reach"])
    assert said[-1] == "checking, 1,000 rows a batch"

    report.print_table("streams", list(results.values()))
    printed = capsys.readouterr().out
    assert all(system in printed for system in results)


@pytest.mark.long
def test_a_wrong_answer_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    as_duckdb_has_it = answers.expected

    def expected(versions: pa.Table, views: pa.Table) -> pa.Table:
        wanted = as_duckdb_has_it(versions, views)
        campaigns = pc.if_else(pc.equal(np.arange(len(wanted)), 7), 1_000, wanted["campaign"])
        return wanted.set_column(1, "campaign", campaigns)

    monkeypatch.setattr(streams_systems, "expected", expected)
    with pytest.raises(RuntimeError, match="1 of 2000 answers of fetch differ"):
        streams.run(True, lambda line: None, ["millpond-fetch"], TINY)


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(BadOption, match="no system is called 'lake'") as error:
        streams.check_names(["millpond-fetch", "lake"])
    assert "spark-identity, millpond-fetch" in str(error.value.hint)


def test_files_have_windows_of_their_own(tmp_path: Path) -> None:
    rows = Rows(keys=100, versions=1_000, files=3)
    versions = rows.versions(strings=False)
    micros = versions["ts"].cast(pa.int64()).to_numpy()
    assert (np.diff(micros) > 0).all()
    assert micros[-1] < rows.end_us
    for kind in ("views", "updates"):
        for number in range(3):
            table = rows.table(Source(kind), number, 1_000)
            first = rows.window_us(number) if kind == "views" else rows.end_us + number * WINDOW_US
            times = table["ts"].cast(pa.int64()).to_numpy()
            assert len(set(times.tolist())) == 1_000
            assert (first <= times).all()
            assert (times < first + WINDOW_US).all()
            assert (times >= first + WINDOW_US - WINDOW_US // 10).sum() == 100
    strings: dict[str, Any] = rows.table(Source("updates", strings=True), 0, 10).to_pydict()
    longs: dict[str, Any] = rows.table(Source("updates"), 0, 10).to_pydict()
    assert strings["ad"] == [f"ad-{ad:09}" for ad in longs["ad"]]
    assert strings["campaign"] == [f"campaign-{campaign:03}" for campaign in longs["campaign"]]
    file = tmp_path / "0.parquet"
    rows.write(file, Source("views"), 0, 1_600)
    assert pq.read_metadata(file).num_row_groups == 16
