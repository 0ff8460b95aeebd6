"""A root is its opener's own, with all that is in it and on its way: anything else is refused before a byte of it is read."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from strangers import STRANGER, as_stranger, needs_stranger, street

import millpond as mp
from millpond import private
from millpond.client.link import Link
from millpond.durable.files import OsFiles
from millpond.errors import BadRoot, NotPrivate, Unauthorised
from millpond.pond.roots import own_root
from millpond.wire.sockets import SocketDirectory

pytestmark = pytest.mark.usefixtures("started_as_ever")

TOKEN = "t" * 43


def listing(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Of everything inside: owner, mode and content."""
    return {
        str(path): (status.st_uid, status.st_mode, path.read_bytes() if stat.S_ISREG(status.st_mode) else b"")
        for path in [folder, *folder.rglob("*")]
        if (status := path.lstat())
    }


def refused(root: Path) -> BadRoot:
    before = listing(root)
    with pytest.raises(BadRoot) as caught:
        mp.open(root)
    assert listing(root) == before, "nothing was made or changed"
    assert (caught.value.root, isinstance(caught.value, OSError)) == (str(root), True)
    return caught.value


def mend(error: BadRoot | NotPrivate) -> None:
    """Does what the hint says, in a shell."""
    command = error.hint.partition(": ")[2] or error.hint
    subprocess.run(["bash", "-c", command], check=True)


@pytest.fixture
def common() -> Iterator[Path]:
    with street() as folder:
        yield folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "a pond"
    root.mkdir(mode=0o700)
    return root


# The root itself


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701, 0o777, 0o1777], ids=oct)
def test_a_root_that_is_open_to_others_is_refused_with_the_command(root: Path, mode: int) -> None:
    root.chmod(mode)
    assert refused(root).hint == f"chmod 700 '{root}'"
    root.chmod(0o700)
    assert own_root(str(root)) == str(root)


@needs_stranger
def test_a_root_that_a_stranger_prepared_is_refused(common: Path) -> None:
    """It has a token that the stranger knows, and in its journal could be rules, which run."""
    as_stranger(f"mkdir -m 700 pond; echo {TOKEN} > pond/token; chmod 600 pond/token", common)
    error = refused(common / "pond")
    assert "belongs to" in error.message
    assert "code, which would run as you" in error.message
    assert error.hint.endswith(f": chown -R root {common}/pond && rm -f {common}/pond/token")
    assert "do not have it open" in error.hint
    # One with nothing in it, too: whoever owns a directory can swap what comes into it.
    as_stranger("mkdir -m 700 empty", common)
    assert refused(common / "empty").hint.startswith("only if you trust ")
    # None of its code runs: whoever opens it so need not trust anybody.
    (common / "pond" / "journal").mkdir()
    with pytest.raises(BadRoot) as caught:
        mp.open(common / "pond", trust="data")
    assert caught.value.hint == f"chown -R root {common}/pond"
    mend(error)
    assert own_root(str(common / "pond")) == str(common / "pond")


@needs_stranger
@pytest.mark.parametrize(
    "plant",
    [
        "echo {token} > pond/token; chmod 600 pond/token",
        "ln -s {common}/theirs pond/token",
        "ln -s {common}/victim pond/token.tmp",
        "ln -s {common}/victim pond/token.read.tmp",
        "ln -s {common}/victim pond/container-0.log",
        "mkdir theirs; ln -s {common}/theirs pond/journal",
        "mkdir pond/journal; touch pond/journal/000000000001.arrow",
        "mkfifo pond/lock",
    ],
)
def test_what_a_stranger_put_into_a_root_while_it_was_open_is_never_touched(common: Path, plant: str) -> None:
    root, victim = common / "pond", common / "victim"
    root.mkdir()
    root.chmod(0o777)
    victim.write_text("the owner's")
    victim.chmod(0o600)
    done = as_stranger(plant.format(common=common, token=TOKEN), common)
    assert done.returncode == 0, done.stderr
    root.chmod(0o700)
    error = refused(root)
    assert error.hint.startswith(("rm ", "only if you trust "))
    assert str(root) in error.hint
    assert victim.read_text() == "the owner's"


