"""Who owns each slice, and which directory tells what it rests on."""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec
import pytest

from millpond.coordinator import placement
from millpond.coordinator.records import PondRecord
from millpond.errors import BadMessage
from millpond.wire.base import SliceId
from millpond.wire.house import ContainerInfo, Placement


@pytest.mark.parametrize("slices", [1, 2, 5, 64, 97])
def test_every_container_gets_a_run_of_nearly_equal_length(slices: int) -> None:
    for containers in range(1, min(slices, 9) + 1):
        ids = [10 * number for number in range(containers)]
        owners = placement.place(slices, ids)
        assert len(owners) == slices
        counts = Counter(owners)
        assert set(counts) == set(ids)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert [owner for owner, _ in itertools.groupby(owners)] == ids, "contiguous, in the order of ids"


@pytest.mark.parametrize("owners", [(0, 1, 1, 0, 1, 1), (1, 0), (2, 2, 2, 2, 1, 0)])
def test_the_same_containers_keep_what_they_have(owners: tuple[int, ...]) -> None:
    pond = PondRecord(owners=owners, version=3)
    assert placement.opened(pond, range(len(set(owners)))) is pond


@pytest.mark.parametrize("slices", [1, 2, 5, 12, 64])
def test_other_containers_share_evenly_and_move_as_little_as_that_takes(slices: int) -> None:
    for before, after in itertools.permutations(range(1, min(slices, 7) + 1), 2):
        pond = PondRecord(owners=placement.place(slices, range(before)))
        opened = placement.opened(pond, range(after))
        counts = Counter(opened.owners)
        assert set(counts) == set(range(after))
        assert max(counts.values()) - min(counts.values()) <= 1
        moved = sum(old != new for old, new in zip(pond.owners, opened.owners, strict=True))
        had = sorted((Counter(pond.owners)[c] for c in range(after)), reverse=True)
        even, left = divmod(slices, after)
        assert moved == slices - sum(min(has, even + (at < left)) for at, has in enumerate(had))
        assert opened.version == pond.version + 1


def test_a_container_that_had_none_gets_some() -> None:
    pond = PondRecord(owners=(1, 1, 1, 2, 2, 2))
    assert placement.opened(pond, range(3)).owners == (1, 1, 0, 2, 2, 0)


def test_the_version_goes_on_only_with_a_change() -> None:
    pond = PondRecord(owners=(0, 0, 1), version=4)
    assert placement.placed(pond, [0, 0, 1]) is pond
    after = placement.placed(pond, [0, 1, 1])
    assert (after.owners, after.version) == ((0, 1, 1), 5)
    assert after.slices_of(1) == [1, 2]


def test_moves_are_what_differs() -> None:
    before, after = (0, 0, 1, 1, 2), (0, 1, 1, 2, 0)
    moved = placement.moves(before, after)
    assert moved == {(0, 1): [1], (1, 2): [3], (2, 0): [4]}
    assert placement.moves(before, before) == {}
    owners = list(before)
    for (source, target), numbers in moved.items():
        for number in numbers:
            assert owners[number] == source
            owners[number] = target
    assert tuple(owners) == after


def test_a_slice_rests_on_one_directory_alone() -> None:
    pond = PondRecord(owners=(0, 0, 1, 1))
    assert placement.directories_of(pond, [SliceId(2)]) == {2: ""}
    pond = placement.kept_in(pond, "one", [SliceId(0), SliceId(1)])
    pond = placement.kept_in(pond, "two", [SliceId(2), SliceId(3)])
    pond = placement.kept_in(pond, "two", [SliceId(1)])
    assert pond.directories == {"one": (0,), "two": (1, 2, 3)}
    pond = placement.kept_in(pond, "three", [SliceId(0)])
    assert "one" not in pond.directories, "nothing rests on it"
    assert placement.directories_of(pond, [SliceId(n) for n in range(4)]) == {
        0: "three",
        1: "two",
        2: "two",
        3: "two",
    }


def test_terms_go_on_by_one() -> None:
    pond = PondRecord(owners=(0,))
    assert placement.next_term(placement.next_term(pond)).term == 2


# What clients are told


def test_who_knows_a_version_is_told_what_has_changed_since() -> None:
    versions, pond = placement.Versions(), PondRecord(owners=(0,) * 8, version=5)
    assert versions.since(pond, None) is None
    assert versions.since(pond, 5) == {}
    after = placement.placed(pond, [0, 0, 0, 1, 0, 0, 0, 0])
    assert versions.since(after, 5) == {3: 1}
    twice = placement.placed(after, [2, 0, 0, 0, 0, 0, 0, 0])
    assert versions.since(twice, 6) == {0: 2, 3: 0}
    assert versions.since(twice, 5) == {0: 2}, "all that lies between counts once"
    assert versions.since(twice, 4) is None, "nobody was told that one here"
    assert versions.since(twice, 9) is None


def test_the_whole_is_told_where_most_has_changed_or_what_was_is_forgotten() -> None:
    versions, pond = placement.Versions(), PondRecord(owners=(0,) * 8, version=1)
    versions.since(pond, None)
    assert versions.since(placement.placed(pond, [1, 1, 1, 0, 0, 0, 0, 0]), 1) is None
    for step in range(placement.VERSIONS_MAX):
        pond = placement.placed(pond, [step + 1] * 8)
        versions.since(pond, None)
    assert versions.since(pond, 1) is None
    assert versions.since(pond, pond.version) == {}
    assert len(versions._told) == placement.VERSIONS_MAX


def test_what_has_changed_and_what_was_known_make_the_whole() -> None:
    infos = [ContainerInfo(number, 100 + number, f"c{number}", ()) for number in range(3)]
    known = Placement("/pond", 5, [0, 0, 1, 1], infos[:2])
    news = Placement("/pond", 7, [], infos, since=5, changed={SliceId(1): 2, SliceId(3): 0})
    whole = news.completed(known)
    assert (whole.version, whole.owners, whole.since, whole.changed) == (7, [0, 2, 1, 0], None, {})
    assert {info.id: info.slices for info in whole.containers} == {0: (0, 3), 1: (2,), 2: (1,)}
    assert [info.address for info in whole.containers] == ["c0", "c1", "c2"]
    assert known.owners == [0, 0, 1, 1]
    for other in (
        msgspec.structs.replace(known, version=4),
        msgspec.structs.replace(known, owners=[0, 0, 1]),
    ):
        with pytest.raises(BadMessage, match="does not go with version"):
            news.completed(other)
