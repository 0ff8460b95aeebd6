"""The head of an Arrow message: what it says is what Arrow reads, and a malformed one is a BadMessage, whatever it holds."""

from __future__ import annotations

import random
import struct

import numpy as np
import pyarrow as pa
import pytest

from millpond.errors import BadMessage
from millpond.wire.ipc import HEAD_BYTES_MAX, Description, describe

BATCH = pa.record_batch(
    {"k": pa.array(range(100)), "v": pa.array(["text"] * 100), "l": pa.array([[1, None], None] * 50)}
)
WORDS = pa.record_batch({"w": pa.array(["a", "b", "a"]).dictionary_encode()})


def heads(batch: pa.RecordBatch, compression: str | None = None) -> list[tuple[bytes, int]]:
    """The messages of a stream that pyarrow writes: their heads, and how many bytes follow each."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as out:
        out.write_batch(batch)
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    return [(each.metadata.to_pybytes(), 0 if each.body is None else each.body.size) for each in reader]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_what_pyarrow_writes(compression: str | None) -> None:
    packed = compression is not None
    for batch, kinds in [
        (BATCH, ["schema", "record batch"]),
        (WORDS, ["schema", "dictionary batch", "record batch"]),
    ]:
        messages = heads(batch, compression)
        wanted = [
            Description(kind, size, packed and kind != "schema")  # type: ignore[arg-type]
            for kind, (_, size) in zip(kinds, messages, strict=True)
        ]
        assert [describe(head) for head, _ in messages] == wanted
        assert [describe(memoryview(head)) for head, _ in messages] == wanted


def test_an_older_version_is_refused() -> None:
    """In version 4, compression may hide in the custom metadata, where Arrow looks for it too."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_stream(sink, BATCH.schema, options=options) as out:
        out.write_batch(BATCH)
    for message in pa.ipc.MessageReader.open_stream(sink.getvalue()):
        with pytest.raises(BadMessage, match="version 5"):
            describe(message.metadata.to_pybytes())


def test_other_messages_are_other() -> None:
    sink = pa.BufferOutputStream()
    pa.ipc.write_tensor(pa.Tensor.from_numpy(np.arange(4)), sink)
    message = pa.ipc.read_message(sink.getvalue())
    assert describe(message.metadata.to_pybytes()).kind == "other"


def test_every_cut_and_every_flip_is_described_or_refused() -> None:
    rng = random.Random(7)
    messages = [
        head for packed in (None, "zstd") for batch in (BATCH, WORDS) for head, _ in heads(batch, packed)
    ]
    refused = 0
    for head in messages:
        cases = [head[:size] for size in range(len(head))]
        for _ in range(1500):
            case = bytearray(head)
            for _ in range(rng.choice([1, 1, 2, 8])):
                case[rng.randrange(len(case))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            cases.append(bytes(case))
        for case in cases:
            try:
                assert describe(case).body_bytes >= 0
            except BadMessage:
                refused += 1
    assert refused > len(messages) * 100
    for noise in (b"", b"\0" * 64, b"\xff" * 64, rng.randbytes(512)):
        with pytest.raises(BadMessage):
            describe(noise)


def test_a_head_that_is_too_long_is_not_read() -> None:
    head, _ = heads(BATCH)[1]
    assert describe(head + bytes(HEAD_BYTES_MAX - len(head))) == describe(head)
    with pytest.raises(BadMessage, match="more than"):
        describe(head + bytes(HEAD_BYTES_MAX + 1 - len(head)))


def test_offsets_that_go_round_or_outside() -> None:
    """A table that points at itself, before the beginning, or behind the end."""
    for root, places in [(4, 0), (4, 4), (4, -100), (4, 2**31 - 1), (2**32 - 1, 0), (0, 0)]:
        with pytest.raises(BadMessage):
            describe(struct.pack("<Ii", root, places) + b"\0" * 8)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_whatever_arrow_decompresses_is_seen(compression: str) -> None:
    """Of altered messages too: where Arrow still finds compressed buffers, so does `describe`."""
    rng = random.Random(11)
    head, body = next(
        (m.metadata.to_pybytes(), m.body) for m in _messages(compression) if m.type == "record batch"
    )
    agreed = 0
    for _ in range(1500):
        case = bytearray(head)
        case[rng.randrange(len(case))] ^= 1 << rng.randrange(8)
        try:
            seen = describe(bytes(case)).compressed
        except BadMessage:
            continue
        if not seen:
            try:
                batch = pa.ipc.read_record_batch(_encapsulated(bytes(case), body), BATCH.schema)
            except (pa.ArrowException, OSError):
                continue
            # Read as it stands: no buffer is larger than what was sent.
            assert batch.get_total_buffer_size() <= body.size + 8 * batch.num_columns
        agreed += 1
    assert agreed > 100


def _messages(compression: str) -> list[pa.Message]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, BATCH.schema, options=pa.ipc.IpcWriteOptions(compression=compression)
    ) as out:
        out.write_batch(BATCH)
    return list(pa.ipc.MessageReader.open_stream(sink.getvalue()))


def _encapsulated(head: bytes, body: pa.Buffer) -> pa.Buffer:
    padding = b"\0" * (-(len(head) + 8) % 8)
    prefix = struct.pack("<Ii", 0xFFFFFFFF, len(head) + len(padding))
    return pa.py_buffer(prefix + head + padding + body.to_pybytes())
