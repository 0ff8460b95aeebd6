"""Bad input: each case is a typed error that says how to mend it, and changes nothing, in memory or on disk."""

from __future__ import annotations

import hashlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import millpond as mp
from millpond.durable.files import OsFiles
from millpond.errors import (
    BadDuration,
    BadName,
    BadOption,
    BadRoot,
    BadType,
    EpochChanged,
    EpochOutOfOrder,
    MillpondError,
    NullKey,
    NullTime,
    OtherQuery,
    PondInUse,
    SchemaMismatch,
    Unavailable,
    UnknownResident,
    UnknownUpdater,
    WrongColumn,
    WrongType,
)
from millpond.testing.local import LocalPond
from millpond.wire.base import DRAINS_MAX, Turn
from millpond.wire.epochs import CommitEpoch
from millpond.wire.states import RowsWork

GOOD = pa.table({"k": [1, 2], "t": [10, 20], "v": [1, 2]})
NEXT = pa.table({"k": [1, 2], "t": [30, 40], "v": [3, 4]})
PROBE = pa.table({"k": [1], "t": [15]})


class QuickFiles(OsFiles):
    """Real files, without the wait for the disk: these tests lose no power."""

    def sync(self, path: Any) -> None:
        pass

    def sync_dir(self, path: Any) -> None:
        pass


class Scene:
    """A pond on disk with a state that holds something, and all that may be compared before and after a call."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.pond = LocalPond(QuickFiles(), str(root), containers=2)
        self.state = self.pond.state("s", key="long", value="long")
        self.op = self.state.update(key="k", at="t", value="v", name="feed")
        self.op(GOOD, 0)
        self.pond.state("text", key="string", value="s string, n int")

    def everything(self) -> dict[str, Any]:
        return {
            "files": listing(self.root),
            "states": {name: repr(state) for name, state in self.pond.states().items()},
            "progress": {name: state.progress() for name, state in self.pond.states().items()},
            "snapshot": self.state.snapshot().to_pydict(),
            "metrics": without_time(self.pond.metrics()),
        }


def without_time(metrics: Any) -> Any:
    """The figures that only change when something is done."""
    if not isinstance(metrics, dict):
        return metrics
    volatile = ("up_s", "cpu_s", "rss_bytes")
    return {key: without_time(value) for key, value in metrics.items() if key not in volatile}


def listing(root: Path) -> dict[str, str]:
    """Every path under the root, with a digest of its content."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "directory"
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path / "pond")
    yield made
    made.pond.validate()
    made.pond.close()


@contextmanager
def refused(
    scene: Scene | None, error: type[MillpondError], base: type[Exception], **attributes: Any
) -> Iterator[None]:
    """The block raises exactly that error, with those attributes and a hint, and leaves everything as it was."""
    before = scene.everything() if scene else None
    with pytest.raises(MillpondError) as caught:
        yield
    found = caught.value
    assert type(found) is error, repr(found)
    assert isinstance(found, base)
    assert {name: getattr(found, name) for name in attributes} == attributes
    assert found.hint, f"no hint in {found!r}"
    assert found.message
    assert found.hint in str(found)
    if scene:
        assert scene.everything() == before
        assert scene.op(NEXT, 1).rows == 2, "the next good call is served"


# Names


NASTY_NAMES = [
    "",
    "A",
    "Ads",
    "a b",
    "a-b",
    "a.b",
    "..",
    ".",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "x" * 65,
    "a\n",
    "\na",
    "a\0",
    "ä",
    "а",  # noqa: RUF001 - Cyrillic, on purpose
    "１",  # noqa: RUF001 - a full-width digit, on purpose
    "~",
    "$HOME",
    "%2e%2e",
    "a@b",
    "a;b",
    "\u202ea",
    None,
    5,
    b"abc",
    ["a"],
]


@pytest.mark.parametrize("name", NASTY_NAMES, ids=repr)
def test_a_name_that_is_none(scene: Scene, name: Any) -> None:
    state = scene.state
    before = scene.everything()
    uses: list[Callable[[], Any]] = [
        lambda: scene.pond.state(name, key="long", value="long"),
        lambda: scene.pond.state(name),
        lambda: state.update(key="k", at="t", value="v", name=name),
        lambda: state.finish(name),
        lambda: state.report(name, update=3),
        lambda: state.report(name, fetch=3),
    ]
    if name is not None:
        uses.append(lambda: state.fetch(key="k", at="t", name=name))
    for use in uses:
        with pytest.raises(BadName) as caught:
            use()
        assert isinstance(caught.value, ValueError)
        assert caught.value.name == str(name)
        assert caught.value.hint
    assert scene.everything() == before


