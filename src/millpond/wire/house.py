"""Messages about the pond itself: its residents, its containers and its slices. Its figures are in `wire.figures`."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import msgspec

from millpond.errors import BadMessage
from millpond.times import Progress
from millpond.wire.base import (
    LONG_CALL_S,
    Call,
    Count,
    Directory,
    DirectoryOrNone,
    Done,
    IdOnDisk,
    Landmark,
    Message,
    Name,
    Query,
    SliceId,
    Term,
    Turn,
    Writer,
    check_progress,
)
from millpond.wire.roles import COORDINATOR, Senders
from millpond.wire.specs import Resident, Spec

# Coordinator to container


class Assign(Call[Done], frozen=True, tag=True):
    """Become container `container` in `term`, with these residents and no slices yet. It must see the `landmark`."""

    senders: ClassVar[Senders] = COORDINATOR

    term: Term
    container: Count
    pond_slices: Count
    residents: list[Resident]
    threads: Count = 0
    """To work on slices with; 0 for as many as it was started with."""
    landmark: Landmark = ""


class Adopt(Call[Done], frozen=True, tag=True):
    """Take over slices, each from the directory of the incarnation that had it last; "" for one that is new.

    `decided` is the newest decided turn of each writer of each resident: log records beyond it were never
    acknowledged and are not applied. `careful` is the term of an earlier start that ended half-way, 0 if none did: then
    a mark is left before each record, and a resident whose record ended a start since then comes up broken.
    `order` numbers what the coordinator says about slices: a message that comes late counts no more.
    """

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    order: Count
    slices: dict[SliceId, DirectoryOrNone]
    decided: dict[Name, dict[Writer, Turn]]
    careful: Term = Term(0)
    epochs: dict[Name, Count] = msgspec.field(default_factory=dict)
    """How many each resident has."""


class Confirm(Call[Done], frozen=True, tag=True):
    """The journal says that these slices are here. Until it does, all that they rested on before stays as it is."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    order: Count
    slices: list[SliceId]


class Release(Call[Done], frozen=True, tag=True):
    """Serve these slices no more. What they rest on stays on disk for whoever adopts them."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    order: Count
    slices: list[SliceId]


class LetGo(Call[Done], frozen=True, tag=True):
    """Of what lies in these directories of the container, no other one needs anything: what slices rested on that went
    need not stay. Of its snapshots, others rest on those that are `needed`.
    """

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    order: Count
    directories: list[Directory]
    needed: list[str]


class AddResident(Call[Done], frozen=True, tag=True):
    """A resident that is new, or has grown: a group that is there already may have gained a table."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    resident: Resident


class DropResident(Call[Done], frozen=True, tag=True):
    """Let go of a resident and of its files."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    name: Name
    born: Count


class ForgetWriters(Call[Done], frozen=True, tag=True):
    """Let go of what is remembered of these writers: they send no more."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    resident: Name
    writers: list[Writer]


class Advance(Call[Done], frozen=True, tag=True):
    """F, and the time below which no update comes any more."""

    senders: ClassVar[Senders] = COORDINATOR

    resident: Name
    fetch_progress: Progress
    final_below: Progress

    def __post_init__(self) -> None:
        check_progress(self.fetch_progress)
        check_progress(self.final_below)


class Checkpoint(Call[Done], frozen=True, tag=True):
    """Snapshot what is dirty, then truncate the log. What is held as a backup hears by `decided` what was."""

    senders: ClassVar[Senders] = COORDINATOR
    seconds: ClassVar[float] = LONG_CALL_S

    decided: dict[Name, dict[Writer, Turn]] = msgspec.field(default_factory=dict)


class Pulse(Message, frozen=True, tag=True):
    """A container answers. Its last small write to its disk took so many seconds, or has taken them so far; for ever,
    where its directory is gone.

    `number` counts what it has answered.
    """

    disk_s: float
    number: Count = 0


class Ping(Call[Pulse], frozen=True, tag=True):
    """Whether a container answers. Nothing that it does holds this up.

    With a lease it answers others for so long after its answer `heard`, the last that reached the coordinator: a question
    that waited while the container was stopped brings it nothing.
    """

    seconds: ClassVar[float] = 2.0

    lease_s: float | None = None
    heard: Count = 0

    senders: ClassVar[Senders] = COORDINATOR


