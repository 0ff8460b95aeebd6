"""Which residents a pond has, who works on them, and what is forgotten. No I/O; a function that refuses raises."""

from __future__ import annotations

import math
from typing import TypeVar

from msgspec.structs import replace

from millpond.container.holdings import kind_of
from millpond.coordinator.records import FetcherRecord, PondRecord, ResidentRecord, UpdaterRecord
from millpond.errors import SchemaMismatch, UnknownResident, UnknownUpdater, UpdaterFinished, unknown_table
from millpond.times import Progress
from millpond.wire.house import Forget, Register
from millpond.wire.specs import Spec

_V = TypeVar("_V")


def resident_of(pond: PondRecord, name: str) -> ResidentRecord:
    try:
        return pond.residents[name]
    except KeyError:
        known = ", ".join(sorted(pond.residents)) or "none yet"
        raise UnknownResident(
            f"there is no {name!r} in this pond", hint=f"it holds: {known}", resident=name
        ) from None


def open_resident(pond: PondRecord, spec: Spec) -> PondRecord:
    """The pond with that resident. One that exists must be the same, or grow into it."""
    existing = pond.residents.get(spec.name)
    if existing is not None and existing.spec.kind != spec.kind:
        raise SchemaMismatch(
            f"{spec.name!r} is a {existing.spec.kind}",
            hint="choose another name",
            resident=spec.name,
            existing=existing.spec.kind,
            requested=spec.kind,
        )
    others = [other.spec for name, other in pond.residents.items() if name != spec.name]
    opened = kind_of(spec).opened(spec, existing.spec if existing else None, others, pond.owners)
    if existing is None:
        pond = replace(pond, born=pond.born + 1)
        return pond.with_resident(ResidentRecord(opened, pond.born))
    return pond if opened == existing.spec else pond.with_resident(replace(existing, spec=opened))


def register(pond: PondRecord, message: Register) -> PondRecord:
    """An updater begins where U stands, so that what is final stays final; a fetcher where F stands."""
    resident = resident_of(pond, message.resident)
    if message.role == "updater":
        known = resident.updaters.get(message.name)
        if known is not None:
            if known.idle_s == message.idle_s:
                return pond
            known = replace(known, idle_s=message.idle_s)
            if message.idle_s is None:
                known = awake(known, resident.update_progress)
            return with_updater(pond, resident, message.name, known)
        if resident.update_progress == math.inf:
            raise UpdaterFinished(
                f"every updater of {message.resident!r} has finished: all its values are final",
                hint="do not finish the last updater of a State that goes on. Now use another State, or forget this one and send all again",
                resident=message.resident,
                name=message.name,
            )
        updater = UpdaterRecord(resident.update_progress, idle_s=message.idle_s)
        return with_updater(pond, resident, message.name, updater)
    if message.name in resident.fetchers:
        return pond
    return with_fetcher(pond, resident, message.name, FetcherRecord(resident.fetch_progress))


def forget(pond: PondRecord, message: Forget) -> PondRecord:
    """The pond without a resident, a table, an operator, or one query of an operator."""
    if message.table is not None:
        return _without_table(pond, message.resident, message.table)
    resident = resident_of(pond, message.resident)
    if message.name is None:
        return replace(pond, residents={k: v for k, v in pond.residents.items() if k != message.resident})
    if message.name not in resident.updaters and message.name not in resident.fetchers:
        raise unknown_operator(resident, message.name, "operator", {**resident.updaters, **resident.fetchers})
    updaters, fetchers = dict(resident.updaters), dict(resident.fetchers)
    if message.query is None:
        updaters.pop(message.name, None)
        fetchers.pop(message.name, None)
    else:
        known = queries_of(resident, message.name)
        if message.query not in known:
            raise UnknownUpdater(
                f"{message.name!r} of {resident.spec.name!r} has no query {message.query!r}",
                hint=f"it has: {', '.join(sorted(known)) or 'none yet'}",
                resident=resident.spec.name,
                name=message.name,
            )
        if message.name in updaters:
            updater = updaters[message.name]
            queries = {q: known for q, known in updater.queries.items() if q != message.query}
            ended = {q: turn for q, turn in updater.ended.items() if q != message.query}
            updaters[message.name] = replace(updater, queries=queries, ended=ended)
        if message.name in fetchers:
            fetcher = fetchers[message.name]
            asking = {q: known for q, known in fetcher.queries.items() if q != message.query}
            ended = {q: turn for q, turn in fetcher.ended.items() if q != message.query}
            fetchers[message.name] = progressed(replace(fetcher, queries=asking, ended=ended))
    return pond.with_resident(_settled(replace(resident, updaters=updaters, fetchers=fetchers)))


