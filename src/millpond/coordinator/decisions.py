"""What the coordinator decides: functions from what it remembers and a request to what it remembers next.

No I/O, no clock, no threads. A function that refuses raises, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from millpond.coordinator.records import (
    EPOCHS_REMEMBERED,
    EpochRecord,
    FetcherRecord,
    PinRecord,
    PondRecord,
    QueryRecord,
    StateRecord,
    UpdaterRecord,
)
from millpond.errors import (
    BadOption,
    EpochChanged,
    EpochOutOfOrder,
    StageLost,
    UnknownState,
    UnknownUpdater,
    UpdaterFinished,
    WrongType,
    updater_finished,
)
from millpond.times import TIME_MIN, Progress
from millpond.wire.messages import (
    DRAINS_MAX,
    Answered,
    AskPending,
    BeginEpoch,
    CommitEpoch,
    EpochCommitted,
    EpochPlan,
    GroupSpec,
    Pending,
    Pin,
    Pinned,
    Register,
    Report,
    StateProgress,
)

_V = TypeVar("_V")


def place(slices: int, containers: int) -> list[int]:
    """The owner of each slice: contiguous runs of nearly equal length."""
    return [slice_id * containers // slices for slice_id in range(slices)]


def state_of(pond: PondRecord, name: str) -> StateRecord:
    try:
        return pond.states[name]
    except KeyError:
        known = ", ".join(sorted(pond.states)) or "none yet"
        raise UnknownState(
            f"there is no state {name!r} in this pond", hint=f"it holds: {known}", state=name
        ) from None


def register(pond: PondRecord, message: Register) -> PondRecord:
    """An updater begins where U stands, so that what is final stays final; a fetcher where F stands."""
    state = state_of(pond, message.state)
    if message.role == "updater":
        if message.name in state.updaters:
            return pond
        if state.update_progress == math.inf:
            raise UpdaterFinished(
                f"every updater of state {message.state!r} has finished: all its values are final",
                hint="use another state, or let new updaters register before the last one finishes",
                state=message.state,
                name=message.name,
            )
        return _with_updater(pond, state, message.name, UpdaterRecord(state.update_progress))
    if message.role == "fetcher":
        if message.name in state.fetchers:
            return pond
        return _with_fetcher(pond, state, message.name, FetcherRecord(state.fetch_progress))
    raise BadOption(f"a role is updater or fetcher, not {message.role!r}", option="role")


def begin_epoch(pond: PondRecord, message: BeginEpoch | CommitEpoch) -> EpochPlan:
    """How the rows of an epoch are to be treated, or why it cannot come now."""
    state = state_of(pond, message.state)
    updater = _updater_of(state, message.updater)
    if isinstance(message, CommitEpoch):
        _check_time_kind(state, message)
    epochs = updater.queries.get(message.query)
    replayed = False
    late_below = updater.watermark
    if epochs is not None and message.epoch <= epochs.last:
        known = _find(epochs, message.epoch)
        if message.epoch < epochs.first:
            raise EpochOutOfOrder(
                f"epoch {message.epoch} of updater {message.updater!r} comes before its first, {epochs.first}",
                hint="epochs of an updater are consecutive and never go back, except to be replayed",
                epoch=message.epoch,
                expected=epochs.last + 1,
            )
        replayed = True
        if known is not None:
            late_below = known.late_below
    elif epochs is not None and message.epoch > epochs.last + 1:
        raise EpochOutOfOrder(
            f"epoch {message.epoch} of updater {message.updater!r} follows {epochs.last}:"
            f" {epochs.last + 1} is missing",
            hint="epochs are consecutive; call the operator on empty batches, too",
            epoch=message.epoch,
            expected=epochs.last + 1,
        )
    elif updater.watermark == math.inf and isinstance(message, CommitEpoch) and _brings_rows(message):
        raise updater_finished(message.state, message.updater)
    return EpochPlan(late_below=late_below, time_kind=state.time_kind, replayed=replayed)


def _brings_rows(message: CommitEpoch) -> bool:
    return any(receipt.rows or receipt.late for receipt in message.receipts)


def replay_epoch(pond: PondRecord, message: CommitEpoch) -> EpochCommitted:
    """The answer to an epoch that was decided before: the same, if the rows are the same."""
    updater = _updater_of(state_of(pond, message.state), message.updater)
    known = _find(updater.queries[message.query], message.epoch)
    if known is None:
        # Too long ago to compare: the epoch is there, and stays as it is.
        return EpochCommitted(message.epoch, 0, 0, updater.watermark, replayed=True)
    if (digest_of(message), rows_of(message)) != (known.digest, known.rows):
        raise EpochChanged(
            f"epoch {message.epoch} of updater {message.updater!r} was committed with {known.rows} rows"
            f" and has now other content ({rows_of(message)} rows)",
            hint="nothing was changed: the source does not replay the same rows; new rows take the next epoch's number",
            epoch=message.epoch,
        )
    return EpochCommitted(message.epoch, known.rows, known.late, known.watermark, replayed=True)


def commit_epoch(pond: PondRecord, message: CommitEpoch) -> tuple[PondRecord, EpochCommitted]:
    """The epoch is decided: every container holds it. Moves the updater's watermark, and U with it."""
    state = state_of(pond, message.state)
    updater = _updater_of(state, message.updater)
    if message.late_below != updater.watermark:
        raise StageLost("the updater's progress was reported while the epoch was staged: stage it again")
    _check_time_kind(state, message)
    newest = max(
        (receipt.time_max for receipt in message.receipts if receipt.time_max is not None), default=None
    )
    watermark = updater.watermark
    if newest is not None and newest - message.delay >= TIME_MIN:
        watermark = max(watermark, newest - message.delay)
    late = sum(receipt.late for receipt in message.receipts)
    record = EpochRecord(
        message.epoch, digest_of(message), rows_of(message), late, updater.watermark, watermark
    )
    epochs = updater.queries.get(message.query)
    epochs = (
        QueryRecord(message.epoch, (record,))
        if epochs is None
        else replace(epochs, recent=(*epochs.recent, record)[-EPOCHS_REMEMBERED:])
    )
    updater = replace(
        updater,
        watermark=watermark,
        late=updater.late + late,
        queries={**updater.queries, message.query: epochs},
    )
    state = replace(state, time_kind=state.time_kind or message.time_kind)
    after = _with_updater(pond, state, message.updater, updater)
    return after, EpochCommitted(message.epoch, record.rows, late, watermark, replayed=False)


