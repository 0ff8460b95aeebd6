"""Every message of the pond, typed and validated on arrival.

A message is a frozen struct; `encode` and `decode` are the only way on and off the wire. Rows travel
beside a message as Arrow batches, never inside one.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import msgspec

from millpond.code.capture import Code
from millpond.code.rules import CompactRule, FetchName, UpdateRule
from millpond.code.tables import ProgramCode, TableSpec
from millpond.errors import BadMessage, BadName, MessageTooLarge
from millpond.times import TIME_MAX, TIME_MIN, Progress

CONTROL_BYTES_MAX = 4 << 20
BATCH_BYTES_MAX = 512 << 20
# Drains after one epoch of a fetcher.
DRAINS_MAX = 1024

# `\Z`, not `$`: a name does not end in a line break either.
NAME_PATTERN = r"^[a-z0-9_]{1,64}\Z"
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
# A Spark query id, or LOCAL_QUERY for operators on Arrow tables.
LOCAL_QUERY = "local"
Query = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
Writer = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9_]{1,64}@[A-Za-z0-9_.-]{1,128}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]


def check_name(name: str, what: str) -> str:
    """`name` itself if it is one; else BadName."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise BadName(
            f"{what} {name!r} is not a name",
            hint="a name has 1 to 64 lower-case letters, digits and underscores, for example 'ad_campaigns'",
            name=str(name),
        )
    return name


def check_progress(value: Progress | None) -> None:
    """A progress on the wire is a time, or infinite; neither a fraction nor NaN."""
    if isinstance(value, float) and not math.isinf(value):
        raise BadMessage(f"{value} is not a time")
    if isinstance(value, int) and not TIME_MIN <= value <= TIME_MAX:
        raise BadMessage(f"{value} is beyond all times")


def writer_id(updater: str, query: str) -> str:
    """One updater in one query: the unit whose epochs are numbered."""
    return f"{updater}@{query}"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Done(Message, frozen=True, tag=True):
    """The answer of calls that have nothing to tell."""


