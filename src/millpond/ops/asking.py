"""How a fetch reads its rows and asks about them. Plain data that tasks can carry, as `Intake` is for updates."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.code.rules import FetchRule
from millpond.errors import BadDuration, BadOption
from millpond.ops.columns import Names, as_names, check_column_name, keys_of, times_of
from millpond.ops.walking import Walker
from millpond.stores.keys import Keys
from millpond.stores.readiness import check_not_below, lowest_asked, positions, ready, served_below
from millpond.stores.rows import digest_rows
from millpond.stores.versioned import result_schema
from millpond.times import Progress, TimeKind
from millpond.wire.questions import Pinned, ResidentProgress
from millpond.wire.states import Question, StateSpec

DIGESTS = 1 << 63
"""Digests of questions are below this, so that a column of longs can hold one."""


class Questions(NamedTuple):
    """Rows in the pond's terms: values with lows < time <= highs, or just up to highs."""

    keys: Keys
    lows: npt.NDArray[np.int64] | None
    highs: npt.NDArray[np.int64]
    kind: TimeKind
    targets: Keys | None = None
    """Where paths lead to."""

    def take(self, rows: npt.NDArray[np.int64]) -> Questions:
        lows = None if self.lows is None else self.lows[rows]
        targets = None if self.targets is None else self.targets.take(rows)
        return Questions(self.keys.take(rows), lows, self.highs[rows], self.kind, targets)

    @property
    def lowest(self) -> int:
        """The lowest time among what the questions begin with. There are some."""
        return int((self.highs if self.lows is None else self.lows).min())

    @property
    def digest(self) -> int:
        """Of keys and times, in any order."""
        others = [] if self.lows is None else [pa.array(self.lows)]
        if self.targets is not None:
            others.append(self.targets.to_arrow())
        return digest_rows(self.keys, self.highs, others) % DIGESTS

    def check_not_below(self, fetch_progress: Progress, rule: FetchRule, spec: StateSpec) -> None:
        check_not_below(lowest_asked(self.lows, self.highs, rule, spec), fetch_progress, self.kind)

    def ready(self, update_progress: Progress, committed: bool = True) -> npt.NDArray[np.int64]:
        """Positions of the rows that can be answered."""
        return positions(ready(self.lows, self.highs, update_progress, committed), len(self.highs))


class Asking:
    """How one fetch reads its rows, and what it makes of the answers."""

    def __init__(
        self,
        spec: StateSpec,
        key: Names,
        at: str | None,
        between: tuple[str, str] | None,
        into: Names | None,
        rule: FetchRule,
    ) -> None:
        if (at is None) == (between is None):
            raise BadOption(
                "a fetch takes either at= or between=",
                hint='for example at="ts", or between=("from", "until")',
                option="at",
            )
        if between is not None and not _is_pair(between):
            raise BadOption(
                f"between={between!r} is not a pair of columns",
                hint='for example between=("from", "until")',
                option="between",
            )
        self.spec = spec
        self.state = spec.name
        self.rule = rule
        self.shape = spec.shape
        self._walker = None if rule.walk is None else Walker(spec, rule.walk)
        self._keys = self.shape.keys if self._walker is None else self._walker.vertex
        self.key = as_names(key, self._keys, "key")
        self.answers = (
            result_schema(self.shape.values, rule) if self._walker is None else self._walker.answers
        )
        self.into = as_names(list(self.answers.names) if into is None else into, self.answers, "into")
        if len(set(self.into)) < len(self.into):
            raise BadOption(
                f"into={into!r} names a column twice",
                hint="give each answer a name of its own",
                option="into",
            )
        self.seen = 0, 0
        """Which State it is, by when it was born, and how many of its epochs whoever answers must have; U is theirs."""
        self.low: str | None = None if between is None else between[0]
        self.high = check_column_name(at, "at") if between is None else between[1]

    def seeing(self, told: ResidentProgress | Pinned) -> Asking:
        """The same, answered only by who has the State's epochs that U rests on: not by one that missed the last of them."""
        other = copy(self)
        other.seen = told.born, told.seen
        return other

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, each once."""
        lows = () if self.low is None else (self.low,)
        ends = () if self.rule.walk is None else (self.rule.walk.to,)
        return list(dict.fromkeys((*self.key, self.high, *lows, *ends)))

    @property
    def first(self) -> str:
        """The column that tells where a question begins."""
        return self.high if self.low is None else self.low

    def first_time(self, time: int) -> int:
        """The lowest time that a question asks for; `time` is what it has in the column `first`."""
        return time if self.low is None else time + 1

    @property
    def needs_history(self) -> bool:
        """Whether an answer depends on values that compaction, once F has moved, may have let go."""
        return self.low is None and not served_below(self.rule, self.spec)

    def check_into(self, columns: list[str]) -> None:
        for name in self.into:
            if name in columns:
                raise BadOption(
                    f"the table has a column {name!r} already",
                    hint="choose another name for into=",
                    option="into",
                )

    def questions(self, table: pa.Table, time_kind: str) -> Questions:
        highs, kind = times_of(table, self.high, time_kind)
        lows = None if self.low is None else times_of(table, self.low, kind)[0]
        keys = keys_of(table, self.key, self._keys)
        walk = self.rule.walk
        if walk is None:
            return Questions(keys, lows, highs, kind)
        targets = keys_of(table, [walk.to], self._keys)
        if walk.span_kind and walk.span_kind != kind:
            raise BadDuration(
                f"the times are {'timestamps' if kind == 'timestamp' else 'logical'}, the spans of hops are not",
                hint='give durations for timestamps, as in hops={2: "48 hours"}, and integers for logical time',
            )
        return Questions(keys, lows, highs, kind, targets)

    def ask(self, client: Client, questions: Questions) -> list[pa.ChunkedArray]:
        """One column for each name of `into`."""
        if self._walker is not None:
            assert questions.targets is not None
            return [
                self._walker.paths(
                    client,
                    questions.keys,
                    questions.targets,
                    questions.lows,
                    questions.highs,
                    questions.kind,
                    self.seen,
                )
            ]
        assert self.rule.name != "paths"
        born, seen = self.seen
        message = Question(
            self.state, self.rule.name, self.rule.code, self.rule.returns, born=born, seen=seen
        )
        asked, longs = self.shape.questions, [questions.highs]
        if questions.lows is not None:
            asked, longs = self.shape.ranged_questions, [questions.highs, questions.lows]
        code = message.code.name if message.code else ""
        return client.ask(message, asked, questions.keys, longs, self.answers, code)

    def answer(self, client: Client, table: pa.Table, time_kind: str = "") -> pa.Table:
        """The table with its answers; every row must be ready."""
        return self.with_answers(table, self.ask(client, self.questions(table, time_kind)))

    def with_answers(self, table: pa.Table, columns: list[pa.ChunkedArray]) -> pa.Table:
        for name, column in zip(self.into, columns, strict=True):
            table = table.append_column(name, column)
        return table


def _is_pair(between: object) -> bool:
    return (
        isinstance(between, tuple | list)
        and len(between) == 2
        and all(isinstance(name, str) for name in between)
    )
