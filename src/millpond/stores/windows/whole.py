"""What becomes of the rows of whole windows: of each group of rows a value for each aggregate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.capture import described
from millpond.code.rules import FetchRule
from millpond.code.windows import Aggregate
from millpond.errors import RuleFailed, WrongType
from millpond.kernels import lookups
from millpond.kernels import windows as kernel
from millpond.stores import views
from millpond.stores.answers import Reader, packed
from millpond.stores.cells import Layout, in_place_array
from millpond.stores.heaps import heap_for
from millpond.stores.keys import Keys, decode_keys
from millpond.stores.ruleset import returned
from millpond.stores.userrules import UserRule, range_rule
from millpond.stores.windows.cells import CellLayout, column_number

Longs = NDArray[np.int64]
ORDERED = ("values", "latest", "custom", "where_largest")
"""What depends on the order of a window's rows."""


class Rows(NamedTuple):
    """Rows in the order of their groups: those of group g are from `offsets[g]` to `offsets[g + 1]`."""

    times: Longs
    values: list[pa.Array]
    offsets: Longs
    named: Callable[[int], str] | None = None
    """What a group is, for errors."""

    @property
    def groups(self) -> Longs:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def naming(schema: pa.Schema, keys: Keys, starts: Longs, ends: Longs) -> Callable[[int], str]:
    """Windows of keys, as users know them; their times as numbers."""

    def named(i: int) -> str:
        columns = decode_keys(keys.take(np.array([i])).to_arrow(), schema)
        key = ", ".join(repr(column[0].as_py()) for column in columns)
        return f"window [{starts[i]}, {ends[i]}) of key {key}"

    return named


class WholeWindows:
    """The aggregates of one window over rows."""

    def __init__(self, values: pa.Schema, aggregates: Mapping[str, Aggregate]) -> None:
        self.values = values
        self.aggregates = dict(aggregates)
        self.is_ordered = any(aggregate.name in ORDERED for aggregate in aggregates.values())
        self._cells: dict[str, CellLayout] = {}
        self._rules: dict[str, UserRule] = {}
        for name, aggregate in aggregates.items():
            if aggregate.name == "custom":
                self._rules[name] = self._rule(aggregate)
            elif aggregate.is_incremental and (aggregate.name == "count" or self._is_number(aggregate)):
                self._cells[name] = CellLayout(values, {name: aggregate})
            else:
                _check(aggregate, values)

    @property
    def interpreted(self) -> list[str]:
        """Why functions of the user's are not compiled, where they are not."""
        folds = [reason for layout in self._cells.values() for reason in layout.interpreted]
        return [*folds, *(rule.reason for rule in self._rules.values() if rule.kernel is None)]

    def _is_number(self, aggregate: Aggregate) -> bool:
        type_ = self.values.field(column_number(self.values, aggregate)).type
        return views.is_long(type_) or views.is_double(type_)

    def _rule(self, aggregate: Aggregate) -> UserRule:
        assert aggregate.code is not None
        own = pa.schema([self.values.field(name) for name in aggregate.columns])
        type_ = returned(FetchRule("custom", aggregate.code, aggregate.returns))
        return range_rule(aggregate.code, own, Layout(own), type_)

    def order(self, groups: Longs, times: Longs, count: int) -> tuple[Longs, Longs]:
        """Rows in the order of their groups, of which there are so many, and where each begins."""
        offsets, order = np.empty(count + 1, np.int64), np.empty(len(groups), np.int64)
        kernel.order_by(groups, count, offsets, order)
        if self.is_ordered:
            # Those of one time stay as they came.
            in_time = np.lexsort((times[order], groups[order]))
            order = order[in_time]
        return order, offsets

    def results(self, rows: Rows) -> dict[str, pa.Array]:
        groups = rows.groups
        return {name: self._result(name, each, rows, groups) for name, each in self.aggregates.items()}

    def _result(self, name: str, aggregate: Aggregate, rows: Rows, groups: Longs) -> pa.Array:
        if name in self._cells:
            layout = self._cells[name]
            return layout.results(layout.fold(groups, len(rows.offsets) - 1, rows.values))[name]
        if aggregate.name == "custom":
            return self._made(name, aggregate, rows)
        column = column_number(self.values, aggregate)
        items = rows.values[column]
        match aggregate.name:
            case "values":
                return _lists(rows.offsets, items)
            case "latest":
                return items.take(pa.array(rows.offsets[1:] - 1))
            case "median":
                return _percentile(items, rows.offsets, 0.5)
            case "percentile":
                return _percentile(items, rows.offsets, aggregate.number)
            case "top":
                return _top(items, groups, rows.offsets, int(aggregate.number))
            case "where_largest":
                return self._where_largest(aggregate, rows, groups)
        reader, begin, end, _ = _reader(self.values.field(column), rows.times, items, rows.offsets)
        rule = lookups.SMALLEST if aggregate.name == "smallest" else lookups.LARGEST
        return reader.aggregates(begin, end, len(items), rule)[0]

    def _made(self, name: str, aggregate: Aggregate, rows: Rows) -> pa.Array:
        own = [self.values.names.index(column) for column in aggregate.columns]
        layout = Layout(pa.schema([self.values.field(number) for number in own]))
        values = [rows.values[number] for number in own]
        reader = _reader_of(layout, rows.times, values)
        type_ = returned(FetchRule("custom", aggregate.code, aggregate.returns))
        begin, end = rows.offsets[:-1].copy(), rows.offsets[1:].copy()

        def refuse(group: int, function: str, error: Exception) -> RuleFailed:
            which = "" if rows.named is None else f" on {rows.named(group)}"
            return RuleFailed(
                f"the function {function!r} of aggregate {name!r} failed{which}: {described(error)}",
                hint="its rows are committed, so that it fails whenever they fire: open the window again, all else as it"
                f" was, with a function for {name!r} that takes them",
                rule=function,
            )

        return reader.made(self._rules[name], type_, begin, end, len(rows.times), refuse)[0]

    def _where_largest(self, aggregate: Aggregate, rows: Rows, groups: Longs) -> pa.Array:
        column = column_number(self.values, aggregate)
        field = self.values.field(column)
        reader, begin, end, items = _reader(field, rows.times, rows.values[column], rows.offsets)
        best = reader.aggregates(begin, end, len(items), lookups.LARGEST)[0]
        mine = pc.equal(items, best.take(pa.array(groups))).fill_null(False)
        if views.is_double(field.type):
            mine = pc.or_(
                mine, pc.and_(pc.is_nan(items), pc.is_nan(best.take(pa.array(groups)))).fill_null(False)
            )
        chosen = np.flatnonzero(views.longs(mine))
        counts = np.bincount(groups[chosen], minlength=len(begin))
        offsets = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        names = list(dict.fromkeys(aggregate.columns))
        picked = pa.array(chosen)
        columns = [rows.values[self.values.names.index(name)].take(picked) for name in names]
        return _lists(offsets, pa.StructArray.from_arrays(columns, names=names))


