"""What it means that a file or a directory is private: this user's own, and nobody else's to change or to swap.

Whoever can write a directory can put another file in the place of any in it. So a path is private only if every
directory on its way is. What was found so stays so: only this user and root could change it.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import shlex
import stat
from contextlib import suppress
from functools import cache
from typing import IO, Final

from millpond.errors import NotPrivate

AnyPath = str | os.PathLike[str]
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
SOCKETS: Final = "sockets"
"""The one folder of a pond's root that has sockets in it."""
_LINKS_MAX = 40
_ACL = "system.posix_acl_access"


def real_path(path: AnyPath, make: bool = False) -> str:
    """The path without links, if nobody else can make it lead elsewhere. `make` makes directories that are missing.

    NotPrivate names the first part that is another user's, or that others can write. In a directory such as /tmp
    (sticky), others can write, but not swap what is not theirs.
    """
    place, links = os.sep, 0
    rest = os.path.abspath(path).split(os.sep)[::-1]
    while rest:
        part = rest.pop()
        if part in ("", os.curdir):
            continue
        if part == os.pardir:  # in a link
            place = os.path.dirname(place)
            continue
        _check_way(place)
        inside = os.path.join(place, part)
        try:
            status = os.lstat(inside)
        except FileNotFoundError:
            if not make:
                raise
            make_dir(inside)
            status = os.lstat(inside)
        if not stat.S_ISLNK(status.st_mode):
            place = inside
            continue
        if not _is_trusted(status):
            raise _foreign(f"the link {shown(inside)}", status, _without_link(inside), inside)
        links += 1
        if links > _LINKS_MAX:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), inside)
        target = os.readlink(inside)
        if os.path.isabs(target):
            place = os.sep
        rest += target.split(os.sep)[::-1]
    return place


def check_directory(path: str) -> None:
    """NotPrivate unless the directory, of which `real_path` has seen the way, is this user's and closed to all others."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if status.st_uid != os.geteuid():
        raise _foreign(
            shown(path), status, f"{_sudo()}chown -R {_name_of(os.geteuid())} {quoted(path)}", path
        )
    if status.st_mode & OTHERS:
        raise NotPrivate(
            f"{shown(path)} is open to others (mode {stat.S_IMODE(status.st_mode):04o})",
            hint=f"chmod 700 {quoted(path)}",
            path=path,
        )


def check_inside(top: str, writable: bool = False) -> None:
    """NotPrivate for the first thing inside that is not this user's, or a link, or a file that others can write.

    `writable` lets the last one pass: where the directory was closed to them all the time, others never came that far.
    """
    folders = [top]
    while folders:
        folder = folders.pop()
        sockets = folder == os.path.join(top, SOCKETS)
        # What goes away meanwhile is of no concern.
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    _check_entry(entry.path, status, top, sockets, writable)
                    if stat.S_ISDIR(status.st_mode):
                        folders.append(entry.path)


def own_directory(path: AnyPath) -> str:
    """The directory without links, made if need be: closed to all others, and all that is in it is this user's."""
    directory = real_path(path, make=True)
    check_directory(directory)
    check_inside(directory, writable=True)
    return directory


def make_dir(path: str) -> None:
    """Makes a directory for this user alone, whatever the umask; durable on return. One that is there stays as it is."""
    try:
        os.mkdir(path, stat.S_IRWXU)
        if stat.S_IMODE(os.lstat(path).st_mode) & stat.S_IRWXU != stat.S_IRWXU:
            os.chmod(path, stat.S_IRWXU)
    except FileExistsError:
        pass
    sync(os.path.dirname(path), os.O_DIRECTORY)


def create(path: AnyPath) -> int:
    """Opens a new file for this user alone, whatever the umask, in place of what had the name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, 0o600)
    except FileExistsError:
        os.unlink(path)
        handle = os.open(path, flags, 0o600)
    os.fchmod(handle, 0o600)
    return handle


def open_to_append(path: AnyPath) -> int:
    """A handle at the end of a file, which is made for this user alone where there is none; no link is followed.

    Not O_APPEND, with which systems refuse to copy from file to file: one writer at a time.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        os.fchmod(handle, 0o600)
    os.lseek(handle, 0, os.SEEK_END)
    return handle


