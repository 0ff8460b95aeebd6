"""The Join operator: takes the rows of an epoch of one side, and gives the pairs that came of it, exactly once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta

import pyarrow as pa

from millpond.client.client import Client
from millpond.ops.columns import Names, as_names
from millpond.ops.row_intake import JoinIntake
from millpond.ops.window import Delay, FiringSource, LateRows
from millpond.ops.window_intake import columns_of
from millpond.stores.windows.join_shape import JoinShape
from millpond.times import Progress
from millpond.wire.epochs import EpochPlan
from millpond.wire.joins import JoinSpec, Side
from millpond.wire.questions import Drain, Report
from millpond.wire.windows import WindowWork


class JoinSource(FiringSource):
    """One side of a join: a callable `(rows, epoch)` that gives the pairs that the epoch let out; `.to` for `foreachBatch`.

    The watermark of a join is the lower of those of its sides.
    """

    def __init__(
        self,
        client: Client,
        spec: JoinSpec,
        side: Side,
        *,
        key: Names,
        at: str,
        value: Names | None,
        delay: Delay,
        late: str | LateRows,
        idle: str | timedelta | None,
        history: str,
    ) -> None:
        self._spec = spec
        self._side: Side = side
        self._shape = JoinShape(spec)
        self._key = as_names(key, self._shape.keys, "key")
        self._value = columns_of(value, self._shape.values[side].names)
        super().__init__(client, spec, at=at, delay=delay, late=late, idle=idle, name=side, history=history)

    def finish(self, query: str | None = None) -> pa.Table | None:
        """This side has ended: what waits for it alone comes out. Exactly once, as any epoch; rows that come later are refused.

        Windows that the other side may still have rows for stay open until that has come so far, or has finished, too.
        The results go to the function of `to`, under a number of their own, below zero; where there is none, they come back
        as an Arrow table.
        """
        return super().finish(query)

    def rest(self) -> None:
        self._client.call(Report(self._resident, self.name, update=math.inf, fetch=None))

    @property
    def _is_known(self) -> bool:
        return True

    def _intake(self, schema: pa.Schema | None) -> JoinIntake:
        late = "drop" if callable(self._late) else self._late
        delay = 0 if schema is None else self._delay
        return JoinIntake(self._spec, self._side, self._key, self._at, self._value, delay, late)

    def _results(self, time_kind: str) -> pa.Schema:
        return self._shape.results(time_kind)

    def _staged(self) -> tuple[pa.Schema, int]:
        return self._shape.staged[self._side], 1

    def _work_without_rows(self, plan: EpochPlan, own: Progress, closes: bool) -> WindowWork:
        if plan.late_below < math.inf:
            return super()._work_without_rows(plan, own, closes)
        # It has finished, and is not waited for: how far the join is, the other side alone says.
        return WindowWork(watermark=plan.others, time_kind=plan.time_kind, closes=plan.others == math.inf)

    # Pairs of an interval join come out with their second row: there is nothing that a turn without rows could fire.

    def waits(self) -> bool:
        return self._spec.fires and super().waits()

    def due(self) -> Mapping[str, Drain]:
        return super().due() if self._spec.fires else {}
