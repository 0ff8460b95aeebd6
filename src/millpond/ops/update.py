"""The Update operator: adds the rows of an epoch to a State, exactly once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadDuration
from millpond.ops import frames
from millpond.ops.columns import Names
from millpond.ops.committing import check_history, commit
from millpond.ops.intake import Intake
from millpond.ops.interruptions import ends_with_query
from millpond.times import parse_duration
from millpond.wire.epochs import EpochCommitted
from millpond.wire.house import Register
from millpond.wire.states import RowsWork, StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Update:
    """A callable `(rows, epoch)` for `foreachBatch`, or for Arrow tables.

    Its updater exists, and holds U back, from the moment it is built.
    """

    def __init__(
        self,
        client: Client,
        spec: StateSpec,
        *,
        key: Names,
        at: str,
        value: Names,
        delay: str | int | timedelta,
        late: str,
        name: str,
        seq: str | None = None,
        history: str = "continue",
        idle: str | timedelta | None = None,
    ) -> None:
        self._intake = Intake(spec, key, at, value, delay, late, name, seq)
        self._history = check_history(history)
        self._client = client
        self.name = name
        self.state = spec.name
        client.call(Register(spec.name, name, "updater", None if idle is None else idle_seconds(idle)))

    @ends_with_query
    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> EpochCommitted:
        """Commits one epoch. When it returns, the rows are durable and will count; a replay changes nothing.

        Whoever asks for U from then on, as every fetch does, finds them there. On a stream they become visible while
        Spark plans its next batch.
        """
        early = frames.is_frame(rows) and frames.query_of(rows) is not None
        return commit(self._client, self._intake, rows, epoch, RowsWork(), self._history, early=early)

    def commit(self, table: pa.Table, epoch: int, query: str) -> EpochCommitted:
        """Commits an Arrow table as an epoch of a query of that name: epochs are numbered for each query."""
        return commit(self._client, self._intake, table, epoch, RowsWork(), self._history, query)


def idle_seconds(idle: str | timedelta) -> float:
    """How long an updater may be silent: time that passes on the clock, whatever the times of its rows are."""
    hint = 'give a duration, as in idle="30 seconds"'
    if not isinstance(idle, str | timedelta):
        raise BadDuration(f"idle={idle!r} is not a duration", hint=hint)
    seconds = parse_duration(idle) / 1_000_000
    if seconds <= 0:
        raise BadDuration(f"idle={idle!r} would leave the updater out at once", hint=hint)
    return seconds