def report(pond: PondRecord, message: Report) -> PondRecord:
    """Explicit progress. It never goes back: a lower value changes nothing."""
    state = state_of(pond, message.state)
    if message.update is not None:
        updater = _updater_of(state, message.name)
        if message.update > updater.watermark:
            updater = replace(updater, watermark=message.update)
            pond = _with_updater(pond, state, message.name, updater)
            state = state_of(pond, message.state)
    if message.fetch is not None:
        fetcher = _fetcher_of(state, message.name)
        if message.fetch > fetcher.progress:
            pond = _with_fetcher(pond, state, message.name, replace(fetcher, progress=message.fetch))
    return pond


def pin(pond: PondRecord, message: Pin, update_progress: Progress) -> tuple[PondRecord, Pinned]:
    """Fixes U for an epoch of a fetcher. `update_progress` is U as it is published now."""
    state = state_of(pond, message.state)
    fetcher = _fetcher_of(state, message.fetcher)
    pins = fetcher.queries.get(message.query, ())
    wanted = (message.epoch, message.drain)
    known = next((record for record in pins if (record.epoch, record.drain) == wanted), None)
    if known is None:
        _check_next(pins, message)
        late_below = max(fetcher.watermark, fetcher.progress)
        known = PinRecord(message.epoch, update_progress, late_below, drain=message.drain)
        pins = _remembered((*pins, known))
        # The query that was heard of last comes last.
        others = {query: known for query, known in fetcher.queries.items() if query != message.query}
        fetcher = replace(fetcher, queries={**others, message.query: pins})
        pond = _with_fetcher(pond, state, message.fetcher, _progressed(fetcher))
    at = pins.index(known)
    before = pins[at - 1] if at > 0 else None
    return pond, Pinned(
        update=known.update,
        late_below=known.late_below,
        time_kind=state.time_kind,
        previous=(before.epoch, before.drain) if before is not None and before.waiting else None,
        oldest=(pins[0].epoch, pins[0].drain),
    )


def _remembered(pins: tuple[PinRecord, ...]) -> tuple[PinRecord, ...]:
    """The last two epochs and the drains after them: the last epoch may run again, and needs what was before it."""
    epochs = [at for at, record in enumerate(pins) if record.drain == 0]
    return pins[epochs[-2] :] if len(epochs) > 1 else pins


