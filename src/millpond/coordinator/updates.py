"""How epochs of updaters are numbered, recognised and decided. No I/O; a function that refuses raises."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from msgspec.structs import replace

from millpond.container.holdings import kind_of
from millpond.coordinator.catalogue import (
    awake,
    resident_of,
    settled_update,
    unknown_operator,
    with_fetcher,
    with_updater,
)
from millpond.coordinator.catalogue import progressed as fetcher_progressed
from millpond.coordinator.records import (
    ENDED_REMEMBERED,
    QUERIES_MAX,
    TURNS_REMEMBERED,
    EpochRecord,
    FetcherRecord,
    PondRecord,
    QueryRecord,
    ResidentRecord,
    UpdaterRecord,
)
from millpond.errors import (
    EpochChanged,
    EpochOutOfOrder,
    OtherQuery,
    StageLost,
    WrongType,
    updater_finished,
    wrong_time_kind,
)
from millpond.times import Progress, watermark_after
from millpond.wire.base import Turn
from millpond.wire.epochs import (
    AskTurns,
    BeginEpoch,
    CommitEpoch,
    EpochCommitted,
    EpochPlan,
    HandedOver,
    History,
    WriterTurns,
)
from millpond.wire.questions import HoldsBack, Report, ResidentProgress


def begin_epoch(pond: PondRecord, message: BeginEpoch | CommitEpoch) -> EpochPlan:
    """How the rows of an epoch are to be treated, or why it cannot come now."""
    resident = resident_of(pond, message.resident)
    updater = _updater_of(resident, message.updater)
    turns = updater.queries.get(message.query)
    if turns is not None and message.turn <= turns.last:
        if message.turn < turns.first:
            raise EpochOutOfOrder(
                f"epoch {message.turn} of updater {message.updater!r} comes before its first, {turns.first}",
                hint="epochs of an updater are consecutive and never go back, except to be replayed",
                epoch=message.turn.epoch,
                expected=turns.last.epoch + 1,
            )
        known = _find(turns, message.turn)
        late_below = known.late_below if known is not None else turns.watermark
        return EpochPlan(late_below, resident.time_kind, replayed=True, placement=pond.version)
    if turns is None:
        if message.query in updater.ended:
            raise query_ended(message.resident, message.updater, message.query)
        check_first(
            message.resident,
            message.updater,
            list(updater.queries),
            message.query,
            message.turn,
            message.history,
        )
    elif message.turn.epoch > turns.last.epoch + 1 or (
        message.turn.drain and message.turn.epoch > turns.last.epoch
    ):
        raise EpochOutOfOrder(
            f"epoch {message.turn} of updater {message.updater!r} follows {turns.last}:"
            f" {turns.last.epoch + 1} is missing",
            hint="epochs are consecutive: one that was refused keeps its number, an empty batch has one, too",
            epoch=message.turn.epoch,
            expected=turns.last.epoch + 1,
        )
    elif turns.owed is not None:
        raise EpochOutOfOrder(
            f"a finish of {message.updater!r} was interrupted: {turns.owed}",
            hint="call finish() again first: it hands over what its events gave; a sink that fails must let its error out",
            epoch=message.turn.epoch,
            expected=turns.owed.epoch,
        )
    late_below = _late_below(updater, message.query)
    return EpochPlan(late_below, resident.time_kind, False, pond.version, _others(resident, message))


def _others(resident: ResidentRecord, message: BeginEpoch | CommitEpoch) -> Progress:
    """How far other updaters have come, and other queries of this one, as far as they count."""
    updater = resident.updaters[message.updater]
    marks = [
        other.watermark
        for name, other in resident.updaters.items()
        if name != message.updater and not other.idle
    ]
    if not updater.idle and (message.query in updater.queries or message.history == "shared"):
        others = (turns for query, turns in updater.queries.items() if query != message.query)
        marks += [max(turns.watermark, updater.watermark) for turns in others]
    return min(marks, default=math.inf)


def awaken(pond: PondRecord, message: BeginEpoch) -> PondRecord:
    """Before an epoch is staged, its updater counts again, so that U stays below its rows. A replay brings none."""
    if begin_epoch(pond, message).replayed or not message.brings_rows:
        return pond
    resident = resident_of(pond, message.resident)
    updater = _updater_of(resident, message.updater)
    if not updater.idle:
        return pond
    return with_updater(pond, resident, message.updater, awake(updater, resident.update_progress))


def leave_out(pond: PondRecord, name: str, silent: list[str]) -> PondRecord:
    """No rows came of these updaters for as long as they may be silent: U goes on without them."""
    for updater in silent:
        resident = resident_of(pond, name)
        pond = with_updater(pond, resident, updater, replace(_updater_of(resident, updater), idle=True))
    return pond


def query_ended(resident: str, operator: str, query: str) -> OtherQuery:
    return OtherQuery(
        f"the query {query} of {operator!r} has ended: another began a new history",
        hint="start the query that goes on; one that begins from an empty checkpoint is a new one",
        resident=resident,
        name=operator,
        query=query,
    )


def check_first(
    resident: str, operator: str, known: list[str], query: str, turn: Turn, history: History
) -> None:
    """Whether a query may begin under an operator's name."""
    if known and history == "continue":
        raise OtherQuery(
            f"{operator!r} of {resident!r} belongs to the query {known[-1]}, and this is {query}: its rows would count again",
            hint="start it from its own checkpoint; if that is gone for good, say history='new', and what comes counts"
            " beside what came before; if both are to run, give this one another name, or both history='shared'",
            resident=resident,
            name=operator,
            query=query,
        )
    if history == "shared" and len(known) >= QUERIES_MAX:
        raise OtherQuery(
            f"{len(known)} queries share the name {operator!r} of {resident!r}",
            hint="let go of those that ended: pond.forget(..., name=..., query=...)",
            resident=resident,
            name=operator,
            query=query,
        )
    if turn.epoch > 0 and history != "new":
        raise EpochOutOfOrder(
            f"epoch {turn} is the first that the pond sees of {operator!r} of {resident!r}: those before it are missing",
            hint="epochs begin with 0. Of a stream, the checkpoint is older than the pond: remove it to send all rows again,"
            " or say history='new' to go on from here without them",
            epoch=turn.epoch,
            expected=0,
        )


