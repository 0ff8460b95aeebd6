"""A pond by TLS: who is let in, who is believed, what others can use up, and how certificates are renewed and revoked."""

from __future__ import annotations

import os
import pickle
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond import private
from millpond.client import handing_out
from millpond.client.link import Link
from millpond.coordinator import passes
from millpond.coordinator.passes import Passes
from millpond.errors import BadOption, MillpondError, NotThePond, Unauthorised, Unavailable
from millpond.monitor.joining import way_to
from millpond.wire import credentials, gate, handshake, tls
from millpond.wire.authority import Authority, Bundle, server_name
from millpond.wire.base import SliceId, Term
from millpond.wire.channel import Channel
from millpond.wire.connection import SlicedBatch
from millpond.wire.credentials import Credentials, FileCredentials, write_pass
from millpond.wire.epochs import Apply, Stage, Turn
from millpond.wire.flight import FlightDialer
from millpond.wire.house import Locate, Ping
from millpond.wire.keyring import ContainerKeys
from millpond.wire.passes import Certify, TaskPass
from millpond.wire.roles import Role
from millpond.wire.sockets import POND, SocketDirectory
from millpond.wire.states import ReadSlices

pytestmark = pytest.mark.usefixtures("started_as_ever")

ROWS = pa.table({"k": [1, 2], "t": [10, 20], "v": [5, 6]})
NOT_LOOPBACK = "127.0.0.2"
"""On this machine alone, and not one of the addresses at which a pond does without TLS."""
ISSUED: list[ContainerKeys] = []
"""What the containers of the pond were given."""


