"""What a container holds of a join."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millpond.container.holdings.base import Means
from millpond.container.holdings.firing import FiringHolding, exists_otherwise
from millpond.errors import BadMessage, BadType
from millpond.schema import check_key_types, format_ddl
from millpond.stores.windows.firing import FiringStore
from millpond.stores.windows.intervals import IntervalPairs
from millpond.stores.windows.join_shape import STAGED_TIME, JoinShape
from millpond.stores.windows.pair_windows import PairWindows
from millpond.wire.joins import JoinSpec
from millpond.wire.specs import Resident, Spec
from millpond.wire.windows import WindowWork

WINDOWS = ("tumbling", "sliding")
"""The kinds of windows that both sides have in common, whatever rows come."""


class JoinHolding(FiringHolding[FiringStore]):
    """One join's slices in this container."""

    def __init__(self, resident: Resident, pond_slices: int, means: Means) -> None:
        super().__init__(resident, pond_slices, means)
        assert isinstance(resident.spec, JoinSpec)
        self._shape = JoinShape(resident.spec)

    @staticmethod
    def opened(
        spec: JoinSpec, existing: JoinSpec | None, others: Sequence[Spec], owners: Sequence[int]
    ) -> JoinSpec:
        if existing is None:
            _check_spec(spec)
        elif spec != existing:
            raise exists_otherwise(spec.name, "join", described(existing), described(spec))
        return spec

    def staged(self, names: Sequence[str]) -> pa.Schema:
        return self._shape.staged[self._shape.side_of(names)]

    def columns_of(self, names: Sequence[str], work: WindowWork) -> pa.Schema:
        # An epoch that brings this container no rows has no columns: either side's will do.
        return self.staged(names) if names else self._shape.staged["left"]

    @property
    def keys(self) -> pa.Schema:
        return self._shape.keys

    def new_store(self) -> FiringStore:
        kind = PairWindows if self._shape.panes is not None else IntervalPairs
        return kind(self._shape, self.new_rows, self.new_outputs())


def described(spec: JoinSpec) -> str:
    if spec.between is not None:
        how = f"between=({spec.between.low}, {spec.between.high})"
    else:
        how = f"window={spec.window}"
    return f"key={spec.key!r}, left={spec.left!r}, right={spec.right!r}, {how}"


def _check_spec(spec: JoinSpec) -> None:
    """A spec that containers could not read must never get into the journal."""
    if (spec.window is None) == (spec.between is None):
        raise BadMessage(f"join {spec.name!r} has a window, or an interval")
    if spec.window is not None and spec.window.kind not in WINDOWS:
        raise BadMessage(f"join {spec.name!r} has windows of another kind: {spec.window}")
    shape = JoinShape(spec)
    check_key_types(shape.keys)
    forms = (spec.key, shape.keys), (spec.left, shape.values["left"]), (spec.right, shape.values["right"])
    if any(ddl and format_ddl(schema) != ddl for ddl, schema in forms):
        raise BadMessage(f"the types of join {spec.name!r} are not in their canonical form")
    names = [*shape.results("").names, *STAGED_TIME.values()]
    for name in names:
        if names.count(name) > 1:
            raise BadType(
                f"the results of join {spec.name!r} would have two columns {name!r}",
                hint="give one of them another name: value= of left() and right() says which columns of the rows they are",
                ddl=name,
            )
