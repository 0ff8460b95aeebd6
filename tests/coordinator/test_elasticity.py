"""Moves that were asked for, alone: what becomes of each, and which containers there are to be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from millpond.coordinator import elasticity, placement
from millpond.coordinator.elasticity import (
    AT_ONCE_MAX,
    MEMORY_TRIES_MAX,
    REMEMBERED,
    TRIES_MAX,
    Elasticity,
    Scaling,
    Ticket,
)
from millpond.coordinator.homes import Homes
from millpond.coordinator.loads import Room
from millpond.coordinator.migrations import Watch
from millpond.coordinator.records import PondRecord
from millpond.errors import BadOption, MillpondError, NoRoom, NoTaskSlots, OutOfMemory, Unavailable
from millpond.runtime import Serial
from millpond.wire.base import SliceId

_NONE: Mapping[SliceId, int] = MappingProxyType({})
AWAY = Unavailable("away", address="")
FULL = OutOfMemory("full", what="a slice")


def numbers(*slices: int) -> list[SliceId]:
    return [SliceId(number) for number in slices]


class Later(Serial):
    """What is spawned is done when the test says so, or when somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.spawned: list[Callable[[], object]] = []

    def spawn(self, work: Callable[[], object], name: str) -> None:
        self.spawned.append(work)

    def run(self) -> None:
        while self.spawned:
            self.spawned.pop(0)()


class Pond:
    """Fakes of all that moves are carried out by. `hindrance` may raise, or do something, at each stage of a move."""

    def __init__(
        self,
        owners: tuple[int, ...] = (0, 0, 0, 1, 1, 1),
        ids: Sequence[int] = (0, 1, 2),
        later: bool = False,
    ) -> None:
        self.memory = SimpleNamespace(record=PondRecord(owners=owners), lock=threading.RLock())
        self.members = SimpleNamespace(leave=lambda container: None)
        self.ids = list(ids)
        self.runtime = Later() if later else Serial()
        self.moved: list[tuple[int, int, list[SliceId]]] = []
        self.hindrance: Callable[[str], None] = lambda stage: None
        self.backups: dict[int, list[int]] = {}
        self.replicated = 0
        self.bound: dict[SliceId, int] = {}
        self.removed: list[int] = []
        self.added: list[int] = []
        self.room = 9
        self.homes = Homes()
        fakes: Any = SimpleNamespace(containers=self, homes=self.homes)
        everything: Any = self
        self.elasticity = Elasticity(everything.memory, fakes, everything, everything, self.runtime)

    # As `Migrations`

    wanted = 1

    def move(self, source: int, target: int, slices: Sequence[SliceId], watch: Watch) -> None:
        owners = self.memory.record.owners
        assert all(owners[number] == source for number in slices), "whoever asks sees to it"
        watch.reaches("copying")
        self.hindrance("copying")
        watch.copies(0.5)
        watch.reaches("catching up")
        self.hindrance("catching up")
        watch.reaches("switching")
        self.hindrance("switching")
        after = [target if number in slices else owner for number, owner in enumerate(owners)]
        self.memory.record = placement.placed(self.memory.record, after)
        self.moved.append((source, target, list(slices)))

    def replicate(
        self, wanted: int, leaving: Collection[int] = (), bound: Mapping[SliceId, int] = _NONE
    ) -> bool:
        self.replicated += 1
        self.bound = dict(bound)
        self.backups = {n: [c for c in held if c not in leaving] for n, held in self.backups.items()}
        return False

    # As `Backing`

    def held(self) -> dict[SliceId, list[int]]:
        return {SliceId(n): self.backups.get(n, []) for n in range(self.memory.record.slices)}

    # As `Membership`

    def check_room(self, containers: int) -> None:
        if containers > self.room:
            raise NoTaskSlots("there is no room", slots=self.room, taken=containers, left=0)

    def add(self, ids: Sequence[int]) -> None:
        self.added += ids
        self.ids = sorted({*self.ids, *ids})

    def remove(self, container: int, leave: Callable[[], None]) -> None:
        leave()
        assert not self.memory.record.slices_of(container)
        self.removed.append(container)
        self.ids.remove(container)

    @property
    def owners(self) -> tuple[int, ...]:
        owners: tuple[int, ...] = self.memory.record.owners
        return owners

    def stages(self, *tickets: Ticket) -> list[str]:
        return [ticket.stage for ticket in tickets]


# Tickets


