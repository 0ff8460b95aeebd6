"""The Update operator: adds the rows of an epoch to a State, exactly once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.client.client import Client
from millpond.ops import frames
from millpond.ops.columns import Names, as_table
from millpond.ops.committing import EpochName, StagedEpoch, check_history, commit, stage_table, turn_of
from millpond.ops.intake import Intake
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import EpochCommitted, EpochPlan
from millpond.wire.house import Register
from millpond.wire.specs import RowsWork, StateSpec

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
    ) -> None:
        self._intake = Intake(spec, key, at, value, delay, late, name, seq)
        self._history = check_history(history)
        self._client = client
        self.name = name
        self.state = spec.name
        client.call(Register(spec.name, name, "updater"))

    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> EpochCommitted:
        """Commits one epoch. When it returns, the rows are durable and U has moved; a replay changes nothing."""
        turn = turn_of(epoch)
        if frames.is_frame(rows):
            query = frames.query_of(rows) or LOCAL_QUERY
            staging = frames.Staging(self._client, self._intake, rows)
            return self._commit(
                turn, query, lambda plan: StagedEpoch(staging(plan, turn, query), staging.time_kind)
            )
        return self.commit(as_table(rows), epoch, LOCAL_QUERY)

    def commit(self, table: pa.Table, epoch: int, query: str) -> EpochCommitted:
        """Commits an Arrow table as an epoch of a query of that name: epochs are numbered for each query."""
        turn = turn_of(epoch)
        return self._commit(turn, query, lambda plan: self._stage(table, plan, turn, query))

    def _stage(self, table: pa.Table, plan: EpochPlan, turn: Turn, query: str) -> StagedEpoch:
        return stage_table(self._client, self._intake, table, plan, query, turn)

    def _commit(self, turn: Turn, query: str, stage: Callable[[EpochPlan], StagedEpoch]) -> EpochCommitted:
        intake = self._intake
        name = EpochName(intake.state, self.name, query, turn)
        return commit(self._client, name, stage, intake.delay, RowsWork(), self._history)
