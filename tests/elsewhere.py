"""Clients that take the pond's root for another directory than it is: what a machine sees that does not have it."""

from __future__ import annotations

from typing import Any

import msgspec

import millpond as mp
from millpond.wire.house import Placement
from millpond.wire.questions import Pinned

UNKNOWN = "0" * 32


class Elsewhere:
    """A connection to the coordinator by which no landmark is told that could be found, and perhaps another root."""

    def __init__(self, inner: Any, root: str | None = None) -> None:
        self._inner = inner
        self._root = root

    def call(self, message: Any) -> Any:
        reply = self._inner.call(message)
        if isinstance(reply, Placement):
            reply = msgspec.structs.replace(reply, landmark=UNKNOWN, root=self._root or reply.root)
        elif isinstance(reply, Pinned):
            reply = msgspec.structs.replace(reply, landmark=UNKNOWN)
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def put_elsewhere(pond: mp.Pond, root: str | None = None) -> mp.Pond:
    """The pond, whose client does not see the root from now on; `root` is a directory that it takes for it."""
    client = pond._client
    client._coordinator = Elsewhere(client._coordinator, root)
    client._placement = None
    return pond