def queries_of(resident: ResidentRecord, name: str) -> set[str]:
    """The queries in which an operator of that name has run, as far as they are remembered."""
    updater, fetcher = resident.updaters.get(name), resident.fetchers.get(name)
    return {
        *(() if updater is None else (*updater.queries, *updater.ended)),
        *(() if fetcher is None else (*fetcher.queries, *fetcher.ended)),
    }


def forgotten_writers(before: PondRecord, after: PondRecord, resident: str) -> list[str]:
    """Writers that the one pond knows of and the other does not."""
    kept = set(after.decided().get(resident, {}))
    return [writer for writer in before.decided().get(resident, {}) if writer not in kept]


def _without_table(pond: PondRecord, name: str, table: str) -> PondRecord:
    resident = pond.residents.get(name)
    if resident is None:
        raise unknown_table(table, ())
    left = kind_of(resident.spec).without(resident.spec, table)
    if left is None:
        return forget(pond, Forget(resident.spec.name))
    return pond.with_resident(replace(resident, spec=left))


def unknown_operator(resident: ResidentRecord, name: str, role: str, known: dict[str, _V]) -> UnknownUpdater:
    names = ", ".join(sorted(known)) or "none yet"
    return UnknownUpdater(
        f"{resident.spec.name!r} has no {role} {name!r}",
        hint=f"it has: {names}",
        resident=resident.spec.name,
        name=name,
    )


def with_updater(pond: PondRecord, resident: ResidentRecord, name: str, updater: UpdaterRecord) -> PondRecord:
    return pond.with_resident(_settled(replace(resident, updaters={**resident.updaters, name: updater})))


def with_fetcher(pond: PondRecord, resident: ResidentRecord, name: str, fetcher: FetcherRecord) -> PondRecord:
    return pond.with_resident(_settled(replace(resident, fetchers={**resident.fetchers, name: fetcher})))


def _settled(resident: ResidentRecord) -> ResidentRecord:
    """U and F as updaters and fetchers have them. Neither falls, and with nobody left they stay."""
    lowest_fetch = min((known.progress for known in resident.fetchers.values()), default=-math.inf)
    return replace(
        resident,
        update_progress=max(resident.update_progress, settled_update(resident.updaters, {})),
        fetch_progress=max(resident.fetch_progress, lowest_fetch),
    )


def settled_update(updaters: dict[str, UpdaterRecord], held_back: dict[str, Progress]) -> Progress:
    """U as updaters have it: the lowest watermark of those that count; where all that have not finished are left out, the
    highest there was.

    `held_back` are watermarks that count instead of the updaters' own, whether they are idle or not.
    """
    marks = {name: held_back.get(name, known.watermark) for name, known in updaters.items()}
    unfinished = [name for name, mark in marks.items() if mark < math.inf]
    if not unfinished:
        return min(marks.values(), default=-math.inf)
    counted = [marks[name] for name in unfinished if name in held_back or not updaters[name].idle]
    if counted:
        return min(counted)
    return max(
        known.finished_at if marks[name] == math.inf else marks[name] for name, known in updaters.items()
    )


def awake(updater: UpdaterRecord, update_progress: Progress) -> UpdaterRecord:
    """The updater as one that counts. What is final stays final: it begins where U stands, if that is above its own."""
    if not updater.idle:
        return updater
    return replace(updater, idle=False, watermark=max(updater.watermark, update_progress))


def progressed(fetcher: FetcherRecord) -> FetcherRecord:
    """The fetcher with its progress: below what it says of new rows, and below all that a query may still repeat.

    That is what waits, and what the last epoch would ask if it ran again.
    """
    lowest = [fetcher.reported] if fetcher.queries.keys() <= fetcher.ended.keys() else []
    for query, asking in fetcher.queries.items():
        last = max((at for at, pin in enumerate(asking.pins) if pin.turn.drain == 0), default=0)
        if query not in fetcher.ended:
            lowest.append(max(asking.watermark, fetcher.reported))
            lowest += [pin.late_below for pin in asking.pins[last:]]
        lowest += [
            pin.lowest for pin in asking.pins[max(last - 1, 0) :] if pin.waiting and pin.lowest is not None
        ]
    return replace(fetcher, progress=max(fetcher.progress, min(lowest)))
