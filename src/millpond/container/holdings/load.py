"""What work a slice makes: rows and CPU time, counted once for each slice and batch, never for a row."""

from __future__ import annotations

import threading
import time


class Load:
    """Of one slice of one resident, since it is here. Whoever adds to it holds the slice's lock."""

    __slots__ = ("cpu_ns", "rows_fetched", "rows_updated")

    def __init__(self) -> None:
        self.rows_updated = 0
        self.rows_fetched = 0
        self.cpu_ns = 0

    def add(self, other: Load) -> None:
        self.rows_updated += other.rows_updated
        self.rows_fetched += other.rows_fetched
        self.cpu_ns += other.cpu_ns


class Laps:
    """CPU time of pieces of work, which threads do one after the other each.

    To read a thread's clock is a call of the system: where pieces follow each other, the end of one is the beginning
    of the next.
    """

    def __init__(self) -> None:
        self._since: dict[int, int] = {}

    def begin(self) -> None:
        """This thread begins a piece; if it has just ended another, that was read then."""
        thread = threading.get_ident()
        if thread not in self._since:
            self._since[thread] = time.thread_time_ns()

    def end_ns(self) -> int:
        """What this thread's piece took."""
        thread, now = threading.get_ident(), time.thread_time_ns()
        since, self._since[thread] = self._since[thread], now
        return now - since

    def skip(self) -> None:
        """This thread does something else before its next piece."""
        self._since.pop(threading.get_ident(), None)
