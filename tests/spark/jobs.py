"""What streaming jobs in processes of their own share: queries over files, and deaths that files under ROOT remember."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery


def start(
    spark: SparkSession, root: Path, name: str, schema: str, batch: Callable[[DataFrame, int], Any]
) -> StreamingQuery:
    """A query over the files of ROOT/name, a batch for each."""
    return (
        spark.readStream.schema(schema)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(root / name))
        .writeStream.foreachBatch(batch)
        .option("checkpointLocation", str(root / f"checkpoint-{name}"))
        .trigger(availableNow=True)
        .start()
    )


def die(root: Path, where: str) -> None:
    (root / f"died {where}").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def is_due(root: Path, place: str, epoch: int, deaths: dict[str, int]) -> bool:
    return deaths[place] == epoch and not (root / f"died {place}").exists()


def die_once(root: Path, place: str, epoch: int, deaths: dict[str, int]) -> None:
    if is_due(root, place, epoch, deaths):
        die(root, place)
