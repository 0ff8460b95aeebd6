"""What a holder of the read-only token sends is looked at before gRPC and Arrow allocate for it."""

from __future__ import annotations

import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import grpc
import pyarrow as pa
import pyarrow.flight as fl
import pytest

import millpond as mp
from millpond.errors import BadMessage
from millpond.wire import gate, sieve
from millpond.wire.codec import encode
from millpond.wire.handshake import bearer
from millpond.wire.ipc import HEAD_BYTES_MAX
from millpond.wire.sieve import Sieve, Turnstile
from millpond.wire.sockets import name_in
from millpond.wire.states import Question
from millpond.wire.tunnel import TokenTunnel

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM = 0, 1, 3
END_STREAM, END_HEADERS, PADDED = 1, 4, 8


# Frames, written by hand


def frame(kind: int, payload: bytes = b"", stream: int = 1, flags: int = 0) -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def message(body: bytes, compressed: bool = False, size: int | None = None) -> bytes:
    return bytes([compressed]) + (len(body) if size is None else size).to_bytes(4) + body


def varint(number: int, size: int = 0) -> bytes:
    found = bytearray()
    while number >= 0x80 or len(found) + 1 < size:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


def field(number: int, content: bytes, size: int = 0) -> bytes:
    return varint(number << 3 | 2, size) + varint(len(content)) + content


def head_and_body(compression: str | None, dictionary: bool = False) -> tuple[bytes, bytes]:
    """Of a batch, as Arrow makes them."""
    array = pa.array(["a" * 1000] * 100)
    batch = pa.record_batch([array.dictionary_encode() if dictionary else array], names=["x"])
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    kind = "dictionary" if dictionary else "record batch"
    found = next(each for each in reader if each.type == kind)
    return found.metadata.to_pybytes(), found.body.to_pybytes()


def opened(*frames: bytes) -> bytes:
    return PREFACE + frame(4) + frame(HEADERS, b"headers") + b"".join(frames)


def passes(data: bytes, step: int = 1 << 30) -> bool:
    watch = Sieve(Turnstile())
    try:
        for at in range(0, len(data), step):
            watch.feed(memoryview(data)[at : at + step])
    except BadMessage:
        return False
    return True


def all_or_no_step_passes(data: bytes) -> bool:
    """Whether it passes, however it comes in."""
    (answer,) = {passes(data, step) for step in (1, 2, 7, 100, 1 << 30)}
    return answer


