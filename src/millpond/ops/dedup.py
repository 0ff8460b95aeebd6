"""The Dedup operator: gives those rows of an epoch that are the first of their keys, exactly once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.errors import WrongColumn
from millpond.ops.columns import Names, as_names
from millpond.ops.row_intake import DedupIntake
from millpond.ops.window import Delay, FiringSource, LateRows
from millpond.ops.window_intake import check_teachable, columns_of, inferred
from millpond.schema import format_ddl, parse_ddl
from millpond.stores.windows.firsts import DedupShape
from millpond.wire.dedups import DedupSpec
from millpond.wire.house import OpenResident
from millpond.wire.questions import Drain


class DedupSource(FiringSource):
    """A callable `(rows, epoch)` that gives those rows that are the first of their keys; `.to(function)` for `foreachBatch`."""

    def __init__(
        self,
        client: Client,
        spec: DedupSpec,
        *,
        key: Names,
        at: str,
        value: Names | None,
        delay: Delay,
        late: str | LateRows,
        idle: str | timedelta | None,
        name: str,
        history: str,
    ) -> None:
        self._spec = spec
        self._key = as_names(key, parse_ddl(spec.key, "key"), "key")
        self._named = value
        super().__init__(client, spec, at=at, delay=delay, late=late, idle=idle, name=name, history=history)

    @property
    def _is_known(self) -> bool:
        return self._spec.value is not None

    @property
    def _value(self) -> tuple[str, ...]:
        assert self._spec.value is not None
        return columns_of(self._named, parse_ddl(self._spec.value, "value").names if self._spec.value else [])

    def _intake(self, schema: pa.Schema | None) -> DedupIntake:
        if self._spec.value is None and schema is not None:
            self._learn(schema)
        late = "drop" if callable(self._late) else self._late
        delay = 0 if schema is None else self._delay
        return DedupIntake(self._spec, self.name, self._key, self._at, self._value, delay, late)

    def _learn(self, schema: pa.Schema) -> None:
        """The first rows tell the types."""
        known = self._client.specs(DedupSpec)[self._resident]
        if known.value is None:
            check_teachable(schema, self._key, parse_ddl(self._spec.key, "key"), self._at)
            named = [self._named] if isinstance(self._named, str) else self._named
            columns = list(schema.names if named is None else named)
            for name in columns:
                if schema.names.count(name) > 1:
                    raise WrongColumn(
                        f"the table has more than one column {name!r}",
                        hint="rename one, or name those that are wanted by value=",
                        column=name,
                        available=schema.names[:50],
                    )
            types = inferred(schema, {name: name for name in columns})
            self._client.call(
                OpenResident(replace(self._spec, value=format_ddl(types) if len(types) else ""))
            )
            known = self._client.specs(DedupSpec)[self._resident]
        self._spec = known

    def _results(self, time_kind: str) -> pa.Schema:
        return DedupShape(self._spec).values

    def _staged(self) -> tuple[pa.Schema, int]:
        return DedupShape(self._spec).staged, 1

    # Nothing waits: what is kept are the times of rows that passed.

    def waits(self) -> bool:
        return False

    def due(self) -> Mapping[str, Drain]:
        return {}