def make_link(root: Path) -> None:
    (root / "snapshots").mkdir()
    (root / "snapshots" / "s.1").symlink_to(root)


def make_socket(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "s"))


def make_writable(mode: int) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        (root / "journal").mkdir(mode=0o700)
        (root / "journal" / "000000000001.arrow").touch()
        (root / "journal" / "000000000001.arrow").chmod(mode)
        os.chown(root / "journal" / "000000000001.arrow", -1, 1 if os.geteuid() == 0 else -1)

    return make


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (make_link, "rm '{root}/snapshots/s.1'"),
        (make_socket, "rm '{root}/s'"),
        (make_writable(0o602), "chmod -R go-w '{root}'"),
        pytest.param(make_writable(0o620), "chmod -R go-w '{root}'", marks=needs_stranger),
    ],
)
def test_what_does_not_belong_into_a_root_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], hint: str
) -> None:
    monkeypatch.chdir(root)
    (root / "lock").touch()
    make(Path())
    error = refused(root)
    assert error.hint == hint.format(root=root)
    mend(error)
    assert own_root(str(root)) == str(root)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777], ids=oct)
def test_a_directory_that_is_for_something_else_is_left_alone(root: Path, mode: int) -> None:
    """As a home is, or /tmp: what would make a root of it is no advice."""
    (root / "letters").symlink_to(root)
    root.chmod(mode)
    assert refused(root).hint == f"give a directory of its own, for example '{root}/pond'"
    assert own_root(str(root / "pond")) == str(root / "pond")
    (root / "token").touch()
    assert refused(root).hint.startswith("give " if mode == 0o1777 else ("rm ", "chmod 700 "))


@pytest.mark.parametrize("name", [b"a\x1b[2Jb\x03\n; id '", b"\xff", "\u202e".encode(), b"plain"], ids=repr)
def test_a_name_does_not_write_on_the_terminal(root: Path, name: bytes) -> None:
    (root / "lock").touch()
    os.symlink("x", os.path.join(os.fsencode(root), name))
    error = refused(root)
    assert f"{error.message}{error.hint}".isprintable()
    mend(error)
    assert [path.name for path in root.iterdir()] == ["lock"]


@pytest.mark.parametrize("name", ["lock", "containers.lock", "token.tmp", "token.read", "journal/1.tmp"])
def test_a_directory_in_the_place_of_a_file_is_named(root: Path, name: str) -> None:
    (root / name).mkdir(parents=True)
    with pytest.raises(BadRoot, match=rf"{re.escape(name)}(\.tmp)?: Is a directory"):
        mp.open(root)


def test_sockets_that_were_copied_with_the_root_are_closed(root: Path) -> None:
    """By `cp -r`, whose directories have the modes that the umask leaves."""
    (root / "sockets").mkdir()
    (root / "sockets").chmod(0o755)
    found = SocketDirectory.under(str(root))
    assert stat.S_IMODE((root / "sockets").stat().st_mode) == 0o700
    found.remove()


def test_sockets_have_a_folder_and_files_may_be_readable_behind_a_closed_door(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "sockets").mkdir()
    monkeypatch.chdir(root / "sockets")
    make_socket(Path())
    Path("s").chmod(0o777)
    (root / "lock").touch(mode=0o644)
    assert own_root(str(root)) == str(root)


# Its way


@needs_stranger
@pytest.mark.parametrize("mode", [0o777, 0o775], ids=oct)
def test_a_root_in_a_folder_that_others_can_write_is_refused(mode: int) -> None:
    with street(mode) as folder:
        os.chown(folder, -1, STRANGER)
        (folder / "pond").mkdir(mode=0o700)
        for root in (folder / "pond", folder / "new"):
            with pytest.raises(BadRoot) as caught:
                mp.open(root)
            assert caught.value.hint == f"chmod go-w {folder}"
        assert [path.name for path in folder.iterdir()] == ["pond"]
        folder.chmod(mode | stat.S_ISVTX)
        assert own_root(str(folder / "pond")) == str(folder / "pond"), "as in /tmp"


