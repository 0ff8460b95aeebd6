"""The guard of user code: what runs too long is ended, or the process is."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from millpond.container.guard import Guard, shared
from millpond.container.process import PARALLEL_ROWS_MIN, ThreadRunner
from millpond.errors import CodeTookTooLong, OutOfMemory, RuleFailed, Unavailable

SHORT_S = 0.05


class Endings:
    """What would have ended the process."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.happened = threading.Event()

    def __call__(self, why: str) -> None:
        self.said.append(why)
        self.happened.set()


@pytest.fixture
def endings() -> Endings:
    return Endings()


@pytest.fixture
def guard(endings: Endings) -> Iterator[Guard]:
    guard = Guard(SHORT_S, endings, grace_s=0.5, linger_s=0.05)
    yield guard
    if not guard.doomed:
        assert guard.run("a last piece", lambda: 7) == 7
        assert not endings.said


def for_ever() -> None:
    while True:
        pass


def test_work_gives_what_it_gives_and_raises_what_it_raises(guard: Guard) -> None:
    assert guard.run("sums", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        guard.run("sums", lambda: 1 // 0)
    assert guard.run("names", lambda: threading.current_thread().name) == "millpond-code"


def test_work_in_a_row_is_done_by_one_thread(guard: Guard) -> None:
    assert len({guard.run("idents", threading.get_ident) for _ in range(100)}) == 1


def test_code_that_never_ends_is_interrupted(guard: Guard) -> None:
    cleaned = []

    def work() -> None:
        try:
            for_ever()
        finally:
            cleaned.append(True)

    with pytest.raises(CodeTookTooLong, match=r"transactions 'ledger' ran longer than 0.05 s") as raised:
        guard.run("transactions 'ledger'", work)
    assert (raised.value.what, raised.value.seconds) == ("transactions 'ledger'", SHORT_S)
    assert "code_seconds" in raised.value.hint
    assert isinstance(raised.value, TimeoutError)
    assert cleaned == [True]


@pytest.mark.parametrize("how", ["waits in C", "catches all", "goes on"])
def test_code_that_cannot_be_interrupted_dooms_the_process(how: str, guard: Guard, endings: Endings) -> None:
    released = threading.Event()

    def catches_all() -> None:
        while not released.is_set():
            with suppress(BaseException):
                while not released.is_set():
                    pass

    def goes_on() -> None:
        with suppress(BaseException):
            for_ever()
        # It is interrupted once: a second time might hit what takes back the work.
        while not released.is_set():
            pass

    kinds: dict[str, Callable[[], Any]] = {
        "waits in C": released.wait,
        "catches all": catches_all,
        "goes on": goes_on,
    }
    work = kinds[how]
    with pytest.raises(CodeTookTooLong):
        guard.run("rule 'loop'", work)
    assert "rule 'loop' ran longer than 0.05 s" in guard.doomed
    with pytest.raises(Unavailable, match="is ending"):
        guard.run("another", lambda: 1)
    assert endings.happened.wait(5)
    assert endings.said == [guard.doomed]
    released.set()


def test_work_that_is_late_by_little_leaves_no_interrupt_behind(endings: Endings) -> None:
    guard = Guard(0.001, endings)
    late = 0
    for number in range(400):
        try:
            guard.run("near the limit", lambda n=number: time.sleep(0.0008 + n % 5 * 1e-4))
        except CodeTookTooLong:
            late += 1
    assert late > 0
    guard.seconds = 10
    assert [guard.run("after", lambda n=n: n) for n in range(100)] == list(range(100))
    assert not endings.said


def test_work_inside_guarded_work_is_part_of_it(guard: Guard) -> None:
    threads = guard.run("outer", lambda: (threading.get_ident(), guard.run("inner", threading.get_ident)))
    assert len(set(threads)) == 1
    with pytest.raises(CodeTookTooLong) as raised:
        guard.run("outer", lambda: guard.run("inner", for_ever))
    assert raised.value.what == "outer"


def test_threads_that_help_are_interrupted_too(guard: Guard) -> None:
    run = ThreadRunner(3)
    with pytest.raises(CodeTookTooLong):
        guard.run("an update rule", lambda: run(lambda _: for_ever(), range(6), PARALLEL_ROWS_MIN))
    done: list[int] = []
    guard.seconds = 10
    for _ in range(20):
        guard.run("after", lambda: run(done.append, range(6), PARALLEL_ROWS_MIN))
    assert sorted(done) == sorted([*range(6)] * 20)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(shared(lambda: 3)).result() == 3


class Large:
    pass


@pytest.mark.parametrize("error", [MemoryError, SystemError])
def test_running_out_of_memory_is_told_and_lets_go(guard: Guard, error: type[Exception]) -> None:
    """Also where Python had too little left to say what is missing."""
    held = []

    def work() -> None:
        large = Large()
        held.append(weakref.ref(large))
        raise error

    with pytest.raises(OutOfMemory, match="rule 'greedy' ran out of memory") as raised:
        guard.run("rule 'greedy'", work)
    assert isinstance(raised.value, MemoryError)
    assert raised.value.what == "rule 'greedy'"
    gc.collect()
    assert held[0]() is None


def test_code_that_calls_itself_too_deeply_is_told_so(guard: Guard) -> None:
    def work() -> None:
        work()

    with pytest.raises(RuleFailed, match="rule 'deep' called itself too deeply") as raised:
        guard.run("rule 'deep'", work)
    assert raised.value.hint


class Unheard(BaseException):
    pass


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, Unheard])
def test_code_cannot_end_the_thread_that_serves(guard: Guard, error: type[BaseException]) -> None:
    def work() -> None:
        raise error

    with pytest.raises(RuleFailed, match=error.__name__):
        guard.run("rule 'exit'", work)


def test_calls_at_once_each_have_their_own_time(guard: Guard) -> None:
    def call(number: int) -> Any:
        try:
            return guard.run(f"call {number}", for_ever if number % 4 == 0 else lambda: number)
        except CodeTookTooLong as error:
            return error.what

    guard.seconds = 3.0  # the loops compete with the others
    before = set(threading.enumerate())
    with ThreadPoolExecutor(12) as pool:
        outcomes = list(pool.map(call, range(12)))
    assert outcomes == [f"call {n}" if n % 4 == 0 else n for n in range(12)]
    time.sleep(0.1)
    started = set(threading.enumerate()) - before
    assert sum(thread.name == "millpond-code" for thread in started) <= 12
