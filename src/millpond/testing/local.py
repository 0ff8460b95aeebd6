"""A whole pond in one process: no sockets, no child processes, no clock; files as the test gives them.

The same cores and shells as a real pond, joined by direct calls. A test may kill a container between two
calls, or let a crash point end everything and open the pond again on what the files kept.
"""

from __future__ import annotations

from itertools import count

from millpond.client.client import Client
from millpond.container.holdings.base import Bounds, Means, NoCode
from millpond.container.service import ContainerService
from millpond.coordinator.hosting import Host
from millpond.coordinator.service import CoordinatorService
from millpond.durable.files import Files
from millpond.errors import Unavailable
from millpond.pond.pond import Pond
from millpond.runtime import Serial
from millpond.stores.windows.spilling import Spilling
from millpond.wire.base import Term
from millpond.wire.connection import LocalConnection

try:
    from millpond.testing.turns import Turns
except ImportError:  # greenlets come with the extra "testing"
    Turns = None  # type: ignore[assignment, misc]

# So small that a few rows and checkpoints come to deltas, and to merges of both kinds.
BOUNDS = Bounds(deltas=1, deltas_share=0.9, deltas_bytes=0, delta_share=0.9)


def in_turns() -> Serial:
    """Containers that wait for each other take turns, where greenlets are there for it."""
    return Serial() if Turns is None else Turns()


class LocalHosting:
    """Containers as objects of this process."""

    def __init__(self, files: Files, root: str, means: Means | None = None) -> None:
        self._files = files
        self._root = root
        self._means = means
        self.services: dict[int, ContainerService] = {}
        self._connections: dict[str, LocalConnection] = {}
        self._current: dict[int, str] = {}
        self._started = 0

    def start(self, container: int, term: Term) -> Host:
        self.kill(container)
        self._started += 1
        address = f"local:{self._started}"
        self.services[container] = ContainerService(
            self._files, self._root, self._means, in_turns(), dial=self.dial
        )
        self._connections[address] = LocalConnection(self.services[container])
        self._current[container] = address
        return Host(0, address)

    def alive(self, container: int) -> bool:
        return container in self.services

    def has_ended(self, container: int) -> bool:
        return not self.alive(container)

    def kill(self, container: int) -> None:
        """The container ends at once, with all that it held in memory."""
        if self.services.pop(container, None) is not None:
            self._connections.pop(self._current.pop(container)).sever()

    def stop_one(self, container: int) -> None:
        self.kill(container)

    def check_room(self, containers: int) -> None:
        pass

    def task_slots(self) -> dict[str, int]:
        return {}

    def is_busy(self, container: int) -> bool:
        return False

    def last_words(self, container: int) -> str:
        return "is gone" if container not in self.services else "has not ended"

    def dial(self, address: str) -> LocalConnection:
        try:
            return self._connections[address]
        except KeyError:
            raise Unavailable(f"nothing serves at {address}", address=address) from None

    def stop(self) -> None:
        for container in list(self.services):
            self.kill(container)


_SCRATCH = count()


class LocalPond(Pond):
    """`LocalPond(files)` opens the pond that the files hold, or makes one. `hosting.kill(0)` kills a container.

    With `trust="data"` as `mp.open` does. Backups come with `coordinator.maintain()`. Of windows' rows, what is more than
    `window_bytes` goes to scratch files; or `spilling` gives windows their stores.
    """

    def __init__(
        self,
        files: Files,
        root: str = "/pond",
        containers: int = 1,
        slices: int = 4,
        trust: str = "all",
        backups: int = 0,
        window_bytes: int | None = None,
        spilling: Spilling | None = None,
    ) -> None:
        only_reads = trust == "data"
        if window_bytes is not None:
            # Each has a directory of its own: a pond that was closed removes its files when it is collected.
            spilling = Spilling(files, f"{root}/scratch/{next(_SCRATCH)}", window_bytes)
        means = Means(bounds=BOUNDS, spilling=spilling)
        if only_reads:
            means = means._replace(limits=NoCode())
        self.hosting = LocalHosting(files, root, means)
        runtime = in_turns()
        self.coordinator = CoordinatorService(files, root, self.hosting.dial, runtime, only_reads=only_reads)
        self.coordinator.start(self.hosting, containers, slices, backups)
        client = Client(LocalConnection(self.coordinator), self.hosting.dial, runtime, files=files)
        super().__init__(client, "local", self.coordinator)

    def maintain(self) -> None:
        """Upkeep of every container, until there is nothing left to do."""
        for service in self.hosting.services.values():
            for _ in range(10_000):
                if service.maintain():
                    break

    def validate(self) -> None:
        """Raises AssertionError if an invariant of a container does not hold."""
        for service in self.hosting.services.values():
            service.validate()
