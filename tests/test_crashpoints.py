from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import product

import pytest

from millpond.durable.crashpoints import POINTS, Plan, SimulatedCrash, armed, counted, parse, reach
from millpond.errors import BadOption


def test_the_declared_points_are_exactly_those_promised() -> None:
    steps = [
        f"{kind}.{step}"
        for kind, step in product(
            ("log", "snapshot", "delta", "manifest", "journal"), ("append", "sync", "rename", "dirsync")
        )
    ]
    steps += ["apply", "acknowledge", "publish", "truncate", "merge"]
    assert set(POINTS) == {f"{step}.{side}" for step in steps for side in ("before", "after")}
    assert len(POINTS) == len(set(POINTS))


@pytest.mark.parametrize("point", POINTS)
def test_an_unarmed_point_does_nothing_and_an_armed_one_crashes(point: str) -> None:
    reach(point)
    with armed(point) as plan:
        with pytest.raises(SimulatedCrash) as crash:
            reach(point)
        assert crash.value.point == point
        assert plan.fired
    reach(point)


def test_the_crash_comes_at_the_nth_hit_of_that_point_and_once() -> None:
    with armed("apply.before", hit=3) as plan:
        reach("apply.before")
        reach("apply.after")
        reach("apply.before")
        assert not plan.fired
        with pytest.raises(SimulatedCrash):
            reach("apply.before")
        assert plan.fired
        reach("apply.before")
    assert plan.hits == 4


def test_a_plan_that_was_never_reached_says_so() -> None:
    with armed("publish.before") as plan:
        reach("publish.after")
    assert not plan.fired
    assert plan.hits == 0


def test_a_crash_is_no_exception_that_error_handling_could_swallow() -> None:
    def careless() -> None:
        with suppress(Exception):
            reach("apply.after")

    with armed("apply.after"), pytest.raises(SimulatedCrash):
        careless()


def test_the_point_is_disarmed_when_the_crash_leaves_the_block() -> None:
    with pytest.raises(SimulatedCrash), armed("log.sync.after"):
        reach("log.sync.after")
    reach("log.sync.after")


def test_another_action_gets_the_name_of_the_point() -> None:
    seen: list[str] = []
    with armed("truncate.after", hit=2, action=seen.append):
        for _ in range(3):
            reach("truncate.after")
    assert seen == ["truncate.after"]


def test_one_point_can_be_armed_twice() -> None:
    with armed("apply.before", hit=1, action=lambda _: None) as first, armed("apply.before", hit=2) as second:
        reach("apply.before")
        with pytest.raises(SimulatedCrash):
            reach("apply.before")
    assert first.fired
    assert second.fired


@pytest.mark.parametrize("point", ["", "log.sync", "log.sync.during", "apply"])
def test_an_undeclared_point_is_refused_armed_or_not(point: str) -> None:
    with pytest.raises(BadOption, match="no crash point"):
        reach(point)
    with pytest.raises(BadOption, match="no crash point"), armed(point):
        pass


@pytest.mark.parametrize("hit", [0, -1])
def test_a_hit_that_can_never_come_is_refused(hit: int) -> None:
    with pytest.raises(BadOption, match="never come"):
        Plan("apply.before", hit, lambda _: None)


def test_counting_sees_every_hit_and_does_not_act() -> None:
    with counted() as plans:
        reach("log.append.before")
        reach("log.append.before")
        reach("publish.after")
    reach("publish.after")
    assert set(plans) == set(POINTS)
    assert {point: plan.hits for point, plan in plans.items() if plan.hits} == {
        "log.append.before": 2,
        "publish.after": 1,
    }


def test_of_many_threads_exactly_one_crashes() -> None:
    threads_count, rounds = 8, 500
    crashes: list[str] = []
    start = threading.Barrier(threads_count)

    def run() -> None:
        start.wait()
        for _ in range(rounds):
            try:
                reach("log.sync.before")
            except SimulatedCrash as crash:
                crashes.append(crash.point)

    with armed("log.sync.before", hit=threads_count * rounds // 2) as plan:
        threads = [threading.Thread(target=run) for _ in range(threads_count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert crashes == ["log.sync.before"]
    assert plan.hits == threads_count * rounds


@pytest.mark.parametrize(
    ("text", "expected"),
    [("log.sync.after", ("log.sync.after", 1)), ("apply.before:12", ("apply.before", 12))],
)
def test_the_environment_form_is_read(text: str, expected: tuple[str, int]) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["nowhere:1", "apply.before:x", "apply.before:-1", "apply.before:1:2"])
def test_a_wrong_environment_form_is_refused(text: str) -> None:
    with pytest.raises(BadOption):
        parse(text)


def run_python(code: str, crash: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MILLPOND_CRASH": crash, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=60,
    )


LOOP = """
import atexit
atexit.register(print, "an exit handler ran", flush=True)
from millpond.durable.crashpoints import reach
for hit in (1, 2, 3):
    print(hit, flush=True)
    try:
        reach("log.sync.after")
    finally:
        print("past", hit, flush=True)
"""


def test_the_environment_kills_a_real_process_at_the_nth_hit() -> None:
    done = run_python(LOOP, "log.sync.after:2")
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split("\n") == ["1", "past 1", "2", ""]
    assert "killed at crash point log.sync.after" in done.stderr


def test_an_empty_environment_kills_nobody() -> None:
    done = run_python(LOOP, "")
    assert done.returncode == 0
    assert "an exit handler ran" in done.stdout


def test_an_unknown_point_in_the_environment_stops_the_process_at_once() -> None:
    done = run_python(LOOP, "log.sink.after")
    assert done.returncode == 1
    assert "no crash point 'log.sink.after'" in done.stderr
