"""Named tables as one batch, for snapshots of stores that hold more than rows of one schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

PARTS = pa.schema([("kind", pa.string()), ("name", pa.string()), ("rows", pa.large_binary())])
"""One row for each table, which is an Arrow stream."""


PACK_BYTES = 4 << 20
"""What is made of parts at once, about, where there are many."""


class Part(NamedTuple):
    """A table, by what it is and how it is called."""

    kind: str
    name: str
    rows: pa.Table


def pack(parts: Sequence[Part]) -> pa.RecordBatch:
    columns = [
        pa.array([part.kind for part in parts], pa.string()),
        pa.array([part.name for part in parts], pa.string()),
        _streams_of([part.rows for part in parts]),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=PARTS)


def in_packs(parts: Iterable[Part]) -> Iterator[pa.RecordBatch]:
    """The same, so many tables in a batch that it has some bytes: in their order, made one by one."""
    some: list[Part] = []
    size = 0
    for part in parts:
        if some and size + part.rows.nbytes > PACK_BYTES:
            yield pack(some)
            some, size = [], 0
        some.append(part)
        size += part.rows.nbytes
    yield pack(some)


def unpack(batch: pa.RecordBatch) -> Iterator[Part]:
    """The tables, sound each: `batch` is, but its streams are bytes to whoever checked it."""
    for kind, name, stream in zip(*batch.columns, strict=True):
        rows = pa.ipc.open_stream(stream.as_buffer()).read_all()
        rows.validate(full=True)
        yield Part(kind.as_py(), name.as_py(), rows)


def one_array(rows: pa.Table, place: int) -> pa.Array:
    """A column as one array."""
    column = rows.column(place)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _streams_of(tables: Sequence[pa.Table]) -> pa.Array:
    """Each table as an Arrow stream. They are measured first: a buffer that grows would be copied again and again."""
    measured = pa.MockOutputStream()
    _write_streams(measured, tables)
    buffer = pa.allocate_buffer(measured.size())
    with pa.FixedSizeBufferWriter(buffer) as sink:
        ends = _write_streams(sink, tables)
    offsets = pa.array([0, *ends], pa.int64()).buffers()[1]
    return pa.Array.from_buffers(pa.large_binary(), len(tables), [None, offsets, buffer])


def _write_streams(sink: pa.NativeFile, tables: Sequence[pa.Table]) -> list[int]:
    """Writes the tables one after the other; tells where each ends."""
    ends = []
    for rows in tables:
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        ends.append(sink.tell())
    return ends
