"""A window operator whose containers are killed, and whose pond is closed and opened again, between its epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from window_driving import Operator

from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond


class Reopened:
    """An operator whose containers end after some epochs, or whose pond is closed and opened again."""

    def __init__(
        self, files: LossyFiles, window: Any, aggregate: Mapping[str, Any], *, every: int = 0
    ) -> None:
        self.files = files
        self.window, self.aggregate, self.every = window, aggregate, every
        self.sources: dict[str, int] = {}
        self.turns = 0
        self.pond: LocalPond | None = None
        self.operators: dict[str, Any] = {}

    def source(self, name: str = "feed", delay: int = 10) -> Operator:
        self.sources[name] = delay
        self._open()
        return _Source(self, name)

    def _open(self) -> None:
        self.pond = LocalPond(self.files, containers=2, slices=4, window_bytes=self.window_bytes)
        window = self.pond.window(
            "w", key="key " + self.key_type, window=self.window, aggregate=self.aggregate
        )
        for name, delay in self.sources.items():
            self.operators[name] = window.over(key="key", at="ts", delay=delay, name=name)

    key_type = "long"
    window_bytes: int | None = None

    def run(self, name: str, table: pa.Table, epoch: int) -> pa.Table:
        assert self.pond is not None
        results = self.operators[name](table, epoch)
        self.turns += 1
        if self.every and self.turns % self.every == 0:
            again = self._disturb(self.turns // self.every)
            if again:
                replayed = self.operators[name](table, epoch)
                assert replayed.sort_by([(n, "ascending") for n in ("window_end", "key")]).equals(
                    results.sort_by([(n, "ascending") for n in ("window_end", "key")])
                )
        self.pond.validate()
        return results

    def _disturb(self, number: int) -> bool:
        assert self.pond is not None
        match number % 4:
            case 0:
                self.pond.checkpoint()
                self._kill(number % 2)
            case 1:
                self._kill(0)
            case 2:
                self.pond.checkpoint()
                self.pond.maintain()
            case 3:
                self.pond.close()
                self._open()
        return True

    def _kill(self, container: int) -> None:
        assert self.pond is not None
        self.pond.hosting.kill(container)
        self.pond.coordinator.recover(container)


class _Source:
    def __init__(self, owner: Reopened, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, table: pa.Table, epoch: int) -> pa.Table:
        return self._owner.run(self._name, table, epoch)

    def finish(self) -> pa.Table:
        return self._owner.operators[self._name].finish()