@needs_stranger
def test_a_root_in_a_strangers_folder_or_behind_a_strangers_link_is_refused(common: Path) -> None:
    (common / "mine").mkdir(mode=0o700)
    as_stranger("mkdir theirs; ln -s mine link", common)
    for root, named in (("theirs/pond", "theirs"), ("link", "link"), ("link/pond", "link")):
        with pytest.raises(BadRoot, match=f"{common}/{named} belongs to") as caught:
            mp.open(common / root)
        assert caught.value.hint.endswith(f" {common}/{named}")
    assert list((common / "mine").iterdir()) == list((common / "theirs").iterdir()) == []


def test_links_of_ones_own_lead_to_the_root(tmp_path: Path) -> None:
    (tmp_path / "there" / "inner").mkdir(parents=True)
    (tmp_path / "absolute").symlink_to(tmp_path / "there")
    (tmp_path / "relative").symlink_to("absolute/inner/..")
    (tmp_path / "endless").symlink_to("endless")
    assert own_root(str(tmp_path / "relative" / "pond")) == str(tmp_path / "there" / "pond")
    with pytest.raises(BadRoot, match="symbolic links"):
        mp.open(tmp_path / "endless" / "pond")


def test_a_group_of_ones_own_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems where each user has a group, and the umask is 002."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work").chmod(0o775)
    for is_own in (True, False):
        monkeypatch.setattr(private, "_is_own_group", lambda group, user, own=is_own: own)
        if is_own:
            assert own_root(str(tmp_path / "work" / "pond"))
        else:
            with pytest.raises(BadRoot, match="others can write"):
                own_root(str(tmp_path / "work" / "pond"))


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="only Linux has these lists here")
def test_a_list_of_others_who_may_write_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group's bits of the mode stand for all on the list, whoever the group is."""
    monkeypatch.setattr(private, "_is_own_group", lambda group, user: True)
    work, anyone = tmp_path / "work", 0xFFFFFFFF
    work.mkdir()
    entries = ((1, 7, anyone), (2, 7, STRANGER), (4, 7, anyone), (16, 7, anyone), (32, 0, anyone))
    try:
        os.setxattr(
            work,
            "system.posix_acl_access",
            struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries),
        )
    except OSError:
        pytest.skip("this file system has no such lists")
    assert stat.S_IMODE(work.stat().st_mode) == 0o770
    with pytest.raises(BadRoot, match="others can write") as caught:
        own_root(str(work / "pond"))
    mend(caught.value)
    assert own_root(str(work / "pond"))


@needs_stranger
def test_in_a_directory_of_roots_the_hint_leaves_this_user_the_right_to_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A volume is often root's, and writable for a group that the user is in."""
    with street(0o775) as folder:
        os.chown(folder, 0, 50)
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        with pytest.raises(NotPrivate) as caught:
            private.real_path(folder / "pond")
        assert caught.value.hint == f"sudo chmod +t {folder}"
        folder.chmod(folder.stat().st_mode | stat.S_ISVTX)
        with pytest.raises(FileNotFoundError):
            private.real_path(folder / "pond")


