"""Whoever watches an epoch is told which event is at work, compiled or not, in every plan."""

from __future__ import annotations

import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from millpond.code.tables import TableSpec
from millpond.kernels._jit import JIT_ENABLED
from millpond.txn import TransactionSet, Watch, transaction

TABLES = {"t": TableSpec("long", "x long", {"x": 0})}
COUNT, SLOW = 300, 123


@transaction
def slow_body(t, k, n):
    y = t[k].x + n
    for i in range(y):
        for j in range(y):
            t[k].x = (t[k].x * 3 + i * j) % 3


@transaction
def slow_keys(t, k, n):
    for i in range(n):
        for j in range(n):
            t[k].x = (t[k].x * 3 + i * j) % 3


@transaction
def slow_text(t, k, n):
    for i in range(n // 40):
        t[k].x = len(f"{i}")


def watched(function: Any, n: int, threads: int, plan: str | None) -> str:
    """What the watch says most of the time."""
    columns = {"ts": range(COUNT), "k": [i % 7 for i in range(COUNT)], "type": ["go"] * COUNT}
    events = pa.table({**columns, "n": [n if i == SLOW else 1 for i in range(COUNT)]})
    transactions = TransactionSet({"go": function}, TABLES)
    arranged = transactions.arrange(events, kind="type", at="ts")
    watch = Watch(seconds_max=60.0)
    watch.tells_of(events, "ts")
    assert watch.where() == ""
    stores = transactions.stores()
    worker = threading.Thread(
        target=transactions.execute, args=(arranged, stores, threads, plan), kwargs={"watch": watch}
    )
    worker.start()
    said: list[str] = []
    while worker.is_alive():
        said.append(watch.where())
        time.sleep(0.01)
    worker.join()
    assert 0 < watch.spent_s < 60
    told = [one for one in said if one]
    assert told, "it was at no event at any time"
    return max(set(told), key=told.count)


@pytest.mark.skipif(not JIT_ENABLED, reason="it is about compiled code")
@pytest.mark.parametrize("plan", ["serial", "chains", "groups", "rounds"])
def test_the_event_that_is_at_work_is_named(plan: str) -> None:
    for function in (slow_body, slow_keys) if plan == "serial" else (slow_body,):
        assert f"event {SLOW} of {COUNT}, a 'go' with ts={SLOW}, k={SLOW % 7}, n=" in watched(
            function, 6_000, 2, plan
        )


@pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
def test_an_interpreted_event_is_named() -> None:
    assert f"event {SLOW} of {COUNT}, a 'go' with ts={SLOW}" in watched(slow_text, 4_000_000, 1, None)
