"""What a task needs to reach the pond from another process: plain data that Spark can ship, and no secret in it."""

from __future__ import annotations

import os
from typing import NamedTuple

from millpond.client.client import Client
from millpond.wire.credentials import FileCredentials
from millpond.wire.flight import dialer_to
from millpond.wire.sockets import SCHEME, machine


class Link(NamedTuple):
    """An address, and the private file with what tasks have to show; `elsewhere` is the pond's address for those who do not
    reach its sockets from the same `machine`.
    """

    address: str
    credentials: str
    elsewhere: str = ""
    machine: str = ""

    def connect(self) -> Client:
        credentials = FileCredentials(self.credentials)
        sockets = os.path.dirname(self.address.removeprefix(SCHEME))
        address = self.elsewhere if self.elsewhere and self.machine != machine(sockets) else self.address
        dial = dialer_to(address, credentials)
        return Client(dial.pond(address), dial, link=self)
