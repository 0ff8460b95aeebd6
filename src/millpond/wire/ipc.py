"""The head of an Arrow IPC message, read by hand and within its bounds, before Arrow decodes what it announces.

It is a flatbuffer (`Message.fbs` of Arrow's format): tables, each with a list of where its fields are. Read here is
only what says how much a message would cost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from millpond.errors import BadMessage

Kind = Literal["schema", "record batch", "dictionary batch", "other"]

HEAD_BYTES_MAX = 1 << 20
"""Arrow makes some hundred bytes of each column that a schema names: what names too many is not read."""
FIELDS_MAX = 10_000
TEXT_BYTES_MAX = 1 << 20
"""Of a schema: columns at all depths, and their names. Many may lie in the same few bytes; Arrow makes each anew."""
_TEXT_BYTES = 32
"""What Arrow takes for an empty one."""

_UOFFSET = struct.Struct("<I")
_SOFFSET = struct.Struct("<i")
_VOFFSET = struct.Struct("<H")
_SHORT = struct.Struct("<h")
_BYTE = struct.Struct("<B")
_LONG = struct.Struct("<q")

# Fields by their places in Message, RecordBatch, DictionaryBatch, Schema, Field and KeyValue.
_VERSION, _HEADER_TYPE, _HEADER, _BODY_LENGTH, _MESSAGE_METADATA = range(5)
_COMPRESSION = 3
_DICTIONARY_DATA = 1
_ENDIANNESS, _FIELDS, _SCHEMA_METADATA = range(3)
_NAME, _TYPE_KIND, _TYPE, _CHILDREN, _FIELD_METADATA = 0, 2, 3, 5, 6
_KEY, _VALUE = range(2)
_TIMESTAMP, _UNION = 10, 14
_ZONE = _UNION_IDS = 1
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
    texts = _Texts()
    texts.add_metadata(message, _MESSAGE_METADATA)
    if kind == "schema":
        _check_schema(message.table(_HEADER), texts)
    batch: _Table | None = None
    if kind == "record batch":
        batch = message.table(_HEADER)
    elif kind == "dictionary batch":
        batch = message.table(_HEADER).table(_DICTIONARY_DATA)
    return Description(kind, body_bytes, batch is not None and batch.has(_COMPRESSION))


def _check_schema(schema: _Table, texts: _Texts) -> None:
    """BadMessage if Arrow would make much more of it than it is."""
    if schema.number(_ENDIANNESS, _SHORT):
        raise BadMessage("rows come in the order of bytes of another machine")
    texts.add_metadata(schema, _SCHEMA_METADATA)
    seen = 0
    rest = [schema.tables(_FIELDS)]
    while rest:
        for field in rest.pop():
            seen += 1
            if seen > FIELDS_MAX:
                raise BadMessage(f"a schema has more than {FIELDS_MAX:,} columns")
            texts.add(field, _NAME)
            texts.add_metadata(field, _FIELD_METADATA)
            kind = field.number(_TYPE_KIND, _BYTE)
            if kind == _TIMESTAMP:
                texts.add(field.table(_TYPE), _ZONE)
            elif kind == _UNION:
                texts.add(field.table(_TYPE), _UNION_IDS)
            rest.append(field.tables(_CHILDREN))


class _Texts:
    """The texts of a head, each counted as often as it is named."""

    def __init__(self) -> None:
        self._nbytes = 0

    def add(self, table: _Table, field: int) -> None:
        self._nbytes += _TEXT_BYTES + table.length(field)
        if self._nbytes > TEXT_BYTES_MAX:
            raise BadMessage(f"the texts in the head of a batch have more than {TEXT_BYTES_MAX:,} bytes")

    def add_metadata(self, table: _Table, field: int) -> None:
        for pair in table.tables(field):
            self.add(pair, _KEY)
            self.add(pair, _VALUE)


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

    def length(self, field: int) -> int:
        """Of a text, or of a list."""
        place = self._place(field)
        return 0 if place is None else _read(_UOFFSET, self._data, place + _read(_UOFFSET, self._data, place))

    def tables(self, field: int) -> Iterator[_Table]:
        """Those of a list."""
        size, place = self.length(field), self._place(field)
        if place is None:
            return
        first = place + _read(_UOFFSET, self._data, place) + 4
        for at in range(first, first + 4 * size, 4):
            yield _Table(self._data, at + _read(_UOFFSET, self._data, at))

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
