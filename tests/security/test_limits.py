"""Budgets that hold before memory is asked for: answers, rows that are staged, calls under way, and all of a container."""

from __future__ import annotations

import math
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import pytest

import millpond as mp
from millpond.client.routing import counts_of
from millpond.container.process import OWN_BYTES
from millpond.container.room import ROOM_SHARE, Room
from millpond.errors import BadMessage, MessageTooLarge, OutOfMemory, Unauthorised, Unavailable
from millpond.pond.opening import MEMORY_MIN
from millpond.schema import parse_ddl
from millpond.stores import outputs
from millpond.stores.versioned import RANGES_MAX
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire import flight
from millpond.wire.base import Exchange, SliceId, Turn
from millpond.wire.codec import encode
from millpond.wire.connection import LocalConnection, SlicedBatch
from millpond.wire.epochs import Stage
from millpond.wire.flight import FlightConnection, FlightService
from millpond.wire.groups import FindRows
from millpond.wire.handshake import bearer, read_only_token
from millpond.wire.house import Ping
from millpond.wire.sockets import SocketDirectory
from millpond.wire.states import Question, ReadSlices
from patience import wait_until

pytestmark = pytest.mark.usefixtures("started_as_ever")

MIB = 1 << 20
BIG = 256 << 10
ASKED = 3000
LIMIT = 32 * MIB


# Answers


