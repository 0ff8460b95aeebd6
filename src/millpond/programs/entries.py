"""Entries of a program's fields as rows of one schema, whatever the field: in the log, in snapshots, and on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.cells import NULL, PRESENT
from millpond.programs.cells import is_of_cells
from millpond.programs.columns import Columns, columns_of, pairs_in
from millpond.programs.decided import ABSENT, Place
from millpond.programs.graph import Graph
from millpond.programs.packing import pack, unpack
from millpond.programs.tracking import Items
from millpond.wire.programs import FieldSpec

NO_LANE = -1
RETURNED = ""
"""In place of a field: what the calls of an epoch returned, as an Arrow stream in `b`."""
KEYS = "idempotency keys"
"""In place of a field: what is remembered of calls by their keys. No field can have that name."""
KEYS_SPEC = FieldSpec("partitioned", "map", "string", "binary")
_SINCE = "@"
"""Behind the name of a field that a migration has changed, before the revision by which: its entries tell themselves from
those from before. No field has that in its name.
"""
_TYPES = {"x": np.float64, "n": np.int64}
ENTRIES = pa.schema(
    [
        pa.field("field", pa.string(), nullable=False),
        pa.field("lane", pa.int32(), nullable=False),
        pa.field("i", pa.int64()),
        pa.field("j", pa.int64()),
        pa.field("s", pa.string()),
        pa.field("x", pa.float64()),
        pa.field("n", pa.int64()),
        pa.field("b", pa.large_binary()),
        pa.field("deleted", pa.bool_(), nullable=False),
    ]
)


def field_specs(graph: Graph) -> dict[str, FieldSpec]:
    """What the fields of a program are, as ponds know them."""
    return {
        field.name: FieldSpec(field.kind, field.element, field.key, field.value) for field in graph.fields
    }


class Entry(NamedTuple):
    """One row of `ENTRIES`."""

    field: str
    lane: int
    i: int | None = None
    j: int | None = None
    s: str | None = None
    x: float | None = None
    n: int | None = None
    b: bytes | None = None
    deleted: bool = False


def name_since(field: str, spec: FieldSpec) -> str:
    """What entries of a field call it."""
    return f"{field}{_SINCE}{spec.since}" if spec.since else field


def field_and_since(name: str) -> tuple[str, int]:
    """The field, and by which revision it was as the entry has it."""
    field, _, since = name.partition(_SINCE)
    return field, int(since or 0)


def batch_of(entries: Sequence[Entry]) -> pa.RecordBatch:
    columns = list(zip(*entries, strict=True)) if entries else [()] * len(ENTRIES)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, ENTRIES, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=ENTRIES)


def batch_for(name: str, spec: FieldSpec, lane: int, items: Items) -> pa.RecordBatch:
    """The entries of a field at these places, with their values."""
    if not isinstance(items, Columns) and is_of_cells(spec.element, spec.key, spec.value):
        items = columns_of(spec.element, spec.value, items)
    if not isinstance(items, Columns):
        return batch_of([entry_of(name, spec, lane, place, value) for place, value in items])
    count, deleted = len(items), items.flags == 0
    value = _value_column(spec)
    columns = {
        "field": pa.repeat(pa.scalar(name), count),
        "lane": pa.repeat(pa.scalar(lane, pa.int32()), count),
        "i": pa.array(items.keys),
        value: pa.array(items.words.view(_TYPES[value]), mask=items.flags != PRESENT),
        "deleted": pa.array(deleted),
    }
    if spec.element == "matrix":
        columns["i"], columns["j"] = pa.array(items.rows), columns["i"]
    arrays = [columns.get(field.name, pa.nulls(count, field.type)) for field in ENTRIES]
    return pa.RecordBatch.from_arrays(arrays, schema=ENTRIES)


def items_of(spec: FieldSpec, batch: pa.RecordBatch) -> Items:
    """The same back, of entries of one field."""
    if not is_of_cells(spec.element, spec.key, spec.value):
        return [(place_of(spec, entry), value_of(spec, entry)) for entry in entries_in(batch)]
    value = _value_column(spec)
    # What a log or a snapshot has as a slice begins somewhere in its buffers.
    rows, keys = (_longs(batch.column(column)) for column in ("i", "j" if spec.element == "matrix" else "i"))
    found = batch.column(value)
    words = found.fill_null(0).to_numpy(zero_copy_only=False).view(np.int64)
    flags = np.where(found.is_null().to_numpy(zero_copy_only=False), PRESENT | NULL, PRESENT)
    flags[batch.column("deleted").to_numpy(zero_copy_only=False)] = 0
    return Columns(
        rows if spec.element == "matrix" else np.zeros_like(rows), keys, words, flags.astype(np.uint8)
    )


def items_in(spec: FieldSpec, batch: pa.RecordBatch) -> list[tuple[Place, Any]]:
    """Of entries of one field, none of them deleted, their places and values."""
    items = items_of(spec, batch)
    return pairs_in(spec.element, spec.value, items) if isinstance(items, Columns) else items


def _longs(column: pa.Array) -> NDArray[np.int64]:
    longs: NDArray[np.int64] = column.to_numpy(zero_copy_only=False)
    if column.null_count:
        raise ValueError("an entry has no place")
    return longs


def _value_column(spec: FieldSpec) -> str:
    """Where the numbers of a field are."""
    return "x" if spec.element != "map" or spec.value == "double" else "n"


def entries_in(batch: pa.RecordBatch) -> Iterator[Entry]:
    for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
        yield Entry(*row)


def entry_of(name: str, spec: FieldSpec, lane: int, place: Place, value: Any) -> Entry:
    entry = Entry(name, lane)
    if spec.element == "matrix":
        entry = entry._replace(i=place[0], j=place[1])
    elif isinstance(place, str):
        entry = entry._replace(s=place)
    else:
        entry = entry._replace(i=int(place))
    if value is ABSENT:
        return entry._replace(deleted=True)
    if value is None:
        return entry
    match _form(spec):
        case "x":
            return entry._replace(x=value)
        case "n":
            return entry._replace(n=int(value))
        case "dense":
            return entry._replace(b=np.asarray(value, np.float64).tobytes())
        case "binary":
            return entry._replace(b=value)
        case _:
            return entry._replace(b=pack([value], [spec.value]))


def place_of(spec: FieldSpec, entry: Entry) -> Place:
    if spec.element == "matrix":
        return entry.i, entry.j
    if entry.s is not None:
        return entry.s
    return bool(entry.i) if spec.key == "boolean" else entry.i


def value_of(spec: FieldSpec, entry: Entry) -> Any:
    if entry.deleted:
        return ABSENT
    match _form(spec):
        case "x":
            return entry.x
        case "n":
            return None if entry.n is None else bool(entry.n) if spec.value == "boolean" else entry.n
        case "dense":
            return np.frombuffer(entry.b or b"", np.float64).copy()
        case "binary":
            return entry.b
        case _:
            return None if entry.b is None else unpack(entry.b, [spec.value])[0]


def _form(spec: FieldSpec) -> str:
    if spec.element != "map":
        return "dense" if spec.element == "dense" else "x"
    return {"double": "x", "long": "n", "boolean": "n", "binary": "binary"}.get(spec.value, "b")
