"""Canaries: with a promise deliberately broken, the checks of this directory must fail. They have teeth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import driving
import pytest
import test_corruption
import test_crash_points
import test_state_machine
from driving import World
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

import millpond.container.recovery
import millpond.durable.arrow_files
import millpond.ops.intake
from millpond.container.core import Core
from millpond.container.holdings.state import StateHolding
from millpond.coordinator import epochs, updates
from millpond.errors import CorruptFile, MillpondError
from millpond.testing import LossyFiles


@pytest.fixture(autouse=True)
def sound_memory() -> Iterator[None]:
    """What the checks need of unbroken runs is found out before anything is broken; what they remember is forgotten."""
    for containers in test_crash_points.THEN:
        test_crash_points.hits(containers)
        test_crash_points.container_hits(containers)
    forget()
    yield
    forget()


def forget() -> None:
    test_crash_points.cuts.cache_clear()
    test_crash_points.checked.cache_clear()


def assert_fails(check: Callable[..., Any], *arguments: Any) -> None:
    """The check finds a wrong answer, or the pond finds itself that something is missing."""
    try:
        check(*arguments)
    except (AssertionError, CorruptFile, pytest.fail.Exception):
        return
    raise RuntimeError(f"{check.__name__}{arguments} noticed nothing")


def crash_points(*points: str) -> None:
    for point in points:
        for containers in test_crash_points.THEN:
            test_crash_points.test_a_crash_at_any_point_loses_nothing_and_repeats_nothing(point, containers)


def whole_history() -> None:
    world = World(LossyFiles())
    for done, step in enumerate(test_crash_points.steps_of(3), start=1):
        step.on_pond(world)
        driving.check_same(test_crash_points.picture(3, done), world.pond, repr(step))


def state_machine() -> None:
    """The property test, without the search for the smallest example."""
    try:
        run_state_machine_as_test(
            test_state_machine.Three,
            settings=settings(
                max_examples=60,
                stateful_step_count=40,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
            ),
        )
    except MillpondError as error:
        raise AssertionError(str(error)) from error


def test_the_whole_history_is_right_when_nothing_is_broken() -> None:
    whole_history()


def test_content_that_is_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossyFiles, "sync", lambda self, path: None)
    for point in ("acknowledge.after", "journal.dirsync.after", "manifest.dirsync.after", "publish.after"):
        assert_fails(crash_points, point)
    assert_fails(test_crash_points.test_a_crash_before_any_change_of_the_disk, 1)


def test_names_that_are_not_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LossyFiles, "sync_dir", lambda self, path: None)
    for point in ("acknowledge.after", "journal.dirsync.after", "manifest.dirsync.after", "publish.after"):
        assert_fails(crash_points, point)


@pytest.mark.parametrize("kind", ["log", "snapshot", "manifest", "journal"])
def test_one_kind_of_file_alone_that_is_not_synced(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    sound = LossyFiles.sync
    places = {
        "log": "0.arrow",
        "snapshot": "/snapshots/",
        "manifest": "/manifest.arrow",
        "journal": "/journal/",
    }

    def sync(self: LossyFiles, path: Any) -> None:
        name = str(path).removesuffix(".tmp")
        is_log = "/containers/" in name and not name.endswith("/manifest.arrow")
        if not (is_log if kind == "log" else places[kind] in name):
            sound(self, path)

    monkeypatch.setattr(LossyFiles, "sync", sync)
    assert_fails(crash_points, "publish.after", "truncate.before", "truncate.after", "log.append.before")


def test_undecided_records_that_are_taken_for_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.container.recovery, "_undecided", lambda heads, decided: [])
    assert_fails(crash_points, "log.dirsync.after")
    assert_fails(crash_points, "acknowledge.after")


def test_decided_records_that_are_taken_for_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millpond.container.recovery, "_undecided", lambda heads, decided: list(heads))
    assert_fails(crash_points, "publish.after")


def test_replays_that_are_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = updates.begin_epoch
    monkeypatch.setattr(updates, "begin_epoch", lambda *given: replace(sound(*given), replayed=False))
    assert_fails(state_machine)


def test_changed_epochs_that_are_taken_for_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (updates, epochs):
        monkeypatch.setattr(module, "digest_of", lambda message: 0)
        monkeypatch.setattr(module, "rows_of", lambda message: 0)
    monkeypatch.setattr(Core, "_prepared", lambda self, record: _blank(self))
    assert_fails(state_machine)


def _blank(core: Core) -> Any:
    from millpond.wire.epochs import Prepared

    return Prepared(term=core.term, rows=0, digest=0)


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that are rebuilt do not know what their snapshots hold, and nobody minds."""
    sound = millpond.container.recovery._load_snapshots

    def load(*given: Any) -> int:
        loaded = sound(*given)
        for held in given[-1].values():
            held.vector = {}
        return loaded

    monkeypatch.setattr(millpond.container.recovery, "_load_snapshots", load)
    monkeypatch.setattr(millpond.container.recovery, "_check_complete", lambda *given: None)


def test_slices_that_forget_what_they_have_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    forgetful(monkeypatch)
    assert_fails(test_crash_points.test_what_a_snapshot_holds_is_not_applied_again)


def test_late_rows_that_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = millpond.ops.intake.late_rows
    monkeypatch.setattr(
        millpond.ops.intake, "late_rows", lambda times, late_below: sound(times, -float("inf"))
    )
    assert_fails(whole_history)
    assert_fails(state_machine)


def test_progress_that_is_published_before_the_rows_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = updates.progress
    monkeypatch.setattr(updates, "progress", lambda state, _, silent_s: sound(state, {}, silent_s))
    for containers in test_crash_points.THEN:
        assert_fails(test_crash_points.test_nothing_is_final_before_it_is_visible, containers)


def test_a_checkpoint_that_overlooks_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Core.plan_checkpoint
    monkeypatch.setattr(Core, "plan_checkpoint", lambda self, *asked: sound(self, *asked)._replace(dirty=[]))
    assert_fails(crash_points, "publish.after")


def test_a_checkpoint_that_truncates_what_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Core.plan_checkpoint
    monkeypatch.setattr(
        Core, "plan_checkpoint", lambda self, *asked: sound(self, *asked)._replace(covered=self.seq, dirty=[])
    )
    assert_fails(crash_points, "publish.after")


def check_a_flipped_bit_is_refused(root: Path) -> None:
    """The bit is in the value of one row, so that nothing but the checksum can tell."""
    case = test_corruption.a_log(root)
    value = (61).to_bytes(8, "little")
    holding = [name for name in case.files() if value in (case.root / name).read_bytes()]
    assert holding, "the history writes this value"
    for name in holding:
        data = (case.root / name).read_bytes()
        case.put(name, data.replace(value, (60).to_bytes(8, "little")))
        assert test_corruption.refusal_of(case, name).path == str(case.root / name)
        case.put(name, data)


def test_a_checksum_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_a_flipped_bit_is_refused(tmp_path / "sound")
    monkeypatch.setattr(millpond.durable.arrow_files, "zlib", SimpleNamespace(crc32=lambda data, before=0: 0))
    assert_fails(check_a_flipped_bit_is_refused, tmp_path / "broken")


@pytest.mark.long
def test_reads_below_fetch_progress_that_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.ops.asking.Questions.check_not_below", lambda *given: None)
    monkeypatch.setattr(StateHolding, "_check_not_below", lambda self, time: None)
    assert_fails(state_machine)