VALUES: dict[str, tuple[str, Any]] = {
    "texts": ("string", "x" * BIG),
    "lists": ("array<long>", [7] * (BIG // 8)),
    "maps": ("map<string,array<long>>", [("k", [7] * (BIG // 8))]),
    "structs": ("struct<a:array<string>,b:long>", {"a": ["y" * 1024] * (BIG // 1024), "b": 1}),
}


@mp.transaction
def put(notes: Any, note: int, text: str) -> None:
    notes[note].text = text


@pytest.fixture(scope="module")
def pond() -> Iterator[LocalPond]:
    """One key of each State has a large value; one has many versions."""
    with LocalPond(LossyFiles(), slices=1) as pond:
        for name, (ddl, value) in VALUES.items():
            state = pond.state(name, key="long", value=ddl)
            column = pa.array([value, None], parse_ddl(ddl, "value").field(0).type)
            state.update(key="k", at="t", value="v", name="feed")(
                pa.table({"k": [1, 2], "t": [10, 10], "v": column}), 0
            )
            state.finish("feed")
        many = pond.state("many", key="long", value="n long, s string")
        rows = 10_000
        many.update(key="k", at="t", value=["n", "s"], name="feed")(
            pa.table({"k": [1] * rows, "t": range(rows), "n": range(rows), "s": ["z"] * rows}), 0
        )
        many.finish("feed")
        notes = pond.table("notes", key="long", value="text string", default={"text": ""}, group="desk")
        pond.transactions("desk", [notes], {"put": put})(
            pa.table({"ts": [1], "note": [1], "text": ["x" * BIG]}), 0
        )
        yield pond
        pond.validate()


@pytest.fixture
def room(pond: LocalPond) -> Iterator[Room]:
    """A small one, of which nothing is held afterwards."""
    service = pond.hosting.services[0]
    before, service._room = service._room, Room(2 * LIMIT)
    yield service._room
    assert service._room.nbytes == 0
    service._room = before


def questions(rule: str, state: str) -> tuple[Exchange[Any], pa.RecordBatch]:
    batch = pa.record_batch({"_key": pa.array([1] * ASKED), "_time": pa.array([99_999] * ASKED)})
    return Question(state, rule), batch  # type: ignore[arg-type]


AMPLIFIED: dict[str, tuple[Exchange[Any], pa.RecordBatch]] = {
    **{f"latest {state}": questions("latest", state) for state in VALUES},
    **{rule: questions(rule, "many") for rule in ("values", "smallest")},
    "values of texts": questions("values", "texts"),
    "rows of a table": (FindRows("desk", "notes"), pa.record_batch({"key": pa.array([1] * ASKED)})),
}


@pytest.mark.parametrize("what", AMPLIFIED)
def test_an_answer_beyond_its_budget_is_refused_before_it_is_made(
    pond: LocalPond, room: Room, what: str
) -> None:
    message, batch = AMPLIFIED[what]
    connection = LocalConnection(pond.hosting.services[0])
    rows = SlicedBatch(batch, counts_of(0, 1, batch.num_rows))
    arrow = pa.total_allocated_bytes()
    peak = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge) as caught:
            connection.exchange(message, [rows])
        _, numpy_peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.limit in (LIMIT, RANGES_MAX)
    assert caught.value.size > caught.value.limit
    assert "fewer rows" in caught.value.hint
    assert numpy_peak < LIMIT
    assert pa.default_memory_pool().max_memory() <= max(peak, arrow + LIMIT)
    # As many as fit are answered.
    few = SlicedBatch(batch.slice(0, 20), counts_of(0, 1, 20))
    assert connection.exchange(message, [few]).batch is not None


def test_a_client_asks_in_smaller_parts_by_itself(pond: LocalPond, room: Room) -> None:
    asked = pa.table({"k": [1, 2] * 200, "t": [50] * 400})
    for name, (_, value) in VALUES.items():
        answers = pond.state(name).fetch(key="k", at="t", into="a").now(asked)["a"]
        assert (len(answers), answers.null_count) == (400, 200)
        assert answers[398].as_py() == value
    notes = pond.table("notes").read([1] * 400)
    assert len(notes) == 400
    assert notes["text"][399].as_py() == "x" * BIG
    # A single row that is beyond it can only be told.
    room.share_max = BIG // 2
    with pytest.raises(MessageTooLarge):
        pond.state("texts").fetch(key="k", at="t", into="a").now(asked.slice(0, 1))
    with pytest.raises(MessageTooLarge):
        pond.table("notes").read([1])


def test_the_exchanges_of_a_container_share_its_room() -> None:
    room = Room(100)
    first = room.share(30)
    first.claim(20)
    with pytest.raises(MessageTooLarge):
        first.claim(1)
    second = room.share(50)
    with pytest.raises(Unavailable) as caught:
        room.share(1)
    assert caught.value.hint
    assert room.nbytes == 100
    first.close()
    first.close()
    third = room.share(1)
    with pytest.raises(MessageTooLarge):
        room.share(51)
    second.close()
    third.close()
    assert room.nbytes == 0


def test_readers_take_half_of_the_room_at_most() -> None:
    """They may never receive their answers; those of others have room all the same."""
    room = Room(100)
    readers = [room.share(20, reads_only=True), room.share(30, reads_only=True)]
    with pytest.raises(Unavailable):
        room.share(1, reads_only=True)
    others = [room.share(50)]
    with pytest.raises(Unavailable):
        readers[0].claim(1)
    readers.pop().close()
    others.append(room.share(20))
    with pytest.raises(Unavailable):
        room.share(11, reads_only=True)
    for share in [*readers, *others]:
        share.close()
    assert (room.nbytes, room.reading_nbytes) == (0, 0)


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[SocketDirectory]:
    tmp_path.chmod(0o700)
    directory = SocketDirectory(str(tmp_path))
    yield directory
    directory.close()


def settles(what: Callable[[], bool]) -> bool:
    """Whether it comes to be so."""
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.005)
    return what()


def test_room_is_held_until_an_answer_was_sent(pond: LocalPond, room: Room, sockets: SocketDirectory) -> None:
    service = pond.hosting.services[0]
    message, batch = AMPLIFIED["latest texts"]
    few = SlicedBatch(batch.slice(0, 50), counts_of(0, 1, 50))
    answer = service.exchange(message, iter([few]))
    assert room.nbytes > 50 * BIG
    with pytest.raises(MessageTooLarge):
        service.exchange(message, iter([SlicedBatch(batch, counts_of(0, 1, ASKED))]))
    answer.sent()
    server = FlightService(service, "secret", sockets, "here")
    connection = FlightConnection(server.address, "secret")
    try:
        reply = connection.exchange(message, [few]).batch
        assert reply is not None
        assert reply.num_rows == 50
        # Of one that asks and takes no answer, too.
        command = fl.FlightDescriptor.for_command(encode(message))
        writer, reader = connection._client.do_exchange(command, connection._options_of(message))
        with writer:
            writer.begin(few.batch.schema)
            writer.write_with_metadata(few.batch, few.counts.tobytes())
            writer.done_writing()
            assert settles(lambda: room.nbytes > 50 * BIG)
            time.sleep(0.5)
            assert room.nbytes > 50 * BIG
            assert reader.read_chunk().data.num_rows == 50
        assert settles(lambda: room.nbytes == 0)
    finally:
        connection.close()
        server.shutdown()


def test_reads_come_in_batches_of_a_bounded_size(pond: LocalPond, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pond.state("reads", key="long", value="string")
    keys = 5000
    state.update(key="k", at="t", value="v", name="feed")(
        pa.table({"k": range(keys), "t": [1] * keys, "v": ["w" * 100] * keys}), 0
    )
    state.finish("feed")
    service = pond.hosting.services[0]
    monkeypatch.setattr(outputs, "BATCH_BYTES", 64 << 10)
    _, batches = service.read(ReadSlices("reads", math.inf, [SliceId(0)]))
    sizes = [batch.nbytes for batch in batches]
    assert sum(sizes) > 5 * max(sizes)
    assert max(sizes) < 80 << 10
    assert state.snapshot().num_rows == keys
    with pytest.raises(BadMessage):
        service.read(ReadSlices("reads", math.inf, [SliceId(0)] * 2))


# Calls


@cache
def sockets_in(directory: str) -> SocketDirectory:
    return SocketDirectory(directory)


def client_of(address: str) -> fl.FlightClient:
    """By a short path, whatever the root's."""
    directory, name = os.path.split(address.removeprefix("unix:"))
    return fl.connect(f"grpc+unix://{sockets_in(directory).path_of(name)}")


def idle_streams(address: str, token: str, count: int) -> list[Any]:
    """Exchanges that were begun, and on which nothing is said."""
    client = client_of(address)
    options = fl.FlightCallOptions(headers=[(b"authorization", bearer(token).encode())])
    command = fl.FlightDescriptor.for_command(encode(Question("s", "latest")))
    streams = []
    for _ in range(count):
        writer, reader = client.do_exchange(command, options)
        writer.begin(pa.schema([("_key", pa.int64())]))
        streams.append((writer, reader))
    return [client, *streams]


def is_refused(connection: FlightConnection) -> bool:
    try:
        connection.call(Ping())
    except Unavailable:
        return True
    except Unauthorised:
        pass  # a reader may not ask that, but it may ask
    return False


def test_idle_calls_of_a_reader_do_not_keep_others_out(
    monkeypatch: pytest.MonkeyPatch, sockets: SocketDirectory
) -> None:
    monkeypatch.setattr(flight, "READING_CALLS_MAX", 3)
    monkeypatch.setattr(flight, "CALLS_MAX", 2)
    with LocalPond(LossyFiles(), slices=1) as pond:
        server = FlightService(pond.hosting.services[0], "secret", sockets, "here")
        reader = FlightConnection(server.address, read_only_token("secret"))
        owner = FlightConnection(server.address, "secret")
        for _ in range(10):
            assert not is_refused(reader), "what has ended does not count"
        client, *streams = idle_streams(server.address, read_only_token("secret"), 3)
        try:
            wait_until(lambda: is_refused(reader))
            with pytest.raises(Unavailable, match="3 calls are under way") as caught:
                reader.exchange(Question("s", "latest"), [])
            assert caught.value.hint
            assert not any(is_refused(owner) for _ in range(5))
            # One that ends makes room for another.
            streams.pop()[1].cancel()
            wait_until(lambda: not is_refused(reader))
        finally:
            for writer, answers in streams:
                answers.cancel()
                with suppress(fl.FlightError, pa.ArrowException, OSError):
                    writer.close()
            client.close()
            reader.close()
            owner.close()
            server.shutdown()


def test_readers_read_few_slices_at_a_time(
    pond: LocalPond, monkeypatch: pytest.MonkeyPatch, sockets: SocketDirectory
) -> None:
    """Each holds a slice until it is received; exchanges of a reader take from a share of the room."""
    monkeypatch.setattr(flight, "READING_SLICES_MAX", 1)
    service = pond.hosting.services[0]
    server = FlightService(service, "secret", sockets, "here")
    reader = FlightConnection(server.address, read_only_token("secret"))
    owner = FlightConnection(server.address, "secret")
    begun, goes_on = threading.Event(), threading.Event()
    asked = service.read

    def slow(message: Any) -> Any:
        begun.set()
        assert goes_on.wait(20)
        return asked(message)

    monkeypatch.setattr(service, "read", slow)
    message = ReadSlices("texts", math.inf, [SliceId(0)])
    first = threading.Thread(target=reader.read, args=(message,))
    first.start()
    try:
        assert begun.wait(20)
        with pytest.raises(Unavailable, match="1 calls are under way"):
            reader.read(message)
        goes_on.set()
        assert owner.read(message).num_rows == 2
        first.join()
        wait_until(lambda: _reads(reader, message))
        message_, batch = AMPLIFIED["latest texts"]
        few = SlicedBatch(batch.slice(0, 2), counts_of(0, 1, 2))
        room = Room(2 * LIMIT)
        monkeypatch.setattr(service, "_room", room)
        hog = room.share(LIMIT, reads_only=True)
        with pytest.raises(Unavailable):
            reader.exchange(message_, [few])
        assert owner.exchange(message_, [few]).batch is not None
        hog.close()
    finally:
        goes_on.set()
        first.join()
        reader.close()
        owner.close()
        server.shutdown()


def _reads(connection: FlightConnection, message: ReadSlices) -> bool:
    try:
        connection.read(message)
    except Unavailable:
        return False
    return True


# Memory


def test_sums_of_arrays_beyond_the_memory_are_refused_before_they_count(tmp_path: Path) -> None:
    """Each version is as long as the longest array before it: 1 MiB of rows asks for 1.5 GiB."""
    many, items = 2000, 100_000
    arrays = pa.array([[1.0] * items, *[[]] * (many - 1)], pa.list_(pa.float64()))
    rows = pa.table({"k": [1] * many, "t": range(many), "v": arrays})
    with mp.open(tmp_path / "pond", threads=1, slices=1, memory=MEMORY_MIN) as pond:
        state = pond.state("s", key="long", value="array<double>", update=mp.add())
        feed = state.update(key="k", at="t", value="v", name="feed")
        (info,) = pond.containers()
        with pytest.raises(OutOfMemory):
            feed(rows, 0)
        feed(rows.slice(many - 3), 0)
        state.finish("feed")
        assert state.snapshot().num_rows == 1
        assert pond.containers() == [info], "the same process"


def test_a_request_beyond_the_memory_of_its_container_fails_alone(tmp_path: Path) -> None:
    """Rows, questions and what they decompress to: each is a typed error, and the container is the same one."""
    with mp.open(tmp_path / "pond", threads=1, slices=1, memory=MEMORY_MIN) as pond:
        state = pond.state("s", key="long", value="string")
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": [1], "t": [1], "v": ["x" * MIB]}), 0)
        state.finish("feed")
        (info,) = pond.containers()
        token = (tmp_path / "pond" / "token").read_text().strip()
        connection = FlightConnection(info.address, token)
        staged = (MEMORY_MIN - OWN_BYTES) // ROOM_SHARE
        wide = pa.record_batch(
            {"_key": pa.array([1] * 4), "_time": pa.array(range(4)), "value": pa.array(["y" * MIB] * 4)}
        )
        rows = SlicedBatch(wide, counts_of(0, 1, 4))
        many = 2000
        asked = pa.record_batch({"_key": pa.array([1] * many), "_time": pa.array([9] * many)})
        zeros = pa.record_batch({"_key": pa.array(np.zeros(64 * MIB, np.int64))})
        # More than once: what threads keep of the memory of refused requests must not add up.
        for _ in range(4):
            with pytest.raises(MessageTooLarge) as caught:
                connection.exchange(
                    Stage("s", "stranger@q", Turn(0), 0, 0), [rows] * (staged // wide.nbytes + 1)
                )
            assert caught.value.limit == staged
            assert "memory=" in caught.value.hint
            with pytest.raises(MessageTooLarge):
                connection.exchange(Question("s", "latest"), [SlicedBatch(asked, counts_of(0, 1, many))])
            # 512 MiB of zeros, a few KiB on the way.
            code = squeezed(info.address, token, Question("s", "latest"), zeros)
            assert code in {"OutOfMemory", "BadMessage", "MessageTooLarge"}
            assert pond.containers() == [info], "the same process"
            # What a refused request held is let go by a thread of the transport, a moment after its answer.
            deadline = time.monotonic() + 20
            answers = None
            while answers is None:
                try:
                    answers = state.fetch(key="k", at="t", into="a").now(
                        pa.table({"k": [1] * 200, "t": [9] * 200})
                    )
                except OutOfMemory:
                    assert time.monotonic() < deadline
            assert answers["a"][199].as_py() == "x" * MIB
        connection.close()


def squeezed(address: str, token: str, message: Exchange[Any], batch: pa.RecordBatch) -> str:
    """The name of the error that a compressed batch is answered by."""
    options = fl.FlightCallOptions(
        timeout=60,
        headers=[(b"authorization", bearer(token).encode())],
        write_options=pa.ipc.IpcWriteOptions(compression="zstd"),
    )
    with client_of(address) as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(encode(message)), options)
        with suppress(fl.FlightError, pa.ArrowException, OSError):
            writer.begin(batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
            writer.write_with_metadata(batch, counts_of(0, 1, batch.num_rows).tobytes())
            writer.done_writing()
        with pytest.raises((fl.FlightError, pa.ArrowException, OSError)) as caught:
            reader.read_chunk()
        with suppress(fl.FlightError, pa.ArrowException, OSError):
            writer.close()
    return str(msgspec.msgpack.decode(caught.value.extra_info)["code"])
