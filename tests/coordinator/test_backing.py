"""Which backups are wanted, which epochs go to whom, and what the journal says of them."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.code.rules import keep_latest, put
from millpond.container.layout import backup_directory_name, directory_name
from millpond.coordinator import placement
from millpond.coordinator.backing import Backing, wanted_backups
from millpond.coordinator.hosting import Host
from millpond.coordinator.members import Members
from millpond.coordinator.membership import Live
from millpond.coordinator.records import PondRecord, ResidentRecord
from millpond.runtime import Serial
from millpond.wire.backups import Backup
from millpond.wire.base import SliceId, Term
from millpond.wire.states import StateSpec

# Backups that are wanted

NOTHING: dict[SliceId, list[int]] = {}


def numbers(*slices: int) -> list[SliceId]:
    return [SliceId(number) for number in slices]


def settled(
    pond: PondRecord, hosts: dict[int, str], wanted: int, held: dict[SliceId, list[int]]
) -> list[dict[SliceId, list[int]]]:
    """What is wanted step by step, as it is carried out: what lacks comes, and then what is too much goes."""
    steps: list[dict[SliceId, list[int]]] = []
    for _ in range(8):
        want = wanted_backups(pond, hosts, hosts, wanted, held)
        if all(set(want[SliceId(n)]) == set(held.get(SliceId(n), ())) for n in range(pond.slices)):
            return steps
        steps.append(want)
        held = {
            n: sorted({*held.get(n, ()), *chosen}) if set(chosen) - set(held.get(n, ())) else chosen
            for n, chosen in want.items()
        }
    raise AssertionError(f"it does not come to rest: {steps[-2:]}")


@pytest.mark.parametrize("containers", [1, 2, 3, 5])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_every_slice_has_so_many_backups_if_there_are_others(containers: int, wanted: int) -> None:
    pond = PondRecord(owners=placement.place(12, range(containers)))
    want = wanted_backups(pond, range(containers), {}, wanted, NOTHING)
    assert sorted(want) == list(range(12))
    for number, chosen in want.items():
        assert len(set(chosen)) == len(chosen) == min(wanted, containers - 1)
        assert pond.owners[number] not in chosen
        assert set(chosen) <= set(range(containers))


@pytest.mark.parametrize("containers", [3, 4, 5])
def test_the_slices_of_one_that_ends_come_back_on_all_the_others(containers: int) -> None:
    pond = PondRecord(owners=placement.place(60, range(containers)))
    want = wanted_backups(pond, range(containers), {}, 1, NOTHING)
    for gone in range(containers):
        share = Counter(want[number][0] for number in pond.slices_of(gone))
        assert set(share) == set(range(containers)) - {gone}
        assert max(share.values()) - min(share.values()) <= 1


def test_what_is_held_already_stays() -> None:
    pond = PondRecord(owners=(0, 0, 0, 1, 2, 3))
    held = {SliceId(0): [3], SliceId(1): [2, 3], SliceId(3): [0]}
    want = wanted_backups(pond, range(4), {}, 1, held)
    assert want[SliceId(0)] == [3]
    assert want[SliceId(1)][0] in (2, 3)
    assert want[SliceId(3)] == [0]
    more = wanted_backups(pond, range(4), {}, 2, held)
    assert set(more[SliceId(1)]) == {2, 3}
    assert 3 in more[SliceId(0)]
    assert len(more[SliceId(0)]) == 2


def test_one_that_leaves_or_owns_the_slice_does_not_count() -> None:
    pond = PondRecord(owners=(0, 1))
    held = {SliceId(0): [0, 2], SliceId(1): [9]}
    want = wanted_backups(pond, [0, 1], {}, 1, held)
    assert want == {0: [1], 1: [0]}


def test_another_host_comes_first() -> None:
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    pond = PondRecord(owners=placement.place(16, range(4)))
    want = wanted_backups(pond, hosts, hosts, 1, NOTHING)
    assert all(hosts[want[SliceId(n)][0]] != hosts[pond.owners[n]] for n in range(16))
    for gone in range(4):
        assert len({want[n][0] for n in pond.slices_of(gone)}) == 2, "both of the other host share them"
    three = wanted_backups(pond, hosts, hosts, 3, NOTHING)
    assert all(len(chosen) == 3 for chosen in three.values()), "the own host, when there is no other left"


@pytest.mark.parametrize("held_by", [[1], [1, 2], [2, 1], [2], []])
def test_a_backup_on_the_own_host_is_replaced_once(held_by: list[int]) -> None:
    """And not again and again: what replaces it is not what is too much."""
    hosts = {0: "a", 1: "a", 2: "b"}
    pond = PondRecord(owners=(0,))
    steps = settled(pond, hosts, 1, {SliceId(0): held_by})
    assert len(steps) <= 2
    assert wanted_backups(pond, hosts, hosts, 1, {SliceId(0): held_by}) == {0: [2]}


def test_whatever_is_held_it_comes_to_rest() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        ids = range(chance.randint(1, 5))
        hosts = {c: chance.choice("abc") for c in ids}
        pond = PondRecord(owners=tuple(chance.choice(ids) for _ in range(6)))
        held = {SliceId(n): chance.sample(ids, chance.randint(0, len(ids))) for n in range(6)}
        held = {n: [c for c in known if c != pond.owners[n]] for n, known in held.items()}
        wanted = chance.randint(0, 3)
        settled(pond, hosts, wanted, held)
        for number, chosen in wanted_backups(pond, ids, hosts, wanted, held).items():
            owner = hosts[pond.owners[number]]
            if wanted and any(host != owner for host in hosts.values()):
                assert any(hosts[container] != owner for container in chosen)


# Placement


def test_a_directory_holds_backups_besides_those_it_has() -> None:
    pond = PondRecord(owners=(0, 0, 1, 1))
    pond = placement.backed_up_in(pond, "one", numbers(2))
    pond = placement.backed_up_in(pond, "one", numbers(3, 2))
    pond = placement.backed_up_in(pond, "two", numbers(2))
    assert pond.backups == {"one": (2, 3), "two": (2,)}
    assert placement.backed_up_in(pond, "three", []).backups == pond.backups


def test_backups_go_by_directory_and_slice() -> None:
    pond = PondRecord(
        owners=(0, 0, 1), backups={"one": (SliceId(0), SliceId(1)), "two": (SliceId(1), SliceId(2))}
    )
    assert placement.without_backups(pond, ["one"]).backups == {"two": (1, 2)}
    assert placement.without_backups(pond, ["one"], numbers(1)).backups == {"one": (0,), "two": (1, 2)}
    assert placement.without_backups(pond, ["one", "two"], numbers(1)).backups == {"one": (0,), "two": (2,)}


def test_what_was_not_there_is_no_change() -> None:
    pond = PondRecord(owners=(0, 0, 1), backups={"one": (SliceId(0),)})
    assert placement.without_backups(pond, ["two"]) is pond
    assert placement.without_backups(pond, ["one"], numbers(2)) is pond
    assert placement.without_backups(pond, []) is pond


def test_slices_whose_directory_is_lost_rest_on_backups() -> None:
    pond = PondRecord(
        owners=(0, 0, 0, 1),
        directories={"lost": (SliceId(0), SliceId(1), SliceId(2)), "there": (SliceId(3),)},
        backups={
            "gone": (SliceId(0), SliceId(1)),
            "some": (SliceId(0), SliceId(3)),
            "others": (SliceId(0), SliceId(1)),
        },
    )
    after = placement.rest_on_backups(pond, numbers(0, 1, 2, 3), ["there", "some", "others"])
    assert placement.directories_of(after, numbers(0, 1, 2, 3)) == {
        0: "others",
        1: "others",
        2: "lost",
        3: "there",
    }
    assert after.owners == pond.owners
    assert after.backups == {"gone": (0, 1), "some": (0, 3)}, "what a slice rests on is no backup of it"


def test_slices_are_handed_to_one_that_keeps_them_in_its_directory() -> None:
    pond = PondRecord(
        owners=(0, 0, 1), version=4, directories={"a": (SliceId(0), SliceId(1)), "b": (SliceId(2),)}
    )
    after = placement.handed_to(pond, 1, "b", numbers(1))
    assert (after.owners, after.version) == ((0, 1, 1), 5)
    assert after.directories == {"a": (0,), "b": (1, 2)}


@pytest.mark.parametrize("seed", range(40))
def test_slices_move_as_few_as_it_takes_to_who_holds_them(seed: int) -> None:
    chance = random.Random(seed)
    slices, ids = chance.randint(4, 40), sorted(chance.sample(range(9), chance.randint(1, 4)))
    before = [chance.randrange(9) for _ in range(slices)]
    held = {SliceId(n): chance.sample(range(9), chance.randint(0, 3)) for n in range(slices)}
    plain, after = placement.evened(before, ids), placement.evened(before, ids, held)
    for owners in (plain, after):
        counts = Counter(owners)
        assert set(counts) <= set(ids)
        assert max(counts.values()) - min(counts[c] for c in ids) <= 1
    even, left = divmod(slices, len(ids))
    had = sorted((before.count(c) for c in ids), reverse=True)
    fewest = slices - sum(min(has, even + (at < left)) for at, has in enumerate(had))
    moved = [n for n in range(slices) if before[n] != after[n]]
    assert len(moved) == sum(a != b for a, b in zip(before, plain, strict=True)) == fewest

    def at_holders(owners: list[int]) -> int:
        return sum(owners[n] in held[SliceId(n)] for n in moved)

    assert at_holders(after) >= at_holders(plain)


def test_a_slice_goes_to_its_holder_while_that_has_room() -> None:
    held = {SliceId(n): [2] for n in range(6)}
    after = placement.evened([0] * 6, [0, 1, 2], held)
    assert Counter(after) == {0: 2, 1: 2, 2: 2}
    assert [after[n] for n in (2, 3)] == [2, 2], "the first that go find room there"


# Epochs that are sent to backups


def spec(name: str = "s") -> StateSpec:
    return StateSpec(name, "key bigint", "value bigint", put(), keep_latest())


class Journal:
    """A memory without a disk."""

    def __init__(self, record: PondRecord) -> None:
        self.record = record
        self.lock = Serial().lock()
        self.written = 0

    def change(self, decide: Any) -> None:
        after = decide(self.record)
        if after is not self.record:
            self.record, self.written = after, self.written + 1


class Scene:
    """Three containers in terms 10, 11, 12, that own two slices each."""

    def __init__(self, owners: tuple[int, ...] = (0, 0, 1, 1, 2, 2)) -> None:
        residents = {"s": ResidentRecord(spec(), 1)}
        self.memory = Journal(PondRecord(owners=owners, residents=residents))
        self.members = Members()
        self.members.join(range(3))
        self.live: dict[int, Live] = {}
        for container in range(3):
            self.start(container, 10 + container)
        containers: Any = SimpleNamespace(members=self.members, live=self.live)
        memory: Any = self.memory
        self.backing = Backing(memory, containers)

    def start(self, container: int, term: int) -> None:
        self.members.started(container, Term(term))
        connection: Any = None
        self.live[container] = Live(Host(0, f"at:{term}"), connection, Term(term))

    def end(self, container: int) -> None:
        self.members.ended(container)
        del self.live[container]

    def enter(self, container: int, term: int, *slices: int) -> None:
        directory = backup_directory_name(term, container)
        self.memory.record = placement.backed_up_in(self.memory.record, directory, numbers(*slices))

    @property
    def plan(self) -> dict[int, list[Backup]]:
        return self.backing.plan("s")

    @property
    def sent(self) -> dict[int, set[tuple[int, int]]]:
        """By owner, the slices that it sends, and to whom."""
        return {
            owner: {(number, backup.container) for backup in backups for number in backup.slices}
            for owner, backups in self.plan.items()
        }


def test_backups_and_those_that_are_enlisted_are_sent_what_their_owners_prepare() -> None:
    scene = Scene()
    assert scene.plan == {}
    scene.enter(1, 11, 0, 4)
    scene.backing.enlist(2, Term(12), numbers(0, 1, 2))
    assert scene.plan == {
        0: [Backup(1, Term(11), "at:11", numbers(0)), Backup(2, Term(12), "at:12", numbers(0, 1))],
        1: [Backup(2, Term(12), "at:12", numbers(2))],
        2: [Backup(1, Term(11), "at:11", numbers(4))],
    }
    assert scene.backing.holders(SliceId(0)) == [1]
    assert scene.backing.holders(SliceId(1)) == [], "who is enlisted is none yet"


def test_one_container_that_is_a_backup_and_is_enlisted_for_more_is_sent_one_record() -> None:
    scene = Scene()
    scene.enter(1, 11, 0)
    scene.backing.enlist(1, Term(11), numbers(1))
    assert scene.plan == {0: [Backup(1, Term(11), "at:11", numbers(0, 1))]}


def test_an_epoch_is_covered_if_all_that_are_backups_by_then_were_asked() -> None:
    scene = Scene()
    covered = scene.backing.is_covered
    assert covered("s", {})
    scene.enter(1, 11, 0)
    assert not covered("s", {})
    plan = scene.plan
    assert covered("s", plan)
    scene.backing.enlist(2, Term(12), numbers(0))
    assert covered("s", plan), "who is enlisted since is no backup yet, and waits for this epoch"
    scene.enter(2, 12, 0)
    assert not covered("s", plan)
    assert covered("s", scene.plan)


def test_an_epoch_is_not_covered_if_its_slices_went_elsewhere_meanwhile() -> None:
    scene = Scene()
    scene.enter(1, 11, 0)
    plan = scene.plan
    scene.memory.record = placement.handed_to(scene.memory.record, 2, directory_name(12, 2), numbers(0))
    assert not scene.backing.is_covered("s", plan)
    assert scene.sent == {2: {(0, 1)}}


def test_a_backup_whose_incarnation_has_ended_is_dropped_before_the_next_epoch() -> None:
    scene = Scene()
    scene.enter(1, 11, 0)
    scene.enter(2, 12, 0)
    scene.backing.enlist(1, Term(11), numbers(4))
    plan = scene.plan
    scene.end(1)
    assert scene.backing.holders(SliceId(0)) == [2]
    assert scene.sent == {0: {(0, 2)}}
    assert scene.memory.record.backups == {backup_directory_name(12, 2): (0,)}
    assert not scene.backing.is_enlisted(1, Term(11), numbers(4))
    assert scene.backing.is_covered("s", plan), "one that was asked in vain does not matter"
    scene.start(1, 13)
    assert scene.sent == {0: {(0, 2)}}, "the next incarnation is another one"
    written = scene.memory.written
    _ = scene.plan
    assert scene.memory.written == written, "nothing to drop, nothing to write"


def test_an_incarnation_that_lost_its_backups_is_sent_nothing_any_more() -> None:
    scene = Scene()
    scene.enter(1, 11, 0, 1)
    scene.backing.enlist(1, Term(11), numbers(4))
    scene.backing.lose(1, Term(99))
    assert scene.sent == {0: {(0, 1), (1, 1)}, 2: {(4, 1)}}
    scene.backing.lose(1, Term(11), numbers(1))
    assert scene.sent == {0: {(0, 1)}, 2: {(4, 1)}}
    scene.backing.lose(1, Term(11))
    assert scene.sent == {}
    assert not scene.backing.is_enlisted(1, Term(11), numbers(4))


def test_who_is_discharged_keeps_what_it_is_enlisted_for_besides() -> None:
    scene = Scene()
    scene.backing.enlist(1, Term(11), numbers(0))
    scene.backing.enlist(1, Term(11), numbers(4, 5))
    assert scene.backing.is_enlisted(1, Term(11), numbers(0, 4, 5))
    scene.backing.discharge(1, Term(11), numbers(0, 4))
    assert not scene.backing.is_enlisted(1, Term(11), numbers(0))
    assert scene.sent == {2: {(5, 1)}}


def test_a_resident_that_lives_in_some_slices_is_sent_for_those_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    monkeypatch.setattr(StateSpec, "places", lambda self, slices: numbers(1, 2))
    scene.enter(1, 11, 0, 1)
    scene.enter(2, 12, 2, 3)
    assert scene.sent == {0: {(1, 1)}, 1: {(2, 2)}}
    assert scene.backing.is_covered("s", scene.plan)
    only_others = {0: scene.plan[0]}
    assert not scene.backing.is_covered("s", only_others)


def test_every_way_to_leave_one_out_is_noticed() -> None:
    """Of all that are backups, each one that a plan lacks makes it insufficient."""
    scene = Scene()
    for container, slices in ((0, (2, 4)), (1, (0, 5)), (2, (1, 3))):
        scene.enter(container, 10 + container, *slices)
    whole = scene.plan
    pairs = [
        (owner, backup, n) for owner, backups in whole.items() for backup in backups for n in backup.slices
    ]
    assert len(pairs) == 6
    for size in range(len(pairs) + 1):
        for chosen in itertools.combinations(pairs, size):
            plan: dict[int, list[Backup]] = {}
            for owner, backup, number in chosen:
                part = Backup(backup.container, backup.term, backup.address, [number])
                plan.setdefault(owner, []).append(part)
            assert scene.backing.is_covered("s", plan) == (size == len(pairs))