def _progressed(fetcher: FetcherRecord) -> FetcherRecord:
    """The fetcher with its progress: below its watermark, and below all that may still be asked.

    That is what waits, and what the last epoch would ask if it ran again. Of a query whose epochs are all answered, and
    that was followed by another, none is expected to: it may have been given up.
    """
    lowest = [fetcher.watermark]
    newest = next(reversed(fetcher.queries), None)
    for query, pins in fetcher.queries.items():
        last = max((at for at, record in enumerate(pins) if record.drain == 0), default=0)
        if query == newest or not pins[-1].answered:
            lowest += [record.late_below for record in pins[last:]]
            last = max(last - 1, 0)
        else:
            last = len(pins) - 1
        lowest += [record.lowest for record in pins[last:] if record.waiting and record.lowest is not None]
    return replace(fetcher, progress=max(fetcher.progress, min(lowest)))


def _check_next(pins: tuple[PinRecord, ...], message: Pin) -> None:
    """Epochs are consecutive, and so are the drains after one. A drain that was begun is ended first."""
    if not pins and message.drain == 0:
        return
    last = pins[-1] if pins else None
    if last is not None and not last.answered and (last.drain or message.drain):
        what, how = ("a drain", "call drain() again") if last.drain else ("an epoch", "start its query again")
        raise EpochOutOfOrder(
            f"{what} of fetcher {message.fetcher!r} was interrupted: {last.epoch}",
            hint=f"{how} first: it goes on where it stopped",
            epoch=message.epoch,
            expected=last.epoch,
        )
    if message.drain >= DRAINS_MAX:
        raise EpochOutOfOrder(
            f"epoch {message.epoch} was drained {message.drain - 1} times",
            hint="let the query go on before the next drain",
            epoch=message.epoch,
            expected=message.epoch + 1,
        )
    if last is None or (message.epoch, message.drain) not in (
        (last.epoch + 1, 0),
        (last.epoch, last.drain + 1),
    ):
        raise EpochOutOfOrder(
            f"epoch {message.epoch} of fetcher {message.fetcher!r} follows {last.epoch if last else 'none'}",
            hint="epochs are consecutive; call the operator on empty batches, too",
            epoch=message.epoch,
            expected=last.epoch + 1 if last else 0,
        )


def answered(pond: PondRecord, message: Answered) -> PondRecord:
    """What is left waiting of an epoch, and how far the fetcher's progress may move with it."""
    state = state_of(pond, message.state)
    fetcher = _fetcher_of(state, message.fetcher)
    pins = fetcher.queries.get(message.query, ())
    if not pins or (pins[-1].epoch, pins[-1].drain) != (message.epoch, message.drain):
        # A replay of an epoch before the last: what it left waiting was taken up since.
        return pond
    first_time = not pins[-1].answered
    record = replace(pins[-1], answered=True, waiting=message.waiting, lowest=message.lowest)
    queries = {**fetcher.queries, message.query: (*pins[:-1], record)}
    fetcher = replace(
        fetcher,
        watermark=max(fetcher.watermark, message.watermark if message.watermark is not None else -math.inf),
        late=fetcher.late + (message.late if first_time else 0),
        queries=queries,
    )
    return _with_fetcher(pond, state, message.fetcher, _progressed(fetcher))


def pending(pond: PondRecord, message: AskPending, update_progress: Progress) -> Pending:
    """`update_progress` is U as it is published now."""
    fetcher = _fetcher_of(state_of(pond, message.state), message.fetcher)
    newest = _last_answered(fetcher.queries)
    return Pending(
        rows=sum(record.waiting for record in newest),
        since=min((record.lowest for record in newest if record.lowest is not None), default=None),
        late=fetcher.late,
        drains={
            query: drain
            for query, pins in fetcher.queries.items()
            if (drain := _drain(pins, update_progress))
        },
        unfinished=sorted(
            query for query, pins in fetcher.queries.items() if not pins[-1].answered and not pins[-1].drain
        ),
    )


