"""The same operators over stores of our own, in memory and on disk, and over RocksDB: all answer as the oracle does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_window_operator import ALWAYS_ROWS, CELLS, WHOLE, WINDOWS, run
from window_driving import Shape

from millpond.durable.files import OsFiles
from millpond.stores.windows.rocks_spilling import RocksSpilling
from millpond.stores.windows.spilling import Spilling

MB = 1 << 20


@pytest.fixture(
    params=[
        "disk",
        "rocksdb",
        *(pytest.param(each, marks=pytest.mark.long) for each in ("memory", "rocksdb universal")),
    ]
)
def spilling(request: pytest.FixtureRequest, tmp_path: Path) -> Spilling:
    directory = str(tmp_path / "scratch")
    if not request.param.startswith("rocksdb"):
        return Spilling(OsFiles(), directory, MB if request.param == "memory" else 0)
    pytest.importorskip("rocksdict")
    compaction: Any = "universal" if request.param.endswith("universal") else "level"
    return RocksSpilling(OsFiles(), directory, 4 * MB, compaction)


@pytest.mark.parametrize("aggregates", [CELLS, WHOLE], ids=["cells", "rows"])
@pytest.mark.parametrize("name", ["tumbling", "sliding", "session", "assigned", "everything", "counted"])
def test_every_store_answers_as_the_oracle(spilling: Spilling, name: str, aggregates: Any) -> None:
    window = (WINDOWS | ALWAYS_ROWS)[name]
    run(*window, aggregates, 71, Shape(epochs=10, rows=100, disorder=60), every=4, spilling=spilling)


def test_keys_of_bytes(spilling: Spilling) -> None:
    shape = Shape(epochs=8, key_type="string", keys="many")
    for name in ("tumbling", "session"):
        run(*WINDOWS[name], CELLS, 72, shape, key_type="string", every=4, spilling=spilling)


def test_what_a_database_is_set_up_like_is_told(tmp_path: Path) -> None:
    pytest.importorskip("rocksdict")
    options = RocksSpilling(OsFiles(), str(tmp_path / "scratch"), 8 * MB).options()
    assert options["budget_bytes"] == 8 * MB
    assert options["write_ahead_log"] is False
