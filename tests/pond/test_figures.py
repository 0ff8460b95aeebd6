"""Figures of slices and progress: that they are right, that they are small on the wire, and what Prometheus and logs get."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.tables import TableSpec
from millpond.container.core import Core
from millpond.container.figures import slice_figures
from millpond.errors import BadMessage, BadOption
from millpond.pond.figures import HOTTEST, as_metrics, exposition, log_line
from millpond.testing.files import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import SliceId, Term
from millpond.wire.codec import CONTROL_BYTES_MAX, decode, encode
from millpond.wire.figures import (
    ContainerFigures,
    MoveFigures,
    PondMetrics,
    ProgressFigures,
    SliceFigures,
    pack,
    unpack,
)
from millpond.wire.groups import GroupSpec
from millpond.wire.specs import Resident

SLICES_MAX = 65_535
FIGURES = {"rows_updated", "rows_fetched", "cpu_s", "bytes", "keys", "container"}


def rows(keys: range, at: int) -> pa.Table:
    return pa.table({"k": list(keys), "t": [at] * len(keys), "v": [1] * len(keys)})


def total(pond: mp.Pond, figure: str) -> float:
    return sum(each[figure] for each in pond.metrics()["slices"].values())


# On the wire


@pytest.mark.parametrize("most", [0, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63 - 1])
def test_a_column_takes_as_few_bytes_as_its_largest_figure(most: int) -> None:
    values = [0, most // 2, most]
    data = pack(values)
    assert unpack(data, 3).tolist() == values
    width = len(data) // 3
    assert width in (1, 2, 4, 8)
    assert width == 1 or most >= 1 << (4 * width), "it takes twice what it needs"


def test_a_column_that_is_none_is_refused() -> None:
    for data, count in ((b"123", 2), (b"123456", 2), (b"", 1), (b"1", 0)):
        with pytest.raises(BadMessage):
            unpack(data, count)
    assert unpack(b"", 0).tolist() == []


def largest() -> dict[str, Any]:
    """As large as figures get: every slice there is, every count too large for less than eight bytes."""
    huge = np.full(SLICES_MAX, 2**62)
    return {"slices": np.arange(SLICES_MAX), **dict.fromkeys(SliceFigures.COLUMNS[1:], huge)}


def test_messages_stay_small_with_65535_slices() -> None:
    report = ContainerFigures({}, {}, SliceFigures.of(largest()))
    assert len(encode(report)) < 0.75 * CONTROL_BYTES_MAX
    assert decode(encode(report)) == report
    few, containers = np.full(SLICES_MAX, 3), np.full(SLICES_MAX, 9_999)
    columns = {**largest(), "owners": containers, "backups": few, "backups_wanted": few}
    moves = [MoveFigures(0, [SliceId(number) for number in range(SLICES_MAX)], 0, 1)]
    metrics = PondMetrics({}, {}, {}, SliceFigures.of(columns), {}, {}, moves, {})
    assert len(encode(metrics)) < 0.85 * CONTROL_BYTES_MAX
    slices = as_metrics(decode(encode(metrics)))["slices"]
    assert len(slices) == SLICES_MAX
    assert slices[SLICES_MAX - 1] == {
        **dict.fromkeys(("rows_updated", "rows_fetched", "bytes", "keys"), 2**62),
        "cpu_s": 2**62 / 1e6,
        "container": 9_999,
        "backups": 3,
        "backups_wanted": 3,
    }


def test_a_container_of_65535_slices_tells_its_figures() -> None:
    core = Core(0, Term(1), SLICES_MAX)
    core.install({SliceId(number): {} for number in range(SLICES_MAX)})
    group = GroupSpec("g", SLICES_MAX - 1, {"t": TableSpec("k BIGINT", "x BIGINT")})
    core.add(Resident(group, 1, -math.inf, -math.inf))
    core.holding("g").figures()
    columns = decode(encode(ContainerFigures({}, {}, slice_figures(core)))).slices.columns()
    assert columns["slices"].tolist() == list(range(SLICES_MAX))
    assert np.flatnonzero(columns["held_bytes"]).tolist() == [SLICES_MAX - 1]


# What is counted


def test_figures_of_slices_are_what_was_done() -> None:
    pond = LocalPond(LossyFiles(), containers=2, slices=8)
    assert set(pond.metrics()["slices"]) == set(range(8))
    s, other = (pond.state(name, key="long", value="long") for name in ("s", "other"))
    feed = s.update(key="k", at="t", value="v", name="feed")
    feed(rows(range(1000), 1), 0)
    feed(rows(range(500), 2), 1)
    other.update(key="k", at="t", value="v", name="feed")(rows(range(70), 1), 0)
    fetch = s.fetch(key="k", at="t", into="x")
    s.finish("feed")
    fetch.now(rows(range(300), 2).select(["k", "t"]))
    metrics = pond.metrics()
    slices = metrics["slices"]
    assert all(set(each) == FIGURES for each in slices.values())
    assert {number: each["container"] for number, each in slices.items()} == pond.placement()
    assert total(pond, "rows_updated") == 1570
    assert total(pond, "rows_fetched") == 300
    assert total(pond, "keys") == 1070 == sum(state["keys"] for state in metrics["states"].values())
    assert total(pond, "bytes") == sum(state["bytes"] for state in metrics["states"].values())
    assert all(0 < each["cpu_s"] < 60 for each in slices.values())
    for number, each in slices.items():
        parts = pond.slice_metrics(number)
        assert set(parts) == {"s", "other"}
        for figure in ("rows_updated", "rows_fetched", "keys", "bytes"):
            assert sum(part[figure] for part in parts.values()) == each[figure]
    with pytest.raises(BadMessage, match="slice 8 is none of 8"):
        pond.slice_metrics(8)
    pond.validate()


def test_counts_do_not_fall_when_a_state_goes_and_are_not_of_replays() -> None:
    pond = LocalPond(LossyFiles(), slices=4)
    for name in ("s", "other"):
        state = pond.state(name, key="long", value="long")
        state.update(key="k", at="t", value="v", name="feed")(rows(range(100), 1), 0)
    before = pond.metrics()["slices"]
    pond.forget("other")
    after = pond.metrics()["slices"]
    for number, each in after.items():
        assert each["rows_updated"] == before[number]["rows_updated"]
        assert each["cpu_s"] == before[number]["cpu_s"]
        assert each["keys"] < before[number]["keys"]
    pond.hosting.kill(0)
    pond.coordinator.recover(0)
    assert pond.metrics()["containers"][0]["records_replayed"] > 0
    assert (total(pond, "rows_updated"), total(pond, "cpu_s"), total(pond, "keys")) == (0, 0, 100)


@mp.transaction
def add(t, k: int, v: int):  # type: ignore[no-untyped-def]
    t[k].x += v


def test_figures_of_a_group_are_its_home_slices() -> None:
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    t = pond.table("t", key="k long", value="x long", default={"x": 0})
    run = pond.transactions("op", [t], {"add": add})
    run(pa.table({"ts": range(50), "k": range(50), "v": [2] * 50}), 0)
    assert len(t.read([1, 2, 3])) == 3
    (home,) = [each for each in pond.metrics()["slices"].values() if each["rows_updated"]]
    assert (home["rows_updated"], home["rows_fetched"], home["keys"]) == (50, 3, 50)
    assert home["bytes"] > 0
    assert home["cpu_s"] > 0


def test_figures_of_windows_joins_and_dedups() -> None:
    pond = LocalPond(LossyFiles(), containers=2, slices=4, window_bytes=2_000)
    window = pond.window("w", key="k long", window=mp.session(10), aggregate={"median": mp.median("v")})
    join = pond.join("j", key="k long", left="v long", right="v2 long", window=mp.tumbling(10))
    dedup = pond.dedup("d", key="k long")
    over = window.over(at="t")
    over(rows(range(1000), 1), 0)
    metrics = pond.metrics()
    figures = metrics["windows"]["w"]
    assert (figures["rows"], figures["fired"], figures["open"]) == (1000, 0, 1000)
    assert figures["bytes"] > 0
    assert figures["spilled_bytes"] > 0
    assert figures["store_written_bytes"] >= figures["spilled_bytes"]
    assert figures["store_write_s"] > 0
    over(rows(range(10), 50), 1)
    over(rows(range(7), 2), 2)
    assert join.left(at="t")(rows(range(5), 3), 0).num_rows == 0
    dedup.over(at="t")(pa.concat_tables([rows(range(3), 4)] * 2), 0)
    metrics = pond.metrics()
    figures = metrics["windows"]["w"]
    assert (figures["rows"], figures["fired"], figures["open"]) == (1010, 1000, 10)
    assert figures["store_read_bytes"] > 0
    assert metrics["progress"]["w"]["late"] == {"source": 7}
    assert metrics["joins"]["j"]["rows"] == 5
    assert metrics["joins"]["j"]["open"] > 0
    assert metrics["dedups"]["d"]["dropped"] == 3
    lines = exposition(metrics).splitlines()
    assert all(SAMPLE.fullmatch(line) for line in lines if not line.startswith("#"))
    for expected in (
        'millpond_window_fired_total{window="w"} 1000',
        'millpond_window_open{window="w"} 10',
        f'millpond_window_spilled_bytes{{window="w"}} {figures["spilled_bytes"]}',
        'millpond_late_rows_total{resident="w",updater="source"} 7',
        'millpond_dedup_dropped_total{dedup="d"} 3',
        "# TYPE millpond_window_store_compact_seconds_total counter",
    ):
        assert expected in lines
    counts = pond.window("c", key="k long", window=mp.tumbling(10), aggregate={"n": mp.count()})
    counts.over(at="t")(rows(range(100), 1), 0)
    figures = pond.metrics()["windows"]["c"]
    assert figures["store_write_s"] > 0
    assert figures["store_read_s"] > 0
    pond.validate()


def test_progress_and_waiting_rows() -> None:
    pond = LocalPond(LossyFiles())
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", name="feed")
    state.update(key="k", at="t", value="v", name="silent")
    progress = pond.metrics()["progress"]["s"]
    assert progress == {
        "kind": "states",
        "update": -math.inf,
        "fetch": -math.inf,
        "time_kind": "",
        "updaters": {"feed": -math.inf, "silent": -math.inf},
        "fetchers": {},
        "held_by": ["feed", "silent"],
        "late": {"feed": 0, "silent": 0},
    }
    feed(rows(range(3), 5), 0)
    asking = state.fetch(key="k", at="t", into="x", name="views").to(lambda answers, epoch: None)
    asking(rows(range(3), 4).select(["k", "t"]), 0)
    progress = pond.metrics()["progress"]["s"]
    assert progress["held_by"] == ["silent"]
    assert progress["updaters"] == {"feed": 5, "silent": -math.inf}
    assert progress["fetchers"]["views"] == {"progress": -math.inf, "waiting": 3, "since": 4, "late": 0}
    pond.forget(state, name="silent")
    assert pond.metrics()["progress"]["s"]["update"] == 5


def test_a_container_that_does_not_answer_is_away_and_the_rest_is_told() -> None:
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    state = pond.state("s", key="long", value="long")
    state.update(key="k", at="t", value="v", name="feed")(rows(range(100), 1), 0)
    pond.hosting.kill(1)
    metrics = pond.metrics()
    assert list(metrics["containers"]) == [0]
    assert list(metrics["away"]) == [1]
    gone = [each for each in metrics["slices"].values() if each["container"] == 1]
    assert len(gone) == 2
    assert not any(each["rows_updated"] for each in gone)


def test_what_nobody_sees_to_yet_is_empty_and_what_somebody_does_is_told() -> None:
    pond = LocalPond(LossyFiles(), slices=4)
    metrics = pond.metrics()
    assert (metrics["moves"], metrics["task_slots"]) == ([], {})
    assert not any("backups" in each for each in metrics["slices"].values())
    figures = pond.coordinator.figures
    figures.backups, figures.backups_wanted = [1, 0, 1, 1], [1] * 4
    figures.task_slots = {"wanted": 3, "had": 2}
    figures.moves = [MoveFigures(7, [SliceId(1)], 0, 1, "copy", 0.25, "rebalance", 3.5)]
    metrics = as_metrics(figures.gather())
    assert [each["backups"] for each in metrics["slices"].values()] == [1, 0, 1, 1]
    assert metrics["task_slots"] == {"wanted": 3, "had": 2}
    assert metrics["moves"] == [
        {
            "id": 7,
            "slices": [1],
            "from": 0,
            "to": 1,
            "phase": "copy",
            "progress": 0.25,
            "cause": "rebalance",
            "seconds_left": 3.5,
            "error": "",
        }
    ]
    text = exposition(metrics)
    assert "millpond_slices_with_too_few_backups 1" in text
    assert 'millpond_task_slots{kind="wanted"} 3' in text
    assert 'millpond_move_progress{move="7",from="0",to="1",cause="rebalance"} 0.25' in text


# Prometheus and logs

SAMPLE = re.compile(
    r'[a-z_]+(\{[a-z_]+="([^"\\\n]|\\.)*"(,[a-z_]+="([^"\\\n]|\\.)*")*\})? (-?[0-9.e+-]+|[+-]Inf)'
)


def metrics_of_a_pond() -> dict[str, Any]:
    pond = LocalPond(LossyFiles(), containers=2, slices=HOTTEST + 4)
    state = pond.state("s", key="long", value="long")
    state.update(key="k", at="t", value="v", name="feed")(rows(range(100), 1), 0)
    pond.table("t", key="k long", value="x long")
    return pond.metrics()


def test_prometheus_reads_the_figures() -> None:
    metrics = metrics_of_a_pond()
    metrics["progress"]['odd"\\\n'] = metrics["progress"].pop("s")
    lines = exposition(metrics).splitlines()
    types = [line for line in lines if line.startswith("# TYPE ")]
    samples = [line for line in lines if not line.startswith("#")]
    assert len(types) == len({line.split()[2] for line in types}), "a family is declared once"
    assert all(SAMPLE.fullmatch(line) for line in samples)
    families = [re.split(r"[ {]", line)[0] for line in samples]
    assert families == sorted(families, key=families.index), "samples of a family stand together"
    counters = {line.split()[2] for line in types if line.endswith(" counter")}
    assert counters == {name for name in families if name.endswith("_total")}
    assert {"millpond_slice_rows_updated_total", "millpond_slice_cpu_seconds_total"} <= counters
    assert 'millpond_update_progress{resident="odd\\"\\\\\\n"} 1' in lines
    assert 'millpond_fetch_progress{resident="odd\\"\\\\\\n"} -Inf' in lines
    updated = [float(line.split()[-1]) for line in samples if line.startswith("millpond_slice_rows_updated")]
    assert (len(updated), sum(updated)) == (HOTTEST + 4, 100)


def test_a_log_line_is_json_and_sums_slices_up() -> None:
    line = log_line(metrics_of_a_pond())
    assert "\n" not in line
    said = json.loads(line, parse_constant=pytest.fail)
    assert said["slices"]["count"] == HOTTEST + 4
    hottest = [each["cpu_s"] for each in said["slices"]["hottest"]]
    assert hottest == sorted(hottest, reverse=True)
    assert len(hottest) == HOTTEST
    assert said["progress"]["s"]["fetch"] == "-inf"


def test_an_open_pond_logs_its_figures_and_a_reader_may_ask(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(BadOption, match="log_figures"):
        mp.open(tmp_path / "pond", log_figures=0)
    caplog.set_level(logging.INFO, "millpond")
    with mp.open(tmp_path / "pond", slices=4, log_figures=0.2) as pond:
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.05)
        said = json.loads(caplog.records[0].getMessage())
        assert said["slices"]["count"] == 4
        process = pond.metrics()["containers"][0]
        assert process["rss_bytes"] > 1 << 20
        assert process["memory_max_bytes"] > process["rss_bytes"]
        assert process["cpu_s"] > 0
        assert process["pid"] == pond.containers()[0].pid
        with mp.connect(pond.address, (tmp_path / "pond/token.read").read_text()) as reader:
            assert set(reader.metrics()) == set(pond.metrics())
            assert reader.slice_metrics(0) == {}
            assert reader.metrics_text().startswith("# TYPE millpond_up gauge\nmillpond_up 1\n")


def test_progress_travels_as_it_is() -> None:
    progress = ProgressFigures("states", -math.inf, 2**62, "long", {"a": math.inf}, {}, [])
    metrics = PondMetrics({}, {}, {}, SliceFigures.of(largest()), {}, {"s": progress}, [], {})
    assert decode(encode(metrics)).progress == {"s": progress}
