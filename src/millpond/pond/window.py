"""A window as its users see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, Unavailable
from millpond.ops.columns import Names, as_table, keys_of
from millpond.ops.window import LateRows, WindowSource, explain, shape_of
from millpond.schema import parse_ddl
from millpond.stores.keys import Keys
from millpond.stores.windows.shape import NO_KEY, WindowShape
from millpond.stores.windows.store import WindowStore
from millpond.wire.questions import AskProgress, ResidentProgress
from millpond.wire.windows import FindOpen, ReadOpen, WindowSpec

READS_MAX = 20
"""So often it is tried to read what is open between two epochs."""
# How long an epoch that is decided is waited for, and how often it is looked for.
VISIBLE_S_MAX, LOOK_S = 120.0, 0.01


class Window:
    """A window operator by its name: `over` makes sources for it, `now` looks at what is open."""

    def __init__(self, client: Client, spec: WindowSpec) -> None:
        self._client = client
        self._spec = spec

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def is_known(self) -> bool:
        """Whether the types of its values are: told, or seen in its first rows."""
        return self._current().value is not None

    @property
    def place(self) -> tuple[str, None]:
        """The resident that it is, and no table of it."""
        return self._spec.name, None

    def __repr__(self) -> str:
        return f"<{explain(self._spec).splitlines()[0]}>"

    def over(
        self,
        *,
        key: Names | None = None,
        at: str = "ts",
        value: Names | None = None,
        delay: str | int | timedelta = 0,
        late: str | LateRows = "drop",
        idle: str | timedelta | None = None,
        name: str = "source",
        history: str = "continue",
    ) -> WindowSource:
        """An operator `(rows, epoch)` that takes rows in and gives what fires: for `foreachBatch` by `.to(function)`.

        `key`, `at` and `value` name the rows' columns; by default those of the window. The watermark is the newest `at`
        less the `delay`, the lowest of all sources of the window; a window fires once its end is not after it. Rows
        whose windows are all over are late: dropped and counted, with `late="error"` refused, or given to a function
        `(rows, epoch)`. A source of which no rows came for as long as `idle` is left out; once all are, what is open fires.
        `name` is the source's, for ever; `history` as for `State.update`.
        """
        if key is not None and self._spec.key == NO_KEY:
            raise BadOption(
                f"key={key!r}, but the window {self.name!r} is not by key: all rows are one",
                hint="leave it out, or make a window by key, as in pond.window(..., key='user string')",
                option="key",
            )
        names = parse_ddl(self._spec.key, "key").names
        return WindowSource(
            self._client,
            self._current(),
            key=names if key is None else key,
            at=at,
            value=value,
            delay=delay,
            late=late,
            idle=idle,
            name=name,
            history=history,
        )

    def now(self, keys: pa.Table | Sequence[Any] | None = None) -> pa.Table:
        """What the open windows hold, as of one epoch: of all keys or of these. Nothing fires.

        `keys` are a table with the key's columns, or a list of keys. Windows that have fired are not there any more. Where
        epochs come so fast that one is decided before all containers have answered, it is tried again some times, and refused.
        """
        spec = self._current()
        if spec.value is None:
            return pa.table({})
        if keys is None:
            return self._at_one_epoch(lambda: self._client.read(lambda slices: ReadOpen(spec.name, slices)))
        shape = shape_of(spec)
        table = _keys_table(keys, shape.keys)
        wanted = keys_of(table, shape.keys.names, shape.keys)
        return self._at_one_epoch(lambda: self._find(spec, shape, wanted))

    @property
    def schema(self) -> pa.Schema:
        """The columns of what it fires, and of what `now` gives; none until the first rows tell their types."""
        spec = self._current()
        if spec.value is None:
            return pa.schema([])
        return _results(shape_of(spec), self.progress().time_kind)

    def _at_one_epoch(self, read: Callable[[], pa.Table]) -> pa.Table:
        """Slices make an epoch visible each at its own time: what was read counts if none was on its way meanwhile."""
        for _ in range(READS_MAX):
            before = self._settled()
            rows = read()
            after = self.progress()
            if after.seen == before.seen and not after.pending:
                return rows
        raise Unavailable(
            f"each of {READS_MAX} times that window {self.name!r} was read an epoch came in between",
            hint="read it for fewer keys, or have larger epochs",
            address="",
        )

    def _settled(self) -> ResidentProgress:
        """Where it stands once what is decided is visible in all slices."""
        runtime = self._client.runtime
        deadline = runtime.now() + VISIBLE_S_MAX
        while (progress := self.progress()).pending:
            if runtime.now() > deadline:
                raise Unavailable(
                    f"an epoch of window {self.name!r} is decided, and was not visible everywhere within {VISIBLE_S_MAX:g} s",
                    hint="a container may be away, or the epoch is very large: read it again later",
                    address="",
                )
            runtime.sleep(LOOK_S)
        return progress

    def _find(self, spec: WindowSpec, shape: WindowShape, keys: Keys) -> pa.Table:
        asked = pa.schema([shape.staged.field(0)])
        schema = _results(shape, self.progress().time_kind)
        batches = self._client.ask_each(FindOpen(spec.name), asked, keys)
        return pa.Table.from_batches(batches, schema)

    def progress(self) -> ResidentProgress:
        """How far each source has come (`updaters`), and how many rows were late. `update` is the window's watermark."""
        return self._client.call(AskProgress(self._spec.name))

    def explain(self) -> str:
        """Which store its windows are in, and why."""
        return explain(self._current())

    def _current(self) -> WindowSpec:
        """Its types may have become known since."""
        if self._spec.value is None:
            self._spec = self._client.specs(WindowSpec)[self._spec.name]
        return self._spec


def _results(shape: WindowShape, time_kind: str) -> pa.Schema:
    return WindowStore(shape, lambda *_: None).schema(time_kind)  # type: ignore[arg-type]


def _keys_table(keys: Any, schema: pa.Schema) -> pa.Table:
    if isinstance(keys, pa.Table | pa.RecordBatch):
        return as_table(keys)
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise BadOption(
            f"keys={keys!r} are no keys", hint="a list of keys, or a table with their columns", option="keys"
        )
    if not keys:
        return schema.empty_table()
    rows = [key if len(schema) > 1 else (key,) for key in keys]
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != len(schema):
            raise BadOption(
                f"{row!r} is no key", hint=f"a key is a tuple of {', '.join(schema.names)}", option="keys"
            )
    try:
        # As they are: what does not fit the key's types is refused where columns are read, not rounded here.
        columns = [pa.array(list(column)) for column in zip(*rows, strict=True)]
    except (pa.ArrowException, OverflowError) as error:
        raise BadOption(
            f"keys={keys!r} are no keys: {error}", hint="of one type each", option="keys"
        ) from None
    return pa.table(columns, schema.names)
