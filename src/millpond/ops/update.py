"""The Update operator: adds the rows of an epoch to a State, exactly once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.client.client import Client
from millpond.ops import frames
from millpond.ops.columns import Names, as_table
from millpond.ops.committing import Epoch, Staged, commit
from millpond.ops.intake import Intake, Part
from millpond.wire.messages import LOCAL_QUERY, EpochCommitted, EpochPlan, Register, StateSpec

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
    ) -> None:
        self._intake = Intake(spec, key, at, value, delay, late, name, seq)
        self._client = client
        self.name = name
        client.call(Register(spec.name, name, "updater"))

    def __call__(self, rows: pa.Table | DataFrame, epoch: int) -> EpochCommitted:
        """Commits one epoch. When it returns, the rows are durable and U has moved; a replay changes nothing."""
        if frames.is_frame(rows):
            query = frames.query_of(rows) or LOCAL_QUERY
            if isinstance(epoch, int) and epoch < 0:
                # A drain comes once, between two epochs of its query: it counts as a query of its own.
                query, epoch = f"{query}.{-epoch}", 0
            staged = frames.Staging(self._client, self._intake, rows)
            return self._commit(epoch, query, lambda plan: Staged(staged(plan, epoch, query), staged.kind))
        return self.commit(as_table(rows), epoch, LOCAL_QUERY)

    def commit(self, table: pa.Table, epoch: int, query: str) -> EpochCommitted:
        """Commits an Arrow table as an epoch of a query of that name: epochs are numbered for each query."""
        return self._commit(epoch, query, lambda plan: self._stage(table, plan, epoch, query))

    def _stage(self, table: pa.Table, plan: EpochPlan, epoch: int, query: str) -> Staged:
        receipt, kind = self._intake.stage(self._client, table, plan, Part(query, epoch, 0))
        return Staged([receipt], kind)

    def _commit(self, epoch: int, query: str, stage: Callable[[EpochPlan], Staged]) -> EpochCommitted:
        intake = self._intake
        return commit(self._client, Epoch(intake.state, self.name, query, epoch), stage, intake.delay)
