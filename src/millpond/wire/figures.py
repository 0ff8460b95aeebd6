"""Figures on the wire: of slices in packed columns, as there may be 65,535 of them and a message is small; of moves,
of progress and of task slots as they are.

Counts are since a container has the slice, or since it began: whoever asks twice works out rates. What falls has begun
anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from millpond.errors import BadMessage
from millpond.times import Progress
from millpond.wire.base import Call, Count, KindOfTime, Message, Name, SliceId
from millpond.wire.roles import COORDINATOR, READING, Senders

CONTAINER_S = 5.0
"""How long a container may take to tell its figures: one that does not is shown without."""
POND_S = 30.0
_WIDTHS = (1, 2, 4, 8)
Column = npt.NDArray[np.int64]
# A count stays one on its way.
Number = int | float


def pack(values: npt.ArrayLike) -> bytes:
    """Whole numbers from 0 on, each in as few bytes as the largest of them needs."""
    column = np.asarray(values, np.int64)
    if not column.size:
        return b""
    assert column.min() >= 0, "a figure is below zero"
    width = next(width for width in _WIDTHS if int(column.max()) < 1 << (8 * width))
    return column.astype(f"<u{width}").tobytes()


def unpack(data: bytes, count: int) -> Column:
    width = len(data) // count if count else 0
    if len(data) != width * count or (count and width not in _WIDTHS):
        raise BadMessage(f"{len(data)} bytes are no column of {count} figures")
    return np.frombuffer(data, f"<u{width}").astype(np.int64) if count else np.zeros(0, np.int64)


class SliceFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One column for each figure, an entry for each of `slices`; optional columns are empty where nobody tells them.

    `cpu_us` is what threads spent on the slice's updates and questions. `owners` are container ids, and only the
    coordinator tells them. `backups` are those that a slice has, `backups_wanted` those that it should have.
    """

    COLUMNS: ClassVar[tuple[str, ...]] = (
        "slices", "rows_updated", "rows_fetched", "cpu_us", "held_bytes", "keys"
    )  # fmt: skip
    OPTIONAL: ClassVar[tuple[str, ...]] = ("owners", "backups_wanted", "backups")

    count: Count
    slices: bytes
    rows_updated: bytes
    rows_fetched: bytes
    cpu_us: bytes
    held_bytes: bytes
    keys: bytes
    owners: bytes = b""
    backups_wanted: bytes = b""
    backups: bytes = b""

    @classmethod
    def of(cls, columns: Mapping[str, npt.ArrayLike]) -> SliceFigures:
        packed: dict[str, Any] = {name: pack(column) for name, column in columns.items()}
        return cls(count=len(np.asarray(columns["slices"])), **packed)

    def columns(self) -> dict[str, Column]:
        """Those that are told."""
        told = (*self.COLUMNS, *(name for name in self.OPTIONAL if getattr(self, name)))
        return {name: unpack(getattr(self, name), self.count) for name in told}


class FetcherFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`waiting` rows of it wait for U, `since` the lowest time among them. `late` ones came too late."""

    progress: Progress
    waiting: Count
    since: Progress | None
    late: Count


class ProgressFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """U and F of a resident, those who have a part in them, and the updaters that U waits for. `late` are rows that came too
    late, by updater.
    """

    kind: str
    update: Progress
    fetch: Progress
    time_kind: KindOfTime
    updaters: dict[str, Progress]
    fetchers: dict[str, FetcherFigures]
    held_by: list[str]
    late: dict[str, Count] = msgspec.field(default_factory=dict)


class MoveFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A move of slices that is under way. `progress` goes from 0 to 1; `cause` is who wanted it, in a word or a few. `error`
    is what hindered it last.
    """

    id: Count
    slices: list[SliceId]
    source: int = msgspec.field(name="from")
    target: int = msgspec.field(name="to")
    phase: str = ""
    progress: float = 0.0
    cause: str = ""
    seconds_left: float | None = None
    error: str = ""


class SliceByResident(Message, frozen=True, tag=True):
    """What one slice holds and has done, by the name of the resident."""

    container: int
    residents: dict[Name, dict[str, Number]]


class AskSlice(Call[SliceByResident], frozen=True, tag=True):
    """Anyone to the coordinator, and on to the slice's owner."""

    senders: ClassVar[Senders] = READING | COORDINATOR
    reads: ClassVar[bool] = True
    seconds: ClassVar[float] = CONTAINER_S

    slice: Count


class ContainerFigures(Message, frozen=True, tag=True):
    """`residents` are figures by plural of kind and name; those of a name in several containers are added up."""

    metrics: dict[str, Number]
    residents: dict[str, dict[str, dict[str, Any]]]
    slices: SliceFigures


class AskFigures(Call[ContainerFigures], frozen=True, tag=True):
    """Coordinator to container."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = CONTAINER_S


class PondMetrics(Message, frozen=True, tag=True):
    """`away` are containers that tell nothing, and why. `moves` are under way; `task_slots` are `wanted` and `had`, where
    containers take any.
    """

    coordinator: dict[str, Number]
    containers: dict[int, dict[str, Number]]
    residents: dict[str, dict[str, dict[str, Any]]]
    slices: SliceFigures
    away: dict[int, str]
    progress: dict[Name, ProgressFigures]
    moves: list[MoveFigures]
    task_slots: dict[str, int]


class AskMetrics(Call[PondMetrics], frozen=True, tag=True):
    """Anyone to coordinator."""

    reads: ClassVar[bool] = True
    seconds: ClassVar[float] = POND_S
