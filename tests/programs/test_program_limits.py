"""`limit=` and `memory=` of calls: what runs too long or takes too much is ended, named, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from program_graphs import graph, method, task

import millpond as mp
from millpond.errors import CodeTookTooLong, OutOfMemory
from millpond.programs.graph import Field


def greedy() -> Any:
    """`spin` takes a while, `turn` a little in each of many rounds, `hoard` much memory."""
    spin = task(
        0,
        "state[key] = 1\nfor _ in range(count):\n    pass\nreturn -1, (None,)",
        "key long, count long",
        "done",
        "partitioned",
        "key",
        writes=True,
    )
    turn = task(
        0,
        "state[key] = 1\nfor _ in range(400_000):\n    pass\n"
        "if count == 0:\n    return -1, (None,)\nreturn 0, (key + 1, count - 1)",
        "key long, count long",
        "done",
        "partitioned",
        "key",
        writes=True,
    )
    hoard = task(
        0,
        "state[key] = 1\nheld = [bytes(1 << 20) for _ in range(count)]\nfor _ in range(40_000_000):\n    pass\n"
        "return -1, (None,)",
        "key long, count long",
        "done",
        "partitioned",
        "key",
        writes=True,
    )
    parameters = "key long, count long"
    return graph(
        "Greedy",
        [Field("done", "partitioned", "map", "long", "long", 0, 1)],
        [
            method(name, parameters, None, [own])
            for name, own in (("spin", spin), ("turn", turn), ("hoard", hoard))
        ],
        max_rounds=10_000,
    )


def test_what_calls_may_take(tmp_path: Path) -> None:
    with mp.open(tmp_path / "pond", containers=2, slices=4, threads=1) as pond:
        greedy_one = pond.program("greedy", greedy())
        rows = pa.table({"key": [1, 2, 3], "count": [1, 10**10, 1]})
        spin = greedy_one.call("spin", name="spins", limit="1 second")
        with pytest.raises(CodeTookTooLong, match=r"method 'spin' .* at line (2|3) of by_hand.py, row 1"):
            spin(rows, 0)
        # Each round is short, and all of them together are not.
        turn = greedy_one.call("turn", name="turns", limit="1 second")
        with pytest.raises(CodeTookTooLong, match=r"method 'turn' .* line \d+ of by_hand.py, row 0"):
            turn(pa.table({"key": [1], "count": [5_000]}), 0)
        hoard = greedy_one.call("hoard", name="hoards", memory="100m")
        with pytest.raises(OutOfMemory, match=r"method 'hoard' .* row 2"):
            hoard(pa.table({"key": [1, 2, 3], "count": [0, 0, 400]}), 0)
        assert greedy_one.entries("done") == {}
        spin(pa.table({"key": [1, 2], "count": [1, 1]}), 0)
        turn(pa.table({"key": [5], "count": [2]}), 0)
        assert greedy_one.entries("done") == dict.fromkeys((1, 2, 5, 6, 7), 1)
