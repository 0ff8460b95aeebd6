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
from millpond.errors import BadOption
from millpond.ops.columns import Names
from millpond.ops.fetch import Fetch
from millpond.ops.update import Update
from millpond.pond.snapshots import kind_of, snapshot_table, snapshot_time
from millpond.schema import parse_ddl
from millpond.stores.ruleset import warn_if_interpreted
from millpond.times import TIME_MAX, TIME_MIN, Progress, time_of
from millpond.wire.messages import AskProgress, Register, Report, StateProgress, StateSpec, check_name


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
        name: str,
    ) -> Update:
        """An operator `(table, epoch)` that adds rows, exactly once.

        `key`, `at` and `value` name columns. After an epoch the updater's watermark is its newest time less
        `delay` (a duration for timestamps, an integer for logical time); rows below the watermark of the epoch
        before are late: dropped and counted, or with `late="error"` the epoch is refused. Rows of one key and time
        take effect in the order of the column `seq`, without it in the order of the table. `name` is the updater's,
        for ever: the same name continues where it stopped.
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
        name: str | None = None,
    ) -> Fetch:
        """An operator that asks the State about every row.

        `at` names the column with the time to ask for: the newest value with time <= at. `between` names two:
        the values with low < time <= high, made into one answer by `rule`: one of Millpond's, or a function of your
        own, `(times, column, ...) -> type`. `into` names the answer's columns.

        On a stream (`.to(function)`), `isolation="uncommitted"` answers as soon as U has passed the beginning of
        the range, from whatever is there by then. `delay` says how far rows may come out of order: with it the
        fetcher's progress follows its rows, F moves, and old values are compacted; rows that come later than that
        are dropped and counted. Without it F stays where it is, and every row is answered, however late.
        """
        if rule is None:
            chosen = neighbours() if self._spec.update.name == "edges" else latest()
        else:
            chosen = fetch_rule(rule)
            warn_if_interpreted(parse_ddl(self.value, "value"), chosen)
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

        The first report of a fetcher registers it; from then on it holds F back.
        """
        check_name(name, "the updater or fetcher")
        update_progress, fetch_progress = _progress(update), _progress(fetch)
        # First what may be refused: a report that is refused registers nobody.
        if update_progress is not None:
            self._client.call(Report(self.name, name, update_progress, None))
        if fetch_progress is not None:
            self._client.call(Register(self.name, name, "fetcher"))
            self._client.call(Report(self.name, name, None, fetch_progress))

    def progress(self) -> StateProgress:
        """U (`update`), F (`fetch`), and the progress of each updater and fetcher."""
        answer: StateProgress = self._client.call(AskProgress(self.name))
        return answer

    def snapshot(self, at: int | datetime | None = None) -> pa.Table:
        """The newest final value of every key, as of `at`, as an Arrow table: key, `time`, value.

        Without `at`, as of the newest time that is final. A time that U has not passed, or below F, is refused.
        """
        progress = self.progress()
        asked = snapshot_time(_progress(at), progress)
        rows = None if asked is None else self._client.read(self.name, asked)
        return snapshot_table(self._spec, kind_of(progress), rows)


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
