"""How a message reaches its handler: the interface, and the form without sockets.

`Handler` is what serves (a container, the coordinator). `Connection` is what asks. Between them lies
Arrow Flight (`millpond.wire.flight`), or nothing at all (`LocalConnection`, for one process).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.errors import BadMessage, Unavailable, WrongType
from millpond.wire.backups import BackUp
from millpond.wire.base import Call, Exchange, Message, Read
from millpond.wire.codec import BATCH_BYTES_MAX, check_size, decode, encode
from millpond.wire.epochs import Stage
from millpond.wire.rounds import RoundRows

COLUMNS_MAX = 10_000
ROW_BYTES_MIN = 8

R = TypeVar("R")


class SlicedBatch(NamedTuple):
    """Rows grouped by slice: first all of slice 0, then of slice 1, and so on. `counts[slice]` rows each."""

    batch: pa.RecordBatch
    counts: npt.NDArray[np.int32]


def _nothing() -> None:
    pass


class Answer(NamedTuple, Generic[R]):
    """What an exchange gives back. Whoever carries it calls `sent` when it has gone, or cannot go."""

    message: R
    batch: pa.RecordBatch | None = None
    sent: Callable[[], None] = _nothing


class Handler(Protocol):
    """Serves messages. Called from several threads at once."""

    def call(self, message: Any) -> Message: ...

    def exchange(
        self, message: Any, batches: Iterator[SlicedBatch], reads_only: bool = False
    ) -> Answer[Any]: ...

    def read(self, message: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]: ...


class Connection(Protocol):
    """Asks one handler. Raises what the handler raised; `Unavailable` if it cannot be reached."""

    def call(self, message: Call[R]) -> R: ...

    def exchange(self, message: Exchange[R], batches: Sequence[SlicedBatch]) -> Answer[R]: ...

    def read(self, message: Read) -> pa.Table: ...

    def close(self) -> None: ...


class Dialer(Protocol):
    """Makes a connection to an address. Nothing is sent yet."""

    def __call__(self, address: str) -> Connection: ...


class LocalConnection:
    """A handler in the same process. Messages still go through their encoding, so that both forms validate alike."""

    def __init__(self, handler: Handler | None) -> None:
        self._handler = handler

    def _alive(self) -> Handler:
        if self._handler is None:
            raise Unavailable("the container has ended", address="local")
        return self._handler

    def call(self, message: Call[R]) -> R:
        return reply_to(message, encode(self._alive().call(decode(encode(message)))))

    def exchange(self, message: Exchange[R], batches: Sequence[SlicedBatch]) -> Answer[R]:
        check_alike(batches)
        answer = self._alive().exchange(decode(encode(message)), checked(message, batches))
        answer.sent()
        return Answer(reply_to(message, encode(answer.message)), answer.batch)

    def read(self, message: Read) -> pa.Table:
        schema, batches = self._alive().read(decode(encode(message)))
        return pa.Table.from_batches(list(batches), schema)

    def close(self) -> None:
        pass

    def sever(self) -> None:
        """From now on the handler does not answer, as if its process had ended."""
        self._handler = None


def reply_to(message: Call[R], data: bytes | memoryview) -> R:
    """The answer in `data`; BadMessage if it is none to that call."""
    reply = decode(data)
    if type(reply) is not message.reply:
        raise BadMessage(f"{type(message).__name__} was answered by {type(reply).__name__}")
    return cast(R, reply)


def check_alike(batches: Sequence[SlicedBatch]) -> None:
    """What is said in one exchange is of one schema: so Flight has it."""
    if any(not each.batch.schema.equals(batches[0].batch.schema) for each in batches[1:]):
        raise BadMessage("an exchange has batches of several schemas")


def checked(message: Any, batches: Iterable[SlicedBatch]) -> Iterator[SlicedBatch]:
    """The batches that come with a message, each held to its limits: types, sound buffers, size, counts that add up.

    In this order: what is not sound must not even be measured, as a length that lies is a read out of bounds.
    """
    for batch, counts in batches:
        _check_types(batch.schema, nested=isinstance(message, Stage | BackUp | RoundRows))
        try:
            batch.validate(full=True)
        except pa.ArrowException as error:
            raise BadMessage(f"a batch is malformed: {error}") from None
        # Rows of types that take no room cost time all the same.
        check_size(max(batch.nbytes, ROW_BYTES_MIN * batch.num_rows), BATCH_BYTES_MAX, "batch")
        if len(counts) and (counts.min() < 0 or int(counts.sum(dtype=np.int64)) != batch.num_rows):
            raise BadMessage("the per-slice counts of a batch do not add up to its rows")
        yield SlicedBatch(batch, counts)


def _check_types(schema: pa.Schema, nested: bool) -> None:
    """Questions have plain columns alone; rows that are staged, and of rounds, may have nested ones, and an event's any that has
    a digest.
    """
    if len(schema) > COLUMNS_MAX:
        raise BadMessage(f"a batch has {len(schema):,} columns, more than {COLUMNS_MAX:,}")
    for field in schema:
        if not (_is_plain(field.type) or (nested and _is_sound(field.type))):
            raise WrongType(
                f"column {field.name[:64]!r} has a type that does not travel: {str(field.type)[:200]}",
                hint="cast it to a type that Spark has",
                column=field.name[:64],
                expected="a Spark type",
                actual=str(field.type)[:200],
            )


def _is_plain(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_primitive(type_)
        or types.is_string(type_)
        or types.is_binary(type_)
        or types.is_large_string(type_)
        or types.is_large_binary(type_)
        or types.is_fixed_size_binary(type_)
        or types.is_decimal(type_)
    )


def _is_sound(type_: pa.DataType) -> bool:
    """Not a union, a view or a run-end encoded one, at any depth."""
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _is_sound(type_.storage_type)
    if types.is_dictionary(type_):
        return _is_sound(type_.value_type)
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return _is_sound(type_.value_type)
    if types.is_map(type_):
        return _is_sound(type_.key_type) and _is_sound(type_.item_type)
    if types.is_struct(type_):
        return all(_is_sound(field.type) for field in type_)
    return _is_plain(type_) or bool(types.is_null(type_))
