"""How often a window gives updates."""

from __future__ import annotations

from millpond.runtime import Runtime


class Pace:
    """Which epochs give updates: by the clock of the driver, one every so many seconds at most. The first does."""

    def __init__(self, runtime: Runtime, every_s: float) -> None:
        self._runtime = runtime
        self._every_s = every_s
        self._last: float | None = None
        self._chosen: float | None = None

    def emits(self, replayed: bool) -> bool:
        """Of the epoch that is about to be committed. One that was committed before has been decided on then."""
        now = self._runtime.now()
        is_due = self._is_due(now)
        self._chosen = now if is_due and not replayed else None
        return is_due

    @property
    def is_over(self) -> bool:
        """Whether the time is over in which updates are withheld, if they ever are."""
        return self._every_s > 0 and self._is_due(self._runtime.now())

    def _is_due(self, now: float) -> bool:
        return self._last is None or now - self._last >= self._every_s

    def committed(self) -> None:
        """The epoch that was last asked for has come to pass."""
        if self._chosen is not None:
            self._last, self._chosen = self._chosen, None
