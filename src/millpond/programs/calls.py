"""Calls on their way from task to task, as columns: those that wait for one task, each a row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.hashing import slices_of
from millpond.programs.call_columns import column_type, is_sound
from millpond.programs.graph import Task
from millpond.stores.keys import encode_keys
from millpond.wire.base import SliceId
from millpond.wire.programs import ProgramSpec

Longs = NDArray[np.int64]
Numbers = NDArray[np.int32]

HEAD = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("entry", pa.int32(), nullable=False),
        pa.field("task", pa.int32(), nullable=False),
        pa.field("steps", pa.int32(), nullable=False),
        pa.field("at", pa.int32(), nullable=False),
    ]
)
"""What is known of a call: its row, the slice by which it came in, the task that it waits for or how it ended, through how
many tasks it went, and the slice or the lane that it is for; where the task gathers, the lane that it comes from.
"""
HEAD_COLUMNS = len(HEAD)


@lru_cache(maxsize=1024)
def calls_schema(kinds: tuple[str, ...]) -> pa.Schema:
    """Of calls that wait for a task with inputs of these types, in their order."""
    inputs = [pa.field(f"input_{n}", column_type(kind)) for n, kind in enumerate(kinds)]
    return pa.schema([*HEAD, *inputs])


class Heads(NamedTuple):
    """What is known of calls, as arrays."""

    rows: Longs
    entries: Numbers
    tasks: Numbers
    steps: Numbers
    at: Numbers

    @classmethod
    def of(cls, calls: pa.RecordBatch) -> Heads:
        return cls(*(calls.column(n).to_numpy() for n in range(HEAD_COLUMNS)))


def calls_of(heads: Heads, inputs: Sequence[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    arrays = [pa.array(array, field.type) for array, field in zip(heads, schema, strict=False)]
    return pa.RecordBatch.from_arrays([*arrays, *inputs], schema=schema)


def why_unsound(calls: pa.RecordBatch, schema: pa.Schema, kinds: Sequence[str]) -> str:
    """Why a batch that came cannot be calls of that schema; empty if it can."""
    if not calls.schema.equals(schema):
        return f"has columns {calls.schema.names} of other types"
    if any(calls.column(n).null_count for n in range(HEAD_COLUMNS)):
        return "has calls of which nothing is known"
    if not all(is_sound(calls.column(HEAD_COLUMNS + n), kind) for n, kind in enumerate(kinds)):
        return "has vectors that are out of order"
    return ""


def slices_of_column(keys: pa.Array, slices: int) -> Numbers:
    """The slices of keys, all longs or all strings and none of them null, of so many."""
    schema = pa.schema([("key", keys.type)])
    return slices_of(encode_keys([keys], schema).hashed().hashes, slices)


def homes_of(spec: ProgramSpec, lanes: Numbers, slices: int) -> Numbers:
    """The slices in which lanes live, of so many."""
    return np.array([spec.home_of(lane, slices) for lane in range(spec.lanes)], np.int32)[lanes]


class Routed(NamedTuple):
    """Calls, each with the slice that it is sent to."""

    calls: pa.RecordBatch
    to: Numbers


def routed(spec: ProgramSpec, task: Task, calls: pa.RecordBatch, keys: Numbers | None, slices: int) -> Routed:
    """Calls for a task on their way: `keys` are the slices of the keys by which it accesses state, of so many."""
    heads = Heads.of(calls)
    at = heads.at
    match task.access:
        case "partitioned":
            assert keys is not None
            at = to = keys
        case "lane":
            assert keys is not None
            at = keys % np.int32(spec.lanes)
            to = homes_of(spec, at, slices)
        case "everywhere":
            order = np.repeat(np.arange(len(calls)), spec.lanes)
            calls = calls.take(pa.array(order)) if spec.lanes > 1 else calls
            at = np.tile(np.arange(spec.lanes, dtype=np.int32), len(heads.at))
            to = homes_of(spec, at, slices)
        case _:
            at = to = heads.entries
    number = np.full(len(calls), task.number, np.int32)
    made = with_column(calls, "task", number)
    # What is gathered says where it comes from.
    return Routed(made if task.gathers else with_column(made, "at", at), to)


def with_column(calls: pa.RecordBatch, name: str, values: NDArray[Any]) -> pa.RecordBatch:
    place = HEAD.get_field_index(name)
    return calls.set_column(place, HEAD.field(place), pa.array(values, HEAD.field(place).type))


class Place(NamedTuple):
    """Where calls run: a slice, and a lane in it."""

    slice: SliceId
    lane: int


def by_place(heads: Heads, slices: Numbers, lanes: Numbers, of: int) -> dict[Place, Longs]:
    """Which calls run where, in these slices and lanes (of so many, -1 for none); in each place in the order of rows."""
    places = slices.astype(np.int64) * (of + 1) + lanes + 1
    order = np.lexsort((heads.at, heads.rows, places))
    sorted_places = places[order]
    starts = np.flatnonzero(np.concatenate(([True], sorted_places[1:] != sorted_places[:-1])))
    stops = np.append(starts[1:], len(order))
    found = {}
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        number, lane = divmod(int(sorted_places[start]), of + 1)
        found[Place(SliceId(number), lane - 1)] = order[start:stop]
    return found
