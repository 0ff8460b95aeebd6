"""Epochs drawn from a seed, fed to a window operator and to its oracle, and both answers compared row by row.

An operator is called as `op(table, epoch)` and gives an Arrow table; `op.finish()` gives what is left. With several sources
there is one for each, by its name.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import pyarrow as pa

from millpond.testing.window_joins import RowOracle
from millpond.testing.windows import Result, Row, WindowOracle

KEYS = {"few": 3, "many": 500, "hot": 50}
LINES_MAX = 20
"""Of each part of a difference that is shown."""


class Operator(Protocol):
    def __call__(self, table: pa.Table, epoch: int) -> pa.Table: ...

    def finish(self) -> pa.Table: ...


class Epoch(NamedTuple):
    source: str
    number: int
    """Of this source, from 0 on."""
    table: pa.Table


@dataclass(frozen=True)
class Shape:
    """What epochs look like. Columns: `key`, `ts`, `v` (a long) and `w` (a double, in quarters: its totals are exact)."""

    epochs: int = 8
    """Of each source."""
    rows: int = 40
    """Of an epoch at most; some are empty."""
    keys: Literal["few", "many", "hot"] = "few"
    """Hot: three rows of four have the same key."""
    key_type: Literal["long", "string"] = "long"
    times: Literal["long", "timestamp"] = "long"
    start: int = 0
    step: int = 50
    """How much time an epoch takes."""
    disorder: int = 20
    """By how much a row may be older than its epoch, mostly."""
    straggling: float = 0.02
    """The share of rows that are older than that by up to ten epochs."""
    silence: float = 0.15
    """The share of epochs before which nothing happens, for up to ten epochs' time."""
    empty: float = 0.1
    """The share of epochs without rows."""
    nulls: float = 0.1
    """The share of nulls in `v` and in `w`."""
    sources: tuple[str, ...] = ("feed",)


def draw(seed: int, shape: Shape | None = None) -> list[Epoch]:
    """The same for the same seed. Sources take turns in an order that is drawn, too, and keep apart by up to three epochs."""
    shape = shape or Shape()
    rng = random.Random(seed)
    turns = [source for source in shape.sources for _ in range(shape.epochs)]
    if len(shape.sources) > 1:
        rng.shuffle(turns)
    begins = {source: shape.start + rng.randint(0, 3 * shape.step) for source in shape.sources}
    numbers: dict[str, int] = defaultdict(int)
    epochs = []
    for source in turns:
        if rng.random() < shape.silence:
            begins[source] += rng.randrange(1, 10 * shape.step)
        size = 0 if rng.random() < shape.empty else rng.randint(1, shape.rows)
        rows = [_row(rng, shape, begins[source]) for _ in range(size)]
        epochs.append(Epoch(source, numbers[source], _table(rows, shape)))
        numbers[source] += 1
        begins[source] += shape.step
    return epochs


def _row(rng: random.Random, shape: Shape, begin: int) -> tuple[Any, int, int | None, float | None]:
    number = rng.randrange(KEYS[shape.keys])
    if shape.keys == "hot" and rng.random() < 0.75:
        number = 0
    time = begin + rng.randrange(shape.step) - rng.randint(0, shape.disorder)
    if rng.random() < shape.straggling:
        time -= rng.randrange(10 * shape.step)
    v = None if rng.random() < shape.nulls else rng.randint(-100, 100)
    w = None if rng.random() < shape.nulls else rng.randint(-400, 400) / 4
    return (f"key {number}" if shape.key_type == "string" else number), time, v, w


def _table(rows: list[tuple[Any, int, int | None, float | None]], shape: Shape) -> pa.Table:
    schema = pa.schema(
        {
            "key": pa.string() if shape.key_type == "string" else pa.int64(),
            "ts": pa.timestamp("us", tz="UTC") if shape.times == "timestamp" else pa.int64(),
            "v": pa.int64(),
            "w": pa.float64(),
        }
    )
    columns = zip(*rows, strict=True) if rows else ((), (), (), ())
    return pa.table(
        [pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)], schema=schema
    )


