"""The Fetch operator: asks a State about every row, as of the row's own time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, RowsWaiting
from millpond.ops.columns import Names, as_names, as_table, check_column_name, keys_of, times_of
from millpond.rules import FetchRule
from millpond.schema import key_kind, parse_ddl
from millpond.stores.versioned import result_schema
from millpond.times import Progress, TimeKind, below_fetch_progress, format_time
from millpond.wire.messages import AskProgress, StateProgress, StateSpec, check_name
from millpond.wire.messages import Fetch as FetchMessage


class Fetch:
    """Asks for `at` (the newest value with time <= at) or `between` (values with low < time <= high)."""

    def __init__(
        self,
        client: Client,
        spec: StateSpec,
        *,
        key: Names,
        at: str | None,
        between: tuple[str, str] | None,
        into: Names | None,
        rule: FetchRule,
        name: str | None,
    ) -> None:
        if (at is None) == (between is None):
            raise BadOption(
                "a fetch takes either at= or between=",
                hint='for example at="ts", or between=("from", "until")',
                option="at",
            )
        if between is not None and not _is_pair(between):
            raise BadOption(
                f"between={between!r} is not a pair of columns",
                hint='for example between=("from", "until")',
                option="between",
            )
        self.name = None if name is None else check_name(name, "the fetcher")
        self._client = client
        self._spec = spec
        self._key_schema = parse_ddl(spec.key, "key")
        self._key_type = pa.int64() if key_kind(self._key_schema) == "i64" else pa.binary()
        self._key = as_names(key, self._key_schema, "key")
        self._rule = rule
        self._answers = result_schema(parse_ddl(spec.value, "value"), rule.name)
        self._into = as_names(list(self._answers.names) if into is None else into, self._answers, "into")
        if len(set(self._into)) < len(self._into):
            raise BadOption(
                f"into={into!r} names a column twice",
                hint="give each answer a name of its own",
                option="into",
            )
        self._low: str | None = None if between is None else between[0]
        self._high = check_column_name(at, "at") if between is None else between[1]

    def now(self, table: pa.Table, waiting: str = "error") -> pa.Table:
        """The table with its answers.

        Rows that U has not passed yet have no right answer so far: they are an error that counts them, or
        are answered by null (`waiting="null"`), or left out (`waiting="drop"`). Registers no fetcher, so that
        F does not move.
        """
        if waiting not in ("error", "null", "drop"):
            raise BadOption(
                f"waiting={waiting!r} is not a choice",
                hint='waiting="error", waiting="null" or waiting="drop"',
                option="waiting",
            )
        table = as_table(table)
        for name in self._into:
            if name in table.column_names:
                raise BadOption(
                    f"the table has a column {name!r} already",
                    hint="choose another name for into=",
                    option="into",
                )
        progress: StateProgress = self._client.call(AskProgress(self._spec.name))
        highs, kind = times_of(table, self._high, progress.time_kind)
        lows = None if self._low is None else times_of(table, self._low, kind)[0]
        keys = keys_of(table, self._key, self._key_schema)
        _check_not_below(highs, lows, progress.fetch, kind)
        ready = _ready(highs, progress.update)
        missing = len(highs) - len(ready)
        if missing and waiting == "error":
            raise RowsWaiting(
                f"{missing:,} of {len(highs):,} rows ask for a time that U = {format_time(progress.update, kind)}"
                " has not passed yet",
                hint='wait for the updaters, call finish() on those that are done, or pass waiting="null" or "drop"',
                rows=missing,
                update_progress=progress.update,
            )
        if missing:
            keys, highs = keys.take(ready), highs[ready]
            lows = None if lows is None else lows[ready]
        columns = self._client.fetch(
            FetchMessage(self._spec.name, self._rule.name), self._key_type, keys, lows, highs, self._answers
        )
        if missing and waiting == "drop":
            table = table.take(pa.array(ready))
        elif missing:
            columns = [_spread(column, ready, table.num_rows) for column in columns]
        for name, column in zip(self._into, columns, strict=True):
            table = table.append_column(name, column)
        return table


def _is_pair(between: object) -> bool:
    return (
        isinstance(between, tuple | list)
        and len(between) == 2
        and all(isinstance(name, str) for name in between)
    )


def _ready(highs: npt.NDArray[np.int64], update_progress: Progress) -> npt.NDArray[np.int64]:
    """Positions of the rows that can be answered: those with time < U."""
    if update_progress == math.inf:
        return np.arange(len(highs))
    if update_progress == -math.inf:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(highs < update_progress)


def _check_not_below(
    highs: npt.NDArray[np.int64], lows: npt.NDArray[np.int64] | None, fetch_progress: Progress, kind: TimeKind
) -> None:
    if len(highs) == 0:
        return
    lowest = int(highs.min()) if lows is None else int(lows.min()) + 1
    if lowest < fetch_progress:
        raise below_fetch_progress(lowest, fetch_progress, kind)


def _spread(column: pa.ChunkedArray, ready: npt.NDArray[np.int64], rows: int) -> pa.ChunkedArray:
    """Answers at the positions of their rows, null elsewhere."""
    places = np.full(rows, -1, dtype=np.int64)
    places[ready] = np.arange(len(ready))
    return column.take(pa.array(places, mask=places < 0))
