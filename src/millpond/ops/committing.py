"""How an epoch is committed: staged, decided, and staged again if a container lost what it held."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from millpond.client.client import Client
from millpond.errors import EpochOutOfOrder, StageLost
from millpond.times import TIME_MAX, TimeKind
from millpond.wire.messages import (
    BeginEpoch,
    CommitEpoch,
    EpochCommitted,
    EpochPlan,
    Receipt,
    Transactions,
)

STAGE_ATTEMPTS = 20
STAGE_PAUSE_S = 0.05


class Staged(NamedTuple):
    """What was staged for an epoch: the receipts that are to count, and the kind of time the rows have."""

    receipts: Sequence[Receipt]
    kind: TimeKind


class Epoch(NamedTuple):
    """An epoch of an updater of a State, or of transactions on a group."""

    state: str
    updater: str
    query: str
    number: int


def commit(
    client: Client,
    epoch: Epoch,
    stage: Callable[[EpochPlan], Staged],
    delay: Callable[[TimeKind], int],
    transactions: Transactions | None = None,
) -> EpochCommitted:
    """Stages and commits, and again if a container lost what was staged there."""
    number = epoch.number
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= TIME_MAX:
        raise EpochOutOfOrder(
            f"{number!r} is not an epoch",
            hint="epochs are numbered 0, 1, 2, ...",
            epoch=number,
            expected=None,
        )
    for attempt in range(STAGE_ATTEMPTS):
        plan: EpochPlan = client.call(BeginEpoch(*epoch))
        staged = stage(plan)
        try:
            committed: EpochCommitted = client.call(
                CommitEpoch(
                    *epoch,
                    delay=delay(staged.kind),
                    late_below=plan.late_below,
                    time_kind=staged.kind if any(r.rows or r.late for r in staged.receipts) else "",
                    receipts=list(staged.receipts),
                    transactions=transactions,
                )
            )
            return committed
        except StageLost:
            if attempt + 1 == STAGE_ATTEMPTS:
                raise
            time.sleep(STAGE_PAUSE_S)
    raise AssertionError("unreachable: the last attempt returns or raises")
