"""Fetch rules: the types they give, and their answers over positions and ranges of the arena."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.capture import described
from millpond.code.rules import FetchRule
from millpond.errors import BadOption, BadRule, RuleFailed, TotalOverflow, WrongType
from millpond.kernels import lookups
from millpond.schema import TIME
from millpond.stores import views
from millpond.stores.budget import UNLIMITED, Budget
from millpond.stores.cells import Column, Layout, in_place_array, numbers
from millpond.stores.heaps import Heap
from millpond.stores.ruleset import net_neighbours, returned
from millpond.stores.userrules import UserRule, fitting

AGGREGATES = {"total": lookups.TOTAL, "smallest": lookups.SMALLEST, "largest": lookups.LARGEST}
RULES = ("latest", "as_of", "values", "count", *AGGREGATES, "neighbours", "changes", "custom")


def result_schema(values: pa.Schema, fetch: FetchRule) -> pa.Schema:
    """The types that `fetch` gives under a rule. `WrongType` where the rule does not fit a column's type."""
    rule = fetch.name
    if rule in ("latest", "as_of"):
        return pa.schema([pa.field(field.name, field.type) for field in values])
    if rule == "values":
        return pa.schema([pa.field(field.name, pa.list_(field.type)) for field in values])
    if rule == "count":
        return pa.schema([pa.field("count", pa.int64())])
    if rule == "total":
        return pa.schema([pa.field(field.name, _total_type(field)) for field in values])
    if rule in AGGREGATES:
        return pa.schema([pa.field(field.name, _ordered_type(field, rule)) for field in values])
    if rule in ("neighbours", "changes"):
        if len(values) < 2 or not pa.types.is_boolean(values.field(len(values) - 1).type):
            raise BadRule(
                "neighbours() reads a State with the update rule edges()",
                hint="use another fetch rule",
                rule=rule,
            )
        if rule == "changes":
            ends = [values.field(0), values.field(len(values) - 1)]
            columns = [pa.field(TIME, pa.int64()), *ends]
            return pa.schema([pa.field(field.name, pa.list_(field.type)) for field in columns])
        return pa.schema([pa.field(field.name, pa.list_(field.type)) for field in list(values)[:-1]])
    if rule == "custom" and fetch.code is not None:
        return pa.schema([pa.field(fetch.code.name, returned(fetch))])
    raise BadOption(f"no rule {rule!r}", hint=f"one of {', '.join(RULES)}", option="rule")


def _total_type(field: pa.Field) -> pa.DataType:
    if pa.types.is_signed_integer(field.type):
        return pa.int64()
    if views.is_double(field.type):
        return pa.float64()
    raise WrongType(
        f"total() adds numbers; column {field.name!r} is {field.type}",
        hint="hold it as long or double, or use another rule",
        column=field.name,
        expected="byte, short, int, long, float or double",
        actual=str(field.type),
    )


def _ordered_type(field: pa.Field, rule: str) -> pa.DataType:
    type_ = field.type
    if views.is_long(type_) or views.is_double(type_) or views.is_bytes(type_) or pa.types.is_decimal(type_):
        return type_
    raise WrongType(
        f"{rule}() compares values; column {field.name!r} is {type_}",
        hint="use latest(), values() or count()",
        column=field.name,
        expected="a number, boolean, date, timestamp, string, binary or decimal",
        actual=str(type_),
    )


