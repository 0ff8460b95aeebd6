"""Where a container's files are, and what is in them.

    containers/t00000003-c0000/manifest.arrow      what the slices of this incarnation rest on
    containers/t00000003-c0000/000000000017.arrow  one log record: the rows of one epoch
    snapshots/NAME.BORN/s00042-t00000003-n000001-c0000.arrow a base: one slice of one resident
    snapshots/NAME.BORN/s00042-t00000003-d000002-c0000.arrow a delta: what has changed in it since
    containers/t00000003-c0000b/...                the same of slices that it holds as a backup, apart; their snapshots are
    backups/t00000003-c0000b/NAME.BORN/s00042-t00000003-n000003-c0000b.arrow

A container that is started again is a new incarnation with a new term and a directory of its own; it never
writes to another's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from millpond.container.holdings.base import CheckedRows, Record
from millpond.durable.arrow_files import (
    Written,
    durable_names,
    read_metadata,
    read_table_file,
    write_batches,
    write_table_file,
)
from millpond.durable.files import Files
from millpond.errors import CorruptFile
from millpond.wire.base import Count, Directory, IdOnDisk, ResidentId, SliceId, Term, Turn, Writer
from millpond.wire.specs import Work

CONTAINERS: Final = "containers"
SNAPSHOTS: Final = "snapshots"
BACKUPS: Final = "backups"
MANIFEST: Final = "manifest.arrow"
_T = TypeVar("_T")
_DIRECTORY = re.compile(r"t(\d{8})-c(\d{4})(b?)")
_WHOSE = r"(?:-(c[0-9]{4}b?))?"
_SNAPSHOT = re.compile(rf"s([0-9]{{5}})-(t[0-9]{{8}})-[nd][0-9]{{6,}}{_WHOSE}\.arrow")
SnapshotName = Annotated[
    str, msgspec.Meta(pattern=rf"^s[0-9]{{5}}-t[0-9]{{8}}-n[0-9]{{6,}}{_WHOSE}\.arrow\Z")
]
DeltaName = Annotated[str, msgspec.Meta(pattern=rf"^s[0-9]{{5}}-t[0-9]{{8}}-d[0-9]{{6,}}{_WHOSE}\.arrow\Z")]
AnySnapshotName = Annotated[str, msgspec.Meta(pattern=rf"^{_SNAPSHOT.pattern}\Z")]
Rows = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_RECORD = re.compile(r"(\d{12})\.arrow")


class LogSpan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of one incarnation's log: those after `after`, up to `last`; to the end while it is still written.

    `skipped` were never decided. Their epochs may be decided later with other rows, in another log: what they are
    can be told only when the span is closed.
    """

    directory: Directory
    after: Count
    last: int | None = None
    skipped: list[int] = []