def test_slices_go_where_they_are_asked_to_by_owner() -> None:
    pond = Pond()
    tickets = pond.elasticity.move(numbers(1, 3, 2, 3), to=2)
    assert pond.stages(*tickets) == ["moved", "moved"]
    assert pond.moved == [(0, 2, [1, 2]), (1, 2, [3])]
    assert pond.owners == (0, 2, 2, 2, 1, 1)
    infos = pond.elasticity.moves()
    assert [(info.source, info.target, info.progress, info.left_s, info.error) for info in infos] == [
        (0, 2, 1.0, None, ""),
        (1, 2, 1.0, None, ""),
    ]
    assert [info.id for info in pond.elasticity.moves([tickets[1].id])] == [tickets[1].id]


def test_slices_that_are_there_already_stay() -> None:
    pond = Pond()
    assert pond.elasticity.move(numbers(0, 1), to=0) == []
    assert pond.moved == []


@pytest.mark.parametrize(
    ("slices", "to", "option"), [([6], 1, "slices"), ([-1], 1, "slices"), ([0], 7, "to")]
)
def test_what_is_not_there_is_refused_and_nothing_is_moved(slices: list[int], to: int, option: str) -> None:
    pond = Pond()
    with pytest.raises(BadOption) as raised:
        pond.elasticity.move([*numbers(0), *numbers(*slices)], to)
    assert raised.value.hint
    assert raised.value.attributes()["option"] == option
    assert pond.elasticity.moves() == []
    assert pond.owners == (0, 0, 0, 1, 1, 1)


def test_a_move_that_fails_is_tried_again() -> None:
    pond = Pond()
    failures: list[MillpondError | OSError] = [AWAY, OSError("full"), AWAY]

    def hinder(stage: str) -> None:
        if stage == "switching" and failures:
            raise failures.pop()

    pond.hindrance = hinder
    (ticket,) = pond.elasticity.move(numbers(0), to=1)
    assert (ticket.stage, ticket.tries, ticket.error) == ("moved", 3, None)
    assert pond.runtime.now() > 0.5, "after a pause that grows"
    assert pond.owners[0] == 1


@pytest.mark.parametrize(("error", "tries"), [(AWAY, TRIES_MAX), (FULL, MEMORY_TRIES_MAX)])
def test_a_move_that_always_fails_is_given_up_and_says_why(error: MillpondError, tries: int) -> None:
    pond = Pond()

    def hinder(stage: str) -> None:
        raise error

    pond.hindrance = hinder
    (ticket,) = pond.elasticity.move(numbers(0), to=1)
    assert (ticket.stage, ticket.tries) == ("failed", tries)
    (info,) = pond.elasticity.moves()
    assert (info.error, info.is_over) == (error.message, True)
    assert info.seconds == pytest.approx(pond.runtime.now())
    pond.hindrance = lambda stage: None
    (again,) = pond.elasticity.move(numbers(0), to=1)
    assert again.stage == "moved"


def test_a_move_that_breaks_off_for_any_reason_does_not_stay_for_ever() -> None:
    """Whatever it is: others have their turn."""
    pond = Pond()

    def hinder(stage: str) -> None:
        raise ZeroDivisionError

    pond.hindrance = hinder
    for number in range(AT_ONCE_MAX + 1):
        with pytest.raises(ZeroDivisionError):
            pond.elasticity.move(numbers(number), to=2)
    assert {(info.stage, info.error) for info in pond.elasticity.moves()} == {
        ("failed", "ZeroDivisionError: ")
    }
    pond.hindrance = lambda stage: None
    (ticket,) = pond.elasticity.move(numbers(5), to=2)
    assert ticket.stage == "moved"


@pytest.mark.parametrize(
    ("stage", "over", "owner"),
    [("copying", "cancelled", 0), ("catching up", "cancelled", 0), ("switching", "moved", 1)],
)
def test_a_move_is_cancelled_until_it_is_switched(stage: str, over: str, owner: int) -> None:
    pond = Pond()

    def hinder(now: str) -> None:
        if now == stage:
            pond.elasticity.cancel()

    pond.hindrance = hinder
    (ticket,) = pond.elasticity.move(numbers(0), to=1)
    assert (ticket.stage, pond.owners[0]) == (over, owner)


