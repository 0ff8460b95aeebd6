"""What a holder of the read-only token sends, looked at before gRPC and Arrow are: they allocate first and ask later.

It reads just as much of HTTP/2, of gRPC and of Flight's messages as it takes to refuse, before the last byte of a
message is passed on: messages that are compressed, by gRPC or inside of Arrow (Millpond's own clients compress
nothing), messages that are too large, and more calls at a time than one connection may have. Of all connections,
one at a time has large messages under way: what gRPC holds of readers' messages stays small however many they are.
"""

from __future__ import annotations

import threading
import time

from millpond.errors import BadMessage
from millpond.wire.ipc import HEAD_BYTES_MAX, is_compressed

MESSAGE_BYTES_MAX = 40 << 20
"""Clients aim at 32 MiB."""
LARGE_BYTES = 1 << 20
LARGE_BYTES_MAX = 80 << 20
"""Of the large messages that one connection has under way."""
LARGE_S = 30.0
"""How long a connection may have large messages under way, and how long another waits for its turn."""
CALLS_MAX = 64
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD = 9
_DATA, _HEADERS, _RST_STREAM = 0, 1, 3
_END_STREAM, _PADDED = 0x1, 0x8
# Of Flight's FlightData.
_DATA_HEADER, _DATA_BODY = 2, 1000
_VARINT, _SIZED = 0, 2
_VARINT_BYTES_MAX = 10


class Turnstile:
    """Lets one connection at a time have large messages under way. Shared by all."""

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
        self._large = _Large(turnstile)
        self._head = bytearray()
        self._head_size = len(_PREFACE)
        self._is_open = False
        # Of the frame that is being read: bytes of data, then bytes that are skipped.
        self._data = 0
        self._skipped = 0
        self._ends = 0
        self._messages = _Messages(self._large)
        self._calls: dict[int, _Messages] = {}

    def is_overdue(self, now: float) -> bool:
        """Whether large messages take so long that others must wait."""
        return now > self._large.deadline

    def close(self) -> None:
        self._large.close()

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
                self._calls.setdefault(stream, _Messages(self._large))
                if len(self._calls) > CALLS_MAX:
                    raise BadMessage(f"a connection has more than {CALLS_MAX} calls under way")
        if kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            self._ends = stream
        self._next()

    def _next(self) -> None:
        self._head.clear()
        self._head_size = _FRAME_HEAD


class _Large:
    """The large messages that one connection has under way."""

    def __init__(self, turnstile: Turnstile) -> None:
        self.deadline = float("inf")
        self._turnstile = turnstile
        self._lock = threading.Lock()
        self._nbytes = 0
        self._is_closed = False

    def begin(self, size: int) -> None:
        if not self._nbytes:
            self._turnstile.enter()
            self.deadline = time.monotonic() + LARGE_S
        with self._lock:
            self._nbytes += size
            is_closed = self._is_closed
        if is_closed:
            self.end(size)
        if is_closed or self._nbytes > LARGE_BYTES_MAX:
            raise BadMessage("a connection has too much under way")

    def end(self, size: int) -> None:
        with self._lock:
            before, self._nbytes = self._nbytes, max(0, self._nbytes - size)
        if before and not self._nbytes:
            self.deadline = float("inf")
            self._turnstile.leave()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        self.end(self._nbytes)


class _Messages:
    """The messages of one call, one after another: five bytes that say how long it is, then its fields."""

    def __init__(self, large: _Large) -> None:
        self._large = large
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
                self._size = self._rest
                if self._size > LARGE_BYTES:
                    self._large.begin(self._size)
            if not self._rest and not self._prefix:
                self.close()
                self._fields.end()

    def close(self) -> None:
        """The message is whole, or will never be."""
        if self._size > LARGE_BYTES:
            self._large.end(self._size)
        self._size = 0


class _Fields:
    """The outermost fields of a message of Flight's, whichever it is; of one with rows, how they are laid out."""

    def __init__(self) -> None:
        self._numbers = bytearray()
        self._tag = -1
        self._rest = 0
        self._header = bytearray()
        self._may_swell = False
        self._has_body = False

    def feed(self, data: memoryview) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._rest:
                step = min(self._rest, size - at)
                if self._tag >> 3 == _DATA_HEADER and len(self._header) <= HEAD_BYTES_MAX:
                    self._header += data[at : at + step]
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
        if self._tag < 0:
            # Some readers look at the lower 32 bits only.
            if number & 7 not in (_VARINT, _SIZED) or number >> 32:
                raise BadMessage("a message has fields that no client sends")
            self._tag = number
        elif self._tag & 7 == _VARINT:
            self._tag = -1
        elif number >> 32:
            raise BadMessage("a message is malformed")
        else:
            self._rest = number
            self._has_body |= self._tag >> 3 == _DATA_BODY and number > 0
            if not number:
                self._end_field()

    def _end_field(self) -> None:
        if self._tag >> 3 == _DATA_HEADER:
            self._may_swell |= _may_swell(self._header)
            self._header.clear()
        self._tag = -1

    def end(self) -> None:
        """The message is whole."""
        if self._tag >= 0 or self._numbers:
            raise BadMessage("a message is malformed")
        if self._has_body and self._may_swell:
            raise BadMessage("a batch is compressed, or cannot be read")


def _may_swell(header: bytearray) -> bool:
    """The body of an action stands at the same place as the head of a batch, and is no such thing."""
    try:
        return is_compressed(bytes(header))
    except BadMessage:
        return True


def _varint(data: bytearray) -> int:
    return sum((byte & 0x7F) << (7 * place) for place, byte in enumerate(data))
