"""Real processes, killed with SIGKILL at planned and at random moments: nothing acknowledged is lost or doubled.

Run as a script, this file is the worker: a process that opens a pond, tells what it found, and commits epochs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.coordinator.service import CLOSE_S_MAX
from millpond.errors import CorruptFile, PondInUse, Unavailable
from millpond.testing import Oracle

SOAK_S = float(os.environ.get("MILLPOND_SOAK_SECONDS", "6"))
KEYS = 40
ROWS = 120
DELAY = 100
EPOCHS_MAX = 100_000
END_S_MAX = 10.0

# The stream: rows of an epoch follow from its number, so that anyone can replay it.


def rows_of(seed: int, epoch: int) -> list[tuple[str, int, tuple[int, str | None]]]:
    """Out of order, some below the watermark, some at equal times: `(key, time, (number, tag))`."""
    rng = np.random.default_rng([seed, epoch])
    keys = rng.integers(0, KEYS, ROWS).tolist()
    times = (epoch * 50 + rng.integers(-160, 100, ROWS)).tolist()
    numbers = rng.integers(0, 1_000_000, ROWS).tolist()
    return [
        (f"key-{key}", time, (number, None if number % 7 == 0 else f"tag-{number % 100}"))
        for key, time, number in zip(keys, times, numbers, strict=True)
    ]


def table_of(seed: int, epoch: int) -> pa.Table:
    rows = rows_of(seed, epoch)
    return pa.table(
        {
            "k": pa.array([key for key, _, _ in rows], pa.string()),
            "t": pa.array([time for _, time, _ in rows], pa.int64()),
            "n": pa.array([value[0] for _, _, value in rows], pa.int64()),
            "g": pa.array([value[1] for _, _, value in rows], pa.string()),
        }
    )


def oracle_of(seed: int, epochs: int) -> Oracle:
    """What a State must hold after the epochs 0 .. epochs - 1."""
    oracle = Oracle()
    oracle.register_updater("feed")
    for epoch in range(epochs):
        oracle.update("feed", epoch, rows_of(seed, epoch), delay=DELAY)
    return oracle


def stream_of(pond: mp.Pond) -> tuple[mp.State, Any]:
    state = pond.state("s", key="string", value="n long, g string")
    return state, state.update(key="k", at="t", value=["n", "g"], delay=DELAY, name="feed")


Held = dict[str, Any]


def held_by(pond: mp.Pond) -> Held:
    """U, how many versions there are, and the whole final history of every key."""
    state, _ = stream_of(pond)
    until = state.progress().update
    history: dict[str, Any] = {}
    if until > -np.inf:
        keys = [f"key-{key}" for key in range(KEYS)]
        asked = pa.table({"k": keys, "lo": [-(10**9)] * KEYS, "hi": [int(until) - 1] * KEYS})
        found = state.fetch(key="k", between=("lo", "hi"), rule=mp.values()).now(asked).to_pylist()
        history = {row["k"]: [list(pair) for pair in zip(row["n"], row["g"], strict=True)] for row in found}
    versions = pond.metrics()["states"]["s"]["versions"]
    return {"until": None if until == -np.inf else until, "versions": versions, "history": history}


def held_by_oracle(oracle: Oracle) -> Held:
    until = oracle.update_progress
    history = {
        f"key-{key}": [list(value) for time, value in oracle.raw(f"key-{key}") if time < until]
        for key in range(KEYS)
    }
    return {
        "until": None if until == -np.inf else until,
        "versions": sum(len(versions) for versions in oracle.versions.values()),
        "history": history if until > -np.inf else {},
    }


# The worker


def work(root: str, containers: int, seed: int, first: int, last: int) -> None:
    """Tells what the pond holds, then commits the epochs from `first` on, each told once it is acknowledged."""

    def say(**line: Any) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    with mp.open(root, containers=containers, threads=1, slices=8) as pond:
        _, op = stream_of(pond)
        say(held=held_by(pond), pids=[container.pid for container in pond.containers()])
        threading.Thread(target=_checkpoint, args=(pond,), daemon=True).start()
        for epoch in range(first, last):
            committed = op(table_of(seed, epoch), epoch)
            pids = [container.pid for container in pond.containers()]
            say(epoch=epoch, replayed=committed.replayed, pids=pids)
        say(done=True)
        sys.stdin.read()


def _checkpoint(pond: mp.Pond) -> None:
    """Snapshots and truncated logs are what kills should hit, too."""
    while True:
        time.sleep(0.15)
        with suppress(mp.MillpondError):
            pond.checkpoint()


class Worker:
    """A worker process, and what it has said so far."""

    def __init__(
        self, root: Path, containers: int, seed: int, first: int, last: int = EPOCHS_MAX, **env: str
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(root), str(containers), str(seed), str(first), str(last)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self.held: Held | None = None
        self.acknowledged: list[int] = []
        self.replayed: list[int] = []
        self.pids: list[int] = []
        self.done = False
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            line = json.loads(text)
            with self._heard:
                self.held = line.get("held", self.held)
                self.pids = line.get("pids", self.pids)
                self.done = line.get("done", False)
                if "epoch" in line:
                    (self.replayed if line["replayed"] else self.acknowledged).append(line["epoch"])
                self._heard.notify_all()
        with self._heard:
            self._heard.notify_all()

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        with self._heard:
            reached = self._heard.wait_for(lambda: condition() or not self._reader.is_alive(), seconds)
        assert reached, f"no {what} within {seconds} s"
        assert condition(), f"the worker ended before {what}: {self.errors()}"

    def wait_until_open(self) -> Held:
        self.wait_for(lambda: self.held is not None, "opening")
        assert self.held is not None
        return self.held

    def wait_for_epochs(self, count: int) -> None:
        goal = len(self.acknowledged) + count
        self.wait_for(lambda: len(self.acknowledged) >= goal, f"{count} more epochs")

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def close(self) -> int:
        """Lets the worker end, and returns its exit code. What it had said is all heard."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            code = self.process.wait(60)
        finally:
            self.kill()
            self._reader.join(10)
            self._stderr = self.errors()
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                pipe.close()
        return code

    def errors(self) -> str:
        if self.process.poll() is None:
            return ""
        assert self.process.stderr is not None
        return self._stderr if self.process.stderr.closed else self.process.stderr.read()


