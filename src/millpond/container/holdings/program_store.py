"""What one slice keeps of a program: entries of its fields, by key and by lane, and what the last calls returned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.errors import Unavailable
from millpond.programs.entries import (
    ENTRIES,
    KEYS,
    KEYS_SPEC,
    NO_LANE,
    batch_for,
    field_and_since,
    items_of,
    name_since,
)
from millpond.programs.tracked_cells import tracked
from millpond.programs.tracking import Items, Tracked
from millpond.stores.outputs import Outputs
from millpond.stores.parts import Part, pack, unpack
from millpond.wire.programs import FieldSpec

_KEYS = ENTRIES.names[:5]
_KEPT = pa.schema({"name": pa.string()})


class ProgramDelta(NamedTuple):
    """What has changed, to be written while the slice goes on."""

    entries: list[pa.RecordBatch]
    outputs: list[tuple[str, pa.Table]]
    kept: list[str]

    def export(self) -> pa.RecordBatch:
        kept = Part("kept", "", pa.table([pa.array(self.kept, pa.string())], schema=_KEPT))
        return pack([_part(self.entries), kept, *(Part("outputs", *each) for each in self.outputs)])


class ProgramStore:
    """Fields by name; of partial ones, the lanes that live here."""

    def __init__(self, fields: Mapping[str, FieldSpec], revision: int = 0) -> None:
        self.fields = dict(fields)
        self.revision = revision
        """Of the program, as this slice has it."""
        self.next: ProgramStore | None = None
        """What a migration that is not decided makes of fields."""
        self.outputs = Outputs()
        self.parts: dict[tuple[str, int], Tracked] = {}
        self.keys_looked = 0
        """How many idempotency keys there were when old ones were last let go of."""

    def spec(self, field: str) -> FieldSpec:
        return KEYS_SPEC if field == KEYS else self.fields[field]

    def part(self, field: str, lane: int = NO_LANE) -> Tracked:
        """The field here, or one lane of it; empty where nothing was written yet."""
        part = self.parts.get((field, lane))
        if part is None:
            spec = self.spec(field)
            part = self.parts[field, lane] = tracked(spec.element, spec.key, spec.value)
        return part

    # Epochs

    def changed(self) -> list[pa.RecordBatch]:
        """What the epoch that is not decided has changed, as entries."""
        own = self._batches((key, part.changed()) for key, part in self.parts.items())
        return own if self.next is None else own + self.next.changed()

    def _batches(self, found: Iterable[tuple[tuple[str, int], Items]]) -> list[pa.RecordBatch]:
        return [
            batch_for(name_since(field, self.spec(field)), self.spec(field), lane, items)
            for (field, lane), items in found
            if len(items)
        ]

    @property
    def touched(self) -> set[tuple[str, int]]:
        """The parts that an epoch that is not decided has changed."""
        return {key for key, part in self.parts.items() if part.is_changed}

    def settle(self) -> None:
        if self.next is not None:
            made, self.next = self.next, None
            self.switch(made.fields, made.revision)
            self.parts |= made.parts
        for part in self.parts.values():
            part.settle()

    def switch(self, fields: Mapping[str, FieldSpec], revision: int) -> None:
        """A migration was decided: what it makes anew begins empty. One that is known already changes nothing."""
        if revision <= self.revision:
            return
        made = {name for name, spec in fields.items() if spec.since > self.revision}
        self.parts = {key: part for key, part in self.parts.items() if key[0] not in made}
        self.fields = {**self.fields, **fields}
        self.revision = revision

    def extend(self, fields: Mapping[str, FieldSpec]) -> None:
        """The program has gained fields, which are empty. Those that a migration changes do so where that is applied."""
        self.fields = {**fields, **self.fields}

    def put_back(self, parts: Iterable[tuple[str, int]] | None = None) -> None:
        """Undoes the epoch that is not decided: all of it, or in these parts."""
        if parts is None:
            self.next = None
        for part in self.parts if parts is None else parts:
            self.parts[part].put_back()

    def put(self, batch: pa.RecordBatch, *, dirty: bool = True) -> None:
        """Entries as decided epochs left them. Of those of one place the last one counts."""
        if not batch.num_rows:
            return
        names, codes = _codes(batch.column("field"))
        lanes, lane_codes = _codes(batch.column("lane"))
        parts = codes * len(lanes) + lane_codes
        if (parts == parts[0]).all():
            self._put(names[codes[0]], lanes[lane_codes[0]], batch, dirty)
            return
        order = np.argsort(parts, kind="stable")
        starts = np.flatnonzero(np.diff(parts[order], prepend=-1))
        for rows in np.split(order, starts[1:]):
            self._put(names[codes[rows[0]]], lanes[lane_codes[rows[0]]], batch.take(pa.array(rows)), dirty)

    def _put(self, name: str, lane: int, batch: pa.RecordBatch, dirty: bool) -> None:
        """Those of one part; nowhere, if a later migration has made its field anew."""
        field, since = field_and_since(name)
        spec = self.spec(field)
        if since < spec.since:
            return
        if since > spec.since:
            raise Unavailable(
                f"the field {field!r} was migrated, and its container has not heard of it",
                hint="try again in a moment",
                address="",
            )
        self.part(field, lane).put(items_of(spec, batch), dirty=dirty)

    def forget(self, writers: Sequence[str]) -> None:
        for writer in writers:
            self.outputs.forget(writer)

    # As checkpoints see it

    @property
    def dirty_share(self) -> float:
        return sum(part.dirty_count for part in self.parts.values()) / max(self.count, 1)

    @property
    def count(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def delta(self) -> ProgramDelta:
        """What has changed since the store was last clean, without an epoch that is not decided."""
        entries = self._batches((key, part.unsaved()) for key, part in self.parts.items())
        return ProgramDelta(entries, *self.outputs.changed())

    def clean(self) -> None:
        for part in self.parts.values():
            part.clean()
        self.outputs.clean()

    def copy(self) -> ProgramStore:
        other = ProgramStore(self.fields, self.revision)
        other.parts = {key: part.copy() for key, part in self.parts.items()}
        other.outputs = self.outputs.copy()
        return other

    def entries(self, fields: Iterable[str] | None = None) -> list[pa.RecordBatch]:
        wanted = {*self.fields, KEYS} if fields is None else set(fields)
        return self._batches(
            (key, self.parts[key].entries()) for key in sorted(self.parts) if key[0] in wanted
        )

    def export(self) -> pa.RecordBatch:
        return pack(
            [_part(self.entries()), *(Part("outputs", name, rows) for name, rows in self.outputs.export())]
        )

    def load(self, batch: pa.RecordBatch) -> None:
        for kind, name, rows in unpack(batch):
            if kind == "outputs":
                self.outputs.load(name, rows)
            elif kind == "entries":
                for each in rows.to_batches():
                    self.put(each, dirty=False)

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for (field, lane), part in self.parts.items():
            part.validate()
            assert (lane == NO_LANE) == (self.spec(field).kind == "partitioned"), field


def _codes(column: pa.Array) -> tuple[list[Any], NDArray[np.int64]]:
    """The values of a column, and of each row which of them it has."""
    encoded = column.dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)


def _part(entries: Sequence[pa.RecordBatch]) -> Part:
    return Part("entries", "", pa.Table.from_batches(entries, ENTRIES).combine_chunks())


def merged_files(files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
    """What files hold together, oldest first: the last value of each entry; of a base, no deleted ones."""
    tables: list[pa.Table] = []
    outputs: dict[str, pa.Table] = {}
    kept: list[str] | None = None
    for file in files:
        own = list(unpack(file))
        tables += [rows for kind, _, rows in own if kind == "entries"]
        outputs |= {name: rows for kind, name, rows in own if kind == "outputs"}
        listed = [rows.column(0).to_pylist() for kind, _, rows in own if kind == "kept"]
        if listed:
            kept = listed[0]
            outputs = {name: outputs[name] for name in kept if name in outputs}
    entries = _last(pa.concat_tables(tables))
    if whole:
        entries = entries.filter(pc.invert(entries.column("deleted")))
    parts = [Part("entries", "", entries)]
    if not whole:
        names = list(outputs) if kept is None else kept
        parts.append(Part("kept", "", pa.table([pa.array(names, pa.string())], schema=_KEPT)))
    return pack([*parts, *(Part("outputs", name, rows) for name, rows in outputs.items())])


def _last(entries: pa.Table) -> pa.Table:
    numbered = entries.select(_KEYS).append_column("place", pa.array(np.arange(len(entries))))
    last = numbered.group_by(_KEYS).aggregate([("place", "max")]).column("place_max")
    return entries.take(pa.array(np.sort(last.to_numpy())))
