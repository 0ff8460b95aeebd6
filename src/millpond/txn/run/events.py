"""An epoch of events as arrays: in the order of (time, seq, row), apart by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.tables import DIGITS_MAX, type_of
from millpond.errors import NullTime, UnknownKind, WrongColumn, WrongType
from millpond.stores import views
from millpond.stores.strings import Strings
from millpond.txn.compiler import arguments
from millpond.txn.compiler.values import EventField
from millpond.txn.run import grouping

Longs = NDArray[np.int64]


@dataclass
class KindEvents:
    """The events of one kind that can run, in time order. The table may have rows of others too."""

    numbers: Longs  # of the events, as they came
    rows: Longs  # of the events, in the table
    table: pa.Table
    _values: dict[str, list[Any]] = field(default_factory=dict)

    def values(self, name: str) -> list[Any]:
        """A field as the interpreter gives it to user code. WrongType where Python has no such values."""
        if name not in self._values:
            column = one(self.table[name]).take(pa.array(self.rows))
            try:
                self._values[name] = _plain(column)
            except Exception as error:  # noqa: BLE001 - Arrow's, Python's and those of whoever knows time zones
                raise WrongType(
                    f"field {name!r} is {column.type}, and its values cannot be given to a function: {error}",
                    hint="cast the column, or round its values",
                    column=name,
                    expected="values that Python has",
                    actual=str(column.type),
                ) from None
        return self._values[name]

    def arrays(self, kind: int, fields: Sequence[EventField], strings: Strings) -> dict[str, NDArray[Any]]:
        """The fields, of all rows of the table, under the names that kernels know them by."""
        out: dict[str, NDArray[Any]] = {arguments.event_rows(kind): self.rows}
        for wanted in fields:
            column = one(self.table[wanted.name])
            if wanted.is_list:
                offsets = views.offsets_of(column, pa.types.is_large_list(column.type))
                out[arguments.list_offsets(kind, wanted.name)] = views.plain(offsets)
                column = column.values
            out[arguments.field(kind, wanted.name)] = held(column, wanted, strings)
        return out


@dataclass
class EpochEvents:
    """All events of an epoch. Those that cannot run, for a null in a field, have their reason already."""

    count: int
    kinds: list[KindEvents]
    order: Longs  # numbers of the events that run, in time order
    kind_of: Longs  # of each of them
    place_of: Longs  # of each of them among its kind
    reasons: dict[int, str]


def held(column: pa.Array, field: EventField, strings: Strings) -> NDArray[Any]:
    """Values as kernels take them; anything under nulls."""
    if field.type == "double":
        return views.plain(views.floats(column), np.float64)
    if field.type == "string":
        if column.null_count:
            column = column.fill_null("")
        return strings.intern(column)
    return views.plain(views.longs(column))


def field_of(name: str, type_: pa.DataType) -> EventField | None:
    """How a transaction sees a field of that type; None if it can only be interpreted. WrongType for a long decimal."""
    inner_type = type_.value_type if pa.types.is_list(type_) or pa.types.is_large_list(type_) else type_
    if pa.types.is_decimal(inner_type) and type_of(inner_type) is None:
        raise WrongType(
            f"field {name!r} is {inner_type}: a transaction takes decimals of at most {DIGITS_MAX} digits",
            hint=f"cast the column, as in cast({name} as decimal({DIGITS_MAX}, {max(inner_type.scale, 0)}))",
            column=name,
            expected=f"decimal of at most {DIGITS_MAX} digits",
            actual=str(inner_type),
        )
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = type_of(type_.value_type)
        return None if inner is None else EventField(name, inner, is_list=True)
    found = type_of(type_)
    return None if found is None else EventField(name, found)


def take_apart(
    events: pa.Table | Mapping[str, pa.Table],
    fields: Mapping[str, Sequence[str]],
    kind: str,
    at: str,
    seq: str | None,
) -> EpochEvents:
    """The events of an epoch: one table with a column that names the kind, or a table for each kind.

    `fields` are those of each kind. Equal times and seqs go by the order in which the rows came.
    """
    names = list(fields)
    if isinstance(events, pa.Table):
        if len(names) == 1 and kind not in events.column_names:
            events = {names[0]: events}
        else:
            return _epoch_of_one(events, names, fields, kind, at, seq)
    unknown = sorted(set(events) - set(names))
    if unknown:
        raise _unknown(unknown[0], names)
    tables = [events.get(name) for name in names]
    counts = [0 if table is None else len(table) for table in tables]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    times = [_longs(t, at, True) for t in tables if t is not None]
    seqs = [_longs(t, seq, False) for t in tables if t is not None and seq is not None]
    kinds = np.repeat(np.arange(len(names)), counts)
    parts = [(int(starts[k]), table) for k, table in enumerate(tables)]
    return _ordered(names, fields, parts, kinds, _joined(times), _joined(seqs) if seq is not None else None)


def _epoch_of_one(
    events: pa.Table,
    names: list[str],
    fields: Mapping[str, Sequence[str]],
    kind: str,
    at: str,
    seq: str | None,
) -> EpochEvents:
    kinds = _kinds(_column(events, kind), names)
    parts = [(0, events)] * len(names)
    times = _longs(events, at, True)
    return _ordered(
        names, fields, parts, kinds, times, None if seq is None else _longs(events, seq, False), shared=True
    )


def _kinds(column: pa.ChunkedArray, names: list[str]) -> Longs:
    """Which of the names each event's kind is."""
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        column = column.cast(pa.string())
    if column.null_count:
        raise _unknown(None, names)
    kinds = np.empty(len(column), np.int64)
    name_offsets, name_data = views.byte_ranges(pa.array(names))
    start = 0
    for chunk in column.chunks:
        stop = start + len(chunk)
        if stop > start:
            offsets, data = views.byte_ranges(chunk)
            texts, known = views.plain(offsets), views.plain(name_offsets)
            unknown = grouping.kinds_of(texts, data, known, name_data, kinds[start:stop])
            if unknown >= 0:
                raise _unknown(chunk[unknown].as_py(), names)
        start = stop
    return kinds


