"""Canaries: with a promise of transactions deliberately broken, the checks beside this file must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_transactions
import txn_driving
from test_broken_promises import assert_fails
from txn_driving import World

import millpond.container.group
import millpond.container.recovery
import millpond.ops.intake
import millpond.txn.events
from millpond.container import core
from millpond.container.group import GroupStore, HeldGroup
from millpond.container.held import HeldSlice
from millpond.coordinator import decisions
from millpond.durable.crashpoints import armed
from millpond.errors import MillpondError
from millpond.testing import LossyFiles
from millpond.txn import codegen
from millpond.txn._code import CannotCompile
from millpond.txn.interpreter import Log


@pytest.fixture(autouse=True)
def sound_memory() -> None:
    """What the checks remember of unbroken runs is found out before anything is broken."""
    for containers in test_transactions.THEN:
        test_transactions.models(containers)
        test_transactions.hits(containers)


def noticed(check: Callable[..., Any], *arguments: Any) -> None:
    """The check fails, or the pond itself refuses."""

    def checked() -> None:
        try:
            check(*arguments)
        except MillpondError as error:
            raise AssertionError(str(error)) from error

    assert_fails(checked)


def whole_history() -> None:
    """Without a crash, and reopened at the end."""
    world = World(LossyFiles())
    for done, step in enumerate(test_transactions.steps_of(3), start=1):
        step.on_pond(world)
        txn_driving.check_same(test_transactions.models(3)[done], world.pond, repr(step))
    again = World(test_transactions.after(world.files, "all", 0))  # type: ignore[arg-type]
    again.start(1)
    txn_driving.check_same(test_transactions.models(3)[-1], again.pond)


def crash_points(*points: str) -> None:
    for point in points:
        for containers in test_transactions.THEN:
            test_transactions.test_a_crash_at_any_point_leaves_whole_epochs(point, containers)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every function runs as plain Python, in programs that are made here only."""
    millpond.container.group._loaded.cache_clear()
    monkeypatch.setattr(codegen, "check", lambda function, _: CannotCompile(function.found.tree, "asked for"))
    yield
    millpond.container.group._loaded.cache_clear()


def test_the_whole_history_is_right_when_nothing_is_broken(interpreted: None) -> None:
    whole_history()


def test_events_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr(millpond.txn.events, "time_order", lambda times, seqs: np.arange(len(times)))
    noticed(whole_history)


def test_seq_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = millpond.txn.events.time_order
    monkeypatch.setattr(millpond.txn.events, "time_order", lambda times, seqs: sound(times, None))
    noticed(whole_history)


def test_aborts_that_leave_a_trace(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    monkeypatch.setattr(Log, "undo", lambda self: self.entries.clear())
    noticed(whole_history)


def test_aborts_that_undo_all_but_the_first_write(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    sound = Log.undo

    def undo(self: Log) -> None:
        del self.entries[:1]
        sound(self)

    monkeypatch.setattr(Log, "undo", undo)
    noticed(whole_history)


def test_groups_that_forget_what_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(dict[str, int]):
        def get(self, key: str, default: Any = None) -> Any:
            return default

    sound = HeldSlice.__init__

    def init(self: HeldSlice[Any], *given: Any) -> None:
        sound(self, *given)
        self.vector = Forgetful()

    monkeypatch.setattr(HeldSlice, "__init__", init)
    read = millpond.container.recovery.read_snapshot
    monkeypatch.setattr(
        millpond.container.recovery, "read_snapshot", lambda *given: (read(*given)[0], Forgetful())
    )
    noticed(test_transactions.test_what_a_snapshot_holds_is_not_run_again)


def test_epochs_that_run_before_they_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = HeldGroup.check_epoch

    def check_epoch(self: HeldGroup, record: Any) -> None:
        sound(self, record)
        self.apply(record, [self.spec.home], lambda work, items, rows: None)

    monkeypatch.setattr(HeldGroup, "check_epoch", check_epoch)
    noticed(test_transactions.test_readers_see_whole_epochs_only, 1)


def test_undecided_epochs_that_are_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.container.recovery, "_undecided", lambda heads, assign: set())
    noticed(crash_points, "log.dirsync.after")
    noticed(crash_points, "journal.append.before")


def test_decided_epochs_that_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.container.recovery, "_concerns", lambda head, owned, slices: False)
    noticed(crash_points, "publish.after")


