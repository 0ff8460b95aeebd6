"""What a task needs to reach the pond from another process: plain data that Spark can ship."""

from __future__ import annotations

from typing import NamedTuple

from millpond import private
from millpond.client.client import Client
from millpond.errors import Unauthorised
from millpond.wire.flight import dialer_to


class Link(NamedTuple):
    """An address, and the token or the file that holds it. With a file, the token itself does not travel."""

    address: str
    token: str = ""
    token_file: str = ""

    def __repr__(self) -> str:
        return f"Link({self.address!r})"

    def connect(self) -> Client:
        token = self.token or self._read()
        dial = dialer_to(self.address, token)
        return Client(dial.pond(self.address), dial, link=self)

    def _read(self) -> str:
        try:
            return private.read_text(self.token_file).strip()
        except OSError as error:
            raise Unauthorised(
                f"the token file {self.token_file} cannot be read here: {error.strerror or error}",
                hint="join the pond with mp.connect(address, token), whose token travels with the tasks",
            ) from None
