"""Kinds whose slices may rest on the log of epochs, in the place of a snapshot: what is open follows from its last records.

A record tells up to where time had come before it, and so any one can be the first. What follows from rows that are long
gone, as numbers that were given out to sessions, is not in there: who has such rests on snapshots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

from msgspec.structs import replace

from millpond.container.holdings.base import CheckedRows, Means, Record, Store
from millpond.container.holdings.keyed import KeyedHolding
from millpond.container.holdings.log_needs import LogNeeds
from millpond.stores import views
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.specs import Resident
from millpond.wire.windows import WindowWork


class RestingStore(Store, Protocol):
    """A slice of which all that is open follows from rows of its last records."""

    fired: Progress

    def begin_after(self, fired: Progress) -> None:
        """All up to there has fired, whether it was seen here or not: nothing of what was before is left."""

    @property
    def oldest(self) -> int:
        """The earliest time that something here depends on."""

    @property
    def live_bytes(self) -> int:
        """What a snapshot of it would take, about."""

    def needs_saved(self, writers: Collection[str], oldest: int) -> bool:
        """Whether the last snapshot holds what is nowhere else: something that depends on times from `oldest` on, or what
        the last turns of one of these writers gave.
        """


_R = TypeVar("_R", bound=RestingStore)


class RestingHolding(KeyedHolding[_R]):
    """A kind says whether it may rest on the log, and which of its columns are the rows' times."""

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        self._needs = LogNeeds()

    @property
    @abstractmethod
    def may_rest(self) -> bool:
        """Whether all that is open follows from its rows."""

    @property
    @abstractmethod
    def time_column(self) -> int: ...

    def stamped(self, record: Record) -> Record:
        """All slices have seen all epochs, and have fired as far."""
        assert isinstance(record.work, WindowWork)
        fired = max((held.store.fired for held in self.slices.values()), default=record.work.after)
        return record._replace(work=replace(record.work, after=fired))

    def logged(self, seq: int, record: Record) -> None:
        newest = max((self._newest(part) for part in record.parts if len(part.batch)), default=TIME_MIN)
        oldest = min((held.store.oldest for held in list(self.slices.values())), default=TIME_MAX)
        self._needs.logged(seq, record.writer, record.turn, newest, oldest)

    def _newest(self, part: CheckedRows) -> int:
        return int(views.longs(part.batch.column(self.time_column)).max())

    def rests_after(self, covered: int) -> int | None:
        """Records are needed of which something is open, or was fired by a turn that may come again; and while there is a
        snapshot of which that is so, it and all that came after it.
        """
        if not self.may_rest:
            return None
        oldest = TIME_MAX
        helds = list(self.slices.values())
        for held in helds:
            with held.lock:
                if held.torn:
                    return None
                oldest = min(oldest, held.store.oldest)
        oldest = self._needs.oldest(oldest)
        for held in helds:
            with held.lock:
                if held.saved is not None and held.store.needs_saved(held.vector, oldest):
                    return 0
        return self._needs.after(covered, oldest)

    @property
    def live_bytes(self) -> int:
        return sum(held.store.live_bytes for held in list(self.slices.values()))

    def forget(self, writers: Sequence[str]) -> None:
        super().forget(writers)
        self._needs.forget(writers)
