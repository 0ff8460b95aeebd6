"""Runs the calls of an epoch: in each round the tasks of one level, in the order of rows, where their entries are.

What a task hands on goes to the container that has the next one's entries, and the result back to where the row came in.
Tasks that access nothing run at once: in place, or in a round of their own where they gather what comes from all lanes.
Between rounds calls are columns, a batch for each task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import merge
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millpond.code.capture import described as error_in_words
from millpond.container.holdings.base import HeldSlice, Means, Record, RoundsOf
from millpond.container.holdings.program_calls import Calls, T
from millpond.container.holdings.program_code import LoadedMethod, LoadedTask, rows_schema
from millpond.container.holdings.program_kernels import (
    Columns,
    NotCompiled,
    has_nulls,
    new_control,
    run_kernel,
)
from millpond.container.holdings.program_made import HandedOn, Made, Returned, heads_of
from millpond.container.holdings.program_once import Given, call_of, forget_oldest, remember, remembered
from millpond.container.holdings.program_store import ProgramStore
from millpond.container.holdings.program_watch import Watch
from millpond.errors import BadMessage
from millpond.programs.call_columns import column_of, is_sound, values_of
from millpond.programs.calls import (
    HEAD_COLUMNS,
    Heads,
    Longs,
    Numbers,
    Place,
    Routed,
    by_place,
    calls_of,
    calls_schema,
    homes_of,
    routed,
    slices_of_column,
    why_unsound,
    with_column,
)
from millpond.programs.elements import DenseMatrix, Element, Matrix, Vector
from millpond.programs.entries import NO_LANE
from millpond.programs.graph import REJECTS, RETURNS
from millpond.programs.machine.plan import LANES, Plan
from millpond.programs.merging import Collection
from millpond.programs.packing import pack
from millpond.programs.rows import arrow_type, as_value
from millpond.schema import cast_column
from millpond.wire.base import SliceId
from millpond.wire.connection import SlicedBatch
from millpond.wire.programs import ProgramSpec, ProgramWork

READERS_S = 0.0002
"""For so long those who read get a slice in which an epoch runs."""
BLOCK = 256
"""So many calls have their values as Python has them, at a time."""
CHUNK, CHUNK_MAX, CHUNK_S = 256, 1 << 14, 0.002
"""So many calls are run by a kernel at a time, at first; then as many as take about so long."""
RUN_MIN = 8
"""Where calls of several tasks take turns in one place, a kernel runs at least so many on the average."""
SENT_BYTES = 64 << 20
"""What is larger is sent in parts."""
OF_THE_CALL = (Vector, Matrix, DenseMatrix)
"""Elements that are no part of the state, whose own classes know what has changed."""
Waiting = dict[int, list[pa.RecordBatch]]
Going = list[tuple[int, Routed]]
"""By the next task, or how calls ended, where they go."""


class Fresh(NamedTuple):
    """A call with an idempotency key that is not known."""

    key: str
    call: bytes


class Coming(NamedTuple):
    """A call whose task is due, with the values of its inputs."""

    row: int
    at: int
    entry: int
    steps: int
    task: int
    values: Sequence[Any]


class Due:
    """Calls whose task is due, and what is made of them when it is needed."""

    def __init__(self, task: int, calls: pa.RecordBatch) -> None:
        self.task = task
        self.calls = calls

    @cached_property
    def heads(self) -> Heads:
        return Heads.of(self.calls)

    @cached_property
    def has_nulls(self) -> bool:
        return has_nulls(self.calls)

    def columns(self, plan: Plan) -> Columns:
        if self._columns is None:
            self._columns = Columns(self.calls, plan)
        return self._columns

    _columns: Columns | None = None


class Here(NamedTuple):
    """Calls that wait for a task in one place: which of those that are due, in the order in which they come."""

    due: Due
    order: Longs


class EpochCalls(Calls):
    """The calls of one epoch in one container."""

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
        super().__init__(spec, method, work, slices, pond_slices, means, watch)
        self._free = method.levels
        """In place of the level of tasks that access nothing."""
        self.returned = Returned(method.method.returns or "long")
        self._fresh: dict[tuple[int, int], Fresh] = {}
        """By slice and row."""
        self._control = self._watch.control = new_control(spec.lanes)

    def run(self, record: Record, rounds: RoundsOf) -> None:
        entering = self._means.limits.run(self._what, lambda: self._entering(record))
        waiting: Waiting = {}
        if self._work.once is not None or self._method.tasks[0].task.access in ("lane", "everywhere"):
            came, _ = rounds.exchange(self._batches(entering, rounds.owners), [])
            for batch, _ in came:
                self._take(batch, waiting)
        else:
            waiting[0] = [each.calls for _, each in entering]
        level = self._level(0)
        while True:
            due = {task: waiting.pop(task) for task in sorted(waiting) if self._level(task) == level}
            made = self._run_level(due)
            counts = [0] * (self._free + 1)
            left = [(task, batch) for task, batches in waiting.items() for batch in batches]
            for task, calls in [*left, *((task, each.calls) for task, each in made if task >= 0)]:
                counts[self._level(task)] += len(calls)
            came, counts = rounds.exchange(self._batches(made, rounds.owners), counts)
            for batch, _ in came:
                self._take(batch, waiting)
            if not any(counts):
                return
            # All have heard the same numbers. What accesses nothing holds nobody up; then the lowest level comes first.
            level = self._free if counts[self._free] else next(n for n, number in enumerate(counts) if number)

    def remember(self) -> None:
        """What new idempotency keys gave: changes of the epoch, as all others."""
        now_s = self._means.wall_s()
        results, errors = self.returned.of([row for _, row in self._fresh])
        given = zip(values_of(results, self.returned.kind), errors.to_pylist(), strict=True)
        for ((number, _), fresh), (result, error) in zip(self._fresh.items(), given, strict=True):
            held = self._slices[SliceId(number)]
            with held.lock:
                remember(held.store, self._method.method, *fresh, Given(result, error), now_s)
        for number in {number for number, _ in self._fresh}:
            held = self._slices[SliceId(number)]
            with held.lock:
                forget_oldest(held.store, self._pond_slices, now_s)

    def _guarded(self, work: Callable[[], T]) -> T:
        """Within the time and memory that all code of the epoch has together."""

        def run() -> T:
            with self._watch.running():
                return work()

        return self._means.limits.run(self._what, run, self._watch)

    def _level(self, task: int) -> int:
        loaded = self._method.tasks[task]
        return self._free if loaded.is_free else loaded.task.level

    def _kinds(self, following: int) -> tuple[str, ...]:
        """The types of what goes to a task, or of how a call ended."""
        if following >= 0:
            return self._method.tasks[following].parts
        return ("string",) if following == REJECTS else (self.returned.kind,)

    # In

    def _entering(self, record: Record) -> Going:
        """The calls of rows that were staged here, for the first task of the method."""
        first = self._method.tasks[0]
        going: Going = []
        schema = rows_schema(self._work)
        for part in record.parts:
            if not part.batch.schema.equals(schema):
                raise BadMessage(f"rows for {self._spec.name} are not of the schema they were announced with")
            if not len(part.batch):
                continue
            entries = np.repeat(np.arange(self._pond_slices, dtype=np.int32), part.counts)
            none = np.zeros(len(entries), np.int32)
            heads = Heads(part.batch.column(1).to_numpy(), entries, none, none, entries)
            inputs = [self._argument(part.batch, variable.name) for variable in first.task.inputs]
            calls = calls_of(heads, inputs, first.schema)
            if self._work.once is not None:
                calls = self._unknown(part.batch, self._work.once, calls)
            going.append((0, self._routed(0, calls)))
        if (
            self._work.once is None
            and first.task.access == "partitioned"
            and any((each.to != each.calls.column(1).to_numpy()).any() for _, each in going)
        ):
            raise BadMessage(f"calls of {self._spec.name} come by their first key")
        return going

    def _unknown(self, batch: pa.RecordBatch, once: str, calls: pa.RecordBatch) -> pa.RecordBatch:
        """The calls whose idempotency keys are not remembered; of others, what they gave is kept."""
        method, heads = self._method.method, Heads.of(calls)
        keys = batch.column(batch.schema.names.index(once)).to_pylist()
        columns = [values_of(self._argument(batch, each.name), each.type) for each in method.parameters]
        arguments = list(zip(*columns, strict=True)) if columns else [()] * len(keys)
        keys_here = {each.key for each in self._fresh.values()}
        fresh, known, results = [], [], []
        rows, entries = heads.rows.tolist(), heads.entries.tolist()
        for place, (row, entry, key, given) in enumerate(zip(rows, entries, keys, arguments, strict=True)):
            call = call_of(method, given)
            held = self._slices[SliceId(entry)]
            with held.lock:
                held.check_whole()
                found = remembered(held.store, method, key, call)
            if found is not None:
                known.append(place)
                results.append(found)
                continue
            if key in keys_here:
                raise BadMessage(f"an epoch of {self._spec.name} has two calls with one idempotency key")
            keys_here.add(key)
            self._fresh[entry, row] = Fresh(key, call)
            fresh.append(place)
        for place, found in zip(known, results, strict=True):
            following = RETURNS if found.error is None else REJECTS
            value = found.result if found.error is None else found.error
            kinds = self._kinds(following)
            one = Heads.of(calls.slice(place, 1))
            made = calls_of(one, [column_of([value], kinds[0])], calls_schema(kinds))
            self.returned.keep(made, rejected=following == REJECTS)
        return calls.take(pa.array(fresh, pa.int64())) if known else calls

    def _argument(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """A parameter's values, of all rows."""
        parameter = next(each for each in self._method.method.parameters if each.name == name)
        column, kind = self._work.arguments.get(name), parameter.type
        if column is None:
            one = column_of([parameter.default], kind)
            return pa.concat_arrays([one] * batch.num_rows) if batch.num_rows else one.slice(0, 0)
        given = batch.column(batch.schema.names.index(column))
        values = cast_column(given, pa.field(column, arrow_type(kind)), column)
        if values.type.equals(self._columns_of(kind)) and is_sound(values, kind):
            return values
        return column_of([as_value(found, kind) for found in values.to_pylist()], kind)

    def _columns_of(self, kind: str) -> pa.DataType:
        return calls_schema((kind,)).field(HEAD_COLUMNS).type

    def _take(self, batch: pa.RecordBatch, waiting: Waiting) -> None:
        """Calls that came after a round; results are kept."""
        if not len(batch):
            return
        place = batch.schema.get_field_index("task")
        tasks = batch.column(place).unique().to_pylist() if place >= 0 else []
        if len(tasks) != 1 or type(tasks[0]) is not int:
            raise BadMessage(f"what comes for {self._spec.name} in a round are no calls of one task")
        task: int = tasks[0]
        if not REJECTS <= task < len(self._method.tasks):
            raise BadMessage(f"{self._spec.name} has no task {task}")
        kinds = self._kinds(task)
        wrong = why_unsound(batch, calls_schema(kinds), kinds)
        if wrong:
            raise BadMessage(f"what comes for {self._spec.name} in a round {wrong}")
        if task < 0:
            self.returned.keep(batch, rejected=task == REJECTS)
        else:
            waiting.setdefault(task, []).append(batch)

    # A round

    def _run_level(self, due: Waiting) -> Going:
        """Runs the tasks that are due here: what comes of them."""
        places: dict[Place, list[Here]] = {}
        for task, batches in due.items():
            if any(map(len, batches)):
                calls = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
                waiting = Due(task, calls)
                for place, order in self._places(waiting).items():
                    places.setdefault(place, []).append(Here(waiting, order))

        def run() -> Going:
            made = Made()
            for place in sorted(places):
                self._run_place(self._slices[place.slice], place.lane, places[place], made)
            return self._going(made)

        return self._guarded(run) if places else []

    def _places(self, due: Due) -> dict[Place, Longs]:
        """Which calls of a task run where."""
        loaded, heads = self._method.tasks[due.task], due.heads
        number, lanes = heads.at, np.full(len(due.calls), NO_LANE, np.int32)
        if loaded.task.gathers and loaded.key is not None:
            # It says where it comes from: where it is for follows from its key.
            number = self._slices_of(loaded, due.calls)
        match loaded.task.access:
            case "partitioned":
                slices = number
            case "none":
                slices = heads.entries
            case _:
                lanes = number % np.int32(self._spec.lanes) if loaded.task.gathers else heads.at
                if ((lanes < 0) | (lanes >= self._spec.lanes)).any():
                    raise BadMessage(f"what comes for {self._spec.name} in a round is for no lane of it")
                slices = homes_of(self._spec, lanes, self._pond_slices)
        places = by_place(heads, slices, lanes, self._spec.lanes)
        if any(place.slice not in self._slices for place in places):
            raise BadMessage(f"what comes for {self._spec.name} in a round is for slices of others")
        return places

    def _run_place(self, held: HeldSlice[ProgramStore], lane: int, works: Sequence[Here], made: Made) -> None:
        """Runs calls in one slice or lane, in the order of rows: by kernels, where there are some that run for long enough."""
        works = [self._gathered(work) for work in works]
        compiled = [self._has_kernel(work) for work in works]
        pieces = in_turns(works) if any(compiled) else []
        if not pieces or sum(len(work.order) for work in works) < RUN_MIN * (len(pieces) - 1):
            self._interpret(held, lane, works, made)
            return
        for piece in pieces:
            if self._has_kernel(piece):
                self._run_compiled(held, lane, piece, made)
            else:
                self._interpret(held, lane, [piece], made)

    # Interpreted

    def _interpret(self, held: HeldSlice[ProgramStore], lane: int, works: Sequence[Here], made: Made) -> None:
        """Between two calls others may read there."""
        inputs = iter(self._inputs(works))
        began = time.thread_time()
        while not self._run_some(held, lane, inputs, made):
            self._means.sleep(READERS_S)
        for work in works:
            self._method.tasks[work.due.task].kernel.interpreted((time.thread_time() - began) / len(works))

    def _run_some(
        self, held: HeldSlice[ProgramStore], lane: int, inputs: Iterator[Coming], made: Made
    ) -> bool:
        """Runs calls until there are no more: True; or until somebody wants to read there: False."""
        with held.lock:
            held.check_whole()
            began = time.thread_time_ns()
            try:
                for call in inputs:
                    with self._leaving_as_it_is(held.store, call.row):
                        self._run_one(held.store, lane, call, made)
                    if held.asking:
                        return False
                return True
            finally:
                held.load.cpu_ns += time.thread_time_ns() - began

    def _run_one(self, store: ProgramStore, lane: int, call: Coming, made: Made) -> None:
        row, at, entry, steps, task, values = call
        steps, last, following, values = self._ran(store, lane, row, steps, task, values)
        # A row as it is in the state would go on changing, by the calls that come next.
        values = [
            value.copy() if isinstance(value, Element) and type(value) not in OF_THE_CALL else value
            for value in values
        ]
        made.add(following, HandedOn(row, entry, steps, at, last.task.line, values))

    def _inputs(self, works: Sequence[Here]) -> Iterable[Coming]:
        """Calls with their values, in the order of rows; those of all lanes as one, where the task gathers."""
        if len(works) == 1:
            return self._values(works[0])
        return merge(*map(self._values, works), key=lambda call: (call.row, call.at))

    def _values(self, work: Here) -> Iterator[Coming]:
        task, calls = work.due.task, work.due.calls
        loaded, order = self._method.tasks[task], work.order
        parts = self._parts(task)
        for start in range(0, len(order), parts * BLOCK):
            block = calls.take(pa.array(order[start : start + parts * BLOCK]))
            columns = [block.column(HEAD_COLUMNS + n) for n in range(len(loaded.parts))]
            heads = [block.column(name).to_pylist() for name in ("row", "at", "entry", "steps")]
            if loaded.task.gathers:
                every = values_of(columns[0], loaded.parts[0])
                lists = [every[n : n + parts] for n in range(0, len(every), parts)]
                one = pa.array(range(0, len(block), parts))
                rest = zip(columns[1:], loaded.parts[1:], strict=True)
                values = [list(map(Collection, lists)), *(values_of(c.take(one), kind) for c, kind in rest)]
                # It has come when the last one has.
                heads = [head[parts - 1 :: parts] for head in heads]
            else:
                values = [values_of(c, kind) for c, kind in zip(columns, loaded.parts, strict=True)]
            inputs = zip(*values, strict=True) if values else [()] * len(heads[0])
            for row, at, entry, steps, given in zip(*heads, inputs, strict=True):
                yield Coming(row, at, entry, steps, task, given)

    def _parts(self, task: int) -> int:
        """How many parts a call of a task has."""
        return self._spec.lanes if self._method.tasks[task].task.gathers else 1

    def _gathered(self, work: Here) -> Here:
        """Checks calls that come from all lanes: each from one after the other."""
        lanes = self._parts(work.due.task)
        if lanes == 1:
            return work
        heads, order = work.due.heads, work.order
        rows = heads.rows[order]
        complete = len(rows) % lanes == 0
        if complete:
            of_lanes = heads.at[order].reshape(-1, lanes) == np.arange(lanes)
            of_row = rows.reshape(-1, lanes) == rows[::lanes].reshape(-1, 1)
            complete = bool(of_lanes.all() and of_row.all())
        if not complete:
            raise BadMessage(f"of calls of {self._spec.name}, what some lanes gave has not come")
        return work

    # Compiled

    def _has_kernel(self, work: Here) -> bool:
        kernel = self._method.tasks[work.due.task].kernel
        return kernel.ready(len(work.order)) is not None and not work.due.has_nulls

    def _run_compiled(self, held: HeldSlice[ProgramStore], lane: int, work: Here, made: Made) -> None:
        """Runs calls by their kernel, some at a time: in between others may read there."""
        parts, first, size = self._parts(work.due.task), 0, CHUNK
        while first < len(work.order):
            chunk = Here(work.due, work.order[first : first + parts * size])
            began = time.thread_time_ns()
            if not self._run_chunk(held, lane, chunk, made):
                self._interpret(held, lane, [chunk], made)
            took_s = (time.thread_time_ns() - began) / 1e9
            size = (
                min(2 * size, CHUNK_MAX)
                if took_s < CHUNK_S / 2
                else max(1, size // 2)
                if took_s > 2 * CHUNK_S
                else size
            )
            first += len(chunk.order)
            if held.asking:
                self._means.sleep(READERS_S)

    def _run_chunk(self, held: HeldSlice[ProgramStore], lane: int, work: Here, made: Made) -> bool:
        """Whether the kernel ran all of these calls. If not they have done nothing: whatever it is, the interpreter tells it."""
        loaded = self._method.tasks[work.due.task]
        own = Made()
        with held.lock:
            held.check_whole()
            began, store = time.thread_time_ns(), held.store
            tracked: Any = None if loaded.task.field is None else store.part(loaded.task.field, lane)
            mark = None if tracked is None else tracked.mark()
            before = store.touched if self._method.method.read_only else None
            try:
                self._run_kernel(work, store, lane, own)
                if before is not None and store.touched != before:
                    raise NotCompiled
            except Exception:  # noqa: BLE001 - of which the interpreter says what it is
                if tracked is not None:
                    tracked.undo_to(mark)
                return False
            finally:
                self._watch.rows = None
                held.load.cpu_ns += time.thread_time_ns() - began
        made.merge(own)
        return True

    def _run_kernel(self, work: Here, store: ProgramStore, lane: int, made: Made) -> None:
        """Runs calls by their kernel, and the tasks after it that can run in the same place. NotCompiled, or what was raised."""
        due, order = work
        loaded, heads, parts = self._method.tasks[due.task], due.heads, self._parts(due.task)
        drive, plan = loaded.kernel.ready(0), loaded.kernel.plan
        if drive is None or plan is None or (heads.steps[order] >= self._method.graph.max_rounds).any():
            raise NotCompiled
        state = 0 if loaded.task.field is None else store.part(loaded.task.field, lane).element
        self._control[LANES] = parts
        self._watch.task, self._watch.rows = loaded, heads.rows[order[::parts]]
        made_here = run_kernel(
            drive, plan, self.returned.kind, state, due.calls, heads, due.columns(plan), order, self._control
        )
        for following, calls in made_here:
            if following < 0 or not self._method.tasks[following].runs_anywhere:
                made.add_all(following, calls)
                continue
            next_here = Here(Due(following, calls), np.arange(len(calls)))
            if self._has_kernel(next_here):
                self._run_kernel(next_here, store, lane, made)
            else:
                self._watch.rows = None
                for call in self._values(next_here):
                    self._run_one(store, lane, call, made)

    # Out

    def _going(self, made: Made) -> Going:
        """What tasks handed on, with where it goes."""
        batches = {following: list(each) for following, each in made.batches.items()}
        for following, calls in made.single.items():
            batches.setdefault(following, []).append(self._packed(following, calls))
        return [
            (following, self._routed(following, calls))
            for following, each in batches.items()
            for calls in each
        ]

    def _packed(self, following: int, calls: Sequence[HandedOn]) -> pa.RecordBatch:
        """Calls that were run one by one, as a batch."""
        kinds = self._kinds(following)
        columns = list(zip(*(call.values for call in calls), strict=True)) if kinds else []
        try:
            inputs = [column_of(values, kind) for values, kind in zip(columns, kinds, strict=True)]
        except (TypeError, ValueError, OverflowError):
            self._check_types(calls, kinds)
            raise
        return calls_of(heads_of(calls, following), inputs, calls_schema(kinds))

    def _check_types(self, calls: Sequence[HandedOn], kinds: Sequence[str]) -> None:
        """Fails for the first call that hands on what is not of its type."""
        for call in calls:
            try:
                pack(call.values, kinds)
            except (TypeError, ValueError, OverflowError) as error:
                raise self._failed(call.row, call.line, error_in_words(error)) from error

    def _routed(self, following: int, calls: pa.RecordBatch) -> Routed:
        if following < 0:
            entries = calls.column(1).to_numpy()
            return Routed(with_column(calls, "at", entries), entries)
        target = self._method.tasks[following]
        keys = None if target.key is None else self._slices_of(target, calls)
        return routed(self._spec, target.task, calls, keys, self._pond_slices)

    def _slices_of(self, target: LoadedTask, calls: pa.RecordBatch) -> Numbers:
        """Of calls with the keys by which that task accesses state."""
        assert target.key is not None
        keys = calls.column(HEAD_COLUMNS + target.key)
        if keys.null_count:
            row = calls.column(0)[pc.index(keys.is_null(), True).as_py()].as_py()
            raise self._failed(row, target.task.line, "a key is None")
        return slices_of_column(keys, self._pond_slices)

    def _batches(self, going: Going, owners: Mapping[SliceId, int]) -> dict[int, list[SlicedBatch]]:
        """Calls by container. They are not put in the order of slices: where they go follows from their heads and keys."""
        owner_of = np.array([owners.get(SliceId(n), -1) for n in range(self._pond_slices)], np.int32)
        found: dict[int, list[SlicedBatch]] = {}
        for _, (calls, to) in going:
            containers = owner_of[to]
            for container in np.unique(containers).tolist():
                places = np.flatnonzero(containers == container)
                own = calls if len(places) == len(calls) else calls.take(pa.array(places))
                size = max(1, -(-len(own) // max(1, -(-own.nbytes // SENT_BYTES))))
                for start in range(0, len(own), size):
                    part = own.slice(start, size)
                    counts = np.array([len(part)], np.int32)
                    found.setdefault(container, []).append(SlicedBatch(part, counts))
        return found


def in_turns(works: Sequence[Here]) -> list[Here]:
    """Calls of several tasks in one place, as they take turns in the order of rows."""
    if len(works) == 1:
        return list(works)
    of_work = np.repeat(np.arange(len(works)), [len(work.order) for work in works])
    orders = np.concatenate([work.order for work in works])
    rows = np.concatenate([work.due.heads.rows[work.order] for work in works])
    at = np.concatenate([work.due.heads.at[work.order] for work in works])
    turns = np.lexsort((of_work, at, rows))
    of_turn = of_work[turns]
    starts = np.flatnonzero(np.concatenate(([True], of_turn[1:] != of_turn[:-1])))
    pieces = np.split(orders[turns], starts[1:])
    return [Here(works[n].due, piece) for n, piece in zip(of_turn[starts].tolist(), pieces, strict=True)]
