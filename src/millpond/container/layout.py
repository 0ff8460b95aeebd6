"""Where a container's files are, and what is in them.

    containers/t00000003-c0000/manifest.arrow      what this incarnation stands on
    containers/t00000003-c0000/000000000017.arrow  one log record: the rows of one epoch
    snapshots/STATE/s00042-t00000003-n000001.arrow one slice of one State

A container that is started again is a new incarnation with a new term and a directory of its own; it never
writes to another's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from millpond.container.held import Record
from millpond.durable.arrow_files import durable_names, read_metadata, read_table_file, write_table_file
from millpond.durable.files import Files
from millpond.errors import CorruptFile
from millpond.wire.connection import SlicedBatch
from millpond.wire.messages import Transactions

CONTAINERS: Final = "containers"
SNAPSHOTS: Final = "snapshots"
MANIFEST: Final = "manifest.arrow"
_T = TypeVar("_T")
_DIRECTORY = re.compile(r"t(\d{8})-c(\d{4})")
_SNAPSHOT = re.compile(r"s(\d{5})-t\d{8}-n\d{6}\.arrow")
_RECORD = re.compile(r"(\d{12})\.arrow")


class Needed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The log of an earlier incarnation as its successor found it: decided up to record `last`.

    `skipped` are records that were never decided. Their epochs may be decided later with other rows, in
    another log: what they are can be told only now.
    """

    last: int
    skipped: list[int]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one incarnation of a container stands on.

    Log records up to `covered` are in the snapshots and gone; `vector` tells where each writer stood then.
    `needs` are the directories of earlier incarnations whose records are in no snapshot yet.
    """

    term: int
    container: int
    slices: list[int]
    covered: int
    vector: dict[str, dict[str, int]]
    snapshots: dict[str, dict[int, str]]
    needs: dict[str, Needed]


class RecordHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log record without its rows. `counts[batch][slice]` rows each.

    `transactions` are in MessagePack: JSON has no infinity, which may be a default.
    """

    state: str
    writer: str
    epoch: int
    digest: int
    counts: list[list[int]]
    transactions: bytes | None = None


class SnapshotHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    state: str
    slice_id: int
    vector: dict[str, int]


def directory_name(term: int, container: int) -> str:
    return f"t{term:08d}-c{container:04d}"


def term_of(directory: str) -> int:
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[1])


def incarnations(files: Files, root: str) -> list[str]:
    """Directory names of all incarnations that got as far as a manifest, oldest term first."""
    base = os.path.join(root, CONTAINERS)
    return [
        name
        for name in files.list(base)
        if _DIRECTORY.fullmatch(name) and files.exists(os.path.join(base, name, MANIFEST))
    ]


def write_manifest(files: Files, root: str, manifest: Manifest) -> None:
    path = os.path.join(root, CONTAINERS, directory_name(manifest.term, manifest.container), MANIFEST)
    write_table_file(files, path, "manifest", pa.schema([]), [], _metadata("manifest", manifest, path))


def read_manifest(files: Files, root: str, directory: str) -> Manifest:
    path = os.path.join(root, CONTAINERS, directory, MANIFEST)
    return _parse(read_metadata(files, path), "manifest", Manifest, path)


def record_path(root: str, directory: str, seq: int) -> str:
    return os.path.join(root, CONTAINERS, directory, f"{seq:012d}.arrow")


def record_numbers(files: Files, root: str, directory: str, covered: int, last: int = 0) -> list[int]:
    """Numbers of the log records after `covered`; CorruptFile if one is missing in between, or up to `last`."""
    base = os.path.join(root, CONTAINERS, directory)
    matches = (_RECORD.fullmatch(name) for name in durable_names(files, base))
    numbers = sorted(seq for match in matches if match and (seq := int(match[1])) > covered)
    through = max(last, max(numbers, default=0))
    missing = set(range(covered + 1, through + 1)).difference(numbers)
    if missing:
        path = record_path(root, directory, min(missing))
        raise CorruptFile(
            f"{path} is missing from the log", hint="restore the file from a backup copy", path=path
        )
    return numbers