def sided(epochs: Iterable[Epoch]) -> list[Epoch]:
    """For joins: all columns but the key are named for their source, as in `left_ts`, `left_v`, `left_w`."""
    return [
        epoch._replace(
            table=epoch.table.rename_columns(
                [name if name == "key" else f"{epoch.source}_{name}" for name in epoch.table.column_names]
            )
        )
        for epoch in epochs
    ]


# Feeding


def oracle_rows(table: pa.Table, key: str | Sequence[str] = "key", at: str = "ts") -> list[Row]:
    """The rows as an oracle takes them. All columns are values, key and time with them; times are integers."""
    rows: list[Row] = []
    for row in result_rows(table):
        of_key: Hashable = row[key] if isinstance(key, str) else tuple(row[name] for name in key)
        rows.append((of_key, row[at], row))
    return rows


def result_rows(table: pa.Table) -> list[Result]:
    """The rows of a table, with timestamps as microseconds."""
    for place, column in enumerate(table.schema):
        if pa.types.is_timestamp(column.type):
            times = table[column.name].cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
            table = table.set_column(place, column.name, times)
    rows: list[Result] = table.to_pylist()
    return rows


def time_column(table: pa.Table) -> str:
    """`ts`, or that of one side."""
    names: list[str] = table.column_names
    return next(name for name in names if name == "ts" or name.endswith("_ts"))


def run_operator(operator: Operator | Mapping[str, Operator], epochs: Iterable[Epoch]) -> list[list[Result]]:
    """What each epoch gave, and then what was left (of several sources, one after the other in their order)."""
    operators = operator if isinstance(operator, Mapping) else defaultdict(lambda: operator)
    results = [result_rows(operators[epoch.source](epoch.table, epoch.number)) for epoch in epochs]
    finished = list(operator.values()) if isinstance(operator, Mapping) else [operator]
    return [*results, [row for each in finished for row in result_rows(each.finish())]]


def run_oracle(
    oracle: WindowOracle | RowOracle, epochs: Iterable[Epoch], at: str | None = None
) -> list[list[Result]]:
    """The same of the oracle. Without `at`, the time is in `time_column`."""
    results = []
    for epoch in epochs:
        rows = oracle_rows(epoch.table, oracle.key, at or time_column(epoch.table))
        results.append(oracle.epoch(epoch.number, rows, epoch.source).rows)
    return [*results, oracle.finish().rows]


def check(
    operator: Operator | Mapping[str, Operator],
    oracle: WindowOracle | RowOracle,
    epochs: Sequence[Epoch],
    *,
    each_epoch: bool = True,
    at: str | None = None,
) -> None:
    """AssertionError, with what differs, if the operator does not answer as the oracle does. See `compare_runs`."""
    expected = run_oracle(oracle, epochs, at)
    oracle.validate()
    compare_runs(run_operator(operator, epochs), expected, each_epoch=each_epoch)


# Comparing


def compare_runs(
    actual: Sequence[Sequence[Result]], expected: Sequence[Sequence[Result]], *, each_epoch: bool = True
) -> None:
    """Epoch by epoch, in any order within one; or with `each_epoch=False`, all rows together.

    Session ids may be others, if the same session always has the same.
    """
    if not each_epoch:
        actual = [[row for rows in actual for row in rows]]
        expected = [[row for rows in expected for row in rows]]
    assert len(actual) == len(expected), f"{len(actual)} answers, not {len(expected)}"
    renamed: dict[Any, Any] = {}
    for place, (rows, truth) in enumerate(zip(actual, expected, strict=True)):
        is_last = each_epoch and place == len(expected) - 1
        where = "finish" if is_last else f"answer {place}" if each_epoch else "all answers"
        lines = difference(rows, truth, renamed)
        assert not lines, "\n".join([f"{where}: {len(rows)} rows, expected {len(truth)}", *lines])
    assert len(set(renamed.values())) == len(renamed), "two sessions have the same id"


