"""`spark.read.format("millpond")`: a State as a DataFrame, one task a container; or a table, or the open windows
of a window operator, in one task.

Options: `state`, `table` or `window`; of a State `asOf`, an ISO timestamp or an integer (by default the newest final time);
`isolation="uncommitted"` for the newest values, final or not; `address` and `token` for a pond other than
the one that was opened with this session.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from millpond.client.link import Link
from millpond.errors import BadOption, unknown_state, unknown_table, unknown_window
from millpond.ops.fetch import check_isolation
from millpond.ops.frames import spark_schema
from millpond.ops.tasks import client_of
from millpond.pond.snapshots import (
    read_versions,
    snapshot_schema,
    snapshot_table,
    snapshot_time,
    snapshot_time_kind,
)
from millpond.pond.table import Table
from millpond.pond.window import Window
from millpond.times import Progress, time_of
from millpond.wire.groups import GroupSpec
from millpond.wire.questions import AskProgress, ResidentProgress
from millpond.wire.states import StateSpec
from millpond.wire.windows import WindowSpec

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


def _reader(link: Link, options: dict[str, Any]) -> _Reader:
    # Spark hands options over in lower case.
    chosen = {key.lower(): value for key, value in options.items()}
    kinds = [kind for kind in READERS if kind in chosen]
    # Of two kinds the one is an option that the other does not have.
    readers = [READERS[kind] for kind in kinds[:1] or READERS]
    known = [option for reader in readers for option in reader.options] + ["address", "credentials"]
    unknown = set(chosen) - {option.lower() for option in known}
    if unknown:
        raise BadOption(
            f"there is no option {min(unknown)!r}",
            hint=f"there are: {', '.join(known)}",
            option=min(unknown),
        )
    if not kinds:
        which = ", or which ".join(READERS)
        raise BadOption(f"which {which}?", hint='.option("state", "campaigns")', option="state")
    if "address" in chosen:
        # The path of a file with a token: the token itself would be in the plan, and travel with the tasks.
        link = Link(chosen["address"], chosen.get("credentials", ""))
    return readers[0](link, chosen)


class _Reader(DataSourceReader):
    """Reads a resident, or a part of one, of some kind. Its first option is the kind, and names what is read."""

    options: ClassVar[tuple[str, ...]]

    def __init__(self, link: Link, chosen: dict[str, Any]) -> None:
        self._link = link
        self._name = chosen[self.options[0]]

    @abstractmethod
    def schema(self) -> pa.Schema: ...


class _TableReader(_Reader):
    """All rows of a table, as whole epochs left it."""

    options = ("table",)

    def schema(self) -> pa.Schema:
        return self._open().schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._open().snapshot().to_batches()

    def _open(self) -> Table:
        client = client_of(self._link)
        groups = {table: spec for spec in client.specs(GroupSpec).values() for table in spec.tables}
        if self._name not in groups:
            raise unknown_table(self._name, groups)
        return Table(client, groups[self._name], self._name)


class _WindowReader(_Reader):
    """What the open windows hold, as whole epochs left them."""

    options = ("window",)

    def schema(self) -> pa.Schema:
        window = self._open()
        if not window.is_known:
            raise BadOption(
                f"the types of window {self._name!r} are not known before its first rows",
                hint='pond.window(..., value="price long") tells them',
                option="window",
            )
        return window.now([]).schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from self._open().now().to_batches()

    def _open(self) -> Window:
        client = client_of(self._link)
        specs = client.specs(WindowSpec)
        if self._name not in specs:
            raise unknown_window(self._name, specs)
        return Window(client, specs[self._name])


class _StateReader(_Reader):
    """The newest value of every key of a State, at a time."""

    options = ("state", "asOf", "isolation")

    def __init__(self, link: Link, chosen: dict[str, Any]) -> None:
        super().__init__(link, chosen)
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
            return [
                _Part([], -math.inf)
            ]  # nothing is final yet; of no part at all Spark would ask for one all the same
        owners = client_of(self._link).placement().owners
        return [
            _Part([n for n, owner in enumerate(owners) if owner == each], at) for each in sorted(set(owners))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Part)
        rows = None
        if partition.slices:
            rows = read_versions(client_of(self._link), self._name, partition.at, partition.slices)
        yield from snapshot_table(self._spec(), snapshot_time_kind(self._progress()), rows).to_batches()

    def _spec(self) -> StateSpec:
        specs = client_of(self._link).specs(StateSpec)
        if self._name not in specs:
            raise unknown_state(self._name, specs)
        return specs[self._name]

    def _progress(self) -> ResidentProgress:
        progress: ResidentProgress = client_of(self._link).call(AskProgress(self._name))
        return progress


READERS: dict[str, type[_Reader]] = {
    reader.options[0]: reader for reader in (_StateReader, _TableReader, _WindowReader)
}


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
