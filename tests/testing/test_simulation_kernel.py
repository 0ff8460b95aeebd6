"""The simulator keeps its own promises: it repeats exactly, and what it says it does to a pond really happens."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from millpond.errors import BadMessage, MillpondError, Unavailable
from millpond.runtime import Runtime
from millpond.testing.simulation import Died, Process, Simulation, Stuck, Weather
from millpond.wire.base import Done, Message
from millpond.wire.connection import Answer, Handler, SlicedBatch
from millpond.wire.house import DropResident, ListResidents

CALM = Weather()


class Echo:
    """Counts what it is asked, and answers after `seconds` of its process's time."""

    def __init__(self, runtime: Runtime, seconds: float = 0.0) -> None:
        self.asked: list[str] = []
        self._runtime = runtime
        self._seconds = seconds

    def call(self, message: Any) -> Message:
        self.asked.append(getattr(message, "name", ""))
        if self._seconds:
            self._runtime.sleep(self._seconds)
        if isinstance(message, ListResidents):
            raise BadMessage("not here", hint="elsewhere")
        return Done()

    def exchange(self, message: Any, batches: Iterator[SlicedBatch], reads_only: bool = False) -> Answer:
        return Answer(Done(), next(batches).batch)

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        batch = pa.record_batch({"a": [1, 2]})
        return batch.schema, iter([batch, batch])


class Pair:
    """A process that serves, and one that asks."""

    def __init__(self, seed: int, weather: Weather = CALM, seconds: float = 0.0) -> None:
        self.sim = Simulation(seed, weather)
        self.server = self.sim.process("server")
        self.client = self.sim.process("client")
        self.echo = Echo(self.server.runtime, seconds)
        handler: Handler = self.echo
        self.sim.network.serve(self.server, handler, "server:1")
        self.connection = self.sim.network.dialer(self.client)("server:1")

    def ask(self, number: int) -> bool:
        try:
            self.connection.call(DropResident(f"s{number}", 0))
        except Unavailable:
            return False
        return True

    def ask_all(self, count: int) -> int:
        """How many of so many calls at once were answered."""
        return self.sim.run(
            lambda: sum(self.client.run(lambda: self.client.runtime.map(self.ask, range(count))))
        )


def busy(seed: int, weather: Weather | None = None) -> Simulation:
    """Two processes that take locks, sleep, write files and ask each other."""
    sim = Simulation(seed, weather)
    server, client = sim.process("server"), sim.process("client")
    sim.network.serve(server, Echo(server.runtime), "server:1")

    def work(number: int) -> None:
        files, connection = sim.disk.files(client), sim.network.dialer(client)("server:1")
        files.make_dir("/d")
        for turn in range(5):
            with lock:
                client.runtime.sleep(client.runtime.bits(4) / 100)
                try:
                    files.write(f"/d/{number}", [bytes(100)])
                    files.sync(f"/d/{number}")
                    connection.call(DropResident(f"s{turn}", 0))
                except (Unavailable, OSError):
                    sim.scheduler.note("failed")

    lock = client.runtime.lock()

    def main() -> None:
        sim.storms(lambda: [server, client], lambda: None).begin()
        try:
            client.run(lambda: client.runtime.map(work, range(4)))
        except Died:
            sim.scheduler.note("died")

    sim.run(main)
    return sim


# A seed


def test_a_seed_repeats_to_the_last_line() -> None:
    for seed in range(20):
        first, second = busy(seed), busy(seed)
        assert list(first.history.lines) == list(second.history.lines)
        assert first.history.digest == second.history.digest
        assert first.faults.fired == second.faults.fired
        assert first.history.count > 0


def test_seeds_differ_in_their_weather_and_in_the_order_of_things() -> None:
    assert len({busy(seed).history.digest for seed in range(20)}) == 20
    assert len({busy(seed, CALM).history.digest for seed in range(20)}) == 20
    assert len({busy(seed).faults.weather for seed in range(20)}) == 20


# Tasks


def test_switches_are_cheap() -> None:
    sim = Simulation(1, CALM)
    world = sim.scheduler.world

    def spin() -> None:
        for _ in range(2_500):
            sim.scheduler.give_way()

    def main() -> None:
        sim.scheduler.join([world.spawn(spin, f"spin{n}", joined=True) for n in range(4)])

    started = time.process_time()
    sim.run(main)
    assert sim.scheduler.steps > 10_000
    assert time.process_time() - started < 0.5  # ten times what it takes


