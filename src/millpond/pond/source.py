"""`spark.read.format("millpond")`: a State as a DataFrame, one task a container; or a table, in one task.

Options: `state` or `table`; of a State `asOf`, an ISO timestamp or an integer (by default the newest final time);
`isolation="uncommitted"` for the newest values, final or not; `address` and `token` for a pond other than
the one that was opened with this session.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from millpond.client.link import Link
from millpond.errors import BadOption, unknown_state, unknown_table
from millpond.ops.fetch import check_isolation
from millpond.ops.frames import spark_schema
from millpond.ops.tasks import client_of
from millpond.pond.snapshots import snapshot_schema, snapshot_table, snapshot_time, snapshot_time_kind
from millpond.pond.table import Table
from millpond.times import Progress, time_of
from millpond.wire.questions import AskProgress, StateProgress
from millpond.wire.specs import GroupSpec, StateSpec

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def source_of(link: Link) -> type[DataSource]:
    """The data source of one pond, to be registered with a Spark session."""

    class MillpondSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "millpond"

        def schema(self) -> StructType:
            return spark_schema(_reader(link, dict(self.options)).schema())

        def reader(self, schema: StructType) -> DataSourceReader:
            return _reader(link, dict(self.options))

    return MillpondSource


class _Part(InputPartition):
    def __init__(self, slices: list[int], at: Progress) -> None:
        super().__init__((slices, at))
        self.slices = slices
        self.at = at


def _reader(link: Link, options: dict[str, Any]) -> _Reader | _TableReader:
    # Spark hands options over in lower case.
    chosen = {key.lower(): value for key, value in options.items()}
    known = {"state", "asof", "isolation", "address", "token"}
    if "table" in chosen:
        known = {"table", "address", "token"}
    unknown = set(chosen) - known
    if unknown:
        raise BadOption(
            f"there is no option {min(unknown)!r}",
            hint="there are: table, address, token"
            if "table" in chosen
            else "there are: state, asOf, isolation, address, token; or table",
            option=min(unknown),
        )
    link = Link(chosen["address"], chosen.get("token", "")) if "address" in chosen else link
    if "table" in chosen:
        return _TableReader(link, chosen["table"])
    if "state" not in chosen:
        raise BadOption("which state, or which table?", hint='.option("state", "campaigns")', option="state")
    return _Reader(link, chosen)


class _TableReader(DataSourceReader):
    """All rows of a table, as whole epochs left it."""

    def __init__(self, link: Link, table: str) -> None:
        self._link = link
        self._table = table

    def schema(self) -> pa.Schema:
        return self._open().schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._open().snapshot().to_batches()

    def _open(self) -> Table:
        client = client_of(self._link)
        groups = {table: spec for spec in client.specs(GroupSpec).values() for table in spec.tables}
        if self._table not in groups:
            raise unknown_table(self._table, groups)
        return Table(client, groups[self._table], self._table)


class _Reader(DataSourceReader):
    def __init__(self, link: Link, chosen: dict[str, Any]) -> None:
        self._link = link
        self._state = chosen["state"]
        self._as_of = chosen.get("asof")
        self._isolation = check_isolation(chosen.get("isolation", "committed"))

    def schema(self) -> pa.Schema:
        return snapshot_schema(self._spec(), snapshot_time_kind(self._progress()))

    def partitions(self) -> list[InputPartition]:
        """One a container; all read at the same time, fixed here."""
        progress = self._progress()
        at: Progress | None = math.inf
        if self._isolation == "committed":
            at = snapshot_time(_parse_as_of(self._as_of), progress)
        if at is None:
            return []
        owners = client_of(self._link).placement().owners
        return [
            _Part([n for n, owner in enumerate(owners) if owner == each], at) for each in sorted(set(owners))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        rows = client_of(self._link).read(self._state, partition.at, partition.slices)
        yield from snapshot_table(self._spec(), snapshot_time_kind(self._progress()), rows).to_batches()

    def _spec(self) -> StateSpec:
        specs = client_of(self._link).specs(StateSpec)
        if self._state not in specs:
            raise unknown_state(self._state, specs)
        return specs[self._state]

    def _progress(self) -> StateProgress:
        progress: StateProgress = client_of(self._link).call(AskProgress(self._state))
        return progress


def _parse_as_of(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise BadOption(
            f"asOf={text!r} is neither a timestamp nor an integer",
            hint='for example "2026-01-01T12:00:00Z"',
            option="asOf",
        ) from None
    return time_of(moment)
