"""The landmark: a file of random content under a pond's root, made anew at each open.

Whoever is told its content and reads the same at the path of the root sees the root itself. That a directory is there
says nothing: on another machine the same path may be another directory, with another pond in it. The file has a new name
each time, so that no cache of a network's file system shows an older one in its place.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable

from millpond import private
from millpond.durable.files import Files
from millpond.errors import NotPrivate, RootUnseen

PREFIX = "landmark-"
_FORM = r"[0-9a-f]{32}"


def make_landmark(files: Files, root: str, bits: Callable[[int], int]) -> str:
    """Puts a new one in the place of those that were there. For whoever has the root open. What it holds."""
    remove_landmarks(files, root)
    landmark = f"{bits(128):032x}"
    files.write(_path(root, landmark), [landmark.encode()])
    return landmark


def remove_landmarks(files: Files, root: str) -> None:
    for name in files.list(root):
        if name.startswith(PREFIX):
            files.remove(os.path.join(root, name))


def why_unseen(root: str, landmark: str, files: Files | None = None) -> str:
    """Why the pond's root is not what is seen at that path; empty where it is.

    Without `files` it is the disk of this machine, and the path must be private to this user, too.
    """
    if not re.fullmatch(_FORM, landmark):
        return "the pond told no landmark of it"
    path = _path(root, landmark)
    try:
        if files is not None:
            content = files.read(path).to_pybytes()
        elif private.real_path(root) != root:
            return "it is not a path without links"
        else:
            private.check_directory(root)
            content = private.read_text(path).encode()
    except FileNotFoundError:
        there = os.path.isdir(root) if files is None else files.is_dir(root)
        return (
            f"it is another directory there, without {os.path.basename(path)}" if there else "it is not there"
        )
    except OSError as error:
        return error.message if isinstance(error, NotPrivate) else error.strerror or str(error)
    return "" if content == landmark.encode() else f"{os.path.basename(path)} has another content there"


def check_root(root: str, landmark: str, who: str, files: Files | None = None) -> None:
    """RootUnseen, with the path and this host, unless `who`, which is this process, sees the pond's root there.

    For whoever cannot do without. `files` as for `why_unseen`.
    """
    why = why_unseen(root, landmark, files)
    if why:
        host = socket.gethostname()
        raise RootUnseen(
            f"{who} on {host} does not see the pond's root {private.shown(root)}: {why}",
            hint="every machine that runs containers must have the root at that path, for the same user,"
            " as by a network's file system",
            root=root,
            host=host,
        )


def _path(root: str, landmark: str) -> str:
    return os.path.join(root, f"{PREFIX}{landmark[:16]}")
