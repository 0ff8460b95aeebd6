"""What a process has to show: a token or a bearer, and where it comes by TLS, a certificate."""

from __future__ import annotations

import math
import threading
import time

import msgspec

from millpond import private
from millpond.errors import MillpondError, Unauthorised
from millpond.wire.authority import Bundle
from millpond.wire.handshake import bearer
from millpond.wire.passes import TaskPass

REREAD_S = 20.0
"""How long a task goes by what it read last."""


class Credentials:
    """Of a holder of a token; or without one, as the coordinator and containers are, of a bearer alone."""

    def __init__(self, token: str = "", *, bearer: str = "", bundle: Bundle | None = None) -> None:
        self._token = token
        self._bearer = bearer
        self._bundle = bundle

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def token(self) -> str:
        """For a gate on loopback."""
        return self._token

    def bearer(self) -> str:
        """For a call."""
        return self._bearer or bearer(self._token)

    def bundle(self) -> Bundle:
        """For TLS."""
        if self._bundle is None:
            raise Unauthorised(
                "this pond is reached by TLS, which takes a certificate",
                hint='mp.connect(address, token, certificate="client.pem"), with the file from under the pond\'s root',
            )
        return self._bundle


class FileCredentials(Credentials):
    """In a private file: a token; or what the coordinator gives to tasks, which is renewed there ahead of time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._renew()

    def token(self) -> str:
        self._renew()
        return super().token()

    def bearer(self) -> str:
        self._renew()
        return super().bearer()

    def bundle(self) -> Bundle:
        self._renew()
        return super().bundle()

    def _renew(self) -> None:
        now = time.monotonic()
        if now < self._read_at + REREAD_S:
            return
        with self._lock:
            try:
                text = private.read_text(self._path)
                shown = (
                    msgspec.json.decode(text, type=TaskPass)
                    if text.startswith("{")
                    else TaskPass(text.strip())
                )
            except (OSError, ValueError) as error:
                raise self._unreadable(error) from None
            self._token, self._bundle = shown.token, shown.bundle
            self._read_at = now

    def _unreadable(self, error: Exception) -> Unauthorised:
        why = error.message if isinstance(error, MillpondError) else getattr(error, "strerror", None) or error
        return Unauthorised(
            f"the credentials in {private.shown(self._path)} cannot be read here: {why}",
            hint="all machines must see the pond's root by one path; a program that joined a pond whose root it does"
            " not see names a directory that its tasks see too: mp.connect(..., spark=spark, shared=DIRECTORY)",
        )


def write_pass(path: str, shown: TaskPass) -> None:
    """Puts it where `FileCredentials` reads it."""
    private.write_text(path, msgspec.json.encode(shown).decode())


def credentials_of(given: str | Credentials) -> Credentials:
    return Credentials(given) if isinstance(given, str) else given