class StateSpec(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What a State is: its types as canonical DDL, and its rules."""

    name: Name
    key: str
    value: str
    update: UpdateRule
    compact: CompactRule


class GroupSpec(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Tables that live together, in the slice `home`: a transaction may touch any of them."""

    name: Name
    home: Count
    tables: dict[Name, TableSpec]


Spec = StateSpec | GroupSpec


class Transactions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the events of an epoch run: the program, the columns that tell kind, time and order, and the Arrow schema."""

    program: ProgramCode
    kind: str
    at: str
    seq: str | None
    schema: bytes


# Coordinator to container


class Assign(Message, frozen=True, tag=True):
    """Become container `container` in `term`: recover these slices and serve them.

    `decided` is the newest decided epoch of each writer of each state: log records beyond it were
    never acknowledged and are not applied.
    """

    term: Count
    container: Count
    slices: list[int]
    pond_slices: Count
    states: list[Spec]
    decided: dict[str, dict[str, int]]
    fetch_progress: dict[str, Progress]
    final_below: dict[str, Progress]


class Assigned(Message, frozen=True, tag=True):
    """What recovery found."""

    snapshots_loaded: Count
    records_replayed: Count
    rows_replayed: Count
    records_discarded: Count


class AddState(Message, frozen=True, tag=True):
    """A State, or a group; a group that is there already may have gained a table."""

    spec: Spec


class Prepare(Message, frozen=True, tag=True):
    """Make the staged rows of exactly these attempts durable. Nothing becomes visible."""

    state: Name
    writer: Writer
    epoch: Count
    attempts: dict[int, int]
    transactions: Transactions | None = None


class Prepared(Message, frozen=True, tag=True):
    """`term` tells which incarnation of the container vouches for it."""

    term: Count
    rows: Count
    digest: Unsigned64


class Discard(Message, frozen=True, tag=True):
    """An epoch that was prepared will not be decided as it is. Answers Done."""

    state: Name
    writer: Writer
    epoch: Count


class Apply(Message, frozen=True, tag=True):
    """Make a prepared epoch visible; it has been decided. Answers Done."""

    state: Name
    writer: Writer
    epoch: Count


class Advance(Message, frozen=True, tag=True):
    """F, and the time below which no update comes any more. Answers Done."""

    state: Name
    fetch_progress: Progress
    final_below: Progress

    def __post_init__(self) -> None:
        check_progress(self.fetch_progress)
        check_progress(self.final_below)


class Checkpoint(Message, frozen=True, tag=True):
    """Snapshot what is dirty, then truncate the log. Answers Done when finished."""


class ContainerStatus(Message, frozen=True, tag=True):
    """Ask a container for `ContainerReport`."""


class ContainerReport(Message, frozen=True, tag=True):
    term: Count
    needs: list[str]
    metrics: dict[str, float]
    states: dict[str, dict[str, float]]
    groups: dict[str, dict[str, Any]] = {}


# Anyone to container


class Stage(Message, frozen=True, tag=True):
    """Rows follow as batches grouped by slice, each with its per-slice counts. Answers Staged."""

    state: Name
    writer: Writer
    epoch: Count
    partition: Count
    attempt: Count


class Staged(Message, frozen=True, tag=True):
    rows: Count
    digest: Unsigned64


class Fetch(Message, frozen=True, tag=True):
    """Questions follow as one batch grouped by slice, with its per-slice counts. Answers come in the same order."""

    state: Name
    rule: FetchName
    code: Code | None = None
    returns: str = ""


class ReadSlices(Message, frozen=True, tag=True):
    """One row per key: the newest version with time <= `at`; of all its versions if `at` is +inf."""

    state: Name
    at: Progress

    def __post_init__(self) -> None:
        check_progress(self.at)


class ReadTable(Message, frozen=True, tag=True):
    """Every row of a table, as whole epochs left it."""

    group: Name
    table: Name


class FindRows(Message, frozen=True, tag=True):
    """Keys follow as one batch. Answers are the rows of those that are there."""

    group: Name
    table: Name


class ReadOutputs(Message, frozen=True, tag=True):
    """What an epoch of transactions gave: the events `start` to `stop`, with their outcomes."""

    group: Name
    writer: Writer
    epoch: Count
    start: Count
    stop: Count


# Anyone to coordinator


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one task staged: the driver commits exactly the receipts it collected."""

    partition: Count
    attempt: Count
    rows: Count
    late: Count
    digest: Unsigned64
    time_max: int | None


class OpenState(Message, frozen=True, tag=True):
    spec: StateSpec


class ListStates(Message, frozen=True, tag=True):
    pass


class StateList(Message, frozen=True, tag=True):
    """All States and groups."""

    states: list[Spec]


class OpenTable(Message, frozen=True, tag=True):
    """Let a table exist in a group, and the group if it is the first. Opening it again changes nothing."""

    group: Name
    name: Name
    spec: TableSpec


class Locate(Message, frozen=True, tag=True):
    """Ask for the `Placement`."""


class ContainerInfo(msgspec.Struct, frozen=True):
    id: int
    pid: int
    address: str
    slices: tuple[int, ...]


class Placement(Message, frozen=True, tag=True):
    """`owners[slice]` is the id of the container that serves the slice."""

    root: str
    slices: Count
    owners: list[int]
    containers: list[ContainerInfo]


class Register(Message, frozen=True, tag=True):
    """Let an updater or a fetcher exist. Registering again changes nothing."""

    state: Name
    name: Name
    role: str


class BeginEpoch(Message, frozen=True, tag=True):
    state: Name
    updater: Name
    query: Query
    epoch: Count


class EpochPlan(Message, frozen=True, tag=True):
    """Rows below `late_below` are late in this epoch, also when it is replayed."""

    late_below: Progress
    time_kind: str
    replayed: bool


class CommitEpoch(Message, frozen=True, tag=True):
    state: Name
    updater: Name
    query: Query
    epoch: Count
    delay: Count
    late_below: Progress
    time_kind: Literal["", "timestamp", "long"]
    receipts: list[Receipt]
    transactions: Transactions | None = None

    def __post_init__(self) -> None:
        check_progress(self.late_below)


class EpochCommitted(Message, frozen=True, tag=True):
    """`replayed` says that the epoch was already there and nothing changed."""

    epoch: Count
    rows: Count
    late: Count
    watermark: Progress
    replayed: bool


class Pin(Message, frozen=True, tag=True):
    """Fix what a fetcher's epoch sees, before anything of it runs. Asked again, the answer is the same.

    `drain` numbers the drains after an epoch: turns in which rows that wait are answered, and no new ones come.
    """

    state: Name
    fetcher: Name
    query: Query
    epoch: Count
    drain: Count = 0


class Pinned(Message, frozen=True, tag=True):
    """Rows below `late_below` are too late to be asked. `previous` is the epoch and drain whose waiting rows join.

    `oldest` is the oldest epoch and drain whose waiting rows may be asked for again.
    """

    update: Progress
    late_below: Progress
    time_kind: str
    previous: tuple[int, int] | None
    oldest: tuple[int, int]


class Answered(Message, frozen=True, tag=True):
    """A fetcher's epoch is answered, but for the rows that wait. Moves the fetcher's progress.

    `lowest` is the lowest time that a waiting row asks for. `watermark` is the time below which the fetcher
    will ask for no more new rows; None while it cannot tell.
    """

    state: Name
    fetcher: Name
    query: Query
    epoch: Count
    waiting: Count
    late: Count
    lowest: Progress | None
    watermark: Progress | None
    drain: Count = 0

    def __post_init__(self) -> None:
        check_progress(self.lowest)
        check_progress(self.watermark)


class AskPending(Message, frozen=True, tag=True):
    state: Name
    fetcher: Name


class Pending(Message, frozen=True, tag=True):
    """Rows of a fetcher that wait for U, since the time `since`, as of its last epoch.

    `drains` are the queries that have such rows, if U has moved since they were last asked: the epoch and drain in
    which they can be answered next, and those that left them. `unfinished` queries were stopped in their last epoch.
    """

    rows: Count
    since: Progress | None
    late: Count
    drains: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}
    unfinished: list[str] = []