def test_one_that_fails_after_it_was_cancelled_is_not_tried_again() -> None:
    pond = Pond()

    def hinder(stage: str) -> None:
        if stage == "switching":
            pond.elasticity.cancel()
            raise AWAY

    pond.hindrance = hinder
    (ticket,) = pond.elasticity.move(numbers(0), to=1)
    assert (ticket.stage, ticket.tries, pond.owners[0]) == ("cancelled", 1, 0)


def test_those_that_wait_are_cancelled_by_id() -> None:
    pond = Pond(later=True)
    tickets = [pond.elasticity.move(numbers(number), to=2)[0] for number in range(4)]
    assert [ticket.began_s is not None for ticket in tickets] == [True] * AT_ONCE_MAX + [False, False]
    pond.elasticity.cancel([tickets[2].id])
    assert pond.stages(*tickets) == ["waiting", "waiting", "cancelled", "waiting"]
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    assert pond.stages(*tickets) == ["moved", "moved", "cancelled", "moved"]
    assert pond.owners == (2, 2, 0, 2, 1, 1)


def test_a_later_request_replaces_one_that_waits() -> None:
    pond = Pond(later=True)
    for number in (0, 1):
        pond.elasticity.move(numbers(number), to=2)
    (earlier,) = pond.elasticity.move(numbers(2), to=2)
    (later,) = pond.elasticity.move(numbers(2), to=1)
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    assert pond.stages(earlier, later) == ["cancelled", "moved"]
    assert pond.owners[2] == 1


@pytest.mark.parametrize("to", [0, 1, 2])
@pytest.mark.parametrize("stage", ["copying", "catching up", "switching"])
def test_a_later_request_has_the_last_word_however_far_the_earlier_is(stage: str, to: int) -> None:
    """Also when it asks for where the slice still is: the earlier one may be about to take it away."""
    pond = Pond()
    asked: list[int] = []

    def hinder(now: str) -> None:
        if now == stage and not asked:
            asked.append(to)
            pond.elasticity.move(numbers(0), to)

    pond.hindrance = hinder
    pond.elasticity.move(numbers(0), to=2)
    assert asked
    assert pond.owners[0] == to
    assert all(info.is_over for info in pond.elasticity.moves())


def test_of_one_slice_only_one_move_runs() -> None:
    pond = Pond(later=True)
    (first,) = pond.elasticity.move(numbers(0, 1), to=2)
    (second,) = pond.elasticity.move(numbers(1), to=1)
    (third,) = pond.elasticity.move(numbers(5), to=2)
    assert [ticket.began_s is not None for ticket in (first, second, third)] == [True, False, True]
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    assert pond.stages(first, second, third) == ["moved", "moved", "moved"]
    assert pond.owners == (2, 1, 0, 1, 1, 2)


def test_a_slice_that_went_elsewhere_meanwhile_is_moved_from_there() -> None:
    pond = Pond(later=True)
    (ticket,) = pond.elasticity.move(numbers(0, 1), to=2)
    pond.memory.record = placement.placed(pond.memory.record, (1, 2, 0, 1, 1, 1))
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    assert ticket.stage == "moved"
    assert pond.moved == [(1, 2, [0])]


def test_a_pond_that_closes_begins_nothing_and_tries_nothing_again() -> None:
    pond = Pond()

    def hinder(stage: str) -> None:
        pond.elasticity.close()
        raise AWAY

    pond.hindrance = hinder
    (ticket,) = pond.elasticity.move(numbers(0), to=1)
    assert (ticket.stage, ticket.tries) == ("cancelled", 1)
    (never,) = pond.elasticity.move(numbers(1), to=1)
    assert never.began_s is None
    with pytest.raises(Unavailable, match="closing"):
        pond.elasticity.scale(1)


def test_what_is_over_is_remembered_within_bounds() -> None:
    pond = Pond()
    for number in range(REMEMBERED + 20):
        pond.elasticity.move(numbers(0), to=1 + number % 2)
    ids = [info.id for info in pond.elasticity.moves()]
    assert REMEMBERED <= len(ids) <= REMEMBERED + 1
    assert ids[-1] == REMEMBERED + 20


def test_whoever_asked_for_many_learns_of_each_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """More moves than are remembered, at once, and more after them."""
    monkeypatch.setattr(elasticity, "REMEMBERED", 8)
    slices = 32
    pond = Pond((0,) * slices, (0, 1))
    pond.elasticity.rooms = lambda owner, target: Room({1: 0}, {SliceId(n): n % 2 for n in range(slices)})
    asked = [pond.elasticity.move(numbers(number), to=1)[0].id for number in range(slices)]
    told = {info.id: info.stage for info in pond.elasticity.moves(asked)}
    assert [told.get(each) for each in asked] == ["moved", "failed"] * 16
    for number in range(slices):
        pond.elasticity.move(numbers(0), to=number % 2)
    later = pond.elasticity.moves()
    assert sum(info.stage == "failed" for info in later) == 16, "failures are not forgotten for others"
    assert len(later) <= 16 + slices + 1


