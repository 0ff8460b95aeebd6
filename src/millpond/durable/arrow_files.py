"""The form of every durable file: an Arrow IPC stream, then a trailer that proves it whole.

    Arrow IPC stream  |  magic (8)  version (u32)  payload length (u64)  CRC-32 of the payload (u32)

The stream marks its own end, so that any Arrow reader opens the file and never sees the trailer. A file is
written under a temporary name, synced, renamed, and its directory synced: at its own name it is whole or
absent. A file that was damaged later is refused before Arrow sees a byte of it.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, Final, NamedTuple, NoReturn

import pyarrow as pa

from millpond.durable.crashpoints import reach
from millpond.durable.files import AnyBuffer, Files
from millpond.errors import BadOption, CorruptFile, WriteFailed
from millpond.private import AnyPath

VERSION: Final = 1
MAGIC: Final = b"MILLPOND"
TEMPORARY: Final = ".tmp"
_TRAILER: Final = struct.Struct("<8sIQI")
_PREFIX: Final = b"millpond."
_VERSION_KEY: Final = _PREFIX + b"version"
_OPTIONS: Final = pa.ipc.IpcWriteOptions()
SMALL_BYTES_MAX: Final = 64 << 10
"""Up to this, a copy costs less than handing over buffers one by one."""


def write_table_file(
    files: Files,
    path: AnyPath,
    kind: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    metadata: Mapping[str, str],
    *,
    exclusive: bool = False,
) -> None:
    """Writes the batches, each of exactly `schema`, with the metadata. Durable on return, or not done.

    `kind` is one of `crashpoints.FILE_KINDS`, or `waiting`. `metadata` goes into the schema's, each key with the prefix
    `millpond.`, and comes back without it; the key `version` is taken. The directory must exist. Where an
    `WriteFailed` comes out, the file may or may not be there, whole in either case.
    """
    put_content(files, path, kind, table_content(schema, batches, metadata), exclusive=exclusive)


def table_content(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], metadata: Mapping[str, str]
) -> list[AnyBuffer]:
    """What `write_table_file` puts into a file: buffers, one after another, the trailer last."""
    payload = _payload(schema, batches, metadata)
    checksum = 0
    for buffer in payload:
        checksum = zlib.crc32(buffer, checksum)
    return [*payload, _TRAILER.pack(MAGIC, VERSION, sum(buffer.size for buffer in payload), checksum)]


Run = Callable[[Callable[[Any], None], Sequence[Any]], object]


def in_turn(work: Callable[[Any], None], items: Sequence[Any]) -> None:
    for item in items:
        work(item)


class Written(NamedTuple):
    """A file of which all is written, under a temporary name, and that is neither durable nor there yet."""

    path: str
    temporary: str
    kind: str


def put_content(
    files: Files,
    path: AnyPath,
    kind: str,
    content: Sequence[AnyBuffer],
    writer: str = "",
    *,
    exclusive: bool = False,
) -> None:
    """Makes the file hold this content, as `write_table_file` does.

    Where several may write the same file at once, each has a name of its own, `writer`: whose comes last counts; or
    `exclusive`, whose comes first, and the others get a FileExistsError.
    """
    settle(files, [write_content(files, path, kind, content, writer)], exclusive=exclusive)


def write_content(
    files: Files, path: AnyPath, kind: str, content: Sequence[AnyBuffer], writer: str = ""
) -> Written:
    """The first half of `put_content`; the file is there after `settle`."""
    path = os.fspath(path)
    written = Written(path, f"{path}.{writer}{TEMPORARY}" if writer else path + TEMPORARY, kind)
    with _told(files, [written]):
        reach(f"{kind}.append.before")
        files.write(written.temporary, content)
        reach(f"{kind}.append.after")
    return written


def write_batches(
    files: Files,
    path: str,
    kind: str,
    schema: pa.Schema,
    batches: Iterator[pa.RecordBatch],
    metadata: Mapping[str, str],
) -> tuple[Written, int]:
    """The first half of `write_table_file`, of batches that are made one by one; the file is there after `settle`. And
    how many bytes the batches had. An error that they raise leaves nothing.
    """
    first, second = next(batches), next(batches, None)
    if second is None:
        return write_content(files, path, kind, table_content(schema, [first], metadata)), int(first.nbytes)
    written = Written(path, path + TEMPORARY, kind)
    sink = _Buffers()
    checksum = nbytes = 0

    def put(write: Callable[[str, Sequence[AnyBuffer]], object]) -> None:
        nonlocal checksum
        for buffer in sink.written:
            checksum = zlib.crc32(buffer, checksum)
        with _told(files, [written]):
            write(written.temporary, sink.written)
        sink.written.clear()

    reach(f"{kind}.append.before")
    try:
        put(files.write)
        with pa.ipc.new_stream(
            pa.PythonFile(sink, mode="w"), _full_schema(schema, metadata), options=_OPTIONS
        ) as stream:
            for batch in chain([first, second], batches):
                stream.write_batch(batch)
                nbytes += int(batch.nbytes)
                put(files.append)
        put(files.append)
        with _told(files, [written]):
            files.append(written.temporary, [_TRAILER.pack(MAGIC, VERSION, sink.tell(), checksum)])
    except Exception:
        _remove(files, [written])
        raise
    reach(f"{kind}.append.after")
    return written, nbytes


def settle(
    files: Files,
    written: Sequence[Written],
    *,
    exclusive: bool = False,
    run: Run = in_turn,
) -> None:
    """Makes files durable, and has them take their places: together, which costs a disk less than one by one.

    `run` syncs all of them, perhaps at the same time.
    """

    def sync_one(each: Written) -> None:
        with _told(files, [each]):
            reach(f"{each.kind}.sync.before")
            files.sync(each.temporary)
            reach(f"{each.kind}.sync.after")

    try:
        run(sync_one, written)
    except WriteFailed:
        _remove(files, written)
        raise
    with _told(files, written):
        for each in written:
            reach(f"{each.kind}.rename.before")
            files.rename(each.temporary, each.path, exclusive=exclusive)
            reach(f"{each.kind}.rename.after")
        for directory, kind in dict.fromkeys((os.path.dirname(each.path), each.kind) for each in written):
            reach(f"{kind}.dirsync.before")
            files.sync_dir(directory or os.curdir)
            reach(f"{kind}.dirsync.after")


@contextmanager
def _told(files: Files, written: Sequence[Written]) -> Iterator[None]:
    """A full disk must not be kept full by what did not fit on it; who wrote is told which file it was."""
    try:
        yield
    except FileExistsError:
        _remove(files, written)
        raise
    except OSError as error:
        _remove(files, written)
        path = written[0].path
        raise WriteFailed(
            f"{path} cannot be written: {error.strerror or error}",
            hint="make room on the disk, or mend its permissions; then repeat what failed",
            path=path,
        ) from error


def _remove(files: Files, written: Iterable[Written]) -> None:
    for each in written:
        with suppress(OSError):
            files.remove(each.temporary)


def read_table_file(files: Files, path: AnyPath) -> tuple[list[pa.RecordBatch], pa.Schema, dict[str, str]]:
    """The batches, the schema and the metadata as they were given to `write_table_file`.

    Raises `CorruptFile`, with the path and what is wrong, for a file that is missing, unfinished, cut,
    altered, or of a version that this code does not know. The whole file is checked first: what is
    returned is all of what was written. The checksum is anyone's to make, so the columns are checked as well: nobody
    reads out of bounds by them.
    """
    return table_in(read_content(files, path), path)


def table_in(content: pa.Buffer, path: AnyPath) -> tuple[list[pa.RecordBatch], pa.Schema, dict[str, str]]:
    """The same, of the content of a file; `path` is for the error."""
    path = os.fspath(path)
    payload = check_content(content, path)
    try:
        with pa.ipc.open_stream(payload) as reader:
            schema = reader.schema
            batches = list(reader)
        for batch in batches:
            batch.validate(full=True)
        ours, others = _split_metadata(schema)
    except (pa.ArrowException, OSError, ValueError) as error:
        _refuse(path, f"it is not an Arrow stream ({error})")
    return (
        [batch.replace_schema_metadata(others) for batch in batches],
        schema.with_metadata(others),
        ours,
    )


def read_metadata(files: Files, path: AnyPath) -> dict[str, str]:
    """The metadata given to `write_table_file`; checks the whole file, as `read_table_file` does."""
    path = os.fspath(path)
    payload = check_content(read_content(files, path), path)
    try:
        return _split_metadata(pa.ipc.read_schema(payload))[0]
    except (pa.ArrowException, OSError, ValueError) as error:
        _refuse(path, f"it is not an Arrow stream ({error})")


def durable_names(files: Files, directory: AnyPath) -> list[str]:
    """Sorted names of the finished files in the directory: no leftover of an unfinished write."""
    return [name for name in files.list(directory) if not name.endswith(TEMPORARY)]


def remove_leftovers(files: Files, directory: AnyPath) -> list[str]:
    """Removes what unfinished writes left in the directory; returns the names.

    For use while nobody writes there.
    """
    leftovers = [name for name in files.list(directory) if name.endswith(TEMPORARY)]
    for name in leftovers:
        files.remove(os.path.join(directory, name))
    return leftovers


def _payload(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], metadata: Mapping[str, str]
) -> list[pa.Buffer]:
    full = _full_schema(schema, metadata)
    batches = list(batches)
    if sum(batch.nbytes for batch in batches) <= SMALL_BYTES_MAX:
        copied = pa.BufferOutputStream()
        _write_stream(copied, full, batches)
        return [copied.getvalue()]
    sink = _Buffers()
    _write_stream(pa.PythonFile(sink, mode="w"), full, batches)
    return sink.written


def _full_schema(schema: pa.Schema, metadata: Mapping[str, str]) -> pa.Schema:
    ours = {_PREFIX + key.encode(): value.encode() for key, value in metadata.items()}
    if _VERSION_KEY in ours:
        raise BadOption("the metadata key 'version' is the file format's own", option="metadata")
    _, others = _split_metadata(schema)
    return schema.with_metadata({**(others or {}), **ours, _VERSION_KEY: str(VERSION).encode()})


def _write_stream(sink: pa.NativeFile, schema: pa.Schema, batches: Sequence[pa.RecordBatch]) -> None:
    with pa.ipc.new_stream(sink, schema, options=_OPTIONS) as writer:
        for batch in batches:
            writer.write_batch(batch)


class _Buffers:
    """A file that keeps what is written to it as it is: Arrow writes a column as the buffer that holds it."""

    closed = False

    def __init__(self) -> None:
        self.written: list[pa.Buffer] = []
        self._size = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        self.written.append(data if isinstance(data, pa.Buffer) else pa.py_buffer(data))
        size: int = self.written[-1].size
        self._size += size
        return size

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def read_content(files: Files, path: AnyPath) -> pa.Buffer:
    """All that a file holds, unchecked; `CorruptFile` where there is none."""
    path = os.fspath(path)
    if path.endswith(TEMPORARY):
        _refuse(path, "it is the leftover of an unfinished write")
    try:
        return files.read(path)
    except FileNotFoundError:
        _refuse(path, "it is missing")
    except IsADirectoryError:
        _refuse(path, "it is a directory")


def check_content(content: pa.Buffer, path: str) -> pa.Buffer:
    """The Arrow stream in the content of a file; `CorruptFile`, with the path, if it is not whole."""
    if content.size < _TRAILER.size:
        _refuse(path, f"it is too short: {content.size} bytes, and the trailer alone has {_TRAILER.size}")
    payload = content.slice(0, content.size - _TRAILER.size)
    magic, version, length, checksum = _TRAILER.unpack(content.slice(payload.size))
    if magic != MAGIC:
        _refuse(path, "wrong magic: it does not end with a Millpond trailer, so it was cut or altered")
    if version != VERSION:
        _refuse(
            path,
            f"unknown version {version}: this Millpond reads version {VERSION}",
            hint="open it with the Millpond that wrote it, or a later one",
        )
    if length != payload.size:
        _refuse(path, f"length mismatch: the trailer tells of {length} bytes, there are {payload.size}")
    actual = zlib.crc32(payload)
    if actual != checksum:
        _refuse(path, f"checksum mismatch: the trailer tells of {checksum:08x}, the content has {actual:08x}")
    return payload


def _refuse(path: str, wrong: str, hint: str = "restore the file from a backup copy") -> NoReturn:
    raise CorruptFile(f"{path} cannot be read: {wrong}", hint=hint, path=path)


def _split_metadata(schema: pa.Schema) -> tuple[dict[str, str], dict[bytes, bytes] | None]:
    """Our metadata, without prefix and version; and everyone else's, None where there is none."""
    metadata: dict[bytes, bytes] = schema.metadata or {}
    ours = {
        key.removeprefix(_PREFIX).decode(): value.decode()
        for key, value in metadata.items()
        if key.startswith(_PREFIX) and key != _VERSION_KEY
    }
    others = {key: value for key, value in metadata.items() if not key.startswith(_PREFIX)}
    return ours, others or None
