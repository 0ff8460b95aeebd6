"""Transactions drawn from a grammar give, under every plan, what a serial interpreter gives: byte by byte.

And what they did can be undone.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import warnings
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from txn_grammar import RESULTS, SCHEMA, TABLES, epochs, function_sets, oracle_tables, rows_by_key
from txn_oracle import OracleTable, run_serially

from millpond.code.capture import Code
from millpond.code.tables import TransactionCode
from millpond.errors import RuleInterpreted
from millpond.kernels._jit import JIT_ENABLED
from millpond.txn import PLANS, TransactionSet, load
from millpond.txn.compiler import codegen
from millpond.txn.compiler.values import CannotCompile

EXAMPLES = int(os.environ.get("MILLPOND_TXN_EXAMPLES", "2" if JIT_ENABLED else "40"))


def transactions_of(sources: dict[str, str]) -> TransactionSet:
    functions = {
        kind: load(TransactionCode(Code(kind, "import math\n" + source, {}, {"math": "math"})))
        for kind, source in sources.items()
    }
    return TransactionSet(functions, TABLES)


def interpreted(sources: dict[str, str]) -> TransactionSet:
    """The transactions as they run where nothing can be compiled."""
    transactions = transactions_of(sources)
    schemas = dict.fromkeys(sources, SCHEMA)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuleInterpreted)
        patch.setattr(codegen, "check", lambda function, _: CannotCompile(function.found.tree, "asked for"))
        transactions.prepare(schemas)
    return transactions


def bits(value: Any) -> Any:
    """Equal where the bytes are: NaN is NaN, and 0.0 is not -0.0. All NaNs are one."""
    if isinstance(value, float):
        return "nan" if value != value else struct.pack("d", value)  # noqa: PLR0124
    return value


def compare(outputs: pa.Table, stores: dict[str, Any], expected: Any, tables: dict[str, OracleTable]) -> None:
    for row, (reason, results) in zip(outputs.to_pylist(), expected, strict=True):
        assert row["reason"] == reason, row
        assert row["committed"] == (reason is None)
        found = tuple(bits(row[f"r{i}"]) for i in range(len(results or ())))
        assert found == tuple(bits(value) for value in results or ()), row
        if not results:
            assert all(row[name] is None for name in row if name.startswith("r") and name != "reason")
    for name, table in tables.items():
        found_rows = rows_by_key(name, stores[name].snapshot())
        assert list(found_rows) == sorted(found_rows)
        assert {k: {c: bits(v) for c, v in row.items()} for k, row in found_rows.items()} == {
            k: {c: bits(v) for c, v in row.items()} for k, row in table.rows.items()
        }
        stores[name].validate()


@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # an example takes seconds: to shrink one takes too long
)
@given(st.data())
def test_every_plan_gives_what_serial_execution_gives(data: st.DataObject) -> None:
    sources = data.draw(function_sets())
    note("\n".join(sources.values()))
    transactions = transactions_of(sources)
    epoch_list = [data.draw(epochs(list(sources))) for _ in range(3)]
    expected, tables = [], oracle_tables()
    states = []
    for events in epoch_list:
        expected.append(run_serially(sources, tables, events))
        copies = oracle_tables()
        for name, table in tables.items():
            copies[name].rows = dict(table.rows)
        states.append(copies)
    for plan in (None, *PLANS, "interpreted"):
        if plan == "interpreted":
            transactions, plan = interpreted(sources), None  # noqa: PLW2901 - the last of them
        stores = transactions.stores()
        for events, wanted, state in zip(epoch_list, expected, states, strict=True):
            table = pa.Table.from_pylist(events, schema=SCHEMA)
            was = {name: store.export() for name, store in stores.items()}
            outcome = transactions.run(table, stores, seq="seq", threads=3, plan=plan)
            compare(outcome.outputs, stores, wanted, state)
        outcome.undo.put_back(stores)
        for name, store in stores.items():
            store.validate()
            assert str(store.export().to_pydict()) == str(was[name].to_pydict()), plan  # NaN is NaN


@pytest.mark.long
def test_the_grammar_covers_what_it_should() -> None:
    """The oracle itself sees commits, results and every kind of abort among what is drawn."""
    seen: set[str] = set()
    wanted = {
        "committed",
        "result",
        "enough",
        "no",
        "overflow",
        "overflow:",
        "ZeroDivisionError:",
        "IndexError:",
    }
    wanted.add("AttributeError:")

    def look(data: st.DataObject) -> None:
        sources = data.draw(function_sets())
        for reason, results in run_serially(sources, oracle_tables(), data.draw(epochs(list(sources)))):
            seen.add((reason or "committed").split(" ")[0])
            if results:
                seen.add("result")

    some = settings(max_examples=20, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    for number in (15, *range(20)):  # all of it is in what the first draws; another grammar may need more
        if not wanted <= seen:
            seed(number)(some(given(st.data())(look)))()
    assert wanted <= seen
    assert RESULTS


@pytest.mark.skipif(not JIT_ENABLED, reason="this is the run without the compiler")
@pytest.mark.long
def test_many_more_without_the_compiler() -> None:
    """The generated code as plain Python, which needs no time to compile."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "every_plan"]
    done = subprocess.run(
        command, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:]
