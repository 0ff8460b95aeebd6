"""Windows, aggregates and ponds for tests of when windows fire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from reopened import Reopened

import millpond as mp
from millpond.testing import LossyFiles
from millpond.testing import window_aggregates as agg
from millpond.testing import window_kinds as kinds
from millpond.testing.local import LocalPond


def assign(time: int) -> list[tuple[int, int]]:
    if time % 7 == 0:
        return []
    start = time // 30 * 30
    return [(start, start + 30), (start + 15, start + 70)]


def ends(v: int | None) -> bool:
    return v is not None and v > 60


WINDOWS: dict[str, tuple[Any, kinds.Kind]] = {
    "tumbling": (mp.tumbling(20), kinds.tumbling(20)),
    "sliding": (mp.sliding(60, 20), kinds.sliding(60, 20)),
    "sliding unevenly": (mp.sliding(50, 15), kinds.sliding(50, 15)),
    "session": (mp.session(15), kinds.session(15)),
    "session touching": (mp.session(15, touching=True), kinds.session(15, touching=True)),
    "session cut": (mp.session(15, longest=40), kinds.session(15, longest=40)),
    "session that ends": (
        mp.session(15, ends_when=ends),
        kinds.session(15, ends_when=lambda row: ends(row["v"])),
    ),
    "assigned": (mp.windows(assign), kinds.custom(assign)),
}
CELLS: tuple[dict[str, Any], dict[str, Any]] = (
    {"rows": mp.count(), "total": mp.total("v"), "low": mp.smallest("w"), "top": mp.top(3, "v")},
    {"rows": agg.count(), "total": agg.total("v"), "low": agg.smallest("w"), "top": agg.top(3, "v")},
)
WHOLE: tuple[dict[str, Any], dict[str, Any]] = (
    {"rows": mp.count(), "median": mp.median("v"), "all": mp.collect("v"), "high": mp.largest("w")},
    {"rows": agg.count(), "median": agg.median("v"), "all": agg.collect("v"), "high": agg.largest("w")},
)


class StayingPond(Reopened):
    """A window with more to say about when it fires."""

    def __init__(
        self,
        files: LossyFiles,
        window: Any,
        aggregate: Mapping[str, Any],
        *,
        every: int = 0,
        every_s: int | None = None,
        **firing: Any,
    ) -> None:
        super().__init__(files, window, aggregate, every=every)
        self.firing = {} if every_s is None else {"every": f"{every_s} seconds"}
        self.firing |= firing

    def _open(self) -> None:
        self.pond = LocalPond(self.files, containers=2, slices=4)
        key = "key " + self.key_type
        window = self.pond.window("w", key=key, window=self.window, aggregate=self.aggregate, **self.firing)
        for name, delay in self.sources.items():
            self.operators[name] = window.over(key="key", at="ts", delay=delay, name=name)

    def wait(self, seconds: float) -> None:
        """By the clock of the driver."""
        assert self.pond is not None
        self.pond._client.runtime.sleep(seconds)

    def disturb(self) -> None:
        """From a checkpoint, and from the log behind it."""
        assert self.pond is not None
        self.pond.checkpoint()
        self.pond.close()
        self._open()

    def close(self) -> None:
        assert self.pond is not None
        self.pond.close()


def table(*rows: tuple[int, int]) -> pa.Table:
    """Keys and times, with values that do not matter."""
    keys, times = zip(*rows, strict=True)
    return pa.table({"key": keys, "ts": times, "v": [1] * len(rows), "w": [1.5] * len(rows)})