def _ordered(
    names: list[str],
    fields: Mapping[str, Sequence[str]],
    parts: Sequence[tuple[int, pa.Table | None]],
    kinds: Longs,
    times: Longs,
    seqs: Longs | None,
    shared: bool = False,
) -> EpochEvents:
    """`parts` are, by kind, the number of its first event and its table, which may be shared by all kinds."""
    count = len(times)
    order = time_order(times, seqs)
    as_they_came = order is None
    if order is None:
        order = np.arange(count)
    reasons: dict[int, str] = {}
    runs = np.ones(count, np.bool_)
    tables: list[pa.Table] = []
    for k, (name, (first, table)) in enumerate(zip(names, parts, strict=True)):
        mine: NDArray[np.bool_] | None = None
        if table is None:
            tables.append(pa.table({}))
            continue
        chosen = table.select([_named(table, field) for field in dict.fromkeys(fields[name])])
        tables.append(chosen)
        for taken in chosen.column_names:
            nulls = _nulls(one(chosen[taken]))
            if nulls is not None:
                if shared:
                    mine = kinds == k if mine is None else mine
                    nulls = nulls & mine
                for number in first + np.flatnonzero(nulls):
                    reasons.setdefault(int(number), f"field {taken!r} is null")
                    runs[number] = False
    if reasons:
        order = order[runs[order]]
    kind_of = kinds if as_they_came and not reasons else kinds[order]
    found = []
    starts = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.bincount(kind_of, minlength=len(names)), out=starts[1:])
    place_of, by_kind = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    grouping.part_kinds(kind_of, order, starts[:-1].copy(), starts, place_of, by_kind)
    for k, (table, (first, _)) in enumerate(zip(tables, parts, strict=True)):
        numbers = by_kind[starts[k] : starts[k + 1]]
        found.append(KindEvents(numbers, numbers - first if first else numbers, table))
    return EpochEvents(count, found, order, kind_of, place_of, reasons)


def time_order(times: Longs, seqs: Longs | None) -> Longs | None:
    """The rows in the order of (time, seq, row); None where they came so."""
    if grouping.in_order(times, np.empty(0, np.int64) if seqs is None else seqs):
        return None
    return np.argsort(times, kind="stable") if seqs is None else np.lexsort((seqs, times))


def one(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _plain(column: pa.Array) -> list[Any]:
    """Values as user code sees them: timestamps and dates as numbers, also in lists."""
    type_ = column.type
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_)
    inner = type_.value_type if is_list else type_
    for step in _steps(inner):
        column = column.cast(pa.large_list(step) if is_list else step)
    found: list[Any] = column.to_pylist()
    return found


def _steps(type_: pa.DataType) -> list[pa.DataType]:
    if pa.types.is_timestamp(type_):
        return [pa.timestamp("us", tz=type_.tz), pa.int64()]
    return [pa.int32()] if pa.types.is_date32(type_) else []


def _nulls(column: pa.Array) -> NDArray[np.bool_] | None:
    """Which rows are null or, in a list, hold one."""
    nulls = np.asarray(column.is_null()) if column.null_count else None
    if (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)) and column.values.null_count:
        inner = np.concatenate([[0], np.cumsum(np.asarray(column.values.is_null()))])
        offsets = views.offsets_of(column, pa.types.is_large_list(column.type))
        within = inner[offsets[1:]] > inner[offsets[:-1]]
        nulls = within if nulls is None else nulls | within
    return nulls


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    return table[_named(table, name)]


def _named(table: pa.Table, name: str) -> str:
    if name not in table.column_names:
        raise WrongColumn(
            f"the events have no column {name!r}",
            hint=f"they have {', '.join(table.column_names)}",
            column=name,
            available=table.column_names,
        )
    return name


def _longs(table: pa.Table, name: str, is_time: bool) -> Longs:
    column = one(_column(table, name))
    if not views.is_long(column.type):
        raise WrongType(
            f"column {name!r} orders the events: it is a timestamp or a long, not {column.type}",
            column=name,
            expected="timestamp or long",
            actual=str(column.type),
        )
    if column.null_count:
        what = "time" if is_time else "seq"
        raise NullTime(f"{column.null_count} events have no {what}", column=name, rows=column.null_count)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz))
    return views.plain(views.longs(column))


def _joined(parts: list[Longs]) -> Longs:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _unknown(kind: str | None, names: list[str]) -> UnknownKind:
    return UnknownKind(
        f"an event is of kind {kind!r}", hint=f"the kinds are {', '.join(names)}", kind=kind, known=names
    )
