"""What a holder of the read-only token sends, looked at before gRPC and Arrow are: they allocate first and ask later.

It reads just as much of HTTP/2, of gRPC and of Flight's messages as it takes to refuse, before the last byte of a
message is passed on: messages that are compressed, by gRPC or inside of Arrow (Millpond's own clients compress
nothing), messages that are too large, or become so when Arrow reads their head, and more calls at a time than one
connection may have. Of all connections, one at a time has much under way, in calls that it has not ended: what is
held of readers' messages stays small however many they are.
"""

from __future__ import annotations

import threading
import time

from millpond.errors import BadMessage
from millpond.wire.ipc import HEAD_BYTES_MAX, describe

MESSAGE_BYTES_MAX = 40 << 20
"""Clients aim at 32 MiB."""
LARGE_BYTES = 1 << 20
"""What a connection may have under way at any time: all messages of its calls, until they end."""
LARGE_BYTES_MAX = 80 << 20
"""What it may have when it is its turn."""
LARGE_S = 30.0
"""How long a turn lasts, and how long another waits for its own."""
CALLS_MAX = 64
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD = 9
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM, _PADDED = 0x1, 0x8
# Of Flight's FlightData.
_DESCRIPTOR, _DATA_HEADER, _DATA_BODY = 1, 2, 1000
# An action has its type where rows have a descriptor: no descriptor reads like this.
_ACTION = b"call"
_FIELDS_MAX = 16
_SIZED = 2
_VARINT_BYTES_MAX = 10


class Turnstile:
    """Lets one connection at a time have much under way. Shared by all."""

    def __init__(self) -> None:
        self._free = threading.Lock()

    def enter(self) -> None:
        if not self._free.acquire(timeout=LARGE_S):
            raise BadMessage("other readers' large messages take too long")

    def leave(self) -> None:
        self._free.release()


class Sieve:
    """Takes what one connection sends, in pieces of any size; BadMessage if it may not go on. To be closed with it."""

    def __init__(self, turnstile: Turnstile) -> None:
        self._under_way = _UnderWay(turnstile)
        self._head = bytearray()
        self._head_size = len(_PREFACE)
        self._is_open = False
        # Of the frame that is being read: bytes of data, then bytes that are skipped.
        self._data = 0
        self._skipped = 0
        self._ends = 0
        self._messages = _Messages(self._under_way)
        self._calls: dict[int, _Messages] = {}

    def is_overdue(self, now: float) -> bool:
        """Whether its turn takes so long that others must wait."""
        return now > self._under_way.deadline

    def close(self) -> None:
        self._under_way.close()

    def feed(self, data: memoryview) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._data:
                step = min(self._data, size - at)
                self._messages.feed(data[at : at + step])
                self._data -= step
                at += step
            elif self._skipped:
                step = min(self._skipped, size - at)
                self._skipped -= step
                at += step
            else:
                step = min(self._head_size - len(self._head), size - at)
                self._head += data[at : at + step]
                at += step
                if len(self._head) == self._head_size:
                    self._begin(self._head)
            if self._ends and not self._data and not self._skipped:
                ended = self._calls.pop(self._ends, None)
                if ended is not None:
                    ended.close()
                self._ends = 0

    def _begin(self, head: bytearray) -> None:
        """A whole head has come: the preface, a frame's nine bytes, or those and the length of the padding."""
        if not self._is_open:
            if head != _PREFACE:
                raise BadMessage("a connection does not speak HTTP/2")
            self._is_open = True
            self._next()
            return
        size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        stream = int.from_bytes(head[5:9]) & 0x7FFFFFFF
        is_padded = bool(kind == _DATA and flags & _PADDED)
        if is_padded and len(head) == _FRAME_HEAD and size:
            self._head_size += 1
            return
        padding = head[_FRAME_HEAD] + 1 if len(head) > _FRAME_HEAD else 0
        if kind == _DATA:
            self._data, self._skipped = size - padding, max(0, padding - 1)
            if self._data < 0 or stream not in self._calls:
                raise BadMessage("a connection sent rows outside of a call")
            self._messages = self._calls[stream]
        else:
            self._skipped = size
            if kind == _HEADERS and not flags & _END_STREAM:
                self._calls.setdefault(stream, _Messages(self._under_way))
                if len(self._calls) > CALLS_MAX:
                    raise BadMessage(f"a connection has more than {CALLS_MAX} calls under way")
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._ends = stream
        self._next()

    def _next(self) -> None:
        self._head.clear()
        self._head_size = _FRAME_HEAD


