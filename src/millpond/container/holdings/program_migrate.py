"""Makes fields of a program anew, of what containers hold: an epoch of its own, in rounds with the others.

Each takes its entries apart, sends what comes of them to where it belongs, and puts together what comes to it, beside what
there is: a decision puts the one in place of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from millpond.code.capture import OF_THE_MACHINE, OF_USER_CODE
from millpond.code.capture import described as error_in_words
from millpond.container.holdings.base import CheckedRows, HeldSlice, Means, RoundsOf
from millpond.container.holdings.program_store import ProgramStore
from millpond.errors import BadMessage, MillpondError, ProgramFailed
from millpond.programs.decided import Place
from millpond.programs.entries import ENTRIES, NO_LANE, batch_for, items_in
from millpond.programs.migrating import Function, fitted_place, fitted_value, made_of, merged, order_of
from millpond.programs.tokens import slices_of_keys
from millpond.wire.base import SliceId
from millpond.wire.connection import SlicedBatch
from millpond.wire.programs import FieldSpec, MigrationWork

COMING = ENTRIES.append(pa.field("from", pa.int32())).append(pa.field("order", pa.binary()))
"""Entries on their way, with the lane and the place that they come from."""
BATCH_ROWS = 1 << 14
ROUND_BYTES = 16 << 20
"""What a container sends another one in a round, if more than one batch."""


class Coming(NamedTuple):
    """Entries of a new field for a slice, or a lane in it, that come from one lane or from slices. `orders` tell where each comes
    from there.
    """

    to: SliceId
    field: str
    lane: int
    source: int
    items: list[tuple[Place, Any]]
    orders: list[bytes]


class Moving:
    """The fields of one migration in one container. `slices` are those that are here."""

    def __init__(
        self,
        work: MigrationWork,
        slices: Mapping[SliceId, HeldSlice[ProgramStore]],
        pond_slices: int,
        means: Means,
    ) -> None:
        self._work = work
        self._slices = slices
        self._pond_slices = pond_slices
        self._means = means
        self._functions: dict[str, tuple[Function | None, Function | None]] = {}

    def run(self, rounds: RoundsOf) -> None:
        """Each slice has what is to come as its `next`."""
        self._guarded(self._load)
        parts: list[tuple[str, SliceId, int, list[tuple[Place, Any]]]] = []
        for name, migration in self._work.fields.items():
            for number, held in self._slices.items():
                with held.lock:
                    parts += [
                        (name, number, lane, list(tracked.items()))
                        for (field, lane), tracked in held.store.parts.items()
                        if field == migration.source
                    ]
        going: list[Coming] = []

        def take_apart() -> None:
            for part in parts:
                going.extend(self._made(*part))

        self._guarded(take_apart)
        came = self._exchanged(going, rounds)
        made: dict[SliceId, ProgramStore] = {}
        self._guarded(lambda: made.update(self._put_together(came)))
        for number, held in self._slices.items():
            with held.lock:
                held.check_whole()
                held.store.next = made[number]

    def _load(self) -> None:
        for name, migration in self._work.fields.items():
            codes = (migration.function, migration.merge)
            function, merge = (None if code is None else code.load() for code in codes)
            self._functions[name] = function, merge

    def _guarded(self, work: Callable[[], None]) -> None:
        """Within the time that user code has, where there is any."""
        if any(each.function or each.merge for each in self._work.fields.values()):
            self._means.limits.run(f"the migration of program {self._work.before.name!r}", work)
        else:
            work()

    # Out

    def _made(self, name: str, number: SliceId, lane: int, items: list[tuple[Place, Any]]) -> list[Coming]:
        """What comes of the entries of a slice or a lane, and where it belongs."""
        spec, source = self._work.after.fields[name], self._source(name)
        function, _ = self._functions[name]
        stays = function is None and source.types == spec.types
        made: list[tuple[Place, Any]] = []
        orders: list[bytes] = []
        for place, value in sorted(items, key=lambda item: item[0]):
            order = order_of(place) if lane == NO_LANE else b""
            try:
                new = (
                    [(place, value)]
                    if stays
                    else [
                        (fitted_place(spec, key), fitted_value(spec, x))
                        for key, x in made_of(function, source, place, value)
                    ]
                )
            except Exception as error:
                raise self._failed(name, place, error) from error
            for each in new:
                orders.append(order + len(made).to_bytes(8, "big"))
                made.append(each)
        target = self._lane(spec, number, lane)
        if spec.kind == "partial":
            home = self._work.after.home_of(target, self._pond_slices)
            return [Coming(home, name, target, lane, made, orders)]
        keys = [place[0] if spec.element == "matrix" else place for place, _ in made]
        going: dict[int, Coming] = {}
        for to, item, order in zip(slices_of_keys(keys, self._pond_slices), made, orders, strict=True):
            coming = going.setdefault(to, Coming(SliceId(to), name, target, lane, [], []))
            coming.items.append(item)
            coming.orders.append(order)
        return list(going.values())

    def _lane(self, spec: FieldSpec, number: SliceId, lane: int) -> int:
        """In which lane an entry of a slice or a lane comes to be."""
        if spec.kind == "partitioned":
            return NO_LANE
        return (number if lane == NO_LANE else lane) % self._work.after.lanes

    def _exchanged(self, going: Sequence[Coming], rounds: RoundsOf) -> list[Coming]:
        """What all containers have for this one, in as many rounds as it takes."""
        by_owner: dict[int, list[Coming]] = {}
        for each in sorted(going, key=lambda one: one.to):
            if each.items:
                by_owner.setdefault(rounds.owners[each.to], []).append(each)
        queues = {owner: list(self._batches(own)) for owner, own in by_owner.items()}
        came: list[Coming] = []
        while True:
            sending = {owner: _taken(queue) for owner, queue in queues.items()}
            batches, [left] = rounds.exchange(sending, [sum(map(len, queues.values()))])
            for batch, counts in batches:
                came += self._coming(batch, np.repeat(np.arange(self._pond_slices), counts).tolist())
            if not left:
                return came

    def _batches(self, going: Sequence[Coming]) -> Iterator[SlicedBatch]:
        fields = self._work.after.fields
        batches, numbers = [], []
        for to, field, lane, source, items, orders in going:
            entries = batch_for(field, fields[field], lane, items)
            sources = pa.repeat(pa.scalar(source, pa.int32()), len(items))
            columns = [*entries.columns, sources, pa.array(orders, pa.binary())]
            batches.append(pa.RecordBatch.from_arrays(columns, schema=COMING))
            numbers += [to] * len(items)
        yield from _sliced(pa.concat_batches(batches), numbers, self._pond_slices)

    # In

    def _coming(self, batch: pa.RecordBatch, numbers: Sequence[int]) -> Iterator[Coming]:
        if not batch.schema.equals(COMING):
            raise BadMessage(f"what comes for {self._work.before.name} in a round are no entries")
        whence = [batch.column(name).to_pylist() for name in ("field", "lane", "from")]
        start = 0
        for (to, field, lane, source), rows in groupby(zip(numbers, *whence, strict=True)):
            if field not in self._work.fields:
                raise BadMessage(f"the field {field!r} is not migrated")
            piece = batch.slice(start, sum(1 for _ in rows))
            start += piece.num_rows
            entries = pa.RecordBatch.from_arrays(piece.columns[: len(ENTRIES)], schema=ENTRIES)
            items = items_in(self._work.after.fields[field], entries)
            yield Coming(SliceId(to), field, lane, source, items, piece.column("order").to_pylist())

    def _put_together(self, came: Sequence[Coming]) -> dict[SliceId, ProgramStore]:
        after = self._work.after
        made = {number: ProgramStore(after.fields, after.revision) for number in self._slices}
        by_place: dict[tuple[SliceId, str, int], list[Coming]] = {}
        for each in came:
            by_place.setdefault((each.to, each.field, each.lane), []).append(each)
        for (number, field, lane), comings in by_place.items():
            rows = [
                (coming.source, order, item)
                for coming in comings
                for item, order in zip(coming.items, coming.orders, strict=True)
            ]
            values: dict[Place, Any] = {}
            for _, _, (place, value) in sorted(rows, key=lambda row: row[:2]):
                values[place] = self._merged(field, place, values[place], value) if place in values else value
            tracked = made[number].part(field, lane)
            for place, value in values.items():
                if after.fields[field].element == "matrix":
                    tracked.element[place] = value  # type: ignore[index] # a matrix
                else:
                    tracked.change(place, value)
        return made

    def _merged(self, field: str, place: Place, old: Any, new: Any) -> Any:
        try:
            return merged(self._functions[field][1], self._work.after.fields[field], old, new)
        except Exception as error:
            raise self._failed(field, place, error) from error

    def _source(self, name: str) -> FieldSpec:
        return self._work.before.fields[self._work.fields[name].source]

    def _failed(self, name: str, place: Place, error: Exception) -> BaseException:
        if isinstance(error, (MillpondError, *OF_THE_MACHINE)) or not isinstance(error, OF_USER_CODE):
            return error
        return ProgramFailed(
            f"the migration of field {name!r} of program {self._work.before.name!r} failed at {place!r}:"
            f" {error_in_words(error)}",
            hint="nothing was changed; give migrate= a function of the key and the value that makes what the field takes",
            program=self._work.before.name,
            method=name,
            line=0,
            row=0,
        )


def _taken(queue: list[SlicedBatch]) -> list[SlicedBatch]:
    """The next batches of a queue that go together."""
    taken = [queue.pop(0)] if queue else []
    size = sum(int(each.batch.nbytes) for each in taken)
    while queue and size + queue[0].batch.nbytes <= ROUND_BYTES:
        size += queue[0].batch.nbytes
        taken.append(queue.pop(0))
    return taken


def _sliced(rows: pa.RecordBatch, numbers: Sequence[int], pond_slices: int) -> Iterator[SlicedBatch]:
    """Rows of these slices, in the order of slices, as batches that each fit a message."""
    for start in range(0, rows.num_rows, BATCH_ROWS):
        counts = np.bincount(numbers[start : start + BATCH_ROWS], minlength=pond_slices)
        yield SlicedBatch(rows.slice(start, BATCH_ROWS), counts.astype(np.int32))


def parts_of(lines: Mapping[SliceId, Sequence[pa.RecordBatch]], pond_slices: int) -> list[CheckedRows]:
    """Entries by slice as parts of a record."""
    pairs = [(number, batch) for number, batches in sorted(lines.items()) for batch in batches]
    if not pairs:
        return []
    numbers = [number for number, batch in pairs for _ in range(batch.num_rows)]
    rows = pa.concat_batches([batch for _, batch in pairs])
    return [CheckedRows(*each) for each in _sliced(rows, numbers, pond_slices)]
