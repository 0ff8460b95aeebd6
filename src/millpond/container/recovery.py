"""How slices are rebuilt from what earlier owners left: snapshots, then the decided log records.

Each slice comes from the directory that the journal names for it, alone. Nothing is guessed: whatever its manifest
names must be there and whole, and at the end the slice must have seen every epoch that the coordinator decided.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

from msgspec.structs import replace

from millpond.container.core import Core, broken
from millpond.container.holdings.base import HeldSlice, Holding, Saved, load_pieces
from millpond.container.layout import (
    CONTAINERS,
    MANIFEST,
    Ground,
    LogSpan,
    Manifest,
    RecordHead,
    read_manifest,
    read_pieces,
    read_record,
    read_record_head,
    read_snapshot,
    record_numbers,
    record_path,
    snapshot_path,
)
from millpond.durable.files import Files
from millpond.errors import CorruptFile, NotTrusted, not_trusted
from millpond.wire.base import ResidentId, SliceId, Turn
from millpond.wire.house import Adopt

DecidedTurns = dict[str, dict[str, Turn]]
_SpanKey = tuple[str, int, int | None, tuple[int, ...]]
# Called before a record that runs user code, with its directory and number.
BeforeRecord = Callable[[str, int, str], None]


class Rebuilt(NamedTuple):
    """Slices as they were when their last owner left them, by resident, and what each rests on."""

    slices: dict[SliceId, dict[str, HeldSlice[Any]]]
    grounds: dict[SliceId, Ground]
    figures: Counter[str]


class _Strand(NamedTuple):
    """A slice, and those of its residents that rest on the same logs: one that is behind, or all but those."""

    number: SliceId
    only: ResidentId | None
    others: frozenset[ResidentId]

    def has(self, resident_id: ResidentId) -> bool:
        return resident_id == self.only if self.only is not None else resident_id not in self.others


class _Log(NamedTuple):
    """What is read of one incarnation's log, for the strands that need it."""

    span: LogSpan
    heads: dict[int, RecordHead]
    strands: list[_Strand]

    def slices_of(self, resident_id: ResidentId) -> list[SliceId]:
        return [strand.number for strand in self.strands if strand.has(resident_id)]


def rebuild(core: Core, files: Files, root: str, adopt: Adopt, before: BeforeRecord) -> Rebuilt:
    """The slices to be adopted, beside those that `core` serves. `before` is told before each record is applied."""
    manifests: dict[str, Manifest] = {}
    grounds: dict[SliceId, Ground] = {}
    for number, directory in adopt.slices.items():
        if directory and directory not in manifests:
            manifests[directory] = read_manifest(files, root, directory)
        grounds[number] = _ground(manifests.get(directory), number, directory, root)
    slices: dict[SliceId, dict[str, HeldSlice[Any]]] = {
        number: {
            name: holding.new_slice() for name, holding in core.holdings.items() if holding.places([number])
        }
        for number in grounds
    }
    figures = Counter(snapshots_loaded=0, records_replayed=0, rows_replayed=0, records_discarded=0)
    for number, ground in grounds.items():
        figures["snapshots_loaded"] += _load_snapshots(core, files, root, number, ground, slices[number])
    logs = _read_logs(files, root, grounds, adopt.decided)
    _check_complete(core, root, slices, logs, adopt.decided)
    for log in logs:
        for seq, head in log.heads.items():
            holding = core.holdings.get(head.name)
            if holding is None or holding.resident.id != head.id or seq in log.span.skipped:
                continue
            mine = _concerned(head, holding, log.slices_of(head.id), slices)
            if mine and holding.broken is None:
                before(log.span.directory, seq, head.name)
                figures["rows_replayed"] += _replay(files, root, log.span.directory, seq, holding, mine)
                figures["records_replayed"] += 1
    for number, held in slices.items():
        vectors = dict(grounds[number].vectors)
        for name, one in held.items():
            # Who is not known any more was forgotten: one of the same name begins at 0.
            one.vector = dict(adopt.decided.get(name, {}))
            own = core.holdings[name].resident.id
            vectors[own] = {w: t for w, t in vectors.get(own, {}).items() if w in one.vector}
        behind = grounds[number].behind
        closed = {
            only: [
                log.span
                for log in logs
                if set(log.heads) - set(log.span.skipped)
                and any((strand.number, strand.only) == (number, only) for strand in log.strands)
            ]
            for only in (None, *behind)
        }
        grounds[number] = replace(
            grounds[number],
            vectors=vectors,
            logs=closed[None],
            behind={only: closed[only] for only in behind},
        )
    discarded = {(log.span.directory, seq) for log in logs for seq in log.span.skipped}
    figures["records_discarded"] += len(discarded)
    return Rebuilt(slices, grounds, figures)


def _ground(manifest: Manifest | None, number: SliceId, directory: str, root: str) -> Ground:
    if manifest is None:
        return Ground()
    if number not in manifest.slices:
        path = os.path.join(root, CONTAINERS, directory, MANIFEST)
        raise CorruptFile(
            f"{path} does not know slice {number}, which the journal says it has",
            hint="restore journal and containers' files from one backup copy",
            path=path,
        )
    return manifest.slices[number]