@contextmanager
def working(*arguments: Any, **options: Any) -> Iterator[Worker]:
    worker = Worker(*arguments, **options)
    try:
        yield worker
    finally:
        worker.kill()
        worker.close()


# Processes


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def processes_at(root: Path) -> list[int]:
    """Processes whose command line names the root: its containers, wherever they came from."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if str(root).encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def await_none_at(root: Path, seconds: float = END_S_MAX) -> float:
    """Returns after how many seconds no process of the pond was left; kills those that are, and fails."""
    started = time.monotonic()
    while left := processes_at(root):
        if time.monotonic() - started > seconds:
            for pid in left:
                kill(pid)
            pytest.fail(f"processes {left} were still there after {seconds} s")
        time.sleep(0.02)
    return time.monotonic() - started


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root for a pond. After the test no process of it is left."""
    yield tmp_path / "pond"
    await_none_at(tmp_path)


def handles_to(root: Path) -> list[str]:
    links = []
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(handle))
    return [link for link in links if link.startswith(str(root))]


# (a) A container is killed


class Reader:
    """Reads a State that changes no more, again and again, in a thread of its own."""

    def __init__(self, pond: mp.Pond) -> None:
        keys = list(range(KEYS))
        state = pond.state("fixed", key="long", value="long")
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": keys, "t": keys, "v": keys}), 0)
        state.finish("feed")
        self._fetch = state.fetch(key="k", at="t", into="v")
        self._keys = keys
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.answers = 0
        self.failures: list[BaseException] = []

    def _read(self) -> None:
        asked = pa.table({"k": self._keys, "t": self._keys})
        try:
            while not self._ended.wait(0.01):
                assert self._fetch.now(asked)["v"].to_pylist() == self._keys
                self.answers += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test shows it
            self.failures.append(error)

    def wait_for_answers(self, more: int) -> None:
        goal, deadline = self.answers + more, time.monotonic() + 30
        while self.answers < goal and not self.failures:
            assert time.monotonic() < deadline, "the reader is stuck"
            time.sleep(0.02)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)
        assert not self.failures, self.failures