def replay_epoch(pond: PondRecord, message: CommitEpoch) -> EpochCommitted:
    """The answer to an epoch that was decided before: the same, if the rows are the same."""
    updater = _updater_of(resident_of(pond, message.resident), message.updater)
    known = _find(updater.queries[message.query], message.turn)
    if known is None:
        # Too long ago to compare: the epoch is there, and stays as it is.
        return EpochCommitted(message.turn, 0, 0, updater.watermark, replayed=True)
    if not _is_replay(known, message):
        raise EpochChanged(
            f"epoch {message.turn} of updater {message.updater!r} was committed with {known.rows} rows"
            f" and has now other content ({rows_of(message)} rows)"
            if known.source is None
            else f"epoch {message.turn} of {message.updater!r} was committed, and is now made from other rows",
            hint="nothing was changed: the source does not replay the same rows, or another operator has this name;"
            " new rows take the next epoch's number",
            epoch=message.turn.epoch,
        )
    return EpochCommitted(message.turn, known.rows, known.late, known.watermark, replayed=True)


def check_epoch(pond: PondRecord, message: CommitEpoch) -> None:
    """Whether an epoch that is no replay may be committed as it was staged."""
    resident = resident_of(pond, message.resident)
    updater = _updater_of(resident, message.updater)
    _check_time_kind(resident, message)
    kind_of(resident.spec).after(resident.spec, message.work)
    late_below = _late_below(updater, message.query)
    if late_below == math.inf and has_rows(message):
        raise updater_finished(message.resident, message.updater)
    if updater.idle and late_below < resident.update_progress and has_rows(message):
        raise StageLost("the updater was left out as idle while the epoch was staged: stage it again")
    if message.late_below != late_below:
        raise StageLost("the updater's progress was reported while the epoch was staged: stage it again")
    if _others(resident, message) < message.others:
        raise StageLost("another updater counts since the epoch was staged: stage it again")


