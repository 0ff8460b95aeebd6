"""A clock that moves only when told to."""

from __future__ import annotations

from millpond.errors import BadOption

_NANOS = 1_000_000_000


class VirtualClock:
    """Stands in for `time.time`, `time.monotonic` and `time.sleep`. Nobody waits: a sleep moves the clock.

    Kept in whole nanoseconds, so that ten steps of 0.1 s are one second. For one thread: a sleep in one
    would move the time of all.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._wall = round(now * _NANOS)
        self._running = 0
        self.sleeps: list[float] = []

    def time(self) -> float:
        """Seconds since the Unix epoch, as the wall clock shows them."""
        return self._wall / _NANOS

    def monotonic(self) -> float:
        """Seconds since this clock was made."""
        return self._running / _NANOS

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise BadOption(
                f"time does not run back ({seconds} s)",
                hint="jump() sets the wall clock back",
                option="seconds",
            )
        nanos = round(seconds * _NANOS)
        self._wall += nanos
        self._running += nanos

    def sleep(self, seconds: float) -> None:
        """Advances at once, and notes the wish in `sleeps`."""
        self.advance(seconds)
        self.sleeps.append(seconds)

    def jump(self, seconds: float) -> None:
        """Someone sets the wall clock, forward or back. No time passes."""
        self._wall += round(seconds * _NANOS)