class Reader:
    """Reads value columns of the arena and the heaps behind it. `mask` is the null mask's cell, -1 for none.

    The first `count` columns are the values that updates brought; behind them come the folded ones, if there are any.
    """

    __slots__ = ("_budget", "_cells", "_columns", "_folded", "_heaps", "_layout", "_mask")

    def __init__(
        self,
        layout: Layout,
        count: int,
        cells: NDArray[np.int64],
        mask: int,
        heaps: Mapping[int, Heap],
        budget: Budget = UNLIMITED,
    ) -> None:
        self._budget = budget
        self._layout = layout
        every = list(enumerate(layout.columns))
        self._columns = every[:count]
        self._folded = every[count:] or self._columns
        self._cells = cells
        self._mask = mask
        self._heaps = heaps

    def times(self, positions: NDArray[np.int64]) -> pa.Array:
        out, bits = _answers(len(positions))
        lookups.gather(self._cells, 0, -1, 0, positions, out, bits)
        return in_place_array(pa.int64(), out, None, 0)

    def gather(self, positions: NDArray[np.int64]) -> list[pa.Array]:
        """Each value column at those positions; null at -1."""
        return self._gather(self._columns, positions)

    def folded(self, positions: NDArray[np.int64]) -> list[pa.Array]:
        """As `gather`, of what the update rule made of the values."""
        return self._gather(self._folded, positions)

    def _gather(self, columns: Sequence[tuple[int, Column]], positions: NDArray[np.int64]) -> list[pa.Array]:
        refs = self._references(positions)
        return [
            self._heaps[c].take(refs, self._budget)
            if column.kind == "heap"
            else self._in_place(column, positions)
            for c, column in columns
        ]

    def lists(self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int) -> list[pa.Array]:
        """Each value column's values over each range, oldest first."""
        offsets, positions = self._expanded(begin, end, total)
        return _lists(offsets, self.gather(positions))

    def net(
        self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and positions of the additions that count in each range."""
        offsets, positions = self._expanded(begin, end, total)
        columns = [self._columns[0], self._columns[-1]]
        kept = net_neighbours(offsets, *self._gather(columns, positions))
        sums = np.concatenate(([0], np.cumsum(kept, dtype=np.int64)))
        return sums[offsets], positions[kept != 0]

    def changes(self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int) -> list[pa.Array]:
        """The time, the neighbour and what became of it, for each update of each range, oldest first."""
        offsets, positions = self._expanded(begin, end, total)
        ends = self._gather([self._columns[0], self._columns[-1]], positions)
        return _lists(offsets, [self.times(positions), *ends])

    def neighbours(self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int) -> list[pa.Array]:
        """All value columns but the last, for the neighbours that each range leaves."""
        offsets, positions = self.net(begin, end, total)
        return _lists(offsets, self._gather(self._columns[:-1], positions))

    def made(
        self,
        rule: UserRule,
        type_: pa.DataType,
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        total: int,
        refuse: Callable[[int, str, Exception], Exception] | None = None,
    ) -> list[pa.Array]:
        """What a user's rule makes of each range; null for an empty one. `refuse` gives the error for a range on which it fails."""

        def failed(i: int, error: Exception) -> NoReturn:
            name = getattr(rule.function, "__name__", "rule")
            if refuse is not None:
                raise refuse(i, name, error) from None
            raise RuleFailed(f"the fetch rule {name!r} failed: {described(error)}", rule=name) from None

        answers: dict[int, Any] = {}
        kind = _kind(type_)

        def use(i: int, answer: Any) -> None:
            answers[i] = None if answer is None else fitting(answer, type_, kind)

        left = self._interpret(rule, begin, end, total, use, failed)
        if rule.kernel is None:
            return [pa.array([answers.get(i) for i in range(len(begin))], type_)]
        out = np.empty(len(begin), np.float64 if kind == "double" else np.int64)
        valid = np.empty(len(begin), np.uint8)
        rule.run(self._cells, self._cells.view(np.float64), begin, left, out, valid, failed=failed)
        for i, answer in answers.items():
            out[i], valid[i] = (0, 0) if answer is None else (answer, 1)
        return [in_place_array(type_, out.view(np.int64), *packed(valid))]

    def kept(
        self, rule: UserRule, begin: NDArray[np.int64], end: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], int]:
        """Flags for the versions of all ranges that a user's rule keeps, and on how many ranges it failed: these stay."""
        kept = np.ones(offsets[-1], np.uint8)
        failures: list[int] = []

        def use(i: int, answer: Any) -> None:
            mask, part = np.asarray(answer), kept[offsets[i] : offsets[i + 1]]
            if mask.shape != part.shape or mask.dtype.kind not in "biuf":
                raise ValueError("the rule must give one boolean for each version")
            part[:] = mask != 0

        def failed(i: int, _: Exception) -> None:
            failures.append(i)

        left = self._interpret(rule, begin, end, int(offsets[-1]), use, failed)
        if rule.kernel is not None:
            rule.run(self._cells, self._cells.view(np.float64), begin, left, offsets, kept, failed=failed)
        return kept, len(failures)

    def _interpret(
        self,
        rule: UserRule,
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        total: int,
        use: Callable[[int, Any], None],
        failed: Callable[[int, Exception], None],
    ) -> NDArray[np.int64]:
        """Runs a rule as Python on the ranges that its kernel cannot take: those with a null, whatever others hold.

        Returns the ends of the ranges, with these made empty.
        """
        if rule.kernel is not None and self._mask < 0:
            return end
        offsets, positions = self._expanded(begin, end, total)
        ranges = begin < end
        if rule.kernel is not None:
            nulls = np.concatenate(([0], np.cumsum(self._cells[positions, self._mask] != 0)))
            ranges = nulls[offsets[:-1]] < nulls[offsets[1:]]
        if ranges.any():
            rule.interpret(self._arguments(ranges, offsets, positions), use, failed)
        return np.where(ranges, begin, end)

    def _arguments(
        self, ranges: NDArray[np.bool_], offsets: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> Iterator[tuple[int, list[Any]]]:
        """What an interpreted rule sees of each of these ranges: the times and the value columns.

        Numbers are NumPy arrays, as in compiled rules; a list is what has nulls in this range, or no numbers.
        """
        refs = self._references(positions)
        times = self._cells[positions, 0]
        columns = [
            (self._heaps[c].take(refs, self._budget).to_pylist(), None)
            if column.kind == "heap"
            else (numbers(column, self._cells, positions), self._nulls(column, positions))
            for c, column in self._columns
        ]
        for i in np.flatnonzero(ranges).tolist():
            part = slice(*offsets[i : i + 2].tolist())
            yield (
                i,
                [times[part], *(_with_nulls(values[part], nulls, part) for values, nulls in columns)],
            )

    def _nulls(self, column: Column, positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return None if self._mask < 0 else self._cells[positions, self._mask] >> column.bit & 1

    def aggregates(
        self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int, rule: int
    ) -> list[pa.Array]:
        """Each value column's total, smallest or largest over each range."""
        name: Any = next(name for name, code in AGGREGATES.items() if code == rule)
        values = pa.schema([column.field for _, column in self._columns])
        types = result_schema(values, FetchRule(name)).types
        out = []
        for (c, column), type_ in zip(self._columns, types, strict=True):
            if column.kind == "heap":
                out.append(self._ranked(c, begin, end, total, rule))
            elif column.kind == "double":
                out.append(self._doubles(column, type_, begin, end, rule))
            else:
                out.append(self._longs(column, type_, begin, end, rule))
        return out

    def _expanded(
        self, begin: NDArray[np.int64], end: NDArray[np.int64], total: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `expanded`: a long for the position of each version, and one for each of its columns and its reference."""
        self._budget.claim(8 * total * (2 + len(self._columns)))
        return expanded(begin, end, total)

    def _references(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        refs = np.empty(len(positions) if self._heaps else 0, np.int64)
        if self._heaps:
            lookups.gather_refs(self._cells, self._layout.reference, positions, refs)
        return refs

    def _in_place(self, column: Column, positions: NDArray[np.int64]) -> pa.Array:
        out, bits = _answers(len(positions))
        nulls = lookups.gather(self._cells, column.cell, self._mask, column.bit, positions, out, bits)
        return in_place_array(column.field.type, out, pa.py_buffer(bits) if nulls else None, nulls)

    def _longs(
        self,
        column: Column,
        type_: pa.DataType,
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        rule: int,
    ) -> pa.Array:
        out, valid = np.empty(len(begin), np.int64), np.empty(len(begin), np.uint8)
        overflows = lookups.aggregate_longs(
            self._cells, column.cell, self._mask, column.bit, begin, end, rule, out, valid
        )
        if overflows:
            raise TotalOverflow(
                f"{overflows} totals of column {column.field.name!r} do not fit a long",
                hint="hold the column as double",
                rows=overflows,
            )
        return in_place_array(type_, out, *packed(valid))

    def _doubles(
        self,
        column: Column,
        type_: pa.DataType,
        begin: NDArray[np.int64],
        end: NDArray[np.int64],
        rule: int,
    ) -> pa.Array:
        out, valid = np.empty(len(begin), np.float64), np.empty(len(begin), np.uint8)
        cells = self._cells.view(np.float64)
        lookups.aggregate_doubles(
            self._cells, cells, column.cell, self._mask, column.bit, begin, end, rule, out, valid
        )
        return in_place_array(type_, out.view(np.int64), *packed(valid))

    def _ranked(
        self, c: int, begin: NDArray[np.int64], end: NDArray[np.int64], total: int, rule: int
    ) -> pa.Array:
        """Smallest or largest of a heap column: of the values' places in their sorted order."""
        offsets, positions = self._expanded(begin, end, total)
        items = self._heaps[c].take(self._references(positions), self._budget)
        order = pc.sort_indices(items).to_numpy().astype(np.int64)
        ranks = np.empty((len(order), 2), np.int64)
        ranks[order, 0] = np.arange(len(order))
        ranks[:, 1] = views.longs(items.is_null())
        out, valid = np.empty(len(begin), np.int64), np.empty(len(begin), np.uint8)
        lookups.aggregate_longs(ranks, 0, 1, 0, offsets[:-1], offsets[1:], rule, out, valid)
        best = np.zeros(len(out), np.int64)
        best[valid != 0] = order[out[valid != 0]]
        return items.take(pa.array(best, mask=valid == 0))


def _answers(count: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    return np.empty(count, np.int64), np.empty((count + 7) // 8, np.uint8)


def expanded(
    begin: NDArray[np.int64], end: NDArray[np.int64], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    offsets, positions = np.empty(len(begin) + 1, np.int64), np.empty(total, np.int64)
    lookups.expand(begin, end, offsets, positions)
    return offsets, positions


def _lists(offsets: NDArray[np.int64], columns: Sequence[pa.Array]) -> list[pa.Array]:
    narrow = pa.py_buffer(views.narrow_offsets(offsets))
    return [
        pa.Array.from_buffers(
            pa.list_(items.type), len(offsets) - 1, [None, narrow], null_count=0, children=[items]
        )
        for items in columns
    ]


def _kind(type_: pa.DataType) -> Literal["long", "double", "heap"]:
    """How an answer of that type is made of what a rule gives: as a number, or as Arrow makes it."""
    if pa.types.is_boolean(type_) or pa.types.is_signed_integer(type_):
        return "long"
    return "double" if views.is_double(type_) else "heap"


def _with_nulls(values: Any, nulls: NDArray[np.int64] | None, part: slice) -> Any:
    if nulls is None or not nulls[part].any():
        return values
    return [None if null else value for value, null in zip(values, nulls[part], strict=True)]


def packed(valid: NDArray[np.uint8]) -> tuple[pa.Buffer | None, int]:
    """Validity flags as Arrow bits, and how many are not set."""
    nulls = len(valid) - int(np.count_nonzero(valid))
    return (pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None), nulls
