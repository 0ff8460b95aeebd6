"""How programs are shown: calls by a Spark stream and direct ones between its epochs, all checked against the plain class."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import millpond as mp
from millpond.apps.spark_session import spark_session
from millpond.errors import BadOption
from millpond.ops.frames import spark_schema
from millpond.programs.plain import state_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

SECONDS, RATE = 10, 500
CALLS_MAX = 5_000_000
METHOD, NUMBER = "method", "number"
INTO = "returned"

Call = tuple[str, Mapping[str, Any]]
"""A method and its arguments."""
Asking = Callable[..., Any]
"""As `Program.ask`: a method's name, and arguments by name."""


class Application(NamedTuple):
    """What is shown of a program."""

    name: str
    program: type
    takes: Mapping[str, Mapping[str, pa.DataType]]
    """By streamed method, its parameters: in each epoch the first one is called first. One parameter has one type."""
    between: Callable[[Asking, int], Any] | None = None
    """After each epoch: what is called directly, and what came of it."""
    start: Callable[[Asking], Any] | None = None
    """Before the first one."""
    words: Callable[[Any], str] = str
    """What came between two epochs, for people."""
    clock: str | None = None
    """The parameter that gets the time, in milliseconds since 1970, at which an epoch came in; direct calls after it get it, too."""


def check_calls(seconds: int, rate: int) -> None:
    if seconds < 1 or rate < 1 or seconds * rate > CALLS_MAX:
        raise BadOption(
            f"{seconds} epochs of {rate:,} calls are not within 1 and {CALLS_MAX:,}", option="--rate"
        )


def show(app: Application, calls: Iterable[Call], rate: int) -> bool:
    """Epochs of `rate` calls; True if all that was returned, and all that is left, is what the plain class has."""
    out = Console(highlight=False, soft_wrap=True)
    began = time.perf_counter()
    calls = list(calls)
    epochs = [calls[start : start + rate] for start in range(0, len(calls), rate)]
    with tempfile.TemporaryDirectory(prefix=f"millpond-{app.name}-") as folder:
        out.print("starting Spark and a pond of two containers (the first time, kernels are compiled) ...")
        with (
            spark_session(app.name) as spark,
            mp.open(os.path.join(folder, "pond"), spark=spark, containers=2) as pond,
        ):
            told = streamed(spark, pond, app, epochs, folder, out)
            out.print("making every call again, as plain Python ...")
            wanted = plainly(app, epochs, len(pond.placement()), told.came_at)
    wrong, wrong_fields = told.differing(wanted)
    out.print(
        f"{len(wanted.returned):,} streamed calls, {len(wanted.direct):,} turns of direct ones,"
        f" [bold]{wrong} wrong[/bold]; {len(wanted.left)} fields, {wrong_fields} wrong"
        f" ({time.perf_counter() - began:.0f} s)"
    )
    return wrong == 0 and wrong_fields == 0


class Told(NamedTuple):
    """What came of all calls."""

    returned: dict[int, Any]
    """By the number of the streamed call."""
    direct: dict[int, Any]
    """What came of those after an epoch, by its number."""
    left: dict[str, Any]
    """What each field holds at the end."""
    came_at: Mapping[int, int] = MappingProxyType({})
    """When epochs came in, by the wall clock, where that counts."""

    def differing(self, wanted: Told) -> tuple[int, int]:
        """How many calls gave something else, or were lost, or were none; and how many fields hold something else."""
        wrong = 0
        for own, theirs in ((self.returned, wanted.returned), (self.direct, wanted.direct)):
            wrong += sum(number not in own or own[number] != value for number, value in theirs.items())
            wrong += len(own.keys() - theirs.keys())
        return wrong, sum(self.left[field] != held for field, held in wanted.left.items())


