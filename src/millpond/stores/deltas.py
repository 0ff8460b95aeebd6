"""Entries frozen for a file, and files merged: what a later one says of a key replaces what earlier ones said.

A *base* holds a slice whole. A *delta* holds of each key that has changed all that there is of it now, or that nothing is
left. Neither a rule nor a live slice is needed to merge them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import control as at
from millpond.schema import KEY, TIME, KeyKind
from millpond.stores.answers import Reader
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys


class FrozenVersions(NamedTuple):
    """Versions as they were: `ids` has for each its key's place in `keys`, `positions` where the reader finds it.

    Keys are given where nothing is left of them: `gone`.
    """

    schema: pa.Schema
    keys: Keys
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    reader: Reader
    folds: bool
    gone: Sequence[Keys] = ()

    def export(self) -> pa.RecordBatch:
        """`_key`, `_time`, values; grouped by key, times ascending. What is gone has one row, without a time.

        Where values are folded, the first of a key stands for all that was compacted: it is the folded one.
        """
        columns = self.reader.gather(self.positions)
        if self.folds and len(self.ids):
            first = np.flatnonzero(np.diff(self.ids, prepend=-1))
            at = np.arange(len(self.ids))
            at[first] = len(self.ids) + np.arange(len(first))
            folded = self.reader.folded(self.positions[first])
            columns = [
                pa.concat_arrays([own, made]).take(pa.array(at))
                for own, made in zip(columns, folded, strict=True)
            ]
        held = self._batch(self.keys.take(self.ids), self.reader.times(self.positions), columns)
        if not any(map(len, self.gone)):
            return held
        gone = Keys.concat(self.gone)
        nothing = [pa.nulls(len(gone), field.type) for field in self.schema]
        return pa.concat_batches([held, self._batch(gone, pa.nulls(len(gone), pa.int64()), nothing)])

    def _batch(self, keys: Keys, times: pa.Array, values: list[pa.Array]) -> pa.RecordBatch:
        key = keys.to_arrow()
        fields = [pa.field(KEY, key.type), pa.field(TIME, pa.int64()), *self.schema]
        return pa.RecordBatch.from_arrays([key, times, *values], schema=pa.schema(fields))


def merged_versions(files: Sequence[pa.RecordBatch], whole: bool) -> pa.RecordBatch:
    """What the files hold together, oldest first, of which there is at least one: a base if `whole`, or else a delta."""
    table = pa.Table.from_batches(_newest([(Keys.from_arrow(file.column(0)), file) for file in files]))
    if whole and table.column(1).null_count:
        table = table.filter(table.column(1).is_valid())
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else files[0].slice(0, 0)


class Keyed(NamedTuple):
    """Rows of a table with their keys, and the keys of rows that are gone."""

    keys: Keys
    rows: pa.Table
    gone_keys: Keys
    gone: pa.Table


def merged_rows(files: Sequence[Keyed]) -> tuple[pa.Table, pa.Table]:
    """The rows that are there, and the keys of those that are gone. The oldest file comes first."""
    order = [pair for file in files for pair in ((file.keys, file.rows), (file.gone_keys, file.gone))]
    newest = _newest(order)
    return pa.concat_tables(newest[0::2]), pa.concat_tables(newest[1::2])


def _newest(files: Sequence[tuple[Keys, pa.Table]]) -> list[pa.Table]:
    """Of each file the rows whose keys no later one has."""
    seen = _Seen(files[0][0].kind)
    out = []
    for place in range(len(files) - 1, -1, -1):
        keys, rows = files[place]
        out.append(seen.without(keys, rows, is_last=place == 0))
    return out[::-1]


class _Seen:
    """Keys that a later file has."""

    def __init__(self, kind: KeyKind) -> None:
        self._index = KeyIndex(kind, np.zeros(at.SIZE, np.int64))

    def without(self, keys: Keys, rows: pa.Table, is_last: bool) -> pa.Table:
        """The rows whose keys are not among those seen, and from now on are."""
        if len(self._index):
            is_new = self._index.find(keys) < 0
            rows = rows if is_new.all() else rows.filter(pa.array(is_new))
        if not is_last and len(keys):
            self._index.assign(keys)
        return rows
