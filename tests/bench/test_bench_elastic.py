"""The elastic benchmark runs on a tiny work, measures each thing that it names, and counts gaps as clients see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.bench import elastic, elastic_report
from millpond.bench.elastic_load import Notes

TINY = elastic.QUICK._replace(
    move_backups=(1, 0),
    from_root=True,
    checkpoint_every_s=0.5,
    checkpoint_rounds={"delta": 1},
    checkpoint_ways=("none", "asynchronous", "none, unhurried", "asynchronous, unhurried"),
    backups=(0, 1),
    backups_mb=2,
    backups_s=0.3,
    backups_epochs=(1_000,),
)
SECTIONS = ["move", "vertical", "move", "recovery", "checkpoints", "backups", "slices"]


@pytest.mark.long
def test_a_tiny_run_measures_everything(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said: list[str] = []
    results = elastic.run(True, said.append, TINY)
    sections = [result["section"] for result in results]
    assert [s for i, s in enumerate(sections) if i == 0 or sections[i - 1] != s] == SECTIONS
    assert all(result["setup"] for result in results)
    assert not any(result.get("failures") for result in results)
    by_name = {result["system"]: result for result in results}

    moves = [by_name[f"millpond, {name}"] for name in ("from the backup", "from a copy", "stop and copy")]
    for move in moves:
        assert move["moved_mb"] > 3
        assert 0 < move["gap_ms"] < 60_000
        assert move["asks_per_s_before"] > 0
        assert move["staying_p50_ms_moving"] <= move["staying_p99_ms_moving"]
    vertical = by_name["millpond, threads 1 to 2 and back"]
    assert vertical["slices_moved"] == 0
    for source, taker in (("backups", "1"), ("the root", "0")):
        recovery = by_name[f"millpond, kill -9, from {source}, peers=1"]
        assert recovery["slices_taken"] == {taker: 63}
        assert recovery["detection_ms"] > 0
        assert recovery["rebuild_ms"] > 0
        longest = recovery["without_answers_ms"]
        assert longest >= recovery["rebuild_ms"] - 1
    assert by_name["millpond, no checkpoints"]["checkpoints"] == 0
    assert by_name["millpond, delta, asynchronous"]["checkpoints"] == 3

    elastic.print_table("elastic", results)
    printed = capsys.readouterr().out
    assert all(system in printed for system in by_name)
    assert "27 s on ten nodes" in printed
    pytest.importorskip("matplotlib")
    files = elastic.plot(tmp_path / "elastic", "elastic", results)
    assert [file.suffix for file in files] == [".png", ".svg"]
    assert all(file.stat().st_size > 10_000 for file in files)


def test_gaps_and_rates_are_those_of_answers() -> None:
    ended = np.array([1.0, 1.1, 1.2, 1.7, 1.8, 1.9, 2.9])
    notes = Notes(ended - 0.05, ended, failures=0)
    assert notes.rate(1.0, 2.0) == pytest.approx(6)
    assert notes.gap_ms(1.0, 1.15) == pytest.approx(100)
    # A gap counts that began before, or ends after.
    assert notes.gap_ms(1.3, 1.4) == pytest.approx(500)
    assert notes.gap_ms(1.85, 1.95) == pytest.approx(1_000)
    assert np.isnan(notes.gap_ms(5, 6))
    assert notes.timeline(1.0, 1.31)[0] == pytest.approx(10)
    assert len(notes.latencies_ms(1.66, 1.78)) == 2


def test_the_model_of_recovery_stands_beside_what_was_measured() -> None:
    def recovered(slices: int, ms: float) -> dict[str, Any]:
        return {
            "section": "recovery",
            "system": "millpond, kill -9, from backups",
            "slices_taken": {"1": slices},
            "journal_ms": ms,
            "cores": 2,
        }

    assert elastic_report.recovery_model([recovered(60, 70.0)]) is None
    said = elastic_report.recovery_model([recovered(60, 70.0), recovered(30, 40.0)])
    assert said is not None
    assert "60 slices in 70 ms, 30 slices in 40 ms" in said
