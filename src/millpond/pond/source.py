"""`spark.read.format("millpond")`: a State as a DataFrame, one task a container.

Options: `state`; `asOf`, an ISO timestamp or an integer (by default the newest final time);
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
from millpond.errors import BadOption, UnknownState
from millpond.ops.frames import spark_schema
from millpond.ops.tasks import client_of
from millpond.pond.snapshots import kind_of, snapshot_schema, snapshot_table, snapshot_time
from millpond.times import Progress, time_of
from millpond.wire.messages import AskProgress, ListStates, StateList, StateProgress, StateSpec

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def source_of(link: Link) -> type[DataSource]:
    """The data source of one pond, to be registered with a Spark session."""

    class MillpondSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return "millpond"

        def schema(self) -> StructType:
            return spark_schema(_Reader(link, dict(self.options)).schema())

        def reader(self, schema: StructType) -> DataSourceReader:
            return _Reader(link, dict(self.options))

    return MillpondSource


class _Part(InputPartition):
    def __init__(self, container: int, at: Progress) -> None:
        super().__init__((container, at))
        self.container = container
        self.at = at


class _Reader(DataSourceReader):
    def __init__(self, link: Link, options: dict[str, Any]) -> None:
        # Spark hands options over in lower case.
        chosen = {key.lower(): value for key, value in options.items()}
        unknown = set(chosen) - {"state", "asof", "isolation", "address", "token"}
        if unknown:
            raise BadOption(
                f"there is no option {min(unknown)!r}",
                hint="there are: state, asOf, isolation, address, token",
                option=min(unknown),
            )
        if "state" not in chosen:
            raise BadOption("which state?", hint='.option("state", "campaigns")', option="state")
        self._link = Link(chosen["address"], chosen.get("token", "")) if "address" in chosen else link
        self._state = chosen["state"]
        self._as_of = chosen.get("asof")
        self._isolation = chosen.get("isolation", "committed")
        if self._isolation not in ("committed", "uncommitted"):
            raise BadOption(
                f"isolation={self._isolation!r} is not a choice",
                hint='"committed" or "uncommitted"',
                option="isolation",
            )

    def schema(self) -> pa.Schema:
        return snapshot_schema(self._spec(), kind_of(self._progress()))

    def partitions(self) -> list[InputPartition]:
        """One a container; all read at the same time, fixed here."""
        progress = self._progress()
        at: Progress | None = math.inf
        if self._isolation == "committed":
            at = snapshot_time(_parse_as_of(self._as_of), progress)
        if at is None:
            return []
        return [_Part(info.id, at) for info in client_of(self._link).placement().containers]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        rows = client_of(self._link).read(self._state, partition.at, partition.container)
        yield from snapshot_table(self._spec(), kind_of(self._progress()), rows).to_batches()

    def _spec(self) -> StateSpec:
        listed: StateList = client_of(self._link).call(ListStates())
        for spec in listed.states:
            if spec.name == self._state:
                return spec
        raise UnknownState(f"there is no state {self._state!r} in this pond", state=self._state)

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
