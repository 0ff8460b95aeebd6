"""Batches of several schemas, as one exchange can carry them: each as the bytes of an Arrow stream, in a row of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.errors import BadMessage
from millpond.wire.connection import SlicedBatch, checked

PARCEL = pa.schema([pa.field("batch", pa.large_binary()), pa.field("counts", pa.large_binary())])


def packed(batches: Sequence[SlicedBatch]) -> Sequence[SlicedBatch]:
    """The same, or a parcel for each, where they are not of one schema."""
    if len(batches) < 2 or all(each.batch.schema.equals(batches[0].batch.schema) for each in batches[1:]):
        return batches
    return [_parcel(each) for each in batches]


def unpacked(message: Any, batches: Iterable[SlicedBatch]) -> Iterator[SlicedBatch]:
    """What was packed, checked like what comes with a message otherwise."""
    for each in batches:
        if each.batch.schema.equals(PARCEL):
            yield from checked(message, _opened(each.batch))
        else:
            yield each


def _parcel(each: SlicedBatch) -> SlicedBatch:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, each.batch.schema) as stream:
        stream.write_batch(each.batch)
    columns = [_bytes(sink.getvalue()), _bytes(pa.py_buffer(each.counts.tobytes()))]
    return SlicedBatch(pa.RecordBatch.from_arrays(columns, schema=PARCEL), np.ones(1, np.int32))


def _bytes(content: pa.Buffer) -> pa.Array:
    """One value, without a copy."""
    offsets = pa.py_buffer(np.array([0, content.size], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, content])


def _opened(parcels: pa.RecordBatch) -> Iterator[SlicedBatch]:
    for content, counts in zip(*parcels.columns, strict=True):
        if not (content.is_valid and counts.is_valid):
            raise BadMessage("a batch could not be read: there is none")
        try:
            with pa.ipc.open_stream(content.as_buffer()) as stream:
                batch = stream.read_next_batch()
            yield SlicedBatch(batch, np.frombuffer(counts.as_buffer(), np.int32))
        except (pa.ArrowException, OSError, StopIteration, ValueError) as error:
            raise BadMessage(f"a batch could not be read: {error}") from None
