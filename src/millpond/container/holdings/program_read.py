"""Runs tasks of calls that only read, one at a time, on what decided epochs left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pyarrow as pa

from millpond.container.holdings.base import HeldSlice, Means
from millpond.container.holdings.program_code import check_code, method_of
from millpond.container.holdings.program_run import EpochCalls, Made, T
from millpond.container.holdings.program_store import ProgramStore
from millpond.container.holdings.program_watch import Watch
from millpond.errors import BadMessage, Moved, SchemaMismatch, Unavailable
from millpond.programs.elements import Element
from millpond.programs.tokens import TOKENS, Routed, Token, sliced
from millpond.programs.tracking import Tracked
from millpond.wire.base import SliceId
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.programs import ProgramSpec, ProgramWork, RunTasks, TasksRan

ROUTED = TOKENS.append(pa.field("to", pa.int32()))
"""What `RunTasks` is answered by."""


class ReadingCalls(EpochCalls):
    """The tasks of calls that only read. They see what is decided, also while an epoch is under way in a slice."""

    def ran(self, rows: SlicedBatch) -> Answer[TasksRan]:
        self._seen: set[bytes] = set()
        tokens = self._taken(rows.batch)
        while True:
            for token in tokens:
                number, _ = self._place(token)
                if number not in self._slices:
                    raise Moved(f"slice {number} is not served here", slice_id=number)
            made = self._run_level(tokens)
            tokens = [token for _, token in made]
            # What goes on here need not go by way of the client.
            if any(not self._goes_on(number, token, len(made)) for number, token in made):
                return Answer(TasksRan(seen=sorted(self._seen)), _batch(made, self._pond_slices))

    def _goes_on(self, number: SliceId, token: Token, tokens: int) -> bool:
        """Whether the next task of a call, of which there are so many tokens, can run here at once."""
        if token.task < 0 or number not in self._slices:
            return False
        return not self._method.tasks[token.task].task.gathers or tokens == self._spec.lanes

    def _guarded(self, work: Callable[[], T]) -> T:
        return work()

    def _run_some(
        self,
        held: HeldSlice[ProgramStore],
        lane: int,
        inputs: Iterator[tuple[Token, list[Any]]],
        over: Routed,
        going: dict[int, list[Made]],
    ) -> bool:
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
                    for token, values in inputs:
                        held.load.rows_fetched += 1
                        with self._leaving_as_it_is(held.store, token):
                            self._run_token(held.store, lane, token, values, over, going)
                finally:
                    held.load.cpu_ns += time.thread_time_ns() - began
        finally:
            held.asking.discard(self)
        return True

    def _state(self, tracked: Tracked) -> Element:
        return tracked.decided_element()


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
