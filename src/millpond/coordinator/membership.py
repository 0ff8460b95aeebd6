"""The containers of a pond, by id: starts them, asks them, and brings back one that ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from millpond.coordinator.detector import LEASE_S, Detector
from millpond.coordinator.hosting import Host, Hosting
from millpond.coordinator.members import Members
from millpond.errors import ContainerFailed, CorruptFile, MillpondError, RootUnseen, Unavailable
from millpond.runtime import Locks, Runtime
from millpond.wire.base import Call, Term
from millpond.wire.connection import Connection, Dialer
from millpond.wire.house import Ping

RECOVERY_S_MAX = 120.0
RECOVERY_PAUSE_S = 0.05
END_S_MAX = 1.0
END_PAUSE_S = 0.005
# One as it comes, one that leaves marks, one that heeds them, and one for bad luck.
START_ATTEMPTS = 4
R = TypeVar("R")


class Live(NamedTuple):
    """A container that serves, in the incarnation `term`."""

    host: Host
    connection: Connection
    term: Term


class Assignment(Protocol):
    """What the coordinator does with a process that has just started: it becomes a container, in a new term."""

    def next_term(self) -> Term:
        """A term that nobody has had."""

    def assign(self, container: int, term: Term, connection: Connection, careful: Term) -> None:
        """Gives it residents and slices. On return the journal knows that it has them."""

    def is_backed(self, container: int) -> bool:
        """Whether others hold all its slices, as new as it has them."""

    def relieve(self, container: int) -> None:
        """Its last incarnation serves no more: others do, as far as they hold its slices."""


class Membership:
    """Of one container only one start runs at a time; others are not held up by it."""

    def __init__(self, dial: Dialer, assignment: Assignment, runtime: Runtime) -> None:
        self.members = Members()
        self.live: dict[int, Live] = {}
        self.recovery_s_last = 0.0
        self._runtime = runtime
        self._dial = dial
        self._assignment = assignment
        self._hosting: Hosting | None = None
        self._starting: Locks[int] = Locks(runtime)
        self._closing = False
        self.detector = Detector()
        self.suspected = 0
        self._beating: set[tuple[int, Term]] = set()

    @property
    def ids(self) -> list[int]:
        return self.members.ids

    def start(self, hosting: Hosting, ids: Sequence[int]) -> None:
        """Starts containers and lets them recover; raises what hinders one."""
        self._hosting = hosting
        self.members.join(ids)
        self._runtime.map(self._start_first, list(ids))

    def _start_first(self, container: int) -> None:
        # One that ends just then is brought back by `recover`: two starts would each take theirs for the one that serves.
        with self._starting[container]:
            self._bring_up(container)

    def check_room(self, containers: int) -> None:
        """Raises what says why so many cannot run; those that there are do already."""
        if self._hosting is not None and containers > len(self.ids):
            self._hosting.check_room(containers)

    def task_slots(self) -> dict[str, int]:
        return {} if self._hosting is None else self._hosting.task_slots()

    def add(self, ids: Sequence[int]) -> None:
        """More containers, with no slices yet; raises what hinders one."""
        self.members.join(ids)
        self._runtime.map(self._start_first, list(ids))

    def remove(self, container: int, leave: Callable[[], None]) -> None:
        """Ends a container for good, once it may `leave`; that raises if it may not."""
        assert self._hosting is not None
        with self._starting[container]:
            leave()
            live = self.live.pop(container, None)
            if live is not None:
                live.connection.close()
            self._hosting.stop_one(container)

    def close(self) -> None:
        self._closing = True
        if self._hosting is not None:
            self._hosting.stop()
        for live in list(self.live.values()):
            live.connection.close()

    def last_words(self, container: int) -> str:
        return "" if self._hosting is None else self._hosting.last_words(container)

    def await_end(self, container: int, term: Term) -> bool:
        """Whether the process of that incarnation has ended; one that is about to is given a moment."""
        deadline = self._runtime.now() + END_S_MAX
        while self._hosting is not None and self._hosting.alive(container):
            live = self.live.get(container)
            if live is None or live.term > term:
                return True
            if self._runtime.now() > deadline:
                return False
            self._runtime.sleep(RECOVERY_PAUSE_S)
        return True

    def recover(self, container: int, failed_term: Term | None = None, broken: bool = False) -> None:
        """Brings a container back, unless that was done since its incarnation `failed_term` failed.

        One that answers is left alone, unless it is `broken`: then it is ended first. A start that fails is noted, and
        tried again by `retry`.
        """
        assert self._hosting is not None
        with self._starting[container]:
            live = self.live.get(container)
            if self._closing or container not in self.members.members:
                return
            if failed_term is not None and live is not None and live.term > failed_term:
                return
            if (
                live is not None
                and not broken
                and self._hosting.alive(container)
                and _answers(live.connection)
            ):
                return
            started = self._runtime.now()
            try:
                # Each time: whoever could not serve its slices when it ended may be able to when it does not start.
                self._bring_up(container, self._assignment.relieve)
            except MillpondError:
                return
            self.recovery_s_last = self._runtime.now() - started

    def beat(self) -> None:
        """Asks who is there, without waiting for answers; and relieves who has been silent for long."""
        now_s = self._runtime.now()
        live = dict(self.live)
        for container, each in live.items():
            if (container, each.term) not in self._beating:
                self._beating.add((container, each.term))
                self._runtime.spawn(partial(self._ask_pulse, container, each), "millpond-pulse")
        serving = {container: each.term for container, each in live.items()}
        silent = {c for c in serving if c in self.detector.heard and self.detector.is_silent(c, now_s)}
        busy = {container for container in silent if self._is_busy(container)}
        for container, term in self.detector.looks(serving, busy, now_s):
            self.suspected += 1
            self._runtime.spawn(partial(self._relieve, container, term), "millpond-relieve")

    def _ask_pulse(self, container: int, live: Live) -> None:
        try:
            heard = self.detector.heard.get(container)
            last = heard.number if heard is not None and heard.term == live.term else 0
            pulse = live.connection.call(Ping(LEASE_S, last))
            self.detector.hears(container, live.term, self._runtime.now(), pulse.disk_s, pulse.number)
        except MillpondError:
            pass
        finally:
            self._beating.discard((container, live.term))

    def _is_busy(self, container: int) -> bool:
        return self._hosting is not None and self._hosting.is_busy(container)

    def _relieve(self, container: int, term: Term) -> None:
        """One that is away, though its process may be there."""
        if self._starting[container].acquire(timeout=0):
            try:
                heard = self.detector.heard.get(container)
                is_gone = heard is not None and math.isinf(heard.disk_s)
                # One whose files were removed holds in memory what is left of them.
                if self.members.serves(container, term) and (
                    not is_gone or self._assignment.is_backed(container)
                ):
                    self.recover(container, term, broken=True)
            finally:
                self._starting[container].release()

    def retry(self) -> None:
        """Starts again what is due, unless somebody is at it."""
        for container in self.members.due(self._runtime.now()):
            if self._starting[container].acquire(timeout=0):
                try:
                    if container in self.members.due(self._runtime.now()):
                        self.recover(container)
                finally:
                    self._starting[container].release()

    def await_back(
        self, container: int, term: Term, is_needed: Callable[[], bool] = lambda: True
    ) -> Term | None:
        """The incarnation that serves: a later one than `term`, or the same one again; None once it is not needed."""
        deadline = self._runtime.now() + RECOVERY_S_MAX
        while not self._closing and self._runtime.now() < deadline:
            # Somebody may be at it: what was its own is served elsewhere long before it is back.
            if self._starting[container].acquire(timeout=RECOVERY_PAUSE_S):
                try:
                    self.recover(container, term)
                finally:
                    self._starting[container].release()
            live = self.live.get(container)
            if live is not None and (live.term > term or _answers(live.connection)):
                return live.term
            if not is_needed():
                return None
            member = self.members.members.get(container)
            if member is None or member.error is not None:
                raise (member.error if member is not None else None) or Unavailable(
                    f"container {container} is gone", address=""
                )
            self._runtime.sleep(RECOVERY_PAUSE_S)
        raise Unavailable(f"container {container} does not come back", address="")

    def ask(self, container: int, message: Call[R]) -> R:
        live = self.live.get(container)
        if live is None:
            member = self.members.members.get(container)
            error = None if member is None else member.error
            raise error or Unavailable(
                f"container {container} is not up",
                hint=f"container-{container}.log under the pond's root tells how it ended",
                address="",
            )
        return live.connection.call(message)

    def ask_patiently(self, container: int, message: Call[R]) -> R:
        """As `ask`, but waits for a container that is away. For messages that do no harm when they come twice."""
        return self.ask_incarnation(container, message)[1]

    def ask_incarnation(self, container: int, message: Call[R]) -> tuple[Term, R]:
        """As `ask_patiently`; tells which incarnation answered, too."""
        while True:
            live = self.live.get(container)
            try:
                if live is None:
                    return Term(0), self.ask(container, message)
                return live.term, live.connection.call(message)
            except Unavailable:
                self.await_back(container, live.term if live is not None else Term(0))

    def _bring_up(self, container: int, relieve: Callable[[int], None] = lambda _: None) -> None:
        """Starts a new incarnation; one that ends while it recovers is started again, but not for ever.

        What the one before served is handed to others by `relieve`.
        """
        assert self._hosting is not None
        # Before the term goes on: what the incarnation before prepared is decided until then, or never.
        self.members.ended(container)
        if container not in self.members.members:
            return
        old = self.live.pop(container, None)
        if old is not None:
            # It must not answer while others serve what it had.
            self._hosting.kill(container)
            old.connection.close()
            self._await_silence(container, old.term)
        relieve(container)
        for attempt in range(1, START_ATTEMPTS + 1):
            term = Term(0)
            try:
                term = self._assignment.next_term()
                host = self._hosting.start(container, term)
                connection = self._assigned(container, term, host)
            except (MillpondError, OSError) as error:
                failure = (
                    error
                    if isinstance(error, MillpondError)
                    else ContainerFailed(
                        f"container {container} cannot be started: {error}", container=container
                    )
                )
                self.members.failed(container, term, failure, self._runtime.now())
                if attempt == START_ATTEMPTS or isinstance(error, CorruptFile | RootUnseen) or self._closing:
                    raise failure from None
                continue
            self.live[container] = Live(host, connection, term)
            self.members.started(container, term)
            return

    def _await_silence(self, container: int, term: Term) -> None:
        """Returns when that incarnation answers nobody any more: it has ended, or its lease has."""
        assert self._hosting is not None
        heard = self.detector.heard.get(container)
        since_s = heard.at_s if heard is not None and heard.term == term else self._runtime.now()
        while not self._closing and not self._hosting.has_ended(container):
            if self._runtime.now() > since_s + LEASE_S:
                return
            self._runtime.sleep(END_PAUSE_S)

    def _assigned(self, container: int, term: Term, host: Host) -> Connection:
        """A connection to the new incarnation, which has its slices."""
        connection = self._dial(host.address)
        try:
            self._assignment.assign(container, term, connection, self.members.members[container].careful)
        except BaseException:
            connection.close()
            raise
        return connection


def _answers(connection: Connection) -> bool:
    try:
        connection.call(Ping())
    except Unavailable:
        return False
    return True