class Flat:
    """A flatbuffer, written by hand: what Arrow's own builder would write once for each may lie here once for all."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def _aligned(self, size: int) -> int:
        self.data += bytes(-len(self.data) % size)
        return len(self.data)

    def table(self, *fields: tuple[int, str, int]) -> tuple[int, dict[int, int]]:
        """Fields by place, form and value; where it is, and where they are."""
        count = max((place for place, _, _ in fields), default=-1) + 1
        places = self._aligned(8)
        self.data += bytes(4 + 2 * count)
        at = self._aligned(8)
        self.data += struct.pack("<i", at - places)
        found = {}
        for place, form, value in fields:
            found[place] = self._aligned(struct.calcsize(form))
            self.data += struct.pack(f"<{form}", value)
            struct.pack_into("<H", self.data, places + 4 + 2 * place, found[place] - at)
        struct.pack_into("<HH", self.data, places, 4 + 2 * count, len(self.data) - at)
        return at, found

    def links(self, count: int) -> list[int]:
        """Of a list, whose place is that of the first minus 4."""
        at = self._aligned(4)
        self.data += struct.pack("<I", count) + bytes(4 * count)
        return [at + 4 + 4 * number for number in range(count)]

    def text(self, size: int) -> int:
        at = self._aligned(4)
        self.data += struct.pack("<I", size) + b"x" * size + b"\0"
        return at

    def link(self, place: int, to: int) -> None:
        struct.pack_into("<I", self.data, place, to - place)


def schema(times: int, size: int, where: str, endianness: int = 0) -> bytes:
    """The head of a schema that names a text of `size` so many times."""
    flat = Flat()
    root, message = flat.table((0, "h", 4), (1, "B", 1), (2, "I", 0), (3, "q", 0), (4, "I", 0))
    flat.link(0, root)
    head, fields = flat.table((0, "h", endianness), (1, "I", 0), (2, "I", 0))
    flat.link(message[2], head)
    lists = {"columns": fields[1], "metadata": fields[2], "the message's metadata": message[4]}
    is_column = where not in lists
    wanted = "columns" if is_column else where
    for name, place in lists.items():
        links = flat.links(times if name == wanted else 0)
        flat.link(place, (links[0] if links else len(flat.data)) - 4)
        if name == "columns" and links:
            column, parts = flat.table(
                (0, "I", 0), (1, "B", 1), (2, "B", 10 if where == "zones" else 2), (3, "I", 0), (5, "I", 0)
            )
            if where == "zones":
                type_, zone = flat.table((0, "h", 0), (1, "I", 0))
                flat.link(zone[1], flat.text(size))
            else:
                type_, _ = flat.table((0, "i", 64), (1, "B", 1))
            flat.link(parts[3], type_)
            flat.link(parts[0], flat.text(size if where == "columns" else 1))
            flat.links(0)
            flat.link(parts[5], len(flat.data) - 4)
        elif links:
            column, parts = flat.table((0, "I", 0), (1, "I", 0))
            text = flat.text(size)
            flat.link(parts[0], text)
            flat.link(parts[1], text)
        for link in links:
            flat.link(link, column)
    return bytes(flat.data) + bytes(-len(flat.data) % 8)


WHERE = ("columns", "zones", "metadata", "the message's metadata")


@pytest.mark.parametrize("where", WHERE)
def test_a_schema_of_modest_size_passes_and_is_what_it_says(where: str) -> None:
    head = schema(3, 5, where)
    assert passes(flight_data(field(2, head)))
    found = pa.ipc.read_schema(pa.py_buffer(struct.pack("<Ii", -1 & 0xFFFFFFFF, len(head)) + head))
    assert len(found) == (3 if where in ("columns", "zones") else 0)


PLAIN_HEAD, PLAIN_BODY = head_and_body(None)
ZSTD_HEAD, ZSTD_BODY = head_and_body("zstd")


def flight_data(*fields: bytes) -> bytes:
    return opened(frame(DATA, message(b"".join(fields)), flags=END_STREAM))


def test_what_clients_send_passes() -> None:
    descriptor, counts = field(1, b"\x08\x02\x12\x03abc"), field(3, b"\0" * 16)
    rows = message(field(2, PLAIN_HEAD) + counts + field(1000, PLAIN_BODY))
    half = len(rows) // 2
    padded = frame(DATA, b"\x03" + message(b"") + b"\0\0\0", flags=PADDED)
    assert all_or_no_step_passes(
        opened(
            frame(DATA, message(descriptor)),
            frame(DATA, rows[:half]),
            frame(8, b"\0\0\1\0"),
            frame(HEADERS, b"another", stream=3),
            frame(
                DATA,
                message(field(1, b"call") + field(2, b"no flatbuffer at all")),
                stream=3,
                flags=END_STREAM,
            ),
            frame(DATA, rows[half:]),
            padded,
            frame(DATA, flags=END_STREAM),
        )
    )


LIES: dict[str, bytes] = {
    "not HTTP/2": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "compressed by gRPC": opened(frame(DATA, message(field(1, b"x"), compressed=True))),
    "a message beyond the limit": opened(frame(DATA, message(b"", size=sieve.MESSAGE_BYTES_MAX + 1))),
    "rows outside of a call": PREFACE + frame(DATA, message(b"")),
    "rows after the end of a call": opened(frame(DATA, flags=END_STREAM), frame(DATA, message(b""))),
    "rows after a reset": opened(frame(RST_STREAM, b"\0" * 4), frame(DATA, message(b""))),
    "more padding than there is": opened(frame(DATA, b"\xff\0", flags=PADDED)),
    "a compressed batch": flight_data(field(2, ZSTD_HEAD), field(1000, ZSTD_BODY)),
    "its body first": flight_data(field(1000, ZSTD_BODY), field(2, ZSTD_HEAD)),
    "a plain head before": flight_data(field(2, PLAIN_HEAD), field(2, ZSTD_HEAD), field(1000, ZSTD_BODY)),
    "a plain head after": flight_data(field(2, ZSTD_HEAD), field(2, PLAIN_HEAD), field(1000, ZSTD_BODY)),
    "a long way to write a tag": flight_data(field(2, ZSTD_HEAD, 5), field(1000, ZSTD_BODY, 5)),
    "a tag of which some read half": flight_data(
        varint(2 << 3 | 2 | 1 << 35) + varint(len(ZSTD_HEAD)) + ZSTD_HEAD, field(1000, ZSTD_BODY)
    ),
    "a compressed dictionary": flight_data(
        *(field(number, part) for number, part in zip((2, 1000), head_and_body("lz4", True), strict=True))
    ),
    "a head that cannot be read": flight_data(field(2, b"\xff" * 40), field(1000, b"x")),
    "a head beyond its limit": flight_data(field(2, b"\0" * (sieve.HEAD_BYTES_MAX + 1)), field(1000, b"x")),
    "a field that is longer than its message": flight_data(varint(1000 << 3 | 2) + varint(99)),
    "a field's number that has no end": flight_data(b"\xff" * 11),
    "a field of another kind": flight_data(varint(2 << 3 | 3)),
    "a number where Arrow takes bytes": flight_data(varint(2 << 3) + varint(0)),
    "more fields than any client sends": flight_data(field(9, b"") * 17),
    "a head that cannot be read, without a body": flight_data(field(2, b"\xff" * 40)),
    "a head beyond its limit, without a body": flight_data(field(2, b"\0" * (HEAD_BYTES_MAX + 1))),
    "rows of another machine": flight_data(field(2, schema(1, 1, "columns", endianness=1))),
    "as many columns as it has bytes": flight_data(field(2, schema(20_000, 1, "columns"))),
    **{
        f"one long text, many times: {where}": flight_data(field(2, schema(50, 50_000, where)))
        for where in WHERE
    },
    "half a number": flight_data(b"\x80"),
    "more calls than may be under way": PREFACE
    + b"".join(frame(HEADERS, stream=2 * n + 1) for n in range(sieve.CALLS_MAX + 1)),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_they_never_send_does_not(lie: str) -> None:
    step = {
        passes(LIES[lie], step) for step in ((1 << 30,) if len(LIES[lie]) > 100_000 else (1, 2, 7, 1 << 30))
    }
    assert step == {False}


def test_it_is_the_flag_that_tells_of_compression() -> None:
    """What is compressed looks like anything, and may look like a message."""
    assert passes(opened(frame(DATA, message(field(1, b"x")))))
    assert not passes(opened(frame(DATA, message(field(1, b"x"), compressed=True))))


def test_the_last_byte_of_what_is_refused_is_never_passed_on() -> None:
    """Until then gRPC hands a message to nobody."""
    data = LIES["a compressed batch"]
    watch = Sieve(Turnstile())
    watch.feed(memoryview(data)[:-1])
    with pytest.raises(BadMessage):
        watch.feed(memoryview(data)[-1:])


def test_calls_that_have_ended_do_not_count() -> None:
    many = (frame(HEADERS, stream=2 * n + 1, flags=END_STREAM * (n % 2)) for n in range(2 * sieve.CALLS_MAX))
    assert passes(PREFACE + b"".join(many))


def test_whatever_comes_it_ends() -> None:
    """Bits flipped anywhere: it passes or is refused, and nothing else is raised."""
    generator = random.Random(10)
    sound = flight_data(field(2, PLAIN_HEAD), field(3, b"\0" * 16), field(1000, PLAIN_BODY[:200]))
    for _ in range(2000):
        data = bytearray(sound)
        for _ in range(generator.randrange(1, 4)):
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        passes(bytes(data), generator.choice((1 << 30, 50)))


def large(size: int, stream: int = 1) -> bytes:
    """The beginning of a large message."""
    return frame(HEADERS, stream=stream) + frame(DATA, message(b"", size=size), stream=stream)


def test_one_connection_at_a_time_has_large_messages_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sieve, "LARGE_S", 0.1)
    turnstile = Turnstile()
    first, second = Sieve(turnstile), Sieve(turnstile)
    size = sieve.LARGE_BYTES_MAX // 2 - 5
    first.feed(memoryview(PREFACE + large(size) + large(size, 3)))
    with pytest.raises(BadMessage, match="take too long"):
        second.feed(memoryview(PREFACE + large(size)))
    assert first.is_overdue(time.monotonic() + 1)
    with pytest.raises(BadMessage, match="too much under way"):
        first.feed(memoryview(large(size, 5)))
    first.close()
    assert not first.is_overdue(time.monotonic() + 1)
    third = Sieve(turnstile)
    # What has ended, or was given up, has given its turn back.
    for number in (1, 3, 5):
        third.feed(memoryview((PREFACE if number == 1 else b"") + large(size, number)))
        third.feed(memoryview(frame(RST_STREAM, b"\0" * 4, stream=number)))
    fourth = Sieve(turnstile)
    whole = message(field(1, b"x" * (sieve.LARGE_BYTES + 1)))
    fourth.feed(memoryview(PREFACE + frame(HEADERS) + frame(DATA, whole, flags=END_STREAM) + large(size, 3)))
    # Small ones need no turn.
    Sieve(turnstile).feed(memoryview(PREFACE + large(1000)))
    fourth.close()
    Sieve(turnstile).feed(memoryview(PREFACE + large(size)))


def test_small_messages_together_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also such as are whole, of calls that do not end: whoever serves them holds what has come."""
    monkeypatch.setattr(sieve, "LARGE_S", 0.1)
    turnstile = Turnstile()
    holder = Sieve(turnstile)
    holder.feed(memoryview(PREFACE + large(2 * sieve.LARGE_BYTES)))
    part = sieve.LARGE_BYTES // 4
    many = b"".join(large(part, stream) for stream in (1, 3, 5, 7))
    one = frame(HEADERS) + frame(DATA, message(field(1, b"x" * (part - 4)))) * 4
    for begun in (many, one):
        with pytest.raises(BadMessage, match="take too long"):
            Sieve(turnstile).feed(memoryview(PREFACE + begun))
    calm = Sieve(turnstile)
    calm.feed(memoryview(PREFACE))
    for number in range(20):
        calm.feed(
            memoryview(large(part, 2 * number + 1) + frame(RST_STREAM, b"\0" * 4, stream=2 * number + 1))
        )