@pytest.mark.parametrize("name", ["a", "0", "_", "x" * 64, "ad_campaigns_2026"])
def test_names_that_are_names(scene: Scene, name: str) -> None:
    assert scene.pond.state(name, key="long", value="long").name == name


def test_an_unknown_state(scene: Scene) -> None:
    with refused(scene, UnknownResident, LookupError, resident="nobody"):
        scene.pond.state("nobody")


def test_an_unknown_updater(scene: Scene) -> None:
    with refused(scene, UnknownUpdater, LookupError, resident="s", name="nobody"):
        scene.state.finish("nobody")


def test_progress_of_an_unknown_updater_registers_no_fetcher(scene: Scene) -> None:
    with refused(scene, UnknownUpdater, LookupError, resident="s", name="nobody"):
        scene.state.report("nobody", update=3, fetch=3)


# Types


@pytest.mark.parametrize(
    "ddl",
    [
        "",
        " ",
        "lung",
        "array<",
        "a long,",
        "a long, a int",
        "decimal(99,1)",
        "map<long>",
        5,
        "_key long",
        "_time long",
    ],
    ids=repr,
)
def test_a_type_that_cannot_be_read(scene: Scene, ddl: Any) -> None:
    with refused(scene, BadType, ValueError):
        scene.pond.state("other", key=ddl, value="long")
    with pytest.raises(BadType):
        scene.pond.state("other", key="long", value=ddl)
    assert "other" not in scene.pond.states()


@pytest.mark.parametrize(
    "ddl",
    [
        "double",
        "float",
        "decimal(5,2)",
        "array<long>",
        "map<long,long>",
        "struct<a:long>",
        "a long, b double",
    ],
)
def test_a_type_that_is_no_key(scene: Scene, ddl: str) -> None:
    with refused(scene, BadType, ValueError):
        scene.pond.state("other", key=ddl, value="long")


def test_a_key_and_a_value_of_one_name(scene: Scene) -> None:
    with refused(scene, BadType, ValueError):
        scene.pond.state("other", key="id long", value="id long")


def test_another_schema(scene: Scene) -> None:
    with refused(scene, SchemaMismatch, ValueError, resident="s"):
        scene.pond.state("s", key="string", value="long")


@pytest.mark.parametrize(
    "given", [{"key": "string"}, {"value": "long"}, {"compact": mp.keep_all()}, {"update": mp.put()}], ids=str
)
def test_half_a_schema(scene: Scene, given: dict[str, Any]) -> None:
    with refused(scene, BadOption, ValueError):
        scene.pond.state("s", **given)


@pytest.mark.parametrize("option", ["update", "compact"])
@pytest.mark.parametrize(
    "rule", ["put", mp.latest(), mp.put, 5], ids=["text", "fetch-rule", "function", "number"]
)
def test_a_rule_of_another_kind(scene: Scene, option: str, rule: Any) -> None:
    with refused(scene, BadOption, ValueError, option=option):
        scene.pond.state("other", key="long", value="long", **{option: rule})


# Columns


@pytest.mark.parametrize("missing", ["k", "t", "v"])
def test_an_update_without_a_column(scene: Scene, missing: str) -> None:
    table = NEXT.drop_columns(missing)
    with refused(scene, WrongColumn, LookupError, column=missing, available=table.column_names):
        scene.op(table, 1)


def test_an_update_with_a_column_twice(scene: Scene) -> None:
    with refused(scene, WrongColumn, LookupError, column="v"):
        scene.op(NEXT.append_column("v", NEXT["v"]), 1)


@pytest.mark.parametrize("missing", ["k", "t"])
def test_a_fetch_without_a_column(scene: Scene, missing: str) -> None:
    with refused(scene, WrongColumn, LookupError, column=missing):
        scene.state.fetch(key="k", at="t").now(PROBE.drop_columns(missing))


