"""Rows and questions of one batch for several slices of a State at once: one call of a kernel, where slices have few rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from millpond.kernels import sliced
from millpond.kernels.slot_hashing import SECRET
from millpond.stores import views
from millpond.stores.answers import packed
from millpond.stores.arena import MOVES, MOVES_PER_ROW, SMALLEST_TIME
from millpond.stores.cells import in_place_array
from millpond.stores.keys import Keys
from millpond.stores.ruleset import Ruleset
from millpond.stores.versioned import VersionedSlice, clamped

_UNBOUNDED: NDArray[np.int64] = np.empty(0, np.int64)


Share = tuple[VersionedSlice, int, int]
"""The rows of a batch, from start to stop, that are for one slice. There is one at least."""


class Updates:
    """A batch of rows. Not for rules that fold, or that look at values when they compact (`takes`)."""

    def __init__(
        self,
        rules: Ruleset,
        keys: Keys,
        times: NDArray[np.int64],
        values: Sequence[pa.Array],
        keep_from: int | None,
    ) -> None:
        rules.layout.check(values, len(keys), len(rules.values))
        self._rules = rules
        self._keys = keys
        self._times = views.plain(times)
        self._values = values
        self._keep_from = keep_from
        self._has_nulls = rules.layout.has_nulls(values)
        self._ids = np.empty(len(keys), np.int64)
        # As arena rows, without and with a null mask; made when they are needed.
        self._rows: dict[bool, NDArray[np.int64]] = {}
        self.rows_of(self._has_nulls)

    @staticmethod
    def takes(rules: Ruleset) -> bool:
        return (
            rules.fold is None and not rules.by_mask and all(c.kind != "heap" for c in rules.layout.columns)
        )

    def insert(self, shares: Sequence[Share]) -> None:
        """As `VersionedSlice.insert` does, of each its share. Where one fails, some may have theirs and some not."""
        alike: dict[bool, list[Share]] = {}
        for share in shares:
            alike.setdefault(share[0].masked, []).append(share)
        for masked, together in alike.items():
            if self._has_nulls and not masked:
                for share in together:
                    self._insert_apart(share)
            else:
                self._insert_together(together, self.rows_of(masked))

    def rows_of(self, masked: bool) -> NDArray[np.int64]:
        rows = self._rows.get(masked)
        if rows is None:
            rows = self._rows[masked] = self._rules.layout.rows(self._times, self._values, 0, masked)
        return rows

    def _insert_together(self, shares: Sequence[Share], rows: NDArray[np.int64]) -> None:
        slices, bounds = _described(shares)
        outcomes = np.empty((len(shares), 3), np.int64)
        since = clamped(self._keep_from)
        alive_from = shares[0][0].alive_from(since)
        keys, replaces = self._keys, self._rules.update.replaces
        sliced.insert_of_slices(
            slices, bounds, keys.longs, keys.offsets, keys.data, SECRET, rows, replaces, since, alive_from,
            MOVES_PER_ROW, MOVES, self._ids, outcomes,
        )  # fmt: skip
        for share, (done, new, smallest) in zip(shares, outcomes.tolist(), strict=True):
            store, start, stop = share
            if done < 0:
                self._insert_apart(share)
            elif done < stop - start:
                store.go_on(self._ids[start:stop], rows[start:stop], done, since)
                store.took(new, smallest)
            else:
                store.took(new, smallest)

    def _insert_apart(self, share: Share) -> None:
        store, start, stop = share
        values = [array.slice(start, stop - start) for array in self._values]
        store.insert(self._keys.part(start, stop), self._times[start:stop], values, self._keep_from)


class Newest:
    """A batch of questions for the newest version of each key, of which `lo < time <= hi`."""

    def __init__(
        self, rules: Ruleset, keys: Keys, lo: NDArray[np.int64] | None, hi: NDArray[np.int64]
    ) -> None:
        self._keys = keys
        self._hi = views.plain(hi)
        self._lo = _UNBOUNDED if lo is None else views.plain(lo)
        if rules.span:
            born = self._hi - rules.span
            self._lo = born if lo is None else np.maximum(self._lo, born)
        self._width = rules.layout.width
        columns = rules.layout.columns
        self._types = [column.field.type for column in columns]
        self._columns = np.array([(column.cell, column.bit) for column in columns], np.int64)
        self._out = np.empty((len(columns), len(keys)), np.int64)
        self._valid = np.empty((len(columns), len(keys)), np.uint8)

    @staticmethod
    def takes(rules: Ruleset, hi: NDArray[np.int64]) -> bool:
        """Not what is folded or lies in heaps; nor near the beginning of time, where nothing can have expired."""
        return Updates.takes(rules) and (not rules.span or int(hi.min()) >= SMALLEST_TIME + rules.span)

    def ask(
        self, stores: Sequence[VersionedSlice], starts: NDArray[np.int64], stops: NDArray[np.int64]
    ) -> None:
        """Has these slices answer, each its share of the questions."""
        slices = np.array([store.address for store in stores], np.int64)
        bounds = np.column_stack((starts, stops))
        keys = self._keys
        sliced.latest_of_slices(
            slices, bounds, keys.longs, keys.offsets, keys.data, SECRET, self._lo, self._hi, self._width,
            self._columns, self._out, self._valid,
        )  # fmt: skip

    def answers(self) -> list[pa.Array]:
        """An array per column, when all slices have answered."""
        return [
            in_place_array(type_, out, *packed(valid))
            for type_, out, valid in zip(self._types, self._out, self._valid, strict=True)
        ]


def _described(shares: Sequence[Share]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    addresses = [store.address for store, _, _ in shares]
    return np.array(addresses, np.int64), np.array([share[1:] for share in shares], np.int64)
