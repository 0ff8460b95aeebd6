"""How a fetch reads its rows and asks about them. Plain data that tasks can carry, as `Intake` is for updates."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.client import Client
from millpond.code.rules import FetchRule
from millpond.container.held import lowest_asked, served_below
from millpond.errors import BadOption
from millpond.ops.columns import Names, as_names, check_column_name, keys_of, times_of
from millpond.schema import key_kind, parse_ddl
from millpond.stores.keys import Keys
from millpond.stores.versioned import result_schema
from millpond.times import Progress, TimeKind, below_fetch_progress
from millpond.wire.messages import Fetch, StateSpec


class Questions(NamedTuple):
    """Rows in the pond's terms: values with lows < time <= highs, or just up to highs."""

    keys: Keys
    lows: npt.NDArray[np.int64] | None
    highs: npt.NDArray[np.int64]
    kind: TimeKind

    def take(self, rows: npt.NDArray[np.int64]) -> Questions:
        lows = None if self.lows is None else self.lows[rows]
        return Questions(self.keys.take(rows), lows, self.highs[rows], self.kind)

    def check_not_below(self, fetch_progress: Progress, rule: FetchRule, spec: StateSpec) -> None:
        if len(self.highs) == 0 or fetch_progress == -math.inf:
            return
        lowest = lowest_asked(self.lows, self.highs, rule, spec)
        if lowest < fetch_progress:
            raise below_fetch_progress(lowest, fetch_progress, self.kind)

    def ready(self, update_progress: Progress) -> npt.NDArray[np.int64]:
        """Positions of the rows that have a final answer: those with high < U."""
        if update_progress == math.inf:
            return np.arange(len(self.highs))
        if update_progress == -math.inf:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self.highs < update_progress)


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
        self.key_schema = parse_ddl(spec.key, "key")
        self.key_type = pa.int64() if key_kind(self.key_schema) == "i64" else pa.binary()
        self.key = as_names(key, self.key_schema, "key")
        self.answers = result_schema(parse_ddl(spec.value, "value"), rule)
        self.into = as_names(list(self.answers.names) if into is None else into, self.answers, "into")
        if len(set(self.into)) < len(self.into):
            raise BadOption(
                f"into={into!r} names a column twice",
                hint="give each answer a name of its own",
                option="into",
            )
        self.low: str | None = None if between is None else between[0]
        self.high = check_column_name(at, "at") if between is None else between[1]

    @property
    def columns(self) -> list[str]:
        """The columns that it reads, each once."""
        lows = () if self.low is None else (self.low,)
        return list(dict.fromkeys((*self.key, self.high, *lows)))

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
        return Questions(keys_of(table, self.key, self.key_schema), lows, highs, kind)

    def ask(self, client: Client, questions: Questions) -> list[pa.ChunkedArray]:
        """One column for each name of `into`."""
        message = Fetch(self.state, self.rule.name, self.rule.code, self.rule.returns)
        return client.fetch(
            message, self.key_type, questions.keys, questions.lows, questions.highs, self.answers
        )

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
