"""What files say of a group: whole, or what has changed since the file before; and files merged.

Beside the parts of a base a delta has `gone`, the keys of rows that were deleted, and two lists of all that is kept:
of outputs by name, and of writers whose events wait, with the time from which those in earlier files still do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millpond.code.tables import TableSpec
from millpond.stores.delayed import Changed
from millpond.stores.deltas import Keyed, merged_rows
from millpond.stores.keys import Keys, encode_keys
from millpond.stores.parts import Part, one_array, pack, unpack

KEPT = pa.schema({"name": pa.string(), "stay_from": pa.int64()})
"""What is kept, in its order."""


class GroupDelta(NamedTuple):
    """What has changed of a group, to be written while it goes on."""

    tables: list[Part]
    outputs: list[tuple[str, pa.Table]]
    kept_outputs: list[str]
    delayed: Mapping[str, Changed]

    def export(self) -> pa.RecordBatch:
        came = [
            Part("delayed", w, changed.rows)
            for w, changed in self.delayed.items()
            if changed.rows is not None
        ]
        stay = {writer: changed.stay_from for writer, changed in self.delayed.items()}
        lists = [_kept("outputs", dict.fromkeys(self.kept_outputs)), _kept("delayed", stay)]
        return pack([*lists, *self.tables, *(Part("outputs", *each) for each in self.outputs), *came])


def _kept(what: str, names: Mapping[str, int | None]) -> Part:
    return Part("kept", what, pa.table([pa.array([*names], pa.string()), [*names.values()]], schema=KEPT))


class _File(NamedTuple):
    """One file's parts, by kind and name. A base has no list of what is kept: it is all that it holds."""

    parts: dict[tuple[str, str], pa.Table]

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> _File:
        return cls({(kind, name): rows for kind, name, rows in unpack(batch)})

    def named(self, kind: str) -> dict[str, pa.Table]:
        return {name: rows for (own, name), rows in self.parts.items() if own == kind}

    def kept(self, what: str) -> dict[str, int | None] | None:
        listed = self.parts.get(("kept", what))
        return None if listed is None else dict(zip(*listed.to_pydict().values(), strict=True))


def merged_group(
    files: Sequence[pa.RecordBatch], tables: Mapping[str, TableSpec], whole: bool
) -> pa.RecordBatch:
    """What the files hold together, oldest first, of which there is at least one: a base if `whole`, or else a delta."""
    opened = [_File.of(file) for file in files]
    names = dict.fromkeys(name for file in opened for kind in ("table", "gone") for name in file.named(kind))
    parts = []
    for name in names:
        if name in tables:  # else it was dropped since
            parts += _merged_table(name, opened, tables[name], whole)
    outputs = _merged_outputs(opened)
    delayed = _merged_delayed(opened)
    if not whole:
        parts += [
            _kept("outputs", dict.fromkeys(opened[-1].kept("outputs") or outputs)),
            _kept("delayed", {writer: changed.stay_from for writer, changed in delayed.items()}),
        ]
    parts += [Part("outputs", name, rows) for name, rows in outputs.items()]
    parts += [Part("delayed", w, changed.rows) for w, changed in delayed.items() if changed.rows is not None]
    return pack(parts)


def _merged_table(name: str, files: Sequence[_File], spec: TableSpec, whole: bool) -> list[Part]:
    found = [file.parts.get(("table", name)) for file in files]
    gone = [file.parts.get(("gone", name)) for file in files]
    some = next((rows for rows in found if rows is not None), None)
    if some is None:  # all of them tell of deletions alone
        return (
            [] if whole else [Part("gone", name, pa.concat_tables(rows for rows in gone if rows is not None))]
        )
    nothing, no_keys = some.slice(0, 0), some.slice(0, 0).select(range(len(spec.keys)))
    keyed = [
        Keyed(_keys(there, spec), there, _keys(deleted, spec), deleted)
        for there, deleted in zip(
            (nothing if rows is None else rows for rows in found),
            (no_keys if rows is None else rows for rows in gone),
            strict=True,
        )
    ]
    rows, deleted = merged_rows(keyed)
    return [Part("table", name, rows)] + ([] if whole or not len(deleted) else [Part("gone", name, deleted)])


def _keys(rows: pa.Table, spec: TableSpec) -> Keys:
    """By place: a column may be called as a key is."""
    columns = [one_array(rows, place).cast(field.type) for place, field in enumerate(spec.keys)]
    return encode_keys(columns, spec.keys)


def _merged_outputs(files: Sequence[_File]) -> dict[str, pa.Table]:
    found: dict[str, pa.Table] = {}
    for file in files:
        found |= file.named("outputs")
        kept = file.kept("outputs")
        if kept is not None:
            found = {name: found[name] for name in kept if name in found}
    return found


def _merged_delayed(files: Sequence[_File]) -> dict[str, Changed]:
    """Events by writer, in their order; and which of those stay that files before these hold."""
    found = {writer: Changed(None, rows) for writer, rows in files[0].named("delayed").items()}
    found |= {
        writer: Changed(since, found[writer].rows if writer in found else None)
        for writer, since in (files[0].kept("delayed") or {}).items()
    }
    for file in files[1:]:
        came, kept = file.named("delayed"), file.kept("delayed") or {}
        before, found = found, {}
        for writer, stay_from in kept.items():
            parts = [came[writer]] if writer in came else []
            older = before.get(writer)
            if older is None or stay_from is None:
                found[writer] = Changed(None, _joined(parts))
                continue
            if older.rows is not None:
                parts.insert(0, older.rows.filter(pc.greater_equal(older.rows.column(0), stay_from)))
            stays = None if older.stay_from is None else max(older.stay_from, stay_from)
            found[writer] = Changed(stays, _joined(parts))
    return found


def _joined(parts: Sequence[pa.Table]) -> pa.Table | None:
    held = [rows for rows in parts if len(rows)]
    return pa.concat_tables(held) if held else None
