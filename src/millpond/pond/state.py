"""A State as its users see it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from millpond.client.client import Client
from millpond.code.rules import FetchRule, fetch_rule, latest, neighbours
from millpond.errors import BadOption, wrong_time_kind
from millpond.ops.columns import Names
from millpond.ops.fetch import Fetch
from millpond.ops.step import Step, StepFunction
from millpond.ops.update import Update
from millpond.pond.snapshots import read_versions, snapshot_table, snapshot_time, snapshot_time_kind
from millpond.stores.ruleset import warn_if_interpreted
from millpond.times import TIME_MAX, TIME_MIN, Progress, time_of
from millpond.wire.base import KindOfTime, check_name
from millpond.wire.questions import AskProgress, Report, ResidentProgress
from millpond.wire.states import StateSpec


class State:
    """A named collection `key -> {(time, value)}`, shared by any operators of any queries.

    Made by `pond.state(...)`. Holds nothing itself: two `State` objects of one name are the same State.
    """

    def __init__(self, client: Client, spec: StateSpec) -> None:
        self._client = client
        self._spec = spec
        self.name = spec.name
        self.key = spec.key
        self.value = spec.value

    @property
    def place(self) -> tuple[str, None]:
        """The resident that it is; it is no part of one."""
        return self.name, None

    def __repr__(self) -> str:
        return f"State({self.name!r}, key={self.key!r}, value={self.value!r})"

    def update(
        self,
        *,
        key: Names,
        at: str,
        value: Names,
        delay: str | int | timedelta = "0 seconds",
        late: str = "drop",
        seq: str | None = None,
        history: str = "continue",
        idle: str | timedelta | None = None,
        name: str,
    ) -> Update:
        """An operator `(table, epoch)` that adds rows, exactly once.

        `key`, `at` and `value` name columns. After an epoch the updater's watermark is its newest time less
        `delay` (a duration for timestamps, an integer for logical time); rows below the watermark of the epoch
        before are late: dropped and counted, or with `late="error"` the epoch is refused. Rows of one key and time
        take effect in the order of the column `seq`, without it in the order of the table. `name` is the updater's,
        for ever: the same name continues where it stopped, in the same query. A name that another query began is
        refused, unless `history="new"` (this query begins, the other ends) or `history="shared"` (both go on, each
        with epochs and a watermark of its own).

        With `idle`, a duration, an updater of which no rows came for so long holds U back no longer; when rows come it
        does again, and those below U are late. U never falls. Without it, one that is silent holds U back for ever.
        """
        return Update(
            self._client,
            self._spec,
            key=key,
            at=at,
            value=value,
            delay=delay,
            late=late,
            name=name,
            seq=seq,
            history=history,
            idle=idle,
        )

    def fetch(
        self,
        *,
        key: Names,
        at: str | None = None,
        between: tuple[str, str] | None = None,
        into: Names | None = None,
        rule: FetchRule | Callable[..., Any] | None = None,
        isolation: str = "committed",
        delay: str | int | timedelta | None = None,
        history: str = "continue",
        name: str | None = None,
    ) -> Fetch:
        """An operator that asks the State about every row.

        `at` names the column with the time to ask for: the newest value with time <= at. `between` names two:
        the values with low < time <= high, made into one answer by `rule`: one of Millpond's, or a function of your
        own, `(times, column, ...) -> type`. `into` names the answer's columns.

        On a stream (`.to(function)`), `isolation="uncommitted"` answers as soon as U has passed the beginning of
        the range, from whatever is there by then. `delay` says how far rows may come out of order: with it the
        fetcher's progress follows its rows, F moves, and old values are compacted; rows that come later than that
        are dropped and counted. Without it F stays where it is, and every row is answered, however late. `name` and
        `history` are as for `update`.
        """
        if rule is None:
            chosen = neighbours() if self._spec.update.name == "edges" else latest()
        else:
            chosen = fetch_rule(rule)
            warn_if_interpreted(self._spec.shape.values, chosen)
        return Fetch(
            self._client,
            self._spec,
            key=key,
            at=at,
            between=between,
            into=into,
            rule=chosen,
            isolation=isolation,
            delay=delay,
            name=name,
            history=history,
        )

    def step(
        self,
        function: StepFunction,
        *,
        key: Names,
        value: Names,
        into: Names | None = None,
        isolation: str = "committed",
        staleness: int | None = 1,
        wait: str | timedelta = "10 minutes",
        history: str = "continue",
        name: str,
    ) -> Step:
        """An operator `(rows, epoch)` that reads the State, computes, and writes it, in the tasks that have the rows.

        `function(rows, ask)` gets the rows of a task as an Arrow table. `ask(table)` gives a table with the columns `key`
        back with the answers, in the columns `into`; it may be called any number of times. What the function returns,
        a table with the columns `key` and `value`, updates the State, exactly once.

        Time is counted in epochs: epoch t of a name writes at t. It begins once all steps of the State have written
        t - `staleness`, and reads what was final then; with `isolation="uncommitted"` whatever is there by now, and
        with `staleness=None` besides it waits for nobody. One that has waited for longer than `wait` fails. Several
        tasks of one epoch do not see what the others write. A function that may run again, when a task does, has no
        side effects. `name` and `history` are as for `update`, but no two queries share a name.
        """
        return Step(
            self._client,
            self._spec,
            function,
            key=key,
            into=into,
            value=value,
            isolation=isolation,
            staleness=staleness,
            wait=wait,
            history=history,
            name=name,
        )

    def finish(self, name: str) -> None:
        """The updater `name` will send no more: it holds U back no longer."""
        self._client.call(Report(self.name, check_name(name, "the updater"), math.inf, None))

    def report(
        self,
        name: str,
        *,
        update: Progress | datetime | None = None,
        fetch: Progress | datetime | None = None,
    ) -> None:
        """Explicit progress of the updater or the fetcher `name`. Progress never falls: a lower value is ignored.

        The first report of a fetcher registers it; from then on it holds F back. A fetcher's progress stays below rows
        that wait, and below what its queries may still repeat. An integer is a time as the State counts it, microseconds
        for timestamps.
        """
        check_name(name, "the updater or fetcher")
        update_progress, fetch_progress = _progress(update), _progress(fetch)
        if update_progress is not None or fetch_progress is not None:
            kind = _kind(update) or _kind(fetch)
            self._client.call(Report(self.name, name, update_progress, fetch_progress, kind))

    def progress(self) -> ResidentProgress:
        """U (`update`), F (`fetch`), the progress of each updater and fetcher, and which updaters U waits for (`held_by`)."""
        return self._client.call(AskProgress(self.name))

    def snapshot(self, at: int | datetime | None = None) -> pa.Table:
        """The newest final value of every key, as of `at`, as an Arrow table: key, `time`, value.

        Without `at`, as of the newest time that is final. A time that U has not passed, or below F, is refused.
        """
        progress = self.progress()
        if _kind(at) == "timestamp" and progress.time_kind == "long":
            raise wrong_time_kind(f"state {self.name!r}", "long", "timestamp")
        asked = snapshot_time(_progress(at), progress)
        rows = None if asked is None else read_versions(self._client, self.name, asked)
        return snapshot_table(self._spec, snapshot_time_kind(progress), rows)


def _kind(at: Any) -> KindOfTime:
    """What kind of time it must be; empty for an integer, which may be either."""
    return "timestamp" if isinstance(at, datetime) else ""


def _progress(at: Any) -> Progress | None:
    """What a user gave as a time; numbers of any kind that are whole."""
    if at is None:
        return None
    if isinstance(at, datetime):
        return time_of(at)
    if isinstance(at, float) and math.isinf(at):
        return at
    if isinstance(at, bool) or not hasattr(at, "__index__") or not TIME_MIN <= operator.index(at) <= TIME_MAX:
        raise BadOption(f"{at!r} is not a time", hint="give an integer or a datetime", option="at")
    return operator.index(at)
