"""What goes wrong in the middle, other than by a crash: it is made good, or nothing of it stays."""

from __future__ import annotations

import math
import threading
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.container.log import Log
from millpond.coordinator import catalogue, fetches
from millpond.coordinator.records import PondRecord
from millpond.coordinator.service import CoordinatorService
from millpond.durable.crashpoints import armed
from millpond.errors import BelowFetchProgress, MessageTooLarge, MillpondError, Unavailable, WriteFailed
from millpond.ops.intake import Part
from millpond.ops.update import Update
from millpond.schema import format_ddl, parse_ddl
from millpond.stores.versioned import VersionedSlice
from millpond.testing import LossyFiles
from millpond.testing.local import LocalHosting, LocalPond
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import BeginEpoch
from millpond.wire.house import Locate, Register
from millpond.wire.questions import Answered, AskPending, AskProgress, Pin
from millpond.wire.states import StateSpec


def rows(keys: list[int], times: list[int], values: list[Any]) -> pa.Table:
    return pa.table({"k": keys, "t": times, "v": values})


def feeding(pond: mp.Pond, name: str = "feed") -> tuple[mp.State, Update]:
    state = pond.state("s", key="long", value="long")
    return state, state.update(key="k", at="t", value="v", name=name)


def restart(pond: LocalPond) -> None:
    for container in list(pond.hosting.services):
        pond.hosting.kill(container)
        pond.coordinator.recover(container)


@pytest.mark.parametrize("containers", [1, 3])
def test_an_epoch_that_could_not_be_applied_is_made_good(containers: int) -> None:
    pond = LocalPond(LossyFiles(), containers=containers)
    state, feed = feeding(pond)

    def fails(_: str) -> None:
        raise MillpondError("the pond failed: MemoryError")

    with armed("apply.before", action=fails) as plan:
        feed(rows([1, 2, 3], [10, 10, 10], [1, 2, 3]), 0)
    assert plan.fired
    assert state.progress().update == 10
    assert feed(rows([1, 2, 3], [10, 10, 10], [1, 2, 3]), 0).replayed
    feed(rows([4], [20], [4]), 1)
    state.finish("feed")
    before = state.snapshot().sort_by("key").to_pylist()
    assert [row["value"] for row in before] == [1, 2, 3, 4]
    pond.checkpoint()
    restart(pond)
    assert state.snapshot().sort_by("key").to_pylist() == before


def test_rules_over_all_values_are_refused_once_some_may_be_gone() -> None:
    pond = LocalPond(LossyFiles())
    state, feed = feeding(pond)
    feed(rows([1, 1, 1], [1, 2, 3], [10, 20, 30]), 0)
    state.finish("feed")
    asked = pa.table({"k": [1], "t": [15]})
    rules = [mp.count(), mp.total(), mp.values(), mp.smallest(), mp.largest()]
    before = [state.fetch(key="k", at="t", into="a", rule=rule).now(asked)["a"].to_pylist() for rule in rules]
    assert before == [[3], [60], [[10, 20, 30]], [10], [30]]
    state.report("dashboard", fetch=10)
    pond.maintain()
    for rule in rules:
        with pytest.raises(BelowFetchProgress):
            state.fetch(key="k", at="t", into="a", rule=rule).now(asked)
    assert state.fetch(key="k", at="t", into="a").now(asked)["a"].to_pylist() == [30]


def test_a_snapshot_that_fails_lets_go_of_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    pond = LocalPond(LossyFiles(), slices=1)
    state, feed = feeding(pond)
    feed(rows([1], [10], [1]), 0)
    state.finish("feed")

    def too_large(_: VersionedSlice) -> Any:
        raise MessageTooLarge("a column of 3 GiB", size=1, limit=1)

    with monkeypatch.context() as broken:
        broken.setattr(VersionedSlice, "export", too_large)
        with pytest.raises(MessageTooLarge):
            pond.checkpoint()
    pond.checkpoint()
    restart(pond)
    assert state.snapshot().to_pylist() == [{"key": 1, "time": 10, "value": 1}]


