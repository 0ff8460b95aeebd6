"""One Spark session for each file here: starting one takes longer than most tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millpond as mp
from millpond.apps.spark_session import spark_session


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    # Four attempts for a task: in local mode Spark gives one, and nothing could be retried.
    with spark_session("millpond-tests", master="local[2,4]") as session:
        yield session


@pytest.fixture
def pond(spark: SparkSession, tmp_path: Path) -> Iterator[mp.Pond]:
    with mp.open(tmp_path / "pond", spark=spark, containers=2) as opened:
        yield opened