def _drain(
    pins: tuple[PinRecord, ...], update_progress: Progress
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The drain in which the waiting rows of a query can be answered, and the turn that left them."""
    last = pins[-1]
    if last.drain and not last.answered:
        return (last.epoch, last.drain), (pins[-2].epoch, pins[-2].drain)
    if last.answered and last.waiting and update_progress > last.update:
        return (last.epoch, last.drain + 1), (last.epoch, last.drain)
    return None


def progress(state: StateRecord, held_back: dict[str, Progress]) -> StateProgress:
    """U, F and whose they are. `held_back` are updaters whose last epoch is decided, but not yet visible."""
    updaters = {name: held_back.get(name, record.watermark) for name, record in state.updaters.items()}
    return StateProgress(
        update=min(state.update_progress, min(updaters.values(), default=-math.inf))
        if held_back
        else state.update_progress,
        fetch=state.fetch_progress,
        updaters=updaters,
        fetchers={name: record.progress for name, record in state.fetchers.items()},
        late={name: record.late for name, record in state.updaters.items()},
        time_kind=state.time_kind,
    )


def _check_time_kind(state: StateRecord, message: CommitEpoch) -> None:
    """Another updater's first rows may have come since the epoch began, and settled the kind."""
    wanted = None if isinstance(state.spec, GroupSpec) else state.spec.compact.span_kind
    if message.time_kind and wanted and message.time_kind != wanted:
        raise WrongType(
            f"values of state {message.state!r} live for a span of {wanted} time; the times are {message.time_kind}",
            hint='mp.ttl("2 days") is for timestamps, mp.ttl(1000) for logical time',
            column="",
            expected=wanted,
            actual=message.time_kind,
        )
    if message.time_kind and state.time_kind and message.time_kind != state.time_kind:
        raise WrongType(
            f"the times of state {message.state!r} are of kind {state.time_kind}, not {message.time_kind}",
            hint=f"cast the time column to {state.time_kind}",
            column="",
            expected=state.time_kind,
            actual=message.time_kind,
        )


def digest_of(message: CommitEpoch) -> int:
    return sum(receipt.digest for receipt in message.receipts) % (1 << 64)


def rows_of(message: CommitEpoch) -> int:
    return sum(receipt.rows for receipt in message.receipts)


def _last_answered(queries: dict[str, tuple[PinRecord, ...]]) -> list[PinRecord]:
    """Of each query the last epoch that was answered: what it left waiting waits, also while the next one runs."""
    answered_pins = [[record for record in pins if record.answered] for pins in queries.values()]
    return [pins[-1] for pins in answered_pins if pins]


def _find(epochs: QueryRecord, epoch: int) -> EpochRecord | None:
    return next((record for record in epochs.recent if record.epoch == epoch), None)


def _updater_of(state: StateRecord, name: str) -> UpdaterRecord:
    try:
        return state.updaters[name]
    except KeyError:
        raise _unknown(state, name, "updater", state.updaters) from None


def _fetcher_of(state: StateRecord, name: str) -> FetcherRecord:
    try:
        return state.fetchers[name]
    except KeyError:
        raise _unknown(state, name, "fetcher", state.fetchers) from None


def _unknown(state: StateRecord, name: str, role: str, known: dict[str, _V]) -> UnknownUpdater:
    names = ", ".join(sorted(known)) or "none yet"
    return UnknownUpdater(
        f"state {state.spec.name!r} has no {role} {name!r}",
        hint=f"it has: {names}",
        state=state.spec.name,
        name=name,
    )


def _with_updater(pond: PondRecord, state: StateRecord, name: str, updater: UpdaterRecord) -> PondRecord:
    updaters = {**state.updaters, name: updater}
    lowest = min(record.watermark for record in updaters.values())
    return pond.with_state(
        replace(state, updaters=updaters, update_progress=max(state.update_progress, lowest))
    )


def _with_fetcher(pond: PondRecord, state: StateRecord, name: str, fetcher: FetcherRecord) -> PondRecord:
    fetchers = {**state.fetchers, name: fetcher}
    lowest = min(record.progress for record in fetchers.values())
    return pond.with_state(
        replace(state, fetchers=fetchers, fetch_progress=max(state.fetch_progress, lowest))
    )


def rest_no_more_on(pond: PondRecord, directories: Sequence[str]) -> PondRecord:
    """The pond without those directories among what its decisions rest on: they are about to be removed."""
    left = tuple(name for name in pond.rests_on if name not in directories)
    return pond if left == pond.rests_on else replace(pond, rests_on=left)