def test_a_heap_rewrite_that_fails_changes_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    pond = LocalPond(LossyFiles(), slices=1)
    state = pond.state("s", key="long", value="a string, b string")
    feed = state.update(key="k", at="t", value=["a", "b"], name="feed")
    for epoch in range(3):
        feed(pa.table({"k": [1], "t": [epoch], "a": [f"a{epoch}"], "b": [f"b{epoch}"]}), epoch)
    state.finish("feed")
    store = pond.hosting.services[0].core.holding("s").slices[0].store
    second = store._heaps[1]

    take = type(second).take

    def fails_for_the_second(heap: Any, refs: Any) -> Any:
        if heap is second:
            raise MessageTooLarge("2 GiB", size=1, limit=1)
        return take(heap, refs)

    with monkeypatch.context() as broken:
        broken.setattr(type(second), "take", fails_for_the_second)
        state.report("dashboard", fetch=100)
        with pytest.raises(MessageTooLarge):
            pond.maintain()
    assert state.snapshot().to_pylist() == [{"key": 1, "time": 2, "a": "a2", "b": "b2"}]
    pond.maintain()
    assert state.snapshot().to_pylist() == [{"key": 1, "time": 2, "a": "a2", "b": "b2"}]
    pond.validate()


def test_a_container_that_cannot_write_its_log_pins_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    pond = LocalPond(LossyFiles(), containers=2)
    state, feed = feeding(pond)
    _, other = feeding(pond, "other")
    append = Log.append

    def full(log: Log, *given: Any) -> int:
        if log.core.container == 1:
            raise WriteFailed("no space left", path="log")
        return append(log, *given)

    with monkeypatch.context() as broken:
        broken.setattr(Log, "append", full)
        with pytest.raises(WriteFailed):
            feed(rows([1, 2, 3, 4], [1, 1, 1, 1], [1, 1, 1, 1]), 0)
    for epoch in range(5):
        other(rows([1], [epoch], [epoch]), epoch)
    pond.checkpoint()
    for service in pond.hosting.services.values():
        assert service._figures().metrics["log_records"] == 0
        assert service.core.plan_checkpoint().covered == service.core.seq
        assert service.core.rows_staged == 0
    assert state.progress().updaters["feed"] == -math.inf


def test_staged_rows_that_nobody_commits_do_not_pile_up() -> None:
    pond = LocalPond(LossyFiles())
    _, feed = feeding(pond)
    for _ in range(50):
        plan = pond._client.call(BeginEpoch("s", "feed", LOCAL_QUERY, Turn(0), "continue"))
        many = rows([1] * 100, list(range(100)), [1] * 100)
        feed._intake.stage(feed._client, many, plan, Part(LOCAL_QUERY, Turn(0), 0))
    assert pond.hosting.services[0].core.rows_staged <= 800
    feed(rows([1], [1], [1]), 0)
    assert pond.hosting.services[0].core.rows_staged == 0


def test_two_updaters_of_one_value_are_recovered_in_the_order_they_were_seen() -> None:
    pond = LocalPond(LossyFiles())
    state, first = feeding(pond, "first")
    _, second = feeding(pond, "second")
    between: list[threading.Thread] = []

    def other_commits(_: str) -> None:
        thread = threading.Thread(target=second, args=(rows([1], [10], [2]), 0))
        thread.start()
        thread.join(0.3)
        between.append(thread)

    with armed("apply.before", action=other_commits) as plan:
        first(rows([1], [10], [1]), 0)
    assert plan.fired
    between[0].join()
    state.finish("first")
    state.finish("second")
    seen = state.snapshot().to_pylist()
    restart(pond)
    assert state.snapshot().to_pylist() == seen


