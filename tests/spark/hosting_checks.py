"""What a pond does wherever its containers run. Each check takes a pond, and leaves it as empty as it was."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import millpond as mp
from millpond.errors import BadOption, UnknownResident
from millpond.testing import Oracle

KEYS = 50


@mp.transaction(results="left long")
def transfer(accounts: Any, src: int, dst: int, amount: int) -> int:
    if accounts[src].balance < amount:
        mp.abort("insufficient funds")
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    return accounts[src].balance


@mp.transaction
def deposit(accounts: Any, dst: int, amount: int) -> None:
    accounts[dst].balance += amount


@contextmanager
def counts(pond: mp.Pond) -> Iterator[tuple[Any, Callable[[int], None], Oracle]]:
    """A State, what feeds one epoch of it, and what it must hold then."""
    state = pond.state("counts", key="long", value="long")
    update = state.update(key="k", at="t", value="v", name="feed")
    oracle = Oracle()
    oracle.register_updater("feed")

    def feed(epoch: int) -> None:
        rows = [(key, epoch, 1000 * epoch + key) for key in range(KEYS)]
        update(pa.table(dict(zip("ktv", map(list, zip(*rows, strict=True)), strict=True))), epoch)
        oracle.update("feed", epoch, rows)

    try:
        yield state, feed, oracle
    finally:
        pond.forget(state)


def answers(state: Any, at: int) -> list[tuple[int, int | None]]:
    asked = pa.table({"k": list(range(KEYS + 1)), "t": [at] * (KEYS + 1)})
    got = state.fetch(key="k", at="t", into="v").now(asked)
    return list(zip(got["k"].to_pylist(), got["v"].to_pylist(), strict=True))


def check_updates_and_fetches(pond: mp.Pond) -> None:
    with counts(pond) as (state, feed, oracle):
        for epoch in range(3):
            feed(epoch)
        feed(1)  # it comes again, and counts once
        for at in (0, 1):
            assert answers(state, at) == [(key, oracle.fetch_latest(key, at)) for key in range(KEYS + 1)]
        assert answers(state, 1)[7] == (7, 1007)
        assert state.snapshot().num_rows == KEYS
        assert state.progress().update == 2


def check_transactions(pond: mp.Pond) -> None:
    accounts = pond.table("accounts", key="account long", value="balance long", default={"balance": 0})
    kinds = {"deposit": deposit, "transfer": transfer}
    bank = pond.transactions("bank", tables=[accounts], kinds=kinds)
    events = {
        "type": ["transfer", "deposit", "transfer"],
        "ts": [3, 1, 2],
        "src": [1, None, 1],
        "dst": [2, 1, 2],
        "amount": [60, 100, 60],
    }
    for _ in range(2):  # the second time, it says what it said
        done = bank(pa.table(events), 0)
        assert done["committed"].to_pylist() == [False, True, True]
        assert done["left"].to_pylist() == [None, None, 40]
    assert accounts.read([1, 2]).to_pylist() == [{"account": 1, "balance": 40}, {"account": 2, "balance": 60}]
    pond.forget(accounts)


def check_a_killed_container_comes_back(pond: mp.Pond) -> None:
    restarts, count = pond.metrics()["coordinator"]["container_restarts"], len(pond.containers())
    with counts(pond) as (state, feed, oracle):
        feed(0)
        for epoch in range(3):
            victim = pond.containers()[0]
            os.kill(victim.pid, signal.SIGKILL)
            feed(epoch + 1)  # operators wait for it
            assert answers(state, epoch) == [
                (key, oracle.fetch_latest(key, epoch)) for key in range(KEYS + 1)
            ]
            # One without slices is missed by nobody: it is back a moment later.
            wait_until(lambda pid=victim.pid: pid not in [each.pid for each in pond.containers()], 20)  # type: ignore[misc]
            wait_until(lambda: len(pond.containers()) == count, 20)
    assert pond.metrics()["coordinator"]["container_restarts"] == restarts + 3


def check_metrics_and_placement(pond: mp.Pond) -> None:
    containers = pond.containers()
    assert {container.id for container in containers} == set(pond.metrics()["containers"])
    placement = pond.placement()
    assert sorted(placement) == list(range(len(placement)))
    slices = [[slice_ for slice_, owner in placement.items() if owner == each.id] for each in containers]
    assert slices == [list(each.slices) for each in containers]


def check_errors_cross(pond: mp.Pond) -> None:
    try:
        pond.state("nothing")
    except UnknownResident as error:
        assert error.hint
    else:
        raise AssertionError
    try:
        pond.state("counts", key="long", value="long").fetch(key="k", at="t", into="v").now(
            pa.table({"k": [1], "t": [1]}), waiting="perhaps"
        )
    except BadOption as error:
        assert error.option == "waiting"
    else:
        raise AssertionError
    pond.forget("counts")


def check_slices_move_and_containers_come_and_go(pond: mp.Pond) -> None:
    first, second = sorted(container.id for container in pond.containers())[:2]
    with counts(pond) as (state, feed, oracle):
        feed(0)
        for epoch, to in enumerate((second, first), start=1):
            assert all(move.stage == "moved" for move in pond.move([0, 1, 2], to=to))
            assert {pond.placement()[number] for number in range(3)} == {to}
            feed(epoch)
            assert answers(state, epoch - 1) == [
                (key, oracle.fetch_latest(key, epoch - 1)) for key in range(KEYS + 1)
            ]
        assert all(move.is_over for move in pond.rebalance(by="rows"))
        count = len(pond.containers())
        pond.scale(containers=count - 1, threads=1)
        assert set(pond.placement().values()) == {each.id for each in pond.containers()}
        feed(3)
        pond.scale(containers=count)
        assert len(set(pond.placement().values())) == count
        feed(4)
        assert answers(state, 3) == [(key, oracle.fetch_latest(key, 3)) for key in range(KEYS + 1)]


def check_a_container_goes_with_its_disk(pond: mp.Pond) -> None:
    if not pond.metrics()["slices"][0].get("backups_wanted"):
        return
    with counts(pond) as (state, feed, oracle):
        feed(0)
        wait_until(lambda: all(each["backups"] for each in pond.metrics()["slices"].values()), 30)
        feed(1)
        victim, root = pond.containers()[0], Path(pond._locate().root)
        gone = [*root.glob(f"containers/t*-c{victim.id:04}*"), *root.glob(f"backups/t*-c{victim.id:04}*")]
        assert gone
        for directory in gone:
            while directory.exists():  # the container may remove a file of its own meanwhile
                shutil.rmtree(directory, ignore_errors=True)
        wait_until(lambda: victim.pid not in [each.pid for each in pond.containers()], 30)
        feed(2)
        assert answers(state, 1) == [(key, oracle.fetch_latest(key, 1)) for key in range(KEYS + 1)]


def check_what_is_forgotten_is_gone_and_what_is_checkpointed_is_there(pond: mp.Pond) -> None:
    with counts(pond) as (state, feed, _):
        feed(0)
        pond.checkpoint()
        victim = pond.containers()[0]
        os.kill(victim.pid, signal.SIGKILL)
        feed(1)
        assert state.snapshot().num_rows == KEYS
    assert "counts" not in pond.states()
    with counts(pond) as (state, _, _):
        assert state.snapshot().num_rows == 0


def check_rows_wait(pond: mp.Pond) -> None:
    with counts(pond) as (state, feed, _):
        feed(0)
        rows: list[dict[str, Any]] = []
        fetch = state.fetch(key="k", at="t", into="v", name="asking")
        asking = fetch.to(lambda table, epoch: rows.extend(table.to_pylist()))
        # U is 0: what asks for that time and later ones is answered once it has gone on.
        asking(pa.table({"k": [1, 2], "t": [0, 1]}), 0)
        assert (asking.pending().rows, rows) == (2, [])
        feed(1)
        feed(2)
        assert asking.drain().rows == 0
        assert sorted((row["k"], row["v"]) for row in rows) == [(1, 1), (2, 1002)]


def check_a_window(pond: mp.Pond) -> None:
    window = pond.window("per_ten", key="k long", window=mp.tumbling(10), aggregate={"n": mp.count()})
    source = window.over(key="k", at="t", name="feed")
    assert len(source(pa.table({"k": [1, 1, 2], "t": [1, 2, 3]}), 0)) == 0
    assert window.now([1])["n"].to_pylist() == [2]
    fired = source(pa.table({"k": [1], "t": [12]}), 1).sort_by("k")
    assert fired["n"].to_pylist() == [2, 1]
    pond.forget(window)


class Votes:
    counts: mp.Partitioned[mp.Map[int, int]]

    def vote(self, key: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + 1

    def count(self, key: int) -> int:
        return self.counts.get(key, 0)


def check_a_program(pond: mp.Pond) -> None:
    votes = pond.program("votes", mp.program(Votes))
    votes.call("vote", name="feed")(pa.table({"key": [1, 2, 1]}), 0)
    votes.vote(key=1)
    assert [votes.count(key=key) for key in (1, 2, 3)] == [3, 1, 0]
    pond.forget("votes")


CHECKS = [value for name, value in globals().items() if name.startswith("check_")]


def is_gone(pid: int) -> bool:
    """A process that nobody has asked about yet is gone, too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until(condition: Callable[[], Any], seconds: float) -> float:
    """How long it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() < started + seconds
        time.sleep(0.02)
    return time.monotonic() - started