def streamed(
    spark: SparkSession,
    pond: mp.Pond,
    app: Application,
    epochs: Sequence[Sequence[Call]],
    folder: str,
    out: Console,
) -> Told:
    """Each epoch is a micro-batch."""
    program = pond.program(app.name, app.program)
    if app.start is not None:
        app.start(program.ask)
    shown = Shown(app, program, out)
    query = (
        spark.readStream.schema(write_epochs(app, epochs, folder))
        .option("maxFilesPerTrigger", 1)
        .parquet(os.path.join(folder, "calls"))
        .writeStream.foreachBatch(shown)
        .option("checkpointLocation", os.path.join(folder, "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return Told(shown.returned, shown.direct, state_left(program), shown.came_at)


class Shown:
    """For `foreachBatch`: has the calls of an epoch made, and keeps what they returned."""

    def __init__(self, app: Application, program: Any, out: Console) -> None:
        self._app = app
        self._program = program
        self._out = out
        methods = {method.name: method for method in program.graph.methods}
        self._operators = {}
        for name, parameters in app.takes.items():
            into = None if methods[name].returns is None else INTO
            # Also what has a default comes from the row.
            columns = {parameter: parameter for parameter in parameters}
            self._operators[name] = program.call(name, into=into, name=name, **columns)
        self.returned: dict[int, Any] = {}
        """By the number of the call."""
        self.direct: dict[int, Any] = {}
        """By epoch."""
        self.came_at: dict[int, int] = {}
        """The same, of a program that counts by the wall clock."""

    def __call__(self, frame: DataFrame, epoch: int) -> None:
        from pyspark.sql.functions import lit

        began = time.perf_counter()
        if self._app.clock is not None:
            # A program reads no clock: the time comes with the rows. An epoch that runs again came when it first did.
            came_at = self.came_at.setdefault(epoch, time.time_ns() // 1_000_000)
            frame = frame.withColumn(self._app.clock, lit(came_at))
        count = 0
        for name, operator in self._operators.items():
            rows = frame.where(frame[METHOD] == name).select(NUMBER, *self._app.takes[name])
            table = operator(rows, epoch).toArrow()
            values = table[INTO].to_pylist() if INTO in table.column_names else [None] * len(table)
            self.returned.update(zip(table[NUMBER].to_pylist(), values, strict=True))
            count += len(table)
        line = ""
        if self._app.between is not None:
            # An epoch may run again: what is called between them counts once.
            self.direct[epoch] = self._app.between(self._once(epoch), epoch)
            line = f"; {self._app.words(self.direct[epoch])}"
        per_s = count / (time.perf_counter() - began)
        self._out.print(f"epoch {epoch:3}: {count:,} calls, {per_s:,.0f} calls/s{line}", markup=False)

    def _once(self, epoch: int) -> Asking:
        given = stamp(self._app, self.came_at, epoch)
        return lambda method, **arguments: self._program.ask(
            method, idempotency_key=f"{method}-{epoch}", **arguments, **given
        )


def stamp(app: Application, came_at: Mapping[int, int], epoch: int) -> dict[str, Any]:
    """The argument that says when an epoch came in, if the program takes one."""
    return {} if app.clock is None else {app.clock: came_at[epoch]}


def write_epochs(app: Application, epochs: Sequence[Sequence[Call]], folder: str) -> StructType:
    """A file of calls for each epoch. Spark reads files in the order of their age. Returns the columns."""
    types = {NUMBER: pa.int64(), METHOD: pa.string()}
    for parameters in app.takes.values():
        types |= parameters
    schema = pa.schema(list(types.items()))
    folder = os.path.join(folder, "calls")
    os.makedirs(folder)
    number = 0
    for epoch, calls in enumerate(epochs):
        rows = [
            {NUMBER: number + place, METHOD: method, **arguments}
            for place, (method, arguments) in enumerate(calls)
        ]
        number += len(rows)
        file = os.path.join(folder, f"{epoch:06d}.parquet")
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)
        age = 1_700_000_000 + epoch
        os.utime(file, (age, age))
    return spark_schema(schema)


def plainly(
    app: Application,
    epochs: Sequence[Sequence[Call]],
    slices: int,
    came_at: Mapping[int, int] = MappingProxyType({}),
) -> Told:
    """The same by the plain class, as if epochs had come in at these times."""
    plain = mp.plain(app.program, slices=slices)

    def ask(method: str, **arguments: Any) -> Any:
        return getattr(plain, method)(**arguments)

    if app.start is not None:
        app.start(ask)
    returned: dict[int, Any] = {}
    direct: dict[int, Any] = {}
    first = 0
    for epoch, calls in enumerate(epochs):
        given = stamp(app, came_at, epoch)
        for name in app.takes:
            for place, (method, arguments) in enumerate(calls, first):
                if method == name:
                    returned[place] = ask(method, **{**arguments, **given})
        first += len(calls)
        if app.between is not None:
            direct[epoch] = app.between(partial(ask, **given), epoch)
    return Told(returned, direct, state_of(plain), came_at)


def state_left(program: Any) -> dict[str, Any]:
    """What a pond's program holds, as `state_of` has it of a plain one."""
    left = {}
    for field in program.graph.fields:
        entries = program.entries(field.name)
        if field.kind == "partial":
            entries = [entries.get(lane, {}) for lane in range(program.graph.lanes)]
        left[field.name] = entries
    return left
