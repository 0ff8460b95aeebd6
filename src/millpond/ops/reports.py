"""What tasks tell the driver beside their rows: reports that come with a task's success, and with nothing else.

They travel in an accumulator of Spark's: a task that fails, is cancelled or is beaten by its twin tells nothing. What
comes may come more than once: a sink may run its frame as often as it likes, and behind a shuffle both twins may end well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from millpond.errors import Unavailable
from millpond.stores.waiting import WaitingFile
from millpond.wire.questions import Waits

if TYPE_CHECKING:
    from pyspark import SparkContext


class Report(msgspec.Struct, frozen=True):
    """A task has answered all rows of one partition of a frame, but for those that wait, and wrote these down.

    `content` tells partitions with rows from one another, whoever runs them; None where there were no rows. `stage` and
    `task` are those of the job that ran it: what a sink makes of a frame may have other partitions. `newest` and `late`
    are of rows that are new. `share` is the number of a share of rows that waited; None for a partition of new ones.
    """

    token: str
    stage: int
    task: int
    content: str | None
    files: list[WaitingFile] = []
    lowest: int | None = None
    digest: int = 0
    newest: int | None = None
    late: int = 0
    waits: Waits = Waits()
    share: int | None = None


def covering(
    reports: Iterable[Report], partitions: int, tasks_of: Callable[[int], int | None]
) -> list[Report] | None:
    """One report for each partition of the frame that has rows; None where a partition may not have been read to its end.

    All were read if as many different ones have reported. A partition without rows cannot be told from another: that it
    was read is believed where the tasks of a stage are the frame's partitions, as many as `tasks_of` that stage, of which
    each has reported once.
    """
    by_content: dict[str, Report] = {}
    by_stage: dict[int, list[Report]] = {}
    for report in reports:
        by_stage.setdefault(report.stage, []).append(report)
        if report.content is not None:
            by_content.setdefault(report.content, report)
    if len(by_content) == partitions:
        return list(by_content.values())
    for number, stage in by_stage.items():
        contents = [report.content for report in stage if report.content is not None]
        if (
            len({report.task for report in stage}) == len(stage) == partitions == tasks_of(number)
            and len(set(contents)) == len(contents)  # else it may have read one partition for two
        ):
            return [report for report in stage if report.content is not None]
    return None


def of_every_task(reports: Iterable[Report], partitions: int) -> list[Report]:
    """One report for each partition of the frame, of a job that has read all of them, even if a stage of it ran again.

    Spark may run a partition of new rows and a share of those that waited in one task. An accumulator that it could not
    update it mentions in its log alone: what waits in a partition that nobody heard of would be lost.
    """
    every = {(report.task, None) if report.share is None else (0, report.share): report for report in reports}
    if len(every) != partitions:
        raise Unavailable(
            f"{len(every)} of {partitions} tasks told the driver what waits; nothing was changed",
            hint="Spark's log says why it could not update an accumulator; the batch may be run again, with a new driver"
            " if it was another accumulator that failed",
            address="driver",
        )
    return list(every.values())


def tasks_of_stage(context: SparkContext, stage: int) -> int | None:
    """How many tasks a stage has; None if Spark does not know any more."""
    info = context.statusTracker().getStageInfo(stage)
    return None if info is None else info.numTasks


class _Reported:
    """The accumulator's parameter: lists that are joined."""

    def zero(self, _: Any) -> list[bytes]:
        return []

    def addInPlace(self, total: list[bytes], more: list[bytes]) -> list[bytes]:  # noqa: N802 - Spark's name
        total.extend(more)
        return total


class _Inbox(list[bytes]):
    """The driver's side: what comes goes to whoever collects under its token; nothing else is remembered."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: dict[str, list[Report]] = {}

    def extend(self, encoded: Iterable[bytes]) -> None:
        for one in encoded:
            report = msgspec.msgpack.decode(one, type=Report)
            reports = self.collected.get(report.token)
            if reports is not None:
                reports.append(report)


class Reporting:
    """How the tasks of a turn report. Plain data that tasks can carry."""

    def __init__(self, accumulator: Any, token: str) -> None:
        self._accumulator = accumulator
        self.token = token

    def send(self, report: Report) -> None:
        """It reaches the driver once the task has ended well."""
        self._accumulator.add([msgspec.msgpack.encode(report)])


_inbox = _Inbox()
_accumulators: list[Any] = []  # one at most: Spark never lets go of an accumulator


@contextmanager
def collecting(context: SparkContext, token: str) -> Iterator[tuple[Reporting, list[Report]]]:
    """How tasks report under a token, and a list that grows as they do."""
    if not _accumulators:
        _accumulators.append(context.accumulator(_inbox, _Reported()))  # type: ignore[arg-type]
    reports = _inbox.collected.setdefault(token, [])
    try:
        yield Reporting(_accumulators[0], token), reports
    finally:
        _inbox.collected.pop(token, None)
