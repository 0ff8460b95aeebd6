"""Frames that no pyarrow would send: lengths, offsets, buffers and dictionaries that lie, and bytes that were flipped.

Each is answered by a typed error or by a right answer; the processes are the same ones, and hold what they held.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import msgspec
import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.kernels.hashing import slices_of
from millpond.stores.keys import Keys
from millpond.wire.base import Exchange, Turn
from millpond.wire.codec import encode
from millpond.wire.epochs import Stage
from millpond.wire.groups import FindRows
from millpond.wire.handshake import bearer
from millpond.wire.states import Question

SLICES = 4
METHOD = "/arrow.flight.protocol.FlightService/DoExchange"
TIMEOUT_S = 20.0
FLIPS = 700
# What all of it may add to a container, which Python and Arrow keep for later.
GROWTH_BYTES_MAX = 256 << 20


# Frames, as protobuf writes them


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class Frame(NamedTuple):
    """A FlightData: the head and the body of an Arrow message, and what goes beside them."""

    head: bytes
    body: bytes = b""
    metadata: bytes = b""

    def encoded(self, command: bytes | None = None) -> bytes:
        descriptor = b"" if command is None else _field(1, b"\x08\x02" + _field(2, command))
        metadata = _field(3, self.metadata) if self.metadata else b""
        return descriptor + _field(2, self.head) + metadata + _field(1000, self.body)


def frames_of(batch: pa.RecordBatch, counts: bytes, **options: Any) -> list[Frame]:
    """What a client sends: the schema, perhaps dictionaries, and the batch with its counts."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_batch(batch)
    frames = []
    for message in pa.ipc.MessageReader.open_stream(sink.getvalue()):
        body = b"" if message.body is None else message.body.to_pybytes()
        metadata = counts if message.type == "record batch" else b""
        frames.append(Frame(message.metadata.to_pybytes(), body, metadata))
    return frames


class Wire:
    """Sends frames as they are to an address, `127.0.0.1:port` or `unix:/path`."""

    def __init__(self, address: str, token: str) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
        self._call = self.channel.stream_stream(METHOD)
        self._metadata = [("authorization", bearer(token))]

    def send(self, message: Exchange[Any], frames: list[Frame]) -> str:
        """The name of the error that came back, or `answer`."""
        command = encode(message)
        raw = [frame.encoded(command if n == 0 else None) for n, frame in enumerate(frames)]
        try:
            answers = list(self._call(iter(raw), metadata=self._metadata, timeout=TIMEOUT_S))
        except grpc.RpcError as error:
            trailer = dict(error.trailing_metadata() or ())
            if "grpc-status-details-bin" in trailer:
                return str(msgspec.msgpack.decode(trailer["grpc-status-details-bin"])["code"])
            # Arrow reads the first frame before any of our code does; our client makes a BadMessage of its refusal.
            if "x-arrow-status" in trailer:
                return "refused by Arrow"
            return f"untyped: {error.code()}: {error.details()}"
        return "answer" if answers else "nothing"


# Where the numbers of a batch's head are


class Places(NamedTuple):
    rows: int
    body: int
    nodes: list[int]
    buffers: list[int]


def _slot(head: bytes, table: int, field: int) -> int:
    """Where a field of a flatbuffer's table is; 0 if it is not there."""
    fields = table - struct.unpack_from("<i", head, table)[0]
    if 4 + 2 * field >= struct.unpack_from("<H", head, fields)[0]:
        return 0
    offset = struct.unpack_from("<H", head, fields + 4 + 2 * field)[0]
    return table + offset if offset else 0


def _follow(head: bytes, at: int) -> int:
    return int(at + struct.unpack_from("<I", head, at)[0])


def places_of(head: bytes) -> Places:
    message = _follow(head, 0)
    batch = _follow(head, _slot(head, message, 2))
    vectors = [_follow(head, _slot(head, batch, field)) for field in (1, 2)]
    structs = [[at + 4 + 16 * n for n in range(struct.unpack_from("<I", head, at)[0])] for at in vectors]
    return Places(_slot(head, batch, 0), _slot(head, message, 3), *structs)


def with_long(head: bytes, at: int, value: int) -> bytes:
    return head[:at] + struct.pack("<q", value) + head[at + 8 :]


# What is asked and staged


def by_slice(key: pa.Array, *others: pa.Array, names: list[str]) -> tuple[pa.RecordBatch, bytes]:
    places = slices_of(Keys.from_arrow(key).hashes, SLICES)
    order = pa.array(np.argsort(places, kind="stable"))
    batch = pa.record_batch([column.take(order) for column in (key, *others)], names=names)
    return batch, np.bincount(places, minlength=SLICES).astype(np.int32).tobytes()


