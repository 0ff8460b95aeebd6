"""Runs tasks of calls that only read, one at a time, on what decided epochs left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from millpond.code.capture import described as error_in_words
from millpond.container.holdings.base import HeldSlice, Means
from millpond.container.holdings.program_calls import Calls
from millpond.container.holdings.program_code import LoadedTask, check_code, method_of
from millpond.container.holdings.program_store import ProgramStore
from millpond.container.holdings.program_watch import Watch
from millpond.errors import BadMessage, Moved, SchemaMismatch, Unavailable
from millpond.programs.elements import Element
from millpond.programs.entries import NO_LANE
from millpond.programs.graph import REJECTS
from millpond.programs.merging import Collection
from millpond.programs.packing import pack, unpack
from millpond.programs.tokens import TOKENS, Routed, Token, places_of, sliced, slices_of_keys, tokens_in
from millpond.programs.tracking import Tracked
from millpond.wire.base import SliceId
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.programs import ProgramSpec, ProgramWork, RunTasks, TasksRan

ROUTED = TOKENS.append(pa.field("to", pa.int32()))
"""What `RunTasks` is answered by."""


class ReadingCalls(Calls):
    """The tasks of calls that only read. They see what is decided, also while an epoch is under way in a slice."""

    def ran(self, rows: SlicedBatch) -> Answer[TasksRan]:
        self._seen: set[bytes] = set()
        tokens = self._taken(rows.batch)
        while True:
            made: Routed = []
            for (number, lane), here in self._places(tokens):
                made += self._run_place(self._slices[number], lane, here)
            tokens = [token for _, token in made]
            # What goes on here need not go by way of the client.
            if any(not self._goes_on(number, token, len(made)) for number, token in made):
                return Answer(TasksRan(seen=sorted(self._seen)), _batch(made, self._pond_slices))

    def _taken(self, batch: pa.RecordBatch) -> list[Token]:
        """Tokens that came from a client."""
        if not batch.schema.equals(TOKENS):
            raise BadMessage(f"what comes for {self._spec.name} are no calls")
        tokens = tokens_in(batch)
        for token in tokens:
            if not 0 <= token.task < len(self._method.tasks):
                raise BadMessage(f"{self._spec.name} has no task {token.task}")
        return tokens

    def _goes_on(self, number: SliceId, token: Token, tokens: int) -> bool:
        """Whether the next task of a call, of which there are so many tokens, can run here at once."""
        if token.task < 0 or number not in self._slices:
            return False
        return not self._method.tasks[token.task].task.gathers or tokens == self._spec.lanes

    def _places(self, tokens: Sequence[Token]) -> list[tuple[tuple[SliceId, int], list[Token]]]:
        """The tokens by slice, and the lane in it, where their tasks run."""
        places: dict[tuple[SliceId, int], list[Token]] = {}
        for token in tokens:
            number, lane = self._place(token)
            if number not in self._slices:
                raise Moved(f"slice {number} is not served here", slice_id=number)
            places.setdefault((number, lane), []).append(token)
        return sorted(places.items(), key=lambda each: each[0])

    def _place(self, token: Token) -> tuple[SliceId, int]:
        loaded = self._method.tasks[token.task]
        number = token.at
        if loaded.task.gathers and loaded.key is not None:
            # It says where it comes from: where it is for follows from its key.
            [number] = self._slices_of(loaded, [(token, unpack(token.values, loaded.parts)[loaded.key])])
        match loaded.task.access:
            case "partitioned":
                return SliceId(number), NO_LANE
            case "none":
                return SliceId(token.entry), NO_LANE
            case "lane" if loaded.task.gathers:
                lane = number % self._spec.lanes
            case _:
                lane = token.at
        return self._spec.home_of(lane, self._pond_slices), lane

    def _run_place(self, held: HeldSlice[ProgramStore], lane: int, tokens: Sequence[Token]) -> Routed:
        """Runs tokens of one slice or lane, in the order of rows."""
        made: Routed = []
        held.asking.add(self)
        try:
            with held.lock:
                held.asking.discard(self)
                held.check_whole()
                if held.store.revision != self._spec.revision:
                    raise Unavailable(
                        f"program {self._spec.name!r} is being migrated",
                        hint="try again in a moment",
                        address="",
                    )
                self._seen.add(msgspec.msgpack.encode(sorted(held.vector.items())))
                began = time.thread_time_ns()
                try:
                    for token, values in self._inputs(sorted(tokens, key=lambda each: (each.row, each.at))):
                        held.load.rows_fetched += 1
                        with self._leaving_as_it_is(held.store, token.row):
                            ended = self._ran(held.store, lane, token.row, token.steps, token.task, values)
                        source = token._replace(steps=ended.steps)
                        made += self._routed(source, ended.last, ended.following, ended.values)
                finally:
                    held.load.cpu_ns += time.thread_time_ns() - began
        finally:
            held.asking.discard(self)
        return made

    def _state(self, tracked: Tracked) -> Element:
        return tracked.decided_element()

    def _inputs(self, tokens: Iterable[Token]) -> Iterator[tuple[Token, list[Any]]]:
        """Tokens with their values; those of all lanes as one, where the task gathers."""
        together: dict[tuple[int, int], list[Token]] = {}
        for token in tokens:
            loaded = self._method.tasks[token.task]
            if not loaded.task.gathers:
                yield token, unpack(token.values, loaded.types)
                continue
            parts = together.setdefault((token.row, token.task), [])
            parts.append(token)
            if len(parts) == self._spec.lanes:
                columns = [unpack(part.values, loaded.parts) for part in parts]
                yield token, [Collection(column[0] for column in columns), *columns[0][1:]]
                del together[token.row, token.task]
        if together:
            raise BadMessage(f"of calls of {self._spec.name}, what some lanes gave has not come")

    def _routed(self, token: Token, source: LoadedTask, following: int, values: Sequence[Any]) -> Routed:
        """The call on its way to the next task, or its end: with the slices that it is to be sent to."""
        if following < 0:
            kind = "string" if following == REJECTS else self._method.method.returns or "long"
            packed = self._packed(token, source, values, [kind])
            ended = token._replace(task=following, at=token.entry, values=packed)
            return [(SliceId(token.entry), ended)]
        target = self._method.tasks[following]
        packed = self._packed(token, source, values, target.parts)
        number = 0
        if target.key is not None:
            [number] = self._slices_of(target, [(token, values[target.key])])
        gathers = target.task.gathers
        return [
            (to, token._replace(task=following, at=token.at if gathers else at, values=packed))
            for to, at in places_of(self._spec, target.task, number, token.entry, self._pond_slices)
        ]

    def _packed(self, token: Token, source: LoadedTask, values: Sequence[Any], types: Sequence[str]) -> bytes:
        try:
            return pack(values, types)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._failed(token.row, source.task.line, error_in_words(error)) from error

    def _slices_of(self, target: LoadedTask, keys: Sequence[tuple[Token, Any]]) -> list[int]:
        """Of calls with the keys by which that task accesses state."""
        for token, key in keys:
            if key is None:
                raise self._failed(token.row, target.task.line, "a key is None")
        return slices_of_keys([key for _, key in keys], self._pond_slices)


def run_tasks(
    spec: ProgramSpec,
    message: RunTasks,
    rows: SlicedBatch,
    slices: Mapping[SliceId, HeldSlice[ProgramStore]],
    pond_slices: int,
    means: Means,
) -> Answer[TasksRan]:
    work = ProgramWork(message.graph, message.method, {}, b"")
    watch = Watch(work)

    def run() -> Answer[TasksRan]:
        method = method_of(work)
        if not method.method.read_only:
            raise BadMessage(f"{message.method} of program {spec.name} does not only read")
        check_code(method.graph, spec)
        if message.lanes != spec.lanes:
            raise SchemaMismatch(
                f"program {spec.name!r} has {spec.lanes} lanes, and not {message.lanes} any more",
                resident=spec.name,
                existing=f"lanes={spec.lanes}",
                requested=f"lanes={message.lanes}",
            )
        with watch.running():
            return ReadingCalls(spec, method, work, slices, pond_slices, means, watch).ran(rows)

    return means.limits.run(f"method {message.method!r} of program {spec.name!r}", run, watch)


def _batch(made: Routed, pond_slices: int) -> pa.RecordBatch:
    batch, counts = sliced(made, pond_slices)
    numbers = [number for number, count in enumerate(counts.tolist()) for _ in range(count)]
    return pa.RecordBatch.from_arrays([*batch.columns, pa.array(numbers, pa.int32())], schema=ROUTED)
