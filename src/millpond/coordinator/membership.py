"""Which containers serve, and how one that ended comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from millpond.coordinator.hosting import Host, Hosting
from millpond.errors import ContainerFailed, CorruptFile, MillpondError, Unavailable
from millpond.wire.connection import Connection, Dialer
from millpond.wire.messages import Assign, ContainerStatus, Message

RECOVERY_TIMEOUT_S = 120.0
START_ATTEMPTS = 3
_T = TypeVar("_T")


class Live(NamedTuple):
    """A container that serves, in the incarnation `term`."""

    host: Host
    connection: Connection
    term: int


class Membership:
    """The containers of a pond, by id. `assignment` gives the message by which a new incarnation begins.

    `lock` is held while containers come and go. Whoever must reach all of them, those to come included,
    holds it too.
    """

    def __init__(
        self, count: int, dial: Dialer, assignment: Callable[[int], Assign], parallel: bool = True
    ) -> None:
        self.lock = threading.RLock()
        self.ids = list(range(count))
        self.live: dict[int, Live] = {}
        self.restarts = 0
        self.recovery_s_last = 0.0
        self._dial = dial
        self._assignment = assignment
        self._hosting: Hosting | None = None
        self._failed: dict[int, MillpondError] = {}
        self._parallel = parallel
        self._closing = False

    def start(self, hosting: Hosting) -> None:
        """Starts every container and lets it recover."""
        self._hosting = hosting
        with self.lock:
            self.map(self._bring_up, self.ids)

    def close(self) -> None:
        self._closing = True
        if self._hosting is not None:
            self._hosting.stop()
        for live in self.live.values():
            live.connection.close()

    def recover(self, container: int, failed_term: int | None = None, broken: bool = False) -> None:
        """Brings a container back, unless that was done since its incarnation `failed_term` failed.

        One that answers is left alone, unless it is `broken`: then it is ended first.
        """
        assert self._hosting is not None
        with self.lock:
            live = self.live.get(container)
            if self._closing or (failed_term is not None and live is not None and live.term > failed_term):
                return
            if (
                live is not None
                and not broken
                and self._hosting.alive(container)
                and _answers(live.connection)
            ):
                return
            started = time.perf_counter()
            try:
                self._bring_up(container)
            except MillpondError as error:
                self._failed[container] = error
                return
            except OSError as error:
                self._failed[container] = ContainerFailed(
                    f"container {container} cannot be started: {error}", container=container
                )
                return
            self._failed.pop(container, None)
            self.restarts += 1
            self.recovery_s_last = time.perf_counter() - started

    def await_back(self, container: int, term: int) -> None:
        """Returns when a later incarnation than `term` serves, or the same one again."""
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while not self._closing and time.monotonic() < deadline:
            self.recover(container, term)
            if container in self._failed:
                raise self._failed[container]
            live = self.live.get(container)
            if live is not None and (live.term > term or _answers(live.connection)):
                return
            time.sleep(0.05)
        raise Unavailable(f"container {container} does not come back", address="")

    def ask(self, container: int, message: Message) -> Any:
        live = self.live.get(container)
        if live is None:
            raise self._failed.get(container) or Unavailable(f"container {container} is not up", address="")
        return live.connection.call(message)

    def ask_patiently(self, container: int, message: Message) -> Any:
        """As `ask`, but waits for a container that is away. For messages that do no harm when they come twice."""
        term = self.live[container].term
        try:
            return self.ask(container, message)
        except Unavailable:
            self.await_back(container, term)
            return self.ask(container, message)

    def tell_all(self, message: Message) -> None:
        """Containers that are away learn it when they are assigned. The caller holds the lock."""

        def tell(container: int) -> bool:
            try:
                self.ask(container, message)
            except Unavailable:
                return False
            return True

        containers = list(self.live)
        for container, told in zip(containers, self.map(tell, containers), strict=True):
            if not told:
                self.recover(container, self.live[container].term)

    def map(self, work: Callable[[int], _T], containers: list[int]) -> list[_T]:
        """`work` on every container, at the same time where there are threads; raises a failure after all ended."""
        if not self._parallel or len(containers) <= 1:
            return [work(container) for container in containers]
        # Threads of its own for each call: work may wait for the lock, whose holder may wait for its own map.
        with ThreadPoolExecutor(len(containers), "millpond-coordinator") as pool:
            futures = [pool.submit(work, container) for container in containers]
        results, failures = [], []
        for future in futures:
            try:
                results.append(future.result())
            except MillpondError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return results

    def _bring_up(self, container: int) -> None:
        """Starts a new incarnation; one that ends while it recovers is started again, but not for ever."""
        assert self._hosting is not None
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                host = self._hosting.start(container)
                connection = self._dial(host.address)
                assign = self._assignment(container)
                connection.call(assign)
                break
            except MillpondError as error:
                if attempt == START_ATTEMPTS or isinstance(error, CorruptFile) or self._closing:
                    raise
        old = self.live.get(container)
        self.live[container] = Live(host, connection, assign.term)
        if old is not None:
            old.connection.close()


def _answers(connection: Connection) -> bool:
    try:
        connection.call(ContainerStatus())
    except Unavailable:
        return False
    return True
