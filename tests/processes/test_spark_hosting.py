"""Containers in tasks that dial home, with processes in place of Spark's workers: no Java is needed to kill one."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millpond import private
from millpond.coordinator import spark_home, spark_hosting
from millpond.coordinator.hosting import Host
from millpond.coordinator.passes import Passes
from millpond.coordinator.spark_cluster import Cluster, Executor, choose
from millpond.coordinator.spark_hosting import SparkHosting
from millpond.coordinator.spark_task import LET_GO, ContainerTask, Outcome
from millpond.errors import BadRoot, ContainerFailed, RootUnseen
from millpond.wire import home
from millpond.wire.authority import Authority, Bundle, server_name
from millpond.wire.base import Term
from millpond.wire.keyring import ContainerKeys
from millpond.wire.sockets import SocketDirectory

ATTEMPTS_MAX = 4
# The container says where it serves, and ends when it is hung up on: a real one takes seconds to start.
CONTAINER = """
import json, os, socket, sys
if os.getppid() != int(sys.argv[1]): sys.exit()
root, sockets, container, line = sys.argv[2], sys.argv[3], sys.argv[4], socket.socket(fileno=int(sys.argv[-1]))
data = b""
while not data.endswith(bytes([10])): data += line.recv(1)
keys = json.loads(data)
name = f"unix:{sockets}/container-{container}-{os.getpid()}"
if keys["host"]: name = f"tls:{keys['host']}:1234/{keys['name']}"
hello = '{"address": "%s"}' % name
if not os.path.exists(f"{root}/token"):
    hello = '{"error": "BadRoot", "message": "there is no token"}'
line.sendall(hello.encode() + bytes([10]))
while os.path.exists(f"{root}/busy"): pass
line.recv(1)
"""
WORKER = """
import json, pickle, sys
from millpond.coordinator import spark_task
from millpond.wire import home
spark_task.DIAL_S = spark_task.STOP_TIMEOUT_S = 1.0
home.LEASE_S = 1.0
if sys.argv[1:]:
    spark_task.command_of = lambda module: [sys.executable, "-S", "-c", sys.argv[1]]
print(json.dumps(pickle.loads(sys.stdin.buffer.read())(0)))
"""


class Workers(Cluster):
    """A stand-in for Spark: runs a task in a process, and again when that is killed, as Spark would."""

    def __init__(self) -> None:
        self.context = SimpleNamespace(master="local[4]")
        self.jobs: list[str] = []
        self.cancelled: set[str] = set()
        self.attempts: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.tasks: list[ContainerTask] = []
        self.twins = False
        self.light = True

    def setting(self, key: str, default: str = "") -> str:
        return default

    @property
    def is_stopped(self) -> bool:
        return False

    def slots_of(self, threads: int) -> int:
        return 2 * threads

    def executors(self) -> list[Executor]:
        return []

    def executor_of(self, group: str, attempt: int) -> str:
        return ""

    def thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=work, name=name, daemon=True)

    def run(self, task: Any, group: str, description: str, wanted: Executor | None, threads: int) -> Any:
        self.jobs.append(group)
        self.tasks.append(task)
        attempts = self.attempts.setdefault(group, [])
        for _ in range(ATTEMPTS_MAX):
            attempts += [self.attempt(task) for _ in range(2 if self.twins else 1)]
            while all(attempt.poll() is None for attempt in attempts):
                time.sleep(0.02)
            for attempt in attempts:
                if attempt.poll() == 0:
                    self.cancel(group)
                    assert attempt.stdout is not None
                    return json.loads(attempt.stdout.read())
            attempts[:] = [attempt for attempt in attempts if attempt.poll() is None]
            if group in self.cancelled:
                break
        raise RuntimeError("the job was aborted")

    def attempt(self, task: ContainerTask) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, *[CONTAINER] * self.light],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert worker.stdin is not None
        worker.stdin.write(pickle.dumps(task))
        worker.stdin.close()
        return worker

    def cancel(self, group: str) -> None:
        self.cancelled.add(group)
        for attempt in self.attempts.get(group, []):
            attempt.kill()
            attempt.wait()

    def running(self) -> list[subprocess.Popen[bytes]]:
        return [each for attempts in self.attempts.values() for each in attempts if each.poll() is None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    private.write_text(str(tmp_path / "token"), "secret\n")
    return tmp_path


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers()
    yield workers
    assert workers.running() == [], "a task outlived its pond"


@pytest.fixture
def exits() -> list[int]:
    return []


@pytest.fixture
def hosting(root: Path, workers: Workers, exits: list[int]) -> Iterator[SparkHosting]:
    sockets = SocketDirectory.under(str(root))
    hosting = SparkHosting(workers, str(root), sockets.path, 1, exits.append, keys_of(root))
    yield hosting
    hosting.stop()
    assert not (root / "grants").exists()
    sockets.remove()


def keys_of(root: Path) -> Callable[[int, Term, str], ContainerKeys]:
    return Passes(str(root), "s" * 43).container


def wait_until(condition: Callable[[], Any], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """A process that nobody has asked about yet is gone, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def answers(host: Host) -> bool:
    directory, _, name = host.address.removeprefix("unix:").rpartition("/")
    sockets = SocketDirectory(directory)
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(sockets.path_of(name)) == 0