class Report(Message, frozen=True, tag=True):
    """Explicit progress of an updater or a fetcher. A value below the present one changes nothing."""

    state: Name
    name: Name
    update: Progress | None
    fetch: Progress | None

    def __post_init__(self) -> None:
        check_progress(self.update)
        check_progress(self.fetch)


class AskProgress(Message, frozen=True, tag=True):
    state: Name


class StateProgress(Message, frozen=True, tag=True):
    """U, F and who holds them."""

    update: Progress
    fetch: Progress
    updaters: dict[str, Progress]
    fetchers: dict[str, Progress]
    late: dict[str, int]
    time_kind: str


class AskMetrics(Message, frozen=True, tag=True):
    pass


class PondMetrics(Message, frozen=True, tag=True):
    coordinator: dict[str, float]
    containers: dict[int, dict[str, float]]
    states: dict[str, dict[str, float]]
    groups: dict[str, dict[str, Any]] = {}


ContainerCall = Assign | AddState | Prepare | Discard | Apply | Advance | Checkpoint | ContainerStatus
ContainerExchange = Stage | Fetch | FindRows
ContainerRead = ReadSlices | ReadTable | ReadOutputs
CoordinatorCall = (
    OpenState
    | OpenTable
    | ListStates
    | Locate
    | Register
    | BeginEpoch
    | CommitEpoch
    | Pin
    | Answered
    | AskPending
    | Report
    | AskProgress
    | AskMetrics
    | Checkpoint
)
AnyMessage = (
    ContainerCall
    | ContainerExchange
    | ContainerRead
    | CoordinatorCall
    | Done
    | Assigned
    | Prepared
    | ContainerReport
    | Staged
    | StateList
    | Placement
    | EpochPlan
    | EpochCommitted
    | Pinned
    | Pending
    | StateProgress
    | PondMetrics
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    data = _encoder.encode(message)
    check_size(len(data), CONTROL_BYTES_MAX, "message")
    return data


def decode(data: bytes | memoryview) -> Any:
    """The message in `data`, or BadMessage / MessageTooLarge."""
    check_size(len(data), CONTROL_BYTES_MAX, "message")
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(
            f"a message could not be read: {error}",
            hint="client and pond must run the same version of millpond",
        ) from None


def check_size(size: int, limit: int, what: str) -> None:
    if size > limit:
        raise MessageTooLarge(
            f"a {what} of {size:,} bytes is beyond the limit of {limit:,}",
            hint="send fewer rows at once" if limit == BATCH_BYTES_MAX else "",
            size=size,
            limit=limit,
        )
