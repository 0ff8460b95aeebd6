"""What containers know of residents, and how they learn the rest."""

from __future__ import annotations

import math
from contextlib import suppress

from millpond.coordinator.membership import Membership
from millpond.coordinator.memory import Memory
from millpond.errors import MillpondError, Unavailable
from millpond.runtime import Locks, Runtime
from millpond.times import Progress
from millpond.wire.base import Call, Done
from millpond.wire.house import AddResident, Advance, DropResident
from millpond.wire.specs import Resident


def news_of(known: Resident | None, now: Resident | None) -> list[Call[Done]]:
    """What a container that knows a resident so, or not at all, has to be told."""
    news: list[Call[Done]] = []
    if known is not None and (now is None or known.born != now.born):
        news.append(DropResident(known.spec.name, known.born))
    if now is not None and (known is None or (known.spec, known.born) != (now.spec, now.born)):
        news.append(AddResident(now))
    return news


class Telling:
    """Of each incarnation that serves, the residents as it knows them. Telling what is known already does no harm."""

    def __init__(self, memory: Memory, runtime: Runtime) -> None:
        self._memory = memory
        self._runtime = runtime
        self._known: dict[int, dict[str, Resident]] = {}
        # A container hears of one resident in the order of what happened to it.
        self._locks: Locks[tuple[int, str]] = Locks(runtime)

    def residents(self) -> dict[str, Resident]:
        """As they are now."""
        with self._memory.lock:
            return {name: record.resident for name, record in self._memory.record.residents.items()}

    def news(self, known: dict[str, Resident]) -> list[Call[Done]]:
        """What a container that knows these residents has to learn."""
        now = self.residents()
        return [call for name in {**known, **now} for call in news_of(known.get(name), now.get(name))]

    def learnt(self, container: int, known: dict[str, Resident]) -> None:
        """A new incarnation serves, and knows these. The caller holds the memory's lock."""
        self._known[container] = known

    def tell(self, containers: Membership, name: str) -> None:
        """Tells every container of a resident; waits for those that are away. Who comes up meanwhile learns it then."""
        self._runtime.map(lambda container: self._tell(containers, container, name), containers.ids)

    def tell_rest(self, containers: Membership, name: str) -> None:
        """The same, where somebody has not been told yet: what others can read of a resident may be newer than that."""
        with self._memory.lock:
            record = self._memory.record.residents.get(name)
            now = None if record is None else record.resident
            all_know = all(not news_of(known.get(name), now) for known in self._known.values())
        if not all_know:
            self.tell(containers, name)

    def catch_up(self, containers: Membership, container: int) -> None:
        """Tells a container all that it has not heard yet."""
        for name in {**self._known.get(container, {}), **self.residents()}:
            self._tell(containers, container, name)

    def _tell(self, containers: Membership, container: int, name: str) -> None:
        with self._locks[container, name]:
            while True:
                now = self.residents().get(name)
                known = self._known.get(container)
                news = [] if known is None else news_of(known.get(name), now)
                if known is None or not news:
                    return
                try:
                    for call in news:
                        containers.ask_patiently(container, call)
                except Unavailable:
                    if container in containers.ids:
                        raise
                    return  # it has left, and needs to know nothing
                # If another incarnation serves by now, it has learnt this by itself.
                with self._memory.lock:
                    if now is None:
                        known.pop(name, None)
                    else:
                        known[name] = now

    def tell_progress(self, containers: Membership, name: str, fetch: Progress, update: Progress) -> None:
        """Tells containers F and U as they are published, if compaction may go on by it.

        One that does not hear it compacts less, and hears it the next time.
        """
        if fetch == -math.inf:
            return
        with self._memory.lock:
            for gone in self._known.keys() - set(containers.ids):
                del self._known[gone]
            behind = [
                (container, known)
                for container, known in self._known.items()
                if name in known and _compactable(known[name]) != min(fetch, update)
            ]

        def tell(container: int, known: dict[str, Resident]) -> None:
            with suppress(MillpondError):
                containers.ask(container, Advance(name, fetch, update))
                with self._memory.lock:
                    before = known.get(name)
                    if before is not None:
                        known[name] = Resident(before.spec, before.born, fetch, update)

        self._runtime.map(lambda each: tell(*each), behind)


def _compactable(resident: Resident) -> Progress:
    """Below this no fetch asks and no update comes, as far as a container knows."""
    return min(resident.fetch_progress, resident.final_below)
