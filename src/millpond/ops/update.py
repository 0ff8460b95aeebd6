"""The Update operator: adds the rows of an epoch to a State, exactly once."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import EpochOutOfOrder, StageLost
from millpond.ops import frames
from millpond.ops.columns import Names, as_table
from millpond.ops.intake import Intake
from millpond.times import TIME_MAX, TimeKind
from millpond.wire.messages import (
    LOCAL_QUERY,
    BeginEpoch,
    CommitEpoch,
    EpochCommitted,
    EpochPlan,
    Receipt,
    Register,
    Stage,
    StateSpec,
    writer_id,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAGE_ATTEMPTS = 20
STAGE_PAUSE_S = 0.05


class Staging(NamedTuple):
    """What was staged for an epoch: the receipts that are to count, and the kind of time the rows have."""

    receipts: list[Receipt]
    kind: TimeKind


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
            return self._commit(epoch, query, lambda plan: Staging(staged(plan, epoch, query), staged.kind))
        return self.commit(as_table(rows), epoch, LOCAL_QUERY)

    def commit(self, table: pa.Table, epoch: int, query: str) -> EpochCommitted:
        """Commits an Arrow table as an epoch of a query of that name: epochs are numbered for each query."""
        return self._commit(epoch, query, lambda plan: self._stage(table, plan, epoch, query))

    def _commit(self, epoch: int, query: str, stage: Callable[[EpochPlan], Staging]) -> EpochCommitted:
        """Stages and commits, and again if a container lost what was staged there."""
        if not isinstance(epoch, int) or isinstance(epoch, bool) or not 0 <= epoch <= TIME_MAX:
            raise EpochOutOfOrder(
                f"{epoch!r} is not an epoch",
                hint="epochs are numbered 0, 1, 2, ...",
                epoch=epoch,
                expected=None,
            )
        intake = self._intake
        for attempt in range(STAGE_ATTEMPTS):
            plan: EpochPlan = self._client.call(BeginEpoch(intake.state, self.name, query, epoch))
            staging = stage(plan)
            try:
                committed: EpochCommitted = self._client.call(
                    CommitEpoch(
                        state=intake.state,
                        updater=self.name,
                        query=query,
                        epoch=epoch,
                        delay=intake.delay(staging.kind),
                        late_below=plan.late_below,
                        time_kind=staging.kind if any(r.rows or r.late for r in staging.receipts) else "",
                        receipts=staging.receipts,
                    )
                )
                return committed
            except StageLost:
                if attempt + 1 == STAGE_ATTEMPTS:
                    raise
                time.sleep(STAGE_PAUSE_S)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _stage(self, table: pa.Table, plan: EpochPlan, epoch: int, query: str) -> Staging:
        intake = self._intake
        rows = intake.rows(table, plan)
        if plan.replayed:
            receipt = self._client.digest(0, rows.keys, rows.times, rows.values, rows.late)
        else:
            message = Stage(
                state=intake.state,
                writer=writer_id(self.name, query),
                epoch=epoch,
                partition=0,
                attempt=random.getrandbits(62),
            )
            receipt = self._client.stage(
                message, intake.rows_schema, rows.keys, rows.times, rows.values, rows.late
            )
        return Staging([receipt], rows.kind)
