"""Moves that were asked for, and the number of containers: what is under way, how far it is, and what became of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from millpond.coordinator import placement
from millpond.coordinator.backing import Backing
from millpond.coordinator.loads import Room
from millpond.coordinator.memory import Memory
from millpond.coordinator.migrations import Migrations, Watch
from millpond.coordinator.records import PondRecord
from millpond.coordinator.slices import Slices
from millpond.errors import BadOption, MillpondError, NoRoom, OutOfMemory, Unavailable
from millpond.runtime import Runtime
from millpond.wire.base import SliceId
from millpond.wire.moves import Cause, MoveInfo, Stage

AT_ONCE_MAX = 2
"""Moves under way at the same time."""
REMEMBERED = 256
"""Moves that are over; and no fewer than there are slices, so that whoever asked for many learns what became of each."""
TRIES_MAX, MEMORY_TRIES_MAX = 20, 5
"""Of a move, and of one for which somebody had not enough memory: waiting rarely helps there."""
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
    stage: Stage = "waiting"
    began_s: float | None = None
    ended_s: float | None = None
    copied: float = 0.0
    error: MillpondError | None = None
    cancelled: bool = False
    tries: int = 0
    tried: list[SliceId] = field(default_factory=list)
    """Those that are being moved now. A later request may have taken some of them out of `slices`."""
    needs: int = 0
    """Bytes that the target takes up for them."""

    def reaches(self, stage: Stage) -> None:
        self._check_wanted()
        self.stage = stage

    def copies(self, share: float) -> None:
        self._check_wanted()
        self.copied = share

    def _check_wanted(self) -> None:
        if self.cancelled:
            raise Unavailable("the move was cancelled", address="")
        if self.is_outdated:
            raise Unavailable("some of the slices are to go elsewhere", address="")

    @property
    def is_outdated(self) -> bool:
        return len(self.slices) < len(self.tried)

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
    moves: list[int] = field(default_factory=list)
    """The ids of its moves."""


class Rooms(Protocol):
    def __call__(self, owner: int, target: int) -> Room:
        """What the target has left, and how large the owner's slices are, as far as that is known."""


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
        self.rooms: Rooms = lambda owner, target: Room()
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
        """Asks for slices to be served there, in this order; those that are there already stay, and those that are on their
        way there go on. Of one slice, the later request counts.
        """
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
        if cause != "return":
            self.stay(slices)
        with self._lock:
            asked = dict.fromkeys(slices)
            tickets = [t for t in self._wanted() if t.target == to and not asked.keys().isdisjoint(t.slices)]
            for ticket in tickets:
                for number in ticket.slices:
                    asked.pop(number, None)
            self._take_out(asked)
            # A move that has begun may be past the point where it can be cancelled.
            under_way = self._under_way()
            for number in asked:
                if record.owners[number] != to or number in under_way:
                    by_owner.setdefault(record.owners[number], []).append(number)
            for owner, own in by_owner.items():
                self._number += 1
                ticket = Ticket(self._number, own, owner, to, cause)
                self._tickets[ticket.id] = ticket
                tickets.append(ticket)
            self._forget(max(REMEMBERED, record.slices))
        self._begin()
        return tickets

    def _forget(self, remembered: int) -> None:
        """The oldest that are over. Those that failed are told apart: none is forgotten for moves that went well."""
        over = [ticket for ticket in self._tickets.values() if ticket.is_over]
        for has_failed in (False, True):
            alike = [ticket for ticket in over if (ticket.stage == "failed") is has_failed]
            for ticket in alike[:-remembered]:
                del self._tickets[ticket.id]

    def stay(self, slices: Collection[SliceId] | None = None) -> None:
        """Somebody wants these slices, or all, where they are or go: they do not go back to where they were."""
        with self._memory.lock:
            self._slices.homes.forget(slices)

    def _wanted(self) -> list[Ticket]:
        """Those that are neither over nor cancelled. The caller holds the lock."""
        return [ticket for ticket in self._tickets.values() if not ticket.is_over and not ticket.cancelled]

    def _take_out(self, slices: Collection[SliceId]) -> None:
        """Of moves that were asked for earlier. The others of their slices go where they were to go."""
        for ticket in self._wanted():
            left = [number for number in ticket.slices if number not in slices]
            if not left:
                self._cancel(lambda each, gone=ticket: each is gone)  # type: ignore[misc]
            elif len(left) < len(ticket.slices):
                ticket.slices = left

    @property
    def expected(self) -> tuple[list[int], set[SliceId]]:
        """The owners when all moves are done, and which slices are on their way."""
        with self._lock:
            owners = list(self._memory.record.owners)
            moving = self._under_way()
            for ticket in self._wanted():
                moving.update(ticket.slices)
                for number in ticket.slices:
                    owners[number] = ticket.target
            return owners, moving

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way, and the number of containers stays as it is."""
        with self._lock:
            changing = self.scaling is not None and bool(self.scaling.what)
            return not changing and all(ticket.is_over for ticket in self._tickets.values())

    def cancel(self, ids: Collection[int] | None = None) -> None:
        """Those that have not been switched come to nothing."""
        with self._lock:
            cancelled = self._cancel(lambda ticket: ids is None or ticket.id in ids)
        self.stay([number for ticket in cancelled for number in ticket.slices])

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
            self._check_open()
            self._runtime.sleep(0.02)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the pond is closing", address="")

    def moves(self, ids: Collection[int] | None = None) -> list[MoveInfo]:
        with self._lock:
            now_s = self._runtime.now()
            return [t.info(now_s) for t in self._tickets.values() if ids is None or t.id in ids]

    def _under_way(self) -> set[SliceId]:
        """Slices whose moves have begun. The caller holds the lock."""
        begun = (t for t in self._tickets.values() if t.began_s is not None and not t.is_over)
        return {number for ticket in begun for number in ticket.tried}

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
                waiting[0].tried = list(waiting[0].slices)
                self._running += 1
                self._runtime.spawn(partial(self._run, waiting[0]), f"millpond-move-{waiting[0].id}")

    def _run(self, ticket: Ticket) -> None:
        """Until it is over."""
        pause, longest = RETRY_S
        try:
            while True:
                try:
                    self._try(ticket)
                    with self._lock:
                        ticket.stage, ticket.error = "moved", None
                    return
                except Exception as error:
                    ticket.error = _as_ours(error)
                    if not isinstance(error, MillpondError | OSError):
                        raise
                ticket.needs = 0
                with self._lock:
                    is_outdated, ticket.tried = ticket.is_outdated, list(ticket.slices)
                ticket.tries += not is_outdated
                if ticket.cancelled or self._closed:
                    ticket.stage = "cancelled"
                elif isinstance(ticket.error, NoRoom) or ticket.tries >= (
                    MEMORY_TRIES_MAX if isinstance(ticket.error, OutOfMemory) else TRIES_MAX
                ):
                    ticket.stage = "failed"
                else:
                    ticket.stage = "waiting"
                    if is_outdated:
                        self._begin()
                    else:
                        self._runtime.sleep(pause)
                        pause = min(2 * pause, longest)
                    continue
                return
        finally:
            with self._lock:
                if not ticket.is_over:
                    ticket.stage = "failed"
                ticket.ended_s = self._runtime.now()
                ticket.needs = 0
                self._running -= 1
            self._begin()

    def _try(self, ticket: Ticket) -> None:
        """The slices may have gone elsewhere since, or be there already."""
        owners = self._memory.record.owners
        by_owner: dict[int, list[SliceId]] = {}
        for number in ticket.tried:
            if owners[number] != ticket.target:
                by_owner.setdefault(owners[number], []).append(number)
        for owner, slices in by_owner.items():
            self._take_room(ticket, owner, slices)
            self._migrations.move(owner, ticket.target, slices, ticket)

    def _take_room(self, ticket: Ticket, owner: int, slices: Sequence[SliceId]) -> None:
        """The target and its host must have memory for them, besides what is on its way there."""
        target = ticket.target
        room = self.rooms(owner, target)
        needs = room.needs(target, slices)
        with self._lock:
            others = [t for t in self._tickets.values() if t.needs and t is not ticket]
            there = sum(t.needs for t in others if t.target == target)
            beside = sum(t.needs for t in others if room.are_together(t.target, target))
            limits = [
                (f"container {target} has", room.left.get(target, math.inf), there),
                (f"the machine of container {target} has", room.left_beside(target), beside),
            ]
            if not needs or all(needs <= left - taken for _, left, taken in limits):
                ticket.needs = needs
                return
        who, left, taken = min(limits, key=lambda limit: limit[1] - limit[2])
        what = f"{len(slices)} slices take {needs:,} bytes, and {who} {left:,} left"
        if needs > left:
            raise NoRoom(
                what,
                hint="move fewer or smaller ones, add containers, on other machines where this one is short of memory,"
                " or open the pond with a larger memory=",
                container=target,
                needs=needs,
                left=int(left),
            )
        raise Unavailable(f"{what}, of which {taken:,} are for slices on their way", address="")

    # Containers

    def scale(
        self, containers: int, cause: Cause = "scale", first: Callable[[], object] = lambda: None
    ) -> Scaling:
        """Has so many containers share the slices evenly; goes on by itself. What comes `first` is done once nothing speaks
        against it, and before anything else.
        """
        record = self._memory.record
        if containers > record.slices:
            raise BadOption(
                f"{containers} containers cannot share {record.slices} slices",
                hint="a container serves at least one slice",
                option="containers",
            )
        self._containers.check_room(containers)
        with self._lock:
            self._check_open()
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
        try:
            first()
        except BaseException:
            self._ended(scaling)
            raise
        self._runtime.spawn(partial(self._scale, scaling, cause), "millpond-scale")
        return scaling

    def _scale(self, scaling: Scaling, cause: Cause) -> None:
        try:
            scaling.what = "starting containers"
            # What was asked for before must not give slices to those that leave.
            self._await_over(self._cancelled(lambda ticket: ticket.target in scaling.leaving))
            new = [number for number in scaling.ids if number not in self._containers.ids]
            self._check_open()
            try:
                self._containers.add(new)
            except MillpondError:
                for container in new:
                    self._leave(container)
                raise
            scaling.what = "moving slices"
            self.stay()
            tickets = self.spread(self._memory.record, scaling.ids, cause)
            scaling.moves = [ticket.id for ticket in tickets]
            self._await(tickets)
            scaling.what = "ending containers"
            self._await_backups(scaling)
            for container in sorted(scaling.leaving):
                self._leave(container)
        except Exception as error:  # noqa: BLE001 - whatever it is, who asked for it is told
            scaling.error = _as_ours(error)
        finally:
            self._ended(scaling)

    @staticmethod
    def _ended(scaling: Scaling) -> None:
        scaling.leaving = set()
        scaling.what = ""

    def spread(self, record: PondRecord, ids: Sequence[int], cause: Cause) -> list[Ticket]:
        """Moves after which these containers share the slices evenly, as few as it takes."""
        owners = placement.evened(record.owners, ids, self._backing.held())
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
                self._check_open()
                record = self._memory.record
                if record.slices_of(container):
                    raise Unavailable(f"container {container} has got slices again", address="")
                if not any(container in holders for holders in self._backing.held().values()):
                    break
                self.replicate()
                self._runtime.sleep(0.05)

    def replicate(self) -> None:
        """One step towards the backups that slices should have. What moves have copied so far stays until they are over."""
        with self._lock:
            bound = {number: ticket.target for ticket in self._wanted() for number in ticket.slices}
        self._migrations.replicate(self._migrations.wanted, self.leaving, bound)

    def _leave(self, container: int) -> None:
        """Ends a container for good, unless it has slices."""

        def leave() -> None:
            with self._memory.lock:
                if self._memory.record.slices_of(container):
                    raise Unavailable(f"container {container} has got slices again", address="")
                # From here on no journal entry gives it any.
                self._containers.members.leave(container)

        self._containers.remove(container, leave)


def _as_ours(error: Exception) -> MillpondError:
    return error if isinstance(error, MillpondError) else MillpondError(f"{type(error).__name__}: {error}")
