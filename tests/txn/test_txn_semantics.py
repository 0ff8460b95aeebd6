"""What single transactions do: faults, missing keys, types, nulls, and the interpreter beside the compiler."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from millpond import txn
from millpond.code.tables import TableSpec, TransactionSetCode
from millpond.errors import (
    Aborted,
    BadOption,
    BadTransaction,
    BadType,
    NullTime,
    RuleInterpreted,
    UnknownKind,
    WrongColumn,
)
from millpond.stores.tables import TableStore
from millpond.txn import TransactionSet, load_transactions, transaction

ACCOUNTS = TableSpec("long", "balance long", {"balance": 0})
STRICT = TableSpec("string", "n long, ratio double, name string, ok boolean, at timestamp")
HIGHEST = 2**63 - 1
FEE = 3


@transaction
def transfer(accounts, src: int, dst: int, amount: int):  # type: ignore[no-untyped-def]
    """Money from one account to another."""
    if accounts[src].balance < amount:
        txn.abort("insufficient funds")
    accounts[src].balance -= amount
    accounts[dst].balance += amount
    return accounts[src].balance


@transaction
def divide(accounts, src: int, dst: int, amount: int):  # type: ignore[no-untyped-def]
    accounts[dst].balance = 1
    accounts[src].balance //= amount
    return math.sqrt(accounts[src].balance)


@transaction(results="left long, said string")
def strict(things, who: str, tags: list):  # type: ignore[no-untyped-def]
    row = things[who]
    row.n += 1
    for tag in tags:
        if tag == row.name:
            row.ok = not row.ok
            row.ratio = row.n / 4
            row.at = 7_000_000
    return row.n, row.name


@transaction
def make(things, who: str, name: str):  # type: ignore[no-untyped-def]
    things[who].name = name


@transaction
def shout(things, who: str, name: str):  # type: ignore[no-untyped-def]
    if name == "nobody":
        txn.abort("nobody: " + who)
    things[who].name = name + "!" * FEE
    things[who].n = len(name) ** 2
    return things[who].name


def events(**columns: Any) -> pa.Table:
    count = len(next(iter(columns.values())))
    return pa.table({"time": np.arange(count), **columns})


def run(transactions: txn.TransactionSet, stores: Any, **columns: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = transactions.run(events(**columns), stores).outputs.to_pylist()
    return rows


def balances(stores: Any) -> dict[Any, Any]:
    return {row["key"]: row["balance"] for row in stores["accounts"].snapshot().to_pylist()}


def started(transactions: txn.TransactionSet, **rows: int) -> dict[str, TableStore]:
    stores = transactions.stores()
    keys = [int(name[1:]) for name in rows]
    stores["accounts"].load(pa.table({"key": keys, "balance": list(rows.values())}))
    return stores


def test_a_transfer_moves_money_or_aborts() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=100)
    out = run(transactions, stores, src=[1, 1, 2], dst=[2, 2, 3], amount=[70, 70, 20])
    assert [(row["committed"], row["reason"], row["r0"]) for row in out] == [
        (True, None, 30), (False, "insufficient funds", None), (True, None, 50)
    ]  # fmt: skip
    assert balances(stores) == {1: 30, 2: 50, 3: 20}


def test_time_decides_not_the_order_of_rows() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=100)
    table = pa.table(
        {"time": [9, 1, 1], "seq": [0, 5, 2], "src": [1, 1, 1], "dst": [2, 3, 4], "amount": [60, 60, 60]}
    )
    out = transactions.run(table, stores, seq="seq").outputs
    assert out["committed"].to_pylist() == [False, False, True]
    assert balances(stores) == {1: 40, 4: 60}


def test_an_overflow_undoes_what_was_written_before_it() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=100, _2=HIGHEST)
    out = run(transactions, stores, src=[1], dst=[2], amount=[1])
    assert out == [{"event": 0, "committed": False, "reason": "overflow", "r0": None}]
    assert balances(stores) == {1: 100, 2: HIGHEST}


def test_faults_abort_their_transaction_only() -> None:
    transactions = TransactionSet({"divide": divide}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=-10)
    out = run(transactions, stores, src=[1, 1, 1, 1], dst=[5, 6, 7, 8], amount=[0, 2, -1, 3])
    assert [row["reason"] for row in out] == [
        "ZeroDivisionError: division by zero",
        "ValueError: math domain error",
        None,
        None,
    ]
    assert balances(stores) == {1: 3, 7: 1, 8: 1}
    assert [row["r0"] for row in out] == [None, None, math.sqrt(10), math.sqrt(3)]


def test_a_missing_key_without_default_aborts_and_a_write_makes_the_row() -> None:
    transactions = TransactionSet({"strict": strict, "make": make}, {"things": STRICT})
    stores = transactions.stores()
    table = pa.table(
        {
            "time": [0, 1, 2],
            "kind": ["strict", "make", "strict"],
            "who": ["x", "x", "x"],
            "name": [None, "b", None],
            "tags": [["a"], None, ["a", "b"]],
        },
        schema=pa.schema(
            {
                "time": pa.int64(),
                "kind": pa.string(),
                "who": pa.string(),
                "name": pa.string(),
                "tags": pa.list_(pa.string()),
            }
        ),
    )
    out = transactions.run(table, stores).outputs
    assert out["reason"].to_pylist() == ["no such key 'x' in things", None, None]
    assert out["left"].to_pylist() == [None, None, 1]
    assert out["said"].to_pylist() == [None, None, "b"]
    (row,) = stores["things"].snapshot().to_pylist()
    assert row.pop("at").timestamp() == 7
    assert row == {"key": "x", "n": 1, "ratio": 0.25, "name": "b", "ok": True}
    assert stores["things"].find([pa.array(["x", "y", None])])["n"].to_pylist() == [1]


def test_a_null_field_aborts() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=100)
    out = run(transactions, stores, src=[1, None, 1], dst=[2, 2, 2], amount=[1, 1, 1])
    assert [row["reason"] for row in out] == [None, "field 'src' is null", None]
    assert balances(stores) == {1: 98, 2: 2}


def test_what_cannot_be_compiled_runs_interpreted_with_a_warning() -> None:
    transactions = TransactionSet({"shout": shout, "make": make}, {"things": STRICT})
    stores = transactions.stores()
    table = pa.table(
        {
            "time": [0, 1, 2, 3],
            "kind": ["make", "shout", "shout", "make"],
            "who": ["a", "a", "b", "c"],
            "name": ["x", "hey", "nobody", "z"],
        }
    )
    line = shout.tree.body[0].lineno + 1
    with pytest.warns(RuleInterpreted, match=rf"'shout' runs interpreted: line {line}: abort with a reason"):
        outcome = transactions.run(table, stores)
    assert outcome.outputs["reason"].to_pylist() == [None, None, "nobody: b", None]
    assert outcome.outputs["r0"].to_pylist() == [None, "hey!!!", None, None]
    found = {row["key"]: (row["name"], row["n"]) for row in stores["things"].snapshot().to_pylist()}
    assert found == {"a": ("hey!!!", 9), "c": ("z", 0)}
    assert "interpreted: line" in transactions.explain()


def test_the_interpreter_gives_what_the_compiler_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond.txn.compiler import codegen
    from millpond.txn.compiler.values import CannotCompile

    rng = np.random.default_rng(5)
    columns = {
        "src": rng.integers(0, 5, 200),
        "dst": rng.integers(0, 5, 200),
        "amount": rng.choice([0, 1, 7, -3, HIGHEST, -HIGHEST - 1], 200),
    }
    kinds = rng.choice(["transfer", "divide"], 200)
    outcomes = []
    for interpreted in (False, True):
        transactions = TransactionSet({"transfer": transfer, "divide": divide}, {"accounts": ACCOUNTS})
        stores = started(transactions, _1=100, _2=HIGHEST)
        if interpreted:
            monkeypatch.setattr(
                codegen, "check", lambda function, _: CannotCompile(function.found.tree, "asked")
            )
            with pytest.warns(RuleInterpreted):
                out = transactions.run(events(kind=kinds, **columns), stores)
        else:
            out = transactions.run(events(kind=kinds, **columns), stores)
        outcomes.append((out.outputs, stores["accounts"].snapshot()))
    assert outcomes[0][0].equals(outcomes[1][0])
    assert outcomes[0][1].equals(outcomes[1][1])
    assert len(set(outcomes[0][0]["reason"].to_pylist())) > 3


def test_a_set_travels_as_text() -> None:
    import msgspec

    transactions = TransactionSet({"transfer": transfer, "divide": divide}, {"accounts": ACCOUNTS})
    text = msgspec.json.encode(transactions.message)
    again = load_transactions(msgspec.json.decode(text, type=TransactionSetCode))
    stores, others = started(transactions, _1=50), started(again, _1=50)
    table = events(kind=["transfer", "divide"], src=[1, 1], dst=[2, 2], amount=[20, 4])
    assert transactions.run(table, stores).outputs.equals(again.run(table, others).outputs)
    assert balances(stores) == balances(others)


def test_bad_events_change_nothing() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=50)
    good = {"src": [1], "dst": [2], "amount": [1]}
    with pytest.raises(UnknownKind, match="'pay'"):
        transactions.run(events(kind=["pay"], **good), stores)
    with pytest.raises(WrongColumn, match="'amount'"):
        transactions.run(events(src=[1], dst=[2]), stores)
    with pytest.raises(NullTime):
        transactions.run(pa.table({"time": pa.array([None], pa.int64()), **good}), stores)
    with pytest.raises(BadOption, match="none of serial"):
        transactions.run(events(**good), stores, plan="fast")
    assert balances(stores) == {1: 50}


def test_the_function_itself_is_plain_python() -> None:
    class Account:
        balance = 5

    with pytest.raises(Aborted, match="insufficient"):
        transfer({1: Account()}, 1, 1, 9)


def test_an_empty_epoch_gives_an_empty_table() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    out = transactions.run(
        events(src=np.empty(0, int), dst=np.empty(0, int), amount=np.empty(0, int)), transactions.stores()
    )
    assert out.outputs.num_rows == 0
    assert out.outputs.schema.field("r0").type == pa.int64()


def test_tables_are_copied_exported_and_loaded() -> None:
    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _3=1, _1=100)
    copy = stores["accounts"].copy(stores["accounts"].strings.copy())
    run(transactions, stores, src=[1], dst=[9], amount=[10])
    assert copy.snapshot().to_pylist() == [{"key": 1, "balance": 100}, {"key": 3, "balance": 1}]
    other = transactions.stores()
    other["accounts"].load(stores["accounts"].export())
    assert other["accounts"].snapshot().equals(stores["accounts"].snapshot())
    assert len(other["accounts"]) == 3
    other["accounts"].validate()


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (TableSpec("double", "x long"), BadType),
        (TableSpec("a long, b double", "x long"), BadType),
        (TableSpec("long", "x array<long>"), BadType),
        (TableSpec("long", "x long, y long", {"x": 1}), WrongColumn),
    ],
)
def test_table_types_are_checked(spec: TableSpec, error: type[Exception]) -> None:
    with pytest.raises(error):
        TransactionSet({}, {"t": spec})


def test_a_value_of_another_type_than_its_column_is_refused_with_the_line() -> None:
    transactions = TransactionSet({"make": make}, {"things": STRICT})
    with pytest.raises(
        BadTransaction, match=rf"line {make.tree.body[0].lineno}: things\[who\].name is a string column"
    ):
        run(transactions, transactions.stores(), who=["a"], name=[1])


@transaction(results="r0 long")
def odd(things, who: str, n: int):  # type: ignore[no-untyped-def]
    things[who].n = n
    return [n, "text", float(n)][n % 3]


@transaction(results="said")
def text(things, who: str, n: int):  # type: ignore[no-untyped-def]
    things[who].n = n
    return who


@transaction(results="said")
def number(things, who: str, n: int):  # type: ignore[no-untyped-def]
    return n


def test_a_result_of_another_type_aborts_its_transaction_only() -> None:
    transactions = TransactionSet({"odd": odd}, {"things": STRICT})
    stores = transactions.stores()
    with pytest.warns(RuleInterpreted):
        out = run(transactions, stores, who=["a", "b", "c"], n=[3, 4, 5])
    assert [row["reason"] for row in out] == [
        None,
        "TypeError: the result r0 is a str, not long",
        "TypeError: the result r0 is a float, not long",
    ]
    assert stores["things"].snapshot()["key"].to_pylist() == ["a"]


def test_kinds_that_share_a_result_agree_on_its_type() -> None:
    transactions = TransactionSet({"text": text, "number": number}, {"things": STRICT})
    stores = transactions.stores()
    with pytest.raises(BadTransaction, match="'said' is a long, not a string"):
        run(transactions, stores, kind=["text", "number"], who=["a", "b"], n=[1, 2])
    assert len(stores["things"]) == 0


def test_names_of_fields_do_not_meet_those_of_kernels() -> None:
    @transaction
    def names(things, st: str, log: list, offsets: list, out0_0: int, k: int):  # type: ignore[no-untyped-def]
        x1 = 0
        for flat in log:
            x1 += flat
        for i in range(len(offsets)):
            x1 += offsets[i] * k
        things[st].n = x1 + out0_0
        return x1

    transactions = TransactionSet({"names": names}, {"things": STRICT})
    out = run(
        transactions, transactions.stores(), st=["a"], log=[[1, 2]], offsets=[[10]], out0_0=[100], k=[3]
    )
    assert out[0]["r0"] == 33


def test_what_numba_refuses_after_all_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core.errors import TypingError

    from millpond.txn.compiler import codegen

    def fail(*_: Any) -> Any:
        raise TypingError("no")

    transactions = TransactionSet({"transfer": transfer}, {"accounts": ACCOUNTS})
    stores = started(transactions, _1=100)
    monkeypatch.setattr(codegen, "kernel", fail)
    with pytest.warns(RuleInterpreted, match="'transfer' runs interpreted"):
        out = run(transactions, stores, src=[1, 1], dst=[2, 2], amount=[70, 70])
    assert [row["r0"] for row in out] == [30, None]
    assert balances(stores) == {1: 30, 2: 70}