class Ground(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one slice rests on: by resident a snapshot, that is a base and `deltas` in their order, and where writers
    stood in it; then logs, oldest first.

    Residents that are `behind` could not be snapshotted: they rest on logs that the others need no more.
    """

    snapshots: dict[IdOnDisk, SnapshotName] = {}
    vectors: dict[IdOnDisk, dict[Writer, Turn]] = {}
    logs: list[LogSpan] = []
    behind: dict[IdOnDisk, list[LogSpan]] = {}
    deltas: dict[IdOnDisk, list[DeltaName]] = {}

    @property
    def spans(self) -> list[LogSpan]:
        """All that must be kept for it."""
        return [*self.logs, *(span for spans in self.behind.values() for span in spans)]

    def files_of(self, resident_id: ResidentId) -> list[str]:
        """The files that hold a resident's rows, oldest first."""
        base = self.snapshots.get(resident_id)
        return [] if base is None else [base, *self.deltas.get(resident_id, [])]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the slices of one incarnation of a container rest on."""

    term: Term
    container: int
    slices: dict[SliceId, Ground]


class RecordHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A log record without its rows. `counts[batch][slice]` rows each.

    `work` is in MessagePack: JSON has no infinity, which may be a default.
    """

    id: IdOnDisk
    writer: Writer
    turn: Turn
    ballot: int
    digest: int
    counts: list[list[Rows]]
    work: bytes
    slices: list[SliceId] | None = None
    """Those that it is about, in the log of a backup; None for all that the container had."""

    def is_about(self, number: SliceId) -> bool:
        return self.slices is None or number in self.slices

    @property
    def name(self) -> str:
        """Of the resident."""
        return self.id.rpartition(".")[0]


class SnapshotHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whose rows these are. A delta `follows` a file, or whatever `holds` that file."""

    id: IdOnDisk
    slice_id: SliceId
    follows: AnySnapshotName | None = None
    holds: DeltaName | None = None


def directory_name(term: int, container: int) -> str:
    return f"t{term:08d}-c{container:04d}"


def backup_directory_name(term: int, container: int) -> str:
    """Of the slices that the incarnation holds as a backup: apart, with a manifest and a log of their own."""
    return f"{directory_name(term, container)}b"


def incarnation_of(directory: str) -> tuple[int, int]:
    """Its container and its term."""
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[2]), int(match[1])


def term_of(directory: str) -> int:
    match = _DIRECTORY.fullmatch(directory)
    assert match is not None
    return int(match[1])


def is_directory(name: str) -> bool:
    return _DIRECTORY.fullmatch(name) is not None


def is_directory_of(name: str, container: int) -> bool:
    match = _DIRECTORY.fullmatch(name)
    return match is not None and int(match[2]) == container


def incarnations(files: Files, root: str) -> list[str]:
    """Directory names of all incarnations that got as far as a manifest, oldest term first."""
    base = os.path.join(root, CONTAINERS)
    return [
        name
        for name in files.list(base)
        if _DIRECTORY.fullmatch(name) and files.exists(os.path.join(base, name, MANIFEST))
    ]


def write_manifest(files: Files, root: str, directory: str, manifest: Manifest) -> None:
    path = os.path.join(root, CONTAINERS, directory, MANIFEST)
    write_table_file(files, path, "manifest", pa.schema([]), [], _metadata("manifest", manifest, path))


def read_manifest(files: Files, root: str, directory: str) -> Manifest:
    path = os.path.join(root, CONTAINERS, directory, MANIFEST)
    return _parse(read_metadata(files, path), "manifest", Manifest, path)


def record_path(root: str, directory: str, seq: int) -> str:
    return os.path.join(root, CONTAINERS, directory, f"{seq:012d}.arrow")


def record_numbers(files: Files, root: str, span: LogSpan) -> list[int]:
    """Numbers of the log records of a span; CorruptFile if one is missing in between.

    Those that were skipped are not asked for: nobody vouches for them, and a crash may have taken them.
    """
    base = os.path.join(root, CONTAINERS, span.directory)
    matches = (_RECORD.fullmatch(name) for name in durable_names(files, base))
    numbers = sorted(seq for match in matches if match and (seq := int(match[1])) > span.after)
    if span.last is not None:
        numbers = [seq for seq in numbers if seq <= span.last]
    numbers = [seq for seq in numbers if seq not in span.skipped]
    wanted = set(range(span.after + 1, (span.last or max(numbers, default=0)) + 1)).difference(span.skipped)
    missing = wanted.difference(numbers)
    if missing:
        path = record_path(root, span.directory, min(missing))
        raise CorruptFile(
            f"{path} is missing from the log", hint="restore the file from a backup copy", path=path
        )
    return numbers


def write_record(
    files: Files,
    root: str,
    directory: str,
    seq: int,
    record: Record,
    resident_id: ResidentId,
    schema: pa.Schema,
    slices: list[SliceId] | None = None,
) -> None:
    head = RecordHead(
        resident_id,
        record.writer,
        record.turn,
        record.ballot,
        record.digest,
        [part.counts.tolist() for part in record.parts],
        msgspec.msgpack.encode(record.work),
        slices,
    )
    path = record_path(root, directory, seq)
    batches = [part.batch for part in record.parts]
    write_table_file(files, path, "log", schema, batches, _metadata("record", head, path))


def read_record_head(files: Files, root: str, directory: str, seq: int) -> RecordHead:
    path = record_path(root, directory, seq)
    return _parse(read_metadata(files, path), "record", RecordHead, path)


def read_record(
    files: Files,
    root: str,
    directory: str,
    seq: int,
    schema_of: Callable[[Sequence[str], Work], pa.Schema],
) -> Record:
    path = record_path(root, directory, seq)
    batches, found, metadata = read_table_file(files, path)
    head = _parse(metadata, "record", RecordHead, path)
    try:
        work: Work = msgspec.msgpack.decode(head.work, type=Work)
    except msgspec.DecodeError as error:
        raise CorruptFile(f"{path} does not say what its rows are for: {error}", path=path) from None
    if not found.equals(schema_of(found.names, work)) or [sum(counts) for counts in head.counts] != [
        len(batch) for batch in batches
    ]:
        raise CorruptFile(f"{path} does not hold rows of {head.name}", path=path)
    parts = [
        CheckedRows(batch, np.asarray(counts, dtype=np.int32))
        for batch, counts in zip(batches, head.counts, strict=True)
    ]
    return Record(head.name, head.writer, head.turn, head.ballot, head.digest, work, parts)


def snapshot_directory(root: str, resident_id: ResidentId, base: str = SNAPSHOTS) -> str:
    return os.path.join(root, base, resident_id)


def snapshot_path(root: str, resident_id: ResidentId, name: str) -> str:
    """Where the snapshot of that name is: its name tells whether a backup wrote it, and whose."""
    match = _SNAPSHOT.match(name)
    assert match is not None
    backup = backup_of_snapshot(name)
    base = SNAPSHOTS if backup is None else os.path.join(BACKUPS, backup)
    return os.path.join(snapshot_directory(root, resident_id, base), name)


def term_of_snapshot(name: str) -> int:
    """The incarnation that wrote it."""
    match = _SNAPSHOT.match(name)
    assert match is not None
    return int(match[2][1:])


def backup_of_snapshot(name: str) -> str | None:
    """The directory of the backup that wrote the snapshot; None for an owner's."""
    match = _SNAPSHOT.match(name)
    return f"{match[2]}-{match[3]}" if match is not None and (match[3] or "").endswith("b") else None


def writer_name(container: int, *, is_backup: bool) -> str:
    """How names of snapshots tell who wrote them."""
    return f"c{container:04d}{'b' if is_backup else ''}"


def container_of_snapshot(name: str) -> int | None:
    """The container that wrote it; None for one that earlier versions wrote."""
    match = _SNAPSHOT.match(name)
    return int(match[3][1:5]) if match is not None and match[3] is not None else None


def snapshot_name(slice_id: int, term: int, number: int, writer: str = "", *, is_delta: bool = False) -> str:
    """No other snapshot of the slice has this name, whichever container wrote it. Later ones have larger numbers."""
    whose = f"-{writer}" if writer else ""
    return f"s{slice_id:05d}-t{term:08d}-{'d' if is_delta else 'n'}{number:06d}{whose}.arrow"


def slice_of_snapshot(name: str) -> int | None:
    """The slice of a base or delta, finished or not; None for any other file."""
    match = _SNAPSHOT.match(name)
    return int(match[1]) if match else None


def write_snapshot(
    files: Files, path: str, head: SnapshotHead, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> tuple[Written, int]:
    """It is there once it is settled. And how many bytes the batches had, which are written as they come."""
    kind = "snapshot" if head.follows is None else "delta"
    return write_batches(files, path, kind, schema, batches, _metadata("snapshot", head, path))


def read_pieces(
    files: Files, root: str, name: str, resident_id: ResidentId, slice_id: SliceId, schema: pa.Schema
) -> list[pa.RecordBatch]:
    """What a base holds of a kind whose snapshots are whole, and may be many batches."""
    path = snapshot_path(root, resident_id, name)
    batches, _ = _snapshot(files, path, resident_id, slice_id, schema)
    return batches


def read_snapshot(
    files: Files,
    root: str,
    names: Sequence[str],
    resident_id: ResidentId,
    slice_id: SliceId,
    schema: pa.Schema,
) -> list[pa.RecordBatch]:
    """What a base and the deltas behind it hold, or deltas alone, a batch of each. They are one behind the other."""
    found: list[pa.RecordBatch] = []
    known: set[str] = set()
    for name in names:
        path = snapshot_path(root, resident_id, name)
        batches, head = _snapshot(files, path, resident_id, slice_id, schema)
        if found and head.follows not in known:
            raise CorruptFile(
                f"{path} goes on from {head.follows}, and not from {', '.join(sorted(known))}",
                hint="restore the slice's files from one backup copy",
                path=path,
            )
        known = {name, *([] if head.holds is None else [head.holds])}
        if len(batches) != 1:
            raise CorruptFile(f"{path} has {len(batches)} batches, not one", path=path)
        found += batches
    return found


def _snapshot(
    files: Files, path: str, resident_id: ResidentId, slice_id: SliceId, schema: pa.Schema
) -> tuple[list[pa.RecordBatch], SnapshotHead]:
    batches, own, metadata = read_table_file(files, path)
    head = _parse(metadata, "snapshot", SnapshotHead, path)
    if (head.id, head.slice_id) != (resident_id, slice_id) or not own.equals(schema):
        raise CorruptFile(f"{path} is not a snapshot of slice {slice_id} of {resident_id}", path=path)
    return batches, head


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
