"""Faults that a seed has planned, and that happen to a pond of processes while it is at work (`chaos_load`).

One updater and one reader come by TCP, through a `Proxy` of this file, and keep their connections on it. A disk that is full
is a container that may write nothing (`RLIMIT_FSIZE`); one that is full for the coordinator, too, is the simulator's.
"""

from __future__ import annotations

import math
import os
import random
import resource
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from chaos_load import FIRST_S_MAX, PROGRESS_S_MAX, Load, await_true, check_accounts, check_answers

import millpond as mp
from millpond.coordinator import hosting
from millpond.coordinator.detector import SILENT_S_MAX
from millpond.errors import MillpondError, Unavailable
from millpond.pond.figures import too_few_backups
from millpond.wire.house import ContainerInfo

SLICES = 16
CONTAINERS_MAX = 3
QUIET_S_MAX = 60.0
# By TLS; only this machine's, and none at which a pond does without.
HOST = "127.0.0.2"


class Proxy:
    """Passes TCP connections on; late, not at all, or cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.delay_s = 0.0
        self.delayed = 0
        self.cuts = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, name="chaos-proxy", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                self._spawn(self._pass, source, sink)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.delay_s:
                    self.delayed += 1
                    time.sleep(self.delay_s)
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._open.discard(each)

    def cut(self) -> int:
        """Ends all connections that there are, in the middle of whatever they carry; how many there were."""
        with self._lock:
            cut = list(self._open)
        for each in cut:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self.cuts += len(cut)
        return len(cut)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)


class StaleClient:
    """Keeps the placement that it has, whatever happens, and asks once: it may be refused, and is never told wrong."""

    def __init__(self, pond: mp.Pond, token: str, load: Load, seed: int) -> None:
        self._pond = mp.connect(f"unix:{pond.link.address.removeprefix('unix:')}" if pond.link else "", token)
        client: Any = self._pond._client
        frozen = client.placement()
        client.placement = lambda version=0: frozen
        client._retry = lambda work, code="": work()
        self.answered: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._load = load
        self._state = self._pond.state("s")
        self._fetch = self._state.fetch(key="k", at="t", into="v")
        self._table = self._pond.table("accounts")
        self._chance = random.Random(seed)
        self._ended = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._ask, args=(name, work), name="chaos-stale", daemon=True)
            for name, work in (("fetch", self._ask_state), ("table", self._ask_table))
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str, work: Callable[[], None]) -> None:
        try:
            while not self._ended.wait(0.01):
                try:
                    work()
                    self.answered[name] += 1
                except MillpondError as error:
                    self.refused[type(error).__name__] += 1
        except BaseException as error:  # noqa: BLE001 - whatever it is, the run shows it
            self._failures.append(error)

    def _ask_state(self) -> None:
        until = self._state.progress().update
        if until > -math.inf:
            check_answers(self._fetch, self._load.history, self._chance, int(until))

    def _ask_table(self) -> None:
        check_accounts(self._table, self._load.ledgers, self._load.transfers)

    def close(self) -> None:
        self._ended.set()
        # What still waits for an answer is let go.
        self._pond.close()
        for thread in self._threads:
            thread.join(PROGRESS_S_MAX)
        assert not self._failures, f"a stale client was told wrong: {self._failures}"


KINDS = (
    "kill",
    "kill in a move",
    "stop and relieve",
    "stop, move, continue",
    "wake a relieved one",
    "move",
    "cancel moves",
    "scale up",
    "scale down",
    "rebalance",
    "autoscale",
    "lose a disk",
    "disk full",
    "cut connections",
    "delay connections",
)


class Faults:
    """Faults by their kinds. Each happens for certain, or the run fails."""

    def __init__(self, pond: mp.Pond, root: Path, load: Load, proxy: Proxy, seed: int) -> None:
        self.pond = pond
        self.root = root
        self.load = load
        self.proxy = proxy
        self.chance = random.Random(seed)
        self.happened: Counter[str] = Counter()
        self.log: list[str] = []
        self._began_s = time.monotonic()

    def plan(self) -> Iterator[str]:
        """All kinds, again and again, in another order each time."""
        while True:
            yield from self.chance.sample(KINDS, len(KINDS))

    def happen(self, kind: str) -> None:
        """On return it has, and all that goes on went on."""
        began_s = time.monotonic()
        told = getattr(self, "_" + kind.replace(",", "").replace(" ", "_"))()
        self.load.wait_until_moved()
        self.happened[kind] += 1
        self.log.append(
            f"{began_s - self._began_s:6.1f} s  {kind}: {told}; {time.monotonic() - began_s:.1f} s"
        )

    def run(self, seconds: float) -> None:
        """For so long, and until every kind has happened."""
        self.load.wait_until_moved(FIRST_S_MAX)
        deadline = time.monotonic() + seconds
        for kind in self.plan():
            if time.monotonic() > deadline and set(self.happened) == set(KINDS):
                return
            with self.told(kind):
                self.happen(kind)

    @contextmanager
    def told(self, then: str = "the end") -> Iterator[None]:
        """What fails within is told with all that happened before."""
        try:
            yield
        except BaseException as error:
            error.add_note("\n".join([*self.log, f"then: {then}"]))
            raise

    # Containers that end or stand still

    def _kill(self) -> str:
        victim = self._victim()
        time.sleep(self.chance.uniform(0, 0.2))
        self._end(victim)
        return f"container {victim.id}"

    def _kill_in_a_move(self) -> str:
        self._be_at_least(2)
        slices, source, target = self._any_move()
        victim = self.chance.choice([source, target])
        moving = threading.Thread(target=self._try_to_move, args=(slices, target.id))
        moving.start()
        time.sleep(self.chance.uniform(0, 0.05))
        self._end(victim)
        moving.join(PROGRESS_S_MAX)
        assert not moving.is_alive(), f"the move is stuck: {self.pond.moves()}"
        return f"container {victim.id}, while {slices} went from {source.id} to {target.id}"

    def _stop_and_relieve(self) -> str:
        victim = self._victim()
        with self._stopped(victim):
            self._await_restart(victim)
        return f"container {victim.id}"

    def _stop_move_continue(self) -> str:
        """It wakes up while it is asked to let go of slices, just before or after it would be relieved."""
        self._be_at_least(2)
        slices, source, target = self._any_move()
        stopped_s = self.chance.uniform(1.0, SILENT_S_MAX + 1.0)
        moving = threading.Thread(target=self._try_to_move, args=(slices, target.id))
        with self._stopped(source):
            moving.start()
            time.sleep(stopped_s)
        moving.join(PROGRESS_S_MAX)
        assert not moving.is_alive(), f"the move is stuck: {self.pond.moves()}"
        return f"container {source.id} for {stopped_s:.1f} s, while {slices} were to go to {target.id}"

    def _wake_a_relieved_one(self) -> str:
        """One that nobody can end, as on another machine: others serve its slices when it wakes up and is asked."""
        self._be_at_least(2)
        # It serves all, and holds nothing for others: nobody waits for it but those who ask it.
        victim = self._victim()
        self.pond.move(range(SLICES), victim.id)
        self._be_quiet()
        stale = StaleClient(
            self.pond, (self.root / "token").read_text(), self.load, self.chance.randrange(99)
        )
        try:
            await_true(
                lambda: len(stale.answered) == 2, 20, lambda: f"a client is not answered: {stale.refused}"
            )
            with _nobody_ends(victim.pid):
                with self._stopped(victim):
                    await_true(
                        lambda: victim.id not in self.pond.placement().values(),
                        QUIET_S_MAX,
                        lambda: f"container {victim.id} is not relieved",
                        self.load.check,
                    )
                    answered, refused = stale.answered.copy(), stale.refused.total()
                assert _is_there(victim.pid), "it was ended before it could be asked"
                # Others go on with what it had, while it is asked.
                self.load.wait_until_moved()
                await_true(lambda: stale.refused.total() > refused + 5, 20, lambda: "nobody asked it")
        finally:
            stale.close()
        self._await_restart(victim)
        after = dict(stale.answered - answered)
        return f"container {victim.id}; awake, it answered {after}, and refused: {dict(stale.refused)}"

    # Slices and containers that are moved

    def _move(self) -> str:
        self._be_at_least(2)
        slices, source, target = self._any_move()
        moves = self.pond.move(slices, target.id)
        assert [move.stage for move in moves] == ["moved"] * len(moves), moves
        placement = self.pond.placement()
        assert {placement[number] for number in slices} == {target.id}
        return f"{slices} from {source.id} to {target.id}"

    def _cancel_moves(self) -> str:
        self._be_at_least(2)
        while True:
            slices, _, target = self._any_move(SLICES)
            before = {move.id for move in self.pond.moves()}
            movers = [
                threading.Thread(target=self._try_to_move, args=([number], target.id)) for number in slices
            ]
            for mover in movers:
                mover.start()
            while not [move for move in self.pond.moves() if move.id not in before]:
                time.sleep(0.001)
            self.pond.cancel_moves()
            for mover in movers:
                mover.join(PROGRESS_S_MAX)
                assert not mover.is_alive(), f"a move that was cancelled is stuck: {self.pond.moves()}"
            mine = [move for move in self.pond.moves() if move.id not in before]
            stages = Counter(move.stage for move in mine)
            placement = self.pond.placement()
            for move in mine:
                if move.stage == "moved":
                    assert {placement[number] for number in move.slices} == {move.target}
            if stages["cancelled"]:
                return f"{dict(stages)} of {len(slices)} slices to {target.id}"

    def _scale_up(self) -> str:
        return self._scale(+1)

    def _scale_down(self) -> str:
        return self._scale(-1)

    def _rebalance(self) -> str:
        """One container has the slices of another, too, and gives some away again."""
        self._be_at_least(2)
        _, source, target = self._any_move()
        self.pond.move([n for n, owner in self.pond.placement().items() if owner == source.id], target.id)
        moves = self.pond.rebalance("bytes")
        assert moves
        assert [move.stage for move in moves] == ["moved"] * len(moves), moves
        return f"{sum(len(move.slices) for move in moves)} slices from {sorted({m.source for m in moves})}"

    def _autoscale(self) -> str:
        now = len(self.pond.containers())
        wanted = now + 1 if now < CONTAINERS_MAX else now - 1
        self.pond.autoscale((wanted, wanted), hold="1 second")
        await_true(
            lambda: len(set(self.pond.placement().values())) == len(self.pond.containers()) == wanted,
            QUIET_S_MAX,
            lambda: f"{len(self.pond.containers())} containers, not {wanted}, moves {self.pond.moves()[-4:]}",
            self.load.check,
        )
        self.pond.autoscale(None)
        return f"{now} to {wanted}"

    def _scale(self, by: int) -> str:
        now = len(self.pond.containers())
        if not 1 <= now + by <= CONTAINERS_MAX:
            self.pond.scale(now - by)
            now -= by
        self.pond.scale(now + by)
        counts = Counter(self.pond.placement().values())
        assert len(counts) == now + by
        assert max(counts.values()) - min(counts.values()) <= 1, counts
        return f"{now} to {now + by}"

    # Disks and connections

    def _lose_a_disk(self) -> str:
        """A container, and all that it and those before it have written."""
        self._be_at_least(2)
        self._be_quiet()
        victim = self._victim(serving=True)
        promoted = self._promoted(victim)
        os.kill(victim.pid, signal.SIGSTOP)
        files = files_of(self.root, victim.id)
        assert files, "a container without files"
        os.kill(victim.pid, signal.SIGKILL)
        for path in files:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self._await_restart(victim)
        assert self._promoted(victim) > promoted, "its slices were not served by those who held a backup"
        return f"container {victim.id}, {len(files)} files and directories"

    def _disk_full(self) -> str:
        """Of one container: whatever it writes fails."""
        victim = self._victim(serving=True)
        before = Counter(self._refused())
        soft, hard = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, hard))
        try:
            await_true(
                lambda: bool(self._refused() - before) or not _is_there(victim.pid),
                QUIET_S_MAX,
                lambda: "nobody was refused",
                self.load.check,
            )
        finally:
            with suppress(ProcessLookupError):
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (soft, hard))
        return f"container {victim.id}: {dict(self._refused() - before)}"

    def _cut_connections(self) -> str:
        cut = 0
        for _ in range(self.chance.randint(1, 4)):
            cut += self.proxy.cut()
            time.sleep(self.chance.uniform(0.01, 0.3))
        assert cut, "there was no connection to cut"
        return f"{cut} ends"

    def _delay_connections(self) -> str:
        before = self.proxy.delayed
        self.proxy.delay_s = self.chance.uniform(0.05, 0.3)
        time.sleep(2)
        self.proxy.delay_s, delay_s = 0.0, self.proxy.delay_s
        assert self.proxy.delayed > before, "nothing was on its way"
        return f"{self.proxy.delayed - before} pieces by {delay_s:.2f} s"

    # What they need

    def _victim(self, serving: bool = False) -> ContainerInfo:
        """Any container, or any that has slices."""

        def possible() -> list[ContainerInfo]:
            owners = set(self.pond.placement().values())
            return [each for each in self.pond.containers() if each.id in owners or not serving]

        await_true(lambda: bool(possible()), QUIET_S_MAX, lambda: "no container is up")
        return self.chance.choice(possible())

    def _end(self, victim: ContainerInfo) -> None:
        os.kill(victim.pid, signal.SIGKILL)
        self._await_restart(victim)

    def _await_restart(self, victim: ContainerInfo) -> None:
        def is_back() -> bool:
            return any(each.id == victim.id and each.pid != victim.pid for each in self.pond.containers())

        await_true(is_back, QUIET_S_MAX, lambda: f"container {victim.id} does not come back", self.load.check)

    @contextmanager
    def _stopped(self, victim: ContainerInfo) -> Iterator[None]:
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)

    def _be_at_least(self, containers: int) -> None:
        if len(self.pond.containers()) < containers:
            await_true(
                lambda: bool(self.pond.containers()) and not self._under_way(),
                QUIET_S_MAX,
                lambda: "moves do not end",
            )
            if len(set(self.pond.placement().values())) < containers:
                self.pond.scale(containers)

    def _under_way(self) -> bool:
        return any(not move.is_over for move in self.pond.moves())

    def _be_quiet(self) -> None:
        """Nothing moves, and every slice has its backups."""

        def lacks() -> list[int]:
            return too_few_backups(self.pond.metrics()["slices"])

        await_true(
            lambda: not self._under_way() and not lacks(),
            QUIET_S_MAX,
            lambda: f"slices {lacks()} have too few backups, moves {self.pond.moves()[-4:]}",
            self.load.check,
        )

    def _any_move(self, at_most: int = 4) -> tuple[list[int], ContainerInfo, ContainerInfo]:
        """Slices of one container, and another one for them."""
        await_true(lambda: len(self.pond.containers()) >= 2, QUIET_S_MAX, lambda: "containers are missing")
        placement = self.pond.placement()
        serving = {each.id: each for each in self.pond.containers()}
        source = self.chance.choice([each for each in serving.values() if each.id in placement.values()])
        target = self.chance.choice([each for each in serving.values() if each.id != source.id])
        own = [number for number, owner in placement.items() if owner == source.id]
        return self.chance.sample(own, min(len(own), self.chance.randint(1, at_most))), source, target

    def _try_to_move(self, slices: list[int], to: int) -> None:
        """It may be given up, for the container went meanwhile: then they are served where they were."""
        with suppress(Unavailable):
            self.pond.move(slices, to)

    def _promoted(self, victim: ContainerInfo) -> int:
        """Slices that others than the victim serve, because they held them."""
        containers = self.pond.metrics()["containers"]
        return sum(int(own.get("slices_promoted", 0)) for c, own in containers.items() if c != victim.id)

    def _refused(self) -> Counter[str]:
        return sum((worker.refused for worker in self.load.workers), Counter())


def files_of(root: Path, container: int) -> list[Path]:
    """All that incarnations of a container have written: logs, snapshots, backups."""
    directories = list((root / "containers").glob(f"t*-c{container:04d}*"))
    terms = {path.name.partition("-")[0] for path in directories}
    snapshots = [path for path in (root / "snapshots").rglob("s*.arrow") if path.name.split("-")[1] in terms]
    return [*directories, *(root / "backups").glob(f"t*-c{container:04d}*"), *snapshots]


def _is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def _nobody_ends(pid: int) -> Iterator[None]:
    """The container of that process, though its pond tries to."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("kill", "hang_up"):
            own = getattr(hosting.Child, name)
            patch.setattr(
                hosting.Child, name, lambda child, own=own: None if child.process.pid == pid else own(child)
            )
        yield


@contextmanager
def chaotic(root: Path, seed: int) -> Iterator[Faults]:
    """A pond under load. On leaving, all is compared; then the pond is opened anew, and compared again."""
    with mp.open(root, containers=2, threads=1, slices=SLICES, backups=1, host=HOST, port=0) as pond:
        host, _, port = pond.address.rpartition(":")
        proxy = Proxy((host, int(port)))
        try:
            token = (root / "token").read_text()
            with mp.connect(proxy.address, token, certificate=root / "client.pem") as joined:
                load = Load(pond, joined, seed)
                faults = Faults(pond, root, load, proxy, seed)
                with load:
                    yield faults
                with faults.told():
                    load.check()
                    load.finish()
        finally:
            proxy.close()
    with mp.open(root, containers=1, threads=1) as pond, faults.told():
        load.compare(pond)
