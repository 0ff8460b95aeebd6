"""Slices that a container holds for others: their records, their copies, and how they change roles."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from msgspec.structs import replace

from millpond.container.backup_core import BackupCore, Decided
from millpond.container.checkpoints import Checkpoints
from millpond.container.holdings.base import CheckedRows, HeldSlice, Holding, Record, load_pieces, pieces_of
from millpond.container.layout import Ground, LogSpan
from millpond.container.log import Log
from millpond.errors import BackupLost, BadMessage, UnknownResident
from millpond.runtime import Locks, Runtime
from millpond.stores.outputs import in_batches
from millpond.wire.backups import BackUp, Copy, ReadHeld
from millpond.wire.base import ResidentId, SliceId, Turn
from millpond.wire.connection import Connection, Dialer, SlicedBatch

_VECTOR = b"vector"
KEPT_BYTES_MAX = 256 << 20
"""Records that wait to be applied, before whoever sends the next one does it first."""


class Backups:
    """What a container holds as a backup: a core, a log and a manifest of their own, apart from those that it serves by."""

    def __init__(
        self, core: BackupCore, log: Log, checkpoints: Checkpoints, runtime: Runtime, dial: Dialer | None
    ) -> None:
        self.core = core
        self.log = log
        self.checkpoints = checkpoints
        self._runtime = runtime
        self._dial = dial
        # Of one owner and resident, one record at a time; those of a resident are applied by one hand.
        self._keeping: Locks[tuple[str, int]] = Locks(runtime)
        self._applying: Locks[str] = Locks(runtime)

    # Records in

    def keep(self, message: BackUp, batches: Iterator[SlicedBatch]) -> None:
        """On return the record is durable here."""
        rows = list(batches)
        with self._keeping[message.resident, message.owner]:
            if not self.core.accept(message):
                return
            holding = self.core.holding(message.resident)
            record = _record(message, holding, rows)
            seq = self.log.append(record, holding, message.slices)
            self.core.keep(seq, message, record)
        if self.core.kept_bytes > KEPT_BYTES_MAX:
            self.catch_up(message.resident)

    def catch_up(self, resident: str) -> None:
        """Applies what was decided, as far as it can be."""
        with self._applying[resident]:
            while (following := self.core.next_decided(resident)) is not None:
                kept, slices = following
                try:
                    holding = self.core.holding(resident)
                except UnknownResident:
                    return
                try:
                    holding.replay(kept.record, slices)
                except Exception:  # noqa: BLE001 - whatever it is, and whosever code: they are of no use any more
                    traceback.print_exc()
                    self.core.lost(holding, slices)
                    continue
                self.core.applied(kept, slices)

    def settle(self, decided: Mapping[str, Decided]) -> None:
        """So much was decided: it is applied here, too."""
        for resident, turns in decided.items():
            self.core.settle(resident, turns)
            self.catch_up(resident)

    def unsettled(self) -> list[ResidentId]:
        """Residents of which records are here that are neither applied nor void."""
        return self.core.unsettled()

    def maintain(self) -> bool:
        """One piece of upkeep; True when there was nothing to do."""
        idle = True
        for resident in self.core.residents_kept:
            idle &= self.core.next_decided(resident) is None
            self.catch_up(resident)
        if self.core.owned and self.checkpoints.is_due():
            self.checkpoints.checkpoint()
        return idle

    # Slices that come as copies

    def enlist(self, slices: Collection[SliceId]) -> None:
        with self.checkpoints.lock:
            new = set(slices) - self.core.owned
            self.log.make_room()
            self.checkpoints.add({number: Ground() for number in sorted(new)})
            self.checkpoints.confirm(new)
            self.core.enlist(slices)

    def copy(self, message: Copy) -> None:
        """Takes what there was before from the container that serves the slices."""
        assert self._dial is not None
        if not self.core.owned.issuperset(message.slices):
            raise BackupLost(
                f"container {self.core.container} was not enlisted for these slices",
                container=self.core.container,
                term=self.core.term,
            )
        self.core.await_copies(message.order, message.residents, message.slices)
        source = self._dial(message.address)
        try:
            for holding in list(self.core.holdings.values()):
                if holding.resident.id in message.residents:
                    for number in holding.places(message.slices):
                        self._copy_slice(message.order, source, holding, number)
        finally:
            source.close()
        self.checkpoints.checkpoint()
        self._check_durable(message.slices)

    def _copy_slice(self, order: int, source: Connection, holding: Holding[Any], number: SliceId) -> None:
        try:
            rows = source.read(ReadHeld(holding.name, number))
        except UnknownResident:
            # It was forgotten, of which this container hears, too; or it is so new that its owner has not heard of it yet:
            # then none of its epochs has begun, and there is nothing to be copied.
            self.core.copied(order, holding.resident.id, number, holding.new_slice())
            return
        vector = _vector_in(rows.schema)
        held = holding.new_slice()
        rows = rows.replace_schema_metadata(None)
        if len(rows):
            load_pieces(holding, held, (rows if holding.in_pieces else rows.combine_chunks()).to_batches())
        held.vector = vector
        self.core.copied(order, holding.resident.id, number, held)

    def _check_durable(self, slices: Collection[SliceId]) -> None:
        """A slice that could not be snapshotted rests on records that are not all here."""
        for holding in list(self.core.holdings.values()):
            for number in holding.places(slices):
                held = holding.slices.get(number)
                if held is not None and held.saved is None and (held.vector or held.dirty):
                    raise BackupLost(
                        f"slice {number} of {holding.name!r} could not be written down",
                        container=self.core.container,
                        term=self.core.term,
                    )

    # Slices that change roles. The caller holds the locks of both checkpoints.

    def give_up(
        self, slices: Sequence[SliceId], decided: Mapping[str, Decided]
    ) -> tuple[dict[SliceId, dict[str, HeldSlice[Any]]], dict[SliceId, Ground]]:
        """Slices that are held here, to be served: all that was decided is in them. And what they rest on.

        BackupLost if something is missing: then nothing has changed.
        """
        if not self.core.owned.issuperset(slices):
            raise self._not_whole("they are not held here")
        for resident in list(self.core.holdings):
            self.core.settle(resident, decided.get(resident, {}))
            self.catch_up(resident)
        missing = self.core.missing(slices, decided)
        if missing:
            raise self._not_whole(missing)
        grounds = {number: closed(self.checkpoints.grounds[number], self.log) for number in slices}
        released = self.core.release(slices)
        self.checkpoints.release(set(slices), gone=False)
        for number in slices:
            for name, held in released[number].items():
                held.vector = dict(decided.get(name, {}))
                # It rests on a log to which nothing more comes for it.
                held.dirty = True
        return released, grounds

    def take_in(
        self, slices: Mapping[SliceId, Mapping[str, HeldSlice[Any]]], grounds: Mapping[SliceId, Ground]
    ) -> None:
        """Slices that were served here until now, and what they rest on."""
        for held in (held for residents in slices.values() for held in residents.values()):
            held.dirty = True
        self.log.make_room()
        self.checkpoints.add(grounds)
        self.core.take_in(slices)

    def dismiss(self, slices: Collection[SliceId]) -> None:
        """They are held no more. What they rested on stays until nobody needs it."""
        with self.checkpoints.lock:
            self.core.release(slices)
            self.checkpoints.release(set(slices), gone=False)

    def _not_whole(self, what: str) -> BackupLost:
        return BackupLost(
            f"container {self.core.container} cannot serve slices that it holds as a backup: {what}",
            container=self.core.container,
            term=self.core.term,
        )


def closed(ground: Ground, log: Log) -> Ground:
    """What a slice rests on, once nothing more comes for it into that log."""

    def close(spans: list[LogSpan]) -> list[LogSpan]:
        ended = [
            log.closed(span) if span.directory == log.directory and span.last is None else span
            for span in spans
        ]
        # A slice may come and go without a record: of such spans there could be two alike.
        return [span for span in ended if span.last is None or span.last > span.after]

    return replace(
        ground,
        logs=close(ground.logs),
        behind={resident_id: close(spans) for resident_id, spans in ground.behind.items()},
    )


def read_held(holding: Holding[Any], number: SliceId) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """What a slice holds, as decided epochs left it, and in the schema's metadata where its writers stand."""
    held = holding.held(number)
    with held.lock:
        copy = held.decided_copy()
        vector = dict(held.vector)
    pieces = pieces_of(copy)
    first = next(pieces)
    schema = first.schema.with_metadata({_VECTOR: msgspec.json.encode(vector)})
    batches = (batch for piece in chain([first], pieces) for batch in in_batches(_table(piece)))
    return schema, (batch.replace_schema_metadata(schema.metadata) for batch in batches)


def _table(rows: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches([rows])


def _vector_in(schema: pa.Schema) -> dict[str, Turn]:
    try:
        return msgspec.json.decode((schema.metadata or {}).get(_VECTOR, b""), type=dict[str, Turn])
    except msgspec.DecodeError:
        raise BadMessage("a copy of a slice does not tell where its writers stand") from None


def _record(message: BackUp, holding: Holding[Any], rows: Sequence[SlicedBatch]) -> Record:
    """The rows as the owner checked them, held to the slices that they are for."""
    holding.check_work(message.work)
    others = np.ones(holding.pond_slices, np.bool_)
    others[message.slices] = False
    for batch, counts in rows:
        if len(counts) != holding.pond_slices or counts[others].any():
            raise BadMessage("a record brings rows for slices that it is not about")
        wanted = holding.schema_of(batch.schema.names, message.work)
        if not batch.schema.equals(wanted):
            raise BadMessage(f"a record for {message.resident} has other columns")
    parts = [CheckedRows(batch, counts) for batch, counts in rows]
    return Record(
        message.resident, message.writer, message.turn, message.ballot, message.digest, message.work, parts
    )