def _check(aggregate: Aggregate, values: pa.Schema) -> None:
    field = values.field(column_number(values, aggregate))
    if aggregate.name in ("median", "percentile"):
        if not (pa.types.is_signed_integer(field.type) or views.is_double(field.type)):
            raise WrongType(
                f"{aggregate} is of numbers; column {field.name!r} is {field.type}",
                hint="cast it to long or double",
                column=field.name,
                expected="a number",
                actual=str(field.type),
            )
    elif aggregate.name in ("smallest", "largest", "where_largest", "top"):
        type_ = field.type
        if not (
            views.is_long(type_)
            or views.is_double(type_)
            or views.is_bytes(type_)
            or pa.types.is_decimal(type_)
        ):
            raise WrongType(
                f"{aggregate} compares values; column {field.name!r} is {type_}",
                hint="use latest(), values() or count()",
                column=field.name,
                expected="a number, boolean, date, timestamp, string, binary or decimal",
                actual=str(type_),
            )
    elif aggregate.name in ("total", "mean", "fold"):
        raise WrongType(
            f"{aggregate} is of numbers; column {field.name!r} is {field.type}",
            hint="cast it to long or double",
            column=field.name,
            expected="a number",
            actual=str(field.type),
        )


def _reader(
    field: pa.Field, times: Longs, items: pa.Array, offsets: Longs
) -> tuple[Reader, Longs, Longs, pa.Array]:
    reader = _reader_of(Layout(pa.schema([field])), times, [items])
    return reader, offsets[:-1].copy(), offsets[1:].copy(), items


def _reader_of(layout: Layout, times: Longs, values: Sequence[pa.Array]) -> Reader:
    """Rows as the arena of a State has them, which is what its rules read."""
    masked = layout.has_nulls(values)
    heaps: dict[int, Any] = {}
    for number, column in enumerate(layout.columns):
        if column.kind == "heap":
            heaps[number] = heap_for(column.field.type)
            heaps[number].append(values[number])
    cells = layout.rows(times, values, 0, masked)
    return Reader(layout, len(layout.columns), cells, layout.width if masked else -1, heaps)


def _lists(offsets: Longs, items: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(views.narrow_offsets(offsets)), items)


def _percentile(items: pa.Array, offsets: Longs, share: float) -> pa.Array:
    if items.null_count:
        there = np.concatenate(([0], np.cumsum(views.longs(items.is_valid()))))
        offsets, items = there[offsets], items.drop_null()
    numbers = views.floats(items) if views.is_double(items.type) else views.longs(items)
    values = np.asarray(numbers, np.float64)
    count = len(offsets) - 1
    out, valid = np.empty(count, np.float64), np.empty(count, np.uint8)
    # By value, then by group: what is in order stays so.
    by_value = np.argsort(values)
    groups = np.repeat(np.arange(count), np.diff(offsets))[by_value]
    starts, order = np.empty(count + 1, np.int64), np.empty(len(values), np.int64)
    kernel.order_by(groups, count, starts, order)
    kernel.percentiles(values[by_value[order]], starts, share, out, valid)
    return in_place_array(pa.float64(), out.view(np.int64), *packed(valid))


def _top(items: pa.Array, groups: Longs, offsets: Longs, k: int) -> pa.Array:
    """Of values of any type that has an order: by their places in it."""
    there = np.flatnonzero(views.longs(items.is_valid()))
    some = items.take(pa.array(there))
    ranks = np.empty(len(some), np.int64)
    ranks[pc.sort_indices(some).to_numpy()] = np.arange(len(some))
    order = np.lexsort((-ranks, groups[there]))
    starts = np.concatenate(([0], np.cumsum(np.bincount(groups[there], minlength=len(offsets) - 1))))
    place = np.arange(len(order)) - starts[groups[there][order]]
    chosen = order[place < k]
    lengths = np.minimum(np.diff(starts), k)
    return _lists(np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), some.take(pa.array(chosen)))
