"""Which records of the log a window that rests on it needs: what is open comes from them, and what its last turns gave."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from typing import NamedTuple

from millpond.stores.outputs import KEPT
from millpond.wire.base import Turn


class _Logged(NamedTuple):
    seq: int
    writer: str
    turn: Turn
    newest: int
    """The newest time of its rows."""
    oldest_open: int
    """The earliest time that something depended on when it came: what it fires is made of rows from there on."""


class LogNeeds:
    """Records of this container's log that may still be needed, oldest first.

    The newest turns of every writer may be asked for again, for ever: their records stay, and so do those of the rows that
    they fired.
    """

    def __init__(self) -> None:
        self._records: deque[_Logged] = deque()

    def logged(self, seq: int, writer: str, turn: Turn, newest: int, oldest_open: int) -> None:
        self._records.append(_Logged(seq, writer, turn, newest, oldest_open))

    def forget(self, writers: Collection[str]) -> None:
        """What these gave is asked for no more."""
        self._records = deque(
            each._replace(writer="") if each.writer in writers else each for each in self._records
        )

    def oldest(self, oldest_open: int) -> int:
        """The earliest time that something depends on that is open, or that a turn fired which may come again."""
        return min([oldest_open, *(each.oldest_open for each in _lasting(list(self._records)))])

    def after(self, covered: int, oldest: int) -> int:
        """The number after which records are needed, of those that are applied, or void, up to `covered`."""
        records = list(self._records)
        lasting = {each.seq for each in _lasting(records)}
        for each in records:
            if each.seq > covered or each.seq in lasting or each.newest >= oldest:
                return min(covered, each.seq - 1)
            self._records.popleft()
        return covered


def _lasting(records: Iterable[_Logged]) -> list[_Logged]:
    """Records of turns that may come again."""
    turns: dict[str, set[Turn]] = {}
    for each in records:
        if each.writer:
            turns.setdefault(each.writer, set()).add(each.turn)
    least = {writer: min(sorted(each)[-KEPT[0] :]) for writer, each in turns.items()}
    return [each for each in records if each.writer and each.turn >= least[each.writer]]
