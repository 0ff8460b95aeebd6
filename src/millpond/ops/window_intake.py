"""How rows go into a window: which are late, and what is made of the others before they are sent.

Where the aggregates can be kept as cells, rows become cells here, in the worker: a row for each key and pane, or for each run
of a key's rows that belong to one session.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from millpond.client.client import Client
from millpond.client.receipts import receipt_of
from millpond.code.capture import OF_THE_MACHINE, OF_USER_CODE, Code, described
from millpond.errors import (
    BadOption,
    CodeTookTooLong,
    LateRows,
    RuleFailed,
    WrongColumn,
    WrongType,
    updater_finished,
)
from millpond.kernels import control
from millpond.kernels import windows as kernel
from millpond.ops.code_limit import limited
from millpond.ops.columns import column_of, keys_of, times_of, values_of
from millpond.ops.intake import Part
from millpond.stores import views
from millpond.stores.key_index import KeyIndex
from millpond.stores.keys import Keys
from millpond.stores.rows import digest_rows
from millpond.stores.windows.rowwise import Wanted, row_function
from millpond.stores.windows.shape import VALUE, WindowShape, parameters
from millpond.stores.windows.sifting import sifted
from millpond.times import TIME_MAX, TIME_MIN, Progress, TimeKind, delay_for, format_time
from millpond.wire.base import KindOfTime
from millpond.wire.epochs import EpochPlan, Receipt
from millpond.wire.windows import WindowSpec

Longs = npt.NDArray[np.int64]
RUNS_SHARE = 0.25
"""Of rows: if there are more runs, it is worth while to have rows in the order of time."""


class Timely(NamedTuple):
    """Rows of which something may still fire, with where each one's own window or session begins and ends."""

    keys: Keys
    times: Longs
    starts: Longs
    ends: Longs
    values: list[pa.Array]
    cuts: pa.Array | None

    def take(self, rows: Longs) -> Timely:
        chosen = pa.array(rows)
        return Timely(
            self.keys.take(rows),
            self.times[rows],
            self.starts[rows],
            self.ends[rows],
            [column.take(chosen) for column in self.values],
            None if self.cuts is None else self.cuts.take(chosen),
        )


