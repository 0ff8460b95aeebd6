"""Transactions on a table of accounts, and a plain model of what they give."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

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


class LedgerModel:
    """Accounts after each epoch, and how each event of it ended. The total never changes."""

    def __init__(self, table: str, epochs: list[list[Event]], interpreted: bool) -> None:
        self.table = table
        self.interpreted = interpreted
        self.epochs = epochs
        self.balances: list[dict[int, int]] = [{}]
        """Before the first epoch, and after each; accounts that were never touched are not there."""
        self.outcomes: list[dict[int, bool]] = []
        self.begun = 0
        self.acknowledged = 0
        newest = -1
        for events in epochs:
            timely = sorted(
                (event for event in events if event.ts >= newest), key=lambda event: (event.ts, event.id)
            )
            balances, outcomes = dict(self.balances[-1]), {}
            for event in timely:
                outcomes[event.id] = balances.get(event.src, OPENING) >= event.amount
                if outcomes[event.id]:
                    balances[event.src] = balances.get(event.src, OPENING) - event.amount
                    balances[event.dst] = balances.get(event.dst, OPENING) + event.amount
            self.balances.append(balances)
            self.outcomes.append(outcomes)
            newest = max([newest, *(event.ts for event in timely)])

    def cut(self) -> None:
        """The epochs that have begun stay; one more where none is on its way."""
        count = self.acknowledged + 1
        del self.epochs[count:], self.outcomes[count:], self.balances[count + 1 :]

    def check_outcomes(self, epoch: int, outcomes: dict[int, bool]) -> None:
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
    return LedgerModel(table, drawn, chance.random() < 0.5)


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
        run = pond.transactions(self.name, [table], kinds, kind="type", at="ts", seq="id")
        while self.committed < len(model.epochs):
            self.pause(process, self._pause_s)
            if self._chance.random() < 0.5:
                self.check(table)
            epoch, events = self.committed, list(model.epochs[self.committed])
            self._chance.shuffle(events)
            accounts = {account for event in events for account in (event.src, event.dst)}
            model.begun = max(model.begun, epoch + 1)
            self.say(f"begins epoch {epoch} of {model.table}: {events}", accounts)
            outputs = run(_table(events), epoch)
            model.check_outcomes(
                epoch, dict(zip(outputs["id"].to_pylist(), outputs["committed"].to_pylist(), strict=True))
            )
            model.acknowledged = max(model.acknowledged, epoch + 1)
            self.say(f"epoch {epoch} of {model.table} is acknowledged", accounts)
            self.linger(process, self._chance)
            self.committed += 1

    def check(self, table: Any) -> None:
        acknowledged = self.model.acknowledged
        rows = table.snapshot().to_pylist()
        self.model.check_balances(acknowledged, {row["key"]: row["balance"] for row in rows})
        self.checks += 1


def _table(events: list[Event]) -> pa.Table:
    columns = zip(*events, strict=True) if events else [[] for _ in Event._fields]
    arrays = {n: pa.array(c, pa.int64()) for n, c in zip(Event._fields, columns, strict=True)}
    return pa.table({"type": pa.array(["transfer"] * len(events), pa.string()), **arrays})
