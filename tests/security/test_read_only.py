"""A read-only token asks and reads; it changes nothing and sends no code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import Unauthorised


def widest(times: Any, value: Any) -> float:
    return float(value.max() - value.min())


@mp.transaction
def pay(accounts: Any, account: int, amount: int) -> None:
    accounts[account].balance += amount


@pytest.fixture(scope="module")
def ponds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[mp.Pond, mp.Pond]]:
    """A pond, and the same through its read-only token."""
    root = tmp_path_factory.mktemp("read") / "pond"
    with mp.open(root) as pond:
        state = pond.state("s", key="long", value="long")
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": [1, 2], "t": [10, 20], "v": [5, 6]}), 0)
        state.finish("feed")
        accounts = pond.table("accounts", key="long", value="balance long", default={"balance": 0})
        bank = pond.transactions("bank", [accounts], {"pay": pay})
        bank(pa.table({"ts": [1], "account": [7], "amount": [5]}), 0)
        token = (root / "token.read").read_text()
        with mp.connect(pond.address, token=token) as reader:
            yield pond, reader


def test_it_reads(ponds: tuple[mp.Pond, mp.Pond]) -> None:
    _, reader = ponds
    state = reader.state("s")
    asked = pa.table({"k": [1, 2], "t": [15, 15]})
    assert state.fetch(key="k", at="t", into="v").now(asked)["v"].to_pylist() == [5, None]
    assert state.snapshot().num_rows == 2
    assert state.progress().update == float("inf")
    assert reader.metrics()["states"]["s"]["keys"] == 2
    assert reader.table("accounts").snapshot().to_pylist() == [{"key": 7, "balance": 5}]
    assert reader.table("accounts").read([7, 8])["balance"].to_pylist() == [5]


CHANGES: dict[str, Callable[[mp.Pond], object]] = {
    "a new state": lambda pond: pond.state("other", key="long", value="long"),
    "an updater": lambda pond: pond.state("s").update(key="k", at="t", value="v", name="another"),
    "a fetcher": lambda pond: pond.state("s").report("views", fetch=5),
    "the end of an updater": lambda pond: pond.state("s").finish("feed"),
    "a new table": lambda pond: pond.table("others", key="long", value="n long"),
    "transactions": lambda pond: pond.transactions("bank", ["accounts"], {"pay": pay}),
    "to forget a state": lambda pond: pond.forget("s"),
    "to forget an updater": lambda pond: pond.forget("s", name="feed"),
    "to forget a table": lambda pond: pond.forget("accounts"),
    "a checkpoint": lambda pond: pond.checkpoint(),
    "a fetch with code": lambda pond: (
        pond.state("s")
        .fetch(key="k", between=("a", "b"), rule=widest)
        .now(pa.table({"k": [1], "a": [0], "b": [15]}))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_changes_nothing_and_sends_no_code(ponds: tuple[mp.Pond, mp.Pond], change: str) -> None:
    pond, reader = ponds
    with pytest.raises(Unauthorised, match="read-only token cannot"):
        CHANGES[change](reader)
    assert list(pond.states()) == ["s"]
    assert pond.state("s").progress().fetchers == {}


def test_the_full_token_sends_code(ponds: tuple[mp.Pond, mp.Pond]) -> None:
    pond, _ = ponds
    asked = pa.table({"k": [1, 3], "a": [0, 0], "b": [15, 15]})
    answers = pond.state("s").fetch(key="k", between=("a", "b"), into="x", rule=widest).now(asked)
    assert answers["x"].to_pylist() == [0.0, None]


def test_the_tokens_differ_and_are_private(ponds: tuple[mp.Pond, mp.Pond]) -> None:
    tokens = [Path(ponds[0]._locate().root) / name for name in ("token", "token.read")]
    assert len({token.read_text() for token in tokens}) == 2
    assert [token.stat().st_mode & 0o777 for token in tokens] == [0o600, 0o600]
