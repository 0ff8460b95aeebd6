"""What fetchers see and leave waiting, turn by turn. No I/O; a function that refuses raises."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec.structs import replace

from millpond.coordinator.catalogue import progressed, resident_of, unknown_operator, with_fetcher
from millpond.coordinator.records import (
    ENDED_REMEMBERED,
    AskingRecord,
    FetcherRecord,
    PinRecord,
    PondRecord,
    ResidentRecord,
)
from millpond.coordinator.updates import check_first, query_ended
from millpond.errors import EpochChanged, EpochOutOfOrder
from millpond.times import Progress
from millpond.wire.base import DRAINS_MAX, Turn
from millpond.wire.questions import Answered, AskPending, Drain, HoldsBack, Pending, Pin, Pinned


def pin(pond: PondRecord, message: Pin, update_progress: Progress) -> tuple[PondRecord, Pinned]:
    """Fixes U for a turn of a fetcher. `update_progress` is U as it is published now."""
    resident = resident_of(pond, message.resident)
    fetcher = _fetcher_of(resident, message.fetcher)
    if message.query in fetcher.ended and message.turn.drain == 0:
        raise query_ended(message.resident, message.fetcher, message.query)
    asking = fetcher.queries.get(message.query)
    known = next((p for p in asking.pins if p.turn == message.turn), None) if asking is not None else None
    if known is None:
        if asking is None:
            check_first(
                message.resident,
                message.fetcher,
                [query for query in fetcher.queries if query not in fetcher.ended],
                message.query,
                message.turn,
                message.history,
            )
            asking = AskingRecord()
            if message.history == "new":
                fetcher = _with_queries_ended(fetcher)
        _check_next(asking.pins, message)
        known = PinRecord(
            message.turn, update_progress, max(asking.watermark, fetcher.reported, fetcher.progress)
        )
        asking = replace(asking, pins=_remembered((*asking.pins, known)))
        fetcher = progressed(replace(fetcher, queries={**fetcher.queries, message.query: asking}))
        pond = with_fetcher(pond, resident, message.fetcher, fetcher)
    assert asking is not None
    at = asking.pins.index(known)
    before = asking.pins[at - 1] if at > 0 else None
    return pond, Pinned(
        update=known.update,
        late_below=known.late_below,
        time_kind=resident.time_kind,
        previous=before.turn if before is not None and before.waiting else None,
        token=before.token if before is not None else "",
        oldest=asking.pins[0].turn,
    )


def seen_before(pond: PondRecord, message: Pin, turn: Turn) -> Progress:
    """U as that turn of the same fetcher and query saw it."""
    asking = pond.residents[message.resident].fetchers[message.fetcher].queries[message.query]
    return next((pin.update for pin in asking.pins if pin.turn == turn), -math.inf)


def _with_queries_ended(fetcher: FetcherRecord) -> FetcherRecord:
    """The fetcher with all its queries ended. Rows of theirs that wait are not lost: they can be drained."""
    ended, left = dict(fetcher.ended), {}
    for query, asking in fetcher.queries.items():
        pins = asking.pins
        if pins and not pins[-1].answered and not pins[-1].turn.drain:
            pins = pins[:-1]  # an epoch that will not be finished any more
        ended.setdefault(query, asking.pins[-1].turn)
        if pins and (pins[-1].waiting or not pins[-1].answered):
            left[query] = replace(asking, pins=pins)
    for query in [query for query in ended if query not in left][: max(0, len(ended) - ENDED_REMEMBERED)]:
        del ended[query]
    return replace(fetcher, queries=left, ended=ended)


def _remembered(pins: tuple[PinRecord, ...]) -> tuple[PinRecord, ...]:
    """The last two epochs, and of the drains after each the last two.

    The last epoch may run again, and needs what was before it; a drain that was interrupted needs what the last one left.
    """
    epochs = [at for at, record in enumerate(pins) if record.turn.drain == 0]
    pins = pins[epochs[-2] :] if len(epochs) > 1 else pins
    return tuple(
        record
        for at, record in enumerate(pins)
        if record.turn.drain == 0 or not any(two.turn.epoch == record.turn.epoch for two in pins[at + 2 :])
    )


def _check_next(pins: tuple[PinRecord, ...], message: Pin) -> None:
    """Turns are consecutive, and one that was begun is answered before the next: what waits there must not be lost."""
    if not pins and message.turn.drain == 0:
        return
    last = pins[-1] if pins else None
    if last is not None and not last.answered:
        what, how = (
            ("a drain", "call drain() again") if last.turn.drain else ("an epoch", "start its query again")
        )
        raise EpochOutOfOrder(
            f"{what} of fetcher {message.fetcher!r} was interrupted: {last.turn}",
            hint=f"{how} first: it goes on where it stopped; a sink that fails must let its error out",
            epoch=message.turn.epoch,
            expected=last.turn.epoch,
        )
    if message.turn.drain >= DRAINS_MAX - 1:
        raise EpochOutOfOrder(
            f"epoch {message.turn.epoch} was drained {message.turn.drain - 1} times",
            hint="let the query go on before the next drain",
            epoch=message.turn.epoch,
            expected=message.turn.epoch + 1,
        )
    if last is None or message.turn not in (last.turn.next_epoch, last.turn.next_drain):
        raise EpochOutOfOrder(
            f"epoch {message.turn} of fetcher {message.fetcher!r} follows {last.turn if last else 'none'}",
            hint="epochs are consecutive: one that was refused keeps its number, an empty batch has one, too",
            epoch=message.turn.epoch,
            expected=last.turn.epoch + 1 if last else 0,
        )


def answered(pond: PondRecord, message: Answered) -> PondRecord:
    """What is left waiting of a turn, and how far the fetcher's progress may move with it."""
    resident = resident_of(pond, message.resident)
    fetcher = _fetcher_of(resident, message.fetcher)
    asking = fetcher.queries.get(message.query, AskingRecord())
    known = next((pin for pin in asking.pins if pin.turn == message.turn), None)
    if known is None:
        return pond  # a replay of a turn that is not remembered
    before = known.waiting, known.lowest, known.digest
    if known.answered and before != (message.waiting, message.lowest, message.digest):
        # It saw what it saw the first time, so the rows are others; those that wait would be lost.
        raise EpochChanged(
            f"epoch {message.turn} of fetcher {message.fetcher!r} came again with other rows",
            hint="give every fetch of a State a name of its own, and a source that replays the same rows",
            epoch=message.turn.epoch,
        )
    last = asking.pins[-1]
    if known is not last:
        return pond  # a replay of a turn before the last: what it left waiting was taken up since
    record = replace(
        last,
        answered=True,
        waiting=message.waiting,
        lowest=message.lowest,
        token=message.token,
        digest=message.digest,
    )
    watermark = max(asking.watermark, message.watermark if message.watermark is not None else -math.inf)
    queries = {**fetcher.queries, message.query: AskingRecord(watermark, (*asking.pins[:-1], record))}
    if message.query in fetcher.ended and not record.waiting:
        del queries[message.query]
    late = fetcher.late + (0 if last.answered else message.late)
    fetcher = replace(fetcher, late=late, queries=queries)
    return with_fetcher(pond, resident, message.fetcher, progressed(fetcher))