# On a running pond


class Served(NamedTuple):
    pond: mp.Pond
    root: Path

    @property
    def bearer(self) -> str:
        return bearer((self.root / "token.read").read_text().strip())

    @property
    def pid(self) -> int:
        return self.pond.containers()[0].pid

    def tunnel(self) -> TokenTunnel:
        """To the container, as a holder of the read-only token."""
        server = name_in(self.pond.containers()[0].address)
        return TokenTunnel(self.pond.address, server, (self.root / "token.read").read_text().strip)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("sieve") / "pond"
    with mp.open(root, threads=1, slices=8, port=0) as pond:
        pond.state("s", key="long", value="long").update(key="k", at="t", value="v", name="feed")(
            pa.table({"k": [1, 2], "t": [10, 20], "v": [5, 6]}), 0
        )
        yield Served(pond, root)


@pytest.fixture(autouse=True)
def unhurt(served: Served) -> Iterator[None]:
    """The container is the same one, and has not grown."""
    before = served.pid, peak_bytes(served.pid)
    yield
    assert served.pid == before[0]
    assert peak_bytes(served.pid) - before[1] < 64 << 20
    with mp.connect(served.pond.address, (served.root / "token.read").read_text()) as reader:
        asked = pa.table({"k": [1], "t": [15]})
        assert reader.state("s").fetch(key="k", at="t", into="v").now(asked)["v"].to_pylist() == [5]


