"""What an epoch is at while it runs: for whoever may have to end it, and to say at which event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.memory import data_bytes

if TYPE_CHECKING:
    from millpond.txn.run.execution import EpochRun

NOT_BEGUN = -9
"""The status of an event until it begins: kernels set it as they come to one."""
FIELDS_TOLD = 8
TEXT_MAX = 60


class Watch:
    """Looked at from another thread. Time and memory count while events run, not while their code is compiled.

    `seconds_max` and `memory_max` are what its events may take.
    """

    before_s = 0.0

    def __init__(self, seconds_max: float | None = None, memory_max: int | None = None) -> None:
        self.seconds_max = seconds_max
        self.memory_max = memory_max
        self._events = pa.table({})
        self._at = ""
        self._run: EpochRun | None = None
        self._passes: dict[int, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
        self._finding: Callable[[], list[int]] | None = None
        self._spent_s = 0.0
        self._since: float | None = None
        self._bytes_before: int | None = None

    def stop(self) -> None:
        """Its kernels do not look."""

    @property
    def limited(self) -> bool:
        """Whether to compile apart from running."""
        return self.seconds_max is not None or self.memory_max is not None

    def tells_of(self, events: pa.Table, at: str) -> None:
        """The events of the epoch, and the column of their times."""
        self._events, self._at = events, at

    @contextmanager
    def finding_keys(self, run: EpochRun, kind: int, at: Callable[[], list[int]]) -> Iterator[None]:
        """Within, kernels find the keys of a kind's events; `at` tells which of these they are at."""
        self._finding = lambda: [int(run.epoch.kinds[kind].numbers[event]) for event in at()]
        with self.running(run):
            yield
        self._finding = None

    @contextmanager
    def running(self, run: EpochRun) -> Iterator[None]:
        """Within, events of that run are at work."""
        self._run = run
        if self.limited and self._bytes_before is None:
            self._bytes_before = data_bytes()
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._spent_s, self._since = self.spent_s, None

    @contextmanager
    def passing(self, todo: NDArray[np.int64], status: NDArray[np.int32]) -> Iterator[None]:
        """This thread passes over these events, whose statuses tell how far it is. One that fails stays where it was."""
        thread = threading.get_ident()
        self._passes[thread] = todo, status
        yield
        self._passes.pop(thread, None)

    @property
    def spent_s(self) -> float:
        since = self._since
        return self._spent_s + (0.0 if since is None else time.monotonic() - since)

    @property
    def grown_bytes(self) -> int:
        """What the process has taken since events began to run, by whomever."""
        return 0 if self._bytes_before is None else data_bytes() - self._bytes_before

    def where(self) -> str:
        """The event that is at work, or those of several threads; empty before the first."""
        run = self._run
        if run is None:
            return ""
        rows = []
        if self._finding is not None:
            rows = self._finding()
        for todo, status in list(self._passes.values()):
            begun = np.flatnonzero(status[todo] != NOT_BEGUN)
            rows += [int(run.epoch.order[todo[begun[-1]]])] if len(begun) else []
        return f"at {' or '.join(self._told(run, row) for row in rows)}" if rows else ""

    def _told(self, run: EpochRun, row: int) -> str:
        kind = run.kinds[int(run.epoch.kind_of[np.flatnonzero(run.epoch.order == row)[0]])]
        names = [name for name in run.transactions.found[kind].fields if name != self._at][:FIELDS_TOLD]
        values = [f"{name}={_text(self._events[name][row])}" for name in (self._at, *names)]
        return f"event {row} of {len(self._events):,}, a {kind!r} with {', '.join(values)}"


def _text(value: Any) -> str:
    try:
        text = repr(value.as_py())
    except Exception:  # noqa: BLE001 - values that Python does not have
        text = str(value)
    return text if len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}..."
