"""How an epoch is committed: staged, decided, and staged again if a container lost what it held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, EpochOutOfOrder, StageLost
from millpond.ops.columns import time_kind_in
from millpond.ops.intake import Part, Stager
from millpond.times import TIME_MAX, TimeKind
from millpond.wire.base import DRAINS_MAX, Turn
from millpond.wire.epochs import BeginEpoch, CommitEpoch, EpochCommitted, EpochPlan, History, Receipt
from millpond.wire.specs import Work

STAGE_ATTEMPTS = 20
STAGE_PAUSE_S = (0.02, 1.0)


class StagedEpoch(NamedTuple):
    """What was staged for an epoch: the receipts that are to count, and the kind of time the rows have."""

    receipts: Sequence[Receipt]
    kind: TimeKind


class EpochName(NamedTuple):
    """A turn of an operator at a resident, in a query."""

    resident: str
    operator: str
    query: str
    turn: Turn


def stage_table(
    client: Client, intake: Stager, table: pa.Table, plan: EpochPlan, query: str, turn: Turn
) -> StagedEpoch:
    """Stages an Arrow table, as the one partition of its epoch."""
    receipt = intake.stage(client, table, plan, Part(query, turn, 0))
    return StagedEpoch([receipt], time_kind_in(table, intake.at))


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


def commit(
    client: Client,
    epoch: EpochName,
    stage: Callable[[EpochPlan], StagedEpoch],
    delay: Callable[[TimeKind], int],
    work: Work,
    history: History,
) -> EpochCommitted:
    """Stages and commits, and again if a container lost what was staged there."""
    pause, longest = STAGE_PAUSE_S
    for attempt in range(1, STAGE_ATTEMPTS + 1):
        plan = client.call(BeginEpoch(*epoch, history))
        staged = stage(plan)
        try:
            return client.call(
                CommitEpoch(
                    *epoch,
                    history,
                    delay=delay(staged.kind),
                    late_below=plan.late_below,
                    time_kind=staged.kind if any(r.rows or r.late for r in staged.receipts) else "",
                    receipts=list(staged.receipts),
                    work=work,
                )
            )
        except StageLost:
            if attempt == STAGE_ATTEMPTS:
                raise
            client.runtime.sleep(pause)
            pause = min(2 * pause, longest)
    raise AssertionError("unreachable: the last attempt returns or raises")
