"""What benchmarks do with frames of Spark that is no system's: a column that asks nobody, and a sink that keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class AddColumn:
    """For `mapInArrow`: adds a column, the copy of another, and asks nobody."""

    def __init__(self, name: str, copied: str) -> None:
        self._name = name
        self._copied = copied

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.append_column(self._name, batch[self._copied])


def ddl_of(frame: DataFrame) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in frame.schema)


def noop(frame: DataFrame) -> None:
    """Computes all rows, and drops them."""
    frame.write.format("noop").mode("overwrite").save()
