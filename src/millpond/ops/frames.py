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
from millpond.ops.tasks import Readable, ReadTask, StageReply, StageTask
from millpond.times import TimeKind
from millpond.wire.base import KindOfTime, Turn, check_query
from millpond.wire.epochs import EpochPlan, Receipt

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from millpond.client.link import Link
    from millpond.ops.asking import Asking
    from millpond.ops.intake import Stager


QUERY_ID = "sql.streaming.queryId"
_UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def is_frame(rows: object) -> TypeGuard[DataFrame]:
    """Whether these are Spark's rows; told by the module's name, so that Spark is not imported for Arrow tables.

    Those of Spark Connect are not: `as_table` refuses them.
    """
    module = type(rows).__module__
    ours = module.startswith("pyspark.sql") and not module.startswith("pyspark.sql.connect")
    return ours and type(rows).__name__ == "DataFrame"


def query_of(frame: DataFrame) -> str | None:
    """The id of the streaming query whose `foreachBatch` this is; None outside of one."""
    query: str | None = frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID)
    return None if query is None else check_query(query)


def running_query(frame: DataFrame) -> Any:
    """The streaming query whose batch this is, as Java has it; None outside of one, or when it has ended."""
    query = query_of(frame)
    return None if query is None else _running(frame.sparkSession, query)


def _running(session: SparkSession, query: str) -> Any:
    java: Any = session.sparkContext._jvm  # noqa: SLF001 - Python has no way to a query from its own batch
    if java is None or not re.fullmatch(_UUID, query):
        return None
    active = session._jsparkSession.sharedState().activeStreamingQueries()  # noqa: SLF001
    return active.get(java.java.util.UUID.fromString(query))


def run_of(frame: DataFrame) -> str | None:
    """The id of the run of the streaming query, which each start of it changes; None outside of one."""
    running = running_query(frame)
    return None if running is None else str(running.runId().toString())


def fixed(frame: DataFrame) -> tuple[DataFrame, int]:
    """The frame with its partitions settled, however often and by whatever plan it is run; and how many they are.

    Spark hands batches of a stream over like that. What another frame needs of shuffles runs here, and once.
    """
    from pyspark.sql import DataFrame as Frame

    plan: Any = frame._jdf.queryExecution()  # noqa: SLF001 - Python has no way to a frame's partitions that plans it once
    logical = plan.logical()
    if logical.getClass().getSimpleName() == "LogicalRDD":
        return frame, int(logical.rdd().getNumPartitions())
    rdd = plan.toRdd()
    session: Any = frame.sparkSession
    settled = session._jsparkSession.internalCreateDataFrame(rdd, frame._jdf.schema(), False)  # noqa: SLF001
    return Frame(settled, session), int(rdd.getNumPartitions())


@contextmanager
def as_query(spark: SparkSession, query: str, run: str | None = None) -> Iterator[None]:
    """What runs inside belongs to that streaming query, as if in its `foreachBatch`; with a run of it, it also ends when
    that is stopped.
    """
    context: Any = spark.sparkContext  # its types do not say that None unsets a property
    names = (QUERY_ID, "spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = {name: context.getLocalProperty(name) for name in names}
    context.setLocalProperty(QUERY_ID, query)
    if run is not None:
        context.setJobGroup(run, f"rows that waited in {query}", interruptOnCancel=True)
    try:
        yield
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)


def active_run(spark: SparkSession, query: str) -> str | None:
    """The id of the run of a streaming query that is active; None for one that is not, or is being stopped."""
    running = _running(spark, query)
    return str(running.runId().toString()) if running is not None and running.isActive() else None


def is_stopped(spark: SparkSession) -> bool:
    context: Any = spark.sparkContext
    return context._jsc is None or bool(context._jsc.sc().isStopped())  # noqa: SLF001 - Python has no such question


def default_session() -> SparkSession | None:
    """The session that was started in this process, if there is one; whatever the thread."""
    from pyspark.sql import SparkSession

    session: SparkSession | None = SparkSession._instantiatedSession  # noqa: SLF001 - no name of its own is public
    return None if session is None or is_stopped(session) else session


def pause(spark: SparkSession, seconds: float) -> None:
    """Sleeps in the Java thread of the query whose `foreachBatch` this is: `stop()` interrupts it as it does any batch."""
    java: Any = spark.sparkContext._jvm  # noqa: SLF001 - as in `run_of`
    java.java.lang.Thread.sleep(max(1, round(seconds * 1e3)))


def active_session() -> SparkSession:
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession() or default_session()
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


def read_by_slices(client: Client, spark: SparkSession, rows: Readable, schema: pa.Schema) -> DataFrame:
    """What a turn left in the pond, as a lazy DataFrame."""
    slices = client.placement().slices
    tasks = min(slices, spark.sparkContext.defaultParallelism)
    task = ReadTask(link_of(client), rows, slices, tasks)
    return spark.range(0, tasks, 1, tasks).mapInArrow(task, spark_schema(schema))


class Staging:
    """Stages a DataFrame's rows, one task a partition; the driver collects the receipts of those that count."""

    def __init__(self, client: Client, intake: Stager, frame: DataFrame, query: str, turn: Turn) -> None:
        check_columns(frame, intake.columns)
        self._link = link_of(client)
        self._intake = intake
        self._query, self._turn = query, turn
        # A projection that changes nothing is analysed all the same.
        whole = intake.columns == frame.columns
        self._frame = frame if whole else frame.select(*(quoted(name) for name in intake.columns))
        self.time_kind: KindOfTime = "" if intake.at is None else time_kind_of(frame.schema, intake.at)

    def __call__(self, plan: EpochPlan) -> list[Receipt]:
        task = StageTask(self._link, self._intake, plan, self._turn, self._query)
        replies = self._frame.mapInArrow(task, StageTask.schema).collect()
        return [msgspec.msgpack.decode(bytes(row[0]), type=StageReply).unwrap() for row in replies]


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def check_columns(frame: DataFrame, names: list[str]) -> None:
    columns = frame.columns  # Java is asked for them
    for name in names:
        if columns.count(name) != 1:
            raise WrongColumn(
                f"the DataFrame has {'no' if name not in columns else 'more than one'} column {name!r}",
                hint=f"it has: {', '.join(columns)}",
                column=name,
                available=columns[:50],
            )


def check_questions(frame: DataFrame, asking: Asking) -> None:
    """Refuses a frame that lacks a column, has one twice, one of the answers', or one that Spark's workers do not take."""
    check_columns(frame, [*asking.columns, *frame.columns])
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
