"""The loop of `millpond top`: asks a pond again and again, and shows what it says until a key ends it."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from millpond.errors import MillpondError
from millpond.monitor.keys import read_keys, unbuffered
from millpond.monitor.loads import PondLoads, Reading, as_rates, loads_of
from millpond.monitor.pages import page, plain_page
from millpond.monitor.sections import Seen
from millpond.monitor.view import View, press
from millpond.pond.figures import as_json
from millpond.pond.pond import Pond

REMEMBERED = 60
"""Readings of a pond with few slices; of one with many only the last."""
FEW_SLICES = 4096
LOOK_S = 0.2
FIRST_S = 0.5
LATE_S = 2.0
_ENDS = ("q", "Q", "\x03", "\x04")
Connect = Callable[[], Pond]


def once(connect: Connect, where: str, interval_s: float, as_document: bool, out: Console) -> None:
    """Prints one page, or one JSON document. Rates are those of the interval that it takes."""
    with connect() as pond:
        before = _reading(pond)
        time.sleep(interval_s)
        now = _reading(pond)
    loads = loads_of(before, now)
    if as_document:
        document = {"seconds": now.taken_s - before.taken_s, **now.metrics, "rates": as_rates(loads)}
        out.file.write(json.dumps(as_json(document)) + "\n")
        return
    width = out.width
    for text in plain_page(Seen(where, now, loads, [loads], interval_s), width):
        text.rstrip()
        out.print(text, end="\n", soft_wrap=True)


def watch(connect: Connect, where: str, interval_s: float, out: Console) -> None:
    """Shows the pond until somebody ends it. Of one that is closed the page stays, and says so; it is tried again."""
    asking = _Asking(connect, interval_s)
    try:
        asking.start()
        _show(asking, where, interval_s, out)
    finally:
        asking.end()


def _show(asking: _Asking, where: str, interval_s: float, out: Console) -> None:
    view, drawn = View(), None
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    with ExitStack() as stack:
        if keyboard is not None:
            stack.enter_context(unbuffered(keyboard))
        live = stack.enter_context(Live(console=out, screen=True, auto_refresh=False))
        while True:
            seen = asking.seen(where, interval_s, view)
            size = out.size
            state = (view, asking.version, seen.age_s, size)
            if state != drawn:
                lines = page(view, seen, size.width, size.height)
                live.update(Text("\n", no_wrap=True, overflow="crop").join(lines), refresh=True)
                drawn = state
            if keyboard is None:
                time.sleep(LOOK_S)
                continue
            keys = read_keys(keyboard, LOOK_S)
            if keys is None or any(key in _ENDS for key in keys):
                return
            for key in keys:
                view = press(view, key, seen.loads, size.width)
            asking.watch(view.watched, view.paused)


def _reading(pond: Pond) -> Reading:
    return Reading(pond.metrics(), time.time())


class _Asking:
    """Asks in a thread of its own: keys are answered also while the pond is slow."""

    def __init__(self, connect: Connect, interval_s: float) -> None:
        self._connect = connect
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ended = threading.Event()
        self._paused = False
        self._watched: int | None = None
        self._pond: Pond | None = None
        self._last: Reading | None = None
        self._history: deque[PondLoads] = deque(maxlen=REMEMBERED)
        self._residents: tuple[int, dict[str, dict[str, float]]] = (-1, {})
        self._problem = ""
        self._failure: BaseException | None = None
        self.version = 0

    def start(self) -> None:
        """Raises what hinders the first reading."""
        self._pond = self._connect()
        self._ask()
        threading.Thread(target=self._go_on, name="millpond-top", daemon=True).start()

    def end(self) -> None:
        self._ended.set()
        self._wake.set()

    def watch(self, slice_id: int | None, paused: bool) -> None:
        changed = (slice_id, paused) != (self._watched, self._paused)
        self._watched, self._paused = slice_id, paused
        if changed and (slice_id is not None or not paused):
            self._wake.set()

    def seen(self, where: str, interval_s: float, view: View) -> Seen:
        if self._failure is not None:
            raise self._failure
        with self._lock:
            assert self._last is not None
            number, residents = self._residents
            age_s = time.time() - self._last.taken_s
            return Seen(
                where,
                self._last,
                self._history[-1],
                list(self._history),
                interval_s,
                self._problem,
                int(age_s) if age_s > LATE_S + self._interval_s else 0,
                residents if number == view.slice else {},
            )

    def _go_on(self) -> None:
        # Rates need a second reading: it comes soon.
        due = time.monotonic() + min(self._interval_s, FIRST_S)
        try:
            while not self._ended.is_set():
                woken = self._wake.wait(max(0.0, due - time.monotonic()))
                self._wake.clear()
                if self._ended.is_set():
                    return
                if woken and time.monotonic() < due:
                    self._guarded(self._ask_slice)
                elif not self._paused:
                    self._guarded(self._ask)
                if time.monotonic() >= due:
                    due = time.monotonic() + self._interval_s
        except BaseException as error:  # noqa: BLE001 - the loop raises it, where the terminal is put back
            self._failure = error

    def _guarded(self, ask: Callable[[], Any]) -> None:
        try:
            if self._pond is None:
                self._pond = self._connect()
            ask()
            problem = ""
        except MillpondError as error:
            problem = error.message
            self._hang_up()
        with self._lock:
            self.version += problem != self._problem
            self._problem = problem

    def _hang_up(self) -> None:
        """A pond that is open again is joined anew."""
        pond, self._pond = self._pond, None
        if pond is not None:
            with suppress(MillpondError):
                pond.close()

    def _ask(self) -> None:
        assert self._pond is not None
        reading = _reading(self._pond)
        loads = loads_of(self._last, reading)
        with self._lock:
            if len(loads.slices) > FEW_SLICES and self._history.maxlen != 1:
                self._history = deque(maxlen=1)
            self._last = reading
            self._history.append(loads)
            self.version += 1
        self._ask_slice()

    def _ask_slice(self) -> None:
        watched, pond = self._watched, self._pond
        if watched is None or pond is None:
            return
        residents = pond.slice_metrics(watched)
        with self._lock:
            self._residents = (watched, residents)
            self.version += 1