class Served(NamedTuple):
    pond: mp.Pond
    root: Path

    @property
    def token(self) -> str:
        return (self.root / "token").read_text().strip()

    @property
    def passes(self) -> Passes:
        owner: Any = self.pond._owner
        return owner._passes

    @property
    def authority(self) -> Authority:
        return self.passes.authority

    def copied(self, name: str, to: Path) -> Path:
        """A bundle as a user takes it elsewhere."""
        private.write_text(str(to / name), (self.root / name).read_text())
        return to / name

    def joined(self, bundle: Bundle, folder: Path) -> mp.Pond:
        private.write_text(str(folder / "given.pem"), bundle.text())
        return mp.connect(self.pond.address, self.token, certificate=folder / "given.pem")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A pond that is reached by TLS, and whose containers are, too, as on other machines."""
    root = tmp_path_factory.mktemp("tls") / "pond"
    own = Passes.container

    def issuing(self: Passes, number: int, term: Term) -> ContainerKeys:
        ISSUED.append(own(self, number, term, "127.0.0.1"))
        return ISSUED[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Passes, "container", issuing)
        with mp.open(root, containers=2, threads=1, slices=8, host=NOT_LOOPBACK, port=0) as pond:
            state = pond.state("s", key="long", value="long")
            state.update(key="k", at="t", value="v", name="feed")(ROWS, 0)
            state.finish("feed")
            yield Served(pond, root)


def settles(what: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether it comes to be so."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def answers(pond: mp.Pond) -> list[Any]:
    asked = pa.table({"k": [1, 2, 3], "t": [30, 30, 30]})
    found: list[Any] = pond.state("s").fetch(key="k", at="t", into="v").now(asked)["v"].to_pylist()
    return found


def address_in(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tls:").partition("/")[0].rpartition(":")
    return host, int(port)


def test_a_pond_by_tls_is_used_as_any_other(served: Served, tmp_path: Path) -> None:
    """Containers are dialled at their own addresses, each by its name; a reader reads, and changes nothing."""
    assert [info.address[:14] for info in served.pond.containers()] == ["tls:127.0.0.1:"] * 2
    assert answers(served.pond) == [5, 6, None]
    full, reading = (served.copied(name, tmp_path) for name in ("client.pem", "client.read.pem"))
    with mp.connect(served.pond.address, served.token, certificate=full) as joined:
        assert answers(joined) == [5, 6, None]
        joined.state("other", key="long", value="long")
        joined.forget("other")
    token = (served.root / "token.read").read_text()
    with mp.connect(served.pond.address, token, certificate=reading) as reader:
        assert answers(reader) == [5, 6, None]
        with pytest.raises(Unauthorised, match="read-only"):
            reader.checkpoint()


def test_bundles_are_the_owners_alone(served: Served, tmp_path: Path) -> None:
    for name in ("client.pem", "client.read.pem", "tasks.json"):
        assert (served.root / name).stat().st_mode & 0o777 == 0o600
    copy = served.copied("client.pem", tmp_path)
    copy.chmod(0o644)
    with pytest.raises(BadOption, match="open to others"):
        mp.connect(served.pond.address, served.token, certificate=copy)
    for text in ("", "x", (served.root / "client.pem").read_text()[:900], Bundle("a", "b", "c").text()):
        private.write_text(str(tmp_path / "bad.pem"), text)
        with pytest.raises(BadOption) as caught:
            mp.connect(served.pond.address, served.token, certificate=tmp_path / "bad.pem")
        assert caught.value.option == "certificate"
        assert caught.value.hint
    with pytest.raises(BadOption):
        mp.connect(served.pond.address, served.token, certificate=tmp_path / "none.pem")


# Who is let in


class Between:
    """Passes one connection after the other on to a server, and keeps what the client sends."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = handshake.address_of(self._listener.getsockname())
        self.heard = bytearray()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with near, socket.create_connection(self._target) as far:
                    back = threading.Thread(target=self._pass, args=(far, near, None))
                    back.start()
                    self._pass(near, far, self.heard)
                    back.join()

    def _pass(self, source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if kept is not None:
                    kept += data
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


class Inner:
    """What stands behind a gate. It keeps all that reaches it."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        self.connections = 0
        self.heard = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection, suppress(OSError):
                    while data := connection.recv(65536):
                        self.heard += data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class Guarded(NamedTuple):
    authority: Authority
    inner: Inner
    gate: tls.TlsGate


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    """A gate of a container, before a server that would notice every byte."""
    tmp_path.chmod(0o700)
    authority, sockets = Authority(), SocketDirectory(str(tmp_path))
    name = "container-3-t17"
    inner = Inner(sockets.path_of(name))
    other = Inner(sockets.path_of("container-4-t18"))
    port = tls.TlsGate(authority.issue("container", name).serving(), sockets, "127.0.0.1", 0, only=name)
    yield Guarded(authority, inner, port)
    port.close()
    assert other.connections == 0, "a container's gate leads to that container alone"
    inner.close()
    other.close()
    sockets.close()


def called(address: str, name: str, bundle: Bundle) -> None:
    host, port = address_in(address)
    dial = FlightDialer(Credentials("x" * 43, bundle=bundle))
    with closing(dial(f"tls:{host}:{port}/{name}")) as connection:
        connection.call(Locate())


def test_certificates_that_do_not_let_in(guarded: Guarded) -> None:
    """A foreign one, an expired one, none at all, a revoked one: typed errors, and nobody behind the gate hears a byte."""
    authority, inner, port = guarded
    good = authority.issue("client")
    foreign = Authority().issue("client")
    revoked = authority.issue("client")
    port.revoke(frozenset({revoked.serial}))
    cases = {
        "foreign": Bundle(foreign.certificate, foreign.key, good.authority),
        "expired": authority.issue("client", seconds=-1),
        "revoked": revoked,
    }
    for what, bundle in cases.items():
        with pytest.raises(Unauthorised, match="refused the certificate") as caught:
            called(port.address, "container-3-t17", bundle)
        assert caught.value.hint, what
    with pytest.raises(Unauthorised, match="takes a certificate"):
        FlightDialer("x" * 43)(f"tls:{port.address}/container-3-t17")
    # None at all, by one who knows how to ask.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=good.authority)
    with (
        socket.create_connection(address_in(port.address), 10) as raw,
        context.wrap_socket(raw, server_hostname=server_name("container-3-t17")) as connection,
        suppress(OSError),
    ):
        connection.sendall(tls.HELLO.pack(tls.MAGIC, b"container-3-t17"))
        assert connection.recv(1) == b"", "nobody is welcome without one"
    # Older versions of TLS.
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_verify_locations(cadata=good.authority)
    with socket.create_connection(address_in(port.address), 10) as raw, pytest.raises(ssl.SSLError):
        old.wrap_socket(raw, server_hostname=server_name("container-3-t17"))
    assert (inner.connections, bytes(inner.heard)) == (0, b"")
    # And one that does: what it says begins as HTTP/2 does.
    with pytest.raises(Unavailable), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Locate, "seconds", 0.5)
        called(port.address, "container-3-t17", good)
    assert settles(lambda: inner.heard.startswith(b"PRI * HTTP/2.0"))


@pytest.mark.parametrize("way", ["call", "exchange", "read"])
def test_a_server_that_says_nothing_is_given_up(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Every call has a deadline, whichever way it goes: here by TLS, as from another machine."""
    authority, inner, port = guarded
    messages: dict[str, tuple[Any, ...]] = {
        "call": (Locate(),),
        "exchange": (
            Stage("s", "feed@local", Turn(0), 0, 0),
            [SlicedBatch(ROWS.to_batches()[0], np.array([2]))],
        ),
        "read": (ReadSlices("s", 1, [SliceId(0)]),),
    }
    asked = messages[way]
    monkeypatch.setattr(type(asked[0]), "seconds", 0.3)
    host, number = address_in(port.address)
    dial = FlightDialer(Credentials("x" * 43, bundle=authority.issue("client")))
    with closing(dial(f"tls:{host}:{number}/container-3-t17")) as connection:
        started = time.monotonic()
        with pytest.raises(Unavailable):
            getattr(connection, way)(*asked)
        assert 0.2 < time.monotonic() - started < 20, "not at once, as one that is refused, and not for ever"
    assert settles(lambda: inner.heard.startswith(b"PRI * HTTP/2.0"))


def test_names_and_bytes_that_are_none(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, inner, port = guarded
    context = authority.issue("client").connecting(to_pond=False)
    for name in (b"container-4-t18", b"pond", b"..", b"a/b", b"", b"\xff" * 64):
        with (
            socket.create_connection(address_in(port.address), 10) as raw,
            context.wrap_socket(raw, server_hostname=server_name("container-3-t17")) as connection,
        ):
            connection.sendall(tls.HELLO.pack(tls.MAGIC, name))
            with suppress(OSError):
                assert connection.recv(1) in (b"", handshake.GONE)
    for first in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        os.urandom(1000),
        b"\0" * 1000,
        b"\x16\x03\x01\x40\x00",
    ):
        with socket.create_connection(address_in(port.address), 10) as raw:
            with suppress(ConnectionError):
                for _ in range(200):
                    raw.sendall(first.ljust(10_000, b"\0"))
            with suppress(ConnectionError):
                while raw.recv(100):
                    pass
    assert (inner.connections, bytes(inner.heard)) == (0, b"")


def test_what_a_stranger_can_use_up(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshakes that stand still have an end, and are few; one that comes meanwhile is let in."""
    authority, inner, port = guarded
    handles = len(os.listdir("/proc/self/fd"))
    hello = Channel(authority.issue("client").connecting(False), server_name("container-3-t17"))
    hello.shake()
    begun, idle = hello.take(), []
    try:
        for number in range(300):
            idle.append(socket.create_connection(address_in(port.address), 10))
            if number % 2:
                idle[-1].sendall(begun if number % 3 else begun[:100])
        assert settles(lambda: len(port._pending) <= gate.PENDING_MAX)
        assert len(os.listdir("/proc/self/fd")) - handles - len(idle) <= gate.PENDING_MAX + 8
        tunnel = tls.TlsTunnel(port.address, "container-3-t17", lambda: authority.issue("client"), False)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(tunnel.path)
            connection.sendall(b"hello")
            assert settles(lambda: bytes(inner.heard) == b"hello")
        tunnel.close()
    finally:
        for each in idle:
            each.close()
    assert settles(lambda: not port._pending)
    monkeypatch.setattr(gate, "HANDSHAKE_S", 0.3)
    with socket.create_connection(address_in(port.address), 10) as slow:
        slow.sendall(begun)
        while slow.recv(4096):
            pass


# Who is believed


class Impostor:
    """Listens where a container did, with a certificate of its own choice, and keeps what it is told inside of TLS."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = handshake.address_of(self._listener.getsockname())
        self._context = context
        self.connections = 0
        self.heard = bytearray()
        self.shaken = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                raw, _ = self._listener.accept()
                self.connections += 1
                raw.settimeout(1)
                with raw, suppress(OSError):
                    if self._context is None:
                        raw.sendall(b"\0\0\0\x04\0\0\0\0\0")  # as a server of HTTP/2 begins
                        while data := raw.recv(65536):
                            self.heard += data
                        continue
                    with self._context.wrap_socket(raw, server_side=True) as connection:
                        self.shaken += 1
                        while data := connection.recv(65536):
                            self.heard += data

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def test_an_impostor_on_the_port_of_a_container_is_told_nothing() -> None:
    """By a container of another id, of an older term, by a client's certificate, by a foreign authority, without TLS."""
    authority, name = Authority(), "container-3-t17"
    client = authority.issue("client")
    contexts: dict[str, ssl.SSLContext | None] = {
        "an older term": authority.issue("container", "container-3-t16").serving(),
        "another container": authority.issue("container", "container-4-t17").serving(),
        "the coordinator": authority.issue("coordinator", POND).serving(),
        "a client": authority.issue("client").serving(),
        "expired": authority.issue("container", name, seconds=-1).serving(),
        "a foreign authority": Authority().issue("container", name).serving(),
        "no TLS": None,
    }
    for who, context in contexts.items():
        with closing(Impostor(context)) as impostor:
            with pytest.raises(NotThePond) as caught:
                called(impostor.address, name, client)
            assert caught.value.address == impostor.address, who
            assert caught.value.hint
            assert impostor.connections > 0
            assert impostor.shaken == 0, who
            # Without TLS it hears how TLS begins, which tells the name that was meant, and an alert.
            for secret in (b"PRI *", b"Bearer", b"authorization", b"x" * 43):
                assert secret not in impostor.heard, who


def test_an_impostor_in_the_place_of_the_pond(served: Served, tmp_path: Path) -> None:
    """A container is not the pond, and an earlier opening of the pond is not this one."""
    certificate = served.copied("client.pem", tmp_path)
    for context in (
        served.authority.issue("container", "container-0-t1").serving(),
        Authority().issue("coordinator", POND).serving(),
    ):
        with closing(Impostor(context)) as impostor:
            with pytest.raises(NotThePond):
                mp.connect(impostor.address, served.token, certificate=certificate)
            assert (impostor.shaken, bytes(impostor.heard)) == (0, b"")


def test_nothing_is_in_the_clear_and_no_proxy_is_asked(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.settimeout(0.2)
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        with closing(Between(address_in(served.pond.address))) as between:
            certificate = served.copied("client.pem", tmp_path)
            with mp.connect(between.address, served.token, certificate=certificate) as joined:
                assert list(joined.states()) == ["s"]
                assert answers(joined) == [5, 6, None]
            heard = bytes(between.heard)
        with pytest.raises(TimeoutError):
            proxy.accept()
    assert len(heard) > 2000
    for word in (b"PRI *", b"authorization", b"Bearer", served.token.encode(), b"ListResidents"):
        assert word not in heard


def test_without_a_certificate_a_pond_by_tls_is_not_joined(served: Served, tmp_path: Path) -> None:
    """By the token alone, nobody comes in; a certificate at a port without TLS is a typed error, too."""
    with pytest.raises(NotThePond, match="certificate="):
        mp.connect(served.pond.address, served.token)
    reader = way_to(served.pond.address, served.root / "token.read", served.root / "client.read.pem")
    with reader.join() as joined:
        assert list(joined.states()) == ["s"]
    shown = served.copied("client.pem", tmp_path)
    shown.chmod(0o644)
    with pytest.raises(BadOption, match=r"open to others[\s\S]*rm .*copy it from the pond's root anew"):
        mp.connect(served.pond.address, served.token, certificate=shown)
    foreign = Authority().issue("client")
    with pytest.raises(Unauthorised):
        served.joined(Bundle(foreign.certificate, foreign.key, served.authority.certificate), tmp_path)
    with pytest.raises(Unauthorised, match="expired"):
        served.joined(served.authority.issue("client", seconds=-1), tmp_path)


# What a certificate lets do


def test_a_task_may_do_no_more_than_a_task(served: Served) -> None:
    """Neither by its bearer, nor by another one, where it came in by its certificate."""
    own = FileCredentials(str(served.root / "tasks.json"))
    assert own.token().startswith("task.")
    (info, _) = served.pond.containers()
    dial = FlightDialer(own, f"tls:{served.pond.address}/{POND}")
    for address in (info.address, POND):
        with closing(dial(address)) as connection:
            for message in (Apply("s", "feed@local", Turn(0), 1, 1), Ping()):
                with pytest.raises(Unauthorised, match="a task cannot"):
                    connection.call(message)
    with closing(dial(POND)) as connection:
        assert len(connection.call(Locate()).owners) == 8
    # Who knows more than that and comes in by a task's certificate is held to it.
    stolen: list[tuple[Role, dict[str, str]]] = [
        ("task", {"token": served.token}),
        ("task", {"bearer": served.passes.keyring.coordinator}),
        ("reader", {"token": served.token}),
        ("reader", {"token": own.token()}),
        ("client", {"bearer": served.passes.keyring.coordinator}),
        ("client", {"bearer": served.passes.keyring.container}),
    ]
    for role, known in stolen:
        bundle = served.authority.issue(role)
        through = FlightDialer(Credentials(**known, bundle=bundle), f"tls:{served.pond.address}/{POND}")
        for address in (info.address, POND):
            with closing(through(address)) as connection, pytest.raises(Unauthorised, match="cannot call as"):
                connection.call(Locate())
    coordinator = FlightDialer(served.passes.coordinator())
    with closing(coordinator(info.address)) as connection:
        connection.call(Ping())


def test_tasks_tokens_end(monkeypatch: pytest.MonkeyPatch, served: Served, tmp_path: Path) -> None:
    """Tasks read them anew; of a file that is no longer renewed, what it holds is worth nothing after some minutes."""
    monkeypatch.setattr(credentials, "REREAD_S", 0.0)
    path = str(tmp_path / "tasks.json")
    write_pass(path, served.passes.task())
    accepted = served.passes.keyring.accepted()
    own = FileCredentials(path)
    before = own.bearer()
    assert accepted.role_of(before) == "task"
    began = time.time()
    for spans, role in ((1, "task"), (2, None), (3, None)):
        monkeypatch.setattr(time, "time", lambda spans=spans: began + spans * handshake.TASK_TOKEN_S)
        assert accepted.role_of(before) == role
    write_pass(path, TaskPass(served.passes.keyring.task_token()))
    assert own.bearer() != before
    assert accepted.role_of(own.bearer()) == "task"


def test_links_hold_no_secret(served: Served, tmp_path: Path) -> None:
    """Neither that of an opener, nor of one who joined by any way."""
    certificate = served.copied("client.pem", tmp_path)
    reading = served.copied("client.read.pem", tmp_path)
    token = (served.root / "token.read").read_text().strip()
    shared = tmp_path / "shared"
    with (
        mp.connect(served.pond.address, served.token, certificate=certificate, shared=shared) as joined,
        mp.connect(served.pond.address, token, certificate=reading) as reader,
    ):
        links = [pond.link for pond in (served.pond, joined, reader)]
        assert all(link is not None for link in links)
        for link in links:
            assert isinstance(link, Link)
            shown = Path(link.credentials)
            assert shown.stat().st_mode & 0o777 == 0o600
            held = pickle.dumps(link) + repr(link).encode()
            own = FileCredentials(link.credentials)
            for secret in (
                *(served.token, token, own.token(), own.bearer()),
                *own.bundle().text().splitlines(),
            ):
                assert secret.encode() not in held
            with closing(link.connect()) as client:
                assert len(client.placement().owners) == 8
        assert FileCredentials(str(links[1].credentials)).token().startswith("task.")  # type: ignore[union-attr]
        assert FileCredentials(str(links[2].credentials)).token() == token  # type: ignore[union-attr]
        files = [Path(link.credentials) for link in links[1:] if link is not None]
        assert files[0].parent == shared
    assert not any(file.exists() for file in files), "what was handed out goes with the one who did"
    # Where the root is seen, but not its sockets.
    assert isinstance(links[0], Link)
    with closing(links[0]._replace(machine="another").connect()) as client:
        assert len(client.call(Locate()).owners) == 8
        assert client._coordinator.address == served.pond.address  # type: ignore[attr-defined]
    with pytest.raises(Unauthorised, match="cannot be read here") as caught:
        Link(served.pond.address, str(tmp_path / "elsewhere.json")).connect()
    assert "shared=" in caught.value.hint


def test_who_joins_renews_what_its_tasks_show(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handing_out, "RENEWED_S", 0.1)
    certificate = served.copied("client.pem", tmp_path)
    with mp.connect(served.pond.address, served.token, certificate=certificate) as joined:
        assert joined.link is not None
        file = Path(joined.link.credentials)
        before = file.read_text()
        assert settles(lambda: file.read_text() != before)


# Renewal and revocation


def test_certificates_are_renewed_ahead_of_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of each container, of the pond, of clients and of tasks; nothing that they hold is lost."""
    before = [info.pid for info in served.pond.containers()]
    shown = [_serial_at(info.address) for info in served.pond.containers()]
    files = {
        name: (served.root / name).read_text() for name in ("client.pem", "client.read.pem", "tasks.json")
    }
    with monkeypatch.context() as patch:
        patch.setattr(passes, "RENEWED_AT", 0.0)
        patch.setattr(passes, "TASKS_RENEWED_S", 0.0)
        assert settles(
            lambda: (
                all(
                    _serial_at(info.address) != old
                    for info, old in zip(served.pond.containers(), shown, strict=True)
                )
                and all((served.root / name).read_text() != text for name, text in files.items())
            )
        )
    assert answers(served.pond) == [5, 6, None]
    assert [info.pid for info in served.pond.containers()] == before


def _serial_at(address: str) -> str:
    """Of the certificate that is shown there."""
    return ssl.get_server_certificate(address_in(address), timeout=10)


def test_what_is_revoked_ends(served: Served, tmp_path: Path) -> None:
    """At the pond and at containers, whose connections end; one that starts later knows of it, too."""
    certificate = served.copied("client.pem", tmp_path)
    with mp.connect(served.pond.address, served.token, certificate=certificate) as joined:
        assert answers(joined) == [5, 6, None]
        served.pond.revoke()
        bundle = Bundle.read(str(certificate))
        for ask in (
            joined.states,
            lambda: mp.connect(served.pond.address, served.token, certificate=certificate),
        ):
            assert settles(lambda ask=ask: _is_revoked(ask))
        for info in served.pond.containers():
            with pytest.raises(Unauthorised, match="revoked"):
                called(info.address, info.address.rpartition("/")[2], bundle)
        with pytest.raises(BadOption, match="opened"):
            joined.revoke()
    (info, _) = served.pond.containers()
    os.kill(info.pid, 9)
    assert settles(
        lambda: [other.id for other in served.pond.containers() if other.pid != info.pid] == [0, 1], 60
    )
    (again, _) = served.pond.containers()
    assert again.address != info.address
    with pytest.raises(Unauthorised, match="revoked"):
        called(again.address, again.address.rpartition("/")[2], bundle)
    renewed = served.copied("client.pem", tmp_path)
    with mp.connect(served.pond.address, served.token, certificate=renewed) as joined:
        assert answers(joined) == [5, 6, None]


def test_an_incarnation_that_was_relieved_is_let_in_nowhere(served: Served) -> None:
    """By the very certificate that it had, good for hours: not by its peers, nor by the pond."""
    old, peer = served.pond.containers()
    name = old.address.rpartition("/")[2]
    bundle = next(keys.bundle for keys in reversed(ISSUED) if keys.name == name and keys.bundle is not None)
    places = [peer.address, f"tls:{served.pond.address}/{POND}"]
    for address in places:
        with pytest.raises(MillpondError) as refused:
            called(address, address.rpartition("/")[2], bundle)
        assert "revoked" not in str(refused.value), "it comes in, and is told by its token"
    os.kill(old.pid, 9)
    assert settles(
        lambda: [each.id for each in served.pond.containers() if each.pid != old.pid] == [0, 1], 60
    )
    for address in places:
        assert settles(
            lambda address=address: _is_revoked(lambda: called(address, address.rpartition("/")[2], bundle))
        )
    assert answers(served.pond) == [5, 6, None]
    assert served.pond.containers()[1].pid == peer.pid


def _is_revoked(ask: Callable[[], object]) -> bool:
    """Flight waits a while before it connects anew, and says so."""
    with pytest.raises((Unauthorised, Unavailable)) as caught:
        ask()
    return isinstance(caught.value, Unauthorised) and "revoked" in str(caught.value)


def test_only_the_coordinator_certifies(served: Served) -> None:
    (info, _) = served.pond.containers()
    bundle = served.authority.issue("container", info.address.rpartition("/")[2])
    with (
        closing(FlightDialer(served.passes.client())(info.address)) as connection,
        pytest.raises(Unauthorised, match="a client cannot ask for Certify"),
    ):
        connection.call(Certify(bundle))


# Secrets, and the certificate that a user gives


def test_no_secret_is_where_others_could_see_it(served: Served) -> None:
    """Not in arguments, environments or logs; the authority's key and the secrets of servers in no file at all."""
    keyring = served.passes.keyring
    bundle = served.authority.issue("client")
    secrets = [served.token, keyring.coordinator[7:], keyring.container[7:], keyring.tasks.hex()]
    secrets += [line for line in bundle.key.splitlines() if not line.startswith("-")]
    key: Any = served.authority._key
    secrets.append(f"{key.private_numbers().private_value:x}")
    for pid in [os.getpid(), *(info.pid for info in served.pond.containers())]:
        for what in ("cmdline", "environ"):
            shown = Path(f"/proc/{pid}/{what}").read_bytes()
            assert not [secret for secret in secrets if secret.encode() in shown]
            assert b"PRIVATE KEY" not in shown
    for path in served.root.rglob("*"):
        with suppress(FileNotFoundError):  # the pond goes on, and files come and go
            if path.is_file():
                content = path.read_bytes()
                found = [secret for secret in secrets if secret.encode() in content]
                assert found == ([served.token] if path.name == "token" else []), path
    for each in (served.passes.keyring, bundle, served.passes.container(7, Term(9)), keyring.accepted()):
        assert not [secret for secret in secrets if secret in repr(each)]


def test_a_given_certificate(tmp_path: Path) -> None:
    """Whoever issued it: clients know it by the bundle, and it alone."""
    company = Authority()
    theirs = company.issue("coordinator", "ponds-example")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    certificate.write_text(theirs.certificate)
    key.write_text(theirs.key)
    for bad in ({"certificate": certificate}, {"key": key}, {"certificate": key, "key": certificate}):
        with pytest.raises(BadOption):
            mp.open(tmp_path / "pond", port=0, **bad)
    with pytest.raises(BadOption):
        mp.open(tmp_path / "pond", certificate=certificate, key=key)
    # Also on loopback, where it is asked for.
    with mp.open(tmp_path / "pond", threads=1, slices=1, port=0, certificate=certificate, key=key) as pond:
        token = (tmp_path / "pond" / "token").read_text()
        bundle = tmp_path / "pond" / "client.pem"
        with mp.connect(pond.address, token, certificate=bundle) as joined:
            assert joined.states() == {}
        with closing(Impostor(company.issue("coordinator", "ponds-example").serving())) as impostor:
            with pytest.raises(NotThePond):
                mp.connect(impostor.address, token, certificate=bundle)
            assert impostor.heard == b""
    assert not bundle.exists()


@pytest.mark.parametrize("is_given", [True, False], ids=["a given certificate", "a made one"])
def test_serve_at_all_addresses_prints_what_clients_need(tmp_path: Path, is_given: bool) -> None:
    root = tmp_path / "pond"
    theirs = Authority().issue("coordinator", "ponds-example")
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    options = ["serve", "--root", str(root), "--host", "0.0.0.0", "--slices", "1", "--threads", "1"]
    if is_given:
        certificate.write_text(theirs.certificate)
        key.write_text(theirs.key)
        options += ["--certificate", str(certificate), "--key", str(key)]
    code = f"import sys; from millpond.cli import main; sys.argv = {['millpond', *options]!r}; main()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            printed = [server.stdout.readline() for _ in range(4)]
            address = printed[0].split(" at ")[1].split(",")[0]
            assert str(root / "client.read.pem") in printed[2]
            assert f"mp.connect({address!r}" in printed[3]
            assert "certificate=" in printed[3]
            token = (root / "token").read_text()
            # By any address of the machine: it is not by its address that the pond is known.
            here = f"127.0.0.1:{address.rpartition(':')[2]}"
            shown = ssl.get_server_certificate(address_in(here), timeout=10)
            assert (shown.split() == theirs.certificate.split()) == is_given
            # With a copy, as on another machine.
            bundle = tmp_path / "client.pem"
            private.write_text(str(bundle), (root / "client.pem").read_text())
            for each in (here, address):
                with mp.connect(each, token, certificate=bundle) as joined:
                    assert joined.states() == {}
            # It is not enough to know the token, and another pond's bundle is none.
            with pytest.raises(MillpondError, match="certificate"):
                mp.connect(here, token)
            private.write_text(str(bundle), Authority().issue("client").text())
            with pytest.raises(MillpondError if is_given else NotThePond):
                mp.connect(here, token, certificate=bundle)
        finally:
            server.terminate()
