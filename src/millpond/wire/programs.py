"""A program on the wire: its spec, what its epochs bring, and what it is asked."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from millpond.code.capture import Code
from millpond.wire.base import Ask, Count, Message, Read, SliceId, Turn, Writer
from millpond.wire.resident import ResidentSpec
from millpond.wire.roles import STAGING, Senders

Lanes = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class FieldSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A field of a program: whether its entries are by key in slices or by lane, its element, and types as DDL.

    `since` is the revision of the program by which it became so: entries from before are no entries of it.
    """

    kind: Literal["partitioned", "partial"]
    element: Literal["map", "vector", "matrix", "dense"]
    key: str
    value: str
    since: Count = 0

    def is_like(self, other: FieldSpec) -> bool:
        """Whether both hold the same, whenever they came to."""
        return (self.kind, self.types) == (other.kind, other.types)

    @property
    def types(self) -> tuple[str, str, str]:
        """What its entries are."""
        return self.element, self.key, self.value

    @property
    def words(self) -> str:
        return f"{self.kind} {self.element}, {self.key} to {self.value}"


class ProgramSpec(ResidentSpec, frozen=True, tag="program", forbid_unknown_fields=True):
    """What a program keeps. Its code is not here: each epoch brings its own. It lives in all slices.

    Lane l of its partial fields lives in the slice `home_of(l)`. `revision` counts the migrations that it has been through.
    """

    kind: ClassVar[str] = "program"
    plural: ClassVar[str] = "programs"

    lanes: Lanes
    fields: dict[str, FieldSpec]
    revision: Count = 0

    @property
    def runs_code(self) -> bool:
        return True

    @property
    def replays_code(self) -> bool:
        """The log has what epochs have changed."""
        return False

    @property
    def runs_rounds(self) -> bool:
        return True

    def home_of(self, lane: int, slices: int) -> SliceId:
        """The slice that a lane lives in, of so many."""
        return SliceId(lane * slices // self.lanes)


class ProgramWork(msgspec.Struct, frozen=True, tag="program", forbid_unknown_fields=True):
    """The epoch's rows are calls of a method, as the `graph` has it, whose arguments are columns of these names.

    `schema` is that of the rows, with a key and their order before them. `into` is the column of results, if they are
    wanted. The calls may run for `seconds_max` in all rounds, and take `memory_max` bytes. Where rows have a column `once`, of
    idempotency keys, each call comes by the slice of its key. `version` tells this code from other code of the program.
    """

    graph: bytes
    method: str
    arguments: dict[str, str]
    schema: bytes
    into: str | None = None
    seconds_max: float | None = None
    memory_max: Count | None = None
    once: str | None = None
    version: str = ""


class FieldMigration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of the entries of the field `source`: `function` makes other ones of each, `merge` one of two that come to
    one place. Without them entries stay as they are, and are added.
    """

    source: str
    function: Code | None = None
    merge: Code | None = None


class MigrationWork(msgspec.Struct, frozen=True, tag="migration", forbid_unknown_fields=True):
    """The epoch brings no rows: from it on the program, which is as `before`, is as `after`. These fields are made anew from
    what there is.
    """

    before: ProgramSpec
    after: ProgramSpec
    fields: dict[str, FieldMigration]


class TasksRan(Message, frozen=True, tag=True):
    """`seen` tells where writers stood in the slices that were looked at, one text for each state that there was: where all
    that a call saw is of one state, it saw whole epochs. What is not decided is not seen.
    """

    seen: list[bytes] = msgspec.field(default_factory=list)


class RunTasks(Ask[TasksRan], frozen=True, tag=True):
    """Calls of a method that only reads follow as one batch grouped by slice: each runs its next tasks here.

    Answers are what comes of them, and the slices for which that is. `lanes` are as many as whoever asks knows of.
    """

    senders: ClassVar[Senders] = STAGING

    graph: bytes
    method: str
    lanes: Lanes


class ReadReturned(Read, frozen=True, tag=True):
    """What the calls of a turn returned that came by these slices; or only which columns that has."""

    writer: Writer
    turn: Turn
    slices: list[SliceId]
    columns_only: bool = False


class ReadEntries(Read, frozen=True, tag=True):
    """The entries of a field in these slices, as whole epochs left them."""

    field: str
    slices: list[SliceId]
