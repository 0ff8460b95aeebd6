"""Runs calls of a task by its kernel: columns in, columns out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels.grown import contents, new_grown
from millpond.programs.call_columns import column_type
from millpond.programs.calls import HEAD_COLUMNS, Heads, Longs, calls_of, calls_schema
from millpond.programs.graph import REJECTS, RETURNS
from millpond.programs.machine.kernel import Drive
from millpond.programs.machine.plan import CONTROL_SIZE, LANES, LENGTH, ROOM, STOP, WRONG, Out, Plan
from millpond.programs.values import inner_of
from millpond.stores import views

_DTYPES: dict[str, Any] = {"long": np.int64, "double": np.float64, "boolean": np.uint8}
_GROWN_FIRST = 256


class NotCompiled(Exception):
    """The kernel has not done it: what it did must be taken back, and the interpreter has to run."""


def new_control(lanes: int) -> Longs:
    """What a kernel looks at while it runs."""
    control = np.zeros(CONTROL_SIZE, np.int64)
    control[LANES] = lanes
    return control


def has_nulls(calls: pa.RecordBatch) -> bool:
    """Compiled code knows no None."""
    for column in calls.columns[HEAD_COLUMNS:]:
        if column.null_count:
            return True
        is_list = pa.types.is_list(column.type)
        if is_list and column.values.null_count:
            return True
    return False


class Columns:
    """The inputs of calls, as kernels take them. `kept` are arrays that must stay where they are."""

    def __init__(self, calls: pa.RecordBatch, plan: Plan) -> None:
        self.params: list[int] = []
        self.kept: list[Any] = [calls]
        for n, kind in enumerate(plan.inputs):
            self._add(
                calls.column(HEAD_COLUMNS + n), inner_of(kind) if kind.startswith("collection") else kind
            )

    def _add(self, column: pa.Array, kind: str) -> None:
        if kind in _DTYPES:
            self._pass(_numbers(column, kind))
            return
        self._pass(views.offsets_of(column, large=False))
        nested = [column.keys, column.items] if kind == "vector" else [column.values]
        kinds = ["long", "double"] if kind == "vector" else [inner_of(kind)]
        for items, inner in zip(nested, kinds, strict=True):
            self._pass(_numbers(items, inner))
        self.params.append(len(nested[0]))

    def _pass(self, array: NDArray[Any]) -> None:
        array = np.ascontiguousarray(array)
        self.kept.append(array)
        self.params.append(address_of(array))


def _numbers(column: pa.Array, kind: str) -> NDArray[Any]:
    if kind == "boolean":
        return views.integers(column).view(np.uint8)
    return views.longs(column) if kind == "long" else views.floats(column)


def address_of(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class Outputs:
    """Room for what so many calls hand on."""

    def __init__(self, outs: Sequence[Out], room: int) -> None:
        self.params: list[int] = []
        self.grown: list[Any] = []
        self.counts = np.zeros(len(outs), np.int64)
        self._outs = outs
        self._columns: list[list[tuple[NDArray[Any], Any]]] = []
        for out in outs:
            columns: list[tuple[NDArray[Any], Any]] = []
            for kind in out.kinds:
                grown = None
                if kind in _DTYPES:
                    array = np.empty(room, _DTYPES[kind])
                else:
                    array = np.zeros(room + 1, np.int64)
                    grown = new_grown(np.empty(_GROWN_FIRST, np.int64), np.empty(_GROWN_FIRST, np.float64))
                    self.grown.append(grown)
                columns.append((array, grown))
                self.params.append(address_of(array))
            self._columns.append(columns)

    def of(self, place: int) -> list[pa.Array]:
        """The columns of what goes to one task."""
        count = int(self.counts[place])
        made = zip(self._outs[place].kinds, self._columns[place], strict=True)
        return [_column(kind, array, grown, count) for kind, (array, grown) in made]


def _column(kind: str, array: NDArray[Any], grown: Any, count: int) -> pa.Array:
    if grown is None:
        numbers = array[:count]
        return pa.array(numbers.astype(np.bool_) if kind == "boolean" else numbers)
    offsets = array[: count + 1]
    if offsets[-1] > np.iinfo(np.int32).max:
        raise NotCompiled
    longs, doubles, used = contents(grown)
    places = pa.array(offsets.astype(np.int32))
    if kind == "vector":
        return pa.MapArray.from_arrays(places, pa.array(longs[:used]), pa.array(doubles[:used]))
    return pa.ListArray.from_arrays(
        places, pa.array(longs[:used] if kind == "array<long>" else doubles[:used])
    )


def run_kernel(
    drive: Drive,
    plan: Plan,
    returns: str,
    state: Any,
    calls: pa.RecordBatch,
    heads: Heads,
    columns: Columns,
    order: Longs,
    control: Longs,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Runs calls in that order (of those that are gathered, each with its parts): what goes to the next tasks.

    NotCompiled if the interpreter has to; what has been done to the state is there then. The caller has the slice's lock.
    """
    lanes = int(control[LANES])
    count = len(order) // lanes
    outputs = Outputs(plan.outs, count)
    control[WRONG], control[LENGTH], control[ROOM] = 0, len(calls), count
    following = np.empty(count, np.int32)
    params = np.array([*columns.params, *outputs.params, 0], np.int64)
    done = drive(state, order, 0, count, control, outputs.counts, following, params, *outputs.grown)
    if done < count or control[STOP]:
        raise NotCompiled
    # It has come when the last part has.
    which = order[lanes - 1 :: lanes]
    for place, out in enumerate(plan.outs):
        if not outputs.counts[place]:
            continue
        own = which[following == out.following] if len(plan.outs) > 1 else which
        made = heads_for(heads, own, out.following)
        yield out.following, _batch(plan, out, made, outputs.of(place), returns)


def heads_for(heads: Heads, which: Longs, following: int) -> Heads:
    """Of these calls, when they have gone through one more task."""
    return Heads(
        heads.rows[which],
        heads.entries[which],
        np.full(len(which), following, np.int32),
        heads.steps[which] + np.int32(1),
        heads.at[which],
    )


def _batch(plan: Plan, out: Out, heads: Heads, columns: list[pa.Array], returns: str) -> pa.RecordBatch:
    if out.following == REJECTS:
        reasons = pa.array(plan.reasons, pa.string()).take(columns[0])
        return calls_of(heads, [reasons], calls_schema(("string",)))
    if out.following == RETURNS:
        if not out.kinds:
            columns = [pa.nulls(len(heads.rows), column_type(returns))]
        return calls_of(heads, columns, calls_schema((returns,)))
    return calls_of(heads, columns, calls_schema(out.kinds))
