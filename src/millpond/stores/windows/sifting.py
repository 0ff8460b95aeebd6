"""Which rows of a window may be in its results, where these are of the rows with the largest or smallest values alone.

What is not the largest of its key and pane in one batch is so in no window: it need not be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from millpond.code.windows import Aggregate
from millpond.stores import views
from millpond.stores.windows.cells import CellLayout, column_number

Longs = NDArray[np.int64]
SIFTED = ("where_largest", "largest", "smallest")


def can_sift(aggregates: Mapping[str, Aggregate]) -> bool:
    """Whether results are made of few rows, which can be told from a part of them."""
    return all(each.name in SIFTED for each in aggregates.values())


def sifted(
    schema: pa.Schema,
    aggregates: Mapping[str, Aggregate],
    values: Sequence[pa.Array],
    groups: Longs,
    firsts: Longs,
) -> Longs:
    """The rows that are needed, in their order: with the largest values of their groups, all of them where ties count, and
    one of each group in any case. `firsts` is the first row of each group.
    """
    needed = np.zeros(len(groups), np.bool_)
    for each in aggregates.values():
        column = column_number(schema, each)
        best = _best(values[column], each.name == "smallest", groups, len(firsts))
        if each.name == "where_largest":
            needed |= best
        else:
            rows = np.flatnonzero(best)
            needed[rows[np.unique(groups[rows], return_index=True)[1]]] = True
    has_some = np.zeros(len(firsts), np.bool_)
    has_some[groups[needed]] = True
    needed[firsts[~has_some]] = True
    return np.flatnonzero(needed)


def _best(items: pa.Array, lowest: bool, groups: Longs, count: int) -> NDArray[np.bool_]:
    """Which rows have the largest value of their group, or the smallest; NaN is above every number."""
    if not (views.is_long(items.type) or views.is_double(items.type)):
        # By its place among all: what is equal has the same.
        ranks = pc.rank(items, sort_keys="ascending", tiebreaker="dense").cast(pa.int64())
        items = pc.if_else(items.is_valid(), ranks, pa.scalar(None, pa.int64()))
    layout = CellLayout(
        pa.schema([("v", items.type)]), {"best": Aggregate("smallest" if lowest else "largest", "v")}
    )
    best = layout.results(layout.fold(groups, count, [items]))["best"].take(pa.array(groups))
    mine = pc.equal(items, best).fill_null(False)
    if views.is_double(items.type):
        mine = pc.or_(mine, pc.and_(pc.is_nan(items), pc.is_nan(best)).fill_null(False))
    is_best: NDArray[np.bool_] = views.longs(mine) != 0
    return is_best
