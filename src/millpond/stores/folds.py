"""Update rules that fold: the value at each version made from all updates up to it.

A slice that folds holds each value column twice: what the update brought, and what the rule made of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.code.rules import UpdateRule
from millpond.errors import BadRule
from millpond.kernels import folding
from millpond.stores import views
from millpond.stores.cells import Column, Layout, numbers
from millpond.stores.heaps import Heap
from millpond.stores.userrules import UserRule, fitting, fold_rule, row_type


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
            folded = [column.cell for _, column in self._pairs]

            def failed(i: int, _: Exception) -> None:
                self.failures += 1
                cells[positions[i], folded] = cells[positions[i - 1], folded]

            self._rule.run(cells, cells.view(np.float64), positions, step, failed=failed)

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
        updates = [_read(of, cells, heaps.get(n), positions, refs) for n, (of, _) in enumerate(self._pairs)]
        # What stands stays; what is the first of a chain is its update.
        made = [
            _read(to, cells, heaps.get(n + count), positions, refs) for n, (_, to) in enumerate(self._pairs)
        ]
        for of, to in zip(updates, made, strict=True):
            for i in np.flatnonzero(step == folding.FIRST).tolist():
                to[i] = of[i]

        def items() -> Iterator[tuple[int, list[Any]]]:
            for i in np.flatnonzero(step == folding.FOLLOWS).tolist():
                # Lists and dicts may be written to by the rule.
                old, new = copy.deepcopy(([to[i - 1] for to in made], [of[i] for of in updates]))
                yield i, [self._row(*old), self._row(*new)]

        def use(i: int, result: Any) -> None:
            values = [result] if count == 1 else list(result)
            fits = [
                fitting(value, to.field.type, to.kind)
                for value, (_, to) in zip(values, self._pairs, strict=True)
            ]
            if any(value is None for value in fits):
                raise ValueError("a rule must give a value")
            for to, value in zip(made, fits, strict=True):
                to[i] = value

        def failed(i: int, _: Exception) -> None:
            self.failures += 1
            for to in made:
                to[i] = to[i - 1]

        rule.interpret(items(), use, failed)
        folded_heaps = {}
        for n, (_, to) in enumerate(self._pairs):
            if to.kind == "heap":
                folded_heaps[n + count] = pa.array(made[n], to.field.type)
            elif to.kind == "double":
                cells.view(np.float64)[positions, to.cell] = made[n]
            else:
                cells[positions, to.cell] = made[n]
        self._renew(cells, heaps, positions, step, folded_heaps)


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
) -> Any:
    """A column as a rule sees it."""
    return numbers(column, cells, positions) if heap is None else heap.take(refs).to_pylist()
