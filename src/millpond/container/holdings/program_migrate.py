"""Makes fields of a program anew, of what containers hold: an epoch of its own, in rounds with the others.

Each takes its entries apart, sends what comes of them to where it belongs, and puts together what comes to it, beside what
there is: a decision puts the one in place of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from millpond.code.capture import OF_THE_MACHINE, OF_USER_CODE
from millpond.code.capture import described as error_in_words
from millpond.container.holdings.base import CheckedRows, HeldSlice, Means, RoundsOf
from millpond.container.holdings.program_store import ProgramStore
from millpond.errors import BadMessage, MillpondError, ProgramFailed
from millpond.programs.decided import Place
from millpond.programs.entries import ENTRIES, NO_LANE, Entry, entry_of, place_of, value_of
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
    """An entry of a new field. `order` tells where it comes from, and which it is of those that come from there."""

    field: str
    lane: int
    place: Place
    value: Any
    source: int
    order: bytes


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
        going: list[tuple[SliceId, Coming]] = []

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

    def _made(
        self, name: str, number: SliceId, lane: int, items: list[tuple[Place, Any]]
    ) -> list[tuple[SliceId, Coming]]:
        """What comes of the entries of a slice or a lane, and where it belongs."""
        spec, source = self._work.after.fields[name], self._source(name)
        function, _ = self._functions[name]
        made: list[Coming] = []
        for place, value in sorted(items, key=lambda item: item[0]):
            order = order_of(place)
            try:
                for count, (key, new) in enumerate(made_of(function, source, place, value)):
                    target = self._lane(spec, number, lane)
                    coming = Coming(
                        name,
                        target,
                        fitted_place(spec, key),
                        fitted_value(spec, new),
                        lane,
                        order + count.to_bytes(8, "big"),
                    )
                    made.append(coming)
            except Exception as error:
                raise self._failed(name, place, error) from error
        if spec.kind == "partial":
            home = self._work.after.home_of
            return [(home(each.lane, self._pond_slices), each) for each in made]
        keys = [each.place[0] if spec.element == "matrix" else each.place for each in made]
        numbers = map(SliceId, slices_of_keys(keys, self._pond_slices))
        return list(zip(numbers, made, strict=True))

    def _lane(self, spec: FieldSpec, number: SliceId, lane: int) -> int:
        """In which lane an entry of a slice or a lane comes to be."""
        if spec.kind == "partitioned":
            return NO_LANE
        return (number if lane == NO_LANE else lane) % self._work.after.lanes

    def _exchanged(
        self, going: Sequence[tuple[SliceId, Coming]], rounds: RoundsOf
    ) -> list[tuple[SliceId, Coming]]:
        """What all containers have for this one, in as many rounds as it takes."""
        by_owner: dict[int, list[tuple[SliceId, Coming]]] = {}
        for number, each in sorted(going, key=lambda one: one[0]):
            by_owner.setdefault(rounds.owners[number], []).append((number, each))
        queues = {
            owner: list(
                _sliced(self._batch([each for _, each in own]), [n for n, _ in own], self._pond_slices)
            )
            for owner, own in by_owner.items()
        }
        came: list[tuple[SliceId, Coming]] = []
        while True:
            sending = {owner: _taken(queue) for owner, queue in queues.items()}
            batches, [left] = rounds.exchange(sending, [sum(map(len, queues.values()))])
            for batch, counts in batches:
                numbers = np.repeat(np.arange(self._pond_slices), counts).tolist()
                came += zip(map(SliceId, numbers), self._coming(batch), strict=True)
            if not left:
                return came

    def _batch(self, entries: Sequence[Coming]) -> pa.RecordBatch:
        fields = self._work.after.fields
        rows = [
            (
                *entry_of(each.field, fields[each.field], each.lane, each.place, each.value),
                each.source,
                each.order,
            )
            for each in entries
        ]
        columns = zip(*rows, strict=True)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, COMING, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=COMING)

    # In

    def _coming(self, batch: pa.RecordBatch) -> Iterator[Coming]:
        if not batch.schema.equals(COMING):
            raise BadMessage(f"what comes for {self._work.before.name} in a round are no entries")
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            entry = Entry(*row[: len(ENTRIES)])
            if entry.field not in self._work.fields:
                raise BadMessage(f"the field {entry.field!r} is not migrated")
            spec = self._work.after.fields[entry.field]
            yield Coming(
                entry.field, entry.lane, place_of(spec, entry), value_of(spec, entry), *row[len(ENTRIES) :]
            )

    def _put_together(self, came: Sequence[tuple[SliceId, Coming]]) -> dict[SliceId, ProgramStore]:
        after = self._work.after
        made = {number: ProgramStore(after.fields, after.revision) for number in self._slices}
        places: dict[tuple[SliceId, str, int], dict[Place, Any]] = {}
        for number, each in sorted(came, key=lambda one: (one[0], one[1].source, one[1].order)):
            values = places.setdefault((number, each.field, each.lane), {})
            if each.place in values:
                _, merge = self._functions[each.field]
                try:
                    value = merged(merge, after.fields[each.field], values[each.place], each.value)
                except Exception as error:
                    raise self._failed(each.field, each.place, error) from error
                values[each.place] = value
            else:
                values[each.place] = each.value
        for (number, field, lane), values in places.items():
            tracked = made[number].part(field, lane)
            for place, value in values.items():
                if after.fields[field].element == "matrix":
                    tracked.element[place] = value  # type: ignore[index] # a matrix
                else:
                    tracked.change(place, value)
        return made

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
