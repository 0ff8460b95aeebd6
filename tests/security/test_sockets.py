"""Unix sockets: only their owner binds or connects, and what lies in their place later is not asked."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from strangers import STRANGER, needs_stranger, street

import millpond as mp
from millpond.client import link
from millpond.client.link import Link
from millpond.errors import Unauthorised, Unavailable
from millpond.wire.flight import FlightConnection
from millpond.wire.sockets import SocketDirectory, machine

ROWS = pa.table({"k": [1, 2], "t": [10, 20], "v": [5, 6]})


class Served(NamedTuple):
    pond: mp.Pond
    root: Path

    @property
    def token(self) -> str:
        return (self.root / "token").read_text().strip()

    @property
    def reading(self) -> str:
        return (self.root / "token.read").read_text().strip()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Where others come by: what keeps them out is the pond's own doing."""
    with street() as folder, mp.open(folder / "pond", threads=1, slices=8, port=0) as pond:
        state = pond.state("s", key="long", value="long")
        state.update(key="k", at="t", value="v", name="feed")(ROWS, 0)
        yield Served(pond, folder / "pond")


def test_sockets_are_their_owners_alone(served: Served) -> None:
    assert (served.root / "sockets").stat().st_mode & 0o777 == 0o700
    assert {name.split("-")[0] for name in os.listdir(served.root / "sockets")} == {"pond", "container"}


@pytest.mark.parametrize("mode", [0o750, 0o705, 0o777])
def test_sockets_that_others_may_enter_are_not_asked(mode: int) -> None:
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{directory}/pond")
        listener.listen()
        os.chmod(directory, mode)
        with pytest.raises(Unauthorised, match="nothing was sent"):
            mp.connect(f"unix:{directory}/pond", "x" * 43)
        os.chmod(directory, 0o700)
        with pytest.raises(Unavailable):
            os.symlink(directory, f"{directory}/link")
            mp.connect(f"unix:{directory}/link/pond", "x" * 43)
        os.unlink(f"{directory}/link")
        os.unlink(f"{directory}/pond")


def test_what_is_put_in_the_place_of_the_sockets_later_is_not_asked(tmp_path: Path) -> None:
    """A client keeps the directory that it has checked, whatever its path leads to from then on."""
    root = tmp_path / "pond"
    with mp.open(root, threads=1, slices=1) as pond:
        token, address = (root / "token").read_text(), pond.address
        joined = mp.connect(address, token)
    sockets = root / "sockets"
    sockets.mkdir(mode=0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(sockets / "pond"))
        listener.listen()
        listener.settimeout(1.5)
        with pytest.raises(Unavailable, match="was closed"):
            joined.states()
        with pytest.raises(TimeoutError):
            listener.accept()
    joined.close()


def test_who_joined_at_a_socket_is_told_that_the_pond_was_closed_and_joins_anew(tmp_path: Path) -> None:
    root = tmp_path / "pond"
    with mp.open(root, threads=1, slices=1) as pond:
        joined = mp.connect(pond.address, (root / "token").read_text())
    with mp.open(root, threads=1, slices=1) as pond:
        with pytest.raises(Unavailable, match="was closed") as caught:
            joined.states()
        assert "join it anew with mp.connect" in caught.value.hint
        with pytest.raises(mp.MillpondError) as in_use:
            mp.open(root)
        # The hint is what to run.
        line = re.search(r"mp\.connect\(.*read\(\)\)", in_use.value.hint)
        assert line is not None
        with eval(line[0], {"mp": mp}) as again:
            assert again.states() == {}
    joined.close()


ATTACKS = """
import os, socket, sys
import millpond as mp
root, address, reading = sys.argv[1:]
# The interpreter may be one that others cannot read: all is loaded first, and from then on this is somebody else.
with mp.connect(address, reading) as joined:
    joined.states()
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
for name in ["pond", *sys.stdin.read().split()]:
    try:
        socket.socket(socket.AF_UNIX).connect(f"{root}/sockets/{name}")
        print("connected to", name)
    except PermissionError:
        pass
for attempt in (lambda: os.listdir(root), lambda: os.listdir(root + "/sockets"),
                lambda: socket.socket(socket.AF_UNIX).bind(f"{root}/sockets/mine"),
                lambda: open(root + "/token").read(), lambda: open(root + "/lock", "ab")):
    try:
        attempt()
        print("not refused")
    except PermissionError:
        pass
try:
    mp.connect(f"unix:{root}/sockets/pond", reading)
    print("joined")
except mp.MillpondError as error:
    assert type(error).__name__ == "Unauthorised" and "TCP address" in error.hint, error
with mp.connect(address, reading) as joined:
    assert list(joined.states()) == ["s"]
    try:
        joined.state("mine", key="long", value="long")
        print("changed")
    except PermissionError:
        pass
print("done")
"""


@needs_stranger
def test_another_user_of_the_machine(served: Served) -> None:
    """Reaches no socket and no file; with the read-only token, that it was given, it reads through the gate."""
    found = subprocess.run(
        [sys.executable, "-c", ATTACKS, str(served.root), served.pond.address, served.reading],
        input=" ".join(os.listdir(served.root / "sockets")),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n") == ["done", ""]


@needs_stranger
def test_a_directory_of_another_user_is_not_asked(served: Served) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, STRANGER, STRANGER)
        with pytest.raises(Unauthorised, match="not this user's own"):
            FlightConnection(f"unix:{directory}/pond", served.token)


def test_paths_of_any_length(tmp_path: Path) -> None:
    root = tmp_path / ("x" * 100) / ("y" * 100) / "pond"
    with (
        mp.open(root, threads=1, slices=1) as pond,
        mp.connect(pond.address, (root / "token").read_text()) as it,
    ):
        assert it.states() == {}


def test_a_root_that_holds_no_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have none: then they lie in a temporary directory, which goes with the pond."""
    monkeypatch.setattr(SocketDirectory, "_can_bind", lambda self: False)
    with mp.open(tmp_path / "pond", threads=1, slices=1) as pond:
        directory = Path(pond.address.removeprefix("unix:")).parent
        assert directory.stat().st_mode & 0o777 == 0o700
        assert not directory.is_relative_to(tmp_path)
        with mp.connect(pond.address, (tmp_path / "pond" / "token").read_text()) as joined:
            assert joined.states() == {}
    assert not directory.exists()


def test_a_machine_is_known_by_what_it_sees_of_the_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods on one node do not: their system is the same, and at one path each has another directory."""
    mine, others = tmp_path / "mine", tmp_path / "others"
    mine.mkdir()
    others.mkdir()
    (tmp_path / "link").symlink_to(mine)
    assert machine(str(mine)) == machine(str(tmp_path / "link"))
    assert machine(str(mine)) != machine(str(others))
    assert machine(str(tmp_path / "nothing")) == ""

    class Dialled(Exception):
        """To no address that counts."""

    def dialled(address: str, credentials: object) -> None:
        raise Dialled(address)

    monkeypatch.setattr(link, "dialer_to", dialled)
    monkeypatch.setattr(link, "FileCredentials", str)
    elsewhere = "tls:there:1/pond"
    for machine_of, expected in (
        (mine, f"unix:{mine}/pond"),
        (others, elsewhere),
        (tmp_path / "no", elsewhere),
    ):
        known = Link(f"unix:{mine}/pond", str(tmp_path / "token"), elsewhere, machine(str(machine_of)))
        with pytest.raises(Dialled, match=expected):
            known.connect()
