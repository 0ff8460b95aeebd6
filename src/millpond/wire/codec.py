"""`encode` and `decode` are the only way on and off the wire: what comes in is typed and validated.

Rows travel beside a message as Arrow batches, never inside one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Union

import msgspec

from millpond.errors import BadMessage, MessageTooLarge
from millpond.wire import (  # noqa: F401 - the messages that there are
    backups,
    epochs,
    figures,
    house,
    moves,
    passes,
    questions,
    rounds,
    waiting,
)
from millpond.wire.base import Message

CONTROL_BYTES_MAX = 4 << 20
BATCH_BYTES_MAX = 512 << 20


def _kinds_of(base: type[Any]) -> Iterator[type[Any]]:
    """Messages are what has no kinds of its own."""
    kinds = base.__subclasses__()
    if not kinds:
        yield base
    for kind in kinds:
        yield from _kinds_of(kind)


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Union[tuple(_kinds_of(Message))])  # noqa: UP007 - of a list


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