def test_progress_goes_on_and_time_left_is_guessed() -> None:
    ticket = Ticket(1, numbers(0), 0, 1, "move")
    assert ticket.info(5.0).seconds == 0.0, "it has not begun"
    ticket.began_s = 10.0
    shares = [ticket.progress]
    for stage, share in (("copying", 0.0), ("copying", 0.5), ("catching up", 0.0), ("switching", 0.0)):
        ticket.reaches(stage)  # type: ignore[arg-type]
        if share:
            ticket.copies(share)
        shares.append(ticket.progress)
    assert shares == sorted(shares)
    info = ticket.info(29.0)
    assert info.left_s == pytest.approx(19.0 * 0.05 / 0.95)
    ticket.stage, ticket.ended_s = "moved", 30.0
    assert (ticket.info(99.0).seconds, ticket.info(99.0).left_s) == (20.0, None)


# The number of containers


def scaled(pond: Pond, containers: int) -> Scaling:
    scaling = pond.elasticity.scale(containers)
    assert (scaling.what, scaling.leaving) == ("", set())
    return scaling


@pytest.mark.parametrize(
    ("now", "containers", "ids"),
    [
        ((0, 1), 4, [0, 1, 2, 3]),
        ((0, 2, 5), 4, [0, 1, 2, 5]),
        ((1, 5), 3, [0, 1, 5]),
        ((0, 1, 2, 3), 2, [0, 1]),
        ((1, 4, 7), 1, [1]),
        ((3, 4), 2, [3, 4]),
    ],
)
def test_those_that_are_there_stay_and_the_lowest_free_ids_come(
    now: tuple[int, ...], containers: int, ids: list[int]
) -> None:
    pond = Pond(placement.place(12, now), now)
    scaling = scaled(pond, containers)
    assert scaling.error is None
    assert pond.ids == scaling.ids == ids
    assert pond.added == [number for number in ids if number not in now]
    assert pond.removed == [number for number in now if number not in ids]
    counts = Counter(pond.owners)
    assert set(counts) == set(ids)
    assert max(counts.values()) - min(counts.values()) <= 1
    wanted = placement.moves(placement.place(12, now), pond.owners)
    assert sum(len(slices) for *_, slices in pond.moved) == sum(map(len, wanted.values())), "each moves once"


def test_destinations_that_hold_a_backup_are_preferred() -> None:
    pond = Pond((0,) * 6, (0, 1, 2))
    pond.backups = {5: [2], 2: [1], 3: [1], 4: [2]}
    assert scaled(pond, 3).error is None
    assert pond.owners == (0, 0, 1, 1, 2, 2)


def test_who_leaves_goes_once_no_slice_needs_it() -> None:
    pond = Pond((0, 0, 1, 1, 2, 2), (0, 1, 2))
    pond.backups = {0: [2], 1: [1]}
    assert scaled(pond, 2).error is None
    assert pond.replicated
    assert pond.removed == [2]
    assert pond.backups == {0: [], 1: [1]}


def test_more_containers_than_slices_are_refused() -> None:
    pond = Pond()
    with pytest.raises(BadOption, match="7 containers cannot share 6 slices"):
        pond.elasticity.scale(7)
    assert pond.elasticity.scaling is None


def test_one_change_at_a_time() -> None:
    pond = Pond(later=True)
    scaling = pond.elasticity.scale(2)
    assert pond.elasticity.leaving == {2}
    done = list[int]()
    with pytest.raises(Unavailable, match="to 2 containers") as raised:
        pond.elasticity.scale(3, first=lambda: done.append(3))
    assert raised.value.hint
    assert not done
    assert pond.elasticity.scaling is scaling


def test_who_finds_no_room_is_told_at_once_and_nothing_has_changed() -> None:
    pond, done = Pond(), list[int]()
    pond.room = 3
    with pytest.raises(NoTaskSlots):
        pond.elasticity.scale(4, first=lambda: done.append(4))
    assert pond.elasticity.scaling is None
    assert not done
    assert scaled(pond, 2).error is None


