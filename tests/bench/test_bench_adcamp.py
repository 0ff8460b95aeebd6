"""The adcamp benchmark runs on a tiny work, its systems agree, and a wrong answer ends it."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest

pytest.importorskip("duckdb")
pytest.importorskip("redis")
pytest.importorskip("google.protobuf")
from millpond.bench import adcamp, adcamp_latency, adcamp_peers, answers, report
from millpond.bench.cpu import cpu_seconds

TINY = adcamp.Work(
    keys=200,
    versions=2_000,
    views=2_000,
    epochs=2,
    checked=2_000,
    redis_views=2_000,
    tws_keys=10,
    tws_views=40,
)


@pytest.mark.long
def test_all_systems_answer_the_same_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adcamp, "WARM_UPS", 1)
    monkeypatch.setattr(adcamp, "ROUNDS", 1)
    monkeypatch.setattr(adcamp_latency, "RATE", 2_000)
    monkeypatch.setattr(adcamp_latency, "WARM_UPS", 1)
    monkeypatch.setattr(adcamp_latency, "BATCHES", 2)
    # A test installs nothing.
    monkeypatch.setattr(adcamp_peers.os, "geteuid", lambda: 1000)
    said: list[str] = []
    results = adcamp.run(True, said.append, TINY)
    found = {result["system"]: result for result in results}
    has_redis = not any(line.startswith("redis: skipped") for line in said)
    assert list(found) == [
        *("spark-identity", "millpond", "millpond-strings", "spark-tws"),
        *(["redis"] if has_redis else []),
        *("spark-identity-strings", "millpond-update", "millpond-update-stream", "millpond-fetch-stream"),
    ]
    identity = found["spark-identity"]
    assert identity["vs_identity"] == 1.0
    for system, result in found.items():
        assert result["rows_per_s"] > 0
        assert result["batch_rows"] == 65_536
        if system != "spark-tws":
            assert (result["keys"], result["versions"]) == (200, 2_000)
        if not system.startswith(("millpond-update", "millpond-fetch")):
            assert result["vs_identity"] == pytest.approx(result["rows_per_s"] / identity["rows_per_s"])
    assert (found["spark-tws"]["keys"], found["spark-tws"]["rows"]) == (10, 40)
    assert "2,000 views" in said[0]
    assert found["millpond-update-stream"]["batch_p50_ms"] > 0
    assert found["millpond"]["one_row_p50_ms"] <= found["millpond"]["one_row_p99_ms"]

    report.print_table("adcamp", results)
    printed = capsys.readouterr().out
    assert all(system in printed for system in found)
    assert [file.name for file in report.plot(tmp_path / "out", "adcamp", results)] == ["out.png", "out.svg"]


def test_a_wrong_answer_is_an_error() -> None:
    versions = pa.table({"ad": [1, 1], "ts": [10, 20], "campaign": [7, 8]})
    wanted = answers.expected(versions, pa.table({"view": [2, 0, 1], "ad": [1, 1, 2], "ts": [20, 19, 99]}))
    answers.compare("x", pa.table({"view": [0, 1, 2], "campaign": [7, None, 8]}), wanted)
    for wrong in ([7, None, 7], [7, 7, 8], [None, None, 8]):
        with pytest.raises(RuntimeError, match="1 of 3 answers of x differ"):
            answers.compare("x", pa.table({"view": [0, 1, 2], "campaign": wrong}), wanted)
    with pytest.raises(RuntimeError, match="answered 2 views where 3"):
        answers.compare("x", pa.table({"view": [0, 1], "campaign": [7, None]}), wanted)


def test_redis_that_is_not_there_is_skipped_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adcamp_peers.shutil, "which", lambda name: None)
    said: list[str] = []
    assert adcamp_peers.find_redis(said.append) is None
    assert said == ["redis: skipped, redis-server is not installed (Debian: apt-get install redis-server)"]


def test_cpu_seconds_grow_with_work() -> None:
    before = cpu_seconds()
    began = time.process_time()
    while time.process_time() - began < 0.2:
        pass
    assert cpu_seconds() - before > 0.1