ROWS = 40
TIMES = pa.array(range(ROWS), pa.int64())
TEXTS = pa.array([f"key{n}".encode() for n in range(ROWS)], pa.binary())
LONGS = pa.array(range(ROWS), pa.int64())
VALUES: dict[str, pa.Array] = {
    "texts": pa.array([f"text {n}" if n % 5 else None for n in range(ROWS)], pa.string()),
    "lists": pa.array([[n] * (n % 4) if n % 7 else None for n in range(ROWS)], pa.list_(pa.int64())),
    "deep": pa.array(
        [{"m": [(f"k{n}", [n, None])], "f": n % 2 == 0} for n in range(ROWS)],
        pa.struct([("m", pa.map_(pa.string(), pa.list_(pa.int64()))), ("f", pa.bool_())]),
    ),
}
DDL = {
    "texts": ("string", "string"),
    "lists": ("string", "array<long>"),
    "deep": ("string", "struct<m:map<string,array<long>>,f:boolean>"),
}


class Case(NamedTuple):
    """A message with the rows that belong to it."""

    message: Exchange[Any]
    batch: pa.RecordBatch
    counts: bytes

    @property
    def frames(self) -> list[Frame]:
        return frames_of(self.batch, self.counts)


def question(state: str = "texts") -> Case:
    batch, counts = by_slice(TEXTS, TIMES, names=["_key", "_time"])
    return Case(Question(state, "latest"), batch, counts)


def staging(state: str) -> Case:
    batch, counts = by_slice(TEXTS, TIMES, VALUES[state], names=["_key", "_time", "value"])
    return Case(Stage(state, "stranger@elsewhere", Turn(99), 0, 1), batch, counts)


def finding() -> Case:
    batch = pa.record_batch({"key": pa.array([f"a{n}" for n in range(ROWS)])})
    return Case(FindRows("bank", "accounts"), batch, np.array([ROWS, 0, 0, 0], np.int32).tobytes())


READING = {"question": question(), "finding": finding()}
WRITING = {state: staging(state) for state in DDL}


# Lies

NUMBERS = [-1, -(2**63), 2**63 - 1, 2**31, 10**6, 1, 0]