def write_record(
    files: Files, root: str, directory: str, seq: int, record: Record, schema: pa.Schema
) -> None:
    head = RecordHead(
        record.state,
        record.writer,
        record.epoch,
        record.digest,
        [sliced.counts.tolist() for sliced in record.batches],
        None if record.transactions is None else msgspec.msgpack.encode(record.transactions),
    )
    batches = [sliced.batch for sliced in record.batches]
    path = record_path(root, directory, seq)
    write_table_file(files, path, "log", schema, batches, _metadata("record", head, path))


def read_record_head(files: Files, root: str, directory: str, seq: int) -> RecordHead:
    path = record_path(root, directory, seq)
    return _parse(read_metadata(files, path), "record", RecordHead, path)


def read_record(
    files: Files,
    root: str,
    directory: str,
    seq: int,
    schema_of: Callable[[Sequence[str], Transactions | None], pa.Schema],
) -> Record:
    path = record_path(root, directory, seq)
    batches, found, metadata = read_table_file(files, path)
    head = _parse(metadata, "record", RecordHead, path)
    transactions = None
    if head.transactions is not None:
        try:
            transactions = msgspec.msgpack.decode(head.transactions, type=Transactions)
        except msgspec.DecodeError as error:
            raise CorruptFile(f"{path} does not hold transactions: {error}", path=path) from None
    if not found.equals(schema_of(found.names, transactions)) or [sum(counts) for counts in head.counts] != [
        len(batch) for batch in batches
    ]:
        raise CorruptFile(f"{path} does not hold rows of state {head.state}", path=path)
    sliced = [
        SlicedBatch(batch, np.asarray(counts, dtype=np.int32))
        for batch, counts in zip(batches, head.counts, strict=True)
    ]
    return Record(head.state, head.writer, head.epoch, head.digest, sliced, transactions)


def snapshot_directory(root: str, state: str) -> str:
    return os.path.join(root, SNAPSHOTS, state)


def snapshot_name(slice_id: int, term: int, number: int) -> str:
    """Names of one slice's snapshots sort by age."""
    return f"s{slice_id:05d}-t{term:08d}-n{number:06d}.arrow"


def slice_of_snapshot(name: str) -> int | None:
    """The slice of a snapshot, finished or not; None for any other file."""
    match = _SNAPSHOT.match(name)
    return int(match[1]) if match else None


def write_snapshot(
    files: Files,
    root: str,
    name: str,
    head: SnapshotHead,
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
) -> None:
    path = os.path.join(snapshot_directory(root, head.state), name)
    write_table_file(files, path, "snapshot", schema, batches, _metadata("snapshot", head, path))


def read_snapshot(
    files: Files, root: str, state: str, slice_id: int, name: str, schema: pa.Schema
) -> tuple[list[pa.RecordBatch], dict[str, int]]:
    """The rows of a slice, and its progress vector."""
    path = os.path.join(snapshot_directory(root, state), name)
    batches, found, metadata = read_table_file(files, path)
    head = _parse(metadata, "snapshot", SnapshotHead, path)
    if head.state != state or head.slice_id != slice_id or not found.equals(schema):
        raise CorruptFile(f"{path} is not a snapshot of slice {slice_id} of state {state}", path=path)
    return batches, head.vector


def place_of(path: str) -> str:
    """What a file says about where it belongs, so that it is not taken for another of its kind."""
    return "/".join(path.split(os.sep)[-2:])


def _metadata(key: str, struct: msgspec.Struct, path: str) -> dict[str, str]:
    return {key: msgspec.json.encode(struct).decode(), "place": place_of(path)}


def _parse(metadata: dict[str, str], key: str, kind: type[_T], path: str) -> _T:
    try:
        parsed = msgspec.json.decode(metadata.get(key, ""), type=kind)
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path} is not a {key} file: {error}", path=path) from None
    if metadata.get("place") != place_of(path):
        raise CorruptFile(f"{path} is another file: it was written as {metadata.get('place')}", path=path)
    return parsed