class WindowIntake:
    """A `Stager`. Plain data that tasks can carry: what user code it has, it has as text."""

    def __init__(
        self,
        spec: WindowSpec,
        name: str,
        key: tuple[str, ...],
        at: str,
        value: tuple[str, ...],
        delay: Any,
        late: str,
    ) -> None:
        self.resident = spec.name
        self.name = name
        self.at = at
        self._spec = spec
        self._key = key
        self._value = value
        self._delay = delay
        self._late = late
        self._made: WindowShape | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": None}

    @property
    def shape(self) -> WindowShape:
        if self._made is None:
            spec = self._spec
            assert spec.value is not None
            self._made = WindowShape(spec.key, spec.value, spec.window, spec.aggregates, spec.pattern)
        return self._made

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys((*self._key, self.at, *self._value)))

    def delay(self, kind: KindOfTime) -> int:
        return delay_for(kind, self._delay) if kind else 0

    def stage(self, client: Client, table: pa.Table, plan: EpochPlan, part: Part) -> Receipt:
        """An epoch is known by all rows that came, late or not, whatever was made of them."""
        times, kind = times_of(table, self.at, plan.time_kind)
        keys = keys_of(table, self._key, self.shape.keys) if self.shape.is_keyed else _same_key(len(table))
        values = values_of(table, self._value, self.shape.values)
        source = digest_rows(keys, times, values)
        if plan.late_below == math.inf and len(times) and not plan.replayed:
            raise updater_finished(self.resident, self.name)
        rows, late = self._timely(keys, views.plain(times), values, plan, kind)
        attempt = client.runtime.bits(62)
        digest, count = 0, 0
        if not plan.replayed:
            message = part.message(self.resident, self.name, attempt)
            keys, longs, columns = self._made_of(rows)
            count = len(keys)
            digest = client.stage(message, self.shape.staged, keys, longs, columns, plan.placement)
        receipt = receipt_of(part.partition, attempt, count, late, digest, times)
        return replace(receipt, source=source)

    # Which rows are late

    def late_flags(self, table: pa.Table, plan: EpochPlan) -> npt.NDArray[np.bool_]:
        """Of all rows of a table, which are late in an epoch."""
        times, _ = times_of(table, self.at, plan.time_kind)
        values = values_of(table, self._value, self.shape.values)
        _, ends = self._spans(views.plain(times), values)
        return self._is_late(ends, plan.late_below)

    def _timely(
        self, keys: Keys, times: Longs, values: list[pa.Array], plan: EpochPlan, kind: TimeKind
    ) -> tuple[Timely, int]:
        window = self._spec.window
        if window.kind == "assigned":
            of_row, starts, ends = self._assigned(times)
            late_rows = self._late_assigned(len(times), of_row, ends, plan.late_below)
            fresh = np.flatnonzero(~self._is_late(ends, plan.late_below))
            rows = Timely(keys, times, times, times, values, None).take(of_row[fresh])
            self._check_late(late_rows, len(times), plan, kind)
            return rows._replace(starts=starts[fresh], ends=ends[fresh]), late_rows
        starts, ends = self._spans(times, values)
        cuts = None
        if window.ends_when is not None:
            cuts = pa.array(_each_row(window.ends_when, self.shape.values, values, len(times), "flag"))
        rows = Timely(keys, times, starts, ends, values, cuts)
        is_late = self._is_late(ends, plan.late_below)
        late = int(np.count_nonzero(is_late))
        if not late:
            return rows, 0
        self._check_late(late, len(times), plan, kind)
        return rows.take(np.flatnonzero(~is_late)), late

    def _check_late(self, late: int, rows: int, plan: EpochPlan, kind: TimeKind) -> None:
        if late and self._late == "error" and not plan.replayed:
            raise LateRows(
                f"{late:,} of {rows:,} rows belong to windows that ended before the watermark"
                f" {format_time(plan.late_below, kind)} of {self.name!r}; nothing was changed",
                hint='late="drop" counts and drops such rows; a longer delay waits for them',
                rows=late,
                watermark=plan.late_below,
            )

    def _is_late(self, ends: Longs, late_below: Progress) -> npt.NDArray[np.bool_]:
        """Rows whose last window is over. One that time does not end takes all."""
        if self._spec.window.kind in ("counted", "everything") or late_below == -math.inf:
            return np.zeros(len(ends), np.bool_)
        bound = late_below - self._spec.lateness
        return ends <= bound if bound < math.inf else np.ones(len(ends), np.bool_)

    def _late_assigned(self, rows: int, of_row: Longs, ends: Longs, late_below: Progress) -> int:
        """Rows that have windows, all of which are over."""
        is_late = self._is_late(ends, late_below)
        some, timely = np.zeros(rows, np.bool_), np.zeros(rows, np.bool_)
        some[of_row] = True
        timely[of_row[~is_late]] = True
        return int(np.count_nonzero(some & ~timely))

    def _spans(self, times: Longs, values: list[pa.Array]) -> tuple[Longs, Longs]:
        """Where the pane or session of each row begins, and where its last window ends."""
        window = self._spec.window
        if window.kind in ("tumbling", "sliding"):
            starts = np.empty(len(times), np.int64)
            kernel.pane_starts(times, self.shape.pane, window.offset, starts)
            ends = np.empty(len(times), np.int64)
            kernel.last_ends(times, window.size, window.slide or window.size, window.offset, ends)
            return starts, ends
        if window.kind == "session":
            return times, self._session_ends(times, values)
        if window.kind == "assigned":
            of_row, _, ends = self._assigned(times)
            last = np.full(len(times), TIME_MAX)
            if len(of_row):
                newest = np.full(len(times), TIME_MIN)
                np.maximum.at(newest, of_row, ends)
                last[of_row] = newest[of_row]
            return times, last
        return np.full(len(times), TIME_MIN), np.full(len(times), TIME_MAX)

    def _session_ends(self, times: Longs, values: list[pa.Array]) -> Longs:
        window = self._spec.window
        if window.gap is None and not window.gap_column:
            return _later(times, window.size)
        if window.gap_column:
            column = values[self.shape.values.names.index(window.gap_column)]
            if not pa.types.is_integer(column.type) or column.null_count:
                raise WrongType(
                    f"the gap of sessions of {self.resident!r} is in column {window.gap_column!r}: it must be a"
                    " whole number of units of time, in every row",
                    hint="cast it to long: microseconds where times are timestamps",
                    column=window.gap_column,
                    expected="long",
                    actual=str(column.type),
                )
            gaps = views.longs(column)
        else:
            assert window.gap is not None
            gaps = _each_row(window.gap, self.shape.values, values, len(times), "long")
        if len(gaps) and int(gaps.min()) < 1:
            raise BadOption(
                f"a row of {self.resident!r} has a gap of {int(gaps.min())}",
                hint="gaps are positive",
                option="gap",
            )
        return np.where(times > TIME_MAX - gaps, TIME_MAX, times + gaps)

    def _assigned(self, times: Longs) -> tuple[Longs, Longs, Longs]:
        """Windows of the user's own: of each the row, the beginning and the end."""
        code = self._spec.window.assign
        assert code is not None
        assign = code.load()
        with limited(f"the windows {code.name!r}"):
            return self._assigned_by(assign, code, times)

    def _assigned_by(
        self, assign: Callable[[int], Any], code: Code, times: Longs
    ) -> tuple[Longs, Longs, Longs]:
        distinct, which = np.unique(times, return_inverse=True)
        spans: list[tuple[int, int, int]] = []
        for number, time in enumerate(distinct.tolist()):
            try:
                pairs = [(_whole(start), _whole(end)) for start, end in assign(time)]
            except OF_THE_MACHINE:
                raise
            except OF_USER_CODE as error:
                raise RuleFailed(
                    f"the windows {code.name!r} failed at time {time}: {described(error)}",
                    hint="a function (time) -> [(start, end), ...] gives pairs of whole numbers",
                    rule=code.name,
                ) from None
            # A row is in a window or it is not, however often that is said.
            for start, end in dict.fromkeys(pairs):
                if not TIME_MIN <= start < end <= TIME_MAX:
                    raise RuleFailed(
                        f"{code.name!r} gave the window [{start}, {end}), which is none",
                        hint="a window ends after it starts, and both are longs",
                        rule=code.name,
                    )
                spans.append((number, start, end))
        numbers, starts, ends = np.array(spans, np.int64).reshape(-1, 3).T
        order = np.argsort(which, kind="stable")
        first = np.searchsorted(which[order], numbers)
        sizes = np.searchsorted(which[order], numbers, side="right") - first
        picked = np.repeat(np.arange(len(numbers)), sizes)
        within = np.arange(len(picked)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = order[first[picked] + within]
        # In the order in which rows came.
        back = np.argsort(rows, kind="stable")
        return rows[back], starts[picked][back], ends[picked][back]

    # What is made of them

    def _made_of(self, rows: Timely) -> tuple[Keys, list[Longs], list[pa.Array]]:
        if self.shape.layout is None:
            if self.shape.is_sifted and len(rows.times):
                rows = self._sifted(rows)
            spans = {"session": [rows.ends], "assigned": [rows.starts, rows.ends]}.get(
                self._spec.window.kind, []
            )
            cuts = [] if rows.cuts is None else [rows.cuts]
            return rows.keys, [rows.times, *spans], [*cuts, *rows.values]
        if not len(rows.times):
            cells = self.shape.layout.to_arrow(self.shape.layout.zeros(0))
            return rows.keys, [rows.starts] * len(self.shape.longs), cells
        index = KeyIndex(self.shape.key_kind, np.zeros(control.SIZE, np.int64))
        ids = index.assign(rows.keys)
        if self._spec.window.kind == "session":
            return self._runs(rows, ids, len(index))
        return self._panes(rows, ids, len(index))

    def _runs(self, rows: Timely, ids: Longs, keys: int) -> tuple[Keys, list[Longs], list[pa.Array]]:
        layout = self.shape.layout
        assert layout is not None
        first, starts, ends = np.empty((3, len(ids)), np.int64)
        groups = np.empty(len(ids), np.int64)

        def count_runs() -> int:
            return kernel.runs_of_keys(
                ids,
                rows.starts,
                rows.ends,
                self._spec.window.touching,
                np.full(keys, -1),
                first,
                starts,
                ends,
                groups,
            )

        count = count_runs()
        if count > max(2 * keys, RUNS_SHARE * len(ids)):
            # Rows of a key that go to and fro between its sessions begin a run each time.
            order = np.lexsort((rows.starts, ids))
            rows, ids = rows.take(order), ids[order]
            count = count_runs()
        cells = layout.fold(groups, count, rows.values)
        return rows.keys.take(first[:count]), [starts[:count], ends[:count]], layout.to_arrow(cells)

    def _sifted(self, rows: Timely) -> Timely:
        """Of each key and pane, rows that may be in results."""
        index = KeyIndex(self.shape.key_kind, np.zeros(control.SIZE, np.int64))
        ids = index.assign(rows.keys)
        groups, firsts = self._groups(rows, ids, len(index))
        shape = self.shape
        return rows.take(sifted(shape.values, shape.aggregates, rows.values, groups, firsts))

    def _panes(self, rows: Timely, ids: Longs, keys: int) -> tuple[Keys, list[Longs], list[pa.Array]]:
        layout = self.shape.layout
        assert layout is not None
        groups, chosen = self._groups(rows, ids, keys)
        cells = layout.fold(groups, len(chosen), rows.values)
        longs = [rows.starts[chosen]]
        if self._spec.window.kind == "assigned":
            longs.append(rows.ends[chosen])
        return rows.keys.take(chosen), longs, layout.to_arrow(cells)

    def _groups(self, rows: Timely, ids: Longs, keys: int) -> tuple[Longs, Longs]:
        """Rows by key and pane, and the first row of each; `ids` are of keys, of which there are so many."""
        is_assigned = self._spec.window.kind == "assigned"
        pairs = np.stack([rows.starts, rows.ends], axis=1) if is_assigned else None
        if pairs is not None:
            spans, panes = np.unique(pairs, axis=0, return_inverse=True)
            panes, pane_count = np.ascontiguousarray(panes.reshape(-1)), len(spans)
        else:
            lowest, highest = int(rows.starts.min()), int(rows.starts.max())
            length = max(self.shape.pane, 1)
            pane_count = (highest - lowest) // length + 1
            # The first pane of all is known by the first time, and may end sooner than others.
            if pane_count > max(len(ids), 16) or lowest == TIME_MIN:
                values, panes = np.unique(rows.starts, return_inverse=True)
                panes, pane_count = np.ascontiguousarray(panes.reshape(-1)), len(values)
            else:
                panes = (rows.starts - lowest) // length
        groups, firsts = np.empty((2, len(ids)), np.int64)
        if keys * pane_count <= max(4 * len(ids), 1 << 16):
            table = np.full(keys * pane_count, -1)
            count = kernel.dense_groups(ids, panes, pane_count, table, groups, firsts)
        else:
            pairs_index = KeyIndex("i64", np.zeros(control.SIZE, np.int64))
            groups = pairs_index.assign(Keys.from_longs(ids * pane_count + panes))
            count = len(pairs_index)
            firsts = np.empty(count, np.int64)
            firsts[groups[::-1]] = np.arange(len(groups))[::-1]
        return groups, firsts[:count]


def _whole(value: Any) -> int:
    number = int(value)
    if number != value:
        raise ValueError(f"{value!r} is no whole number")
    return number


def _same_key(rows: int) -> Keys:
    return Keys.from_longs(np.ones(rows, np.int64))


def _later(times: Longs, span: int) -> Longs:
    """So much later; the end of time where that is beyond it."""
    if len(times) and int(times.max()) > TIME_MAX - span:
        return np.where(times > TIME_MAX - span, TIME_MAX, times + span)
    return times + span


def _each_row(
    code: Code, schema: pa.Schema, values: list[pa.Array], rows: int, wanted: Wanted
) -> npt.NDArray[Any]:
    """What a function of value columns gives for each row."""
    columns = [values[schema.names.index(name)] for name in parameters(code)]
    try:
        function = row_function(code, schema, wanted)
        with limited(f"{code.name!r}, which is called for each row,"):
            return function(columns, rows)
    except CodeTookTooLong:
        raise
    except OF_THE_MACHINE:
        raise
    except OF_USER_CODE as error:
        raise RuleFailed(
            f"{code.name!r} failed: {described(error)}",
            hint="it is called with the value columns of each row, of which any may be null",
            rule=code.name,
        ) from None


def columns_of(value: Any, wanted: list[str]) -> tuple[str, ...]:
    """The rows' columns that are a window's value columns: by name, or one for each in their order."""
    if value is None:
        return tuple(wanted)
    names = [value] if isinstance(value, str) else list(value)
    if set(wanted) <= set(names):
        return tuple(wanted)
    if len(names) != len(wanted) or not all(isinstance(name, str) for name in names):
        raise BadOption(
            f"value={value!r} does not name the columns {', '.join(wanted)}",
            hint=f"for example value={wanted if len(wanted) != 1 else wanted[0]!r}",
            option="value",
        )
    return tuple(names)


def _example(schema: pa.Schema) -> str:
    """A column that one might mean."""
    numbers: list[str] = [
        field.name for field in schema if views.is_long(field.type) or views.is_double(field.type)
    ]
    return numbers[-1] if numbers else "price"


def check_teachable(schema: pa.Schema, key: Sequence[str], keys: pa.Schema, at: str) -> None:
    """Rows that could not be taken in tell no types: those would stay, whatever comes after."""
    no_rows = schema.empty_table()
    if key:
        keys_of(no_rows, key, keys)
    times_of(no_rows, at, "")


def inferred(schema: pa.Schema, columns: Mapping[str, str]) -> pa.Schema:
    """The types of a window's value columns, by the rows' columns that they are."""
    fields = []
    for name, column in columns.items():
        found = schema.get_all_field_indices(column)
        if len(found) != 1:
            if column == VALUE:
                raise WrongColumn(
                    f"an aggregate names no column, and the rows have none that is called {VALUE!r}",
                    hint=f"name it, as in mp.total({_example(schema)!r}); the rows have: {', '.join(schema.names)}",
                    column=column,
                    available=schema.names[:50],
                )
            column_of(schema.empty_table(), column)
        type_ = schema.field(found[0]).type
        if pa.types.is_timestamp(type_):
            type_ = pa.timestamp("us", tz="UTC") if type_.tz else pa.timestamp("us")
        fields.append(pa.field(name, type_))
    return pa.schema(fields)
