"""Deduplication as its users see it."""

from __future__ import annotations

from datetime import timedelta

from millpond.client.client import Client
from millpond.errors import BadOption
from millpond.ops.columns import Names
from millpond.ops.dedup import DedupSource
from millpond.ops.window import LateRows
from millpond.schema import check_key_types, format_ddl, parse_ddl
from millpond.times import parse_duration
from millpond.wire.base import check_name
from millpond.wire.dedups import DedupSpec
from millpond.wire.questions import AskProgress, ResidentProgress
from millpond.wire.windows import AskOpen

Duration = str | int | timedelta


class Dedup:
    """A deduplication by its name: `over` makes sources for it."""

    def __init__(self, client: Client, spec: DedupSpec) -> None:
        self._client = client
        self._spec = spec

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def place(self) -> tuple[str, None]:
        return self._spec.name, None

    def __repr__(self) -> str:
        return f"<dedup {self.name} by {self._spec.key}>"

    def over(
        self,
        *,
        key: Names | None = None,
        at: str = "ts",
        value: Names | None = None,
        delay: Duration = 0,
        late: str | LateRows = "drop",
        idle: str | timedelta | None = None,
        name: str = "source",
        history: str = "continue",
    ) -> DedupSource:
        """An operator `(rows, epoch)` that gives those rows that are the first of their keys: for `foreachBatch` by `.to`.

        First is what comes first, in one epoch by the time `at` and then by its place. `key` and `at` name the rows'
        columns; `value` those that are given back, by default all that the first rows have. Rows before the watermark, which
        is the newest `at` of their source less the `delay`, are late: dropped and counted, with `late="error"` refused,
        or given to a function `(rows, epoch)`. Keys are remembered until the lowest watermark of all sources has left them
        behind; a source of which no rows came for as long as `idle` is left out. `name` is the source's, for ever;
        `history` as for `State.update`.
        """
        if self._spec.value is None:
            self._spec = self._client.specs(DedupSpec)[self._spec.name]
        return DedupSource(
            self._client,
            self._spec,
            key=parse_ddl(self._spec.key, "key").names if key is None else key,
            at=at,
            value=value,
            delay=delay,
            late=late,
            idle=idle,
            name=name,
            history=history,
        )

    def dropped(self) -> int:
        """How many rows were not the first of their keys. Late rows are not among them: `progress().late`."""
        return sum(self._told("dropped"))

    def remembered(self) -> int:
        """How many rows are remembered as the first of their keys."""
        return sum(self._told("open"))

    def _told(self, column: str) -> list[int]:
        rows = self._client.read(lambda slices: AskOpen(self._spec.name, slices))
        numbers: list[int] = rows.column(column).to_pylist()
        return numbers

    def progress(self) -> ResidentProgress:
        """How far each source has come (`updaters`), and how many rows were `late`. `update` is the watermark."""
        return self._client.call(AskProgress(self._spec.name))


def dedup_spec(name: str, key: str | None, within: Duration | None, value: str | None) -> DedupSpec:
    """The spec of a deduplication as users describe it; an error that says what is wrong."""
    check_name(name, "the dedup")
    if key is None:
        raise BadOption(
            f"dedup {name!r} needs key=, as a DDL string", hint='for example key="id string"', option="key"
        )
    key_schema = parse_ddl(key, "key")
    check_key_types(key_schema)
    amount = 0 if within is None else parse_duration(within)
    if within is not None and not amount:
        raise BadOption(
            f"within={within!r} drops nothing",
            hint="make it longer than nothing; None remembers keys for ever",
            option="within",
        )
    return DedupSpec(
        name=name,
        key=format_ddl(key_schema),
        value=None if value is None else format_ddl(parse_ddl(value, "value")),
        within=amount,
        within_kind="" if not amount else "timestamp" if isinstance(within, str | timedelta) else "long",
    )