def test_epochs_that_recovery_runs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer's in its own order, but one writer after the other."""
    sound = core.Core.replay
    waiting: dict[int, list[Any]] = {}

    def replay(self: core.Core, record: Any, logged: Any) -> int:
        if record.writer.startswith("other@"):
            waiting.setdefault(id(self), []).append((record, logged))
            return 0
        return sound(self, record, logged)

    recover = millpond.container.service.recover  # type: ignore[attr-defined]

    def recovered(given: core.Core, *arguments: Any) -> Any:
        found = recover(given, *arguments)
        for record, logged in waiting.pop(id(given), []):
            sound(given, record, logged)
        return found

    monkeypatch.setattr(core.Core, "replay", replay)
    monkeypatch.setattr("millpond.container.service.recover", recovered)
    noticed(crash_points, "publish.after", "apply.after", "log.append.before", "truncate.before")


def test_old_epochs_that_recovery_runs_with_new_code(monkeypatch: pytest.MonkeyPatch) -> None:
    newest: dict[str, Any] = {}
    sound = millpond.container.group.program_of

    def program_of(transactions: Any) -> Any:
        kinds = transactions.program.kinds
        if "move" in kinds and "2 * n" in kinds["move"].code.source:
            newest["move"] = transactions.program.kinds["move"]
        if "move" in kinds and "move" in newest:
            program = type(transactions.program)(
                {**kinds, "move": newest["move"]}, transactions.program.tables
            )
            return millpond.container.group._loaded(millpond.container.group.msgspec.msgpack.encode(program))
        return sound(transactions)

    monkeypatch.setattr(millpond.container.group, "program_of", program_of)
    noticed(crash_points, "publish.after", "apply.after", "log.append.before")


def test_what_was_prepared_with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_same", lambda one, two: (one.epoch, one.digest) == (two.epoch, two.digest))
    noticed(test_transactions.test_an_epoch_whose_decision_failed_runs_with_the_program_that_comes_next)


def test_late_events_that_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = millpond.ops.intake.late_rows
    monkeypatch.setattr(
        millpond.ops.intake, "late_rows", lambda times, late_below: sound(times, -float("inf"))
    )
    noticed(whole_history)


def test_changed_epochs_that_are_taken_for_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "digest_of", lambda message: 0)
    monkeypatch.setattr(decisions, "rows_of", lambda message: 0)
    sound = core.Core._prepared
    monkeypatch.setattr(
        core.Core, "_prepared", lambda self, record: type(sound(self, record))(self.term, 0, 0)
    )
    noticed(test_transactions.test_outputs_are_kept_for_the_last_epochs_and_then_gone)


def test_outputs_that_a_checkpoint_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GroupStore.export

    def export(self: GroupStore) -> Any:
        other = self.copy()
        other.outputs = {}
        return sound(other)

    monkeypatch.setattr(GroupStore, "export", export)
    noticed(test_transactions.test_outputs_are_kept_for_the_last_epochs_and_then_gone)
    noticed(crash_points, "truncate.after")


def test_a_checkpoint_that_overlooks_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GroupStore.export

    def export(self: GroupStore) -> Any:
        other = self.copy()
        other.tables = {name: table for name, table in other.tables.items() if name != "b"}
        return sound(other)

    monkeypatch.setattr(GroupStore, "export", export)
    noticed(crash_points, "truncate.after")


def test_a_log_number_that_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch that could not be logged takes a number with it: the next recovery misses a record."""
    monkeypatch.setattr(core.Core, "append_failed", lambda self, append: None)

    def full_disk(_point: str) -> None:
        raise OSError(28, "No space left on device")

    def check() -> None:
        world = World(LossyFiles())
        steps = test_transactions.steps_of(1)
        for step in steps[:6]:
            step.on_pond(world)
        with armed("log.append.before", action=full_disk), pytest.raises(MillpondError):
            steps[6].on_pond(world)
        steps[6].on_pond(world)
        again = World(test_transactions.after(world.files, "all", 0))  # type: ignore[arg-type]
        again.start(1)

    noticed(check)
