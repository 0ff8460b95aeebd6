"""Transactions on a table of accounts, and a plain model of what they give."""

from __future__ import annotations

import math
from random import Random
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from millpond import txn
from millpond.pond.pond import Pond
from millpond.testing.simulation.apps import App, Chronicle, Wrong
from millpond.testing.simulation.pond import SimPond
from millpond.testing.simulation.scheduler import Process

ACCOUNTS = 5
OPENING = 100
GROUP = "bank"


@txn.transaction
def transfer(accounts: Any, src: int, dst: int, amount: int) -> None:
    if accounts[src].balance < amount:
        txn.abort("insufficient funds")
    accounts[src].balance -= amount
    accounts[dst].balance += amount


@txn.transaction
def transfer_slowly(accounts: Any, src: int, dst: int, amount: int) -> None:
    """The same, interpreted: a reason that is computed cannot be compiled."""
    if accounts[src].balance < amount:
        txn.abort(f"{accounts[src].balance} is less than {amount}")
    accounts[src].balance -= amount
    accounts[dst].balance += amount


class Event(NamedTuple):
    src: int
    dst: int
    amount: int
    ts: int
    id: int


Ending = bool | Literal["late"]
"""How an event ended: committed or not, or that it did not run."""


class LedgerModel:
    """Accounts after each epoch, and how each event that ran in it ended. The total never changes.

    With a delay, events wait until the newest time is so far ahead of them; in the end a finish runs the rest.
    """

    def __init__(self, table: str, epochs: list[list[Event]], interpreted: bool, delay: int | None) -> None:
        self.table = table
        self.interpreted = interpreted
        self.delay = delay
        self.epochs = epochs
        self.balances: list[dict[int, int]] = [{}]
        """Before the first epoch, and after each; accounts that were never touched are not there."""
        self.outcomes: list[dict[int, Ending]] = []
        self.waiting: list[list[Event]] = []
        """After each epoch."""
        self.begun = 0
        self.acknowledged = 0
        newest, waiting = -math.inf, list[Event]()
        for events in epochs:
            late = [event for event in events if event.ts < newest]
            waiting = [*waiting, *(event for event in events if event.ts >= newest)]
            newest = max([newest, *(event.ts - (delay or 0) for event in events)])
            until = math.inf if delay is None else newest
            self._run([event for event in waiting if event.ts < until], late)
            waiting = [event for event in waiting if event.ts >= until]
            self.waiting.append(waiting)

    def _run(self, events: list[Event], late: list[Event]) -> None:
        balances = dict(self.balances[-1])
        outcomes: dict[int, Ending] = {event.id: "late" for event in late}
        for event in sorted(events, key=lambda event: (event.ts, event.id)):
            outcomes[event.id] = balances.get(event.src, OPENING) >= event.amount
            if outcomes[event.id]:
                balances[event.src] = balances.get(event.src, OPENING) - event.amount
                balances[event.dst] = balances.get(event.dst, OPENING) + event.amount
        self.balances.append(balances)
        self.outcomes.append(outcomes)

    def finish(self) -> int:
        """All epochs are acknowledged: what still waits runs. The number of the turn, as if it were an epoch."""
        if len(self.outcomes) == len(self.epochs):
            self._run(self.waiting[-1] if self.waiting else [], [])
        return len(self.epochs)

    def cut(self) -> None:
        """The epochs that have begun stay; one more where none is on its way."""
        count = self.acknowledged + 1
        del self.epochs[count:], self.waiting[count:], self.outcomes[count:], self.balances[count + 1 :]

    def check_outcomes(self, epoch: int, outcomes: dict[int, Ending]) -> None:
        if outcomes != self.outcomes[epoch]:
            raise Wrong(f"epoch {epoch} of {self.table} gave {outcomes}, not {self.outcomes[epoch]}")

    def check_balances(self, acknowledged: int, balances: dict[int, int]) -> None:
        """They are those after an epoch that is neither older than what was acknowledged, nor yet to come."""
        allowed = self.balances[acknowledged : self.begun + 1]
        if sum(balances.values()) != OPENING * len(balances):
            raise Wrong(f"{self.table} holds {balances}: the total is not {OPENING} each", balances)
        if balances not in [_touched(each) for each in allowed]:
            raise Wrong(
                f"{self.table} holds {balances}, and after epochs {acknowledged} to {self.begun} that is {allowed}",
                balances,
            )