def test_time_is_virtual_and_shared() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    order = []

    def sleep(seconds: float) -> None:
        process.runtime.sleep(seconds)
        order.append((seconds, round(process.runtime.now())))

    sim.run(lambda: process.run(lambda: process.runtime.map(sleep, [3e6, 1e6, 2e6])))
    assert order == [(1e6, 1e6), (2e6, 2e6), (3e6, 3e6)]


def test_map_is_at_the_same_time_in_order_and_raises_the_first_failure_after_all_ended() -> None:
    sim = Simulation(3, CALM)
    process = sim.process("p")
    ended = []

    def work(item: int) -> int:
        process.runtime.sleep(10 - item)
        ended.append(item)
        if item in (2, 4):
            raise ValueError(item)
        return item

    def main() -> None:
        assert process.runtime.map(work, [0, 1]) == [0, 1]
        with pytest.raises(ValueError, match="2"):
            process.runtime.map(work, range(5))
        assert ended == [1, 0, 4, 3, 2, 1, 0]

    sim.run(lambda: process.run(main))


def test_a_lock_keeps_others_out_and_is_had_in_every_order() -> None:
    orders = set()
    for seed in range(60):
        sim = Simulation(seed, CALM)
        process = sim.process("p")
        lock = process.runtime.lock()
        order: list[int] = []

        def work(item: int, process: Process = process, lock: Any = lock, order: list[int] = order) -> None:
            with lock, lock:
                order.append(item)
                process.runtime.sleep(1)
                assert order[-1] == item

        sim.run(lambda process=process, work=work: process.run(lambda: process.runtime.map(work, range(3))))
        orders.add(tuple(order))
    assert len(orders) == 6


def test_a_lock_may_be_waited_for_so_long_and_no_longer() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    lock = process.runtime.lock()

    def work(item: int) -> bool:
        if item == 0:
            with lock:
                process.runtime.sleep(5)
            return True
        process.runtime.sleep(1)
        had = lock.acquire(timeout=item)
        if had:
            lock.release()
        return had

    assert sim.run(lambda: process.run(lambda: process.runtime.map(work, [0, 2, 60]))) == [True, False, True]


def test_a_lock_is_released_by_who_has_it() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    with pytest.raises(RuntimeError, match="does not have"):
        sim.run(lambda: process.run(process.runtime.lock().release))


def test_what_nobody_waits_for_fails_the_simulation_and_the_failure_tells_the_seed() -> None:
    sim = Simulation(41, CALM)

    def fail() -> None:
        raise ValueError("spawned")

    def main() -> None:
        process = sim.process("p")
        process.runtime.spawn(fail, "bad")
        process.run(lambda: process.runtime.sleep(1))

    with pytest.raises(ValueError, match="spawned") as failure:
        sim.run(main)
    assert "seed 41" in failure.value.__notes__[0]


# Stuck


def cross(first_s: float, upkeep: bool) -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    one, other = process.runtime.lock(), process.runtime.lock()

    def take(locks: tuple[Any, Any]) -> None:
        with locks[0]:
            process.runtime.sleep(first_s)
            with locks[1]:
                pass

    def tick() -> None:
        while True:
            process.runtime.sleep(1)

    def main() -> None:
        if upkeep:
            process.runtime.spawn(tick, "upkeep")
        process.runtime.map(take, [(one, other), (other, one)])

    sim.run(lambda: process.run(main))


@pytest.mark.parametrize("upkeep", [False, True])
def test_a_deadlock_is_found_even_while_others_go_on(upkeep: bool) -> None:
    with pytest.raises(Stuck, match=r"a lock of p/run.[01] in .*take:"):
        cross(1.0, upkeep)


def test_a_deadlock_through_map_is_found() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    lock = process.runtime.lock()

    def work(_item: int) -> None:
        with lock:
            pass

    def main() -> None:
        with lock:
            process.runtime.map(work, range(2))

    with pytest.raises(Stuck, match="waits for itself"):
        sim.run(lambda: process.run(main))


