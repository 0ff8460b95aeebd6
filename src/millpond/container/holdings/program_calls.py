"""Runs tasks of calls one at a time, and says what went wrong in which row, method and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from millpond.code.capture import OF_THE_MACHINE, OF_USER_CODE
from millpond.code.capture import described as error_in_words
from millpond.container.holdings.base import HeldSlice, Means
from millpond.container.holdings.program_code import LoadedMethod, LoadedTask
from millpond.container.holdings.program_store import ProgramStore
from millpond.container.holdings.program_watch import Watch
from millpond.errors import MillpondError, ProgramFailed, Rejected
from millpond.programs.bodies import file_of
from millpond.programs.elements import Element
from millpond.programs.graph import RETURNS
from millpond.programs.rows import described, place_in_partition
from millpond.programs.tracking import Tracked
from millpond.wire.base import SliceId
from millpond.wire.programs import ProgramSpec, ProgramWork

T = TypeVar("T")
HIDDEN_REJECT = "it was rejected inside of a function, where nobody sees whether something was written before"


class Ended(NamedTuple):
    """What came of a task and those that ran after it in the same place: how many, the last one, and what that gave."""

    steps: int
    last: LoadedTask
    following: int
    values: Sequence[Any]


class Calls:
    """Calls of one method in one container. `slices` are those that are here."""

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
        self._watch = watch or Watch(work)
        self._watch.file = method.graph.file

    @contextmanager
    def _leaving_as_it_is(self, store: ProgramStore, row: int) -> Iterator[None]:
        """What only reads changes nothing, or fails. What another epoch has done there stays; the caller holds the lock."""
        if not self._method.method.read_only:
            yield
            return
        before = store.touched
        try:
            yield
            if store.touched != before:
                raise self._failed(row, self._method.method.line, "it changed state, and should only read")
        finally:
            store.put_back(store.touched - before)

    def _ran(
        self, store: ProgramStore, lane: int, row: int, steps: int, task: int, values: Sequence[Any]
    ) -> Ended:
        """Runs a call's task, and those after it that can run in the same place. It went through so many `steps` before."""
        self._watch.row = row
        following, given = task, values
        while True:
            self._watch.task = loaded = self._method.tasks[following]
            if steps >= self._method.graph.max_rounds:
                raise self._failed(row, loaded.task.line, f"it went through {steps:,} tasks")
            steps += 1
            following, given = self._call(loaded, store, lane, row, given)
            if following < 0 or not self._method.tasks[following].runs_anywhere:
                return Ended(steps, loaded, following, given)

    def _call(
        self, loaded: LoadedTask, store: ProgramStore, lane: int, row: int, values: Sequence[Any]
    ) -> tuple[int, Sequence[Any]]:
        """Runs one task: the number of the next one and its inputs, or how the call ends."""
        state = None if loaded.task.field is None else self._state(store.part(loaded.task.field, lane))
        try:
            following, given = loaded.function(state, *values)
        except Rejected as error:
            raise self._failed(row, self._line(loaded, error), HIDDEN_REJECT) from error
        except RecursionError as error:
            raise self._failed(row, self._line(loaded, error), "it called itself too deeply") from error
        except (MillpondError, *OF_THE_MACHINE):
            raise
        except OF_USER_CODE as error:
            raise self._failed(row, self._line(loaded, error), error_in_words(error)) from error
        if following == RETURNS and self._method.method.returns is None:
            return RETURNS, [None]
        return following, given

    def _state(self, tracked: Tracked) -> Element:
        """What a task works on."""
        return tracked.element

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

    def _failed(self, row: int, line: int, why: str) -> ProgramFailed:
        return ProgramFailed(
            f"{self._what} failed in line {line} of {self._method.graph.file}, {described(row)}: {why}",
            hint="nothing was changed; mend the method or the row, and the epoch can come again",
            program=self._spec.name,
            method=self._method.method.name,
            line=line,
            row=place_in_partition(row),
        )
