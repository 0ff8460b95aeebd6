"""Canaries: with a promise of transactions deliberately broken, the checks beside this file must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_transactions
import txn_driving
from msgspec.structs import replace
from test_broken_promises import assert_fails, forgetful
from txn_driving import World

import millpond.container.placing
import millpond.container.recovery
import millpond.ops.intake
import millpond.ops.transactions
import millpond.txn.run.events
from millpond.container import core
from millpond.container.holdings import group
from millpond.container.holdings.base import HeldSlice
from millpond.container.holdings.group import GroupHolding, GroupStore
from millpond.container.log import Log
from millpond.coordinator import epochs, updates
from millpond.durable.crashpoints import armed
from millpond.errors import MillpondError
from millpond.stores.delayed import DelayedEvents
from millpond.stores.outputs import Outputs
from millpond.testing import LossyFiles
from millpond.txn.compiler import codegen
from millpond.txn.compiler.values import CannotCompile
from millpond.txn.run.interpreter import WriteLog


@pytest.fixture(autouse=True)
def sound_memory() -> Iterator[None]:
    """What the checks remember of unbroken runs is found out before anything is broken; what is broken, they forget."""
    for containers in test_transactions.THEN:
        test_transactions.models(containers)
        test_transactions.hits(containers)
    test_transactions.cuts.cache_clear()
    yield
    test_transactions.cuts.cache_clear()


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
    group._loaded.cache_clear()
    monkeypatch.setattr(codegen, "check", lambda function, _: CannotCompile(function.found.tree, "asked for"))
    yield
    group._loaded.cache_clear()


@pytest.mark.long
def test_the_whole_history_is_right_when_nothing_is_broken(interpreted: None) -> None:
    whole_history()


def test_events_in_the_order_in_which_they_came(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    monkeypatch.setattr(millpond.txn.run.events, "time_order", lambda times, seqs: np.arange(len(times)))
    noticed(whole_history)


def test_seq_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = millpond.txn.run.events.time_order
    monkeypatch.setattr(millpond.txn.run.events, "time_order", lambda times, seqs: sound(times, None))
    noticed(whole_history)


def test_aborts_that_leave_a_trace(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    monkeypatch.setattr(WriteLog, "undo", lambda self: self.entries.clear())
    noticed(whole_history)


def test_aborts_that_undo_all_but_the_first_write(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    sound = WriteLog.undo

    def undo(self: WriteLog) -> None:
        del self.entries[:1]
        sound(self)

    monkeypatch.setattr(WriteLog, "undo", undo)
    noticed(whole_history)


def test_groups_that_forget_what_they_have_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful(monkeypatch)
    noticed(test_transactions.test_what_a_snapshot_holds_is_not_run_again)


def test_epochs_that_are_seen_before_they_are_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldSlice, "decided_copy", lambda self: self.store.copy())
    noticed(test_transactions.test_readers_see_whole_epochs_only, 1)
    noticed(test_transactions.test_what_a_snapshot_holds_is_not_run_again)


def test_epochs_that_were_given_up_and_leave_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def undo(self: GroupHolding, ready: Any) -> None:
        self.slices[self._home].undecided = None

    monkeypatch.setattr(GroupHolding, "undo", undo)
    noticed(test_transactions.test_an_epoch_whose_decision_failed_runs_with_the_program_that_comes_next)


def test_undecided_epochs_that_are_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.container.recovery, "_undecided", lambda heads, decided: [])
    noticed(crash_points, "log.dirsync.after")
    noticed(crash_points, "journal.append.before")


def test_decided_epochs_that_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.container.recovery, "_concerned", lambda *given: {})
    noticed(crash_points, "publish.after")


def test_epochs_that_recovery_runs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writer's in its own order, but one writer after the other."""
    sound = GroupHolding.replay
    waiting: list[Any] = []

    def replay(self: GroupHolding, record: Any, slices: Any) -> int:
        if record.writer.startswith("other@"):
            waiting.append((self, record, slices))
            return 0
        return sound(self, record, slices)

    rebuild = millpond.container.placing.rebuild

    def rebuilt(*given: Any) -> Any:
        slices = rebuild(*given)
        for holding, record, held in waiting:
            for one in held.values():
                one.vector.pop(record.writer, None)
            sound(holding, record, held)
        waiting.clear()
        return slices

    monkeypatch.setattr(GroupHolding, "replay", replay)
    monkeypatch.setattr(millpond.container.placing, "rebuild", rebuilt)
    noticed(crash_points, "publish.after", "apply.after", "log.append.before", "truncate.before")


