"""Memory that runs out: while an epoch is applied, half of a slice's rows are in, and the rest never comes, or a window's
rows are in, and nothing fires; while a transaction runs, it is no outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from millpond.stores.versioned import VersionedSlice
from millpond.stores.windows.store import WindowStore
from millpond.testing.simulation.kernel import Simulation
from millpond.testing.simulation.scheduler import Process
from millpond.txn.run.interpreter import UserRow, UserTable


@contextmanager
def scarce_memory(sim: Simulation, then: Callable[[Process], None]) -> Iterator[None]:
    """For the block, an insert of an epoch that is applied fails half-way as often as the weather has it.

    `then` is told whose. So it is with a table that a transaction looks into, unless that is compiled.
    """
    insert = VersionedSlice.insert
    look = UserTable.__getitem__
    run = WindowStore.run

    def try_look(self: UserTable, key: Any) -> UserRow:
        task = sim.scheduler.current
        # Where a log is replayed, what is short of memory stays away until the pond is opened again: not here.
        if (
            task is not None
            and task.name.startswith("Prepare")
            and sim.faults.strikes(sim.faults.weather.short / 2)
        ):
            sim.faults.fire("out of memory in a transaction", str(task))
            raise MemoryError("simulated")
        return look(self, key)

    def try_insert(
        self: VersionedSlice, keys: Any, times: Any, values: Sequence[Any], keep_from: int | None = None
    ) -> None:
        task = sim.scheduler.current
        if (
            task is None
            or not task.name.startswith("Apply")
            or not sim.faults.strikes(sim.faults.weather.short)
        ):
            insert(self, keys, times, values, keep_from)
            return
        half = len(times) // 2
        insert(
            self, keys.part(0, half), times[:half], [column.slice(0, half) for column in values], keep_from
        )
        sim.faults.fire("out of memory", str(task))
        then(task.process)
        raise MemoryError("simulated")

    def try_run(
        self: WindowStore, portions: Any, watermark: Any, closes: bool, time_kind: str, emits: bool = True
    ) -> pa.Table:
        task = sim.scheduler.current
        if (
            task is None
            or not task.name.startswith("Apply")
            or not portions
            or not sim.faults.strikes(sim.faults.weather.short)
        ):
            return run(self, portions, watermark, closes, time_kind, emits)
        self.windows.insert(portions)
        sim.faults.fire("out of memory in a window", str(task))
        then(task.process)
        raise MemoryError("simulated")

    VersionedSlice.insert = try_insert  # type: ignore[method-assign]
    WindowStore.run = try_run  # type: ignore[method-assign]
    UserTable.__getitem__ = try_look  # type: ignore[method-assign]
    try:
        yield
    finally:
        VersionedSlice.insert = insert  # type: ignore[method-assign]
        WindowStore.run = run  # type: ignore[method-assign]
        UserTable.__getitem__ = look  # type: ignore[method-assign]
