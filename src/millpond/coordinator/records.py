"""What the coordinator remembers: all of it immutable, all of it in the journal."""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from millpond.times import Progress
from millpond.wire.messages import Spec, writer_id

EPOCHS_REMEMBERED = 64


class EpochRecord(msgspec.Struct, frozen=True):
    """One decided epoch: enough to recognise its replay and to filter late rows in it alike."""

    epoch: int
    digest: int
    rows: int
    late: int
    late_below: Progress
    watermark: Progress


class QueryRecord(msgspec.Struct, frozen=True):
    """The epochs of one updater in one query; `recent` holds the newest, oldest first."""

    first: int
    recent: tuple[EpochRecord, ...]

    @property
    def last(self) -> int:
        return self.recent[-1].epoch


class UpdaterRecord(msgspec.Struct, frozen=True):
    """`watermark` is the updater's progress: -inf before its first epoch, +inf once it has finished."""

    watermark: Progress
    late: int = 0
    queries: dict[str, QueryRecord] = {}


class PinRecord(msgspec.Struct, frozen=True):
    """What one epoch of a fetcher saw; once it was answered, also what is left waiting of it."""

    epoch: int
    update: Progress
    late_below: Progress
    answered: bool = False
    waiting: int = 0
    lowest: Progress | None = None
    drain: int = 0


class FetcherRecord(msgspec.Struct, frozen=True):
    """`progress` is the lowest time that the fetcher may still ask for: of new rows, and of those that wait."""

    progress: Progress
    watermark: Progress = -math.inf
    late: int = 0
    queries: dict[str, tuple[PinRecord, ...]] = {}


class StateRecord(msgspec.Struct, frozen=True):
    """Of a State, or of a group of tables. `update_progress` and `fetch_progress` are U and F; neither ever falls."""

    spec: Spec
    time_kind: str = ""
    updaters: dict[str, UpdaterRecord] = {}
    fetchers: dict[str, FetcherRecord] = {}
    update_progress: Progress = -math.inf
    fetch_progress: Progress = -math.inf


class PondRecord(msgspec.Struct, frozen=True):
    """`term` numbers the incarnations of containers: each start of one takes the next.

    `rests_on` are the directories of those that took part in a decision and may still be needed.
    """

    slices: int
    term: int = 0
    rests_on: tuple[str, ...] = ()
    states: dict[str, StateRecord] = {}

    def decided(self) -> dict[str, dict[str, int]]:
        """The newest decided epoch of every writer of every state."""
        return {
            name: {
                writer_id(updater, query): epochs.last
                for updater, record in state.updaters.items()
                for query, epochs in record.queries.items()
            }
            for name, state in self.states.items()
        }

    def with_state(self, state: StateRecord) -> PondRecord:
        """The pond in which that State, or group, is as given."""
        return replace(self, states={**self.states, state.spec.name: state})