def test_old_epochs_that_recovery_runs_with_new_code(monkeypatch: pytest.MonkeyPatch) -> None:
    newest: dict[str, Any] = {}
    sound = group.functions_of

    def functions_of(work: Any) -> Any:
        kinds = work.functions.kinds
        if "move" in kinds and "2 * n" in kinds["move"].code.source:
            newest["move"] = kinds["move"]
        if "move" in kinds and "move" in newest:
            other = replace(work.functions, kinds={**kinds, "move": newest["move"]})
            return sound(replace(work, functions=other))
        return sound(work)

    monkeypatch.setattr(group, "functions_of", functions_of)
    noticed(crash_points, "publish.after", "apply.after", "log.append.before")


def test_what_was_prepared_with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was prepared under an earlier number counts, if the events are the same."""
    sound = core.Core.begin

    def begin(self: core.Core, message: Any) -> Any:
        logged = self._logged.get(message.resident)
        if logged is None or logged.ready.record.turn != message.turn:
            return sound(self, message)
        record = logged.ready.record._replace(ballot=message.ballot)
        self._logged[message.resident] = logged._replace(ready=logged.ready._replace(record=record))
        return self._prepared(record)

    monkeypatch.setattr(core.Core, "begin", begin)
    noticed(test_transactions.test_an_epoch_whose_decision_failed_runs_with_the_program_that_comes_next)


def test_late_events_that_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = millpond.ops.intake.late_rows
    monkeypatch.setattr(
        millpond.ops.intake, "late_rows", lambda times, late_below: sound(times, -float("inf"))
    )
    noticed(whole_history)


def test_changed_epochs_that_are_taken_for_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (updates, epochs):
        monkeypatch.setattr(module, "digest_of", lambda message: 0)
        monkeypatch.setattr(module, "rows_of", lambda message: 0)
    monkeypatch.setattr(updates, "source_of", lambda message: None)
    sound = core.Core._prepared
    monkeypatch.setattr(
        core.Core, "_prepared", lambda self, record: type(sound(self, record))(self.term, 0, 0)
    )
    noticed(test_transactions.test_outputs_are_kept_for_the_last_epochs_and_then_gone)


def test_outputs_that_a_checkpoint_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GroupStore.export

    def export(self: GroupStore) -> Any:
        other = self.copy()
        other.outputs = Outputs()
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
    sound = Log.append

    def append(self: Log, *given: Any) -> int:
        try:
            return sound(self, *given)
        except MillpondError:
            self.core.seq += 1
            raise

    monkeypatch.setattr(Log, "append", append)

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


# Events that wait


def test_a_checkpoint_that_overlooks_events_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GroupStore.export

    def export(self: GroupStore) -> Any:
        other = self.copy()
        other.delayed = {}
        return sound(other)

    monkeypatch.setattr(GroupStore, "export", export)
    noticed(crash_points, "truncate.after")


def test_events_that_run_and_wait_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = DelayedEvents.split
    monkeypatch.setattr(DelayedEvents, "split", lambda self, watermark: (sound(self, watermark)[0], self))
    noticed(whole_history)


def test_events_that_run_as_soon_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = group.due_events
    monkeypatch.setattr(
        group, "due_events", lambda new, waited, work: sound(new, waited, replace(work, watermark=None))
    )
    noticed(whole_history)


def test_events_at_the_watermark_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another of the same time, and a lower seq, may still come."""
    sound = group.due_events

    def due(new: Any, waited: Any, work: Any) -> Any:
        beyond = None if work.watermark is None else work.watermark + 1
        return sound(new, waited, replace(work, watermark=beyond))

    monkeypatch.setattr(group, "due_events", due)
    noticed(whole_history)


def test_events_of_undecided_epochs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = GroupHolding._run

    def run(self: GroupHolding, record: Any, store: GroupStore, *watch: Any) -> Any:
        ran = sound(self, record, store, *watch)
        store.delayed = ran.delayed
        return ran

    monkeypatch.setattr(GroupHolding, "_run", run)

    def check() -> None:
        world, steps = World(LossyFiles()), test_transactions.steps_of(1)
        place = next(n for n, step in enumerate(steps) if getattr(step, "program", None) is txn_driving.SLOW)
        for step in steps[: place + 1]:
            step.on_pond(world)

        def full_disk(_point: str) -> None:
            raise OSError(28, "No space left on device")

        with armed("journal.append.before", action=full_disk), pytest.raises(MillpondError):
            steps[place + 1].on_pond(world)
        txn_driving.check_same(test_transactions.models(1)[place + 1], world.pond)

    noticed(check)


def test_a_finish_that_leaves_the_watermark_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.ops.transactions, "TIME_MAX", -1)
    noticed(whole_history)