class ContainerReport(Message, frozen=True, tag=True):
    """`needs` are the directories whose logs its slices rest on, `behind` the ids of residents that could not be snapshotted."""

    needs: list[Directory]
    behind: list[IdOnDisk]


class ContainerStatus(Call[ContainerReport], frozen=True, tag=True):
    senders: ClassVar[Senders] = COORDINATOR


class SnapshotList(Message, frozen=True, tag=True):
    names: list[str]


class ListSnapshots(Call[SnapshotList], frozen=True, tag=True):
    """The names of the snapshots of a resident that slices here rest on, if other incarnations wrote them."""

    senders: ClassVar[Senders] = COORDINATOR

    resident: IdOnDisk


# Anyone to coordinator


class OpenResident(Call[Done], frozen=True, tag=True):
    """Let it exist. One that exists must be the same, or a group that gains a table."""

    seconds: ClassVar[float] = LONG_CALL_S

    spec: Spec


class CheckpointAll(Call[Done], frozen=True, tag=True):
    """Let every container checkpoint."""

    seconds: ClassVar[float] = LONG_CALL_S


class ResidentList(Message, frozen=True, tag=True):
    residents: list[Spec]


class ListResidents(Call[ResidentList], frozen=True, tag=True):
    """All residents of a kind."""

    reads: ClassVar[bool] = True

    kind: str


class ContainerInfo(msgspec.Struct, frozen=True):
    id: int
    pid: int
    address: str
    slices: tuple[SliceId, ...]


class Placement(Message, frozen=True, tag=True):
    """`owners[slice]` is the id of the container that serves the slice, as of `version`.

    Who finds the `landmark` under `root` sees the pond's root. Of containers that could not be started, `away` says why.
    With `since` it is what has `changed` since that version: then there are no `owners`, nor the containers' slices, until
    it is `completed`.
    """

    root: str
    version: Count
    owners: list[int]
    containers: list[ContainerInfo]
    landmark: Landmark = ""
    away: dict[int, str] = msgspec.field(default_factory=dict)
    since: Count | None = None
    changed: dict[SliceId, int] = msgspec.field(default_factory=dict)
    seen: dict[Name, tuple[Count, Count]] = msgspec.field(default_factory=dict)
    """Of each resident, when it was born and how many of its epochs are visible."""

    @property
    def slices(self) -> int:
        return len(self.owners)

    def completed(self, known: Placement) -> Placement:
        """The whole, from the one that was known when this was asked for."""
        if self.since != known.version or any(number >= known.slices for number in self.changed):
            raise BadMessage(
                f"what changed since version {self.since} does not go with version {known.version}"
            )
        owners = list(known.owners)
        slices: dict[int, list[SliceId]] = {}
        for number, owner in self.changed.items():
            owners[number] = owner
        for place, owner in enumerate(owners):
            slices.setdefault(owner, []).append(SliceId(place))
        containers = [
            msgspec.structs.replace(info, slices=tuple(slices.get(info.id, ()))) for info in self.containers
        ]
        return msgspec.structs.replace(self, owners=owners, containers=containers, since=None, changed={})


class Locate(Call[Placement], frozen=True, tag=True):
    """Where slices are. Whoever asks has missed a container: one that is away is brought back.

    Who knows a version is told what has changed since then, if that is remembered and is little.
    """

    reads: ClassVar[bool] = True

    known: Count | None = None


class Register(Call[Done], frozen=True, tag=True):
    """Let an updater or a fetcher exist. Registering again changes nothing but `idle_s`.

    An updater of which no rows came for `idle_s` seconds is left out of U.
    """

    resident: Name
    name: Name
    role: Literal["updater", "fetcher"]
    idle_s: float | None = None

    def __post_init__(self) -> None:
        if self.idle_s is not None and not 0 < self.idle_s < math.inf:
            raise BadMessage(f"{self.idle_s} is no number of seconds to be idle for")


class Forget(Call[Done], frozen=True, tag=True):
    """Let go of a resident; or of an operator's name at a resident; or of one query of it."""

    seconds: ClassVar[float] = LONG_CALL_S

    resident: Name
    name: Name | None = None
    query: Query | None = None
    table: Name | None = None
