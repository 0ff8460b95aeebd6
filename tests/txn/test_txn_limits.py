"""Long transactions, keys of all sizes, and compiled kernels on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from millpond import txn
from millpond.code.tables import TableSpec
from millpond.kernels._jit import JIT_ENABLED
from millpond.stores.tables import TableStore
from millpond.txn import PLANS, TransactionSet, transaction
from millpond.txn.compiler import cache

NUMBERS = TableSpec("long", "x long", {"x": 0})


@transaction
def raise_all(numbers, keys: list, last: int, fails: bool):  # type: ignore[no-untyped-def]
    for key in keys:
        numbers[key].x += 1
    numbers[last].x += 10
    numbers[last + 1].x += 10
    if fails:
        txn.abort("after all")


@transaction
def raise_square(numbers, keys: list, times: int):  # type: ignore[no-untyped-def]
    for i in range(times):
        for key in keys:
            numbers[key + 1000 * i].x += 1


def contents(store: TableStore) -> dict[Any, int]:
    found = store.snapshot().to_pydict()
    return dict(zip(found["key"], found["x"], strict=True))


@pytest.mark.parametrize("plan", [None, *PLANS])
@pytest.mark.parametrize("length", [127, 128, 129, 700, 5_000])
def test_a_long_transaction_is_undone_as_a_whole(length: int, plan: str | None) -> None:
    transactions = TransactionSet({"raise_all": raise_all}, {"numbers": NUMBERS})
    stores = transactions.stores()
    keys = list(range(length))
    fails = [False, True, False, True]
    events = pa.table(
        {
            "time": [0, 1, 2, 3],
            "keys": pa.array([keys[:3], keys, keys, keys], pa.list_(pa.int64())),
            "last": [length + 5, 1, length + 5, length + 50],
            "fails": fails,
        }
    )
    outputs = transactions.run(events, stores, threads=2, plan=plan).outputs
    assert outputs["committed"].to_pylist() == [not failed for failed in fails]
    stores["numbers"].validate()
    expected = {key: 1 + (key < 3) for key in keys} | {length + 5: 20, length + 6: 20}
    assert contents(stores["numbers"]) == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_loops_within_loops_may_ask_for_more_keys_than_lists_have(threads: int) -> None:
    transactions = TransactionSet({"raise_square": raise_square}, {"numbers": NUMBERS})
    stores = transactions.stores()
    many = 30_000  # more than one thread's worth
    times = [(number % 1000 == 999) * 40 + 1 for number in range(many)]
    lists = pa.array([[number % 7, number % 11] for number in range(many)], pa.list_(pa.int64()))
    events = pa.table({"time": range(many), "keys": lists, "times": times})
    transactions.run(events, stores, threads=threads)
    expected: dict[int, int] = {}
    for keys, repeats in zip(lists.to_pylist(), times, strict=True):
        for i in range(repeats):
            for key in keys:
                expected[key + 1000 * i] = expected.get(key + 1000 * i, 0) + 1
    assert contents(stores["numbers"]) == expected


KEYS = [0, 1, -1, 5, 1_023, 1_024, 5_000, 1 << 20, 1 << 62, -(1 << 63), (1 << 63) - 1]


@pytest.mark.parametrize("plan", [None, *PLANS])
def test_small_and_large_keys_are_found_again(plan: str | None) -> None:
    @transaction
    def count(numbers, key: int):  # type: ignore[no-untyped-def]
        numbers[key].x += 1
        return numbers[key].x

    transactions = TransactionSet({"count": count}, {"numbers": NUMBERS})
    stores = transactions.stores()
    for epoch in range(1, 4):
        keys = KEYS[:4] if epoch == 1 else KEYS
        events = pa.table({"time": range(len(keys)), "key": pa.array(keys, pa.int64())})
        outputs = transactions.run(events, stores, threads=2, plan=plan).outputs
        assert outputs["r0"].to_pylist() == [epoch - (key not in KEYS[:4]) for key in keys]
    stores["numbers"].validate()
    assert contents(stores["numbers"]) == {key: 3 - (key not in KEYS[:4]) for key in KEYS}


def test_fields_are_read_where_their_events_have_them() -> None:
    """Kinds mixed in one table, out of order, with nulls in what other kinds have, over a slice of a larger table."""

    @transaction
    def name(words, who: str, tags: list):  # type: ignore[no-untyped-def]
        for tag in tags:
            words[tag].by = who
        return who

    @transaction
    def forget(words, tag: str, number: int):  # type: ignore[no-untyped-def]
        words[tag].by = ""
        return tag

    transactions = TransactionSet(
        {"name": name, "forget": forget}, {"words": TableSpec("string", "by string", {"by": "nobody"})}
    )
    rows = [
        {"time": 9, "kind": "name", "who": "left out", "tags": ["z"], "tag": None, "number": None},
        {"time": 3, "kind": "forget", "who": None, "tags": None, "tag": "b", "number": 1},
        {"time": 1, "kind": "name", "who": "ann", "tags": ["a", "b", "c"], "tag": None, "number": None},
        {"time": 2, "kind": "name", "who": "bob", "tags": ["c"], "tag": "never", "number": None},
        {"time": 4, "kind": "forget", "who": None, "tags": None, "tag": "a", "number": None},
        {"time": 5, "kind": "name", "who": "cy", "tags": ["d", None], "tag": None, "number": None},
    ]
    stores = transactions.stores()
    outcome = transactions.run(pa.Table.from_pylist(rows).slice(1), stores)
    found = stores["words"].snapshot().to_pydict()
    assert dict(zip(found["key"], found["by"], strict=True)) == {"a": "ann", "b": "", "c": "bob"}
    assert outcome.outputs["r0"].to_pylist() == ["b", "ann", "bob", None, None]
    assert outcome.outputs["reason"].to_pylist() == [
        None, None, None, "field 'number' is null", "field 'tags' is null",
    ]  # fmt: skip


@pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled")
def test_a_kernel_is_compiled_once_and_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_directory", lambda: tmp_path)
    monkeypatch.setattr(cache, "KEPT", 3)

    def made(source: str) -> Any:
        file = cache.kept_source(source)
        assert file is not None
        assert Path(file).read_text() == source
        names: dict[str, Any] = {"__name__": __name__}
        exec(compile(source, file, "exec"), names)
        return cache.lazily_compiled(names["body"], file)

    first, again = made("def body(x):\n    return x + 1"), made("def body(x):\n    return x + 1")
    assert first(3) == again(3) == 4
    assert (sum(first.stats.cache_hits.values()), sum(first.stats.cache_misses.values())) == (0, 1)
    assert (sum(again.stats.cache_hits.values()), sum(again.stats.cache_misses.values())) == (1, 0)
    for number in range(5):
        assert made(f"def body(x):\n    return x + {number + 10}")(1) == number + 11
        assert len(list(tmp_path.iterdir())) <= 3
    monkeypatch.setattr(cache, "_directory", lambda: None)
    assert cache.kept_source("def body(x):\n    return x") is None


_TWO_OF_A_NAME = """
import sys, numpy as np
from millpond.txn.compiler import codegen
sources = {
    "longs": "def keys(n):\\n    a = np.empty(n, np.int64)\\n    a[:] = 7\\n    return a, n\\n",
    "halves": "def keys(n):\\n    a = np.empty(n, np.float32)\\n    a[:] = 0.5\\n    return n, n, n, a\\n",
}
made = [codegen.kernel(sources[name], "keys")(3) for name in sys.argv[1:]]
print(*(str(part) for result in made for part in result if isinstance(part, np.ndarray)))
"""


@pytest.mark.skipif(not JIT_ENABLED, reason="nothing is compiled")
def test_kernels_that_two_processes_made_run_in_a_third(tmp_path: Path) -> None:
    """What two processes compiled under one name, with the same arguments, has constants of its own in a third."""

    def printed(*names: str) -> str:
        home = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        command = [sys.executable, "-c", _TWO_OF_A_NAME, *names]
        return subprocess.run(command, env=home, check=True, capture_output=True, text=True).stdout.strip()

    assert printed("longs") == "[7 7 7]"
    assert printed("halves") == "[0.5 0.5 0.5]"
    assert printed("longs", "halves") == "[7 7 7] [0.5 0.5 0.5]"
