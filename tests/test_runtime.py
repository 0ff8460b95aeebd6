"""A runtime does what the shells count on, whichever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

import pytest

from millpond.runtime import Runtime, Serial, Threads
from millpond.testing.simulation import Simulation, Weather
from millpond.testing.turns import Turns

Check: TypeAlias = Callable[[Runtime], None]


def simulated(check: Check) -> None:
    for seed in range(5):
        sim = Simulation(seed, Weather())
        process = sim.process("p")
        sim.run(lambda process=process: process.run(lambda: check(process.runtime)))


@pytest.fixture(params=["threads", "serial", "turns", "simulated"])
def run(request: pytest.FixtureRequest) -> Callable[[Check], None]:
    """Runs a check on a runtime."""
    if request.param == "simulated":
        return simulated
    runtime = {"threads": Threads, "serial": Serial, "turns": Turns}[request.param]()
    return lambda check: check(runtime)


def test_time_goes_on_while_one_sleeps(run: Callable[[Check], None]) -> None:
    def check(runtime: Runtime) -> None:
        before = runtime.now()
        runtime.sleep(0.01)
        assert runtime.now() >= before + 0.01

    run(check)


def test_a_lock_may_be_taken_again_by_who_has_it(run: Callable[[Check], None]) -> None:
    def check(runtime: Runtime) -> None:
        lock = runtime.lock()
        with lock, lock:
            assert lock.acquire(timeout=0)
            lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    run(check)


def test_map_keeps_the_order(run: Callable[[Check], None]) -> None:
    def check(runtime: Runtime) -> None:
        assert runtime.map(lambda item: item * item, range(5)) == [0, 1, 4, 9, 16]
        assert runtime.map(lambda item: item, []) == []

    run(check)


def test_map_waits_for_all_and_raises_the_first_failure_in_item_order(run: Callable[[Check], None]) -> None:
    def check(runtime: Runtime) -> None:
        done = []

        def work(item: int) -> None:
            if item in (1, 3):
                raise ValueError(item)
            done.append(item)

        with pytest.raises(ValueError, match="1"):
            runtime.map(work, range(5))
        assert sorted(done) == [0, 2, 4]

    run(check)


def test_bits_are_as_many_as_wanted(run: Callable[[Check], None]) -> None:
    def check(runtime: Runtime) -> None:
        values = [runtime.bits(64) for _ in range(50)]
        assert len(set(values)) == 50
        assert 56 < max(values).bit_length() <= 64

    run(check)


def test_a_lock_keeps_others_out_and_may_be_waited_for_so_long() -> None:
    def check(runtime: Runtime) -> None:
        lock = runtime.lock()

        def work(item: int) -> bool:
            if item == 0:
                with lock:
                    runtime.sleep(0.5)
                return True
            runtime.sleep(0.1)
            return lock.acquire(timeout=0.01)

        assert runtime.map(work, [0, 1]) == [True, False]

    check(Threads())
    simulated(check)


def test_what_is_spawned_goes_on_by_itself() -> None:
    def check(runtime: Runtime) -> None:
        ran: list[int] = []
        runtime.spawn(lambda: ran.append(1), "runner")
        for _ in range(100):
            if not ran:
                runtime.sleep(0.1)
        assert ran

    check(Threads())
    simulated(check)


def test_threads_map_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=10)
    assert sorted(Threads().map(lambda _item: together.wait(), range(3))) == [0, 1, 2]


def test_serial_does_at_once_what_is_spawned() -> None:
    ran = []
    Serial().spawn(lambda: ran.append(1), "runner")
    assert ran == [1]


def test_serial_bits_repeat_from_a_seed() -> None:
    assert Serial(7).bits(64) == Serial(7).bits(64) != Serial(8).bits(64)


def test_a_signal_is_waited_for_as_long_as_it_takes_and_no_longer(run: Callable[[Check], None]) -> None:
    def check(runtime: Runtime) -> None:
        signal = runtime.signal()
        before = runtime.now()
        assert not signal.wait(0.02)
        assert runtime.now() >= before + 0.02
        signal.set()
        assert signal.wait(60)
        signal.clear()
        assert not signal.wait(0)

    run(check)


def test_no_room_for_a_thread_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryError):
        Threads().map(lambda item: item, [1, 2])