def _touched(balances: dict[int, int]) -> dict[int, int]:
    return dict(sorted(balances.items()))


def draw_ledger(chance: Random, table: str, epochs: int) -> LedgerModel:
    drawn, number = [], 0
    for epoch in range(epochs):
        events = []
        for _ in range(chance.choice((0, 1, 4, 8))):
            number += 1
            src, dst = chance.sample(range(ACCOUNTS), 2)
            events.append(Event(src, dst, chance.randint(1, 150), epoch * 10 + chance.randint(0, 12), number))
        drawn.append(events)
    # Not from `chance`: what is drawn after it stays as it is without a delay.
    delay = Random(repr(drawn)).choice((None, None, 0, 5, 15))
    return LedgerModel(table, drawn, chance.random() < 0.5, delay)


class Teller(App):
    """Runs the epochs of a ledger, and looks at the accounts in between."""

    def __init__(
        self,
        pond: SimPond,
        chronicle: Chronicle,
        name: str,
        model: LedgerModel,
        chance: Random,
        pause_s: float,
    ) -> None:
        super().__init__(pond, chronicle, name)
        self.model = model
        self.committed = 0
        self.checks = 0
        self._chance = chance
        self._pause_s = pause_s

    def work(self, pond: Pond, process: Process) -> None:
        model = self.model
        table = pond.table(
            model.table, key="long", value="balance long", default={"balance": OPENING}, group=GROUP
        )
        kinds = {"transfer": transfer_slowly if model.interpreted else transfer}
        run = pond.transactions(self.name, [table], kinds, kind="type", at="ts", seq="id", delay=model.delay)
        while self.committed < len(model.epochs):
            self.pause(process, self._pause_s)
            if self._chance.random() < 0.5:
                self.check(table)
            epoch, events = self.committed, list(model.epochs[self.committed])
            self._chance.shuffle(events)
            accounts = {account for event in events for account in (event.src, event.dst)}
            model.begun = max(model.begun, epoch + 1)
            self.say(f"begins epoch {epoch} of {model.table}: {events}", accounts)
            model.check_outcomes(epoch, _endings(run(_table(events), epoch)))
            model.acknowledged = max(model.acknowledged, epoch + 1)
            self.say(f"epoch {epoch} of {model.table} is acknowledged", accounts)
            self.linger(process, self._chance)
            self.committed += 1
        if model.delay is not None:
            epoch = model.finish()
            model.begun = epoch + 1
            self.say(f"finishes {model.table}")
            # Asked again, it gives the same: whoever is killed here asks again.
            outputs = run.finish()
            assert outputs is not None
            model.check_outcomes(epoch, _endings(outputs))
            model.acknowledged = epoch + 1

    def check(self, table: Any) -> None:
        acknowledged = self.model.acknowledged
        rows = table.snapshot().to_pylist()
        self.model.check_balances(acknowledged, {row["key"]: row["balance"] for row in rows})
        self.checks += 1


def _endings(outputs: pa.Table) -> dict[int, Ending]:
    rows = zip(*(outputs[name].to_pylist() for name in ("id", "committed", "reason")), strict=True)
    return {number: "late" if reason == "late" else committed for number, committed, reason in rows}


def _table(events: list[Event]) -> pa.Table:
    columns = zip(*events, strict=True) if events else [[] for _ in Event._fields]
    arrays = {n: pa.array(c, pa.int64()) for n, c in zip(Event._fields, columns, strict=True)}
    return pa.table({"type": pa.array(["transfer"] * len(events), pa.string()), **arrays})