def peak_bytes(pid: int) -> int:
    (line,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) << 10


def test_what_a_reader_really_sends_passes_in_pieces_of_any_size(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[list[bytes]] = []

    class Recording(Sieve):
        def __init__(self, turnstile: Turnstile) -> None:
            super().__init__(turnstile)
            self._mine: list[bytes] = []
            heard.append(self._mine)

        def feed(self, data: memoryview) -> None:
            self._mine.append(bytes(data))
            super().feed(data)

    monkeypatch.setattr(gate, "Sieve", Recording)
    with mp.connect(served.pond.address, (served.root / "token.read").read_text()) as reader:
        state = reader.state("s")
        fetch = state.fetch(key="k", at="t", into="v")
        for rows in (1, 1000, 20_000):
            fetch.now(pa.table({"k": list(range(rows)), "t": [5] * rows}))
        state.snapshot()
        reader.metrics()
    assert len(heard) == 2, "to the pond, and to its container"
    for pieces in heard:
        whole = b"".join(pieces)
        assert passes(whole, 1 << 30)
        assert passes(whole[:200_000], 1)
        assert passes(whole, 1009)


def test_a_bomb_of_gzip_reaches_nobody(served: Served) -> None:
    tunnel = served.tunnel()
    with grpc.insecure_channel(f"unix:{tunnel.path}", compression=grpc.Compression.Gzip) as channel:
        call = channel.unary_stream("/arrow.flight.protocol.FlightService/DoAction")
        with pytest.raises(grpc.RpcError):
            list(call(bytes(256 << 20), timeout=20))
    tunnel.close()


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_bomb_of_compressed_rows_reaches_nobody(served: Served, compression: str) -> None:
    tunnel = served.tunnel()
    batch = pa.record_batch([pa.array([bytes(256 << 20)])], names=["_key"])
    options = fl.FlightCallOptions(
        timeout=20,
        headers=[(b"authorization", served.bearer.encode())],
        write_options=pa.ipc.IpcWriteOptions(compression=compression),
    )
    with fl.connect(f"grpc+unix://{tunnel.path}") as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b"x"), options)
        with suppress(fl.FlightError, pa.ArrowException, OSError):
            writer.begin(batch.schema)
            writer.write_with_metadata(batch, b"\0" * 32)
        with pytest.raises((fl.FlightError, pa.ArrowException, OSError)):
            writer.done_writing()
            reader.read_chunk()
        with suppress(fl.FlightError, pa.ArrowException, OSError):
            writer.close()
    tunnel.close()


