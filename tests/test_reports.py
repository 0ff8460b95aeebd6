"""Whether a turn's reports cover its frame: never believed of a partition with rows that nobody read to its end."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest

from millpond.errors import Unavailable
from millpond.ops import reports
from millpond.ops.reports import Report, covering, of_every_task
from millpond.stores.waiting import WaitingFile


class Copy(NamedTuple):
    """Where the tasks of a stage run a partition of the frame, one after the other."""

    task: int
    partition: int


def alone(partitions: int, _: random.Random) -> list[Copy]:
    return [Copy(number, number) for number in range(partitions)]


def after_others(partitions: int, chance: random.Random) -> list[Copy]:
    """`other.union(answers)`"""
    others = chance.randrange(1, 4)
    return [Copy(others + number, number) for number in range(partitions)]


def twice(partitions: int, _: random.Random) -> list[Copy]:
    """`answers.union(answers)`"""
    return [Copy(copy * partitions + number, number) for copy in range(2) for number in range(partitions)]


def coalesced(partitions: int, chance: random.Random) -> list[Copy]:
    tasks = chance.randrange(1, partitions + 1)
    return [Copy(copy.task % tasks, copy.partition) for copy in alone(partitions, chance)]


def twice_coalesced(partitions: int, chance: random.Random) -> list[Copy]:
    tasks = chance.choice([n for n in range(1, 2 * partitions + 1) if n != partitions])
    return [Copy(copy.task % tasks, copy.partition) for copy in twice(partitions, chance)]


def crossed(partitions: int, chance: random.Random) -> list[Copy]:
    """`answers.crossJoin(other)`: each partition meets each of the other's."""
    others = chance.randrange(1, 4)
    return [Copy(number * others + n, number) for number in range(partitions) for n in range(others)]


PLANS = [alone, after_others, twice, coalesced, twice_coalesced, crossed]


def reports_of(stage: int, copies: list[Copy], empty: set[int], unread: set[Copy]) -> list[Report]:
    return [
        Report("t", stage, copy.task, None if copy.partition in empty else str(copy.partition))
        for copy in copies
        if copy not in unread
    ]


def test_a_partition_with_rows_is_never_missed_whatever_a_sink_does() -> None:
    believed = 0
    for seed in range(20_000):
        chance = random.Random(seed)
        partitions = chance.randrange(1, 5)
        empty = {number for number in range(partitions) if chance.random() < 0.5}
        reports: list[Report] = []
        tasks: dict[int, int] = {}
        for stage in range(chance.randrange(1, 4)):
            copies = chance.choice(PLANS)(partitions, chance)
            tasks[stage] = 1 + max(copy.task for copy in copies)
            # What stops early does so in rows: a partition without any is read to its end.
            unread = {c for c in copies if c.partition not in empty and chance.random() < 0.4}
            reports += reports_of(stage, copies, empty, unread)
        chance.shuffle(reports)
        covered = covering(reports, partitions, tasks.get)
        if covered is not None:
            believed += 1
            assert sorted(str(report.content) for report in covered) == [
                str(number) for number in range(partitions) if number not in empty
            ], seed
    assert believed > 5_000


@pytest.mark.parametrize("empty", [set(), {0}, {1, 2}, {0, 1, 2}])
def test_a_frame_that_was_read_as_it_is_is_covered(empty: set[int]) -> None:
    copies = alone(3, random.Random(0))
    reports = reports_of(7, copies, empty, set())
    covered = covering([*reports, *reports_of(8, copies, empty, set(copies[1:]))], 3, {7: 3}.get)
    assert covered is not None
    assert len(covered) == 3 - len(empty)


def test_parts_of_a_frame_that_have_rows_may_be_read_by_different_jobs() -> None:
    copies = alone(3, random.Random(0))
    first, rest = reports_of(1, copies[:1], set(), set()), reports_of(2, copies[1:], set(), set())
    tasks = {1: 1, 2: 2}.get
    assert covering([*first, *rest], 3, tasks) is not None
    assert covering(first, 3, tasks) is None
    assert covering([], 1, tasks) is None
    assert covering([], 0, tasks) == []


def test_every_partition_has_to_report_whatever_task_runs_it() -> None:
    new, waited = Report("t", 1, 0, "1 rows 5"), Report("t", 1, 0, "share 0", share=0)
    assert of_every_task([new, waited, new], 2) == [new, waited], "Spark may run both in one task"
    with pytest.raises(Unavailable, match="1 of 2"):
        of_every_task([waited], 2)


def twins(partitions: int, chance: random.Random) -> list[Report]:
    """Every partition with rows was run twice in a stage: two files of the same rows, in any order."""
    reports = [
        Report("t", 1, number, f"{number}", [WaitingFile(f"{number} {attempt}", number + 1)])
        for number in range(partitions)
        for attempt in range(2)
    ]
    chance.shuffle(reports)
    return reports


@pytest.mark.parametrize("seed", range(20))
def test_of_twins_that_both_ended_well_one_counts_whoever_was_first(seed: int) -> None:
    reports = twins(3, random.Random(seed))
    for counted in (covering(reports, 3, {1: 3}.get), of_every_task(reports, 3)):
        assert counted is not None
        assert sorted(report.content or "" for report in counted) == ["0", "1", "2"]
        assert sorted(file.rows for report in counted for file in report.files) == [1, 2, 3]
    # A partition without rows cannot be told from a twin's: the stage is not believed, and a job of our own reads.
    empty = Report("t", 1, 3, None)
    assert covering([*reports, empty], 4, {1: 4}.get) is None
    assert len(of_every_task([empty, *reports, empty], 4)) == 4


def test_what_a_zombie_reports_after_its_turn_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Accumulator:
        def add(self, encoded: list[bytes]) -> None:
            reports._inbox.extend(encoded)

    monkeypatch.setattr(reports, "_accumulators", [Accumulator()])
    context: Any = None
    with reports.collecting(context, "first") as (zombie, heard):
        zombie.send(Report("first", 1, 0, "0"))
        with reports.collecting(context, "other") as (other, of_other):
            zombie.send(Report("first", 1, 0, "0"))
            other.send(Report("other", 2, 0, "0"))
    zombie.send(Report("first", 1, 1, "1"))
    with reports.collecting(context, "again") as (_, of_again):
        zombie.send(Report("first", 1, 1, "1"))
    assert [report.task for report in heard] == [0, 0]
    assert [report.stage for report in of_other] == [2]
    assert of_again == []
    assert reports._inbox.collected == {}
    assert not reports._inbox, "nothing is remembered"