@pytest.mark.parametrize(
    ("column", "array", "expected"),
    [
        ("k", pa.array(["1", "2"]), "long"),
        ("k", pa.array([1.5, 2.0]), "long"),
        ("k", pa.array([2**63, 1], pa.uint64()), "long"),
        ("k", pa.array([True, False]), "long"),
        ("t", pa.array(["2026-01-01", "2026-01-02"]), "timestamp or long"),
        ("t", pa.array([1.5, 2.5]), "timestamp or long"),
        ("t", pa.array([2**63, 1], pa.uint64()), "long"),
        ("t", pa.array([1, 2], pa.timestamp("us")), "long"),
        ("v", pa.array(["1", "2"]), "long"),
        ("v", pa.array([0.5, 2.0]), "long"),
        ("v", pa.array([[1], [2]]), "long"),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else str(value),
)
def test_a_column_of_the_wrong_type(scene: Scene, column: str, array: pa.Array, expected: str) -> None:
    table = NEXT.set_column(NEXT.column_names.index(column), column, array)
    with refused(scene, WrongType, TypeError, column=column):
        scene.op(table, 1)
    with pytest.raises(WrongType) as caught:
        scene.op(table, 2)
    assert expected in caught.value.expected


def test_timestamps_that_are_no_whole_microseconds(scene: Scene) -> None:
    state = scene.pond.state("stamped", key="long", value="long")
    op = state.update(key="k", at="t", value="v", name="feed")
    with refused(scene, WrongType, TypeError, column="t"):
        op(NEXT.set_column(1, "t", pa.array([1, 1001], pa.timestamp("ns"))), 0)


def test_times_of_another_kind_from_an_epoch_that_began_before_the_first_one_came(scene: Scene) -> None:
    state = scene.pond.state("fresh", key="long", value="long")
    for name in ("a", "b"):
        state.update(key="k", at="t", value="v", name=name)
    state.update(key="k", at="t", value="v", name="a")(NEXT, 0)
    commit = CommitEpoch(
        "fresh", "b", "local", Turn(0), "continue", 0, -math.inf, "timestamp", [], RowsWork()
    )
    with refused(scene, WrongType, TypeError, expected="long", actual="timestamp"):
        scene.pond._client.call(commit)


def test_an_int_that_does_not_fit(scene: Scene) -> None:
    state = scene.pond.state("text")
    op = state.update(key="k", at="t", value=["s", "n"], name="feed")
    table = pa.table({"k": ["a"], "t": [1], "s": ["x"], "n": [2**31]})
    with refused(scene, WrongType, TypeError, column="n"):
        op(table, 0)


@pytest.mark.parametrize("keys", [[None, 1], [None, None]], ids=["one", "all"])
def test_null_keys(scene: Scene, keys: list[Any]) -> None:
    table = NEXT.set_column(0, "k", pa.array(keys, pa.int64()))
    with refused(scene, NullKey, ValueError, column="k", rows=keys.count(None)):
        scene.op(table, 1)


def test_null_keys_in_a_fetch(scene: Scene) -> None:
    table = pa.table({"k": pa.array([None], pa.int64()), "t": [1]})
    with refused(scene, NullKey, ValueError, column="k", rows=1):
        scene.state.fetch(key="k", at="t").now(table)


def test_a_null_in_one_column_of_a_composite_key(scene: Scene) -> None:
    state = scene.pond.state("pairs", key="a long, b string", value="long")
    op = state.update(key=["a", "b"], at="t", value="v", name="feed")
    table = pa.table({"a": [1, 2], "b": ["x", None], "t": [1, 2], "v": [1, 2]})
    with refused(scene, NullKey, ValueError, column="b", rows=1):
        op(table, 0)


def test_null_times(scene: Scene) -> None:
    table = NEXT.set_column(1, "t", pa.array([None, 40], pa.int64()))
    with refused(scene, NullTime, ValueError, column="t", rows=1):
        scene.op(table, 1)


@pytest.mark.parametrize("column", ["t", "lo"])
def test_null_times_in_a_fetch(scene: Scene, column: str) -> None:
    table = pa.table({"k": [1], "lo": pa.array([1], pa.int64()), "t": pa.array([1], pa.int64())})
    table = table.set_column(table.column_names.index(column), column, pa.array([None], pa.int64()))
    with refused(scene, NullTime, ValueError, column=column, rows=1):
        scene.state.fetch(key="k", between=("lo", "t")).now(table)


@pytest.mark.parametrize(
    "rows",
    [
        NEXT.to_pandas(),
        NEXT.to_pydict(),
        NEXT.to_pylist(),
        None,
        "table",
        NEXT["k"],
        pd.Series([1]),
        pa.RecordBatchReader.from_batches(NEXT.schema, NEXT.to_batches()),
    ],
    ids=lambda rows: type(rows).__name__,
)
def test_rows_of_another_class(scene: Scene, rows: Any) -> None:
    with refused(scene, WrongType, TypeError, expected="pyarrow.Table"):
        scene.op(rows, 1)
    with pytest.raises(WrongType):
        scene.state.fetch(key="k", at="t").now(rows)


def test_a_record_batch_is_as_good_as_a_table(scene: Scene) -> None:
    assert scene.op(NEXT.to_batches()[0], 1).rows == 2


# Epochs


@pytest.mark.parametrize(
    "epoch",
    [-DRAINS_MAX, -5 * DRAINS_MAX, True, False, "1", 1.0, None, b"1", 2**63, 2**70, -(2**70), [1], math.nan],
    ids=repr,
)
def test_what_is_no_epoch(scene: Scene, epoch: Any) -> None:
    with refused(scene, EpochOutOfOrder, ValueError):
        scene.op(NEXT, epoch)


@pytest.mark.parametrize("epoch", [2, 3, 100, 2**63 - 1])
def test_an_epoch_that_skips_ahead(scene: Scene, epoch: int) -> None:
    with refused(scene, EpochOutOfOrder, ValueError, epoch=epoch, expected=1):
        scene.op(NEXT, epoch)


def test_a_number_below_zero_is_a_drain_after_its_epoch(scene: Scene) -> None:
    """As a sink is told it: drains come between their epoch and the next."""
    assert scene.op(NEXT, -1).rows == 2
    assert scene.op(NEXT, -1).replayed
    for number in (Turn(1, 1).number, Turn(2, 7).number):
        with pytest.raises(EpochOutOfOrder):
            scene.op(NEXT, number)
    with pytest.raises(EpochChanged):
        scene.op(NEXT.slice(1), -1)
    assert scene.op(NEXT, -1).replayed


def test_the_first_epoch_is_0(scene: Scene) -> None:
    for history in ("continue", "shared"):
        op = scene.state.update(key="k", at="t", value="v", name="later", history=history)
        with refused(scene, EpochOutOfOrder, ValueError, epoch=5, expected=0):
            op(NEXT, 5)


@pytest.mark.parametrize("history", ["", "old", "New", None, 1, ["new"]], ids=repr)
def test_a_history_that_is_none(scene: Scene, history: Any) -> None:
    with refused(scene, BadOption, ValueError, option="history"):
        scene.state.update(key="k", at="t", value="v", name="later", history=history)


def test_another_query_under_the_same_name(scene: Scene) -> None:
    with pytest.raises(OtherQuery, match="other"):
        scene.op.commit(NEXT, 0, "other")
    anew = scene.state.update(key="k", at="t", value="v", name="feed", history="new")
    assert not anew.commit(NEXT, 17, "other").replayed
    with pytest.raises(OtherQuery, match="local"):
        scene.op(NEXT, 1)


def test_an_epoch_before_the_first(scene: Scene) -> None:
    op = scene.state.update(key="k", at="t", value="v", name="later", history="new")
    op(NEXT, 5)
    with refused(scene, EpochOutOfOrder, ValueError, epoch=4, expected=6):
        op(NEXT, 4)


# Options


@pytest.mark.parametrize(
    "delay", ["", "soon", "5", "-5 seconds", "1 month", -1, 1.5, None, True, 2**63, "0.1 us", [5]], ids=repr
)
def test_a_delay_that_is_none(scene: Scene, delay: Any) -> None:
    with refused(scene, BadDuration, ValueError):
        scene.state.update(key="k", at="t", value="v", name="other", delay=delay)


def test_a_delay_of_the_wrong_kind_for_the_times(scene: Scene) -> None:
    op = scene.state.update(key="k", at="t", value="v", name="other", delay="5 seconds")
    scene.state.finish("other")
    with refused(scene, BadDuration, ValueError):
        scene.state.update(key="k", at="t", value="v", name="feed", delay="5 seconds")(NEXT, 1)
    del op


@pytest.mark.parametrize("late", ["ignore", "", None, True, ["drop"]], ids=repr)
def test_a_late_that_is_no_choice(scene: Scene, late: Any) -> None:
    with refused(scene, BadOption, ValueError, option="late"):
        scene.state.update(key="k", at="t", value="v", name="other", late=late)


@pytest.mark.parametrize("waiting", ["wait", "", None, True, ["null"]], ids=repr)
def test_a_waiting_that_is_no_choice(scene: Scene, waiting: Any) -> None:
    with refused(scene, BadOption, ValueError, option="waiting"):
        scene.state.fetch(key="k", at="t").now(PROBE, waiting=waiting)


@pytest.mark.parametrize(
    "rule", ["latest", mp.put(), mp.keep_all(), pytest.param(mp.latest, id="not called"), 5], ids=repr
)
def test_a_rule_that_is_no_fetch_rule(scene: Scene, rule: Any) -> None:
    with refused(scene, BadOption, ValueError, option="rule"):
        scene.state.fetch(key="k", at="t", rule=rule)


@pytest.mark.parametrize("sink", [None, "sink", 5], ids=repr)
def test_a_sink_that_is_no_function(scene: Scene, sink: Any) -> None:
    with refused(scene, BadOption, ValueError, option="to"):
        scene.state.fetch(key="k", at="t", name="views").to(sink)


def test_a_fetch_without_a_sink_is_no_operator(scene: Scene) -> None:
    with refused(scene, BadOption, ValueError, option="to"):
        scene.state.fetch(key="k", at="t", name="views")(PROBE, 0)


@pytest.mark.parametrize("times", [{}, {"at": "t", "between": ("a", "b")}], ids=["neither", "both"])
def test_a_fetch_takes_either_at_or_between(scene: Scene, times: dict[str, Any]) -> None:
    with refused(scene, BadOption, ValueError, option="at"):
        scene.state.fetch(key="k", **times)


@pytest.mark.parametrize(
    "between",
    ["ab", ("a",), ("a", "b", "c"), (1, 2), ("a", None), 5, (), pytest.param({"a", "b"}, id="a set")],
    ids=repr,
)
def test_a_between_that_is_no_pair(scene: Scene, between: Any) -> None:
    with refused(scene, BadOption, ValueError, option="between"):
        scene.state.fetch(key="k", between=between)


@pytest.mark.parametrize("at", [5, ["t"], b"t"], ids=repr)
def test_an_at_that_is_no_name_of_a_column(scene: Scene, at: Any) -> None:
    with refused(scene, BadOption, ValueError, option="at"):
        scene.state.fetch(key="k", at=at)
    with pytest.raises(BadOption):
        scene.state.update(key="k", at=at, value="v", name="other")
    assert "other" not in scene.state.progress().updaters


@pytest.mark.parametrize("names", [None, 5, [], ["k", "k2"], [5], b"k", {"k": 1}.values()], ids=repr)
@pytest.mark.parametrize("option", ["key", "value"])
def test_columns_that_do_not_match_the_schema(scene: Scene, option: str, names: Any) -> None:
    given = {"key": "k", "value": "v", option: names}
    with refused(scene, BadOption, ValueError, option=option):
        scene.state.update(at="t", name="other", **given)
    assert "other" not in scene.state.progress().updaters


@pytest.mark.parametrize("into", [5, [], ["a", "b"], [None], b"a"], ids=repr)
def test_an_into_that_does_not_match_the_answers(scene: Scene, into: Any) -> None:
    with refused(scene, BadOption, ValueError, option="into"):
        scene.state.fetch(key="k", at="t", into=into)


def test_an_into_that_is_taken(scene: Scene) -> None:
    with refused(scene, BadOption, ValueError, option="into"):
        scene.state.fetch(key="k", at="t", into="t").now(PROBE)


def test_an_into_that_names_a_column_twice(scene: Scene) -> None:
    with refused(scene, BadOption, ValueError, option="into"):
        scene.pond.state("text").fetch(key="k", at="t", into=["a", "a"])


NO_TIMES = [True, 1.5, "now", math.nan, 2**63, -(2**63) - 1, 2**70, [1]]


@pytest.mark.parametrize("at", NO_TIMES, ids=repr)
def test_a_snapshot_at_what_is_no_time(scene: Scene, at: Any) -> None:
    with refused(scene, BadOption, ValueError, option="at"):
        scene.state.snapshot(at)


@pytest.mark.parametrize("at", NO_TIMES, ids=repr)
def test_a_report_of_what_is_no_time(scene: Scene, at: Any) -> None:
    with refused(scene, BadOption, ValueError, option="at"):
        scene.state.report("feed", update=at)


@pytest.mark.parametrize("at", NO_TIMES, ids=repr)
def test_a_fetchers_report_of_what_is_no_time(scene: Scene, at: Any) -> None:
    with refused(scene, BadOption, ValueError, option="at"):
        scene.state.report("views", fetch=at)


def test_times_beyond_what_a_datetime_holds_are_no_surprise(scene: Scene) -> None:
    first, last = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
    with pytest.raises(WrongType):
        scene.state.report("feed", update=first)
    with pytest.raises(MillpondError):
        scene.state.snapshot(last)


@pytest.mark.parametrize("option", ["containers", "threads", "slices", "port"])
@pytest.mark.parametrize("value", [-1, 10**9, True, "2", 1.5], ids=repr)
def test_counts_that_open_refuses(tmp_path: Path, option: str, value: Any) -> None:
    with refused(None, BadOption, ValueError, option=option):
        mp.open(tmp_path / "pond", **{option: value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [-1, 0, True, "2", 1e12, (512 << 20) - 1, 2**80], ids=repr)
def test_memory_that_open_refuses(tmp_path: Path, value: Any) -> None:
    with refused(None, BadOption, ValueError, option="memory"):
        mp.open(tmp_path / "pond", memory=value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [-1, 0, 0.01, True, "2", math.nan, None], ids=repr)
def test_seconds_that_open_refuses(tmp_path: Path, value: Any) -> None:
    with refused(None, BadOption, ValueError, option="code_seconds"):
        mp.open(tmp_path / "pond", code_seconds=value)
    assert list(tmp_path.iterdir()) == []


# Roots


def test_a_root_under_a_regular_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for root in (tmp_path / "file", tmp_path / "file" / "pond", tmp_path / "file" / "a" / "b"):
        with refused(None, BadRoot, OSError, root=str(root)):
            mp.open(root)
    assert listing(tmp_path) == {"file": hashlib.sha256(b"not a directory").hexdigest()}


@pytest.mark.parametrize("root", ["", None, 5, "a\0b", b"bytes"], ids=repr)
def test_a_root_that_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with refused(None, BadRoot, OSError):
        mp.open(root)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_root_that_may_not_be_written(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with refused(None, BadRoot, OSError, root=str(closed / "pond")):
        mp.open(closed / "pond")
    with refused(None, BadRoot, OSError, root=str(closed)):
        mp.open(closed)
    assert list(closed.iterdir()) == []


def test_a_root_on_a_file_system_that_cannot_be_written() -> None:
    with refused(None, BadRoot, OSError, root="/proc/pond"):
        mp.open("/proc/pond")


def test_more_containers_than_slices_and_a_root_that_another_process_has_open(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    with refused(None, BadOption, ValueError, option="containers"):
        mp.open(root, containers=3, slices=2)
    opening = f"mp.open({str(root)!r}, slices=4)"
    script = f"import millpond as mp\nwith {opening}:\n  print('open', flush=True)\n  input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "open\n"
        before = listing(root)
        with refused(None, PondInUse, RuntimeError, root=str(root)):
            mp.open(root)
        assert listing(root) == before
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.wait(30) == 0
    with mp.open(root) as pond:
        assert pond.states() == {}
        assert len(pond.placement()) == 4, "the refused call must not have fixed the number of slices"
    with refused(None, BadOption, ValueError, option="containers"):
        mp.open(root, containers=5, slices=64)


# Ponds that are not there


@pytest.mark.parametrize(
    "address", ["", "nonsense", "127.0.0.1", "http://127.0.0.1:1", "127.0.0.1:99999999", None, 5], ids=repr
)
def test_connecting_to_what_is_no_address(address: Any) -> None:
    with refused(None, BadOption, ValueError, option="address"):
        mp.connect(address, "x" * 43)


@pytest.mark.parametrize("token", [None, "", "  ", "a\nb", "ä", b"token", 5], ids=repr)
def test_connecting_with_what_is_no_token(token: Any) -> None:
    with refused(None, BadOption, ValueError, option="token"):
        mp.connect("127.0.0.1:1", token)


def test_connecting_to_where_nobody_listens() -> None:
    with refused(None, Unavailable, ConnectionError, address="127.0.0.1:1"):
        mp.connect("127.0.0.1:1", "x" * 43)
    with refused(None, Unavailable, ConnectionError):
        mp.connect("unix:/nowhere/sockets/pond", "x" * 43)


def test_a_closed_pond(tmp_path: Path) -> None:
    scene = Scene(tmp_path / "pond")
    fetch = scene.state.fetch(key="k", at="t", into="a")
    scene.pond.close()
    files = listing(tmp_path)
    uses: list[Callable[[], Any]] = [
        scene.pond.states,
        scene.pond.containers,
        scene.pond.placement,
        scene.pond.metrics,
        scene.pond.checkpoint,
        lambda: scene.pond.state("s"),
        lambda: scene.pond.state("other", key="long", value="long"),
        lambda: scene.op(NEXT, 1),
        lambda: fetch.now(PROBE),
        scene.state.progress,
        scene.state.snapshot,
        lambda: scene.state.finish("feed"),
        lambda: scene.state.report("feed", update=50),
        lambda: scene.state.update(key="k", at="t", value="v", name="other"),
    ]
    for use in uses:
        with refused(None, BadOption, ValueError, option="pond"):
            use()
    scene.pond.close()
    assert listing(tmp_path) == files


def test_messages_name_what_they_are_about(scene: Scene) -> None:
    """The column, the type and the fix, in words."""
    with pytest.raises(WrongType) as caught:
        scene.op(NEXT.set_column(2, "v", pa.array(["a", "b"])), 1)
    assert re.search(r"'v'.*string", caught.value.message)
    assert caught.value.hint
    with pytest.raises(WrongColumn) as missing:
        scene.op(NEXT.drop_columns("v"), 1)
    assert "'v'" in missing.value.message
    assert "k, t" in missing.value.hint


# Elasticity


@pytest.mark.parametrize("slices", [None, 1.0, [None], ["0"], "ab", [-1], [1 << 70], [True], True, [99]])
def test_slices_that_are_none(scene: Scene, slices: Any) -> None:
    with pytest.raises(BadOption) as raised:
        scene.pond.move(slices, to=0)
    assert raised.value.option == "slices"


@pytest.mark.parametrize("to", [None, "0", 0.0, True, -1, 1 << 70, 99])
def test_a_container_that_is_none(scene: Scene, to: Any) -> None:
    with pytest.raises(BadOption) as raised:
        scene.pond.move([0], to=to)
    assert raised.value.option == "to"


def test_numbers_of_other_types_are_numbers(scene: Scene) -> None:
    owner = scene.pond.placement()[0]
    assert scene.pond.move(np.arange(1), to=np.int64(owner)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [None, "0", -1, 1 << 70, True])
def test_a_slice_that_is_none_has_no_figures(scene: Scene, number: Any) -> None:
    with pytest.raises(BadOption):
        scene.pond.slice_metrics(number)


@pytest.mark.parametrize(
    ("containers", "more"),
    [
        (3, {}),
        ((1,), {}),
        ((1, 2, 3), {}),
        ("12", {}),
        ((0, 1), {}),
        ((2, 1), {}),
        ((1, None), {}),
        ((1, 2), {"busy": 0.5}),
        ((1, 2), {"busy": ("a", "b")}),
        ((1, 2), {"busy": (float("nan"), 1)}),
        ((1, 2), {"hold": float("nan")}),
        ((1, 2), {"hold": float("inf")}),
        ((1, 2), {"hold": 0}),
    ],
)
def test_limits_that_are_none(scene: Scene, containers: Any, more: dict[str, Any]) -> None:
    with pytest.raises(BadOption) as raised:
        scene.pond.autoscale(containers, **more)
    assert raised.value.option == "containers"
