"""What every message is made of: names, numbers, turns; and what a message says of itself.

A message is a frozen struct. A `Request` says who may send it, whether it only reads, whether it brings code, and how
long it may take; a `Call` also what it is answered by.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Generic, Literal, NewType, Self, TypeVar, get_args

import msgspec

from millpond.errors import BadMessage, BadName
from millpond.times import TIME_MAX, TIME_MIN, Progress
from millpond.wire.roles import CLIENTS, READING, SENDING_CODE, Senders

# Drains after one epoch.
DRAINS_MAX = 1024
CALL_S = 120.0
# Recovery, checkpoints and user code take as long as there is much to do; a commit waits for a container to recover.
LONG_CALL_S = 3600.0

_NAME = r"[a-z0-9_]{1,64}"
_QUERY = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIRECTORY = r"t[0-9]{8}-c[0-9]{4}b?"
# `\Z`, not `$`: a name does not end in a line break either.
NAME_PATTERN = rf"^{_NAME}\Z"
Name = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
# A Spark query id, or LOCAL_QUERY for operators on Arrow tables.
LOCAL_QUERY = "local"
QUERY_PATTERN = rf"^{_QUERY}\Z"
Query = Annotated[str, msgspec.Meta(pattern=QUERY_PATTERN)]
Writer = Annotated[str, msgspec.Meta(pattern=rf"^{_NAME}@{_QUERY}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
KindOfTime = Literal["", "timestamp", "long"]
"""Empty as long as nobody has told."""
Unsigned64 = Annotated[int, msgspec.Meta(ge=0)]

SliceId = NewType("SliceId", int)
"""One of the pond's slices, counted from 0."""
ResidentId = NewType("ResidentId", str)
"""A resident's name on disk, which no later one of the same name has."""
IdOnDisk = Annotated[ResidentId, msgspec.Meta(pattern=rf"^{_NAME}\.[0-9]{{1,19}}\Z")]
"""The same, held to its form: it becomes part of a path."""
Directory = Annotated[str, msgspec.Meta(pattern=rf"^{_DIRECTORY}\Z")]
"""That of one incarnation of a container; with a `b`, that of the slices which it holds as a backup."""
DirectoryOrNone = Annotated[str, msgspec.Meta(pattern=rf"^({_DIRECTORY})?\Z")]
ListToken = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,32}\Z")]
"""Names a list of waiting rows; empty where none wait."""
WaitingName = Annotated[
    str, msgspec.Meta(pattern=r"^(list-[0-9a-f]{1,32}|[0-9a-f]{1,32}-[0-9a-f]{16})\.arrow\Z")
]
"""A file of waiting rows, or a list of such files."""
Landmark = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""What tells a pond's root from any other directory; empty where nobody made one."""
Term = NewType("Term", int)
"""Numbers the incarnations of containers: what an older one writes counts for nothing."""
Epoch = NewType("Epoch", int)
"""One micro-batch of a query, as Spark numbers it."""


class Turn(msgspec.Struct, frozen=True, order=True):
    """An epoch (`drain` is 0), or one of the drains that come after it, before the next epoch."""

    epoch: Annotated[Epoch, msgspec.Meta(ge=0, le=2**63 - 1)]
    drain: Annotated[int, msgspec.Meta(ge=0, lt=DRAINS_MAX)] = 0

    @property
    def number(self) -> int:
        """What a sink is told: Spark's own number, or for a drain one below zero."""
        return self.epoch if self.drain == 0 else -(self.epoch * DRAINS_MAX + self.drain)

    @property
    def next_epoch(self) -> Turn:
        return Turn(Epoch(self.epoch + 1))

    @property
    def next_drain(self) -> Turn:
        return Turn(self.epoch, self.drain + 1)

    @classmethod
    def of(cls, number: int) -> Self:
        """The turn that a sink knows by that number."""
        if number >= 0:
            return cls(Epoch(number))
        epoch, drain = divmod(-number, DRAINS_MAX)
        return cls(Epoch(epoch), drain)

    def __str__(self) -> str:
        return f"{self.epoch}" if self.drain == 0 else f"{self.epoch} (drain {self.drain})"


def check_name(name: str, what: str) -> str:
    """`name` itself if it is one; else BadName."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise BadName(
            f"{what} {name!r} is not a name",
            hint="a name has 1 to 64 lower-case letters, digits and underscores, for example 'ad_campaigns'",
            name=str(name),
        )
    return name


def check_query(query: str) -> str:
    """`query` itself if it can be the id of a query; else BadName."""
    if not isinstance(query, str) or not re.fullmatch(QUERY_PATTERN, query):
        raise BadName(
            f"{query!r} is not the id of a query",
            hint="Spark gives each streaming query an id; it has letters, digits, '_', '.' and '-'",
            name=str(query),
        )
    return query


def check_progress(value: Progress | None) -> None:
    """A progress on the wire is a time, or infinite; neither a fraction nor NaN."""
    if isinstance(value, float) and not math.isinf(value):
        raise BadMessage(f"{value} is not a time")
    if isinstance(value, int) and not TIME_MIN <= value <= TIME_MAX:
        raise BadMessage(f"{value} is beyond all times")


def writer_id(operator: str, query: str) -> str:
    """One operator in one query: the unit whose epochs are numbered."""
    return f"{operator}@{query}"


def operator_of(writer: str) -> str:
    return writer.partition("@")[0]


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all that travels."""


class Request(Message, frozen=True, tag=True):
    """A message that is answered."""

    reads: ClassVar[bool] = False
    """Whether it changes nothing."""
    senders: ClassVar[Senders] = CLIENTS
    """The roles that may send it. By default clients; what only reads, tasks and readers too."""
    brings_code: ClassVar[bool] = False
    """Whether user code comes with it: then a reader may not send it."""
    seconds: ClassVar[float] = CALL_S
    """How long the answer may take."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.reads and "senders" not in cls.__dict__:
            cls.senders = READING

    @property
    def permitted(self) -> Senders:
        """The roles that may send this very message."""
        return self.senders & SENDING_CODE if self.brings_code else self.senders


R = TypeVar("R")


class Call(Request, Generic[R], frozen=True, tag=True):
    """Answered by an `R`."""

    reply: ClassVar[Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        (cls.reply,) = get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]


class Exchange(Call[R], Generic[R], frozen=True, tag=True):
    """To a container, for one resident: rows follow, and rows may come back beside the `R`."""

    resident: Name


class Ask(Exchange[R], Generic[R], frozen=True, tag=True, kw_only=True):
    """An exchange that asks what slices hold. It changes nothing.

    `seen` is how many of the resident's epochs whoever asks knows to be visible: an owner that has fewer is behind. So is
    one that knows an earlier resident of that name than the one that was `born` so, if that is known.
    """

    reads: ClassVar[bool] = True

    seen: Count = 0
    born: Count = 0


class _Seeing(Request, frozen=True, tag=True, kw_only=True):
    seen: Count = 0
    born: Count = 0


class Read(_Seeing, frozen=True, tag=True):
    """To a container, for one resident: answered by rows alone. It changes nothing. `seen` and `born` are as those of `Ask`."""

    reads: ClassVar[bool] = True
    senders: ClassVar[Senders] = READING

    resident: Name


class Done(Message, frozen=True, tag=True):
    """The answer of calls that have nothing to tell."""
