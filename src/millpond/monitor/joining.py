"""How a command finds a pond: by its address and a token, or on this machine by its root alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from millpond import private
from millpond.errors import BadOption, MillpondError, Unavailable
from millpond.pond.opening import connect
from millpond.pond.pond import Pond
from millpond.wire.sockets import POND, SCHEME

TOKEN = "token.read"  # noqa: S105 - the name of the file that has it


class Way(NamedTuple):
    """To a pond, with a token that may at least read."""

    address: str
    token: str
    certificate: Path | None = None

    def __repr__(self) -> str:
        return f"Way({self.address!r})"

    def join(self) -> Pond:
        return connect(self.address, self.token, certificate=self.certificate)


def way_to(where: str, token_file: Path | None = None, certificate: Path | None = None) -> Way:
    """`where` is a root of this machine or an address. Without a file, the token is the one under the root."""
    if os.path.isdir(where):
        root = os.path.realpath(where)
        address = f"{SCHEME}{os.path.join(root, private.SOCKETS, POND)}"
        if not os.path.exists(address.removeprefix(SCHEME)):
            raise Unavailable(
                f"no pond is open in {where}",
                hint="open it with mp.open or millpond serve; if its sockets lie elsewhere, give its address",
                address=address,
            )
        return Way(address, _token(token_file or Path(root) / TOKEN))
    if not where.startswith(SCHEME) and ":" not in where:
        raise BadOption(
            f"{where} is neither a directory here nor an address",
            hint="give the root of a pond on this machine, host:port, or what pond.address says",
            option="address",
        )
    if token_file is None and where.startswith(SCHEME):
        # The way round from the socket to the root that it lies under.
        token_file = Path(where.removeprefix(SCHEME)).parent.parent / TOKEN
    if token_file is None:
        raise BadOption(
            f"a token is needed for the pond at {where}",
            hint=f"--token-file FILE, with what is in `{TOKEN}` under the pond's root; or give the root instead",
            option="--token-file",
        )
    return Way(where, _token(token_file), certificate)


def _token(file: Path) -> str:
    try:
        return private.read_text(str(file)).strip()
    except OSError as error:
        if isinstance(error, MillpondError):
            raise
        raise BadOption(
            f"the token in {file} cannot be read: {error.strerror or error}",
            hint=f"give a file that holds what is in `{TOKEN}` under the pond's root",
            option="--token-file",
        ) from None