@needs_stranger
def test_a_link_that_this_user_cannot_remove_is_gone_round(
    common: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (common / "link").symlink_to("elsewhere")
    os.chown(common / "link", 1, 1, follow_symlinks=False)
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    with pytest.raises(NotPrivate) as caught:
        private.real_path(common / "link" / "pond")
    assert caught.value.hint == f"give another place than {common}/link"


def test_only_a_group_of_one_is_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    users = [pwd.struct_passwd((name, "", uid, gid, "", "", "")) for name, uid, gid in
             (("ann", 1, 1), ("bob", 2, 2), ("eve", 3, 2), ("tom", 4, 4))]  # fmt: skip
    groups = {1: ("ann", []), 2: ("bob", ["bob"]), 4: ("tom", ["eve"]), 5: ("ann", [])}
    monkeypatch.setattr(pwd, "getpwall", lambda: users)
    monkeypatch.setattr(pwd, "getpwuid", {user.pw_uid: user for user in users}.__getitem__)
    monkeypatch.setattr(
        grp,
        "getgrgid",
        {gid: grp.struct_group((n, "", gid, m)) for gid, (n, m) in groups.items()}.__getitem__,
    )
    own = private._is_own_group.__wrapped__
    assert own(1, 1)
    assert not own(2, 2), "eve has it, too"
    assert not own(4, 4), "eve is in it"
    assert not own(5, 1)
    assert not own(1, 2)
    assert not own(9, 1)


# What is written


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("mask", [0o000, 0o777], ids=oct)
def test_what_a_pond_writes_is_its_owners_alone_whatever_the_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    root = tmp_path / "new" / "pond"
    umask(mask)
    with mp.open(root, threads=1, slices=2) as pond:
        state = pond.state("s", key="long", value="long")
        views = state.fetch(key="k", at="t", into="v", name="views").to(lambda rows, epoch: None)
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": [1], "t": [1], "v": [1]}), 0)
        views(pa.table({"k": [1], "t": [9]}), 0)
        pond.checkpoint()
        container = Path(f"/proc/{pond.containers()[0].pid}/status")
        assert not container.exists() or "Umask:\t0077" in container.read_text()
    umask(0o022)
    names = {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}
    assert {name.partition("/")[0] for name in names} >= {
        *("token", "token.read", "lock", "containers.lock", "container-0.log"),
        *("journal", "containers", "snapshots", "waiting"),
    }
    assert any(re.fullmatch(r"waiting/s/views/local/.*/list-.*\.arrow", name) for name in names)
    modes = {(root / name).is_dir(): set() for name in names}
    for name, mode in names.items():
        modes[(root / name).is_dir()].add(mode)
    assert modes == {True: {0o700}, False: {0o600}}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root, root.parent)} == {0o700}
    if os.geteuid() == 0:
        keep_out = as_stranger(f"exec 9<{root}/lock && flock -n 9 || cat {root}/token", Path("/"))
        assert (keep_out.returncode, keep_out.stdout) != (0, "")
        assert "denied" in keep_out.stderr


def test_a_lock_of_an_older_pond_is_closed(root: Path) -> None:
    (root / "lock").touch()
    (root / "lock").chmod(0o644)
    with private.append_to(str(root / "lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert stat.S_IMODE((root / "lock").stat().st_mode) == 0o600


def test_files_follow_no_link_at_their_name(tmp_path: Path) -> None:
    files, victim, link = OsFiles(), tmp_path / "victim", tmp_path / "link"
    victim.write_text("the owner's")
    link.symlink_to(victim)
    for read in (files.read, files.sync, private.read_text, private.append_to):
        with pytest.raises(OSError, match="symbolic links"):
            read(str(link))
    (tmp_path / "folder").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        files.sync_dir(tmp_path / "folder")
    files.write(link, [b"new"])
    assert (link.is_symlink(), link.read_text()) == (False, "new")
    for name in ("text", "text.tmp"):
        (tmp_path / name).symlink_to(victim)
    private.write_text(str(tmp_path / "text"), "secret")
    assert victim.read_text() == "the owner's"
    assert (tmp_path / "text").read_text() == "secret"


# Tokens


@pytest.mark.parametrize(
    ("text", "mode"),
    [(TOKEN, 0o644), (TOKEN, 0o604), ("", 0o600), ("short", 0o600), (f"{TOKEN} x", 0o600)],
)
def test_a_token_that_the_pond_did_not_make_so_is_refused(root: Path, text: str, mode: int) -> None:
    (root / "token").write_text(f"{text}\n")
    (root / "token").chmod(mode)
    with pytest.raises(BadRoot) as caught:
        mp.open(root)
    assert caught.value.hint == f"rm '{root}/token'"
    assert (root / "token").read_text() == f"{text}\n"
    assert not (root / "journal").exists()


def test_a_task_takes_no_token_that_others_can_read(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(Unauthorised, match="open to others"):
        Link("127.0.0.1:1", str(tmp_path / "token")).connect()
    with pytest.raises(NotPrivate, match="not a file"):
        private.read_text(str(tmp_path))
