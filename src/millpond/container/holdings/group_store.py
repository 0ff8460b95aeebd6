"""What the home slice of a group keeps: its tables, what the last transactions on them gave, and events that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from millpond.code.tables import TableSpec
from millpond.container.holdings.due import Delayed
from millpond.container.holdings.group_files import GroupDelta
from millpond.stores.delayed import load_delayed
from millpond.stores.outputs import Outputs
from millpond.stores.parts import Part, pack, unpack
from millpond.stores.strings import Strings
from millpond.stores.tables import TableStore
from millpond.stores.undo import Undo
from millpond.wire.base import Turn, operator_of

DELAYED = pa.schema(
    {
        "writer": pa.string(), "rows": pa.int64(), "since": pa.int64(), "newest": pa.int64(), "schema": pa.binary()
    }
)  # fmt: skip
"""What `ReadDelayed` is answered by."""


class GroupStore:
    """The tables of a group, the outputs of the newest epochs of each writer, and events of writers that wait."""

    def __init__(self, tables: Mapping[str, TableSpec]) -> None:
        self.strings = Strings()
        self.tables: dict[str, TableStore] = {}
        self.outputs = Outputs()
        self.delayed: Delayed = {}
        # How often it was clean, so that events that came since are told from those that a file holds.
        self._checkpoint = 1
        self.set_tables(tables)

    def set_tables(self, tables: Mapping[str, TableSpec]) -> bool:
        """From now on these; those that are there already keep their rows. Whether some are gone."""
        gone = set(self.tables) - set(tables)
        for name in gone:
            del self.tables[name]
        for name, spec in tables.items():
            if name not in self.tables:
                self.tables[name] = TableStore(spec, self.strings)
        return bool(gone)

    def copy(self) -> GroupStore:
        """All of it as it is now, to be read while this one goes on."""
        other = GroupStore({})
        other.strings = self.strings.copy()
        other.tables = {name: table.copy(other.strings) for name, table in self.tables.items()}
        other.outputs = self.outputs.copy()
        other.delayed = dict(self.delayed)
        return other

    def keep(self, writer: str, turn: Turn, outputs: pa.Table, delayed: Delayed, undo: Undo) -> None:
        """What a decided epoch leaves. The tables are as it left them already."""
        self.outputs.keep(writer, turn, outputs)
        self.delayed = {w: rows.held_since(w, self._checkpoint) for w, rows in delayed.items()}
        undo.mark(self.tables)

    def forget(self, writers: Sequence[str]) -> None:
        for writer in writers:
            self.outputs.forget(writer)
        self.delayed = {w: rows for w, rows in self.delayed.items() if w not in writers}

    @property
    def dirty_share(self) -> float:
        """How much of the tables, of 1, has changed since the store was last clean."""
        changed = sum(len(table.dirty.ids()) for table in self.tables.values())
        return changed / max(sum(table.count for table in self.tables.values()), 1)

    def delta(self, undecided: Undo | None = None) -> GroupDelta:
        """What has changed since the store was last clean, without an epoch that has run and is not decided."""
        tables = []
        for name, table in self.tables.items():
            before = None if undecided is None else undecided.cells_before(name, table)
            there, gone = table.changed(before)
            tables += [Part("table", name, there)] * bool(len(there)) + [Part("gone", name, gone)] * bool(
                len(gone)
            )
        delayed = {w: rows.changed(self._checkpoint) for w, rows in self.delayed.items()}
        return GroupDelta(tables, *self.outputs.changed(), delayed)

    def clean(self) -> None:
        """All that there is is saved."""
        for table in self.tables.values():
            table.dirty.clear()
        self.outputs.clean()
        self._checkpoint += 1

    def export(self) -> pa.RecordBatch:
        tables = [Part("table", name, table.export()) for name, table in self.tables.items()]
        outputs = [Part("outputs", name, rows) for name, rows in self.outputs.export()]
        return pack(
            [*tables, *outputs, *(Part("delayed", w, rows.export()) for w, rows in self.delayed.items())]
        )

    def load(self, batch: pa.RecordBatch) -> None:
        for kind, name, rows in unpack(batch):
            if kind == "outputs":
                self.outputs.load(name, rows)
            elif kind == "delayed":
                self.delayed[name] = load_delayed(rows).held_since(name, 0)
            elif name in self.tables:  # else it was dropped since
                self.tables[name].load(rows)

    def list_delayed(self, operator: str) -> pa.Table:
        """What waits for the queries of an operator: how many events, their times and their schema."""
        listed = [
            (writer, len(rows), rows.lowest, rows.newest, rows.schema.serialize().to_pybytes())
            for writer, rows in self.delayed.items()
            if operator_of(writer) == operator and rows.schema is not None
        ]
        return pa.Table.from_pylist([dict(zip(DELAYED.names, row, strict=True)) for row in listed], DELAYED)

    def validate(self) -> None:
        """Raises AssertionError if an invariant does not hold. For tests."""
        for table in self.tables.values():
            table.validate()
