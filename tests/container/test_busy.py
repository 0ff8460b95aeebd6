"""An epoch that runs for long costs its own resident: nobody else waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.container import checkpoints, core
from millpond.container.lease import Lease
from millpond.errors import Unavailable
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.house import ContainerStatus, DropResident, Ping

LONG_S = 10.0


@mp.transaction
def add(t: Any, k: int, v: int) -> None:
    t[k].x += v


def opened(files: LossyFiles) -> tuple[LocalPond, mp.Table, Any]:
    pond = LocalPond(files)
    table = pond.table("t", key="k long", value="x long", default={"x": 0}, group="g")
    return pond, table, pond.transactions("adding", [table], {"add": add})


def one_event(value: int) -> pa.Table:
    return pa.table({"ts": [1], "k": [1], "v": [value]})


def ends(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def group_slice(pond: LocalPond) -> Any:
    (held,) = pond.hosting.services[0].core.holding("g").slices.values()
    return held


@contextmanager
def busy(lock: Any) -> Iterator[None]:
    """As if an epoch ran: somebody else has the lock."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(LONG_S)

    thread = ends(hold)
    assert taken.wait(LONG_S)
    try:
        yield
    finally:
        over.set()
        thread.join(LONG_S)


def test_residents_are_opened_while_a_group_that_grows_waits_for_its_epoch() -> None:
    pond, _, _ = opened(LossyFiles())
    with busy(group_slice(pond).lock):
        growing = ends(lambda: pond.table("u", key="k long", value="x long", default={"x": 0}, group="g"))
        growing.join(0.2)
        assert growing.is_alive()
        opening = ends(lambda: pond.state("s", key="long", value="long"))
        opening.join(LONG_S)
        assert not opening.is_alive()
        assert growing.is_alive()
    growing.join(LONG_S)
    assert not growing.is_alive()
    assert set(pond.tables()) == {"t", "u"}
    pond.validate()


def test_residents_are_opened_while_slices_wait_for_an_epoch() -> None:
    pond, _, _ = opened(LossyFiles())
    coordinator = pond.coordinator
    with busy(coordinator._commits._locks["g"]):
        placing = ends(lambda: coordinator.place([0] * 4))
        opening = ends(lambda: pond.state("s", key="long", value="long"))
        opening.join(LONG_S)
        assert not opening.is_alive()
        assert placing.is_alive()
    placing.join(LONG_S)
    assert not placing.is_alive()


def test_a_container_answers_a_ping_and_checkpoints_while_a_group_is_busy() -> None:
    pond, _, adding = opened(LossyFiles())
    adding(one_event(1), 0)
    container = pond.hosting.services[0]
    born = container.core.holding("g").resident.born
    with busy(group_slice(pond).lock), busy(container._epoch_locks["g"]):
        dropping = ends(lambda: container.call(DropResident("g", born)))
        dropping.join(0.2)
        assert dropping.is_alive()
        for work in (lambda: container.call(Ping()), container.checkpoint):
            thread = ends(work)
            thread.join(LONG_S / 2)
            assert not thread.is_alive()
    dropping.join(LONG_S)
    assert not dropping.is_alive()
    assert "g" not in container.core.holdings


def test_a_slice_in_which_an_epoch_begins_after_the_plan_stays_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (core, checkpoints):
        monkeypatch.setattr(module, "BUSY_S_MAX", 0.01)
    files = LossyFiles()
    pond, table, adding = opened(files)
    adding(one_event(1), 0)
    container, held = pond.hosting.services[0], group_slice(pond)
    plan_checkpoint = container.core.plan_checkpoint

    with monkeypatch.context() as patch, ExitStack() as running:

        def planned(*asked: Any) -> Any:
            plan = plan_checkpoint()
            running.enter_context(busy(held.lock))
            return plan

        patch.setattr(container.core, "plan_checkpoint", planned)
        container.checkpoint()
    group_id = container.core.holding("g").resident.id
    assert container.call(ContainerStatus()).behind == [group_id]
    assert held.dirty
    adding(one_event(10), 1)
    pond, table, adding = opened(files.crash())
    assert table.snapshot()["x"].to_pylist() == [11]
    pond.checkpoint()
    assert pond.hosting.services[0].call(ContainerStatus()).behind == []
    pond.validate()


def test_a_question_that_waited_while_the_container_was_stopped_brings_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pond, _, adding = opened(LossyFiles())
    adding(one_event(1), 0)
    container, now_s = pond.hosting.services[0], [100.0]
    monkeypatch.setattr(container._runtime, "now", lambda: now_s[0])
    first = container.call(Ping(4.0))
    now_s[0] += 0.5
    second = container.call(Ping(4.0, first.number))
    container._lease.check()
    # Stopped, and relieved; these were sent before.
    now_s[0] += 10
    late = [container.call(Ping(4.0, second.number)) for _ in range(3)]
    with pytest.raises(Unavailable):
        container._lease.check()
    # Who hears what it answers now has not relieved it.
    container.call(Ping(4.0, late[-1].number))
    container._lease.check()


def test_a_lease_that_never_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A canary of the same."""
    monkeypatch.setattr(Lease, "holds", lambda _: True)
    with pytest.raises(pytest.fail.Exception):
        test_a_question_that_waited_while_the_container_was_stopped_brings_no_lease(monkeypatch)


def test_who_waits_for_a_busy_slice_keeps_nobody_from_the_others() -> None:
    """Slices are asked together, as far as they are free."""
    pond = LocalPond(LossyFiles(), slices=4)
    state = pond.state("s", key="long", value="long")
    rows = pa.table({"k": list(range(40)), "t": [1] * 40, "v": list(range(40))})
    feed = state.update(key="k", at="t", value="v", name="feed")
    feed(rows, 0)
    state.finish("feed")
    holding = pond.hosting.services[0].core.holding("s")
    helds = [held for _, held in sorted(holding.slices.items())]
    answers: list[Any] = []
    fetch = state.fetch(key="k", at="t", into="v")
    with busy(helds[2].lock):
        asking = ends(lambda: answers.append(fetch.now(rows.select(["k", "t"]))))
        asking.join(0.3)
        assert asking.is_alive(), "one of its slices is busy"
        for number in (0, 1, 3):
            assert helds[number].lock.acquire(timeout=LONG_S / 2), f"slice {number} is free"
            helds[number].lock.release()
    asking.join(LONG_S)
    assert answers[0]["v"].to_pylist() == list(range(40))
    assert sum(held.load.rows_fetched for held in helds) == 40
    pond.close()