def commit_epoch(pond: PondRecord, message: CommitEpoch) -> tuple[PondRecord, EpochCommitted]:
    """The epoch is decided: every container holds it. Moves the updater's watermark, and U with it."""
    check_epoch(pond, message)
    resident = resident_of(pond, message.resident)
    updater = _updater_of(resident, message.updater)
    before = _late_below(updater, message.query)
    if has_rows(message):
        updater = awake(updater, resident.update_progress)
    newest = max(
        (receipt.time_max for receipt in message.receipts if receipt.time_max is not None), default=None
    )
    watermark = watermark_after(before, newest, message.delay)
    late = sum(receipt.late for receipt in message.receipts)
    kind = kind_of(resident.spec)
    record = EpochRecord(
        message.turn,
        digest_of(message),
        rows_of(message),
        late,
        before,
        watermark,
        source_of(message),
        kind.version_of(message.work),
    )
    turns = updater.queries.get(message.query)
    others, ended = updater.queries, updater.ended
    if turns is None and message.history == "new":
        kept = {**ended, **{query: known.last for query, known in others.items()}}
        others, ended = {}, dict(list(kept.items())[-ENDED_REMEMBERED:])
    turns = (
        QueryRecord(message.turn, (record,))
        if turns is None
        else replace(turns, recent=(*turns.recent, record)[-TURNS_REMEMBERED:])
    )
    turns = replace(turns, owed=message.turn if message.owes else None)
    queries = {**others, message.query: turns}
    lowest = min(known.watermark for known in queries.values())
    updater = replace(
        updater,
        watermark=max(updater.watermark, lowest),
        late=updater.late + late,
        queries=queries,
        ended=ended,
    )
    resident = replace(
        resident,
        spec=kind.after(resident.spec, message.work),
        time_kind=resident.time_kind or message.time_kind,
        epochs=resident.epochs + 1,
    )
    after = with_updater(pond, resident, message.updater, updater)
    return after, EpochCommitted(message.turn, record.rows, late, updater.watermark, replayed=False)


def turns_of(pond: PondRecord, message: AskTurns) -> WriterTurns:
    """Where the queries of an updater stand."""
    updater = _updater_of(resident_of(pond, message.resident), message.updater)
    return WriterTurns(
        {query: turns.last for query, turns in updater.queries.items()},
        {query: turns.owed for query, turns in updater.queries.items() if turns.owed is not None},
        {
            query: [(record.turn, record.code) for record in turns.recent if record.code]
            for query, turns in updater.queries.items()
        },
    )


def handed_over(pond: PondRecord, message: HandedOver) -> PondRecord:
    """What a turn gave is where it belongs; said again, it changes nothing."""
    resident = resident_of(pond, message.resident)
    updater = _updater_of(resident, message.updater)
    turns = updater.queries.get(message.query)
    if turns is None or turns.owed != message.turn:
        return pond
    queries = {**updater.queries, message.query: replace(turns, owed=None)}
    return with_updater(pond, resident, message.updater, replace(updater, queries=queries))


def report(pond: PondRecord, message: Report) -> PondRecord:
    """Explicit progress. It never goes back: a lower value changes nothing."""
    resident = resident_of(pond, message.resident)
    if message.time_kind and resident.time_kind and message.time_kind != resident.time_kind:
        raise wrong_time_kind(repr(message.resident), resident.time_kind, message.time_kind)
    resident = replace(resident, time_kind=resident.time_kind or message.time_kind)
    if message.update is not None:
        updater = _updater_of(resident, message.name)
        if message.update > updater.watermark:
            finished_at = updater.watermark if message.update == math.inf else updater.finished_at
            updater = replace(updater, watermark=message.update, finished_at=finished_at)
            pond = with_updater(pond, resident, message.name, updater)
            resident = resident_of(pond, message.resident)
    if message.rests:
        pond = leave_out(pond, message.resident, [message.name])
        resident = resident_of(pond, message.resident)
    if message.fetch is not None:
        fetcher = resident.fetchers.get(message.name)
        if fetcher is None or message.fetch > fetcher.reported:
            # The first report of a fetcher registers it.
            known = fetcher or FetcherRecord(resident.fetch_progress)
            fetcher = fetcher_progressed(replace(known, reported=max(known.reported, message.fetch)))
            pond = with_fetcher(pond, resident, message.name, fetcher)
    return pond


