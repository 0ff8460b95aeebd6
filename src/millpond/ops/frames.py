"""The Spark side of operators: DataFrames in, DataFrames out. Rows are routed in the worker; nothing is shuffled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import pyarrow as pa

from millpond.client.client import Client
from millpond.errors import BadOption, WrongColumn, WrongType, error_named
from millpond.ops.columns import check_kind
from millpond.ops.tasks import StageReply, StageTask
from millpond.times import TimeKind
from millpond.wire.base import LOCAL_QUERY, KindOfTime, Turn, check_query
from millpond.wire.epochs import EpochPlan, Receipt

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from millpond.client.link import Link
    from millpond.ops.asking import Asking
    from millpond.ops.intake import Stager


QUERY_ID = "sql.streaming.queryId"


def is_frame(rows: object) -> TypeGuard[DataFrame]:
    """Whether these are Spark's rows; told by the module's name, so that Spark is not imported for Arrow tables."""
    return type(rows).__module__.startswith("pyspark.sql") and type(rows).__name__ == "DataFrame"


def query_of(frame: DataFrame) -> str | None:
    """The id of the streaming query whose `foreachBatch` this is; None outside of one."""
    query: str | None = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    return None if query is None else check_query(query)


def run_of(frame: DataFrame) -> str | None:
    """The id of the run of the streaming query, which each start of it changes; None outside of one."""
    query, session = query_of(frame), frame.sparkSession
    java: Any = session.sparkContext._jvm  # noqa: SLF001 - Python has no way to a query from its own batch
    if query in (None, LOCAL_QUERY) or java is None:
        return None
    active = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    running = active.get(java.java.util.UUID.fromString(query))
    return None if running is None else str(running.runId().toString())


@contextmanager
def as_query(spark: SparkSession, query: str) -> Iterator[None]:
    """What runs inside belongs to that streaming query, as if in its `foreachBatch`."""
    context: Any = spark.sparkContext  # its types do not say that None unsets a property
    before = context.getLocalProperty(QUERY_ID)
    context.setLocalProperty(QUERY_ID, query)
    try:
        yield
    finally:
        context.setLocalProperty(QUERY_ID, before)


def active_session() -> SparkSession:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        raise BadOption(
            "there is no Spark session", hint="start one: rows that wait are Spark's", option="spark"
        )
    return session


def link_of(client: Client) -> Link:
    if client.link is None:
        raise BadOption(
            "Spark's workers cannot reach a pond that lives inside this process",
            hint="open it with mp.open, or join one with mp.connect",
            option="pond",
        )
    return client.link


class Staging:
    """Stages a DataFrame's rows, one task a partition; the driver collects the receipts of those that count."""

    def __init__(self, client: Client, intake: Stager, frame: DataFrame, query: str, turn: Turn) -> None:
        check_columns(frame, intake.columns)
        self._link = link_of(client)
        self._intake = intake
        self._query, self._turn = query, turn
        self._frame = frame.select(*(quoted(name) for name in intake.columns))
        self.time_kind: KindOfTime = "" if intake.at is None else time_kind_of(frame.schema, intake.at)

    def __call__(self, plan: EpochPlan) -> list[Receipt]:
        task = StageTask(self._link, self._intake, plan, self._turn, self._query)
        replies = self._frame.mapInArrow(task, StageTask.schema).collect()
        return [msgspec.msgpack.decode(bytes(row[0]), type=StageReply).unwrap() for row in replies]


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def check_columns(frame: DataFrame, names: list[str]) -> None:
    for name in names:
        if frame.columns.count(name) != 1:
            raise WrongColumn(
                f"the DataFrame has {'no' if name not in frame.columns else 'more than one'} column {name!r}",
                hint=f"it has: {', '.join(frame.columns)}",
                column=name,
                available=frame.columns[:50],
            )


def check_questions(frame: DataFrame, asking: Asking) -> None:
    """Refuses a frame that lacks a column, has one of the answers', or one that Spark's workers do not take."""
    check_columns(frame, asking.columns)
    asking.check_into(frame.columns)
    for field in frame.schema.fields:
        try:
            arrow_schema(type(frame.schema)([field]))
        except TypeError:
            simple = field.dataType.simpleString()
            raise WrongType(
                f"the column {field.name!r} is {simple}, which Spark's Python workers do not take",
                hint="leave it out, or cast it to string",
                column=field.name,
                expected="a type that Arrow has",
                actual=simple,
            ) from None


def check_kinds(schema: StructType, asking: Asking, expected: str) -> None:
    """Refuses times of another kind than the State's, or than one another."""
    kind = time_kind_of(schema, asking.high)
    check_kind(asking.high, kind, expected)
    if asking.low is not None:
        check_kind(asking.low, time_kind_of(schema, asking.low), kind)


@contextmanager
def errors_of_tasks() -> Iterator[None]:
    """Raises as itself the error with which a task of ours ended the job. Spark gives its text only: no attributes."""
    from pyspark.errors import PySparkException

    try:
        yield
    except PySparkException as error:
        told = re.findall(r"^millpond\.errors\.(\w+): (.*)(?:\n  hint: (.*))?", str(error), re.MULTILINE)
        if not told:
            raise
        name, message, hint = told[-1]  # those before it are what it came from
        raise error_named(name)(message, hint=hint) from error


def time_kind_of(schema: StructType, name: str) -> TimeKind:
    """What kind of time a column holds."""
    simple = schema[name].dataType.simpleString()
    if simple in ("timestamp", "timestamp_ntz", "date"):
        return "timestamp"
    if simple in ("bigint", "int", "smallint", "tinyint"):
        return "long"
    raise WrongType(
        f"the time column {name!r} is {simple}: a time is a timestamp, a date or an integer",
        hint="cast the column to timestamp, or to long for logical time",
        column=name,
        expected="timestamp or long",
        actual=simple,
    )


def micros(schema: StructType, name: str) -> Column:
    """The column as an int64 time, computed by Spark itself."""
    from pyspark.sql import functions as f

    simple = schema[name].dataType.simpleString()
    column = f.col(quoted(name))
    # Without a zone it counts as UTC, whatever the session's zone: no cast to timestamp.
    if simple == "timestamp_ntz":
        since = (column - f.expr("TIMESTAMP_NTZ'1970-01-01 00:00:00'")).cast("interval second")
        return (since.cast("decimal(20,6)") * 1_000_000).cast("long")
    if simple == "date":
        return f.unix_date(column).cast("long") * 86_400_000_000
    if simple == "timestamp":
        return f.unix_micros(column)
    return column.cast("long")


def truth(said: Column | bool, null: bool) -> Column:
    """What `stores.readiness` says of a column's times, as a column. `null` is what it is to be for no time at all."""
    from pyspark.sql import functions as f

    return f.lit(said) if isinstance(said, bool) else f.coalesce(said, f.lit(null))


def spark_schema(schema: Any) -> StructType:
    """An Arrow schema in Spark's types."""
    from pyspark.sql.pandas.types import from_arrow_schema

    converted: StructType = from_arrow_schema(schema)
    return converted


def arrow_schema(schema: StructType) -> pa.Schema:
    """Spark's types as the workers meet them in Arrow; times in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")
