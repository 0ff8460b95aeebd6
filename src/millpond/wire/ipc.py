"""The head of an Arrow IPC message, read by hand and within its bounds, before Arrow decodes what it announces.

It is a flatbuffer (`Message.fbs` of Arrow's format): tables, each with a list of where its fields are. Read here is
only what says how much a message would cost.
"""

from __future__ import annotations

import struct
from typing import Literal, NamedTuple

from millpond.errors import BadMessage

Kind = Literal["schema", "record batch", "dictionary batch", "other"]

HEAD_BYTES_MAX = 1 << 20
"""Arrow makes some hundred bytes of each column that a schema names: what names too many is not read."""

_UOFFSET = struct.Struct("<I")
_SOFFSET = struct.Struct("<i")
_VOFFSET = struct.Struct("<H")
_SHORT = struct.Struct("<h")
_BYTE = struct.Struct("<B")
_LONG = struct.Struct("<q")

# Fields by their places in Message, RecordBatch and DictionaryBatch.
_VERSION, _HEADER_TYPE, _HEADER, _BODY_LENGTH = range(4)
_COMPRESSION = 3
_DICTIONARY_DATA = 1
_V5 = 4
_KINDS: dict[int, Kind] = {1: "schema", 2: "dictionary batch", 3: "record batch"}


class Description(NamedTuple):
    """What a message is, how many bytes follow it, and whether these are compressed."""

    kind: Kind
    body_bytes: int
    compressed: bool


def describe(data_header: bytes | memoryview) -> Description:
    """What the head of a message says. BadMessage for one that is malformed, too long, or not of the version that we write.

    Older versions of the format tell of compression in other places.
    """
    if len(data_header) > HEAD_BYTES_MAX:
        raise BadMessage(f"the head of a batch has {len(data_header):,} bytes, more than {HEAD_BYTES_MAX:,}")
    message = _Table(data_header, _read(_UOFFSET, data_header, 0))
    if message.number(_VERSION, _SHORT) != _V5:
        raise BadMessage("rows do not come as Arrow's metadata version 5")
    kind = _KINDS.get(message.number(_HEADER_TYPE, _BYTE), "other")
    body_bytes = message.number(_BODY_LENGTH, _LONG)
    if body_bytes < 0:
        raise _malformed()
    batch: _Table | None = None
    if kind == "record batch":
        batch = message.table(_HEADER)
    elif kind == "dictionary batch":
        batch = message.table(_HEADER).table(_DICTIONARY_DATA)
    return Description(kind, body_bytes, batch is not None and batch.has(_COMPRESSION))


def is_compressed(data_header: bytes | memoryview) -> bool:
    """Whether the body of a message may be larger than it is sent."""
    return describe(data_header).compressed


class _Table:
    """A flatbuffer's table. A field that is not there has the value 0."""

    def __init__(self, data: bytes | memoryview, at: int) -> None:
        self._data = data
        self._at = at
        self._places = at - _read(_SOFFSET, data, at)
        self._size = _read(_VOFFSET, data, self._places)
        if self._size < 4 or self._size % 2:
            raise _malformed()

    def has(self, field: int) -> bool:
        return self._place(field) is not None

    def number(self, field: int, form: struct.Struct) -> int:
        place = self._place(field)
        return 0 if place is None else _read(form, self._data, place)

    def table(self, field: int) -> _Table:
        place = self._place(field)
        if place is None:
            raise _malformed()
        return _Table(self._data, place + _read(_UOFFSET, self._data, place))

    def _place(self, field: int) -> int | None:
        slot = 4 + 2 * field
        offset = _read(_VOFFSET, self._data, self._places + slot) if slot < self._size else 0
        return self._at + offset if offset else None


def _read(form: struct.Struct, data: bytes | memoryview, at: int) -> int:
    if not 0 <= at <= len(data) - form.size:
        raise _malformed()
    number: int = form.unpack_from(data, at)[0]
    return number


def _malformed() -> BadMessage:
    return BadMessage(
        "the head of a batch is malformed", hint="client and pond must run the same version of millpond"
    )