@pytest.mark.parametrize("containers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_operators_and_readers_go_on_by_themselves_when_containers_are_killed(
    root: Path, containers: int
) -> None:
    epochs, generator = 10, random.Random(containers)
    oracle = oracle_of(1, 0)
    with mp.open(root, containers=containers, threads=1, slices=8) as pond, Reader(pond) as reader:
        state, op = stream_of(pond)
        for epoch in range(epochs):
            if epoch == 4:
                # In the middle of a commit, not between two.
                victim = generator.choice(pond.containers()).pid
                threading.Timer(generator.uniform(0, 0.02), kill, (victim,)).start()
            committed = op(table_of(1, epoch), epoch)
            expected = oracle.update("feed", epoch, rows_of(1, epoch), delay=DELAY)
            assert (committed.rows, committed.late) == (expected.rows_applied, expected.late)
            assert not committed.replayed
        reader.wait_for_answers(2)
        kill(generator.choice(pond.containers()).pid)
        assert held_by(pond) == held_by_oracle(oracle)
        reader.wait_for_answers(2)
        assert state.snapshot().num_rows == len(oracle.snapshot())
        assert pond.metrics()["coordinator"]["container_restarts"] >= 2


# (b), (c) The opener is killed, while it opens, at a crash point, alone or with all its containers


@pytest.mark.parametrize(
    ("point", "victims"),
    [
        pytest.param("journal.rename.before:9", "opener", marks=pytest.mark.long),
        ("journal.dirsync.after:9", "all"),
        pytest.param("publish.before:4", "opener", marks=pytest.mark.long),
    ],
)
def test_every_acknowledged_epoch_survives_the_deaths_of_openers(
    root: Path, point: str, victims: str
) -> None:
    for pause in (0.5, 1.0):
        with working(root, 2, 3, 0, 0) as worker:
            time.sleep(pause)
            worker.kill()
            worker.close()
        await_none_at(root)

    point_name = point.split(":", maxsplit=1)[0]
    with working(root, 1, 3, 0, 20, MILLPOND_CRASH=point) as worker:
        worker.process.wait(60)
        assert worker.close() == -signal.SIGKILL
        assert f"killed at crash point {point_name}" in worker.errors()
    assert await_none_at(root) < END_S_MAX, "containers end with their parent"
    known = len(worker.acknowledged)
    assert worker.acknowledged == list(range(known))
    assert 0 < known < 20

    with working(root, 2, 3, known) as worker:
        decided = point_name in ("journal.dirsync.after", "publish.before")
        assert worker.wait_until_open() == held_by_oracle(oracle_of(3, known + decided))
        worker.wait_for_epochs(10)
        assert worker.replayed == ([known] if decided else [])
        pids = [worker.process.pid, *worker.pids] if victims == "all" else [worker.process.pid]
        random.Random(11).shuffle(pids)
        for pid in pids:
            kill(pid)
        assert worker.close() == -signal.SIGKILL
    assert await_none_at(root) < END_S_MAX, "containers end with their parent"
    assert worker.acknowledged == list(range(known + decided, worker.acknowledged[-1] + 1))
    known = worker.acknowledged[-1] + 1

    with mp.open(root, containers=1, threads=1) as pond:
        found = held_by(pond)
        # One epoch more may have been decided that nobody heard of.
        assert found in [held_by_oracle(oracle_of(3, known)), held_by_oracle(oracle_of(3, known + 1))]
        _, op = stream_of(pond)
        for epoch in range(known):
            assert op(table_of(3, epoch), epoch).replayed
        assert held_by(pond) == found
        for epoch in range(known, known + 5):
            op(table_of(3, epoch), epoch)
        assert held_by(pond) == held_by_oracle(oracle_of(3, known + 5))


# (d) Any of these, again and again


