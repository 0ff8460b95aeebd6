"""The kernel benchmark runs, agrees with its peers, and says when it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from millpond.bench import kernels, report
from millpond.errors import BadOption


def test_all_systems_answer_the_same_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("duckdb")
    pytest.importorskip("polars")
    monkeypatch.setattr(kernels, "QUICK_ROWS", 20_000)
    said: list[str] = []
    results = kernels.run(True, said.append)
    assert [result["system"] for result in results] == ["millpond", "millpond-strings", "duckdb", "polars"]
    for result in results:
        assert result["rows_per_s"] > 0
        assert result["threads"] >= 1
        assert (result["probes"], result["versions"], result["keys"]) == (20_000, 20_000, 4_000)
    ours, duckdb = results[0], results[2]
    per_thread = [result["rows_per_s"] / result["threads"] for result in (ours, duckdb)]
    assert ours["per_thread_vs_duckdb"] == pytest.approx(per_thread[0] / per_thread[1])
    assert ours["rows_per_s_with_build"] < min(ours["rows_per_s"], ours["build_rows_per_s"])
    assert "20,000 probes" in said[0]

    report.print_table("kernels", results)
    printed = capsys.readouterr().out
    for result in results:
        assert result["system"] in printed
    report.write_json(tmp_path / "out.json", "kernels", results)
    assert json.loads((tmp_path / "out.json").read_text()) == {"bench": "kernels", "results": results}


def test_a_wrong_answer_is_an_error() -> None:
    theirs = pa.table({"id": [2, 0, 1], "v": [30, 10, None]})
    kernels._compare(pa.array([10, None, 30]), theirs)
    for wrong in ([10, None, 31], [10, 20, 30], [None, None, 30]):
        with pytest.raises(RuntimeError, match="1 of 3 answers"):
            kernels._compare(pa.array(wrong), theirs)


@pytest.mark.parametrize("peer", ["duckdb", "polars"])
def test_a_missing_peer_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    monkeypatch.setitem(sys.modules, peer, None)
    monkeypatch.setitem(sys.modules, {"duckdb": "polars", "polars": "duckdb"}[peer], sys)
    with pytest.raises(BadOption, match=peer) as caught:
        kernels.run(True, lambda _: None)
    assert caught.value.hint == 'pip install "millpond[bench]"'