def progress(
    resident: ResidentRecord,
    held_back: dict[str, Progress],
    silent_s: Mapping[str, float] = MappingProxyType({}),
) -> ResidentProgress:
    """U, F and whose they are. `held_back` are updaters whose last epoch is decided, but not yet visible;
    `silent_s` says for how long no rows came of each.
    """
    updaters = {name: held_back.get(name, record.watermark) for name, record in resident.updaters.items()}
    update = resident.update_progress
    if held_back:
        update = min(update, settled_update(resident.updaters, held_back))
    return ResidentProgress(
        update=update,
        fetch=resident.fetch_progress,
        updaters=updaters,
        fetchers={name: record.progress for name, record in resident.fetchers.items()},
        late={name: record.late for name, record in resident.updaters.items()},
        time_kind=resident.time_kind,
        held_by=_held_by(resident, updaters, silent_s),
        # One at a time is decided and not yet visible.
        seen=max(0, resident.epochs - bool(held_back)),
        pending=bool(held_back),
        born=resident.born,
    )


def _held_by(
    resident: ResidentRecord, marks: dict[str, Progress], silent_s: Mapping[str, float]
) -> list[HoldsBack]:
    """Who would have to send rows for U to move: the lowest of those that count, or all where none does."""
    unfinished = {name: record for name, record in resident.updaters.items() if marks[name] < math.inf}
    counted = [name for name, record in unfinished.items() if not record.idle]
    lowest = min((marks[name] for name in counted), default=None)
    return [
        HoldsBack(
            name,
            has_run=any(turns.recent for turns in record.queries.values()) or bool(record.ended),
            silent_s=silent_s.get(name, 0.0),
            idle=record.idle,
        )
        for name, record in unfinished.items()
        if lowest is None or (not record.idle and marks[name] == lowest)
    ]


def _late_below(updater: UpdaterRecord, query: str) -> Progress:
    """Where lateness begins for the next rows of a query. A report counts for all of them."""
    turns = updater.queries.get(query)
    return updater.watermark if turns is None else max(turns.watermark, updater.watermark)


_SPANS = {"timestamp": "texts with a unit", "long": "integers"}
_TIMES = {"timestamp": "timestamps", "long": "integers"}


def _check_time_kind(resident: ResidentRecord, message: CommitEpoch) -> None:
    """Another updater's first rows may have come since the epoch began, and settled the kind."""
    wanted = resident.spec.span_kind
    if message.time_kind and wanted and message.time_kind != wanted:
        raise WrongType(
            f"the durations of {resident.spec.kind} {message.resident!r} are {_SPANS[wanted]}, and the times are"
            f" {_TIMES[message.time_kind]}",
            hint='durations with a unit, as in "10 minutes", go with timestamps, integers with integers',
            column="",
            expected=wanted,
            actual=message.time_kind,
        )
    if message.time_kind and resident.time_kind and message.time_kind != resident.time_kind:
        raise wrong_time_kind(repr(message.resident), resident.time_kind, message.time_kind)


def digest_of(message: CommitEpoch) -> int:
    return sum(receipt.digest for receipt in message.receipts) % (1 << 64)


def source_of(message: CommitEpoch) -> int | None:
    """The digest of what the epoch's rows were made from; None where they are their own source."""
    sources = [receipt.source for receipt in message.receipts if receipt.source is not None]
    return sum(sources) % (1 << 64) if sources else None


def _is_replay(known: EpochRecord, message: CommitEpoch) -> bool:
    before, source = known.source, source_of(message)
    if before is None and source is None:
        return (digest_of(message), rows_of(message)) == (known.digest, known.rows)
    # Tasks without rows may tell of no source; without any receipt there were no rows.
    if before is None and known.rows == 0:
        before = 0
    if source is None and not message.receipts:
        source = 0
    return source == before


def has_rows(message: CommitEpoch) -> bool:
    """Late ones count: whoever sends them is not silent."""
    return any(receipt.rows or receipt.late for receipt in message.receipts)


def rows_of(message: CommitEpoch) -> int:
    return sum(receipt.rows for receipt in message.receipts)


def _find(turns: QueryRecord, turn: Turn) -> EpochRecord | None:
    return next((record for record in turns.recent if record.turn == turn), None)


def _updater_of(resident: ResidentRecord, name: str) -> UpdaterRecord:
    try:
        return resident.updaters[name]
    except KeyError:
        raise unknown_operator(resident, name, "updater", resident.updaters) from None
