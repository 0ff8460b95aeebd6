"""Rows that waited, as a task of a later turn reads them."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa

from millpond.ops.one_pass import Waited
from millpond.ops.waiting import Widening
from millpond.ops.waits import with_arrival
from millpond.stores.waiting import WaitingList, WaitingRows
from millpond.wire.base import Turn


def test_rows_that_came_in_several_zones_are_given_under_one_schema(tmp_path: Path) -> None:
    rows = WaitingRows(str(tmp_path), "s", "views", "local")
    token, files = rows.token(), []
    for zone, noted in (("UTC", None), ("Asia/Tokyo", None), ("UTC", {"by": "another writer"})):
        table = pa.table({"k": [1], "t": pa.array([5], pa.timestamp("us", zone))})
        table = with_arrival(table, 3).replace_schema_metadata(noted)
        files.append(rows.write(Turn(0), token, table.to_batches()))  # type: ignore[arg-type]
    waited = Waited(WaitingList(Turn(0), token, "", files), 1, Widening())  # type: ignore[arg-type]
    parts = [table for table, _ in waited.read(rows, 0)]
    with pa.ipc.new_stream(io.BytesIO(), parts[0].schema) as writer:  # as Spark's workers do
        for part in parts:
            writer.write_table(part)
    assert sum(part.num_rows for part in parts) == 3
