"""`millpond bench ftrl` measures each mode and its peers, and compares what they learn."""

from __future__ import annotations

import numpy as np
import pytest
from pyspark.sql import SparkSession

from millpond.apps.ftrl_model import sequential
from millpond.bench import ftrl, ftrl_peers


def test_the_compiled_loop_and_river_learn_as_plain_ftrl() -> None:
    drawn = ftrl.drawn(minibatch=100, steps=2)
    features = np.array(drawn.samples["features"].to_pylist())
    clicks = np.array(drawn.samples["click"])
    assert len(clicks) == 400
    assert drawn.sequential == pytest.approx(sequential(features, clicks))
    assert ftrl_peers.run_river(features, clicks).log_loss == pytest.approx(drawn.sequential, rel=0.01)


@pytest.mark.long
def test_every_run_is_measured(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    spark.stop()  # it brings a session of its own
    monkeypatch.setattr(ftrl, "find_redis", lambda progress: None)
    lines: list[str] = []
    work = ftrl.Work({200: 3}, inference=200, redis=3, river=100)
    results = ftrl.run(True, lines.append, work)
    assert [(r["system"], r.get("mode"), r.get("trainers")) for r in results] == [
        ("millpond", "bsp", 2),
        ("millpond", "ssp", 2),
        ("millpond", "asp", 2),
        ("millpond", "bsp", 2),
        ("millpond", "bsp", 1),
        ("millpond", "bsp", 1),
        ("compiled-loop", None, None),
        ("river", None, None),
    ]
    for result in results:
        assert result["samples_per_s"] > 0
        assert abs(result["excess"]) < 0.02
    assert 0 < results[3]["inference_p50_ms"] <= results[3]["inference_p99_ms"]
    ftrl.print_table("ftrl", results)
