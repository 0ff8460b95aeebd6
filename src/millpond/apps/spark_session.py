"""The local Spark session of applications, benchmarks and their tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.errors import MillpondError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS = {
    # Nothing but this machine talks to it.
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    # Spark's default of 10,000 rows makes an exchange with the Python worker, and with the pond, of every 10,000;
    # what each costs is then felt. Much larger batches would not fit the caches.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # More tasks than cores only wait for each other.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
    # INT96, Spark's default, has no place in Parquet any more, and other readers take it for a time without a zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.ui.showConsoleProgress": "false",
    # The level of Spark's own `spark.log.level` comes too late for what it prints as it starts.
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}",
}

INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}


@contextmanager
def spark_session(
    name: str, *, master: str = "local[*]", ui: bool = False, memory: str = "2g", compiled: bool = True
) -> Iterator[SparkSession]:
    """A session on this machine, on all its cores by default; stopped at the end. The settings are `SETTINGS`.

    Not `compiled`, plans are interpreted: where many of them see few rows each, compiling would take longer.
    """
    session = start_spark(name, master=master, ui=ui, memory=memory, compiled=compiled)
    try:
        yield session
    finally:
        session.stop()


def start_spark(
    name: str, *, master: str = "local[*]", ui: bool = False, memory: str = "2g", compiled: bool = True
) -> SparkSession:
    """As `spark_session`, for whoever stops it; the one that runs already, if there is one."""
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    # The workers must be this Python, with these packages, whatever `python3` is on PATH.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in {**SETTINGS, **({} if compiled else INTERPRETED)}.items():
        builder = builder.config(key, value)
    builder = builder.config("spark.ui.enabled", str(ui).lower()).config("spark.driver.memory", memory)
    try:
        return builder.getOrCreate()
    except PySparkException as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise MillpondError(
            "Spark did not start: it found no Java that it can run on",
            hint="install Java 17 or newer, for example openjdk-17-jre-headless, and set JAVA_HOME or PATH",
        ) from None