def pending(
    pond: PondRecord, message: AskPending, update_progress: Progress, held_by: Sequence[HoldsBack] = ()
) -> Pending:
    """`update_progress` is U as it is published now, `held_by` who holds it back."""
    fetcher = _fetcher_of(resident_of(pond, message.resident), message.fetcher)
    every = {query: asking.pins for query, asking in fetcher.queries.items() if asking.pins}
    # Of each query the last turn that was answered: what it left waiting waits, also while the next one runs.
    newest = [done[-1] for pins in every.values() if (done := [pin for pin in pins if pin.answered])]
    return Pending(
        rows=sum(record.waiting for record in newest),
        since=min((record.lowest for record in newest if record.lowest is not None), default=None),
        late=fetcher.late,
        drains={query: drain for query, pins in every.items() if (drain := _drain(pins, update_progress))},
        unfinished=sorted(
            query for query, pins in every.items() if not pins[-1].answered and not pins[-1].turn.drain
        ),
        turns={query: pins[-1].turn for query, pins in every.items()},
        held_by=list(held_by),
    )


def _drain(pins: tuple[PinRecord, ...], update_progress: Progress) -> Drain | None:
    """The drain in which the waiting rows of a query can be answered."""
    last = pins[-1]
    if last.turn.drain and not last.answered:
        return Drain(last.turn, pins[-2].turn, pins[-2].token, begun=True)
    if last.answered and last.waiting and update_progress > last.update:
        pays = last.turn.drain < DRAINS_MAX - 2 and (last.lowest is None or update_progress > last.lowest)
        return Drain(last.turn.next_drain, last.turn, last.token, pays=pays)
    return None


def _fetcher_of(resident: ResidentRecord, name: str) -> FetcherRecord:
    try:
        return resident.fetchers[name]
    except KeyError:
        raise unknown_operator(resident, name, "fetcher", resident.fetchers) from None
