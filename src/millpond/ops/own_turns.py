"""Turns that an operator takes by itself, while its streaming query runs and gets no rows.

Spark runs no batch without new rows. What waits in the pond for something else, U say, would wait for the next batch.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from millpond.errors import BadOption, MillpondError
from millpond.ops import frames
from millpond.wire.base import LOCAL_QUERY
from millpond.wire.questions import Drain

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_S = 0.1
IDLE_POLL_S = 0.5
# After so many turns of its own a silent query waits longer: an epoch has an end of drains, and that is days away.
PAUSE_S = 0.2
PAUSE_GROWTH = 1.01
FAILURE_S = (1.0, 60.0)

log = logging.getLogger("millpond")


class Turning(Protocol):
    """What takes turns of its own: an operator, or a flow of them."""

    @property
    def name(self) -> str: ...

    @property
    def place(self) -> tuple[str, ...]:
        """What it reads and keeps: of two with the same place, only one may take turns of its own."""

    @property
    def is_shared(self) -> bool:
        """Whether several of that place run at once, each with queries of its own."""

    def waits(self) -> bool:
        """Whether anything waits."""

    def due(self) -> Mapping[str, Drain]:
        """Queries in which something that waits can go on, and the turn in which it would."""

    def take(self, query: str, spark: SparkSession) -> None:
        """Takes that turn, inside of the query."""


_numbers = itertools.count()
# Of each place the newest that watches; and of each place, query and run of it the one that had a batch.
_newest: weakref.WeakValueDictionary[tuple[str, ...], OwnTurns] = weakref.WeakValueDictionary()
_had_batch: weakref.WeakValueDictionary[tuple[str, ...], OwnTurns] = weakref.WeakValueDictionary()
# Of each place and query: operators come and go, and one that was left may be in the middle of a turn.
_turns: weakref.WeakValueDictionary[tuple[str, ...], threading.RLock] = weakref.WeakValueDictionary()
_turns_lock = threading.Lock()


class OwnTurns:
    """Batches, drains and turns of an operator's own: of one place and query one at a time, whichever operator takes it.

    A turn of its own is taken only while its query is active, in a job group of the query: it ends with it.
    """

    def __init__(self, operator: Turning) -> None:
        self._operator = weakref.ref(operator)
        self.number = next(_numbers)
        self._lock = threading.RLock()
        self._runs: dict[str, str] = {}
        self._watch: threading.Thread | None = None

    @contextmanager
    def batch(self, spark: SparkSession, query: str | None, run: str | None) -> Iterator[None]:
        """A batch runs, of a run of a streaming query if there is one; which is watched from then on."""
        with self.one_at_a_time(query or LOCAL_QUERY):
            yield
            if query is not None and run is not None:
                operator = self._operator()
                if operator is not None:
                    _had_batch.pop((*operator.place, query, self._runs.get(query, run)), None)
                    _had_batch[(*operator.place, query, run)] = self
                self._runs[query] = run
                self.watch(spark)

    @contextmanager
    def one_at_a_time(self, query: str) -> Iterator[None]:
        """No other turn of that query is taken in this process."""
        operator = self._operator()
        with self._lock, _turns_of(() if operator is None else operator.place, query):
            yield

    def watch(self, spark: SparkSession) -> None:
        """Takes turns from now on, as they become due; until the queries that had a batch have ended."""
        with self._lock:
            operator = self._operator()
            if operator is not None:
                self._is_newest(operator)
            if self._watch is not None and self._watch.is_alive():
                return
            from pyspark import InheritableThread

            watching = _Watching(self._operator, self._lock, spark, self._runs, self.may_take)
            self._watch = InheritableThread(target=watching.run, name="millpond-turns", daemon=True)
            self._watch.start()

    def may_take(self, operator: Turning, query: str, run: str) -> bool:
        """Whether rows of a query are for this operator's function: it had a batch of that run; or nobody had, and it is
        the newest of its place. Where several share a name, nobody can tell before the first batch.
        """
        had_batch = _had_batch.get((*operator.place, query, run))
        if had_batch is not None or operator.is_shared:
            return had_batch is self
        return self._is_newest(operator)

    def _is_newest(self, operator: Turning) -> bool:
        other = _newest.get(operator.place)
        if other is None or other.number < self.number:
            _newest[operator.place] = other = self
        return other is self


def _turns_of(place: tuple[str, ...], query: str) -> threading.RLock:
    with _turns_lock:
        return _turns.setdefault((*place, query), threading.RLock())


class _Watching:
    def __init__(
        self,
        operator: Callable[[], Turning | None],
        lock: threading.RLock,
        spark: SparkSession,
        runs: Mapping[str, str],
        may_take: Callable[[Turning, str, str], bool],
    ) -> None:
        self._runs = runs
        self._may_take = weakref.WeakMethod(may_take)
        self._operator = operator
        self._lock = lock
        self._spark = spark
        self._not_before: dict[str, float] = {}
        self._failure_s: dict[str, float] = {}

    def run(self) -> None:
        """Until the queries have ended, or the operator, its pond or Spark is gone."""
        poll_s = POLL_S
        while True:
            time.sleep(poll_s)
            operator = self._operator()
            if operator is None or frames.is_stopped(self._spark):
                return
            try:
                # A query that is started again may find no new rows: what waits is watched until none does.
                if self._has_ended() and not operator.waits():
                    return
                poll_s = POLL_S if self._look(operator) else IDLE_POLL_S
            except BadOption:
                return  # the pond is closed
            except MillpondError:
                poll_s = IDLE_POLL_S
            del operator

    def _has_ended(self) -> bool:
        """Whether there were runs of queries, and none of them is active. A batch that is about to begin is waited for."""
        with self._lock:
            return bool(self._runs) and all(
                frames.active_run(self._spark, query) != run for query, run in self._runs.items()
            )

    def _look(self, operator: Turning) -> bool:
        """Takes what is due; whether it is worth looking again soon."""
        active = False
        for query in operator.due():
            run = frames.active_run(self._spark, query)
            may_take = self._may_take()
            if run is None or may_take is None or not may_take(operator, query, run):
                continue
            active = True
            if time.monotonic() >= self._not_before.get(query, 0.0):
                self._take(operator, query, run)
        return active

    def _take(self, operator: Turning, query: str, run: str) -> None:
        # A batch that runs takes along what is due.
        turns = _turns_of(operator.place, query)
        if not self._lock.acquire(blocking=False):
            return
        if not turns.acquire(blocking=False):
            self._lock.release()
            return
        try:
            drain = operator.due().get(query)
            if drain is None:
                return
            with frames.as_query(self._spark, query, run):
                operator.take(query, self._spark)
            self._failure_s.pop(query, None)
            pause_s = PAUSE_S * PAUSE_GROWTH**drain.turn.drain
        except Exception as error:  # noqa: BLE001 - whatever the sink raises: the next batch meets it, too
            if frames.active_run(self._spark, query) != run:
                return  # it ended with its query
            shortest, longest = FAILURE_S
            pause_s = min(2 * self._failure_s.get(query, shortest / 2), longest)
            self._failure_s[query] = pause_s
            log.warning(
                "rows that waited at %r could not be handed on, and will be tried again: %s: %s",
                operator.name,
                type(error).__name__,
                error,
            )
        finally:
            turns.release()
            self._lock.release()
        self._not_before[query] = time.monotonic() + pause_s
