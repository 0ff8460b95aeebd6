"""What rows and results of a join look like."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from millpond.code.windows import Aggregate
from millpond.errors import BadMessage
from millpond.schema import KEY, KeyKind, key_kind, parse_ddl
from millpond.stores.windows.shape import WINDOW_END, WINDOW_START, WindowShape, time_type
from millpond.wire.joins import SIDES, JoinSpec, Side

LEFT_TIME, RIGHT_TIME = "left_time", "right_time"
STAGED_TIME: dict[Side, str] = {"left": "_left", "right": "_right"}
"""The column of times of rows as they are sent and kept. Its name tells of which side they are."""


class JoinShape:
    """`staged` are the columns of rows as they are sent and kept, of each side."""

    def __init__(self, spec: JoinSpec) -> None:
        self.keys = parse_ddl(spec.key, "key")
        self.values = {
            side: parse_ddl(ddl, "value") if ddl else pa.schema([])
            for side, ddl in zip(SIDES, (spec.left, spec.right), strict=True)
        }
        self.key_kind: KeyKind = key_kind(self.keys)
        self.key_type: pa.DataType = pa.int64() if self.key_kind == "i64" else pa.binary()
        self.between = spec.between
        # Of a window only the panes count: what it holds is pairs.
        self.panes = (
            None if spec.window is None else WindowShape(spec.key, "", spec.window, {"": Aggregate("count")})
        )
        self.staged: dict[Side, pa.Schema] = {
            side: pa.schema([(KEY, self.key_type), (STAGED_TIME[side], pa.int64()), *self.values[side]])
            for side in SIDES
        }

    def side_of(self, names: Sequence[str]) -> Side:
        """Of which side rows are that have these columns."""
        for side in SIDES:
            if list(names) == self.staged[side].names:
                return side
        raise BadMessage(f"no side of the join has the columns {', '.join(names)}")

    @property
    def edges(self) -> tuple[str, str]:
        """The columns of times of the results: those of the window, or those of both rows."""
        return (WINDOW_START, WINDOW_END) if self.panes is not None else (LEFT_TIME, RIGHT_TIME)

    def results(self, time_kind: str) -> pa.Schema:
        """The columns of pairs as users get them."""
        times = [(name, time_type(time_kind)) for name in self.edges]
        values = [*self.values["left"], *self.values["right"]]
        if self.panes is not None:
            return pa.schema([*times, *self.keys, *values])
        return pa.schema([*self.keys, *times, *values])