def test_that_nothing_can_go_on_is_found() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    process.stop()
    with pytest.raises(Stuck, match="p/run: stopped"):
        sim.run(lambda: process.run(lambda: None))


def test_that_nothing_ends_is_found() -> None:
    sim = Simulation(1, CALM, steps_max=1000)

    def forever() -> None:
        while True:
            sim.scheduler.world.runtime.sleep(1)

    with pytest.raises(Stuck, match="no end after 1000 steps"):
        sim.run(forever)


# Kill and stop


def test_a_kill_ends_every_task_where_it_stands_and_nothing_of_it_happens_any_more() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    lock = process.runtime.lock()
    files = sim.disk.files(process)
    seen = []

    def holder(_item: int) -> None:
        try:
            with lock:
                seen.append("in")
                process.runtime.sleep(10)
                seen.append("never")
        finally:
            for refused in (
                lambda: files.write("/left", [b"over"]),
                lambda: process.runtime.spawn(lambda: None, "late"),
                lambda: sim.network.dialer(process)("p:1").call(DropResident("s", 0)),
            ):
                try:
                    refused()
                    seen.append("done by the dead")
                except Exception:  # noqa: BLE001
                    seen.append("survived")

    def main() -> str:
        process.on_exit.append(lambda: seen.append("exit"))
        sim.scheduler.at(5, process.kill)
        with pytest.raises(Died):
            process.run(lambda: process.runtime.map(holder, range(3)))
        sim.scheduler.sleep(100)
        assert not process.tasks
        with pytest.raises(Died):
            process.run(lambda: None)
        return "alive"

    assert sim.run(main) == "alive"
    assert seen == ["in", "exit"]
    assert not sim.disk.content.exists("/left")


def test_a_task_may_kill_its_own_process() -> None:
    sim = Simulation(1, CALM)
    process = sim.process("p")
    seen = []

    def work() -> None:
        process.kill()
        seen.append("never")

    def main() -> None:
        with pytest.raises(Died):
            process.run(work)

    sim.run(main)
    assert not seen


def test_who_asks_a_process_that_is_killed_hears_it_or_waits_in_vain() -> None:
    for silent, waited_s in ((0.0, 6), (1.0, DropResident.seconds)):
        pair = Pair(1, Weather(silent=silent), seconds=50)

        def main(pair: Pair = pair) -> float:
            pair.sim.scheduler.at(5, pair.server.kill)
            assert not pair.client.run(lambda: pair.ask(1))
            return pair.sim.scheduler.now

        assert pair.sim.run(main) == pytest.approx(waited_s, abs=1.5)


def test_a_stopped_process_does_nothing_until_it_is_resumed() -> None:
    pair = Pair(1)

    def main() -> None:
        pair.server.stop()
        calls = [pair.client.spawn(lambda: pair.ask(1), "ask", joined=True) for _ in range(3)]
        pair.sim.scheduler.sleep(60)
        assert not pair.echo.asked
        pair.server.resume()
        pair.sim.scheduler.join(calls)
        assert [call.result for call in calls] == [True] * 3
        assert len(pair.echo.asked) == 3
        # Longer than anyone waits: what was asked is done all the same, when nobody listens.
        pair.server.stop()
        assert not pair.client.run(lambda: pair.ask(2))
        pair.server.resume()
        pair.sim.scheduler.sleep(1)
        assert len(pair.echo.asked) == 4

    pair.sim.run(main)


def test_a_clock_jumps_for_one_process_alone() -> None:
    sim = Simulation(1, CALM)
    one, other = sim.process("one"), sim.process("other")
    one.clock_ahead_s += 100
    assert sim.run(lambda: one.runtime.now() - other.runtime.now()) == pytest.approx(100)


# Network


