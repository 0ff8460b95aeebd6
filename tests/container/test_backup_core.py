"""Slices that are held for others, alone: what was decided is applied once and in order, and nothing else ever is."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from millpond.code.rules import keep_all, put
from millpond.container.backup_core import BackupCore
from millpond.container.core import Core
from millpond.container.holdings.base import CheckedRows, HeldSlice, Record
from millpond.errors import BackupLost, StageLost
from millpond.kernels.hashing import slices_of
from millpond.stores.keys import Keys
from millpond.wire.backups import BackUp
from millpond.wire.base import Epoch, SliceId, Term, Turn
from millpond.wire.specs import Resident
from millpond.wire.states import RowsWork, StateSpec

SLICES, TERM, HERE = 4, Term(3), 9
SPEC = StateSpec("s", "key bigint", "value bigint", put(), keep_all())
OWNER = {0: 1, 1: 1, 2: 2, 3: 2}
"""The owner of each slice."""
_HASHED = slices_of(Keys.from_arrow(pa.array(range(64), pa.int64())).hashes, SLICES)
KEYS = {number: [key for key in range(64) if _HASHED[key] == number][:4] for number in range(SLICES)}
EPOCH = [Turn(Epoch(number)) for number in range(10)]
Row = tuple[int, int, int]
"""A key, a time and a value."""


def numbers(slices: Iterable[int]) -> list[SliceId]:
    return [SliceId(number) for number in sorted(slices)]


def record_of(message: BackUp, rows: Collection[Row]) -> Record:
    """The rows of its slices alone, grouped by slice."""
    mine = sorted((int(_HASHED[key]), key, time, value) for key, time, value in rows)
    mine = [row for row in mine if row[0] in message.slices]
    counts = np.bincount([row[0] for row in mine], minlength=SLICES).astype(np.int32)
    columns = [pa.array([row[at] for row in mine], pa.int64()) for at in (1, 2, 3)]
    batch = pa.RecordBatch.from_arrays(columns, schema=SPEC.shape.rows)
    return Record(
        message.resident,
        message.writer,
        message.turn,
        message.ballot,
        message.digest,
        RowsWork(),
        [CheckedRows(batch, counts)],
    )


def back_up(
    owner: int,
    ballot: int,
    turn: int = 0,
    slices: Iterable[int] | None = None,
    decided: dict[str, Turn] | None = None,
    writer: str = "a",
    term: Term = TERM,
    progress: tuple[float, float] = (-math.inf, -math.inf),
) -> BackUp:
    if slices is None:
        slices = [number for number, known in OWNER.items() if known == owner]
    return BackUp(
        "s",
        owner,
        term,
        writer,
        Turn(Epoch(turn)),
        ballot,
        0,
        numbers(slices),
        decided or {},
        *progress,
        RowsWork(),
    )


class Kept(NamedTuple):
    seq: int
    message: BackUp
    record: Record


class Shell:
    """What `Backups` does around the core, without files: `log` is all that was ever made durable."""

    def __init__(self, born: int = 1) -> None:
        self.core = BackupCore(HERE, TERM, SLICES)
        self.core.add(Resident(SPEC, born, -math.inf, -math.inf))
        self.log: list[Kept] = []

    def keep(self, message: BackUp, rows: Collection[Row] = ()) -> bool:
        if not self.core.accept(message):
            return False
        record = record_of(message, rows)
        seq = self.core.number("s")
        assert seq in self.core.unfinished(), "no checkpoint covers it while it is written"
        self.core.seq = seq
        self.log.append(Kept(seq, message, record))
        self.core.keep(seq, message, record)
        return True

    def step(self) -> bool:
        """Applies one record, as far as it can be; False where there is none."""
        following = self.core.next_decided("s")
        if following is None:
            return False
        kept, slices = following
        self.core.holding("s").replay(kept.record, slices)
        self.core.applied(kept, slices)
        return True

    def catch_up(self) -> None:
        while self.step():
            pass

    def rows(self, number: int) -> set[Row]:
        return rows_of(self.core.holding("s").slices[SliceId(number)])


def rows_of(held: HeldSlice[Any]) -> set[Row]:
    batch = held.store.export()
    return set(zip(*(column.to_pylist() for column in batch.columns[:3]), strict=True))


def whole(shell: Shell, *slices: int) -> None:
    """These are held from the beginning: there was nothing to copy."""
    shell.core.enlist(numbers(slices))
    for number in numbers(slices):
        shell.core.copied(0, shell.core.holding("s").resident.id, number, shell.core.holding("s").new_slice())


def at(number: int, time: int, value: int) -> Row:
    return KEYS[number][0], time, value


# Records


def test_a_record_is_applied_once_a_later_one_says_that_it_was_decided() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    assert shell.keep(back_up(1, ballot=1), [at(0, 5, 50)])
    shell.catch_up()
    assert shell.rows(0) == set()
    assert shell.core.unfinished() == [1]
    assert shell.core.lag(numbers([0])) == (0, 0), "nobody knows yet that it was decided"
    shell.keep(back_up(1, ballot=2, turn=1, decided={"a": EPOCH[0]}), [at(0, 6, 60)])
    records, nbytes = shell.core.lag(numbers([0]))
    assert records == 1
    assert nbytes > 0
    shell.catch_up()
    assert shell.rows(0) == {at(0, 5, 50)}
    assert shell.core.unfinished() == [2]
    assert shell.core.lag(numbers([0])) == (0, 0)
    shell.core.validate()


def test_what_was_not_decided_when_the_next_came_never_is() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    shell.keep(back_up(1, ballot=1), [at(0, 5, 50)])
    shell.keep(back_up(1, ballot=2), [at(0, 5, 51)])
    assert shell.core.void == {1}
    shell.keep(back_up(1, ballot=3, turn=1, decided={"a": EPOCH[0]}))
    shell.catch_up()
    assert shell.rows(0) == {at(0, 5, 51)}, "the same epoch, as it was decided"
    assert shell.core.void == {1}


def test_records_of_several_owners_under_one_ballot_all_count() -> None:
    shell = Shell()
    whole(shell, 0, 1, 2, 3)
    assert shell.keep(back_up(1, ballot=1), [at(0, 5, 50)])
    assert shell.keep(back_up(2, ballot=1), [at(2, 5, 52), at(3, 5, 53)])
    assert not shell.keep(back_up(1, ballot=1), [at(0, 5, 50)]), "a double"
    assert shell.core.missing(numbers(range(4)), {"s": {"a": EPOCH[0]}})
    shell.core.settle("s", {"a": EPOCH[0]})
    shell.catch_up()
    assert [shell.rows(n) for n in range(4)] == [{at(0, 5, 50)}, set(), {at(2, 5, 52)}, {at(3, 5, 53)}]
    assert shell.core.missing(numbers(range(4)), {"s": {"a": EPOCH[0]}}) == ""
    assert shell.core.unfinished() == []


def test_what_comes_late_or_is_meant_for_another_is_refused_and_changes_nothing() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    shell.keep(back_up(1, ballot=5), [at(0, 5, 50)])
    refused = [
        (StageLost, back_up(1, ballot=4, decided={"a": EPOCH[9]})),
        (BackupLost, back_up(1, ballot=6, term=Term(TERM - 1))),
        (BackupLost, back_up(2, ballot=6)),
        (BackupLost, back_up(1, ballot=6, slices=[0, 2])),
    ]
    for kind, message in refused:
        with pytest.raises(kind) as raised:
            shell.keep(message)
        if isinstance(raised.value, BackupLost):
            assert raised.value.attributes() == {"container": HERE, "term": TERM}
    assert shell.core.void == set()
    assert shell.core.unfinished() == [1]
    assert shell.keep(back_up(1, ballot=5 + 1, turn=1, decided={"a": EPOCH[0]}))
    shell.catch_up()
    assert shell.rows(0) == {at(0, 5, 50)}


def test_a_record_whose_write_took_longer_than_its_ballot_counts_for_nothing() -> None:
    """Its owner has not heard of it, and its epoch came again, with other rows."""
    shell = Shell()
    whole(shell, 0, 1)
    slow = back_up(1, ballot=1)
    assert shell.core.accept(slow)
    first = shell.core.number("s")
    shell.core.seq = first
    shell.keep(back_up(1, ballot=2), [at(0, 5, 52)])
    shell.core.keep(first, slow, record_of(slow, [at(0, 5, 51)]))
    shell.core.settle("s", {"a": EPOCH[0]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 5, 52)}
    assert first in shell.core.void


def test_a_write_that_failed_leaves_its_number_to_the_next() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    message = back_up(1, ballot=1)
    assert shell.core.accept(message)
    assert shell.core.number("s") == 1
    shell.core.not_written(1)
    assert shell.core.unfinished() == []
    assert shell.keep(message, [at(0, 5, 50)]), "it comes again"
    assert shell.log[0].seq == 1


def test_progress_holds_once_all_that_came_before_it_is_applied() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    holding = shell.core.holding("s")
    shell.keep(back_up(1, ballot=1, progress=(1, 2)), [at(0, 5, 50)])
    shell.catch_up()
    assert holding.progress == (1, 2)
    shell.keep(back_up(1, ballot=2, turn=1, decided={"a": EPOCH[0]}, progress=(3, 4)))
    assert holding.progress == (1, 2), "an update that is below it may still wait"
    shell.catch_up()
    assert holding.progress == (3, 4)


# Residents


@pytest.mark.parametrize("upkeep", [False, True], ids=["at once", "after upkeep"])
def test_a_resident_of_the_same_name_gets_nothing_of_the_one_before(upkeep: bool) -> None:
    """Neither its records, though they were decided, nor its progress."""
    shell = Shell(born=1)
    whole(shell, 0, 1)
    shell.keep(back_up(1, ballot=1), [at(0, 5, 50)])
    shell.keep(back_up(1, ballot=2, turn=1, decided={"a": EPOCH[0]}, progress=(90, 90)), [at(0, 6, 60)])
    shell.core.drop("s", 1)
    if upkeep:
        shell.catch_up()
    shell.core.add(Resident(SPEC, 2, -math.inf, -math.inf))
    shell.catch_up()
    assert shell.rows(0) == set()
    assert shell.core.holding("s").progress == (-math.inf, -math.inf)
    shell.keep(back_up(1, ballot=3), [at(0, 1, 10)])
    shell.core.settle("s", {"a": EPOCH[0]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 1, 10)}
    assert shell.core.missing(numbers([0, 1]), {"s": {"a": EPOCH[0]}}) == ""
    assert shell.core.unfinished() == []
    assert shell.core.void >= {1, 2}


def test_a_later_resident_is_not_dropped_by_a_late_message() -> None:
    shell = Shell(born=2)
    whole(shell, 0, 1)
    shell.keep(back_up(1, ballot=1), [at(0, 5, 50)])
    shell.core.settle("s", {"a": EPOCH[0]})
    assert shell.core.drop("s", 1) is None
    shell.catch_up()
    assert shell.rows(0) == {at(0, 5, 50)}


# Slices


def copy_of(shell: Shell, rows: Collection[Row], vector: dict[str, Turn]) -> HeldSlice[Any]:
    held = shell.core.holding("s").new_slice()
    if rows:
        columns = [pa.array(column, pa.int64()) for column in zip(*sorted(rows), strict=True)]
        held.store.load(pa.RecordBatch.from_arrays(columns, schema=SPEC.shape.rows))
    held.vector = dict(vector)
    return held


def test_records_wait_for_the_copy_and_what_it_has_is_not_applied_again() -> None:
    shell = Shell()
    core, resident_id = shell.core, shell.core.holding("s").resident.id
    core.enlist(numbers([0, 1]))
    shell.keep(back_up(1, ballot=5, turn=2), [at(0, 5, 52), at(1, 5, 52)])
    shell.keep(back_up(1, ballot=6, turn=3, decided={"a": EPOCH[2]}), [at(0, 6, 63)])
    shell.catch_up()
    assert shell.rows(0) == shell.rows(1) == set()
    assert "slice 0 of 's' was not copied" in core.missing(numbers([0]), {"s": {"a": EPOCH[2]}})
    # Of one slice the copy has seen turn 2, of the other it was taken before.
    core.copied(0, resident_id, SliceId(0), copy_of(shell, [at(0, 1, 1), at(0, 5, 99)], {"a": EPOCH[2]}))
    shell.catch_up()
    assert shell.rows(0) == {at(0, 1, 1), at(0, 5, 99)}
    assert shell.rows(1) == set()
    assert 1 in core.unfinished(), "slice 1 rests on it"
    core.copied(0, resident_id, SliceId(1), copy_of(shell, [], {"a": EPOCH[1]}))
    shell.catch_up()
    assert shell.rows(1) == {at(1, 5, 52)}
    assert core.unfinished() == [2]
    assert core.missing(numbers([0, 1]), {"s": {"a": EPOCH[2]}}) == ""
    core.validate()


def test_what_lies_behind_a_record_that_cannot_be_applied_waits_for_its_slices_alone() -> None:
    shell = Shell()
    whole(shell, 0, 2)
    shell.core.enlist(numbers([1]))
    shell.keep(back_up(1, ballot=1), [at(0, 1, 10), at(1, 1, 10)])
    shell.keep(back_up(2, ballot=1, slices=[2]))
    shell.keep(back_up(2, ballot=2, turn=1, slices=[2], decided={"a": EPOCH[0]}), [at(2, 2, 20)])
    shell.keep(back_up(1, ballot=2, turn=1, decided={"a": EPOCH[0]}))
    shell.keep(back_up(1, ballot=3, turn=2, decided={"a": EPOCH[1]}), [at(0, 3, 30), at(1, 3, 30)])
    shell.core.settle("s", {"a": EPOCH[2]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 1, 10), at(0, 3, 30)}
    assert shell.rows(2) == {at(2, 2, 20)}
    assert shell.rows(1) == set()
    shell.core.copied(0, shell.core.holding("s").resident.id, SliceId(1), copy_of(shell, [], {}))
    shell.catch_up()
    assert shell.rows(1) == {at(1, 1, 10), at(1, 3, 30)}


def test_a_slice_that_is_copied_again_waits_again() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    resident_id = shell.core.holding("s").resident.id
    shell.keep(back_up(1, ballot=1), [at(0, 1, 10)])
    shell.core.await_copies(7, [resident_id], numbers([0, 3]))
    shell.core.settle("s", {"a": EPOCH[0]})
    shell.catch_up()
    assert shell.rows(0) == set()
    assert shell.core.missing(numbers([1]), {"s": {"a": EPOCH[0]}}) == ""
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[0]}})
    with pytest.raises(BackupLost):
        shell.core.copied(7, resident_id, SliceId(3), copy_of(shell, [at(3, 0, 0)], {}))
    assert SliceId(3) not in shell.core.holding("s").slices, "it is not held here"
    shell.core.copied(7, resident_id, SliceId(0), copy_of(shell, [], {}))
    shell.catch_up()
    assert shell.rows(0) == {at(0, 1, 10)}


def test_a_resident_that_is_opened_while_slices_are_enlisted_needs_no_copy() -> None:
    """Containers hear of it before the journal has it: whoever asks for copies by the journal asks for none of it."""
    shell = Shell()
    shell.core.enlist(numbers([0, 1]))
    shell.core.await_copies(7, [], numbers([0]))
    shell.keep(back_up(1, ballot=1), [at(0, 5, 50), at(1, 5, 51)])
    shell.core.settle("s", {"a": EPOCH[0]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 5, 50)}
    assert shell.core.lag(numbers([0])) == (0, 0)
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[0]}}) == ""
    # Of the other slice nobody has asked yet.
    assert shell.rows(1) == set()
    assert shell.core.missing(numbers([1]), {"s": {"a": EPOCH[0]}}) == "slice 1 of 's' was not copied"
    # Nor is one that lacks something whole without a copy.
    shell.core.lost(shell.core.holding("s"), numbers([0]))
    shell.core.await_copies(8, [], numbers([0]))
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[0]}}) == "slice 0 of 's' was not copied"
    shell.core.validate()


def test_slices_that_are_released_leave_nothing_behind() -> None:
    shell = Shell()
    whole(shell, 0, 1)
    shell.keep(back_up(1, ballot=1), [at(0, 1, 10), at(1, 1, 10)])
    released = shell.core.release(numbers([0, 3]))
    assert list(released) == [0]
    assert shell.core.owned == {1}
    assert shell.core.unfinished() == [1], "slice 1 needs the record"
    shell.core.release(numbers([1]))
    assert shell.core.unfinished() == []
    # It comes back as a copy that has not seen the record: the record is not for it.
    whole(shell, 0, 1)
    shell.core.settle("s", {"a": EPOCH[0]})
    shell.catch_up()
    assert shell.rows(0) == set()
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[0]}}) == "slice 0 of 's' has not epoch 0 of a"


def test_word_of_a_resident_that_was_forgotten_keeps_no_slice_from_being_served() -> None:
    """It came late; nobody knows it, so that no copy of it comes."""
    shell = Shell()
    shell.core.drop("s", 1)
    shell.core.add(Resident(SPEC, 1, -math.inf, -math.inf))
    shell.core.enlist(numbers([0]))
    assert shell.core.missing(numbers([0]), {"s": {}}) == "slice 0 of 's' was not copied"
    assert shell.core.missing(numbers([0]), {"other": {"a": EPOCH[0]}}) == ""


def test_slices_that_come_whole_need_no_copy() -> None:
    shell = Shell()
    shell.core.enlist(numbers([0]))
    shell.core.take_in({SliceId(0): {"s": copy_of(shell, [at(0, 1, 1)], {"a": EPOCH[4]})}})
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[4]}}) == ""
    shell.keep(back_up(1, ballot=9, turn=5, slices=[0]), [at(0, 2, 2)])
    shell.core.settle("s", {"a": EPOCH[5]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 1, 1), at(0, 2, 2)}


def test_a_slice_that_lacks_a_record_is_of_no_use_until_it_is_copied_again() -> None:
    """Whatever kept it from the record: what follows tells that there was one."""
    shell = Shell()
    whole(shell, 0, 1)
    resident_id = shell.core.holding("s").resident.id
    shell.keep(back_up(1, ballot=1), [at(0, 1, 10)])
    shell.keep(back_up(1, ballot=3, turn=2, slices=[0], decided={"a": EPOCH[1]}), [at(0, 3, 30)])
    shell.core.settle("s", {"a": EPOCH[2]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 1, 10)}
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[2]}}) == "slice 0 of 's' was not copied"
    with pytest.raises(BackupLost):
        shell.keep(back_up(1, ballot=4, turn=3, slices=[0], decided={"a": EPOCH[2]}))
    shell.core.enlist(numbers([0]))
    assert shell.keep(back_up(1, ballot=5, turn=3, slices=[0], decided={"a": EPOCH[2]}), [at(0, 4, 40)])
    shell.core.await_copies(9, [resident_id], numbers([0]))
    shell.core.copied(9, resident_id, SliceId(0), copy_of(shell, [at(0, 2, 20)], {"a": EPOCH[2]}))
    shell.core.settle("s", {"a": EPOCH[3]})
    shell.catch_up()
    assert shell.rows(0) == {at(0, 2, 20), at(0, 4, 40)}
    assert shell.core.missing(numbers([0]), {"s": {"a": EPOCH[3]}}) == ""


def test_of_two_copies_of_a_slice_the_one_that_was_asked_for_last_counts() -> None:
    """The other was read before records that are applied by now, or that were not taken."""
    shell = Shell()
    whole(shell, 0)
    resident_id = shell.core.holding("s").resident.id
    shell.core.await_copies(7, [resident_id], numbers([0]))
    shell.core.await_copies(8, [resident_id], numbers([0]))
    with pytest.raises(BackupLost):
        shell.core.copied(7, resident_id, SliceId(0), copy_of(shell, [at(0, 1, 1)], {}))
    shell.core.copied(8, resident_id, SliceId(0), copy_of(shell, [at(0, 2, 2)], {"a": EPOCH[0]}))
    with pytest.raises(BackupLost):
        shell.core.copied(8, resident_id, SliceId(0), copy_of(shell, [at(0, 3, 3)], {}))
    shell.core.enlist(numbers([0]))
    with pytest.raises(BackupLost):
        shell.core.copied(8, resident_id, SliceId(0), copy_of(shell, [at(0, 3, 3)], {}))
    assert shell.rows(0) == {at(0, 2, 2)}


# Random sequences, beside a dict


class Scene:
    """Owners whose epochs go on, a coordinator that decides them, and what each slice must hold: `truth`."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.shell = Shell()
        self.owners = Core(0, Term(1), SLICES)
        self.owners.add(Resident(SPEC, 1, -math.inf, -math.inf))
        self.owners.install({number: {} for number in numbers(range(SLICES))})
        self.truth: dict[int, dict[tuple[int, int], int]] = {n: {} for n in range(SLICES)}
        self.decided: dict[str, Turn] = {}
        self.ballots: set[int] = set()
        """Those that were decided."""
        self.ballot = 0
        self.sent: list[tuple[BackUp, list[Row]]] = []
        self.uncopied: set[int] = set()
        self.done: dict[str, int] = {}

    @property
    def held(self) -> set[int]:
        return set(self.shell.core.owned)

    def epoch(self, fails: bool = False) -> None:
        """Every owner sends its part, in any order, perhaps twice; one that fails may reach only some."""
        self.ballot += 1
        writer = self.chance.choice("ab")
        turn = self.decided[writer].epoch + 1 if writer in self.decided else 0
        rows = [
            (self.chance.choice(KEYS[number]), self.chance.randrange(5), self.ballot)
            for number in range(SLICES)
            for _ in range(self.chance.choice([0, 0, 1, 3]))
        ]
        rows = list({row[:2]: row for row in rows}.values())
        messages = [
            back_up(owner, self.ballot, turn, mine, dict(self.decided), writer)
            for owner in (1, 2)
            if (mine := [n for n in self.held if OWNER[n] == owner])
        ]
        self.chance.shuffle(messages)
        for message in messages[: self.chance.randint(0, len(messages))] if fails else messages:
            self.sent.append((message, rows))
            assert self.shell.keep(message, rows)
            if self.chance.random() < 0.2:
                assert not self.shell.keep(message, rows)
        if fails:
            return
        # A copy that is taken now may have it or not; what decides is the journal.
        self.ballots.add(self.ballot)
        self.decided[writer] = Turn(Epoch(turn))
        everything = back_up(0, self.ballot, turn, range(SLICES), writer=writer)
        self.owners.holding("s").replay(record_of(everything, rows), self.owners.holding("s").slices)
        for key, time, value in rows:
            self.truth[int(_HASHED[key])][key, time] = value

    def late(self) -> None:
        """A message of before comes once more."""
        if self.sent:
            message, rows = self.chance.choice(self.sent)
            with suppress(StageLost, BackupLost):
                self.shell.keep(message, rows)

    def enlist(self) -> None:
        number = self.chance.randrange(SLICES)
        if number not in self.held:
            self.shell.core.enlist(numbers([number]))
            self.uncopied.add(number)

    def copy(self) -> None:
        if self.uncopied:
            number = SliceId(self.chance.choice(sorted(self.uncopied)))
            theirs = self.owners.holding("s").slices[number]
            held = self.shell.core.holding("s").new_slice()
            batch = theirs.store.copy().export()
            if len(batch):
                held.store.load(batch)
            held.vector = dict(theirs.vector)
            self.shell.core.copied(0, self.shell.core.holding("s").resident.id, number, held)
            self.uncopied.discard(number)

    def release(self) -> None:
        if self.held:
            number = self.chance.choice(sorted(self.held))
            self.shell.core.release(numbers([number]))
            self.uncopied.discard(number)

    def upkeep(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            self.shell.step()

    def promote(self) -> None:
        """What is held is as it must be, or says what it lacks; then it goes on as a backup."""
        whole = numbers(self.held - self.uncopied)
        self.shell.core.settle("s", self.decided)
        self.shell.catch_up()
        assert self.shell.core.missing(whole, {"s": self.decided}) == ""
        if self.uncopied:
            assert "was not copied" in self.shell.core.missing(numbers(self.held), {"s": self.decided})
        for number in whole:
            assert self.shell.rows(number) == {(k, t, v) for (k, t), v in self.truth[number].items()}
        assert self.shell.core.lag(whole) == (0, 0)
        released = self.shell.core.release(whole)
        self.shell.core.take_in(released)

    def check_checkpoint(self) -> None:
        """What a checkpoint writes now, and the records that it leaves, make up all that was decided."""
        covered = self.shell.core.plan_checkpoint().covered
        for number in self.held - self.uncopied:
            held = self.shell.core.holding("s").slices[SliceId(number)]
            again = self.shell.core.holding("s").new_slice()
            batch = held.store.copy().export()
            if len(batch):
                again.store.load(batch)
            again.vector = dict(held.vector)
            for seq, message, record in sorted(self.shell.log, key=lambda kept: kept.message.ballot):
                if seq > covered and message.ballot in self.ballots and number in message.slices:
                    self.shell.core.holding("s").replay(record, {SliceId(number): again})
            assert again.vector == self.decided or not self.decided
            assert rows_of(again) == {(k, t, v) for (k, t), v in self.truth[number].items()}

    def run(self, steps: int) -> None:
        deeds = {
            "epoch": 8,
            "failed": 3,
            "late": 3,
            "enlist": 2,
            "copy": 2,
            "release": 2,
            "upkeep": 4,
            "promote": 2,
        }
        for _ in range(steps):
            (deed,) = self.chance.choices(list(deeds), list(deeds.values()))
            self.done[deed] = self.done.get(deed, 0) + 1
            if deed == "failed":
                self.epoch(fails=True)
            else:
                getattr(self, deed)()
            self.check_checkpoint()
        self.promote()
        self.shell.core.validate()


@pytest.mark.parametrize("seed", range(24))
def test_whatever_comes_in_whatever_order_it_is_as_a_dict_has_it(seed: int) -> None:
    scene = Scene(seed)
    scene.run(80)
    assert len(scene.done) == 8, "every kind of thing happened"
    assert scene.ballots