def test_one_that_ends_six_times_runs_again_in_the_same_task(
    hosting: SparkHosting, workers: Workers, exits: list[int]
) -> None:
    assert hosting.task_slots() == {"wanted": 0, "had": 0}
    host = hosting.start(0, Term(1))
    assert hosting.task_slots() == {"wanted": 2, "had": 2}
    assert hosting.last_words(0) == "has not ended"
    for deaths in range(1, 7):
        os.kill(host.pid, signal.SIGKILL)
        wait_until(lambda deaths=deaths: exits == [0] * deaths)
        assert not hosting.alive(0)
        assert hosting.last_words(0) == "ended by signal 9 (SIGKILL), and said nothing"
        host = hosting.start(0, Term(1))
    assert hosting.alive(0)
    assert len(workers.jobs) == 1
    started = time.monotonic()
    hosting.stop_one(0)
    assert time.monotonic() - started < 5
    assert workers.running() == []
    assert is_gone(host.pid)
    assert not hosting.alive(0)
    assert len(exits) == 6
    assert hosting.task_slots() == {"wanted": 0, "had": 0}


def test_one_that_runs_is_ended_before_another_is_started(
    hosting: SparkHosting, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hosting.start(3, Term(1))
    second = hosting.start(3, Term(1))
    assert is_gone(first.pid)
    assert hosting.last_words(3) == "was ended by its pond"
    os.kill(second.pid, signal.SIGSTOP)  # one that does not listen is killed
    third = hosting.start(3, Term(1))
    assert is_gone(second.pid)
    assert hosting.alive(3)
    assert third.pid != second.pid
    assert exits == []


def test_a_container_serves_and_ends_with_its_worker(hosting: SparkHosting, workers: Workers) -> None:
    workers.light = False
    host = hosting.start(0, Term(1))
    assert answers(host)
    (worker,) = workers.running()
    os.kill(host.pid, signal.SIGSTOP)  # whatever it is at
    worker.kill()
    wait_until(lambda: is_gone(host.pid), 3)


@pytest.mark.long
def test_the_next_attempt_of_a_task_is_a_slot_and_so_is_the_next_job(
    hosting: SparkHosting, workers: Workers, exits: list[int]
) -> None:
    for deaths in range(1, ATTEMPTS_MAX + 2):
        host = hosting.start(0, Term(1))
        (worker,) = workers.running()
        worker.kill()
        wait_until(lambda host=host: is_gone(host.pid), 3)
        wait_until(lambda deaths=deaths: exits == [0] * deaths)
        assert hosting.last_words(0).startswith("ended with its Spark task, on ")
    assert hosting.start(0, Term(1)).pid
    assert len(workers.jobs) == 2, "Spark gave up on the first"


def test_a_second_attempt_beside_the_first_waits_and_takes_over(
    hosting: SparkHosting, workers: Workers, exits: list[int]
) -> None:
    workers.twins = True
    host = hosting.start(0, Term(1))
    place = hosting._places[0]
    wait_until(lambda: len(place.lines) == 2)
    assert place.line is not None
    os.kill(place.line.arrived.pid, signal.SIGKILL)
    wait_until(lambda: exits == [0])
    again = hosting.start(0, Term(1))
    assert is_gone(host.pid)
    assert again.pid != host.pid
    assert len(workers.jobs) == 1


def test_a_machine_that_does_not_see_the_root_is_named(
    hosting: SparkHosting, workers: Workers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = workers.attempt
    elsewhere = str(root / "grants" / "not-there")
    monkeypatch.setattr(
        workers,
        "attempt",
        lambda task: seen(replace(task, grant_path=elsewhere)),
    )
    with pytest.raises(RootUnseen) as raised:
        hosting.start(0, Term(1))
    assert (raised.value.root, raised.value.host) == (str(root), socket.gethostname())
    assert f"{socket.gethostname()} does not see the pond's root {root}" in str(raised.value)
    assert "No such file" in str(raised.value)
    assert raised.value.hint


@pytest.mark.parametrize("sees", ["another system", "another directory", "none"])
def test_a_container_on_another_machine_is_reached_by_tls(
    hosting: SparkHosting,
    workers: Workers,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    sees: str,
) -> None:
    """As in a pod on the driver's own node: what lies at the path of the pond's sockets is another directory, or nothing."""
    attempt = workers.attempt
    if sees == "another system":
        monkeypatch.setattr(spark_hosting, "machine", lambda sockets: f"another one, with {sockets}")
    else:
        there = tmp_path_factory.mktemp("there") / ("" if sees == "another directory" else "nothing")
        monkeypatch.setattr(workers, "attempt", lambda task: attempt(replace(task, sockets=str(there))))
    host = hosting.start(0, Term(7))
    assert host.host == socket.gethostname()
    assert re.fullmatch(rf"tls:{re.escape(host.host)}:\d+/container-0-t7-[0-9a-f]+", host.address)


def test_a_driver_that_cannot_be_reached_is_named(
    hosting: SparkHosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(hosting._home, "port", port)
    with pytest.raises(ContainerFailed, match=f"does not reach the driver at 127.0.0.1:{port}") as raised:
        hosting.start(0, Term(1))
    assert "spark.driver.host" in raised.value.hint


def test_a_start_that_fails_tells_the_containers_own_error(hosting: SparkHosting, root: Path) -> None:
    (root / "token").unlink()
    with pytest.raises(BadRoot, match="there is no token"):
        hosting.start(0, Term(1))
    assert not hosting.alive(0)


def test_no_secret_travels_with_a_task(hosting: SparkHosting, workers: Workers, root: Path) -> None:
    host = hosting.start(0, Term(1))
    (task,) = workers.tasks
    (grant,) = (path.read_text() for path in (root / "grants").iterdir())
    pickled = pickle.dumps(task)
    (worker,) = workers.running()
    places = [
        Path(f"/proc/{pid}/{what}") for pid in (host.pid, worker.pid) for what in ("cmdline", "environ")
    ]
    secrets = [line.encode() for line in grant.splitlines() if len(line) > 40 and "-----" not in line]
    assert len(secrets) > 5
    for secret in (*secrets, b"PRIVATE KEY"):
        assert secret not in pickled
        assert all(secret not in place.read_bytes() for place in places)


def shaken(plain: socket.socket, shows: str, bundle: Bundle) -> ssl.SSLSocket:
    """A line to the home by one that has no certificate to show, a foreign one, or that of a grant."""
    context = bundle.connecting(to_pond=False)
    if shows == "no certificate":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=bundle.authority)
    elif shows == "a foreign one":
        foreign = Authority().issue("task")
        context = Bundle(foreign.certificate, foreign.key, bundle.authority).connecting(to_pond=False)
    return context.wrap_socket(plain, server_hostname=server_name(home.HOME))


@pytest.mark.parametrize(
    "says", ["nothing", "no TLS", "no certificate", "a foreign one", "no message", "no grant"]
)
def test_strangers_at_the_home_are_hung_up_on(
    says: str, hosting: SparkHosting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millpond.coordinator.spark_home.HANDSHAKE_S", 0.3)
    hosting._places[0] = spark_hosting._Place(0)
    good, heard = hosting._home.grant(), []
    hosting._places[0].job = spark_hosting._Job(0, "nowhere", good)
    receive = home.Line.receive
    monkeypatch.setattr(home.Line, "receive", lambda *given: heard.append(given) or receive(*given))
    with socket.create_connection((hosting._home.host, hosting._home.port), timeout=10) as plain:
        if says == "no TLS":
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        if says in ("nothing", "no TLS"):
            with suppress(ConnectionResetError):
                while plain.recv(1000):
                    pass
            return
        with shaken(plain, says, good.bundle) as line:
            word = "0" * 64 if says == "no grant" else good.word
            first = home.msgspec.msgpack.encode(home.Arrived(word, "here", "m", "1", 1))
            first = len(first).to_bytes(4, "big") + first
            with suppress(OSError):  # whatever way, it is over
                line.sendall(b"\xff" * 100 if says == "no message" else first)
                assert line.recv(1000) == b""
    assert hosting._places[0].lines == []
    assert bool(heard) == (says in ("no message", "no grant")), "who has no certificate is not listened to"
    hosting._places.clear()


def test_strangers_who_say_nothing_do_not_keep_a_task_out(hosting: SparkHosting) -> None:
    """They would be heard for ten seconds; one more than there is room for ends the oldest."""
    address = hosting._home.host, hosting._home.port
    idle = [socket.create_connection(address, timeout=10) for _ in range(2 * spark_home.PENDING_MAX)]
    try:
        began = time.monotonic()
        assert hosting.start(0, Term(1)).pid
        assert time.monotonic() - began < spark_home.HANDSHAKE_S / 2
        assert idle[0].recv(1) == b"", "the oldest is gone"
        assert len(hosting._home._strangers) <= spark_home.PENDING_MAX
    finally:
        for stranger in idle:
            stranger.close()


def test_a_task_speaks_with_its_own_driver_only(hosting: SparkHosting) -> None:
    with (
        socket.create_connection((hosting._home.host, hosting._home.port), timeout=10) as plain,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        shaken(plain, "its own", home.Door().grant().bundle)


def test_who_falls_silent_is_taken_for_gone_once_its_lease_is_over(
    root: Path, workers: Workers, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(home, "LEASE_S", 2.0)
    monkeypatch.setattr(spark_hosting, "LEASE_S", 1.0)
    sockets = SocketDirectory.under(str(root))
    hosting = SparkHosting(workers, str(root), sockets.path, 1, exits.append, keys_of(root))
    try:
        host = hosting.start(0, Term(1))
        (worker,) = workers.running()
        os.kill(worker.pid, signal.SIGSTOP)
        wait_until(lambda: exits == [0])
        assert hosting.last_words(0).startswith("was not heard of any more")
        assert not hosting.alive(0)
        assert not hosting.has_ended(0), "nobody knows, as long as its lease lasts"
        os.kill(worker.pid, signal.SIGCONT)  # it finds that it was hung up on, and ends what it keeps
        wait_until(lambda: is_gone(host.pid), 5)
        wait_until(lambda: hosting.has_ended(0), 5)
        assert hosting.start(0, Term(1)).pid != host.pid
    finally:
        hosting.stop()
        sockets.remove()


def test_a_process_that_is_at_work_is_told_from_one_that_is_stopped(
    hosting: SparkHosting, root: Path
) -> None:
    """It may keep its interpreter to itself, and answer nobody for longer than others may be silent."""
    (root / "busy").touch()
    host = hosting.start(0, Term(1))
    wait_until(lambda: hosting.is_busy(0), 5)
    os.kill(host.pid, signal.SIGSTOP)
    wait_until(lambda: not hosting.is_busy(0), 5)
    os.kill(host.pid, signal.SIGCONT)
    wait_until(lambda: hosting.is_busy(0), 5)
    (root / "busy").unlink()
    wait_until(lambda: not hosting.is_busy(0), 5)


def test_a_driver_that_is_stopped_loses_nothing_and_one_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Run as a script, this file is the driver."""
    with subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            pids = [int(pid) for pid in driver.stdout.readline().split()]
            assert len(pids) == 2
            os.kill(driver.pid, signal.SIGSTOP)
            time.sleep(2.5)  # longer than the line of a machine that is gone
            os.kill(driver.pid, signal.SIGCONT)
            time.sleep(0.5)
            assert not any(map(is_gone, pids)), "its containers wait for it"
        finally:
            driver.kill()
    wait_until(lambda: all(map(is_gone, pids)), 5)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_task_waits_for_a_driver_that_says_nothing_and_not_for_one_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Of one that is there, the system acknowledges what is sent: of a machine that is gone, nobody does."""
    for name, seconds in (("TICK_S", 0.01), ("LEASE_S", 0.1), ("STOPPED_S", 0.3)):
        monkeypatch.setattr(home, name, seconds)

    async def driver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if is_there:
            await reader.read(-1)  # until the task hangs up
        writer.close()

    async def waited() -> tuple[int, bool, float]:
        async with await asyncio.start_server(driver, "127.0.0.1", 0) as server:
            streams = await asyncio.open_connection(*server.sockets[0].getsockname())
            line = home.Line.patient(*streams)
            option = (
                streams[1].get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            )
            started = time.monotonic()
            async for _ in line.messages():
                pass
            line.abort()
            return option, line.fell_silent, time.monotonic() - started

    acknowledged_ms, fell_silent, seconds = asyncio.run(waited())
    assert acknowledged_ms == 100
    assert fell_silent is is_there
    assert seconds >= 0.3 or not is_there


def test_containers_are_spread_over_hosts_then_executors() -> None:
    cluster = [
        Executor("1", "a", 2, 2),
        Executor("2", "a", 1, 2),
        Executor("3", "b", 1, 2),
        Executor("4", "b", 0, 2),
    ]
    taken: dict[str, int] = {}
    order = []
    for _ in range(3):
        executor = choose(cluster, taken)
        assert executor is not None
        taken[executor.id] = taken.get(executor.id, 0) + 1
        order.append(executor.id)
    assert order == ["1", "3", "2"]
    assert choose([Executor("4", "b", 0, 2)], {}) is None
    assert Outcome(LET_GO, "here").why == ""


if __name__ == "__main__":
    where = sys.argv[1]
    private.write_text(f"{where}/token", "secret\n")
    crowd = Workers()
    there = SparkHosting(crowd, where, SocketDirectory.under(where).path, 1, print, keys_of(Path(where)))
    sys.stdout.write(f"{there.start(0, Term(1)).pid} {crowd.running()[0].pid}\n")
    sys.stdout.flush()
    time.sleep(60)
