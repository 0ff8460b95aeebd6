"""A program is called by any process that joins its pond, and an endless call by any of them ends."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import pytest

import millpond as mp
from millpond.errors import CodeTookTooLong, EpochChanged, Rejected, Unauthorised
from millpond.programs.plain import state_of

JOINING = Path(__file__).with_name("joining_client.py")
CODE_SECONDS = 1.5


@mp.program(lanes=2)
class Orders:
    stock: mp.Partitioned[mp.Map[str, int]]
    ordered: mp.Partial[mp.Map[str, int]]

    def fill(self, what: str, count: int):
        self.stock[what] += count

    def order(self, what: str, count: int) -> int:
        left = self.stock[what] - count
        if left < 0:
            mp.reject("sold out")
        self.stock[what] = left
        self.ordered[what] += count
        return left

    def left(self, what: str) -> int:
        return self.stock[what]

    def how_many(self) -> int:
        return sum(part for part in mp.everywhere(self.ordered).get("nut", 0))


class Other:
    """Another process that has joined the pond: a line says what it is to call, and a line what came of that."""

    def __init__(self, pond: mp.Pond, root: Path) -> None:
        arguments = [sys.executable, str(JOINING), pond.address, str(root / "token")]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0

    def ask(self, method: str, key: str | None = None, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, key, arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def test_two_processes_call_the_same_program(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    plain = mp.plain(Orders)
    with mp.open(root, containers=2, slices=8, threads=1) as pond:
        orders = pond.program("orders", Orders)
        orders.fill("nut", 100)
        plain.fill("nut", 100)
        first = orders.order("nut", 7, idempotency_key="order-1")
        assert first == plain.order("nut", 7) == 93
        with Other(pond, root) as other:
            assert other.ask("left", what="nut") == 93, "what one process wrote the other one reads"
            assert other.ask("order", "order-1", what="nut", count=7) == first, "and it may try it again"
            assert other.ask("left", what="nut") == 93
            assert "EpochChanged" in other.ask("order", "order-1", what="nut", count=8)["error"]
            # The other way round: its writes, its key, and its rejection.
            assert other.ask("order", "order-2", what="nut", count=3) == plain.order("nut", 3)
            assert orders.left("nut") == 90
            assert orders.order("nut", 3, idempotency_key="order-2") == 90
            with pytest.raises(EpochChanged):
                orders.order("nut", 4, idempotency_key="order-2")
            assert other.ask("order", "order-3", what="nut", count=99)["error"] == "Rejected: sold out"
            with pytest.raises(Rejected, match="sold out"):
                orders.order("nut", 99, idempotency_key="order-3")
            # Both at once.
            threads = [threading.Thread(target=orders.order, args=("nut", 1)) for _ in range(8)]
            for thread in threads:
                thread.start()
            told = [other.ask("order", what="nut", count=1) for _ in range(8)]
            for thread in threads:
                thread.join()
            assert told == sorted(told, reverse=True)
            for _ in range(16):
                plain.order("nut", 1)
            assert other.ask("how_many") == orders.how_many() == plain.how_many() == 26
        assert orders.entries("stock") == state_of(plain)["stock"] == {"nut": 74}


@mp.program
class Endless:
    counts: mp.Partitioned[mp.Map[str, int]]

    def look(self, key: str, wanted: int) -> int:
        while self.counts[key] != wanted:
            pass
        return wanted

    def await_sum(self, key: str, wanted: int):
        self.counts[key] += 1
        while self.counts[key] != wanted:
            pass


def test_a_direct_call_that_never_ends_is_ended(tmp_path: Path) -> None:
    """By the time that all code of the pond has. It says where it was, changes nothing, and others go on."""
    with mp.open(tmp_path / "pond", containers=2, slices=4, threads=1, code_seconds=CODE_SECONDS) as pond:
        endless = pond.program("endless", Endless)
        endless.await_sum("a", 1)
        for method in ("look", "await_sum"):
            lines = "|".join(str(endless.graph.method(method).line + n) for n in (1, 2, 3))
            where = rf"method '{method}' of program 'endless' ran longer than .* at line ({lines}) of .*{__name__}.py"
            began = time.monotonic()
            with pytest.raises(CodeTookTooLong, match=where) as caught:
                endless.ask(method, "a", -1)
            assert CODE_SECONDS <= time.monotonic() - began < 30
            assert "code_seconds" in str(caught.value.hint)
        assert endless.look("a", 1) == 1
        endless.await_sum("a", 2)
        assert endless.entries("counts") == {"a": 2}
        assert pond.metrics()["coordinator"]["container_restarts"] == 0


def test_who_may_only_read_calls_nothing(tmp_path: Path) -> None:
    """To call is to run code."""
    root = tmp_path / "pond"
    with mp.open(root, containers=1, slices=4, threads=1) as pond:
        pond.program("orders", Orders).fill("nut", 1)
        with (
            mp.connect(pond.address, (root / "token.read").read_text()) as reader,
            pytest.raises(Unauthorised),
        ):
            reader.program("orders", Orders).left("nut")
