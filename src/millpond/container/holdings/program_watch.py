"""How the code of an epoch's calls is getting on: where it is, and what it takes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from millpond.container.holdings.program_code import LoadedTask
from millpond.kernels.memory import data_bytes
from millpond.programs.bodies import file_of
from millpond.programs.calls import Longs
from millpond.programs.machine.plan import AT, STOP
from millpond.programs.rows import described
from millpond.wire.programs import ProgramWork


class Watch:
    """How the calls of an epoch are getting on: for whoever may have to end them. Time counts while they run here."""

    def __init__(self, work: ProgramWork) -> None:
        self.seconds_max = work.seconds_max
        self.memory_max = work.memory_max
        self.row: int | None = None
        self.task: LoadedTask | None = None
        self.file = ""
        self.rows: Longs | None = None
        """Of the calls that a kernel runs: `control` says at which it is."""
        self.control: Longs | None = None
        self._method = work.method
        self._thread: int | None = None
        self.before_s = 0.0
        """How long earlier rounds took: the time that there is counts for all of them."""
        self._began: float | None = None
        self._bytes_before = data_bytes() if work.memory_max is not None else 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Code of the epoch runs in this thread."""
        self._thread, self._began = threading.get_ident(), time.monotonic()
        try:
            yield
        finally:
            self.before_s, self._began = self.spent_s, None

    @property
    def spent_s(self) -> float:
        return self.before_s + (0.0 if self._began is None else time.monotonic() - self._began)

    @property
    def grown_bytes(self) -> int:
        return max(0, data_bytes() - self._bytes_before)

    def stop(self) -> None:
        if self.control is not None:
            self.control[STOP] = 1

    def where(self) -> str:
        row, task, rows, control = self.row, self.task, self.rows, self.control
        if rows is not None and control is not None and len(rows):
            row = int(rows[min(int(control[AT]), len(rows) - 1)])
        if row is None or task is None:
            return ""
        return f"at line {self._line(task)} of {self.file}, {described(row)}"

    def _line(self, loaded: LoadedTask) -> int:
        """The line that runs, or the task's first one where that cannot be seen, as in compiled code."""
        frame = None if self._thread is None else sys._current_frames().get(self._thread)  # noqa: SLF001 - there is no other way
        while frame is not None:
            if frame.f_code.co_filename == file_of(self._method, loaded.task.number):
                lines = loaded.task.lines
                return lines[min(frame.f_lineno, len(lines)) - 1]
            frame = frame.f_back
        return loaded.task.line
