"""Slices change hands beside checkpoints and rebuilds that take long: the move waits, epochs do not, and nobody is ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest

from millpond.container import placing
from millpond.container.backups import read_held
from millpond.container.quiet import Quiet
from millpond.coordinator.detector import DISK_S_MAX
from millpond.coordinator.migrations import JOURNAL_TRIED_S
from millpond.errors import Unavailable
from millpond.runtime import Threads
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.backups import SWITCH_S, GetReady
from millpond.wire.base import SliceId
from millpond.wire.house import Adopt, Ping

LONG_S = 20.0


class Gate:
    """Whoever comes to it stays there until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_by(self) -> None:
        self.reached.set()
        assert self.opened.wait(LONG_S)


def started(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread, seconds: float = LONG_S) -> bool:
    thread.join(seconds)
    return not thread.is_alive()


class Scene:
    """Two containers; what is said to be moved goes from 0 to 1."""

    def __init__(self) -> None:
        self.pond = LocalPond(LossyFiles(), containers=2, backups=1)
        self.state = self.pond.state("s", key="long", value="long")
        self.feed = self.state.update(key="k", at="t", value="v", name="feed")
        self.epochs = 0
        self.epoch()
        for _ in range(4):
            self.pond.coordinator.maintain()
            self.pond.maintain()
        self.epoch()

    def epoch(self, count: int = 20) -> None:
        rows = {"k": list(range(count)), "t": [self.epochs] * count, "v": [self.epochs] * count}
        self.feed(pa.table(rows), self.epochs)
        self.epochs += 1

    def service(self, container: int) -> Any:
        return self.pond.hosting.services[container]

    @contextmanager
    def checkpoint(self, container: int) -> Iterator[None]:
        """One is under way."""
        service, gate = self.service(container), Gate()
        checkpoints = service.checkpoints
        write = checkpoints._write_manifest

        def slow(grounds: Any) -> None:
            gate.pass_by()
            write(grounds)

        checkpoints._write_manifest = slow
        thread = started(checkpoints.checkpoint)
        assert gate.reached.wait(LONG_S)
        del checkpoints._write_manifest
        try:
            yield
        finally:
            gate.opened.set()
            assert ended(thread)

    @contextmanager
    def rebuild(self, container: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """It rebuilds slices of somebody else: none, but for long."""
        gate, rebuild = Gate(), placing.rebuild

        def slow(*given: Any) -> Any:
            gate.pass_by()
            return rebuild(*given)

        monkeypatch.setattr(placing, "rebuild", slow)
        order = self.pond.coordinator._slices.order()
        thread = started(lambda: self.service(container).call(Adopt(order, {}, {})))
        assert gate.reached.wait(LONG_S)
        monkeypatch.undo()
        try:
            yield
        finally:
            gate.opened.set()
            assert ended(thread)

    def moves_beside(self, work: Any) -> None:
        """A move that is asked for meanwhile is done afterwards; epochs go on, and all containers are who they were."""
        coordinator: Any = self.pond.coordinator
        before = dict(coordinator._containers.members.serving)
        with work:
            moving = started(lambda: coordinator.elasticity.move([SliceId(0)], 1))
            for _ in range(5):
                assert not ended(moving, 0.4)
                assert ended(started(self.epoch), 5.0), "an epoch waits for what slices wait for"
            assert coordinator._record.owners[0] == 0
        assert ended(moving)
        assert coordinator._record.owners[0] == 1
        assert coordinator._containers.members.serving == before
        assert not coordinator._slices.astray
        self.epoch()
        assert {row["value"] for row in self.state.snapshot().to_pylist()} == {self.epochs - 2}
        self.pond.validate()


@pytest.mark.parametrize("side", [0, 1], ids=["source", "target"])
def test_a_switch_waits_for_a_long_checkpoint(side: int) -> None:
    scene = Scene()
    scene.moves_beside(scene.checkpoint(side))


def test_a_switch_waits_for_a_rebuild_at_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.moves_beside(scene.rebuild(1, monkeypatch))


def test_a_checkpoint_waits_for_slices_that_are_about_to_change_hands() -> None:
    scene = Scene()
    service = scene.service(1)
    service._here._quiet._runtime = Threads()
    assert service.call(GetReady({}, 30.0)).is_ready
    checkpoint = started(service.checkpoint)
    assert not ended(checkpoint, 0.3)
    assert service.checkpoints.lock.acquire(timeout=1.0), "nobody holds it meanwhile"
    service.checkpoints.lock.release()
    service.call(GetReady({}, 0))
    assert ended(checkpoint)


def test_who_has_a_slow_disk_is_not_ready() -> None:
    scene = Scene()
    service = scene.service(1)
    gate, log = Gate(), service.log
    log.probe = gate.pass_by
    beat = started(service.beat)
    assert gate.reached.wait(LONG_S)
    service._runtime.sleep(1.0)
    assert service.call(Ping()).disk_s >= 1.0
    assert not service.call(GetReady({}, 1.0)).is_ready
    assert service.call(GetReady({}, 30.0, disk_counts=False)).is_ready, "it may be left"
    service.call(GetReady({}, 0))
    assert service._here._quiet._until_s < service._runtime.now(), "it goes on all the same"
    gate.opened.set()
    assert ended(beat)


@pytest.mark.parametrize("how", ["hangs", "took long"])
def test_whose_disk_stalls_is_relieved(how: str) -> None:
    """It answers all the while. Others serve its slices, from what they hold of them; not because of a short while."""
    scene = Scene()
    coordinator: Any = scene.pond.coordinator
    before = dict(coordinator._containers.members.serving)
    service, mine = scene.service(0), coordinator._record.slices_of(0)
    gate = Gate()

    def seconds_go_by(seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            for runtime in (coordinator._runtime, *(each._runtime for each in services)):
                runtime.sleep(0.5)
            coordinator.beat()

    services = list(scene.pond.hosting.services.values())
    service.log.probe = gate.pass_by
    beat = started(service.beat)
    assert gate.reached.wait(LONG_S)
    seconds_go_by(DISK_S_MAX - 1.0)
    assert coordinator._containers.members.serving == before, "it is not that long"
    assert coordinator._record.slices_of(0) == mine
    scene.epoch()
    if how == "took long":
        for runtime in {id(each._runtime): each._runtime for each in services}.values():
            runtime.sleep(2.0)
        gate.opened.set()
        assert ended(beat)
    seconds_go_by(2.0)
    gate.opened.set()
    assert ended(beat)
    assert coordinator._containers.suspected == 1
    assert coordinator._record.slices_of(0) == []
    assert set(coordinator._record.owners) == {1}
    now = coordinator._containers.members.serving
    assert (now[0] > before[0], now[1]) == (True, before[1])
    assert scene.service(0) is not service, "and a new one takes its place"
    scene.epoch()
    assert {row["value"] for row in scene.state.snapshot().to_pylist()} == {scene.epochs - 2}
    scene.pond.validate()


def test_who_is_not_ready_any_more_when_epochs_wait_is_not_ended() -> None:
    """What was decided meanwhile may be long: the move is put off, and done later."""
    scene = Scene()
    coordinator: Any = scene.pond.coordinator
    before, target = dict(coordinator._containers.members.serving), scene.service(1)._here
    get_ready, late = target.get_ready, []

    def once_not(message: GetReady) -> bool:
        if message.quiet_s and message.seconds_max == SWITCH_S and not late:
            late.append(message)
            raise Unavailable("it takes long", address="")
        return bool(get_ready(message))

    target.get_ready = once_not
    coordinator.elasticity.move([SliceId(0)], 1)
    assert late, "nobody is asked when epochs wait"
    assert coordinator._record.owners[0] == 1
    assert coordinator._containers.members.serving == before
    scene.epoch()
    scene.pond.validate()


def slow_journal(scene: Scene, seconds: list[float]) -> None:
    """Its next entries take so long to sync."""
    coordinator: Any = scene.pond.coordinator
    files = coordinator._memory.journal._files
    sync = files.sync

    def slow(path: Any) -> None:
        if "/journal/" in str(path) and seconds:
            coordinator._runtime.sleep(seconds.pop(0))
        sync(path)

    files.sync = slow


def test_a_move_is_put_off_while_the_disk_of_the_journal_is_slow() -> None:
    """Epochs would wait for its entry, which nobody can break off. It is tried again, also when nothing else is written."""
    scene = Scene()
    coordinator: Any = scene.pond.coordinator
    commits, left, pauses = coordinator._commits, [3.0] * 3, []
    paused_soon = commits.paused_soon

    @contextmanager
    def noting(*given: Any) -> Iterator[bool]:
        pauses.append(len(left))
        with paused_soon(*given) as is_paused:
            yield is_paused

    commits.paused_soon = noting
    slow_journal(scene, left)
    scene.epoch()
    assert len(left) == 2
    [ticket] = coordinator.elasticity.move([SliceId(0)], 1)
    assert ticket.stage == "moved"
    assert (pauses[0], coordinator._record.owners[0]) == (0, 1), "nobody waits as long as it is slow"
    assert coordinator._migrations.pause_s_last < 1.0
    scene.epoch()
    scene.pond.validate()


def test_an_entry_that_hangs_when_epochs_have_stopped_puts_the_move_off() -> None:
    """Somebody else writes it: the switch would wait for it."""
    scene = Scene()
    coordinator: Any = scene.pond.coordinator
    memory, commits, hung = coordinator._memory, coordinator._commits, []
    paused_soon, drive = commits.paused_soon, coordinator._slices.drive

    @contextmanager
    def meanwhile(*given: Any) -> Iterator[bool]:
        with paused_soon(*given) as is_paused:
            if not hung:
                hung.append(is_paused)
                memory._writing_since_s = coordinator._runtime.now() - 2.0
            yield is_paused
        memory._writing_since_s = None

    def driving(switch: Any, *given: Any, **named: Any) -> None:
        assert memory.write_s < 1.0, "epochs wait for a disk that is slow"
        drive(switch, *given, **named)

    commits.paused_soon, coordinator._slices.drive = meanwhile, driving
    [ticket] = coordinator.elasticity.move([SliceId(0)], 1)
    assert (ticket.stage, hung) == ("moved", [True])
    assert coordinator._record.owners[0] == 1


def test_a_journal_that_stays_slow_is_why_a_move_fails() -> None:
    scene = Scene()
    coordinator: Any = scene.pond.coordinator
    slow_journal(scene, [3.0] * 1000)
    coordinator._runtime.sleep(JOURNAL_TRIED_S + 1.0)
    [ticket] = coordinator.elasticity.move([SliceId(0)], 1)
    assert ticket.stage == "failed"
    assert "disk of the journal is slow: an entry takes 3.0 s" in str(ticket.error)
    assert coordinator._record.owners[0] == 0
    scene.epoch()
    scene.pond.validate()


def test_what_was_decided_is_applied_before_epochs_wait() -> None:
    """Not within the pause, where a record of user code would be as long as its epoch was."""
    scene = Scene()
    scene.epoch()
    core = scene.service(1).backups.core
    [kept] = [each for records in core._kept.values() for each in records if not each.decided]
    commits: Any = scene.pond.coordinator._commits
    paused_soon, lags = commits.paused_soon, []

    @contextmanager
    def noting(*given: Any) -> Iterator[bool]:
        lags.append(set(kept.left))
        with paused_soon(*given) as is_paused:
            yield is_paused

    commits.paused_soon = noting
    scene.pond.coordinator.elasticity.move([SliceId(0)], 1)
    assert lags == [set()]


def test_a_slice_is_confirmed_while_epochs_go_on() -> None:
    scene = Scene()
    slices: Any = scene.pond.coordinator._slices
    ask, epochs = slices.ask, []

    def asked(container: int, message: Any) -> Any:
        if type(message).__name__ == "Confirm":
            assert ended(started(scene.epoch), 5.0), "an epoch waits for the confirmation"
            epochs.append(container)
        return ask(container, message)

    slices.ask = asked
    scene.pond.coordinator.elasticity.move([SliceId(0)], 1)
    assert sorted(epochs) == [0, 1]
    assert {row["value"] for row in scene.state.snapshot().to_pylist()} == {scene.epochs - 2}


def test_no_call_that_epochs_wait_for_may_take_long() -> None:
    scene = Scene()
    commits: Any = scene.pond.coordinator._commits
    slices: Any = scene.pond.coordinator._slices
    paused_soon, ask = commits.paused_soon, slices.ask
    pausing, asked = [False], []

    @contextmanager
    def paused(*given: Any) -> Iterator[bool]:
        with paused_soon(*given) as pausing[0]:
            yield pausing[0]
        pausing[0] = False

    def asking(container: int, message: Any) -> Any:
        if pausing[0]:
            asked.append(message)
        return ask(container, message)

    commits.paused_soon, slices.ask = paused, asking
    scene.pond.coordinator.elasticity.move([SliceId(0)], 1)
    assert [type(message).__name__ for message in asked] == ["Promote", "Demote"]
    assert max(message.seconds for message in asked) <= 5


# Quiet, alone


def test_quiet_ends_by_itself_and_is_not_had_while_somebody_works() -> None:
    runtime = Threads()
    quiet, lock, over = Quiet(runtime), runtime.lock(), threading.Event()
    taken = threading.Event()

    def work() -> None:
        with quiet.work(lock):
            taken.set()
            over.wait(LONG_S)

    first = started(work)
    assert taken.wait(LONG_S)
    assert not quiet.keep([lock], 30.0, 0.05)
    over.set()
    assert ended(first)
    began = time.monotonic()
    assert quiet.keep([lock], 0.3, 0.05)
    assert quiet.keep([lock], 0.01, 0.05), "the longer time counts"
    assert ended(started(work))
    assert time.monotonic() - began >= 0.3


# What a slice waits for


@contextmanager
def hanging(files: Any, place: str, work: Callable[[], Any]) -> Iterator[list[str]]:
    """The work stays at the first file that it writes below the place; it goes on afterwards. Files that it wrote there."""
    gate, write, names = Gate(), files.write, list[str]()

    def slow(path: Any, buffers: Any) -> None:
        if place in str(path):
            names.append(str(path).rpartition("/")[2])
            gate.pass_by()
        write(path, buffers)

    files.write = slow
    try:
        working = started(work)
        assert gate.reached.wait(LONG_S)
        yield names
        assert working.is_alive()
    finally:
        gate.opened.set()
        assert ended(working)
        del files.write


def is_free(core: Any) -> bool:
    """Whether nobody holds a slice, of any resident."""
    locks = [held.lock for holding in core.holdings.values() for held in holding.slices.values()]
    free = []
    for lock in locks:
        free.append(lock.acquire(timeout=1.0))
        if free[-1]:
            lock.release()
    return len(free) > 1 and all(free)


@pytest.mark.parametrize("kind", ["n", "d"], ids=["base", "delta"])
def test_nobody_holds_a_slice_while_its_file_is_written(kind: str) -> None:
    """A slice waits while what has changed in it is put aside, and for no disk."""
    scene = Scene()
    service = scene.service(0)
    if kind == "d":
        service.checkpoint()
        scene.epoch(8)
    with hanging(service._files, "/snapshots/", service.checkpoint) as names:
        assert is_free(service.core)
        assert ended(started(scene.epoch), 5.0), "an epoch waits for a file"
        assert ended(started(scene.state.snapshot), 5.0), "a question waits for a file"
    assert {name.split("-")[2][0] for name in names} == {kind}
    scene.pond.validate()


def test_nobody_holds_a_slice_while_it_is_copied() -> None:
    """Neither where it is nor where the copy is written."""
    scene = Scene()
    coordinator: Any = scene.pond.coordinator
    coordinator.maintain = lambda: None
    source, target = scene.service(0), scene.service(1)
    held = [SliceId(number) for number in source.core.owned]
    coordinator._migrations._let_go(1, held)
    assert not target.backups.core.owned
    scene.epoch()
    with hanging(target._files, "/backups/", lambda: coordinator._migrations.copy(0, 1, held)):
        assert is_free(source.core)
        assert is_free(target.backups.core)
        assert ended(started(scene.epoch), 5.0), "an epoch waits for a copy"
        assert ended(started(scene.state.snapshot), 5.0), "a question waits for a copy"
    assert target.backups.core.owned == set(held)
    # And not while its rows are on their way.
    (holding,) = source.core.holdings.values()
    _, rows = read_held(holding, held[0])
    next(rows)
    assert is_free(source.core)
    scene.epoch()
    scene.pond.validate()
