"""Unix sockets to which only the pond's owner can bind or connect: they lie in one directory, which is private.

The directory is opened once and checked, and its sockets are reached through that handle: what somebody puts at its
path later is never asked. That also lifts the system's limit of 107 bytes to a socket's path.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import weakref
from contextlib import suppress
from typing import Self

from millpond import private
from millpond.errors import BadOption, Unauthorised, Unavailable
from millpond.wire.roles import ROLES, Role

SCHEME = "unix:"
TLS_SCHEME = "tls:"
"""As in `tls:host:port/container-3-t17`: whoever listens there must show that it is called that."""
POND = "pond"
"""The name of the coordinator's socket."""
_CALLER = "from-"
NAME_PATTERN = r"[a-z0-9-]{1,64}\Z"
# Python's flag is not there on every system.
_HANDLE_ONLY = getattr(os, "O_PATH", os.O_RDONLY)


def container_name(container: int, term: int) -> str:
    """A name that no other incarnation of a container has, before or after: whoever dials it means this one."""
    return f"container-{container}-t{term}-{secrets.token_hex(4)}"


def machine(directory: str) -> str:
    """From where the sockets in that directory are reached: the same for all processes that reach each other by them.

    On another system a socket is seen where both see its directory, and reached by nobody; and of two containers of one
    system, as pods are, each may have another directory at that path, or none. Then it is empty.
    """
    try:
        found = os.stat(directory)
    except OSError:
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            system = file.read().strip()
    except OSError:
        system = socket.gethostname()
    return f"{system} {found.st_dev} {found.st_ino}"


def is_name(name: str) -> bool:
    return re.match(NAME_PATTERN, name) is not None


def caller_name(role: Role) -> str:
    """What a gate calls its own end of a connection to a server: so the server knows in which role somebody was let in."""
    return f"{_CALLER}{role}-{secrets.token_hex(8)}"


def role_let_in(peer: str) -> Role | None:
    """The role of who is at the other end, as gRPC calls that; None for a process of this user's own, without a gate."""
    name = name_in(peer)
    if not name.startswith(_CALLER):
        return None
    return next(role for role in ROLES if name.startswith(f"{_CALLER}{role}-"))


def name_in(address: str) -> str:
    """The last part of an address: which server is meant, whatever the way to it."""
    return address.rpartition("/")[2]


class SocketDirectory:
    """A handle on a directory that is this user's own and nobody else's to enter."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            handle = os.open(path, _HANDLE_ONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except PermissionError:
            raise _not_own(path) from None
        except OSError as error:
            raise Unavailable(
                f"no pond is open at {path}: {error.strerror}", hint="is the pond running?", address=path
            ) from None
        self._close = weakref.finalize(self, os.close, handle)
        found = os.fstat(handle)
        if found.st_uid != os.geteuid() or found.st_mode & private.OTHERS:
            self.close()
            raise _not_own(path)
        self._base = f"/proc/self/fd/{handle}" if sys.platform == "linux" else path

    @classmethod
    def under(cls, root: str) -> Self:
        """The directory of a pond's sockets, emptied: under its root, or where that cannot hold any, a temporary one."""
        path = os.path.join(root, private.SOCKETS)
        private.make_dir(path)
        # It may have been copied, with the modes that a umask gave. Nobody else comes that far.
        os.chmod(path, stat.S_IRWXU)
        found = cls(path)
        found.clear()
        if found._can_bind():
            return found
        found.close()
        return cls(tempfile.mkdtemp(prefix="millpond-"))

    def _can_bind(self) -> bool:
        """Not on every file system, and where there are no handles for paths, not at every length of a path."""
        probe = self.path_of(f"probe-{os.getpid()}")
        try:
            with socket.socket(socket.AF_UNIX) as trial:
                trial.bind(probe)
            os.unlink(probe)
        except OSError:
            return False
        return True

    def path_of(self, name: str) -> str:
        """A path to the socket of that name, for this process."""
        if not is_name(name):
            raise BadOption(f"{name!r} is no name of a socket", option="address")
        return f"{self._base}/{name}"

    def address_of(self, name: str) -> str:
        """What other processes of this user call the socket of that name."""
        return f"{SCHEME}{self.path}/{name}"

    def clear(self) -> None:
        """Removes sockets that were left behind."""
        for name in os.listdir(self._base):
            path = f"{self._base}/{name}"
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)

    def remove(self) -> None:
        """The pond has closed."""
        with suppress(OSError):
            self.clear()
            os.rmdir(self.path)
        self.close()

    @property
    def is_gone(self) -> bool:
        """Whether it was removed: what lies at its path now is another one."""
        try:
            return os.stat(self._base).st_nlink == 0
        except OSError:
            return False

    def close(self) -> None:
        self._close()


def _not_own(path: str) -> Unauthorised:
    return Unauthorised(
        f"the sockets in {path} are not this user's own: nothing was sent there",
        hint="join the pond of another user at its TCP address, which `millpond serve` prints",
    )