def write_text(path: str, text: str) -> None:
    """Puts a file for this user alone in place of what had the name: whole, or not at all."""
    temporary = f"{path}.tmp"
    with open(create(temporary), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def append_to(path: str) -> IO[bytes]:
    """A file to write to at its end, or to lock: of this user alone. It is made if need be."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        _check_file(path, handle)
        os.fchmod(handle, 0o600)
        return open(handle, "ab")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: str) -> str:
    """The content of a file that nobody else may read or write; NotPrivate for any other."""
    handle = open_to_read(path)
    try:
        status = _check_file(path, handle)
        if status.st_mode & OTHERS:
            raise NotPrivate(
                f"{shown(path)} is open to others (mode {stat.S_IMODE(status.st_mode):04o}), who may know it by now",
                hint=f"rm {quoted(path)}",
                path=path,
            )
        with open(handle, closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def open_to_read(path: AnyPath) -> int:
    """A handle; no link is followed, and nobody is waited for at a pipe."""
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def sync(path: AnyPath, flags: int = 0) -> None:
    """The content of a file or a directory is durable on return."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_way(directory: str) -> None:
    """NotPrivate if others can put something else in the place of what is in the directory."""
    status = os.lstat(directory)
    if not _is_trusted(status):
        chown = f"{_sudo()}chown {_name_of(os.geteuid())} {quoted(directory)}"
        hint = f"give another place, or only if you trust {_name_of(status.st_uid)}: {chown}"
        raise _foreign(shown(directory), status, hint, directory)
    if not status.st_mode & stat.S_ISVTX and _others_can_write(directory, status):
        # In a directory of root's, this user may be one of those who have to write.
        mend = "chmod go-w" if status.st_uid == os.geteuid() else f"{_sudo()}chmod +t"
        raise NotPrivate(
            f"others can write {shown(directory)} (mode {stat.S_IMODE(status.st_mode):04o}), and swap what is in it",
            hint=f"{mend} {quoted(directory)}",
            path=directory,
        )


def _check_file(path: str, handle: int) -> os.stat_result:
    status = os.fstat(handle)
    if status.st_uid != os.geteuid():
        raise _foreign(shown(path), status, f"rm {quoted(path)}", path)
    if not stat.S_ISREG(status.st_mode):
        raise NotPrivate(f"{shown(path)} is not a file", hint=f"rm -r {quoted(path)}", path=path)
    return status


def _check_entry(path: str, status: os.stat_result, top: str, sockets: bool, writable: bool) -> None:
    mode = status.st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or (sockets and stat.S_ISSOCK(mode))):
        kind = "a link" if stat.S_ISLNK(mode) else "neither a file nor a directory"
        raise NotPrivate(f"{shown(path)} is {kind}", hint=f"rm {quoted(path)}", path=path)
    if status.st_uid != os.geteuid():
        raise _foreign(shown(path), status, f"{_sudo()}chown -R {_name_of(os.geteuid())} {quoted(top)}", path)
    if not writable and not stat.S_ISSOCK(mode) and _others_can_write(path, status):
        raise NotPrivate(
            f"others can write {shown(path)} (mode {stat.S_IMODE(mode):04o})",
            hint=f"chmod -R go-w {quoted(top)}",
            path=path,
        )


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def _others_can_write(path: str, status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    return not _is_own_group(status.st_gid, os.geteuid()) or _has_acl(path)


def _has_acl(path: str) -> bool:
    """Whether the group's bits of the mode stand for a list of users and groups."""
    if not hasattr(os, "listxattr"):
        return False
    try:
        return _ACL in os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        # A file system that has none; what is gone is of no concern.
        return error.errno not in (errno.ENOTSUP, errno.ENOENT)


@cache
def _is_own_group(group: int, user: int) -> bool:
    """Whether a group is the user's alone, as many systems make one for each user."""
    try:
        own, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return (
        (own.pw_gid, own.pw_name) == (group, members.gr_name)
        and set(members.gr_mem) <= {own.pw_name}
        and all(other.pw_gid != group or other.pw_uid == user for other in pwd.getpwall())
    )


def shown(path: str) -> str:
    """The path as a message has it: whoever gave a file its name does not write on the reader's terminal."""
    return path if path.isprintable() else quoted(path)


def quoted(path: str) -> str:
    """The path as a part of a command, of printable characters only."""
    if path.isprintable():
        return shlex.quote(path)
    plain = "".join(
        chr(byte) if 0x20 <= byte < 0x7F and chr(byte) not in "'\\" else f"\\x{byte:02x}"
        for byte in os.fsencode(path)
    )
    return f"$'{plain}'"


def _without_link(link: str) -> str:
    """How to get by a link of another user."""
    above = os.lstat(os.path.dirname(link))
    if os.geteuid() in (0, above.st_uid):
        return f"rm {quoted(link)}"
    # In a directory such as /tmp, it is not this user's to remove.
    return f"give another place than {quoted(link)}"


def _sudo() -> str:
    """Root needs none, and a container often has none."""
    return "" if os.geteuid() == 0 else "sudo "


def _foreign(what: str, status: os.stat_result, hint: str, path: str) -> NotPrivate:
    owner, user = _name_of(status.st_uid), _name_of(os.geteuid())
    return NotPrivate(f"{what} belongs to {owner}, not to {user}", hint=hint, path=path, owner=owner)


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