@pytest.mark.long
@pytest.mark.timeout(SOAK_S + 120)
def test_killed_at_random_for_a_while_nothing_is_lost_or_doubled(root: Path) -> None:
    seed = int(os.environ.get("MILLPOND_SOAK_SEED", "20260101"))
    generator = random.Random(seed)
    deadline = time.monotonic() + SOAK_S
    oracle = oracle_of(seed, 0)
    known = 0
    kills = dict.fromkeys(["container", "opener", "all"], 0)
    while time.monotonic() < deadline or not all(kills.values()):
        # From the last acknowledged epoch on, as Spark's checkpoint does it.
        first = max(known - 1, 0)
        with working(root, generator.randint(1, 3), seed, first) as worker:
            found = worker.wait_until_open()
            if found != held_by_oracle(oracle):
                one_more = oracle.copy()
                one_more.update("feed", known, rows_of(seed, known), delay=DELAY)
                assert found == held_by_oracle(one_more), f"after {known} epochs, seed {seed}, kills {kills}"
            for _ in range(generator.randint(0, 2)):
                worker.wait_for_epochs(generator.randint(1, 8))
                time.sleep(generator.uniform(0, 0.02))
                kill(generator.choice(worker.pids))
                kills["container"] += 1
            worker.wait_for_epochs(generator.randint(1, 8))
            time.sleep(generator.uniform(0, 0.02))
            how = generator.choice(["opener", "all"])
            kills[how] += 1
            pids = [worker.process.pid, *(worker.pids if how == "all" else [])]
            generator.shuffle(pids)
            for pid in pids:
                kill(pid)
            assert worker.close() == -signal.SIGKILL, worker.errors()
        # An epoch that an earlier worker had decided and nobody heard of is now a replay.
        acknowledged = sorted({*worker.acknowledged, *worker.replayed})
        assert acknowledged == list(range(first, acknowledged[-1] + 1))
        for epoch in range(known, acknowledged[-1] + 1):
            oracle.update("feed", epoch, rows_of(seed, epoch), delay=DELAY)
        known = acknowledged[-1] + 1
    with working(root, 2, seed, known - 1, known + 3) as worker:
        worker.wait_for(lambda: worker.done, "its last epochs")
        assert worker.close() == 0
    for epoch in range(known, known + 3):
        oracle.update("feed", epoch, rows_of(seed, epoch), delay=DELAY)
    with mp.open(root, containers=1) as pond:
        assert held_by(pond) == held_by_oracle(oracle)
    assert all(kills.values()), f"every kind of kill should have come: {kills}"
    assert known > 20


# (e) Named crash points in real containers


