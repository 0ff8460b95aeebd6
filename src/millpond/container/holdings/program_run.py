"""Runs the calls of an epoch: in each round the tasks of one level, in the order of rows, where their entries are.

What a task hands on goes to the container that has the next one's entries, and the result back to where the row came in.
Tasks that access nothing run at once: in place, or in a round of their own where they gather what comes from all lanes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from millpond.code.capture import OF_THE_MACHINE, OF_USER_CODE
from millpond.code.capture import described as error_in_words
from millpond.container.holdings.base import HeldSlice, Means, Record, RoundsOf
from millpond.container.holdings.program_code import LoadedMethod, LoadedTask, rows_schema
from millpond.container.holdings.program_once import (
    Given,
    call_of,
    forget_oldest,
    remember,
    remembered,
)
from millpond.container.holdings.program_store import ProgramStore
from millpond.container.holdings.program_watch import Watch
from millpond.errors import BadMessage, MillpondError, ProgramFailed, Rejected
from millpond.programs.bodies import file_of
from millpond.programs.elements import Element
from millpond.programs.entries import NO_LANE
from millpond.programs.graph import REJECTS, RETURNS
from millpond.programs.merging import Collection
from millpond.programs.packing import pack, unpack
from millpond.programs.rows import arrow_type, as_value, described, place_in_partition
from millpond.programs.tokens import TOKENS, Routed, Token, places_of, sliced, slices_of_keys, tokens_in
from millpond.programs.tracking import Tracked
from millpond.schema import cast_column
from millpond.wire.base import SliceId
from millpond.wire.connection import SlicedBatch
from millpond.wire.programs import ProgramSpec, ProgramWork

T = TypeVar("T")
READERS_S = 0.0002
"""For so long those who read get a slice in which an epoch runs."""
HIDDEN_REJECT = "it was rejected inside of a function, where nobody sees whether something was written before"


class Made(NamedTuple):
    """What a task hands on: of which call, from which slice or lane, and the inputs of the next one."""

    token: Token
    values: Sequence[Any]


class Fresh(NamedTuple):
    """A call with an idempotency key that is not known."""

    key: str
    call: bytes


class EpochCalls:
    """The calls of one epoch in one container. `slices` are those that are here."""

    def __init__(
        self,
        spec: ProgramSpec,
        method: LoadedMethod,
        work: ProgramWork,
        slices: Mapping[SliceId, HeldSlice[ProgramStore]],
        pond_slices: int,
        means: Means,
        watch: Watch | None = None,
    ) -> None:
        self._spec = spec
        self._method = method
        self._work = work
        self._slices = slices
        self._pond_slices = pond_slices
        self._means = means
        self._free = method.levels
        """In place of the level of tasks that access nothing."""
        self.returned: dict[int, dict[int, Given]] = {}
        """By the slice of entry and the row."""
        self._fresh: dict[tuple[int, int], Fresh] = {}
        """By slice and row, too."""
        self._watch = watch or Watch(work)
        self._watch.file = method.graph.file

    def run(self, record: Record, rounds: RoundsOf) -> None:
        entering = self._means.limits.run(self._what, lambda: self._entering(record))
        if self._work.once is not None or self._method.tasks[0].task.access in ("lane", "everywhere"):
            came, _ = rounds.exchange(self._batches(entering, rounds.owners), [])
            waiting = [token for batch, _ in came for token in self._taken(batch)]
        else:
            waiting = [token for _, token in entering]
        level = self._level(0)
        while True:
            due = [token for token in waiting if self._level(token.task) == level]
            waiting = [token for token in waiting if self._level(token.task) != level]
            made = self._run_level(due)
            counts = [0] * (self._free + 1)
            for token in [*waiting, *(token for _, token in made if token.task >= 0)]:
                counts[self._level(token.task)] += 1
            came, counts = rounds.exchange(self._batches(made, rounds.owners), counts)
            for batch, _ in came:
                waiting += self._taken(batch)
            if not any(counts):
                return
            # All have heard the same numbers. What accesses nothing holds nobody up; then the lowest level comes first.
            level = self._free if counts[self._free] else next(n for n, number in enumerate(counts) if number)

    def remember(self) -> None:
        """What new idempotency keys gave: changes of the epoch, as all others."""
        for (number, row), fresh in self._fresh.items():
            held = self._slices[SliceId(number)]
            with held.lock:
                remember(held.store, self._method.method, *fresh, self.returned[number][row])
        for number in {number for number, _ in self._fresh}:
            held = self._slices[SliceId(number)]
            with held.lock:
                forget_oldest(held.store, self._pond_slices)

    def _guarded(self, work: Callable[[], T]) -> T:
        """Within the time and memory that all code of the epoch has together."""

        def run() -> T:
            with self._watch.running():
                return work()

        return self._means.limits.run(self._what, run, self._watch)

    def _level(self, task: int) -> int:
        loaded = self._method.tasks[task]
        return self._free if loaded.is_free else loaded.task.level

    # In

    def _entering(self, record: Record) -> Routed:
        """A token for each row that was staged here, for the first task of the method."""
        first = self._method.tasks[0]
        tokens: Routed = []
        schema = rows_schema(self._work)
        for part in record.parts:
            if not part.batch.schema.equals(schema):
                raise BadMessage(f"rows for {self._spec.name} are not of the schema they were announced with")
            entries = np.repeat(np.arange(self._pond_slices), part.counts).tolist()
            rows = part.batch.column(1).to_pylist()
            columns = [self._argument(part.batch, variable.name) for variable in first.task.inputs]
            values = list(zip(*columns, strict=True)) if columns else [()] * len(rows)
            entering = [
                Made(Token(row, entry, 0, 0, entry, b""), inputs)
                for row, entry, inputs in zip(rows, entries, values, strict=True)
            ]
            if self._work.once is not None:
                entering = self._unknown(part.batch, self._work.once, entering)
            tokens += self._routed(first, entering)
        if (
            self._work.once is None
            and first.task.access == "partitioned"
            and any(number != token.entry for number, token in tokens)
        ):
            raise BadMessage(f"calls of {self._spec.name} come by their first key")
        return tokens

    def _unknown(self, batch: pa.RecordBatch, once: str, entering: Sequence[Made]) -> list[Made]:
        """The calls whose idempotency keys are not remembered; of others, what they gave is kept."""
        method = self._method.method
        keys = batch.column(batch.schema.names.index(once)).to_pylist()
        columns = [self._argument(batch, parameter.name) for parameter in method.parameters]
        arguments = list(zip(*columns, strict=True)) if columns else [()] * len(keys)
        keys_here = {each.key for each in self._fresh.values()}
        fresh = []
        for made, key, given in zip(entering, keys, arguments, strict=True):
            token, call = made.token, call_of(method, given)
            held = self._slices[SliceId(token.entry)]
            with held.lock:
                held.check_whole()
                found = remembered(held.store, method, key, call)
            if found is not None:
                self._keep(token, found)
                continue
            if key in keys_here:
                raise BadMessage(f"an epoch of {self._spec.name} has two calls with one idempotency key")
            keys_here.add(key)
            self._fresh[token.entry, token.row] = Fresh(key, call)
            fresh.append(made)
        return fresh

    def _argument(self, batch: pa.RecordBatch, name: str) -> list[Any]:
        """A parameter's values, of all rows."""
        parameter = next(each for each in self._method.method.parameters if each.name == name)
        column = self._work.arguments.get(name)
        if column is None:
            return [parameter.default] * batch.num_rows
        given = batch.column(batch.schema.names.index(column))
        values = cast_column(given, pa.field(column, arrow_type(parameter.type)), column)
        return [as_value(found, parameter.type) for found in values.to_pylist()]

    def _taken(self, batch: pa.RecordBatch) -> list[Token]:
        """Tokens that came after a round; results are kept."""
        if not batch.schema.equals(TOKENS):
            raise BadMessage(f"what comes for {self._spec.name} in a round are no calls")
        tokens = []
        for token in tokens_in(batch):
            if token.task == RETURNS:
                [result] = unpack(token.values, [self._method.method.returns or "long"])
                self._keep(token, Given(result, None))
            elif token.task == REJECTS:
                self._keep(token, Given(None, unpack(token.values, ["string"])[0]))
            elif 0 <= token.task < len(self._method.tasks):
                tokens.append(token)
            else:
                raise BadMessage(f"{self._spec.name} has no task {token.task}")
        return tokens

    def _keep(self, token: Token, returned: Given) -> None:
        self.returned.setdefault(token.entry, {})[token.row] = returned

    # A round

    def _run_level(self, due: Sequence[Token]) -> Routed:
        """Runs the tasks that are due here: what comes of them."""
        places: dict[tuple[SliceId, int], list[Token]] = {}
        for token in due:
            places.setdefault(self._place(token), []).append(token)

        def run() -> Routed:
            made: Routed = []
            for (number, lane), tokens in sorted(places.items(), key=lambda item: item[0]):
                made += self._run_place(self._slices[number], lane, tokens)
            return made

        return self._guarded(run) if places else []

    def _place(self, token: Token) -> tuple[SliceId, int]:
        """The slice, and the lane in it, where a token's task runs."""
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
        """Runs tokens of one slice or lane, in the order of rows. Between two of them others may read there."""
        over: Routed = []
        going: dict[int, list[Made]] = {}
        inputs = iter(self._inputs(sorted(tokens, key=lambda each: (each.row, each.at))))
        while not self._run_some(held, lane, inputs, over, going):
            time.sleep(READERS_S)
        for following, made in going.items():
            over += self._routed(self._method.tasks[following], made)
        return over

    def _run_some(
        self,
        held: HeldSlice[ProgramStore],
        lane: int,
        inputs: Iterator[tuple[Token, list[Any]]],
        over: Routed,
        going: dict[int, list[Made]],
    ) -> bool:
        """Runs tokens until there are no more: True; or until somebody wants to read there: False."""
        with held.lock:
            held.check_whole()
            began = time.thread_time_ns()
            try:
                for came, values in inputs:
                    with self._leaving_as_it_is(held.store, came):
                        self._run_token(held.store, lane, came, values, over, going)
                    if held.asking:
                        return False
                return True
            finally:
                held.load.cpu_ns += time.thread_time_ns() - began

    @contextmanager
    def _leaving_as_it_is(self, store: ProgramStore, token: Token) -> Iterator[None]:
        """What only reads changes nothing, or fails. What another epoch has done there stays; the caller holds the lock."""
        if not self._method.method.read_only:
            yield
            return
        before = store.touched
        try:
            yield
            if store.touched != before:
                raise self._failed(token, self._method.method.line, "it changed state, and should only read")
        finally:
            store.put_back(store.touched - before)

    def _run_token(
        self,
        store: ProgramStore,
        lane: int,
        token: Token,
        given: Sequence[Any],
        over: Routed,
        going: dict[int, list[Made]],
    ) -> None:
        """Runs a token's task, and those after it that can run in the same place."""
        following = token.task
        self._watch.row = token.row
        while True:
            self._watch.task = loaded = self._method.tasks[following]
            if token.steps >= self._method.graph.max_rounds:
                raise self._failed(token, loaded.task.line, f"it went through {token.steps:,} tasks")
            token = token._replace(steps=token.steps + 1)
            following, given = self._call(loaded, store, lane, token, given)
            if following < 0 or not self._runs_here(self._method.tasks[following]):
                break
        if following < 0:
            kind = "string" if following == REJECTS else self._method.method.returns or "long"
            packed = self._packed(token, loaded, given, [kind])
            ended = token._replace(task=following, at=token.entry, values=packed)
            over.append((SliceId(token.entry), ended))
        else:
            going.setdefault(following, []).append(Made(token, given))

    def _runs_here(self, loaded: LoadedTask) -> bool:
        return loaded.is_free and not loaded.task.gathers

    def _call(
        self, loaded: LoadedTask, store: ProgramStore, lane: int, token: Token, values: Sequence[Any]
    ) -> tuple[int, Sequence[Any]]:
        """Runs one task: the number of the next one and its inputs, or how the call ends."""
        state = None if loaded.task.field is None else self._state(store.part(loaded.task.field, lane))
        try:
            following, given = loaded.function(state, *values)
        except Rejected as error:
            raise self._failed(token, self._line(loaded, error), HIDDEN_REJECT) from error
        except RecursionError as error:
            raise self._failed(token, self._line(loaded, error), "it called itself too deeply") from error
        except (MillpondError, *OF_THE_MACHINE):
            raise
        except OF_USER_CODE as error:
            raise self._failed(token, self._line(loaded, error), error_in_words(error)) from error
        if following == RETURNS and self._method.method.returns is None:
            return RETURNS, [None]
        return following, given

    def _state(self, tracked: Tracked) -> Element:
        """What a task works on."""
        return tracked.element

    def _inputs(self, tokens: Iterable[Token]) -> Iterable[tuple[Token, list[Any]]]:
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

    # Out

    def _packed(self, token: Token, source: LoadedTask, values: Sequence[Any], types: Sequence[str]) -> bytes:
        try:
            return pack(values, types)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._failed(token, source.task.line, error_in_words(error)) from error

    def _routed(self, target: LoadedTask, made: Sequence[Made]) -> Routed:
        """Tokens for the next task: each with the slice that it is to be sent to."""
        task, routed = target.task, []
        # What is packed is of its type: a key, too.
        packs = [
            self._packed(token, self._method.tasks[token.task], values, target.parts)
            for token, values in made
        ]
        numbers = [0] * len(made)
        if target.key is not None:
            numbers = self._slices_of(target, [(token, values[target.key]) for token, values in made])
        for number, (token, _), packed in zip(numbers, made, packs, strict=True):
            routed += [
                (to, token._replace(task=task.number, at=token.at if task.gathers else at, values=packed))
                for to, at in places_of(self._spec, task, number, token.entry, self._pond_slices)
            ]
        return routed

    def _slices_of(self, target: LoadedTask, keys: Sequence[tuple[Token, Any]]) -> list[int]:
        """Of calls with the keys by which that task accesses state."""
        for token, key in keys:
            if key is None:
                raise self._failed(token, target.task.line, "a key is None")
        return slices_of_keys([key for _, key in keys], self._pond_slices)

    def _batches(self, made: Routed, owners: Mapping[SliceId, int]) -> dict[int, list[SlicedBatch]]:
        """Tokens by container, grouped by slice."""
        by_container: dict[int, Routed] = {}
        for number, token in made:
            by_container.setdefault(owners[number], []).append((number, token))
        return {container: [sliced(own, self._pond_slices)] for container, own in by_container.items()}

    # Words

    @property
    def _what(self) -> str:
        return f"method {self._method.method.name!r} of program {self._spec.name!r}"

    def _line(self, loaded: LoadedTask, error: BaseException) -> int:
        """The line of the user's file at which a task failed; its first one where that is not known."""
        line, trace = loaded.task.line, error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == file_of(self._method.method.name, loaded.task.number):
                line = loaded.task.lines[trace.tb_lineno - 1]
            trace = trace.tb_next
        return line

    def _failed(self, token: Token, line: int, why: str) -> ProgramFailed:
        return ProgramFailed(
            f"{self._what} failed in line {line} of {self._method.graph.file}, {described(token.row)}: {why}",
            hint="nothing was changed; mend the method or the row, and the epoch can come again",
            program=self._spec.name,
            method=self._method.method.name,
            line=line,
            row=place_in_partition(token.row),
        )
