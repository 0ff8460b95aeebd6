"""How the tasks of a program that joined a pond come to their credentials: by a private file, never with the tasks.

Where the pond's root is seen here, that is the one that the pond keeps there. Elsewhere the program asks the pond for
one, keeps it in a directory that its tasks see too, and renews it ahead of time.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
from contextlib import suppress

from millpond import private
from millpond.client.link import Link
from millpond.errors import BadOption, MillpondError, NotPrivate
from millpond.wire.connection import Connection
from millpond.wire.credentials import FileCredentials, write_pass
from millpond.wire.handshake import TASK_TOKEN_S
from millpond.wire.passes import AskTaskPass, TaskPass
from millpond.wire.sockets import SCHEME

RENEWED_S = TASK_TOKEN_S / 3
_IN_ROOT = "tasks.json"


class HandedOut:
    """From when tasks are first to come until `close`. Those of a reader show what it shows itself: there is no less."""

    def __init__(
        self,
        connection: Connection,
        address: str,
        root: str,
        own: TaskPass,
        shared: str | os.PathLike[str] | None,
    ) -> None:
        self._connection = connection
        self._address = address
        self._in_root = os.path.join(root, _IN_ROOT)
        self._own = own
        self._shared = None if shared is None else _private_directory(os.fspath(shared))
        self._ended = threading.Event()
        self._temporary = ""
        self._path = ""

    def link(self) -> Link:
        is_here = self._address.startswith(SCHEME) and _is_readable(self._in_root)
        if is_here and self._shared is None and not self._reads:
            return Link(self._address, self._in_root)
        if self._shared is None:
            self._temporary = tempfile.mkdtemp(prefix="millpond-")
        self._path = os.path.join(self._shared or self._temporary, f"tasks-{secrets.token_hex(8)}.json")
        try:
            self._write()
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._renew, name="millpond-passes", daemon=True).start()
        return Link(self._address, self._path)

    @property
    def _reads(self) -> bool:
        return self._own.token.startswith("read.")

    def _write(self) -> None:
        write_pass(self._path, self._own if self._reads else self._connection.call(AskTaskPass()))

    def _renew(self) -> None:
        while not self._ended.wait(RENEWED_S):
            # The next time, while the one that is there is good for some minutes more.
            with suppress(MillpondError, OSError):
                self._write()

    def close(self) -> None:
        """What tasks were given goes, unless it is the pond's own."""
        self._ended.set()
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
        elif self._path:
            with suppress(OSError):
                os.unlink(self._path)


def _is_readable(path: str) -> bool:
    try:
        FileCredentials(path)
    except MillpondError:
        return False
    return True


def _private_directory(path: str) -> str:
    try:
        directory = private.real_path(path, make=True)
        private.check_directory(directory)
    except OSError as error:
        why, hint = (error.message, error.hint) if isinstance(error, NotPrivate) else (str(error), "")
        raise BadOption(
            f"credentials cannot be kept in {private.shown(path)}: {why}", hint=hint, option="shared"
        ) from None
    return directory