def test_what_comes_first_is_done_before_and_where_it_fails_nothing_else_is() -> None:
    pond, ids = Pond(), list[list[int]]()

    def fail() -> None:
        raise AWAY

    with pytest.raises(Unavailable):
        pond.elasticity.scale(2, first=fail)
    assert pond.elasticity.is_idle
    assert pond.ids == [0, 1, 2]
    assert pond.elasticity.scale(2, first=lambda: ids.append(list(pond.ids))).error is None
    assert (ids, pond.ids) == ([[0, 1, 2]], [0, 1])


def test_a_change_that_fails_says_why_and_the_next_may_begin() -> None:
    pond = Pond()

    def hinder(stage: str) -> None:
        raise AWAY

    pond.hindrance = hinder
    assert scaled(pond, 1).error is AWAY
    assert pond.removed == [], "nobody goes that has slices"
    pond.hindrance = lambda stage: None
    assert scaled(pond, 1).error is None
    assert pond.removed == [1, 2]


def test_a_change_whose_moves_are_cancelled_ends() -> None:
    pond = Pond()

    def hinder(stage: str) -> None:
        pond.elasticity.cancel()

    pond.hindrance = hinder
    error = scaled(pond, 1).error
    assert error is not None
    assert "cancelled" in error.message
    assert pond.removed == []


def test_one_that_gets_slices_again_does_not_go() -> None:
    pond = Pond((0, 0, 1, 1, 2, 2), (0, 1, 2))
    replicate = pond.replicate

    def give_back(wanted: int, leaving: Collection[int] = (), bound: Mapping[SliceId, int] = _NONE) -> bool:
        pond.memory.record = placement.placed(pond.memory.record, (2, 0, 0, 1, 1, 1))
        return replicate(wanted)

    pond.replicate = give_back  # type: ignore[method-assign]
    pond.backups = {0: [2]}
    error = scaled(pond, 2).error
    assert error is not None
    assert "has got slices again" in error.message
    assert pond.removed == []


def test_what_moves_have_copied_stays_until_they_are_over() -> None:
    pond = Pond(later=True)
    pond.elasticity.move(numbers(1, 2), to=2)
    cancelled, *_ = pond.elasticity.move(numbers(3), to=2)
    pond.elasticity.cancel([cancelled.id])
    pond.elasticity.replicate()
    assert pond.bound == {1: 2, 2: 2}
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    pond.elasticity.replicate()
    assert pond.bound == {}


# Requests that meet, and what a target has room for


def test_a_later_request_takes_only_its_own_slices_out_of_one_that_waits() -> None:
    pond = Pond(later=True)
    for number in (3, 4):
        pond.elasticity.move(numbers(number), to=2)
    (earlier,) = pond.elasticity.move(numbers(0, 1, 2), to=2)
    (later,) = pond.elasticity.move(numbers(1), to=1)
    assert earlier.slices == [0, 2]
    assert pond.elasticity.expected == ([2, 1, 2, 2, 2, 1], {0, 1, 2, 3, 4})
    assert not pond.elasticity.is_idle
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    assert pond.stages(earlier, later) == ["moved", "moved"]
    assert pond.owners == (2, 1, 2, 2, 2, 1)
    assert pond.elasticity.is_idle


@pytest.mark.parametrize("stage", ["copying", "catching up", "switching"])
def test_a_later_request_takes_only_its_own_slices_out_of_one_that_has_begun(stage: str) -> None:
    pond = Pond()
    asked: list[Ticket] = []

    def hinder(now: str) -> None:
        if now == stage and not asked:
            asked.append(Ticket(0, [], 0, 0, "move", 0.0))
            asked.extend(pond.elasticity.move(numbers(1), to=1))

    pond.hindrance = hinder
    (first,) = pond.elasticity.move(numbers(0, 1), to=2)
    assert pond.stages(first, asked[1]) == ["moved", "moved"]
    assert (first.slices, first.tries) == ([0], 0)
    assert pond.owners == (2, 1, 0, 1, 1, 1)


def test_what_is_on_its_way_there_already_goes_on() -> None:
    pond = Pond(later=True)
    (first,) = pond.elasticity.move(numbers(0, 1), to=2)
    again = pond.elasticity.move(numbers(1, 2), to=2)
    assert again[0] is first
    assert [ticket.slices for ticket in again] == [[0, 1], [2]]
    assert isinstance(pond.runtime, Later)
    pond.runtime.run()
    assert pond.moved == [(0, 2, [0, 1]), (0, 2, [2])], "each moves once"