def lies(case: Case) -> Iterator[tuple[str, list[Frame]]]:
    """Every number of the batch's head, replaced by each that may hurt; the body as it is, cut, and with its offsets bent."""
    schema, batch = case.frames
    places = places_of(batch.head)
    for number in NUMBERS:
        yield f"rows {number}", [schema, batch._replace(head=with_long(batch.head, places.rows, number))]
        yield f"body {number}", [schema, batch._replace(head=with_long(batch.head, places.body, number))]
        for n, at in enumerate(places.nodes):
            for what, shift in (("length", 0), ("nulls", 8)):
                head = with_long(batch.head, at + shift, number)
                yield f"{what} of node {n}: {number}", [schema, batch._replace(head=head)]
            # All lengths agree on the lie.
            head = with_long(with_long(batch.head, places.rows, number), at, number)
            yield f"rows and length of node {n}: {number}", [schema, batch._replace(head=head)]
        for n, at in enumerate(places.buffers):
            for what, shift in (("offset", 0), ("length", 8)):
                head = with_long(batch.head, at + shift, number)
                yield f"{what} of buffer {n}: {number}", [schema, batch._replace(head=head)]
    for number in (10**6, 2**40):
        head = with_long(batch.head, places.rows, number)
        for at in places.nodes:
            head = with_long(head, at, number)
        yield f"all lengths {number}", [schema, batch._replace(head=head)]
    for size in (0, 1, 8, len(batch.body) // 2, len(batch.body) - 8):
        yield f"a body of {size}", [schema, batch._replace(body=batch.body[:size])]
    for n, at in enumerate(places.buffers):
        offset, size = struct.unpack_from("<qq", batch.head, at)
        for bent in (-1, 2**31 - 1, -(2**31), 1000):
            for where in (offset, offset + 4 * (size // 8), offset + size - 4):
                if 0 <= where <= len(batch.body) - 4 and size >= 4:
                    body = batch.body[:where] + struct.pack("<i", bent) + batch.body[where + 4 :]
                    yield f"buffer {n} holds {bent} at {where}", [schema, batch._replace(body=body)]


def orders(case: Case) -> Iterator[tuple[str, list[Frame]]]:
    """Frames that are sound one by one, or whose dictionaries and schemas are not."""
    schema, batch = case.frames
    counts, rows = case.counts, case.batch
    words = pa.array(["a", "b"] * (ROWS // 2)).dictionary_encode()
    spelt = pa.record_batch(
        [words, TIMES], names=rows.schema.names[:2] if rows.num_columns > 1 else ["a", "b"]
    )
    announced, dictionary, coded = frames_of(spelt, counts)
    nested = pa.record_batch(
        [pa.DictionaryArray.from_arrays(words.indices, words.dictionary.dictionary_encode())], ["w"]
    )
    yield "a batch before a schema", [batch, schema]
    yield "a batch alone", [batch]
    yield "a schema alone", [schema]
    yield "two schemas", [schema, schema, batch]
    yield "another schema", [announced, batch]
    yield "dictionaries that nobody announced", [schema, dictionary, batch]
    yield "a dictionary that is missing", [announced, coded]
    yield "a dictionary", [announced, dictionary, coded]
    yield "a dictionary twice", [announced, dictionary, dictionary, coded]
    yield "a dictionary that is a batch", [announced, dictionary._replace(head=coded.head), coded]
    with suppress(pa.ArrowException):
        yield "a dictionary of a dictionary", frames_of(nested, counts)
    yield "no head", [Frame(b"", batch.body, counts)]
    yield "nothing", [Frame(b"")]
    yield "a head of zeros", [schema, Frame(b"\0" * 64, batch.body, counts)]
    yield "a head that points at itself", [Frame(struct.pack("<Ii", 4, 0) + b"\0" * 56), batch]
    yield "no counts", [schema, batch._replace(metadata=b"")]
    yield "counts of another size", [schema, batch._replace(metadata=b"\0" * 4001)]
    yield "counts beyond the rows", [schema, batch._replace(metadata=struct.pack("<4i", *[2**31 - 1] * 4))]
    yield "an older version", frames_of(rows, counts, metadata_version=pa.ipc.MetadataVersion.V4)
    for at in range(len(schema.head) - 1):
        if schema.head[at : at + 2] == b"\x04\x00":
            yield (
                f"another version at {at}",
                [schema._replace(head=schema.head[:at] + b"\x63\0" + schema.head[at + 2 :]), batch],
            )
    for columns in STRANGE.values():
        yield f"columns {columns.schema.types}", frames_of(columns, counts)
    for what, head in _extreme_schemas().items():
        yield what, [Frame(head), batch]
    for codec in ("lz4", "zstd"):
        packed = frames_of(rows, counts, compression=codec)
        yield f"{codec}", packed
        places = places_of(packed[1].head)
        for at in places.buffers:
            offset, size = struct.unpack_from("<qq", packed[1].head, at)
            for number in NUMBERS if size else ():
                body = with_long(packed[1].body, offset, number)
                yield f"{codec} of {number} bytes, it says", [packed[0], packed[1]._replace(body=body)]


@cache
def _extreme_schemas() -> dict[str, bytes]:
    deep = pa.int64()
    for _ in range(1000):
        deep = pa.list_(deep)
    many = pa.schema([(f"c{n}", pa.int64()) for n in range(100_000)])
    return {"1,000 levels": _head_of(pa.schema([("a", deep)])), "100,000 columns": _head_of(many)}


def _head_of(schema: pa.Schema) -> bytes:
    return bytes(schema.serialize().to_pybytes()[8:])  # without its prefix


def _strange(column: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([column, TIMES], names=["_key", "_time"])


STRANGE: dict[str, pa.RecordBatch] = {
    "view": _strange(TEXTS.cast(pa.binary_view())),
    "text view": _strange(VALUES["texts"].cast(pa.string_view())),
    "runs": _strange(pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), pa.array([1]))),
    "dense union": _strange(
        pa.UnionArray.from_dense(pa.array([0] * ROWS, pa.int8()), pa.array(range(ROWS), pa.int32()), [LONGS])
    ),
    "sparse union": _strange(pa.UnionArray.from_sparse(pa.array([0] * ROWS, pa.int8()), [LONGS])),
    "list view": _strange(
        pa.ListViewArray.from_arrays(
            pa.array([0] * ROWS, pa.int32()), pa.array([1] * ROWS, pa.int32()), LONGS
        )
    ),
    "list": _strange(VALUES["lists"]),
    "struct": _strange(VALUES["deep"]),
    "extension": _strange(pa.array([bytes(16)] * ROWS, pa.uuid())),
    "nulls": _strange(pa.nulls(ROWS)),
}


def flips(case: Case, seed: int, count: int) -> Iterator[tuple[str, list[Frame]]]:
    """Bytes of the frames changed at random: of a head, of the body, of the counts."""
    rng = random.Random(seed)
    for number in range(count):
        frames = case.frames
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            which = rng.choice([0, 1, 1, 1])
            part = rng.choice(["head", "head", "body", "metadata"])
            data = bytearray(getattr(frames[which], part))
            if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
                frames[which] = frames[which]._replace(**{part: bytes(data)})
        yield f"flip {number} of seed {seed}", frames


# The pond


@mp.transaction
def put(accounts: Any, account: str, text: str) -> None:
    accounts[account].text = text


class Served(NamedTuple):
    pond: mp.Pond
    full: str
    reading: str

    @property
    def addresses(self) -> dict[str, str]:
        return {"container": self.pond.containers()[0].address, "coordinator": self.pond.address}

    def everything(self) -> dict[str, Any]:
        rows: dict[str, Any] = {
            name: sorted(map(str, state.snapshot().to_pylist())) for name, state in self.pond.states().items()
        }
        rows["accounts"] = self.pond.table("accounts").snapshot().to_pylist()
        return {"rows": rows, "pids": [info.pid for info in self.pond.containers()]}

    def resident_bytes(self) -> int:
        (info,) = self.pond.containers()
        status = Path(f"/proc/{info.pid}/status").read_text()
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("raw") / "pond"
    with mp.open(root, containers=1, threads=1, slices=SLICES) as pond:
        for name, (key, value) in DDL.items():
            state = pond.state(name, key=key, value=value)
            feed = state.update(key="k", at="t", value="value", name="feed")
            feed(pa.table({"k": TEXTS.cast(pa.string()), "t": TIMES, "value": VALUES[name]}), 0)
        accounts = pond.table(
            "accounts", key="string", value="text string", default={"text": ""}, group="bank"
        )
        bank = pond.transactions("bank", [accounts], {"put": put})
        bank(pa.table({"ts": [1, 2], "account": ["a1", "a2"], "text": ["x", "y"]}), 0)
        yield Served(pond, *((root / name).read_text().strip() for name in ("token", "token.read")))


@pytest.fixture
def wire(served: Served) -> Iterator[Callable[[str, str], Wire]]:
    """Connections; after the test everything is as it was before."""
    before = served.everything()
    memory = served.resident_bytes()
    wires: list[Wire] = []

    def connect(server: str, token: str) -> Wire:
        wires.append(Wire(served.addresses[server], token))
        return wires[-1]

    yield connect
    for each in wires:
        each.channel.close()
    assert served.everything() == before
    assert served.resident_bytes() - memory < GROWTH_BYTES_MAX


TYPED = {
    "answer",
    "refused by Arrow",
    "WrongType",
    "BadMessage",
    "MessageTooLarge",
    "NullKey",
    "NullTime",
    "Moved",
    "OutOfMemory",
}


def send_all(wire: Wire, case: Case, sent: Iterator[tuple[str, list[Frame]]]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for what, frames in sent:
        outcome = wire.send(case.message, frames)
        assert outcome in TYPED, what
        seen[outcome] += 1
    return seen


def sound(wire: Wire, case: Case) -> None:
    assert wire.send(case.message, case.frames) == "answer"


@pytest.mark.parametrize("name", READING)
def test_lies_of_a_read_only_holder(served: Served, wire: Callable[[str, str], Wire], name: str) -> None:
    reader, case = wire("container", served.reading), READING[name]
    sound(reader, case)
    assert send_all(reader, case, lies(case))["BadMessage"] > 50
    assert send_all(reader, case, orders(case))["BadMessage"] > 20
    sound(reader, case)


@pytest.mark.parametrize("name", WRITING)
def test_lies_of_a_writer(served: Served, wire: Callable[[str, str], Wire], name: str) -> None:
    writer, case = wire("container", served.full), WRITING[name]
    sound(writer, case)
    assert send_all(writer, case, lies(case))["BadMessage"] > 50
    if name == "texts":
        assert send_all(writer, case, orders(case))["BadMessage"] > 20
    sound(writer, case)


def test_flipped_bytes(served: Served, wire: Callable[[str, str], Wire]) -> None:
    for seed, (token, case) in enumerate(
        [
            *((served.reading, case) for case in READING.values()),
            *((served.full, case) for case in WRITING.values()),
        ]
    ):
        sender = wire("container", token)
        seen = send_all(sender, case, flips(case, seed, FLIPS // 5))
        assert seen["BadMessage"] > FLIPS // 50, seen
        sound(sender, case)


def test_the_coordinator_takes_no_rows(served: Served, wire: Callable[[str, str], Wire]) -> None:
    case = READING["question"]
    for token in (served.reading, served.full):
        sender = wire("coordinator", token)
        assert sender.send(case.message, case.frames) == "BadMessage"
        assert "answer" not in send_all(sender, case, orders(case))
        assert "answer" not in send_all(sender, case, flips(case, 99, 50))
