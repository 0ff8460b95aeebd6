"""Messages about rows that wait, for whoever does not see the pond's root: files as they are, there and back.

The content of a file, its checksum with it, comes as one value of one row (`CONTENT`): who made it and who reads it check
it, however many hands it went through. Neither is for a read-only token.
"""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa

from millpond.wire.base import Call, Done, Exchange, Name, Query, Read, Turn, WaitingName
from millpond.wire.roles import STAGING, Senders

CONTENT = pa.schema([("content", pa.large_binary())])

# Anyone to any container


class KeepWaiting(Exchange[Done], frozen=True, tag=True):
    """Keep this file of a turn. Answered when it is durable. To ask again does no harm, wherever and however late."""

    senders: ClassVar[Senders] = STAGING

    fetcher: Name
    query: Query
    turn: Turn
    name: WaitingName


class ReadWaiting(Read, frozen=True, tag=True):
    """What a file of a turn holds."""

    senders: ClassVar[Senders] = STAGING
    reads: ClassVar[bool] = False

    fetcher: Name
    query: Query
    turn: Turn
    name: WaitingName


# Anyone to coordinator


class TidyWaiting(Call[Done], frozen=True, tag=True):
    """Remove what no turn of a query asks for any more, as far as that can be removed now."""

    resident: Name
    fetcher: Name
    query: Query
