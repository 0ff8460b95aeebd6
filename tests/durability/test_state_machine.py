"""A pond and the oracle side by side, through whatever hypothesis comes up with.

The same histories every time, so that CI is quick and repeats itself. `MILLPOND_SOAK=500` runs that many
fresh ones instead, and longer ones; a failure prints the steps to a regression test.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import driving
import pyarrow as pa
import pytest
from driving import KINDS, Model, World, table_of
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from millpond.code import rules
from millpond.durable.crashpoints import POINTS, SimulatedCrash, armed
from millpond.errors import MillpondError
from millpond.ops.columns import time_kind_in
from millpond.ops.intake import Part
from millpond.ops.update import Update
from millpond.testing import LossyFiles, Oracle
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import BeginEpoch, CommitEpoch
from millpond.wire.states import RowsWork

SOAK = int(os.environ.get("MILLPOND_SOAK", "0"))

states = st.sampled_from(sorted(KINDS))
updaters = st.sampled_from(["one", "one", "one", "two", "two", "three"])
fetchers = st.sampled_from(["views", "bills"])
# A key and a value by their places, and a time relative to the updater's watermark.
rows = st.lists(st.tuples(st.integers(0, 6), st.integers(-4, 8), st.integers(0, 9)), max_size=7)
# A time near one of the two progresses, where the answers change.
times = st.tuples(st.sampled_from(["F", "U", "U"]), st.integers(-6, 3))
delays = st.integers(0, 3)
losses = st.sampled_from(["nothing", "all", "content", "names", "some"])
counts = st.sampled_from([1, 2, 3, 5])
IN_A_COMMIT = [point for point in POINTS if not point.startswith(("snapshot.", "manifest."))]
IN_A_CONTAINER = [
    point for point in IN_A_COMMIT if not point.startswith(("journal.", "publish.", "truncate."))
]


seen: Counter[str] = Counter()
"""Which refusals and faults came about. A test that never met one has not tested it."""


def outcome(call: Callable[[], Any]) -> Any:
    """What the call gives, or the type of the error."""
    try:
        return call()
    except MillpondError as error:
        name = type(error).__name__
        seen[name] += 1
        return name


class Side(RuleBasedStateMachine):
    """Every rule does the same to both, and compares what they answer."""

    containers = 1

    @initialize(seed=st.integers(0, 2**16))
    def open(self, seed: int) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(driving.mortal_containers())
        self.files = LossyFiles(seed)
        self.world = World(self.files)
        self.model = Model()
        self.committed: dict[tuple[str, str, int], list[Any]] = {}
        self.world.start(self.containers)
        for state in KINDS:
            driving.OpenState(state).on_pond(self.world)
            driving.OpenState(state).on_model(self.model)

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()

    # Both sides

    def oracle(self, state: str) -> Oracle:
        return self.model.states[state]

    def operator(self, state: str, updater: str, delay: int, late: str) -> Update:
        return self.world.pond.state(state).update(
            key="k", at="t", value="v", delay=delay, late=late, name=updater
        )

    def next_epoch(self, state: str, updater: str) -> int:
        known = self.oracle(state).updaters.get(updater)
        return max(known.epochs) + 1 if known and known.epochs else 0

    def actual_rows(self, state: str, updater: str, drawn: list[Any]) -> list[Any]:
        known = self.oracle(state).updaters.get(updater)
        base = known.progress if known and not math.isinf(known.progress) else 4
        kind = KINDS[state]
        values = (None, *range(-4, 5)) if kind.value == "long" else (None, "", *"abcdefgh")
        return [(kind.keys[key], int(base) + offset, values[value]) for key, offset, value in drawn]

    def on_oracle(
        self, state: str, updater: str, epoch: int, some: list[Any], delay: int, late: str = "drop"
    ) -> Any:
        """The oracle's receipt, as far as the pond tells of it."""
        oracle = self.oracle(state)
        oracle.register_updater(updater)
        self.model.late.setdefault((state, updater), 0)
        receipt = oracle.update(updater, epoch, some, delay=delay, late=late)  # type: ignore[arg-type]
        self.model.late[state, updater] += receipt.late
        if not receipt.replayed:
            self.committed[state, updater, epoch] = some
        return receipt.replayed

    def on_pond(
        self, state: str, updater: str, epoch: int, some: list[Any], delay: int, late: str = "drop"
    ) -> Any:
        return self.operator(state, updater, delay, late)(table_of(state, some), epoch).replayed

    def commit(self, *arguments: Any) -> None:
        found = outcome(lambda: self.on_pond(*arguments))
        seen["replay"] += found is True
        expected = outcome(lambda: self.on_oracle(*arguments))
        assert found == expected, f"{arguments}: expected {expected}, found {found}"

    def moment(self, state: str, drawn: tuple[str, int]) -> int:
        anchor, offset = drawn
        oracle = self.oracle(state)
        base = oracle.fetch_progress if anchor == "F" else oracle.update_progress
        return (int(base) if not math.isinf(base) else 9) + offset

    # Updates

    @rule(state=states, updater=updaters)
    def register(self, state: str, updater: str) -> None:
        def expected() -> None:
            self.oracle(state).register_updater(updater)
            self.model.late.setdefault((state, updater), 0)

        found = outcome(lambda: self.operator(state, updater, 0, "drop") and None)
        assert found == outcome(expected)

    @rule(
        state=states,
        updater=updaters,
        drawn=rows,
        delay=delays,
        late=st.sampled_from(["drop", "drop", "error"]),
    )
    def update(self, state: str, updater: str, drawn: list[Any], delay: int, late: str) -> None:
        epoch = self.next_epoch(state, updater)
        self.commit(state, updater, epoch, self.actual_rows(state, updater, drawn), delay, late)

    @rule(state=states, updater=updaters, drawn=rows, jump=st.sampled_from([-9, 1, 2]))
    def update_out_of_order(self, state: str, updater: str, drawn: list[Any], jump: int) -> None:
        epoch = max(0, self.next_epoch(state, updater) + jump)
        self.commit(state, updater, epoch, self.actual_rows(state, updater, drawn), 0)

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), delay=delays)
    def replay(self, data: st.DataObject, delay: int) -> None:
        """The same rows in any order: nothing happens."""
        state, updater, epoch = data.draw(st.sampled_from(sorted(self.committed)))
        again = data.draw(st.permutations(self.committed[state, updater, epoch]))
        self.commit(state, updater, epoch, list(again), delay)

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), drawn=rows, keep=st.booleans())
    def replay_with_other_rows(self, data: st.DataObject, drawn: list[Any], keep: bool) -> None:
        """An error; unless all that differs was late, or nothing differs."""
        state, updater, epoch = data.draw(st.sampled_from(sorted(self.committed)))
        other = self.actual_rows(state, updater, drawn)
        if keep:
            other = self.committed[state, updater, epoch] + other
        self.commit(state, updater, epoch, other, 0)

    @rule(state=states, updater=updaters, first=rows, second=rows, first_counts=st.booleans())
    def attempts(
        self, state: str, updater: str, first: list[Any], second: list[Any], first_counts: bool
    ) -> None:
        """Two attempts stage different rows of an epoch; the driver has a receipt of one alone."""
        known = self.oracle(state).updaters.get(updater)
        if known is None or known.progress == math.inf:
            return
        epoch = self.next_epoch(state, updater)
        operator = self.operator(state, updater, 1, "drop")
        both = [self.actual_rows(state, updater, drawn) for drawn in (first, second)]
        plan = operator._client.call(BeginEpoch(state, updater, LOCAL_QUERY, Turn(epoch), "continue"))
        tables, part = [table_of(state, some) for some in both], Part(LOCAL_QUERY, Turn(epoch), 0)
        staged = [operator._intake.stage(operator._client, table, plan, part) for table in tables]
        chosen = 0 if first_counts else 1
        committed = operator._client.call(
            CommitEpoch(
                resident=state,
                updater=updater,
                query=LOCAL_QUERY,
                turn=Turn(epoch),
                history="continue",
                delay=1,
                late_below=plan.late_below,
                time_kind=time_kind_in(tables[chosen], operator._intake.at) if both[chosen] else "",
                work=RowsWork(),
                receipts=[staged[chosen]],
            )
        )
        assert committed.replayed is self.on_oracle(state, updater, epoch, both[chosen], 1)

    # Progress

    @rule(state=states, updater=updaters, ahead=st.integers(-5, 6))
    def report_update(self, state: str, updater: str, ahead: int) -> None:
        base = self.oracle(state).update_progress
        value = int(base) + ahead if not math.isinf(base) else ahead
        found = outcome(lambda: self.world.pond.state(state).report(updater, update=value))
        assert found == outcome(lambda: self.oracle(state).report(updater, update=value))

    @rule(state=states, fetcher=fetchers, behind=st.sampled_from([-math.inf, -2, 0, 0, 1, 3, 9]))
    def report_fetch(self, state: str, fetcher: str, behind: float) -> None:
        base = self.oracle(state).update_progress
        value = int(base) - behind if not math.isinf(base) and not math.isinf(behind) else -math.inf
        driving.Report(state, fetcher, value).on_pond(self.world)
        driving.Report(state, fetcher, value).on_model(self.model)

    @precondition(lambda self: len(self.committed) > 2)
    @rule(state=states, updater=updaters)
    def finish(self, state: str, updater: str) -> None:
        found = outcome(lambda: self.world.pond.state(state).finish(updater))
        assert found == outcome(lambda: self.oracle(state).finish(updater))

    # Upkeep and faults

    @rule()
    def checkpoint(self) -> None:
        self.world.pond.checkpoint()

    @rule()
    def upkeep(self) -> None:
        driving.Upkeep().on_pond(self.world)
        for oracle in self.model.states.values():
            oracle.compact()

    @rule(number=st.integers(0, 4))
    def kill_a_container(self, number: int) -> None:
        services = sorted(self.world.pond.hosting.services)
        self.world.pond.hosting.kill(services[number % len(services)])
        for container in services:
            self.world.pond.coordinator.recover(container)

    @rule(
        state=states,
        updater=updaters,
        drawn=rows,
        point=st.sampled_from(IN_A_CONTAINER),
        hit=st.integers(1, 4),
    )
    def update_while_a_container_dies(
        self, state: str, updater: str, drawn: list[Any], point: str, hit: int
    ) -> None:
        with armed(point, hit, action=driving.die) as plan:
            self.update(state, updater, drawn, 2, "drop")
        seen["container died"] += plan.fired

    @rule(lose=losses, containers=counts)
    def crash(self, lose: str, containers: int) -> None:
        self.files = self.files.crash(lose)  # type: ignore[arg-type]
        self.world = World(self.files)
        self.world.start(containers)

    @precondition(lambda self: self.committed)
    @rule(
        data=st.data(),
        drawn=rows,
        point=st.sampled_from(IN_A_COMMIT),
        hit=st.integers(1, 4),
        lose=losses,
        containers=counts,
    )
    def crash_in_an_update(
        self, data: st.DataObject, drawn: list[Any], point: str, hit: int, lose: str, containers: int
    ) -> None:
        state, updater, _ = data.draw(st.sampled_from(sorted(self.committed)))
        with armed(point, hit, action=self.files.halt):
            try:
                self.update(state, updater, drawn, 1, "drop")
            except SimulatedCrash:
                pass
            else:
                return
        self.crash(lose, containers)
        seen["crash in an update"] += 1
        epoch = self.next_epoch(state, updater)
        if self.world.pond._client.call(
            BeginEpoch(state, updater, LOCAL_QUERY, Turn(epoch), "continue")
        ).replayed:
            seen["update there after a crash"] += 1
            self.on_oracle(state, updater, epoch, self.actual_rows(state, updater, drawn), 1)

    @rule(lose=losses, containers=counts, hit=st.integers(1, 30))
    def crash_in_a_checkpoint(self, lose: str, containers: int, hit: int) -> None:
        point = (
            "snapshot.rename.after",
            "manifest.rename.before",
            "manifest.dirsync.after",
            "truncate.after",
        )[hit % 4]
        with armed(point, hit // 4 + 1, action=self.files.halt):
            try:
                self.world.pond.checkpoint()
            except SimulatedCrash:
                self.crash(lose, containers)
                seen["crash in a checkpoint"] += 1

    # Reads

    @rule(state=states, key=st.integers(0, 6), at=times)
    def fetch_latest(self, state: str, key: int, at: Any) -> None:
        at = self.moment(state, at)
        asked = KINDS[state].keys[key]
        fetch = self.world.pond.state(state).fetch(key="k", at="t", into="answer")
        table = table_of(state, [(asked, at, None)]).drop_columns(["v"])
        found = outcome(lambda: fetch.now(table)["answer"].to_pylist()[0])
        assert found == outcome(lambda: self.oracle(state).fetch_latest(asked, at)), (asked, at)

    @rule(state=states, low=times, length=st.integers(-1, 8), data=st.data())
    def fetch_range(self, state: str, low: Any, length: int, data: st.DataObject) -> None:
        kind = KINDS[state]
        name = data.draw(st.sampled_from(kind.rules))
        low = self.moment(state, low)
        high = low + length
        fetch = self.world.pond.state(state).fetch(
            key="k", between=("lo", "hi"), into="answer", rule=getattr(rules, name)()
        )
        keys = pa.array(kind.keys, kind.key_type)
        bounds = [pa.array([bound] * len(keys), pa.int64()) for bound in (low, high)]
        table = pa.table([keys, *bounds], ["k", "lo", "hi"])
        found = outcome(lambda: [*fetch.now(table)["answer"].to_pylist()])
        oracle = self.oracle(state)
        assert found == outcome(lambda: [oracle.fetch_range(key, low, high, name) for key in kind.keys])

    @rule(state=states, at=st.one_of(st.none(), times))
    def snapshot(self, state: str, at: Any) -> None:
        at = at and self.moment(state, at)

        def found() -> dict[Any, Any]:
            table = self.world.pond.state(state).snapshot(at).to_pylist()
            assert len({row["key"] for row in table}) == len(table)
            return {row["key"]: (row["time"], row["value"]) for row in table}

        assert outcome(found) == outcome(lambda: self.oracle(state).snapshot(at)), at

    # All of it, at any time

    def brief_model(self) -> dict[str, Any]:
        return {name: driving.brief_of_model(name, self.model) for name in self.model.states}

    def brief_pond(self) -> dict[str, Any]:
        return {name: driving.brief_of_pond(name, self.world.pond) for name in self.model.states}

    @invariant()
    def same(self) -> None:
        found = driving.differences(self.brief_model(), self.brief_pond())
        assert not found, "\n".join(found)
        self.world.pond.validate()


class Three(Side):
    containers = 3


@pytest.mark.timeout(0 if SOAK else 120)
@pytest.mark.parametrize(
    "machine",
    [
        # It differs until the first crash only.
        pytest.param(Side, id="one container", marks=() if SOAK else pytest.mark.long),
        pytest.param(Three, id="three containers"),
    ],
)
def test_the_pond_answers_as_the_oracle_does(machine: type[RuleBasedStateMachine]) -> None:
    seen.clear()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=SOAK or (60 if machine is Three else 120),
            stateful_step_count=100 if SOAK else 40,
            derandomize=not SOAK,
            database=None,
            deadline=None,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink] if SOAK else [Phase.generate],
        ),
    )
    expected = {
        "BelowFetchProgress",
        "EpochChanged",
        "EpochOutOfOrder",
        "LateRows",
        "RowsWaiting",
        "UnknownUpdater",
        "UpdaterFinished",
        "container died",
        "crash in a checkpoint",
        "crash in an update",
        "replay",
        "update there after a crash",
    }
    assert {name for name, count in seen.items() if count} >= expected, seen