def exchanged(served: Served, messages: list[bytes]) -> None:
    tunnel = served.tunnel()
    metadata = [("authorization", served.bearer)]
    with grpc.insecure_channel(f"unix:{tunnel.path}") as channel:
        call = channel.stream_stream("/arrow.flight.protocol.FlightService/DoExchange")
        with pytest.raises(grpc.RpcError):
            list(call(iter(messages), metadata=metadata, timeout=20))
    tunnel.close()


DESCRIPTOR = field(1, b"\x08\x02" + field(2, encode(Question("s", "latest"))))


@pytest.mark.parametrize("where", WHERE)
def test_a_schema_that_names_one_text_many_times_reaches_nobody(served: Served, where: str) -> None:
    """Half a megabyte, of which Arrow would make 10 GB."""
    bomb = schema(20_000, 500_000, where)
    exchanged(served, [DESCRIPTOR, field(2, bomb)])


@pytest.mark.parametrize("last", [False, True])
def test_no_descriptor_reads_like_an_action(served: Served, last: bool) -> None:
    """What stands beside an action's type is not looked at; of rows, Arrow reads nothing then."""
    parts = [field(1, b"call"), field(2, schema(20_000, 500_000, "metadata"))]
    exchanged(served, [DESCRIPTOR, b"".join(reversed(parts) if last else parts)])


def test_a_large_message_that_does_not_end_is_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wait for their turn no longer than that."""
    monkeypatch.setattr(sieve, "LARGE_S", 0.3)
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/arrow.flight.protocol.FlightService/DoExchange",
        ":authority": "pond",
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": served.bearer,
    }
    # Each as a literal: a zero, then name and value after their lengths.
    written = b"".join(
        b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in header) for header in headers.items()
    )
    call = PREFACE + frame(4, stream=0) + frame(HEADERS, written, flags=END_HEADERS)

    def is_cut_off(announced: int) -> bool:
        tunnel = served.tunnel()
        try:
            with socket.socket(socket.AF_UNIX) as slow:
                slow.connect(tunnel.path)
                slow.settimeout(3)
                slow.sendall(call + frame(DATA, message(b"", size=announced)))
                while slow.recv(4096):
                    pass
        except ConnectionError:
            pass
        except TimeoutError:
            return False
        finally:
            tunnel.close()
        return True

    assert not is_cut_off(sieve.LARGE_BYTES - 5)
    assert is_cut_off(sieve.LARGE_BYTES + 1)


def test_calls_without_end_end_with_their_connection(served: Served) -> None:
    tunnel = served.tunnel()
    threads = len(os.listdir(f"/proc/{served.pid}/task"))
    metadata = [("authorization", served.bearer)]
    with grpc.insecure_channel(f"unix:{tunnel.path}") as channel:
        exchange = channel.stream_stream("/arrow.flight.protocol.FlightService/DoExchange")
        never = _Never()
        calls = [exchange(never, metadata=metadata, timeout=20) for _ in range(2 * sieve.CALLS_MAX)]
        with pytest.raises(grpc.RpcError) as caught:
            next(calls[0])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len(os.listdir(f"/proc/{served.pid}/task")) <= threads + sieve.CALLS_MAX + 8
        never.ends = True
    tunnel.close()


class _Never:
    """Messages of a call that sends none, until it is told to end."""

    ends = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        while not self.ends:
            time.sleep(0.05)
        raise StopIteration
