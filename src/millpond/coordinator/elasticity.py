"""Moves that were asked for, and the number of containers: what is under way, how far it is, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from millpond.coordinator import placement
from millpond.coordinator.backing import Backing
from millpond.coordinator.memory import Memory
from millpond.coordinator.migrations import Migrations, Watch
from millpond.coordinator.records import PondRecord
from millpond.coordinator.slices import Slices
from millpond.errors import BadOption, MillpondError, Unavailable
from millpond.runtime import Runtime
from millpond.wire.base import SliceId
from millpond.wire.moves import Cause, MoveInfo, Stage

AT_ONCE_MAX = 2
"""Moves under way at the same time."""
REMEMBERED = 256
"""Moves that are over."""
TRIES_MAX = 20
RETRY_S = (0.1, 5.0)
SHARES = {"waiting": 0.0, "copying": 0.05, "catching up": 0.9, "switching": 0.95, "moved": 1.0}
"""How much of a move is done when a stage begins."""


@dataclass
class Ticket(Watch):
    """A move. It is over once its stage says so."""

    id: int
    slices: list[SliceId]
    source: int
    target: int
    cause: Cause
    asked_s: float
    stage: Stage = "waiting"
    began_s: float | None = None
    ended_s: float | None = None
    copied: float = 0.0
    error: MillpondError | None = None
    cancelled: bool = False
    tries: int = 0

    def reaches(self, stage: Stage) -> None:
        if self.cancelled and stage != "moved":
            raise Unavailable("the move was cancelled", address="")
        self.stage = stage

    def copies(self, share: float) -> None:
        if self.cancelled:
            raise Unavailable("the move was cancelled", address="")
        self.copied = share

    @property
    def is_over(self) -> bool:
        return self.stage in ("moved", "failed", "cancelled")

    @property
    def progress(self) -> float:
        if self.stage == "copying":
            return SHARES["copying"] + (SHARES["catching up"] - SHARES["copying"]) * self.copied
        return SHARES.get(self.stage, 0.0)

    def info(self, now_s: float) -> MoveInfo:
        spent_s = (self.ended_s or now_s) - (self.began_s if self.began_s is not None else now_s)
        progress = self.progress
        left_s = None if self.is_over or progress < 0.1 else spent_s * (1 - progress) / progress
        return MoveInfo(
            self.id,
            self.slices,
            self.source,
            self.target,
            self.cause,
            self.stage,
            progress,
            spent_s,
            left_s,
            self.error.message if self.error is not None else "",
        )


@dataclass
class Scaling:
    """A change of the number of containers: new ones come, slices move, those that are too many go."""

    ids: list[int]
    what: str = ""
    error: MillpondError | None = None
    leaving: set[int] = field(default_factory=set)


class Elasticity:
    """Moves run by themselves, a few at a time; each is tried again when it fails, and then given up."""

    def __init__(
        self, memory: Memory, slices: Slices, backing: Backing, migrations: Migrations, runtime: Runtime
    ) -> None:
        self._memory = memory
        self._slices = slices
        self._containers = slices.containers
        self._backing = backing
        self._migrations = migrations
        self._runtime = runtime
        self._lock = runtime.lock()
        self._tickets: dict[int, Ticket] = {}
        self._number = 0
        self._running = 0
        self.scaling: Scaling | None = None
        self._closed = False

    def close(self) -> None:
        """Nothing begins any more, and what has begun is broken off where it can be."""
        self._closed = True
        self.cancel()

    @property
    def containers(self) -> list[int]:
        """Those that there are."""
        return self._containers.ids

    @property
    def leaving(self) -> set[int]:
        """Containers that are about to go: nothing is given to them."""
        return set() if self.scaling is None else self.scaling.leaving

    # Moves

    def move(self, slices: Collection[SliceId], to: int, cause: Cause = "move") -> list[Ticket]:
        """Asks for slices to be served there; those that are there already stay. A later request replaces an earlier one."""
        record = self._memory.record
        for number in slices:
            if not 0 <= number < record.slices:
                raise BadOption(
                    f"there is no slice {number}",
                    hint=f"slices are 0 to {record.slices - 1}",
                    option="slices",
                )
        if to not in self._containers.ids or to in self.leaving:
            known = ", ".join(map(str, self._containers.ids))
            raise BadOption(f"there is no container {to}", hint=f"containers are {known}", option="to")
        by_owner: dict[int, list[SliceId]] = {}
        with self._lock:
            # A move that has begun may be past the point where it can be cancelled.
            leaving = self._under_way()
            for number in sorted(set(slices)):
                if record.owners[number] != to or number in leaving:
                    by_owner.setdefault(record.owners[number], []).append(number)
            self._cancel(lambda ticket: bool(set(slices) & set(ticket.slices)))
            tickets = []
            for owner, own in by_owner.items():
                self._number += 1
                ticket = Ticket(self._number, own, owner, to, cause, self._runtime.now())
                self._tickets[ticket.id] = ticket
                tickets.append(ticket)
            over = [ticket.id for ticket in self._tickets.values() if ticket.is_over]
            for old in over[:-REMEMBERED]:
                del self._tickets[old]
        self._begin()
        return tickets

    def cancel(self, ids: Collection[int] | None = None) -> None:
        """Those that have not been switched come to nothing."""
        with self._lock:
            self._cancel(lambda ticket: ids is None or ticket.id in ids)

    def _cancel(self, chosen: Callable[[Ticket], bool]) -> list[Ticket]:
        cancelled = [ticket for ticket in self._tickets.values() if not ticket.is_over and chosen(ticket)]
        for ticket in cancelled:
            ticket.cancelled = True
            if ticket.began_s is None:
                ticket.stage = "cancelled"
        return cancelled

    def _cancelled(self, chosen: Callable[[Ticket], bool]) -> list[Ticket]:
        with self._lock:
            return self._cancel(chosen)

    def _await_over(self, tickets: Sequence[Ticket]) -> None:
        while not all(ticket.is_over for ticket in tickets):
            if self._closed:
                raise Unavailable("the pond is closing", address="")
            self._runtime.sleep(0.02)

    def moves(self, ids: Collection[int] | None = None) -> list[MoveInfo]:
        with self._lock:
            now_s = self._runtime.now()
            return [t.info(now_s) for t in self._tickets.values() if ids is None or t.id in ids]

    def _under_way(self) -> set[SliceId]:
        """Slices whose moves have begun. The caller holds the lock."""
        begun = (t for t in self._tickets.values() if t.began_s is not None and not t.is_over)
        return {number for ticket in begun for number in ticket.slices}

    def _begin(self) -> None:
        """Begins what waits, as far as there is room."""
        with self._lock:
            while self._running < AT_ONCE_MAX and not self._closed:
                busy = self._under_way()
                waiting = [
                    t
                    for t in self._tickets.values()
                    if t.began_s is None and not t.is_over and not busy.intersection(t.slices)
                ]
                if not waiting:
                    return
                waiting[0].began_s = self._runtime.now()
                self._running += 1
                self._runtime.spawn(partial(self._run, waiting[0]), f"millpond-move-{waiting[0].id}")

    def _run(self, ticket: Ticket) -> None:
        """Until it is over."""
        pause, longest = RETRY_S
        try:
            while True:
                try:
                    self._try(ticket)
                    ticket.stage, ticket.error = "moved", None
                except (MillpondError, OSError) as error:
                    ticket.tries += 1
                    ticket.error = (
                        error if isinstance(error, MillpondError) else Unavailable(str(error), address="")
                    )
                    if ticket.cancelled or self._closed:
                        ticket.stage = "cancelled"
                    elif ticket.tries >= TRIES_MAX:
                        ticket.stage = "failed"
                    else:
                        ticket.stage = "waiting"
                        self._runtime.sleep(pause)
                        pause = min(2 * pause, longest)
                        continue
                return
        finally:
            with self._lock:
                if not ticket.is_over:
                    ticket.stage = "failed"
                ticket.ended_s = self._runtime.now()
                self._running -= 1
            self._begin()

    def _try(self, ticket: Ticket) -> None:
        """The slices may have gone elsewhere since, or be there already."""
        owners = self._memory.record.owners
        by_owner: dict[int, list[SliceId]] = {}
        for number in ticket.slices:
            if owners[number] != ticket.target:
                by_owner.setdefault(owners[number], []).append(number)
        for owner, slices in by_owner.items():
            self._migrations.move(owner, ticket.target, slices, ticket)

    # Containers

    def scale(self, containers: int) -> Scaling:
        """Has so many containers share the slices evenly; goes on by itself."""
        record = self._memory.record
        if containers > record.slices:
            raise BadOption(
                f"{containers} containers cannot share {record.slices} slices",
                hint="a container serves at least one slice",
                option="containers",
            )
        with self._lock:
            if self.scaling is not None and self.scaling.what:
                raise Unavailable(
                    f"the number of containers is being changed already: {self.scaling.what}",
                    hint="try again when that is done",
                    address="",
                )
            now = self._containers.ids
            # Those that are there stay; ids begin at 0, and the lowest that are free come first.
            free = [number for number in range(len(now) + containers) if number not in now]
            ids = sorted(now[:containers] + free[: max(0, containers - len(now))])
            scaling = Scaling(ids, f"to {containers} containers", leaving=set(now).difference(ids))
            self.scaling = scaling
        self._runtime.spawn(partial(self._scale, scaling), "millpond-scale")
        return scaling

    def _scale(self, scaling: Scaling) -> None:
        try:
            scaling.what = "starting containers"
            # What was asked for before must not give slices to those that leave.
            self._await_over(self._cancelled(lambda ticket: ticket.target in scaling.leaving))
            new = [number for number in scaling.ids if number not in self._containers.ids]
            try:
                self._containers.add(new)
            except MillpondError:
                for container in new:
                    self._leave(container)
                raise
            scaling.what = "moving slices"
            record = self._memory.record
            self._await(self.spread(record, scaling.ids, "scale"))
            scaling.what = "ending containers"
            self._await_backups(scaling)
            for container in sorted(scaling.leaving):
                self._leave(container)
        except MillpondError as error:
            scaling.error = error
        except Exception as error:  # noqa: BLE001 - whatever it is, who asked for it is told
            scaling.error = MillpondError(f"{type(error).__name__}: {error}")
        finally:
            scaling.leaving = set()
            scaling.what = ""

    def spread(self, record: PondRecord, ids: Sequence[int], cause: Cause) -> list[Ticket]:
        """Moves after which these containers share the slices evenly, as few as it takes."""
        held = {SliceId(n): self._backing.holders(SliceId(n)) for n in range(record.slices)}
        owners = placement.evened(record.owners, ids, held)
        tickets = []
        for (_, target), slices in placement.moves(record.owners, owners).items():
            tickets += self.move(slices, target, cause)
        return tickets

    def _await(self, tickets: Sequence[Ticket]) -> None:
        self._await_over(tickets)
        for ticket in tickets:
            if ticket.stage == "failed" and ticket.error is not None:
                raise ticket.error
            if ticket.stage == "cancelled":
                raise Unavailable("moves were cancelled", address="")

    def _await_backups(self, scaling: Scaling) -> None:
        """Until no slice needs those that leave: neither as an owner nor as a backup."""
        for container in sorted(scaling.leaving):
            while True:
                if self._closed:
                    raise Unavailable("the pond is closing", address="")
                record = self._memory.record
                if record.slices_of(container):
                    raise Unavailable(f"container {container} has got slices again", address="")
                if not any(container in self._backing.holders(SliceId(n)) for n in range(record.slices)):
                    break
                self._migrations.replicate(self._migrations.wanted, scaling.leaving)
                self._runtime.sleep(0.05)

    def _leave(self, container: int) -> None:
        """Ends a container for good, unless it has slices."""

        def leave() -> None:
            with self._memory.lock:
                if self._memory.record.slices_of(container):
                    raise Unavailable(f"container {container} has got slices again", address="")
                # From here on no journal entry gives it any.
                self._containers.members.leave(container)

        self._containers.remove(container, leave)


def load_moves(
    loads: Mapping[SliceId, float], owners: Sequence[int], containers: Sequence[int], tolerance: float = 0.1
) -> dict[SliceId, int]:
    """Where slices should go so that no container has much more load than the mean: the hottest first, as few as it takes."""
    totals = dict.fromkeys(containers, 0.0)
    for number, owner in enumerate(owners):
        if owner in totals:
            totals[owner] += loads.get(SliceId(number), 0.0)
    mean = sum(totals.values()) / max(1, len(totals))
    out: dict[SliceId, int] = {}
    now = list(owners)
    while len(totals) > 1 and mean > 0:
        hottest = max(totals, key=lambda c: totals[c])
        coolest = min(totals, key=lambda c: totals[c])
        excess = totals[hottest] - mean
        if excess <= tolerance * mean:
            break
        own = sorted(
            ((loads.get(SliceId(n), 0.0), SliceId(n)) for n, owner in enumerate(now) if owner == hottest),
            reverse=True,
        )
        # The largest that makes the two more even.
        gap = totals[hottest] - totals[coolest]
        chosen = next(((load, n) for load, n in own if 0 < load < gap), None)
        if chosen is None or len(own) == 1 or chosen[1] in out:
            break
        load, number = chosen
        out[number] = coolest
        now[number] = coolest
        totals[hottest] -= load
        totals[coolest] += load
    return out