def _load_snapshots(
    core: Core, files: Files, root: str, number: SliceId, ground: Ground, slices: Mapping[str, HeldSlice[Any]]
) -> int:
    """How many there were."""
    loaded = 0
    for name, held in slices.items():
        holding = core.holdings[name]
        resident_id = holding.resident.id
        held.vector = dict(ground.vectors.get(resident_id, {}))
        names = ground.files_of(resident_id)
        if names:
            schema = holding.snapshot_schema
            in_pieces = holding.in_pieces and len(names) == 1
            batches = (
                read_pieces(files, root, names[0], resident_id, number, schema)
                if in_pieces
                else read_snapshot(files, root, names, resident_id, number, schema)
            )
            sizes = [int(batch.nbytes) for batch in batches]
            base_bytes = sum(sizes) if in_pieces else sizes[0]
            try:
                if in_pieces or len(batches) == 1:
                    load_pieces(holding, held, batches)
                else:
                    held.store.load(holding.merged(batches, whole=True))
                    holding.loaded(held)
            except (ValueError, LookupError, TypeError, NotImplementedError) as error:
                path = snapshot_path(root, resident_id, names[-1])
                raise CorruptFile(f"{path} does not hold rows of {name}: {error}", path=path) from error
            held.saved = Saved(names[0], base_bytes, tuple(names[1:]), sum(sizes) - base_bytes)
            # What was forgotten since must not be found there again.
            if any(map(holding.is_stale, batches)):
                held.write_anew()
            loaded += 1
    return loaded


def _read_logs(
    files: Files, root: str, grounds: Mapping[SliceId, Ground], decided: DecidedTurns
) -> list[_Log]:
    """The logs that these slices need, each slice's oldest first; those that were still written are closed."""
    needed: dict[_SpanKey, list[_Strand]] = {}
    # A slice that went and came back rests on a log, then on another's, then on a later part of the first.
    order: TopologicalSorter[_SpanKey] = TopologicalSorter()
    for number, ground in grounds.items():
        apart = frozenset(ground.behind)
        for only, spans in ((None, ground.logs), *ground.behind.items()):
            keys = [(span.directory, span.after, span.last, tuple(span.skipped)) for span in spans]
            for place, key in enumerate(keys):
                needed.setdefault(key, []).append(_Strand(number, only, apart))
                order.add(key, *keys[:place][-1:])
    logs = []
    for directory, after, last, skipped in order.static_order():
        span = LogSpan(directory, after, last, list(skipped))
        heads = {
            seq: read_record_head(files, root, directory, seq) for seq in record_numbers(files, root, span)
        }
        if last is None:
            span = LogSpan(directory, after, max(heads, default=after), _undecided(heads, decided))
        logs.append(_Log(span, heads, needed[directory, after, last, skipped]))
    return logs


def _undecided(heads: Mapping[int, RecordHead], decided: DecidedTurns) -> list[int]:
    """Records that no acknowledgement rests on: beyond what was decided, or replaced before the decision."""
    newest: dict[tuple[str, str, Turn], int] = {}
    for head in heads.values():
        turn = (head.id, head.writer, head.turn)
        newest[turn] = max(head.ballot, newest.get(turn, 0))
    # A backup has a record of each owner, under one ballot.
    return [
        seq
        for seq, head in heads.items()
        if newest[head.id, head.writer, head.turn] != head.ballot
        or not _is_decided(decided, head.name, head.writer, head.turn)
    ]


def _is_decided(decided: DecidedTurns, name: str, writer: str, turn: Turn) -> bool:
    newest = decided.get(name, {}).get(writer)
    return newest is not None and turn <= newest


def _check_complete(
    core: Core,
    root: str,
    slices: Mapping[SliceId, Mapping[str, HeldSlice[Any]]],
    logs: Iterable[_Log],
    decided: DecidedTurns,
) -> None:
    """A slice's last owner must have every decided epoch: in what it stood on, or in its log."""
    logged: dict[tuple[SliceId, ResidentId, str], Turn] = {}
    lasts: dict[SliceId, str] = {}
    for log in logs:
        following = record_path(root, log.span.directory, max(log.heads, default=log.span.after) + 1)
        lasts |= dict.fromkeys((strand.number for strand in log.strands), following)
        for seq, head in log.heads.items():
            if seq not in log.span.skipped:
                for number in filter(head.is_about, log.slices_of(head.id)):
                    key = (number, head.id, head.writer)
                    logged[key] = max(head.turn, logged.get(key, head.turn))
    for number, held in slices.items():
        for name, writers in decided.items():
            for writer, turn in writers.items() if name in held else ():
                newest = logged.get((number, core.holdings[name].resident.id, writer))
                last = lasts.get(number, "")
                if not held[name].has_seen(writer, turn) and (newest is None or newest < turn):
                    raise CorruptFile(
                        f"slice {number} of {name} ends before epoch {turn} of {writer}, which was acknowledged"
                        + (f": {last} is missing" if last else ""),
                        hint="restore the missing files from a backup copy",
                        path=last or os.path.join(root, CONTAINERS),
                    )


def _concerned(
    head: RecordHead,
    holding: Holding[Any],
    numbers: Iterable[SliceId],
    slices: Mapping[SliceId, Mapping[str, HeldSlice[Any]]],
) -> dict[SliceId, HeldSlice[Any]]:
    """The slices that a record has something for."""
    return {
        number: slices[number][holding.name]
        for number in numbers
        if holding.name in slices[number] and head.is_about(number) and holding.concerns(head.counts, number)
    }


def _replay(
    files: Files,
    root: str,
    directory: str,
    seq: int,
    holding: Holding[Any],
    mine: Mapping[SliceId, HeldSlice[Any]],
) -> int:
    """How many rows it had."""
    record = read_record(files, root, directory, seq, holding.schema_of)
    try:
        return holding.replay(record, mine)
    except NotTrusted:
        holding.broken = not_trusted(f"the newest epochs of {holding.name!r} would have to run again")
        return 0
    except Exception as error:  # noqa: BLE001 - whatever it is: the resident says so to whoever asks, all else comes back
        holding.broken = broken(
            holding.name, f"record {record_path(root, directory, seq)} cannot be applied", error
        )
        return 0