class _UnderWay:
    """The bytes of messages that one connection has under way."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.deadline = float("inf")
        self._turnstile = turnstile
        self._nbytes = 0
        self._has_turn = False

    def begin(self, size: int) -> None:
        self._nbytes += size
        if self._nbytes > LARGE_BYTES_MAX:
            raise BadMessage("a connection has too much under way")
        if self._nbytes > LARGE_BYTES and not self._has_turn:
            self._turnstile.enter()
            self._has_turn = True
            self.deadline = time.monotonic() + LARGE_S

    def end(self, size: int) -> None:
        self._nbytes -= size
        if self._has_turn and self._nbytes <= LARGE_BYTES:
            self._has_turn = False
            self.deadline = float("inf")
            self._turnstile.leave()

    def close(self) -> None:
        """Nothing is fed any more."""
        self.end(self._nbytes)


class _Messages:
    """The messages of one call, one after another: five bytes that say how long it is, then its fields."""

    def __init__(self, under_way: _UnderWay) -> None:
        self._under_way = under_way
        self._size = 0
        self._prefix = bytearray()
        self._rest = 0
        self._fields = _Fields()

    def feed(self, data: memoryview) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._rest:
                step = min(self._rest, size - at)
                self._fields.feed(data[at : at + step])
                self._rest -= step
                at += step
            else:
                step = min(5 - len(self._prefix), size - at)
                self._prefix += data[at : at + step]
                at += step
                if len(self._prefix) < 5:
                    return
                if self._prefix[0]:
                    raise BadMessage("a message is compressed")
                self._rest = int.from_bytes(self._prefix[1:])
                self._prefix.clear()
                self._fields = _Fields()
                if self._rest > MESSAGE_BYTES_MAX:
                    raise BadMessage(f"a message of {self._rest:,} bytes is beyond the limit")
                self._size += 5 + self._rest
                self._under_way.begin(5 + self._rest)
            if not self._rest and not self._prefix:
                self._fields.end()

    def close(self) -> None:
        """The call has ended: whoever serves it waits for nothing more."""
        self._under_way.end(self._size)
        self._size = 0


class _Fields:
    """The outermost fields of a message of Flight's, whichever it is; of one with rows, how they are laid out.

    All of them are bytes. Arrow takes those of rows for bytes, whatever they say.
    """

    def __init__(self) -> None:
        self._numbers = bytearray()
        self._tag = -1
        self._count = 0
        self._rest = 0
        self._content = bytearray()
        self._is_action = False
        self._is_sound = True
        self._is_compressed = False
        self._has_body = False

    def feed(self, data: memoryview) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._rest:
                step = min(self._rest, size - at)
                if self._tag >> 3 in (_DESCRIPTOR, _DATA_HEADER) and len(self._content) <= HEAD_BYTES_MAX:
                    self._content += data[at : at + step]
                self._rest -= step
                at += step
                if not self._rest:
                    self._end_field()
            else:
                byte = data[at]
                at += 1
                self._numbers.append(byte)
                if byte < 0x80:
                    self._number(_varint(self._numbers))
                    self._numbers.clear()
                elif len(self._numbers) >= _VARINT_BYTES_MAX:
                    raise BadMessage("a message is malformed")

    def _number(self, number: int) -> None:
        # Some readers look at the lower 32 bits only.
        if number >> 32:
            raise BadMessage("a message is malformed")
        if self._tag < 0:
            self._count += 1
            if number & 7 != _SIZED or self._count > _FIELDS_MAX:
                raise BadMessage("a message has fields that no client sends")
            self._tag = number
        else:
            self._rest = number
            self._has_body |= self._tag >> 3 == _DATA_BODY and number > 0
            if not number:
                self._end_field()

    def _end_field(self) -> None:
        number = self._tag >> 3
        if number == _DESCRIPTOR:
            self._is_action |= self._content == _ACTION
        elif number == _DATA_HEADER:
            self._look_at_head()
        self._content.clear()
        self._tag = -1

    def _look_at_head(self) -> None:
        """The body of an action stands at the same place as the head of a batch, and is no such thing."""
        if len(self._content) > HEAD_BYTES_MAX:
            self._is_sound = False
            return
        try:
            self._is_compressed |= describe(bytes(self._content)).compressed
        except BadMessage:
            self._is_sound = False

    def end(self) -> None:
        """The message is whole."""
        if self._tag >= 0 or self._numbers:
            raise BadMessage("a message is malformed")
        if not self._is_action and not self._is_sound:
            raise BadMessage("the head of a batch cannot be read, or costs too much")
        if self._has_body and (self._is_compressed or not self._is_sound):
            raise BadMessage("a batch is compressed, or cannot be read")


def _varint(data: bytearray) -> int:
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(data))
