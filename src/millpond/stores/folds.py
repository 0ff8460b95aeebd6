"""Update rules that fold: the value at each version made from all updates up to it.

A slice that folds holds each value column twice: what the update brought, and what the rule made of it.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.rules import UpdateRule
from millpond.errors import BadRule
from millpond.kernels import folding
from millpond.stores import views
from millpond.stores.cells import Column, Layout
from millpond.stores.heaps import Heap
from millpond.stores.userrules import UserRule, fold_rule, row_type


def stored_schema(values: pa.Schema, update: UpdateRule) -> pa.Schema:
    """What a slice holds of each version: the values, and under a rule that folds what was made of them."""
    if not update.folds:
        return values
    return pa.schema([*values, *(field.with_name(f"folded {field.name}") for field in values)])


def check_addable(values: pa.Schema) -> None:
    for field in values:
        if not (_is_number(field.type) or _is_vector(field.type)):
            raise BadRule(
                f"add() adds longs and doubles; column {field.name!r} is {field.type}",
                hint="hold it as long or double, or as an array of these",
                rule="add",
            )


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_int64(type_) or views.is_double(type_))


def _is_vector(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) and _is_number(type_.value_type))


class Fold:
    """How the slices of one State fold. `failures` counts updates on which a user's rule failed: they change nothing."""

    def __init__(self, update: UpdateRule, values: pa.Schema, layout: Layout, span: int) -> None:
        count = len(values)
        self._pairs = list(zip(layout.columns[:count], layout.columns[count:], strict=True))
        self._reference = layout.reference
        self._row = row_type(values.names)
        self._span = span
        self._rule: UserRule | None = None
        self.failures = 0
        if update.code is not None:
            self._rule = fold_rule(update.code, values, layout)
        else:
            check_addable(values)

    def plan(
        self,
        ids: NDArray[np.int64],
        times: NDArray[np.int64],
        changed: NDArray[np.int64],
        entries: NDArray[np.int64],
        cells: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """What to fold anew after an insert of these times under these entries."""
        touched = np.empty(len(ids), np.int64)
        touched = touched[: folding.mark(ids, times, changed, touched)]
        first = np.empty(len(touched), np.int64)
        size = folding.plan_size(touched, changed, entries, cells, first)
        positions, step = np.empty(size, np.int64), np.empty(size, np.uint8)
        folding.plan(touched, first, entries, cells, self._span, positions, step)
        return positions, step

    def run(
        self,
        cells: NDArray[np.int64],
        heaps: MutableMapping[int, Heap],
        positions: NDArray[np.int64],
        step: NDArray[np.uint8],
    ) -> None:
        if self._rule is None:
            self._add(cells, heaps, positions, step)
        elif self._rule.kernel is None:
            self._interpret(self._rule, cells, heaps, positions, step)
        else:
            self.failures += self._rule.kernel(cells, cells.view(np.float64), positions, step)

    def _add(
        self,
        cells: NDArray[np.int64],
        heaps: MutableMapping[int, Heap],
        positions: NDArray[np.int64],
        step: NDArray[np.uint8],
    ) -> None:
        sums: dict[int, pa.Array] = {}
        refs = cells[positions, self._reference] if heaps else positions
        for number, (update, folded) in enumerate(self._pairs):
            if update.kind == "long":
                folding.add_longs(cells, update.cell, folded.cell, positions, step)
            elif update.kind == "double":
                doubles = cells.view(np.float64)
                narrow = pa.types.is_float32(update.field.type)
                folding.add_doubles(doubles, update.cell, folded.cell, narrow, positions, step)
            else:
                to = number + len(self._pairs)
                sums[to] = _add_vectors(heaps[number].take(refs), heaps[to].take(refs), step)
        self._renew(cells, heaps, positions, step, sums)

    def _renew(
        self,
        cells: NDArray[np.int64],
        heaps: MutableMapping[int, Heap],
        positions: NDArray[np.int64],
        step: NDArray[np.uint8],
        folded: dict[int, pa.Array],
    ) -> None:
        """New heap rows for what was folded: the old ones may be shared with a frozen copy."""
        if not heaps:
            return
        changed = np.flatnonzero(step != folding.STANDS)
        refs = cells[positions[changed], self._reference]
        rows = next(iter(heaps.values())).rows
        for number, heap in heaps.items():
            heap.append(folded[number].take(pa.array(changed)) if number in folded else heap.take(refs))
        cells[positions[changed], self._reference] = np.arange(rows, rows + len(changed))

    def _interpret(
        self,
        rule: UserRule,
        cells: NDArray[np.int64],
        heaps: MutableMapping[int, Heap],
        positions: NDArray[np.int64],
        step: NDArray[np.uint8],
    ) -> None:
        """Row by row. An update on which the rule fails leaves the value as it was."""
        refs = cells[positions, self._reference] if heaps else positions
        count = len(self._pairs)
        updates = [
            _read(update, cells, heaps.get(n), positions, refs) for n, (update, _) in enumerate(self._pairs)
        ]
        before = [
            _read(folded, cells, heaps.get(n + count), positions, refs)
            for n, (_, folded) in enumerate(self._pairs)
        ]
        made: list[list[Any]] = [[] for _ in self._pairs]
        for i, kind in enumerate(step.tolist()):
            new = [column[i] for column in updates]
            if kind == folding.STANDS:
                result = [column[i] for column in before]
            elif kind == folding.FIRST:
                result = new
            else:
                old = [column[i - 1] for column in made]
                result = self._apply(rule, old, new)
            for column, value in zip(made, result, strict=True):
                column.append(value)
        folded_heaps = {}
        for n, (_, folded) in enumerate(self._pairs):
            if folded.kind == "heap":
                folded_heaps[n + count] = pa.array(made[n], folded.field.type)
            elif folded.kind == "double":
                cells.view(np.float64)[positions, folded.cell] = made[n]
            else:
                cells[positions, folded.cell] = made[n]
        self._renew(cells, heaps, positions, step, folded_heaps)

    def _apply(self, rule: UserRule, old: list[Any], new: list[Any]) -> list[Any]:
        try:
            # Lists and dicts may be written to by the rule.
            found = rule.function(self._row(*copy.deepcopy(old)), self._row(*copy.deepcopy(new)))
            found = [found] if len(self._pairs) == 1 else list(found)
            return [_fitting(value, folded) for value, (_, folded) in zip(found, self._pairs, strict=True)]
        except Exception:  # noqa: BLE001 - user code; the epoch is decided, and must come to its end
            self.failures += 1
            return old


def _add_vectors(updates: pa.Array, folded: pa.Array, step: NDArray[np.uint8]) -> pa.Array:
    """The folded column: running sums of vectors. Where nothing stands yet the folded value is null, and empty."""
    items = updates.type.value_type
    read = views.longs if pa.types.is_int64(items) else views.floats
    offsets = np.empty(len(step) + 1, np.int64)
    of, to = (views.offsets_of(array, large=False) for array in (updates, folded))
    size = folding.vector_sizes(of, to, step, offsets)
    sums = np.empty(size, items.to_pandas_dtype())
    folding.add_vectors(of, read(updates.values), to, read(folded.values), step, offsets, sums)
    return pa.ListArray.from_arrays(pa.array(views.narrow_offsets(offsets)), pa.array(sums)).cast(
        updates.type
    )


def _read(
    column: Column,
    cells: NDArray[np.int64],
    heap: Heap | None,
    positions: NDArray[np.int64],
    refs: NDArray[np.int64],
) -> list[Any]:
    """A column as a rule sees it."""
    found: list[Any]
    if heap is not None:
        found = heap.take(refs).to_pylist()
    elif column.kind == "double":
        found = cells.view(np.float64)[positions, column.cell].tolist()
    else:
        found = cells[positions, column.cell].tolist()
        if pa.types.is_boolean(column.field.type):
            found = [value != 0 for value in found]
    return found


def _fitting(value: Any, column: Column) -> Any:
    """The value, if the column can hold it; else it raises."""
    if value is None:
        raise ValueError("a rule must give a value")
    type_ = column.field.type
    if column.kind == "heap":
        return pa.scalar(value, type_).as_py()
    if column.kind == "double":
        return float(np.float32(value)) if pa.types.is_float32(type_) else float(value)
    if pa.types.is_boolean(type_):
        return int(bool(value))
    whole = int(value)
    if not -(1 << (type_.bit_width - 1)) <= whole < 1 << (type_.bit_width - 1):
        raise ValueError("the value does not fit its column")
    return whole