def compare(actual: Iterable[Result], expected: Iterable[Result]) -> None:
    """AssertionError if these are not the same rows, in any order."""
    lines = difference(list(actual), list(expected))
    assert not lines, "\n".join(lines)


def difference(
    actual: Sequence[Result], expected: Sequence[Result], renamed: dict[Any, Any] | None = None
) -> list[str]:
    """Lines for people, none if both are the same. Doubles may differ in their last digits.

    Rows are the same one if window, key and whether it is retracted are. `renamed` takes and holds the actual session id
    of each expected one.
    """
    unmatched: list[tuple[str, Result]] = []
    changed: list[str] = []
    rows, truths = _by_identity(actual), _by_identity(expected)
    for identity in sorted({*rows, *truths}):
        ours, theirs = rows.get(identity, []), list(truths.get(identity, []))
        strangers = []
        for row in ours:
            match = next((truth for truth in theirs if _same(row, truth, renamed)), None)
            if match is None:
                strangers.append(row)
            else:
                theirs.remove(match)
                if renamed is not None and "session_id" in match:
                    renamed[match["session_id"]] = row["session_id"]
        if len(strangers) == len(theirs) == 1:
            changed.append(f"differs   {identity}: {_fields(strangers[0], theirs[0], renamed)}")
        else:
            unmatched += [("unwanted ", row) for row in strangers] + [("missing  ", row) for row in theirs]
    lines = changed[:LINES_MAX]
    for what in ("missing  ", "unwanted "):
        shown = [f"{what} {row}" for kind, row in unmatched if kind == what]
        lines += shown[:LINES_MAX]
        if len(shown) > LINES_MAX:
            lines.append(f"{what} and {len(shown) - LINES_MAX} more")
    if len(changed) > LINES_MAX:
        lines.append(f"differs   and {len(changed) - LINES_MAX} more")
    return lines


def _by_identity(rows: Iterable[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = defaultdict(list)
    for row in rows:
        names = [name for name in ("window_start", "window_end", "key", "retracted") if name in row]
        groups[", ".join(f"{name}={row[name]!r}" for name in names)].append(row)
    return groups


def _same(row: Result, truth: Result, renamed: dict[Any, Any] | None) -> bool:
    return row.keys() == truth.keys() and all(_equal(name, row, truth, renamed) for name in truth)


def _equal(name: str, row: Result, truth: Result, renamed: dict[Any, Any] | None) -> bool:
    if name == "session_id":
        return renamed is None or renamed.get(truth[name], row[name]) == row[name]
    return _close(row[name], truth[name])


def _close(actual: Any, expected: Any) -> bool:
    if isinstance(actual, list) and isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_close, actual, expected))
    if isinstance(actual, float) and isinstance(expected, float):
        both_nan = math.isnan(actual) and math.isnan(expected)
        return both_nan or math.isclose(actual, expected, rel_tol=1e-9, abs_tol=1e-12)
    return type(actual) is type(expected) and bool(actual == expected)


def _fields(row: Result, truth: Result, renamed: dict[Any, Any] | None) -> str:
    parts = [f"no {name}" for name in truth if name not in row] + [
        f"{name} too many" for name in row if name not in truth
    ]
    parts += [
        f"{name} is {row[name]!r}, expected {truth[name]!r}"
        for name in truth
        if name in row and not _equal(name, row, truth, renamed)
    ]
    return "; ".join(parts)


class OracleOperator:
    """An oracle in an operator's place: what is driven by it is driven right."""

    def __init__(self, oracle: WindowOracle | RowOracle, schema: pa.Schema, source: str = "feed") -> None:
        self.oracle = oracle
        self.schema = schema
        self.source = source

    def __call__(self, table: pa.Table, epoch: int) -> pa.Table:
        rows = oracle_rows(table, self.oracle.key, time_column(table))
        return self._table(self.oracle.epoch(epoch, rows, self.source).rows)

    def finish(self) -> pa.Table:
        return self._table(self.oracle.finish(self.source).rows)

    def _table(self, rows: list[Result]) -> pa.Table:
        return pa.Table.from_pylist(rows, schema=self.schema)
