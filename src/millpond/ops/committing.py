"""How an epoch is committed: staged, decided, and staged again if a container lost what it held."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, EpochOutOfOrder, StageLost
from millpond.ops import frames
from millpond.ops.columns import as_table, time_kind_in
from millpond.ops.intake import Part, Stager
from millpond.times import TIME_MAX
from millpond.wire.base import DRAINS_MAX, LOCAL_QUERY, KindOfTime, Turn
from millpond.wire.epochs import BeginEpoch, CommitEpoch, EpochCommitted, EpochPlan, History, Receipt
from millpond.wire.specs import Work

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAGE_ATTEMPTS = 20
STAGE_PAUSE_S = (0.02, 1.0)
Planned = Callable[[EpochPlan, list[Receipt]], Work]
"""What an epoch brings, where it depends on the rows that were staged."""


def turn_of(number: object) -> Turn:
    """The turn that a sink knows by that number; EpochOutOfOrder if it is none."""
    if not isinstance(number, int) or isinstance(number, bool) or not -TIME_MAX <= number <= TIME_MAX:
        raise EpochOutOfOrder(
            f"{number!r} is not an epoch",
            hint="epochs are numbered 0, 1, 2, ...",
            epoch=number,
            expected=None,
        )
    if number < 0 and -number % DRAINS_MAX == 0:
        raise EpochOutOfOrder(
            f"{number} is not an epoch", hint="epochs are numbered 0, 1, 2, ...", epoch=number, expected=None
        )
    return Turn.of(number)


def check_history(history: str) -> History:
    choices: tuple[History, ...] = ("continue", "new", "shared")
    for choice in choices:
        if history == choice:
            return choice
    raise BadOption(
        f"history={history!r} is not a choice",
        hint='"continue" (the query that began goes on), "new" (another begins), or "shared" (several at once)',
        option="history",
    )


def check_sink(function: object) -> None:
    if not callable(function):
        raise BadOption(
            f"to({function!r}): {function!r} is not a function",
            hint="def sink(frame, epoch): ...",
            option="to",
        )


def commit(
    client: Client,
    stager: Stager,
    rows: pa.Table | DataFrame,
    epoch: int,
    work: Work | Planned,
    history: History,
    query: str | None = None,
    *,
    early: bool = False,
) -> EpochCommitted:
    """Commits the rows of an epoch of a query: that of the DataFrame, or the one that is named."""
    turn = turn_of(epoch)
    if frames.is_frame(rows):
        query = query or frames.query_of(rows) or LOCAL_QUERY
        staging = frames.Staging(client, stager, rows, query, turn)
        kind = staging.time_kind
        return commit_staged(client, stager, query, turn, staging, kind, work, history, early=early)
    table, part = as_table(rows), Part(query or LOCAL_QUERY, turn, 0)
    kind = "" if stager.at is None else time_kind_in(table, stager.at)

    def stage(plan: EpochPlan) -> list[Receipt]:
        return [stager.stage(client, table, plan, part)]

    return commit_staged(client, stager, part.query, turn, stage, kind, work, history, early=early)


def commit_staged(
    client: Client,
    stager: Stager,
    query: str,
    turn: Turn,
    stage: Callable[[EpochPlan], list[Receipt]],
    kind: KindOfTime,
    work: Work | Planned,
    history: History,
    owes: bool = False,
    early: bool = False,
    brings_rows: bool = True,
) -> EpochCommitted:
    """Has the rows staged, whose times are of that kind, and commits; again if a container lost what it held.

    `stage` gives the receipts that are to count. One that `owes` its outputs lets no other follow until they are handed over.
    With `early` it returns when the epoch is decided; it is visible soon, and before anybody hears of it in U.
    """
    name = stager.resident, stager.name, query, turn, history
    pause, longest = STAGE_PAUSE_S
    for attempt in range(1, STAGE_ATTEMPTS + 1):
        plan = client.call(BeginEpoch(*name, brings_rows=brings_rows))
        receipts = stage(plan)
        has_rows = any(receipt.rows or receipt.late for receipt in receipts)
        try:
            return client.call(
                CommitEpoch(
                    *name,
                    delay=stager.delay(kind),
                    late_below=plan.late_below,
                    time_kind=kind if has_rows else "",
                    receipts=receipts,
                    work=work(plan, receipts) if callable(work) else work,
                    owes=owes,
                    others=plan.others if callable(work) else -math.inf,
                    early=early,
                )
            )
        except StageLost:
            if attempt == STAGE_ATTEMPTS:
                raise
            client.runtime.sleep(pause)
            pause = min(2 * pause, longest)
    raise AssertionError("unreachable: the last attempt returns or raises")