@pytest.mark.long  # transactions die there in `make test`, too, and containers are killed in a commit
@pytest.mark.parametrize(
    "point",
    [
        "log.dirsync.after:4",
        "apply.before:4",
        "apply.after:4",
    ],
)
def test_containers_that_die_at_a_crash_point(
    root: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CRASH", point)
    with mp.open(root, containers=2, threads=1, slices=8) as pond:
        _, op = stream_of(pond)
        for epoch in range(8):
            assert not op(table_of(6, epoch), epoch).replayed
        restarts = pond.metrics()["coordinator"]["container_restarts"]
        # One that rebuilt slices of the other comes there again, and sooner.
        assert 2 <= restarts <= 4, "each container dies there"
        assert held_by(pond) == held_by_oracle(oracle_of(6, 8))


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("snapshot.rename.before:2", marks=pytest.mark.long),
        "manifest.rename.after:2",
        pytest.param("truncate.before:1", marks=pytest.mark.long),
    ],
)
def test_a_container_that_dies_in_a_checkpoint(
    root: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_CRASH", point)
    with mp.open(root, containers=1, threads=1, slices=8) as pond:
        _, op = stream_of(pond)
        for epoch in range(4):
            op(table_of(7, epoch), epoch)
        with suppress(Unavailable):
            pond.checkpoint()
        for epoch in range(4, 8):
            assert not op(table_of(7, epoch), epoch).replayed
        pond.checkpoint()
        assert pond.metrics()["coordinator"]["container_restarts"] == 1, "the planned crash did not happen"
        assert held_by(pond) == held_by_oracle(oracle_of(7, 8))


# (f) Another process joins

HOSTS = """
import json, sys
import pyarrow as pa
import millpond as mp

def say(line):
    print(json.dumps(line), flush=True)
    sys.stdin.readline()

pond = mp.open(sys.argv[1], containers=1, threads=1, slices=8)
state = pond.state("shared", key="long", value="long")
op = state.update(key="k", at="t", value="v", name="host")
say(pond.address)
op(pa.table({"k": [1, 2], "t": [5, 12], "v": [1, 2]}), 0)
state.finish("host")
say([state.progress().updaters, state.snapshot().to_pylist()])
"""


def test_another_process_joins_and_outlives_a_pond_whose_process_ends_without_closing(root: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOSTS, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as host:
        assert host.stdout is not None
        assert host.stdin is not None
        assert host.stderr is not None
        address = json.loads(host.stdout.readline())
        with mp.connect(address, (root / "token").read_text()) as pond:
            state = pond.state("shared", key="long", value="long")
            op = state.update(key="k", at="t", value="v", name="guest")
            op(pa.table({"k": [1], "t": [10], "v": [100]}), 0)
            state.finish("guest")
            host.stdin.write("go\n")
            host.stdin.flush()
            updaters, rows = json.loads(host.stdout.readline())
            assert updaters == {"guest": np.inf, "host": np.inf}
            assert sorted(rows, key=str) == [
                {"key": 1, "time": 10, "value": 100},
                {"key": 2, "time": 12, "value": 2},
            ]
            fetch = state.fetch(key="k", at="t", into="a")
            asked = pa.table({"k": [1, 2], "t": [15, 15]})
            assert sorted(pond.states()) == ["shared"]
            assert fetch.now(asked)["a"].to_pylist() == [100, 2]

            began = time.monotonic()
            assert (host.communicate("go\n", timeout=60), host.returncode) == (("", ""), 0)
            assert time.monotonic() - began < CLOSE_S_MAX
            assert processes_at(root) == []
            assert list((root / "snapshots").rglob("s*.arrow")), "what was in the log is snapshotted"

            began = time.monotonic()
            for call in (
                state.progress,
                state.snapshot,
                pond.containers,
                lambda: fetch.now(asked),
                lambda: op(asked, 1),
            ):
                with pytest.raises(Unavailable) as caught:
                    call()
                assert isinstance(caught.value, ConnectionError)
                assert caught.value.hint
            assert time.monotonic() - began < 20


# (g) Closing


def check_nothing_is_left(root: Path, threads: set[threading.Thread]) -> None:
    assert set(threading.enumerate()) <= threads
    assert handles_to(root) == []
    assert processes_at(root) == []


def close_and_check(pond: mp.Pond, root: Path, threads: set[threading.Thread]) -> None:
    addresses = [pond.address, *(container.address for container in pond.containers())]
    pids = [container.pid for container in pond.containers()]
    assert handles_to(root), "the lock is held"
    pond.close()
    check_nothing_is_left(root, threads)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for address in addresses:
        with pytest.raises(Unavailable):
            mp.connect(address, (root / "token").read_text())
    pond.close()


def test_what_is_closed_or_fails_to_open_leaves_nothing_behind(root: Path) -> None:
    with mp.open(root, threads=1, slices=8) as pond:
        with pytest.raises(PondInUse) as in_use:
            mp.open(root)
        assert in_use.value.root == str(root)
        assert in_use.value.hint
        _, op = stream_of(pond)
        op(table_of(9, 0), 0)
        assert held_by(pond) == held_by_oracle(oracle_of(9, 1))
    # Whatever a process starts once and keeps (Arrow's pools, numba) is there from here on.
    threads = set(threading.enumerate())
    check_nothing_is_left(root, threads)

    pond = mp.open(root, containers=2, threads=1)
    assert held_by(pond) == held_by_oracle(oracle_of(9, 1))
    _, op = stream_of(pond)
    for epoch in (1, 2):
        op(table_of(9, epoch), epoch)
    close_and_check(pond, root, threads)

    snapshot = max((root / "snapshots").rglob("s*.arrow"))
    content = snapshot.read_bytes()
    flipped = bytearray(content)
    flipped[len(flipped) // 2] ^= 1
    snapshot.write_bytes(flipped)
    with pytest.raises(CorruptFile) as corrupt:
        mp.open(root, containers=2, threads=1)
    assert snapshot.name in str(corrupt.value), "the file is named"
    check_nothing_is_left(root, threads)

    snapshot.write_bytes(content)
    pond = mp.open(root, containers=1, threads=1)
    assert held_by(pond) == held_by_oracle(oracle_of(9, 3))
    close_and_check(pond, root, threads)


# (h) A pond on its own


@pytest.mark.long  # as `tests/test_cli.py` shows, with more around it
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_serve_runs_until_it_is_told_to_end(root: Path, ending: signal.Signals) -> None:
    command = [sys.executable, "-c", "from millpond.cli import main; main()", "serve", "--root", str(root)]
    with subprocess.Popen(
        [*command, "--containers", "2", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            first = server.stdout.readline()
            address = first.split(" at ")[1].split(",")[0]
            token = (root / "token").read_text()
            with mp.connect(address, token) as pond:
                _, op = stream_of(pond)
                for epoch in range(3):
                    op(table_of(10, epoch), epoch)
                assert held_by(pond) == held_by_oracle(oracle_of(10, 3))
            server.send_signal(ending)
            rest = server.stdout.read()
            assert server.wait(30) == 0, rest
            assert token.strip() not in first + rest
            assert "Traceback" not in rest
        finally:
            server.kill()
    assert processes_at(root) == []
    with mp.open(root, containers=1) as pond:
        assert held_by(pond) == held_by_oracle(oracle_of(10, 3))


if __name__ == "__main__":
    work(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
