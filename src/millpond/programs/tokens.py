"""Calls on their way from task to task, and where each goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.kernels.hashing import slices_of
from millpond.programs.graph import Task
from millpond.stores.keys import encode_keys
from millpond.wire.base import SliceId
from millpond.wire.connection import SlicedBatch
from millpond.wire.programs import ProgramSpec

TOKENS = pa.schema(
    {
        "row": pa.int64(),
        "entry": pa.int32(),
        "task": pa.int32(),
        "steps": pa.int32(),
        "at": pa.int32(),
        "values": pa.large_binary(),
    }
)


class Token(NamedTuple):
    """A call on its way. `entry` is the slice by which it came in, `steps` how many tasks it went through, `at` the slice or
    the lane that it is for; where the task gathers, the lane that it comes from.
    """

    row: int
    entry: int
    task: int
    steps: int
    at: int
    values: bytes


Routed = list[tuple[SliceId, Token]]
"""Tokens, each with the slice that it is sent to."""


def slices_of_keys(keys: Sequence[int | str], slices: int) -> list[int]:
    """The slices of keys, all longs or all strings, of so many."""
    if not keys:
        return []
    schema = pa.schema([("key", pa.string() if isinstance(keys[0], str) else pa.int64())])
    hashes = encode_keys([pa.array(keys, schema.field(0).type)], schema).hashed().hashes
    numbers: list[int] = slices_of(hashes, slices).tolist()
    return numbers


def places_of(
    spec: ProgramSpec, task: Task, number: int, entry: int, slices: int
) -> list[tuple[SliceId, int]]:
    """Where a task runs, for a call that came in by the slice `entry` and has a key in slice `number`: in which slices, and in
    which slice or lane that is.
    """
    match task.access:
        case "partitioned":
            return [(SliceId(number), number)]
        case "lane":
            lane = number % spec.lanes
            return [(spec.home_of(lane, slices), lane)]
        case "everywhere":
            return [(spec.home_of(lane, slices), lane) for lane in range(spec.lanes)]
        case _:
            return [(SliceId(entry), entry)]


def sliced(routed: Routed, slices: int) -> SlicedBatch:
    """Tokens as rows grouped by slice, of so many."""
    ordered = sorted(routed, key=lambda each: each[0])
    columns = zip(*(token for _, token in ordered), strict=True) if ordered else [()] * len(TOKENS)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, TOKENS, strict=True)]
    counts = np.bincount([number for number, _ in ordered], minlength=slices).astype(np.int32)
    return SlicedBatch(pa.RecordBatch.from_arrays(arrays, schema=TOKENS), counts)


def tokens_in(batch: pa.RecordBatch) -> list[Token]:
    """The calls in a batch whose schema is `TOKENS`."""
    return [Token(*row) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]
