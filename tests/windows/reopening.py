"""Operators whose containers end after some epochs, or whose pond is closed and opened again: answers stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
from window_driving import Operator, compare, result_rows

from millpond.pond.pond import Pond
from millpond.stores.windows.spilling import Spilling
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

Build = Callable[[Pond], Mapping[str, Operator]]
"""Makes the operators of a pond, by source."""


class Disturbed:
    """A pond with what `build` makes in it. After `every` epochs something happens to it, and the last epoch runs again."""

    def __init__(
        self,
        build: Build,
        *,
        every: int = 0,
        window_bytes: int | None = None,
        spilling: Spilling | None = None,
    ) -> None:
        self._build = build
        self._files = LossyFiles()
        self._window_bytes = window_bytes
        self._spilling = spilling
        self._every = every
        self._turns = 0
        self._open()

    def _open(self) -> None:
        self.pond = LocalPond(
            self._files, containers=2, slices=4, window_bytes=self._window_bytes, spilling=self._spilling
        )
        self.operators = self._build(self.pond)

    @property
    def sources(self) -> dict[str, Operator]:
        return {name: _Source(self, name) for name in self.operators}

    def run(self, name: str, table: pa.Table, epoch: int) -> pa.Table:
        results = self.operators[name](table, epoch)
        self._turns += 1
        if self._every and self._turns % self._every == 0:
            self._disturb(self._turns // self._every)
            compare(result_rows(self.operators[name](table, epoch)), result_rows(results))
        self.pond.validate()
        return results

    def _disturb(self, number: int) -> None:
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

    def _kill(self, container: int) -> None:
        self.pond.hosting.kill(container)
        self.pond.coordinator.recover(container)


class _Source:
    def __init__(self, owner: Disturbed, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, table: pa.Table, epoch: int) -> pa.Table:
        return self._owner.run(self._name, table, epoch)

    def finish(self) -> Any:
        return self._owner.operators[self._name].finish()
