"""How a message reaches its handler: the interface, and the form without sockets.

`Handler` is what serves (a container, the coordinator). `Connection` is what asks. Between them lies
Arrow Flight (`millpond.wire.flight`), or nothing at all (`LocalConnection`, for one process).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.errors import BadMessage, Unavailable
from millpond.wire.base import Call, Exchange, Message, Read
from millpond.wire.codec import BATCH_BYTES_MAX, check_size, decode, encode

R = TypeVar("R")


class SlicedBatch(NamedTuple):
    """Rows grouped by slice: first all of slice 0, then of slice 1, and so on. `counts[slice]` rows each."""

    batch: pa.RecordBatch
    counts: npt.NDArray[np.int32]


class Answer(NamedTuple, Generic[R]):
    """What an exchange gives back."""

    message: R
    batch: pa.RecordBatch | None = None


class Handler(Protocol):
    """Serves messages. Called from several threads at once."""

    def call(self, message: Any) -> Message: ...

    def exchange(self, message: Any, batches: Iterator[SlicedBatch]) -> Answer[Any]: ...

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
        answer = self._alive().exchange(decode(encode(message)), checked(batches))
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


def checked(batches: Iterable[SlicedBatch]) -> Iterator[SlicedBatch]:
    """The batches, each held to its limits: size, sound buffers, counts that add up."""
    for batch, counts in batches:
        check_size(batch.nbytes, BATCH_BYTES_MAX, "batch")
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise BadMessage(f"a batch is malformed: {error}") from None
        if len(counts) and (counts.min() < 0 or int(counts.sum(dtype=np.int64)) != batch.num_rows):
            raise BadMessage("the per-slice counts of a batch do not add up to its rows")
        yield SlicedBatch(batch, counts)
