"""A pond that changes while it is asked: moves, recovery, checkpoints, and what backups and slices cost.

All in one run on one machine: a State of longs of a gigabyte, by what `pond.metrics()` says of its bytes, in containers as child
processes; clients are processes of their own. What each line measures, and how, is told by the modules `elastic_*`; beside
stand what a Spark user has today, measured in the same run, and figures that others published, which were not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from millpond.bench import (
    elastic_checkpoints,
    elastic_costs,
    elastic_moves,
    elastic_recovery,
    elastic_report,
    elastic_spark,
)

plot = elastic_report.plot
print_table = elastic_report.print_table


class Work(NamedTuple):
    """How much of everything. What starts many processes is left out of a quick run; without `spark_keys` Spark is."""

    mb: float = 1_000
    calm_s: float = 6.0
    move_backups: Sequence[int] = (1, 0)
    peers: Sequence[int] = (1, 2, 4)
    ways_to_end: Sequence[str] = tuple(elastic_recovery.WAYS)
    from_root: bool = True
    recovery_s: float = 3.0
    checkpoint_every_s: float = 5.0
    checkpoint_rounds: Mapping[str, int] = MappingProxyType({"delta": 2, "full": 1})
    checkpoint_ways: Sequence[str] = elastic_checkpoints.WAYS
    backups_mb: float = 300
    backups_s: float = 6.0
    backups: Sequence[int] = (0, 1, 2)
    backups_epochs: Sequence[int] = (1_000, 10_000)
    slice_keys: int = 1_000_000
    slice_batches: Mapping[int, int] = MappingProxyType({100_000: 20, 1_000_000: 6})
    slices: Sequence[int] = (1, 16, 64, 256)
    spark_keys: int = 2_000_000


FULL = Work()
QUICK = Work(
    mb=4,
    calm_s=0.6,
    move_backups=(1,),
    peers=(1,),
    ways_to_end=("kill -9",),
    from_root=False,
    recovery_s=0.3,
    checkpoint_rounds=MappingProxyType({}),
    backups=(),
    slice_keys=20_000,
    slice_batches=MappingProxyType({20_000: 5}),
    slices=(1, 64),
    spark_keys=0,
)


def run(quick: bool, progress: Callable[[str], None], work: Work | None = None) -> list[dict[str, Any]]:
    """Measures it all. Raises where an answer is wrong, or a slice moved that should not."""
    work = work or (QUICK if quick else FULL)
    load_before = os.getloadavg()[0]
    results = [
        *elastic_moves.run(work.mb, work.calm_s, work.move_backups, progress),
        *elastic_recovery.run(
            work.mb, work.recovery_s, progress, work.peers, work.ways_to_end, work.from_root
        ),
        *(
            elastic_recovery.run_on_spark(work.mb, work.recovery_s, progress, work.peers)
            if work.spark_keys
            else []
        ),
        *elastic_checkpoints.run(
            work.mb, work.checkpoint_every_s, work.checkpoint_rounds, work.checkpoint_ways, progress
        ),
        *elastic_costs.backups(work.backups_mb, work.backups_s, work.backups, work.backups_epochs, progress),
        *elastic_costs.slices(work.slice_keys, work.slice_batches, work.slices, progress),
        *(elastic_spark.run(work.spark_keys, progress) if work.spark_keys else []),
    ]
    machine = {"cores": os.cpu_count(), "load_before": load_before}
    return [{**result, **machine} for result in results]
