"""The Fetch operator: asks a State about every row, as of the row's own time."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.code.rules import FetchRule
from millpond.errors import BadOption, RowsWaiting
from millpond.ops import frames
from millpond.ops.answering import Answering, answers_of
from millpond.ops.asking import Asking
from millpond.ops.columns import Names, as_table
from millpond.ops.committing import check_history, check_sink
from millpond.stores import readiness
from millpond.times import TimeKind, format_time
from millpond.wire.base import check_name
from millpond.wire.questions import AskProgress, ResidentProgress, held_back_by
from millpond.wire.states import StateSpec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class Fetch:
    """Asks for `at` (the newest value with time <= at) or `between` (values with low < time <= high)."""

    def __init__(
        self,
        client: Client,
        spec: StateSpec,
        *,
        key: Names,
        at: str | None,
        between: tuple[str, str] | None,
        into: Names | None,
        rule: FetchRule,
        isolation: str,
        delay: str | int | timedelta | None,
        name: str | None,
        history: str = "continue",
    ) -> None:
        self.isolation = check_isolation(isolation)
        self._delay = delay
        self._history = check_history(history)
        self._asking = Asking(spec, key, at, between, into, rule)
        self.name = None if name is None else check_name(name, "the fetcher")
        self.state = spec.name
        self._client = client

    @property
    def _committed(self) -> bool:
        return self.isolation == "committed"

    def to(self, function: Callable[[Any, int], Any]) -> Answering:
        """An operator for `foreachBatch`: `function(frame, epoch)` gets the rows that are ready, with their answers.

        The frame is lazy, and may be used more than once. Rows that are not ready wait until U has passed them.
        """
        return self.answering(function)

    def __call__(self, *rows: object) -> NoReturn:
        """Only here to tell what is missing where a fetch itself is given to `foreachBatch`."""
        raise BadOption(
            "a fetch has nowhere to bring its answers",
            hint="give foreachBatch fetch.to(sink), where sink(frame, epoch) gets them, or ask with fetch.now(frame)",
            option="to",
        )

    def answering(self, function: Callable[[Any, int], Any], own_turns: bool = True) -> Answering:
        """As `to`; without turns of its own, where it is a part of something that takes them."""
        check_sink(function)
        if self.name is None:
            raise BadOption(
                "a fetch on a stream needs a name", hint='for example name="views"', option="name"
            )
        if self._delay is not None and self._asking.needs_history:
            raise BadOption(
                f"{self._asking.rule.name}() up to a time reads the whole history, of which a delay lets go",
                hint="ask between two times, or leave delay= out",
                option="delay",
            )
        return Answering(
            self._client,
            self._asking,
            self.name,
            self._delay,
            self._committed,
            function,
            self._history,
            own_turns,
        )

    def now(self, table: pa.Table | DataFrame, waiting: str = "error") -> Any:
        """The table, or the DataFrame, with its answers.

        Rows that U has not passed yet have no right answer so far: they are an error that counts them, or
        are answered by null (`waiting="null"`), or left out (`waiting="drop"`). Registers no fetcher, so that
        F does not move.
        """
        if waiting not in ("error", "null", "drop"):
            raise BadOption(
                f"waiting={waiting!r} is not a choice",
                hint='waiting="error", waiting="null" or waiting="drop"',
                option="waiting",
            )
        if frames.is_frame(table):
            return self._now_frame(table, waiting)
        asking = self._asking
        table = as_table(table)
        asking.check_into(table.column_names)
        progress: ResidentProgress = self._client.call(AskProgress(asking.state))
        asking = asking.seeing(progress)
        questions = asking.questions(table, progress.time_kind)
        questions.check_not_below(progress.fetch, asking.rule, asking.spec)
        ready = questions.ready(progress.update, self._committed)
        missing = table.num_rows - len(ready)
        if missing == 0:
            return asking.with_answers(table, asking.ask(self._client, questions))
        if waiting == "error":
            raise rows_waiting(missing, table.num_rows, progress, questions.kind)
        columns = asking.ask(self._client, questions.take(ready))
        if waiting == "drop":
            return asking.with_answers(table.take(pa.array(ready)), columns)
        return asking.with_answers(table, [_spread(column, ready, table.num_rows) for column in columns])

    def _now_frame(self, frame: DataFrame, waiting: str) -> DataFrame:
        """As `now`, lazily: U is as it was when this was called, whenever the answers are computed."""
        asking = self._asking
        frames.check_questions(frame, asking)
        progress: ResidentProgress = self._client.call(AskProgress(asking.state))
        asking = asking.seeing(progress)
        frames.check_kinds(frame.schema, asking, progress.time_kind)
        high = frames.micros(frame.schema, asking.high)
        low = None if asking.low is None else frames.micros(frame.schema, asking.low)
        said = readiness.ready(low, high, progress.update, self._committed)
        if frame.isStreaming and said is not True:
            raise BadOption(
                "the DataFrame is a stream, and now() answers by the U of this moment",
                hint="on a stream, give foreachBatch fetch.to(sink): its rows wait for U",
                option="now",
            )
        ready = frames.truth(said, null=True)
        answered = answers_of(self._client, asking, frame.filter(ready))
        if waiting == "drop" or said is True:
            return answered
        if waiting == "null":
            return answered.unionByName(frame.filter(~ready), allowMissingColumns=True)
        missing = frame.filter(~ready).count()
        if missing:
            kind = frames.time_kind_of(frame.schema, asking.high)
            raise rows_waiting(missing, frame.count(), progress, kind)
        return answered


def check_isolation(isolation: str) -> str:
    if isolation not in ("committed", "uncommitted"):
        raise BadOption(
            f"isolation={isolation!r} is not a choice",
            hint='isolation="committed" or isolation="uncommitted"',
            option="isolation",
        )
    return isolation


def rows_waiting(missing: int, rows: int, progress: ResidentProgress, kind: TimeKind) -> RowsWaiting:
    names = [holder.updater for holder in progress.held_by]
    done = f"finish({names[0]!r}) says that it is done, idle= that it may be left out" if names else ""
    return RowsWaiting(
        f"{missing:,} of {rows:,} rows ask for a time that U = {format_time(progress.update, kind)}"
        f" has not passed yet: {held_back_by(progress.held_by)}",
        hint=f'wait for its rows; {done}; or pass waiting="null" or "drop"'
        if names
        else 'give the State an updater, by state.update(...), or pass waiting="null" or "drop"',
        rows=missing,
        update_progress=progress.update,
        held_by=names,
    )


def _spread(column: pa.ChunkedArray, ready: npt.NDArray[np.int64], rows: int) -> pa.ChunkedArray:
    """Answers at the positions of their rows, null elsewhere."""
    places = np.full(rows, -1, dtype=np.int64)
    places[ready] = np.arange(len(ready))
    return column.take(pa.array(places, mask=places < 0))
