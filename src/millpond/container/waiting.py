"""Rows that wait, of those who do not see the root: a container writes and reads their files, as any other could.

It has no memory of them. What is kept twice, or late, is the same file again; what was begun by one that was killed is a
leftover, which goes with its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa

from millpond.container.room import Room
from millpond.durable.arrow_files import check_content
from millpond.durable.files import Files
from millpond.errors import BadMessage, CorruptFile
from millpond.stores.waiting import FILE_BYTES_MAX, WaitingRows
from millpond.wire.base import Done
from millpond.wire.connection import Answer, SlicedBatch
from millpond.wire.waiting import CONTENT, KeepWaiting, ReadWaiting


class WaitingFiles:
    """What is on its way counts in the container's room for questions and answers."""

    def __init__(self, files: Files, root: str, room: Room, bits: Callable[[int], int]) -> None:
        self._files = files
        self._root = root
        self._room = room
        self._bits = bits

    def keep(self, message: KeepWaiting, batches: Iterator[SlicedBatch]) -> Answer[Done]:
        rows = next(batches, None)
        if rows is None or next(batches, None) is not None:
            raise BadMessage("a file comes as one batch")
        batch = rows.batch
        if not batch.schema.equals(CONTENT) or batch.num_rows != 1 or batch.column(0).null_count:
            raise BadMessage("a file comes as one value of one row")
        share = self._room.share(batch.nbytes)
        try:
            content = batch.column(0)[0].as_buffer()
            try:
                check_content(content, message.name)
            except CorruptFile as error:
                raise BadMessage(f"a file of waiting rows came damaged: {error.message}") from None
            self._rows(message).put(message.turn, message.name, [content], f"{self._bits(64):016x}")
        finally:
            share.close()
        return Answer(Done())

    def read(self, message: ReadWaiting) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        return CONTENT, self._content(message)

    def _content(self, message: ReadWaiting) -> Iterator[pa.RecordBatch]:
        # All that it holds it takes and gives back here: of one that is never begun there is nothing to give back.
        share = self._room.share(FILE_BYTES_MAX)
        try:
            content = self._rows(message).get(message.turn, message.name)
            share.claim(max(0, content.size - FILE_BYTES_MAX))
            offsets = pa.py_buffer(np.array([0, content.size], np.int64))
            value = pa.Array.from_buffers(CONTENT.field(0).type, 1, [None, offsets, content])
            yield pa.record_batch([value], schema=CONTENT)
        finally:
            share.close()

    def _rows(self, message: KeepWaiting | ReadWaiting) -> WaitingRows:
        return WaitingRows(self._root, message.resident, message.fetcher, message.query, self._files)
