"""Whose doing it is when containers end over an epoch of user code. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from millpond.wire.epochs import Prepare

DEATHS_MAX = 3
KILLS_MAX = 8
"""Starts that an epoch of user code may cost before it is refused; and where they were kills, which mostly come from
outside: the limit of a container's memory is below what the machine would kill it for."""
EPOCHS_REMEMBERED = 100
KILLS = ("SIGKILL", "SIGTERM")
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")

_Epoch = tuple[str, str, str]


class Deaths(NamedTuple):
    """How often containers ended while they prepared an epoch, by resident, writer and turn; the newest last."""

    counts: Mapping[_Epoch, int] = {}

    def after(self, message: Prepare, last_words: str) -> tuple[Deaths, bool]:
        """One more; and whether the epoch's code is to blame. Once it was blamed, the count begins anew."""
        epoch = (message.resident, message.writer, str(message.turn))
        others = {known: count for known, count in self.counts.items() if known != epoch}
        count = self.counts.get(epoch, 0) + 1
        most = KILLS_MAX if any(kill in last_words for kill in KILLS) else DEATHS_MAX
        # A crash is of its own making.
        if count >= most or any(crash in last_words for crash in CRASHES):
            return Deaths(others), True
        kept = list(others.items())[1 - EPOCHS_REMEMBERED :]
        return Deaths(dict([*kept, (epoch, count)])), False