def test_an_epoch_is_not_decided_while_who_prepared_it_is_being_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The new incarnation is told what is decided. What is decided after that would be lost in it."""
    pond = LocalPond(LossyFiles(), containers=2)
    state, feed = feeding(pond)
    feed(rows([1, 2, 3, 4], [10] * 4, [1] * 4), 0)
    adopting, decided = threading.Event(), threading.Event()
    starts: list[threading.Thread] = []

    def adopt(_: str) -> None:
        adopting.set()
        decided.wait(10)

    decide = pond.coordinator._commits._decide

    def deciding(*given: Any) -> Any:
        event = decide(*given)
        decided.set()
        for start in starts:
            start.join()
        return event

    monkeypatch.setattr(pond.coordinator._commits, "_decide", deciding)
    with armed("manifest.append.before", action=adopt) as adopted:

        def dies(_: str) -> None:
            pond.hosting.kill(0)
            starts.append(threading.Thread(target=pond.coordinator.recover, args=(0,)))
            starts[0].start()
            adopting.wait(10)

        with armed("acknowledge.after", hit=2, action=dies) as plan:
            feed(rows([1, 2, 3, 4], [20] * 4, [2] * 4), 1)
    assert plan.fired
    assert adopted.fired
    state.finish("feed")
    for _ in range(2):
        assert state.snapshot()["value"].to_pylist() == [2] * 4
        restart(pond)


def fetching() -> PondRecord:
    pond = catalogue.open_resident(
        PondRecord(owners=(0,)),
        StateSpec(
            "s",
            format_ddl(parse_ddl("long", "key")),
            format_ddl(parse_ddl("long", "value")),
            mp.put(),
            mp.keep_latest(),
        ),
    )
    return catalogue.register(pond, Register("s", "views", "fetcher"))


def answer(pond: PondRecord, query: str, epoch: int, **left: Any) -> PondRecord:
    pond, _ = fetches.pin(pond, Pin("s", "views", query, Turn(epoch), "shared"), 5)
    chosen = {"waiting": 0, "late": 0, "lowest": None, "watermark": None} | left
    return fetches.answered(pond, Answered("s", "views", query, Turn(epoch), **chosen))


def test_a_fetcher_in_two_queries_is_held_back_by_what_waits_in_either() -> None:
    pond = answer(fetching(), "one", 0, waiting=1, lowest=10, watermark=50)
    pond = answer(pond, "one", 1, waiting=1, lowest=10, watermark=50)
    pond = answer(pond, "two", 0, watermark=1000)
    pond = answer(pond, "two", 1, watermark=1000)
    assert pond.residents["s"].fetch_progress == 10
    # While the next epoch runs, what waited still waits.
    pond, _ = fetches.pin(pond, Pin("s", "views", "one", Turn(2), "shared"), 60)
    assert fetches.pending(pond, AskPending("s", "views"), 60).rows == 1
    pond = answer(pond, "two", 2, watermark=2000)
    assert pond.residents["s"].fetch_progress == 10
    pond = answer(pond, "one", 2, watermark=60)
    pond = answer(pond, "two", 3)
    assert pond.residents["s"].fetch_progress == 10, (
        "epoch 2 of `one` may run again, with what waited before it"
    )
    pond = answer(pond, "one", 3, watermark=3000)
    assert pond.residents["s"].fetch_progress == 60
    pond = answer(pond, "one", 4)
    assert pond.residents["s"].fetch_progress == 2000


def test_late_rows_of_a_fetch_are_counted_once() -> None:
    pond = answer(fetching(), "one", 0, late=7)
    pond = answer(pond, "one", 0, late=7)
    assert fetches.pending(pond, AskPending("s", "views"), 5).late == 7


def test_nobody_is_answered_before_the_pond_is_open() -> None:
    files = LossyFiles()
    hosting = LocalHosting(files, "/pond")
    coordinator = CoordinatorService(files, "/pond", hosting.dial)
    for message in (Locate(), AskProgress("s")):
        with pytest.raises(Unavailable):
            coordinator.call(message)
    coordinator.start(hosting, 1, 4)
    assert coordinator.call(Locate()).slices == 4
