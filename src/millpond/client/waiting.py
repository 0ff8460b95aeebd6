"""Where a process keeps and reads rows that wait: under the pond's root if it sees it, else through the pond.

Which of the two, the landmark says, each time anew: machines differ, and a root that was there may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from millpond.client.client import Client
from millpond.durable.files import AnyBuffer
from millpond.durable.landmark import why_unseen
from millpond.errors import Unavailable
from millpond.stores.waiting import WaitingRows
from millpond.wire.base import Turn
from millpond.wire.connection import SlicedBatch
from millpond.wire.waiting import CONTENT, KeepWaiting, ReadWaiting, TidyWaiting


class WaitingPlace(NamedTuple):
    """Where the waiting rows of one query at one fetcher belong. Plain data that tasks can carry."""

    root: str
    landmark: str
    state: str
    fetcher: str
    query: str

    def rows(self, client: Client) -> WaitingRows:
        """How this process keeps and reads them."""
        parts = self.root, self.state, self.fetcher, self.query
        if why_unseen(self.root, self.landmark, client.files):
            return WaitingRowsAway(client, *parts)
        return WaitingRows(*parts, client.files, client.runtime.bits)


class WaitingRowsAway(WaitingRows):
    """The same files under the same names: any container writes and reads them, the coordinator removes them.

    A container that is away costs a retry at another one, and never a second file.
    """

    def __init__(self, client: Client, root: str, state: str, fetcher: str, query: str) -> None:
        super().__init__(root, state, fetcher, query, client.files, client.runtime.bits)
        self._client = client
        self._whose = state, fetcher, query

    def put(self, turn: Turn, name: str, content: Sequence[AnyBuffer], writer: str = "") -> None:
        state, fetcher, query = self._whose
        whole = b"".join(memoryview(buffer).cast("B") for buffer in content)
        batch = pa.record_batch([pa.array([whole], CONTENT.field(0).type)], schema=CONTENT)
        rows = SlicedBatch(batch, np.array([1], np.int32))
        message = KeepWaiting(state, fetcher, query, turn, name)
        self._client.ask_any(self._bits(16), lambda connection: connection.exchange(message, [rows]))

    def get(self, turn: Turn, name: str) -> pa.Buffer:
        state, fetcher, query = self._whose
        message = ReadWaiting(state, fetcher, query, turn, name)
        table = self._client.ask_any(self._bits(16), lambda connection: connection.read(message))
        (content,) = table.column(0)
        return content.as_buffer()

    def remove_before(self, oldest: Turn, answered: Turn) -> None:
        """The coordinator knows better than who asks how far it may go: word of it may come late."""
        state, fetcher, query = self._whose
        with suppress(Unavailable):
            self._client.call(TidyWaiting(state, fetcher, query))
