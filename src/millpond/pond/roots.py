"""The root of a pond: a directory of this user's alone, with a token in it, and of no containers that still run."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from typing import Literal

from millpond import private
from millpond.errors import BadRoot, NotPrivate, PondInUse

_OF_A_POND = (
    r"(lock|token|tasks|client|journal|containers?|snapshots|backups|waiting|sockets|landmark|grants)\b"
)
ORPHANS_TIMEOUT_S = 30.0
Trust = Literal["all", "data"]


def checked_root(root: object) -> str:
    path = os.fspath(root) if isinstance(root, str | os.PathLike) else root
    if not isinstance(path, str) or not path or "\0" in path:
        raise bad_root(repr(root), "it is not a path")
    return os.path.abspath(path)


def own_root(path: str, trust: Trust = "all") -> str:
    """The root without links, made if need be: this user's alone, with all that is in it. Nothing was read of it yet."""
    try:
        root = private.real_path(path, make=True)
    except OSError as error:
        raise unusable(path, error) from None
    try:
        private.check_directory(root)
        private.check_inside(root)
    except OSError as error:
        if isinstance(error, NotPrivate) and _is_for_something_else(root):
            # What would make a root of it is no good to what is there.
            hint = f"give a directory of its own, for example {private.quoted(os.path.join(root, 'pond'))}"
            raise bad_root(path, error.message, hint) from None
        if isinstance(error, NotPrivate) and error.owner and trust == "all":
            why = f"{error.message}; rules and transactions in it are code, which would run as you"
            # Whoever made it knows its token.
            command = f"{error.hint} && rm -f {private.quoted(os.path.join(root, 'token'))}"
            raise bad_root(
                path, why, f"only if you trust {error.owner}, and they do not have it open: {command}"
            ) from None
        raise unusable(path, error) from None
    return root


def _is_for_something_else(root: str) -> bool:
    """Whether it holds anything, but nothing of a pond's; or is one for all users, as /tmp is."""
    try:
        names = os.listdir(root)
        shared = os.lstat(root).st_mode & stat.S_ISVTX
    except OSError:
        return False
    return bool(names) and bool(shared or not any(re.match(_OF_A_POND, name) for name in names))


def unusable(root: str, error: OSError) -> BadRoot:
    if isinstance(error, NotPrivate):
        return bad_root(root, error.message, error.hint)
    where = error.filename
    named = f"{private.shown(where)}: " if isinstance(where, str) and where != root else ""
    return bad_root(root, f"{named}{error.strerror or error}")


def bad_root(root: str, why: str, hint: str = "give a directory that this user may write to") -> BadRoot:
    return BadRoot(f"{private.shown(root)} cannot hold a pond: {why}", hint=hint, root=root)


def token_of(root: str, renewed: bool = False) -> str:
    """The pond's token, made once, or anew: readable by its owner alone, and written nowhere else."""
    path = os.path.join(root, "token")
    try:
        if renewed:
            raise FileNotFoundError
        token = private.read_text(path).removesuffix("\n")
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        private.write_text(path, f"{token}\n")
    if not re.fullmatch(r"[A-Za-z0-9_-]{43}", token):
        raise bad_root(root, f"{path} holds no token of a pond", hint=f"rm {private.quoted(path)}")
    return token


def await_orphans(root: str) -> None:
    """Waits until the containers of an opener that was killed have ended, so that no one else writes here."""
    deadline = time.monotonic() + ORPHANS_TIMEOUT_S
    with private.append_to(os.path.join(root, "containers.lock")) as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PondInUse(
                        f"containers of an earlier opening of {root} are still running",
                        hint="end them, then open the pond again",
                        root=root,
                    ) from None
                time.sleep(0.02)
