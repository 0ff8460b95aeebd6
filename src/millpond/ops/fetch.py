"""The Fetch operator: asks a State about every row, as of the row's own time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, RowsWaiting
from millpond.ops.asking import Asking
from millpond.ops.columns import Names, as_table
from millpond.rules import FetchRule
from millpond.times import Progress, TimeKind, format_time
from millpond.wire.messages import AskProgress, StateProgress, StateSpec, check_name


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
        self._asking = Asking(spec, key, at, between, into, rule)
        self.name = None if name is None else check_name(name, "the fetcher")
        self._client = client

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
        asking = self._asking
        table = as_table(table)
        asking.check_into(table.column_names)
        progress: StateProgress = self._client.call(AskProgress(asking.state))
        questions = asking.questions(table, progress.time_kind)
        questions.check_not_below(progress.fetch)
        ready = questions.ready(progress.update)
        missing = table.num_rows - len(ready)
        if missing == 0:
            return asking.with_answers(table, asking.ask(self._client, questions))
        if waiting == "error":
            raise rows_waiting(missing, table.num_rows, progress.update, questions.kind)
        columns = asking.ask(self._client, questions.take(ready))
        if waiting == "drop":
            return asking.with_answers(table.take(pa.array(ready)), columns)
        return asking.with_answers(table, [_spread(column, ready, table.num_rows) for column in columns])


def rows_waiting(missing: int, rows: int, update_progress: Progress, kind: TimeKind) -> RowsWaiting:
    return RowsWaiting(
        f"{missing:,} of {rows:,} rows ask for a time that U = {format_time(update_progress, kind)}"
        " has not passed yet",
        hint='wait for the updaters, call finish() on those that are done, or pass waiting="null" or "drop"',
        rows=missing,
        update_progress=update_progress,
    )


def _spread(column: pa.ChunkedArray, ready: npt.NDArray[np.int64], rows: int) -> pa.ChunkedArray:
    """Answers at the positions of their rows, null elsewhere."""
    places = np.full(rows, -1, dtype=np.int64)
    places[ready] = np.arange(len(ready))
    return column.take(pa.array(places, mask=places < 0))