def test_messages_rows_and_errors_arrive_as_they_were_sent() -> None:
    pair = Pair(1)
    rows = pa.record_batch({"a": [1]})

    def asks() -> None:
        assert pair.connection.call(DropResident("s", 0)) == Done()
        batch = pair.connection.exchange(DropResident("s", 0), [SlicedBatch(rows, _counts(1))]).batch
        assert batch == rows
        assert pair.connection.read(DropResident("s", 0)).num_rows == 4
        with pytest.raises(BadMessage, match="not here") as failure:
            pair.connection.call(ListResidents("state"))
        assert failure.value.hint == "elsewhere"
        with pytest.raises(MillpondError, match="AttributeError"):
            pair.sim.network.ask(
                pair.client, "server:1", ListResidents("state"), lambda handler: handler.nothing
            )  # type: ignore[attr-defined]
        with pytest.raises(Unavailable):
            pair.sim.network.dialer(pair.client)("nowhere").call(ListResidents("state"))

    pair.sim.run(lambda: pair.client.run(asks))
    assert not pair.sim.faults.fired


def _counts(rows: int) -> Any:
    import numpy as np

    return np.array([rows], np.int32)


def test_messages_are_lost_and_who_asked_gives_up() -> None:
    pair = Pair(1, Weather(lost=0.2))
    answered = pair.ask_all(200)
    lost = pair.sim.faults.fired
    assert lost["request lost"] == 200 - len(pair.echo.asked) > 10
    assert lost["reply lost"] == len(pair.echo.asked) - answered > 10
    assert pair.sim.scheduler.now > 120


def test_requests_are_doubled_and_answered_once() -> None:
    pair = Pair(1, Weather(doubled=0.2))
    assert pair.ask_all(200) == 200
    assert pair.sim.faults.fired["request doubled"] == len(pair.echo.asked) - 200 > 10


def test_messages_are_delayed_and_overtake_each_other() -> None:
    pair = Pair(1, Weather(delayed=0.1, delay_s=5))
    assert pair.ask_all(200) == 200
    fired = pair.sim.faults.fired
    assert min(fired["request delayed"], fired["reply delayed"], fired["request reordered"]) > 5
    assert pair.echo.asked != sorted(pair.echo.asked)
    assert pair.sim.scheduler.now > 5


def test_a_cut_ends() -> None:
    pair = Pair(1)

    def main() -> None:
        pair.sim.network.cut(pair.client, pair.server, 10)
        assert not pair.client.run(lambda: pair.ask(1))
        assert pair.client.run(lambda: pair.ask(2))

    pair.sim.run(main)
    assert pair.sim.faults.fired == {"request cut off": 1}
    assert pair.echo.asked == ["s2"]


def test_an_address_is_free_again_after_its_process() -> None:
    pair = Pair(1)

    def main() -> None:
        pair.server.kill()
        assert not pair.client.run(lambda: pair.ask(1))
        again = pair.sim.process("again")
        pair.sim.network.serve(again, Echo(again.runtime), "server:1")
        assert pair.client.run(lambda: pair.ask(2))

    pair.sim.run(main)


# Disk


def on_disk(seed: int, weather: Weather, work: Callable[[Simulation, Process, Any], None]) -> Simulation:
    sim = Simulation(seed, weather)
    process = sim.process("p")
    sim.run(lambda: process.run(lambda: work(sim, process, sim.disk.files(process))))
    return sim


def test_a_full_disk_refuses_to_write_and_has_room_again() -> None:
    def work(sim: Simulation, process: Process, files: Any) -> None:
        files.write("/a", [b"before"])
        sim.disk.fill(10)
        with pytest.raises(OSError, match="No space") as failure:
            files.write("/b", [b"while"])
        assert failure.value.errno == errno.ENOSPC
        assert files.read("/a").to_pybytes() == b"before"
        process.runtime.sleep(11)
        files.write("/b", [b"after"])
        assert files.read("/b").to_pybytes() == b"after"

    assert on_disk(1, CALM, work).faults.fired == {"disk full": 1}


def test_a_sync_may_be_slow() -> None:
    def work(sim: Simulation, process: Process, files: Any) -> None:
        files.write("/a", [b"x"])
        files.sync("/a")

    sim = on_disk(1, Weather(slow=1.0, slow_s=30), work)
    assert sim.faults.fired == {"slow sync": 1}
    assert sim.scheduler.now > 1


