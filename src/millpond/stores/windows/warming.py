"""Kernels of windows compiled before anybody waits for them: by a few rows through a store as it will be."""

from __future__ import annotations

import tempfile
from functools import lru_cache

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from millpond.code.windows import Aggregate, WindowCode
from millpond.durable.files import OsFiles
from millpond.kernels import windows as kernel
from millpond.schema import KeyKind
from millpond.stores.keys import Keys
from millpond.stores.windows.firsts import DedupShape, DedupStore
from millpond.stores.windows.intervals import IntervalPairs
from millpond.stores.windows.join_shape import JoinShape
from millpond.stores.windows.pair_windows import PairWindows
from millpond.stores.windows.shape import WindowShape
from millpond.stores.windows.spilling import Spilling
from millpond.stores.windows.store import WindowStore
from millpond.wire.dedups import DedupSpec
from millpond.wire.joins import SIDES, Between, JoinSpec, Side

_CELLS = {
    "count": Aggregate("count", "v"),
    "total": Aggregate("total", "v"),
    "largest": Aggregate("largest", "v"),
    "top": Aggregate("top", "v", number=2),
    "mean": Aggregate("mean", "w"),
    "smallest": Aggregate("smallest", "w"),
    "tops": Aggregate("top", "w", number=2),
}
_WHOLE = {
    "values": Aggregate("values", "v"),
    "median": Aggregate("median", "w"),
    "total": Aggregate("total", "v"),
}


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Compile, or load from the cache, what windows of all kinds run; in this process once."""
    kinds = (
        WindowCode("tumbling", size=10),
        WindowCode("sliding", size=10, slide=5),
        WindowCode("session", size=10),
        WindowCode("session", size=10, longest=10),
    )
    rows = np.arange(3)
    kernel.pane_starts(rows, 2, 0, rows.copy())
    kernel.last_ends(rows, 2, 2, 0, rows.copy())
    kernel.dense_groups(rows, rows, 3, np.full(9, -1), rows.copy(), rows.copy())
    kernel.runs_of_keys(rows, rows, rows + 1, False, np.full(3, -1), *(rows.copy() for _ in range(4)))
    with tempfile.TemporaryDirectory() as directory:
        spilling = Spilling(OsFiles(), directory, 0)
        for window in kinds:
            for aggregates in (_CELLS, _WHOLE):
                for key in ("long", "string"):
                    _run(WindowShape(key, "v long, w double, s string", window, aggregates), spilling)


@lru_cache(maxsize=1)
def warm_up_joins() -> None:
    """The same for joins and deduplication."""
    hows = (
        JoinSpec("", "", "", "", window=WindowCode("tumbling", size=10)),
        JoinSpec("", "", "", "", between=Between(-9, 9)),
    )
    rows = np.arange(3)
    kernel.last_ends(rows, 2, 2, 0, rows.copy())
    with tempfile.TemporaryDirectory() as directory:
        spilling = Spilling(OsFiles(), directory, 0)
        for key in ("key long", "key string"):
            for how in hows:
                _run_join(JoinShape(replace(how, key=key, left="v long", right="s string")), spilling)
            _run_dedup(DedupShape(DedupSpec("", key, "v long", 10)))


def _run_join(shape: JoinShape, spilling: Spilling) -> None:
    store = (PairWindows if shape.panes is not None else IntervalPairs)(shape, spilling.new_rows)
    key, times = _keys(shape.key_kind), pa.array(np.array([1, 2, 30]))
    values: dict[Side, pa.Array] = {"left": pa.array([1, None, 3]), "right": pa.array(["a", None, "b"])}
    for side in SIDES:
        batch = pa.RecordBatch.from_arrays([key, times, values[side]], schema=shape.staged[side])
        store.run([(Keys.from_arrow(key), batch)], 5, closes=False, time_kind="long")
        for log in store.logs:
            spilling.relieve(log)
    store.run([], 20, closes=False, time_kind="long")
    store.run([], 20, closes=True, time_kind="long")


def _run_dedup(shape: DedupShape) -> None:
    store = DedupStore(shape)
    key = _keys(shape.key_kind)
    batch = pa.RecordBatch.from_arrays([key, pa.array([1, 2, 30]), pa.array([1, 2, 3])], schema=shape.staged)
    store.run([(Keys.from_arrow(key), batch)], 20, closes=False, time_kind="long")


def _keys(kind: KeyKind) -> pa.Array:
    return pa.array([1, 2, 1]) if kind == "i64" else pa.array([b"1", b"2", b"1"])


def _run(shape: WindowShape, spilling: Spilling) -> None:
    store = WindowStore(shape, spilling.new_rows, 1, spilling.new_cells)
    key = _keys(shape.key_kind)
    times = pa.array(np.array([1, 2, 30]))
    if shape.layout is not None:
        values = [pa.array([1, 2, 3]), pa.array([1.0, 2.0, None]), pa.array(["a", None, "b"])]
        cells = shape.layout.to_arrow(shape.layout.fold(np.arange(3), 3, values))
        columns = [key, *([times] * len(shape.longs)), *cells]
        if len(shape.longs) == 2:
            columns[2] = pa.array(np.array([11, 12, 40]))
    else:
        ends = [pa.array(np.array([11, 12, 40]))] * (len(shape.longs) - 1)
        values = [pa.array([1, 2, 3]), pa.array([1.0, 2.0, None]), pa.array(["a", None, "b"])]
        columns = [key, times, *ends, *values]
    batch = pa.RecordBatch.from_arrays(columns, schema=shape.staged)
    store.run([(Keys.from_arrow(key), batch)], 5, closes=False, time_kind="long")
    spilling.relieve(store.spillable)
    store.run([], 20, closes=False, time_kind="long")
    store.run([], 20, closes=True, time_kind="long")


if __name__ == "__main__":
    from millpond.kernels import warm_up as warm_up_kernels

    warm_up_kernels()
    warm_up()
    warm_up_joins()