def test_the_order_that_is_asked_for_is_kept() -> None:
    pond = Pond()
    pond.elasticity.move(numbers(2, 0, 1), to=2)
    assert pond.moved == [(0, 2, [2, 0, 1])]


def test_a_target_without_room_gets_nothing_and_whoever_asks_is_told_at_once() -> None:
    pond = Pond()
    sizes = {SliceId(0): 80, SliceId(1): 50}
    pond.elasticity.rooms = lambda owner, target: Room({1: 100}, sizes)
    large, small = pond.elasticity.move(numbers(0, 1), to=1)[0], pond.elasticity.move(numbers(0), to=1)[0]
    assert pond.stages(large, small) == ["failed", "moved"]
    assert large.tries == 1
    (info, _) = pond.elasticity.moves()
    assert "130 bytes" in info.error
    assert "100 left" in info.error
    assert large.error is not None
    assert large.error.hint
    assert pond.owners == (1, 0, 0, 1, 1, 1)


def test_room_that_others_are_about_to_take_is_waited_for() -> None:
    pond = Pond()
    pond.elasticity.rooms = lambda owner, target: Room({1: 100}, {SliceId(n): 60 for n in range(6)})
    tries: list[Ticket] = []

    def hinder(stage: str) -> None:
        if stage == "switching" and not tries:
            tries.extend(pond.elasticity.moves())  # type: ignore[arg-type]
            with pytest.raises(Unavailable, match="on their way"):
                pond.elasticity._take_room(Ticket(9, numbers(1), 0, 1, "move", 0.0), 0, numbers(1))

    pond.hindrance = hinder
    (first,) = pond.elasticity.move(numbers(0), to=1)
    (second,) = pond.elasticity.move(numbers(1), to=1)
    assert tries
    assert pond.stages(first, second) == ["moved", "moved"]


def test_what_is_on_its_way_to_a_host_takes_room_from_all_of_its_containers() -> None:
    pond = Pond((0,) * 6, (0, 1, 2, 3))
    hosts = {0: "a", 1: "b", 2: "b", 3: "c"}
    sizes = {SliceId(n): 60 for n in range(6)}
    pond.elasticity.rooms = lambda owner, target: Room({target: 500}, sizes, {}, hosts, {"b": 100})
    tries: list[int] = []

    def hinder(stage: str) -> None:
        if stage == "switching" and not tries:
            tries.append(1)
            with pytest.raises(Unavailable, match=r"the machine of container 2 has 100 left, of which 60"):
                pond.elasticity._take_room(Ticket(9, numbers(1), 0, 2, "move"), 0, numbers(1))
            pond.elasticity._take_room(Ticket(9, numbers(1), 0, 3, "move"), 0, numbers(1))

    pond.hindrance = hinder
    (first,) = pond.elasticity.move(numbers(0), to=1)
    (large,) = pond.elasticity.move(numbers(1, 2), to=2)
    assert tries
    assert pond.stages(first, large) == ["moved", "failed"]
    assert isinstance(large.error, NoRoom)
    assert "the machine of container 2 has 100 left" in large.error.message


@pytest.mark.parametrize("wish", ["move", "cancel", "scale"])
def test_a_wish_about_slices_is_not_undone(wish: str) -> None:
    """They do not go back to a container that they left when it ended."""
    pond = Pond()
    pond.homes.left(2, {SliceId(0): 0})
    match wish:
        case "move":
            assert pond.elasticity.move(numbers(0), to=0) == [], "it is there, and shall be"
        case "cancel":
            pond.hindrance = lambda stage: pond.elasticity.cancel()
            pond.elasticity.move(numbers(0), to=2, cause="return")
        case "scale":
            scaled(pond, 3)
    owners = [0, *pond.owners[1:]]
    pond.homes.to_return(0.0, owners, pond.ids, is_well=True)
    assert pond.homes.to_return(1000.0, owners, pond.ids, is_well=True) == {}


def test_slices_that_go_back_are_still_on_their_way_home() -> None:
    pond = Pond(later=True)
    pond.homes.left(2, {SliceId(0): 0})
    pond.elasticity.move(numbers(0), to=2, cause="return")
    pond.homes.to_return(0.0, pond.owners, pond.ids, is_well=True)
    assert pond.homes.to_return(1000.0, pond.owners, pond.ids, is_well=True) == {2: [0]}