def test_a_crash_loses_what_was_not_synced_and_a_kill_nothing() -> None:
    kept = set()
    for seed in range(30):
        sim = Simulation(seed, CALM)
        process = sim.process("p")
        files = sim.disk.files(process)

        def work(files: Any = files) -> None:
            files.write("/a", [b"synced"])
            files.sync("/a")
            files.sync_dir("/")
            files.write("/a", [b"not so"])

        sim.run(lambda process=process, work=work: process.run(work))
        process.kill()
        assert sim.disk.content.read("/a").to_pybytes() == b"not so"
        sim.disk.crash()
        kept.add(sim.disk.content.read("/a").to_pybytes())
    assert {b"synced", b"not so"} < kept


def test_a_kill_may_come_in_the_middle_of_a_write() -> None:
    left = set()
    for seed in range(60):
        sim = Simulation(seed, Weather(disk_s=1.0))
        process = sim.process("p")

        def main(sim: Simulation = sim, process: Process = process) -> None:
            sim.scheduler.at(1.0, process.kill)
            files = sim.disk.files(process)
            try:
                process.run(lambda: files.write("/a", [b"abcd"]))
            except Died:
                left.add(sim.disk.content.read("/a").to_pybytes() if sim.disk.content.exists("/a") else None)

        sim.run(main)
    assert left == {None, b"ab"}


@pytest.mark.parametrize("change", [1, 2, 3])
def test_a_kill_may_come_just_before_a_change(change: int) -> None:
    sim = Simulation(1, CALM)
    process, other = sim.process("p"), sim.process("other")

    def write(process: Process) -> None:
        files = sim.disk.files(process)
        for name in "abc":
            files.write(f"/{process.name}-{name}", [b""])

    def main() -> None:
        sim.disk.strike(process, change, process.kill)
        other.run(lambda: write(other))
        with pytest.raises(Died):
            process.run(lambda: write(process))

    sim.run(main)
    assert [name for name in sim.disk.content.list("/") if name.startswith("p-")] == [
        f"p-{name}" for name in "abc"[: change - 1]
    ]


def test_the_machine_may_crash_just_before_a_change() -> None:
    sim = Simulation(1, CALM)
    processes = [sim.process("p"), sim.process("other")]

    def crash() -> None:
        for process in processes:
            process.kill()
        sim.disk.crash("all")

    def main() -> None:
        sim.disk.strike(None, 2, crash)
        files = sim.disk.files(processes[0])
        with pytest.raises(Died):
            processes[0].run(lambda: (files.write("/a", [b"x"]), files.sync("/a")))

    sim.run(main)
    assert not sim.disk.content.exists("/a")
    assert sim.faults.fired["unsynced lost"]


# Weather


def test_over_some_seeds_every_fault_fires() -> None:
    fired: dict[str, int] = {}
    for seed in range(150):
        for kind, times in busy(seed).faults.fired.items():
            fired[kind] = fired.get(kind, 0) + times
    assert set(fired) >= {
        *("request lost", "reply lost", "request delayed", "reply delayed", "request doubled"),
        *("request reordered", "request cut off", "silence", "slow sync", "disk full"),
        *("kill", "stop", "cut", "clock jump", "crash"),
    }, fired


def test_after_a_storm_nothing_strikes_and_nothing_lasts() -> None:
    sim = Simulation(
        1, Weather(kill_every_s=5, stop_every_s=5, stop_s=1e6, full_every_s=5, full_s=1e6, cut_every_s=5)
    )
    victims = [sim.process(f"p{n}") for n in range(100)]

    def main() -> None:
        storms = sim.storms(lambda: victims, lambda: None)
        storms.begin()
        sim.scheduler.sleep(100)
        assert any(victim.stopped for victim in victims)
        assert sim.disk.full
        storms.end()
        before = dict(sim.faults.fired)
        assert before["kill"] > 2  # others wait for a change or a reply that never comes
        sim.scheduler.sleep(100)
        assert sim.faults.fired == before
        assert not any(victim.stopped for victim in victims if victim.alive)
        assert not sim.disk.full

    sim.run(main)


def test_a_history_keeps_its_end_and_counts_the_rest() -> None:
    from millpond.testing.simulation import History

    history, other = History(lines_max=3), History(lines_max=3)
    for number in range(10):
        history.add(number, "p", f"line {number}")
        other.add(number, "p", f"line {number}" if number else "another")
    assert history.tail(2).splitlines()[0] == "... 8 lines before"
    assert history.lines == other.lines
    assert history.digest != other.digest
