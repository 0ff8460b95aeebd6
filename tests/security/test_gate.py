"""The pond's TCP port: who is let in, who is believed to be the pond, and what a stranger can use up."""

from __future__ import annotations

import base64
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.flight as fl
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from strangers import street

import millpond as mp
from millpond.errors import MillpondError, NotThePond, Unauthorised, Unavailable
from millpond.wire import gate, handshake, tunnel
from millpond.wire.flight import FlightConnection, dialer_to
from millpond.wire.house import Locate
from millpond.wire.sockets import SocketDirectory
from millpond.wire.tunnel import TokenTunnel

ROWS = pa.table({"k": [1, 2], "t": [10, 20], "v": [5, 6]})
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""How a client begins."""


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


def dialled(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 10)


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settles(what: Callable[[], bool], seconds: float = 10) -> bool:
    """Whether it comes to be so."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Impostor:
    """Listens where a pond did; `play` is handed each connection. Keeps every byte that it is sent."""

    def __init__(self, address: str, play: Callable[[Impostor, socket.socket], None]) -> None:
        host, _, port = address.rpartition(":")
        self._listener = socket.create_server((host, int(port)))
        self.address = gate.address_of(self._listener.getsockname())
        self.heard = bytearray()
        self.connections = 0
        self._play = play
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                connection.settimeout(0.3)
                with connection, suppress(OSError):
                    self._play(self, connection)
                    while data := self.hear(connection, 65536):
                        del data

    def hear(self, connection: socket.socket, size: int) -> bytes:
        data = connection.recv(size)
        self.heard += data
        return data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def as_grpc(impostor: Impostor, connection: socket.socket) -> None:
    """Answers as a server of HTTP/2 begins."""
    connection.sendall(b"\0\0\0\x04\0\0\0\0\0")


def at_random(impostor: Impostor, connection: socket.socket) -> None:
    impostor.hear(connection, handshake.HELLO.size)
    connection.sendall(os.urandom(handshake.OFFER.size))


def silent(impostor: Impostor, connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


PLAYS = {"speaks gRPC": as_grpc, "answers at random": at_random, "hangs up": silent}


@pytest.mark.parametrize("play", PLAYS)
@pytest.mark.parametrize("kind", ["full", "reading"])
def test_whoever_takes_the_port_of_a_closed_pond_is_told_nothing(
    tmp_path: Path, play: str, kind: str
) -> None:
    """Also by a client that is connected, whose Flight connects anew by itself."""
    pond = mp.open(tmp_path / "pond", threads=1, slices=1, port=0)
    try:
        token = (tmp_path / "pond" / ("token" if kind == "full" else "token.read")).read_text().strip()
        joined = mp.connect(pond.address, token)
        pond.close()
        with Impostor(pond.address, PLAYS[play]) as impostor, joined:
            for ask in (joined.states, lambda: mp.connect(pond.address, token)):
                assert settles(lambda ask=ask: not_the_pond(ask)), "who serves there is not believed"
            assert impostor.connections > 0
            heard = bytes(impostor.heard)
            # Not one byte but the first step of handshakes, which tells role, server and a random number.
            for at in range(0, len(heard), handshake.HELLO.size):
                part = heard[at : at + handshake.HELLO.size]
                magic, role, server, _ = handshake.HELLO.unpack(part)
                assert (magic, role, server.rstrip(b"\0")) == (
                    handshake.MAGIC,
                    kind[0].upper().encode(),
                    b"pond",
                )
            assert token.encode() not in heard
    finally:
        pond.close()


def not_the_pond(ask: Callable[[], object]) -> bool:
    """Flight waits a while before it connects anew, and says so."""
    with pytest.raises((NotThePond, Unavailable)) as caught:
        ask()
    return isinstance(caught.value, NotThePond)


def test_an_impostor_that_takes_its_time_has_as_much_as_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def drip(impostor: Impostor, connection: socket.socket) -> None:
        impostor.hear(connection, handshake.HELLO.size)
        for _ in range(handshake.OFFER.size):
            connection.sendall(b"x")
            time.sleep(0.1)

    monkeypatch.setattr(tunnel, "HANDSHAKE_S", 0.5)
    with Impostor("127.0.0.1:0", drip) as impostor:
        began = time.monotonic()
        with pytest.raises(Unavailable):
            mp.connect(impostor.address, "x" * 43)
        assert time.monotonic() - began < 4


class Overhearing(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Keeps the headers of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[dict[str, list[str]]] = []

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> None:
        self.heard.append(headers)


def test_the_token_is_never_sent(served: Served, tmp_path: Path) -> None:
    """Not even to the pond: what calls carry opens no gate."""
    tmp_path.chmod(0o700)
    sockets, factory = SocketDirectory(str(tmp_path)), Overhearing()
    server = fl.FlightServerBase(f"grpc+unix://{sockets.path_of('pond')}", middleware={"": factory})
    for token in (served.token, served.reading):
        connection = FlightConnection(sockets.address_of("pond"), token)
        with pytest.raises(MillpondError):
            connection.call(Locate())
        connection.close()
        told = factory.heard[-1]["authorization"][0]
        assert token not in str(factory.heard)
        for guess in (told, told.removeprefix("Bearer ")):
            with pytest.raises(MillpondError):
                mp.connect(served.pond.address, guess)
    server.shutdown()
    sockets.close()


def test_a_handshake_that_is_passed_on_to_the_pond_elsewhere_is_refused(served: Served) -> None:
    def pass_on(impostor: Impostor, connection: socket.socket) -> None:
        with dialled(served.pond.address) as there:
            there.sendall(impostor.hear(connection, handshake.HELLO.size))
            connection.sendall(there.recv(handshake.OFFER.size))
            impostor.hear(connection, 1)

    with Impostor("127.0.0.1:0", pass_on) as impostor:
        for token in (served.token, served.reading):
            with pytest.raises(NotThePond) as caught:
                mp.connect(impostor.address, token)
            assert "A tunnel must keep the pond's port" in caught.value.hint
        # Whoever dials does it again at times; nothing but greetings is ever sent.
        size, heard = handshake.HELLO.size, bytes(impostor.heard)
        greetings = [heard[start : start + size] for start in range(0, len(heard), size)]
        assert len(greetings) >= 2
        assert {(len(each), each[:16]) for each in greetings} == {(size, greetings[0][:16])}


def test_a_handshake_that_is_played_again_opens_nothing(served: Served) -> None:
    credentials = handshake.Credentials(served.token)
    hello = credentials.hello("pond")
    with dialled(served.pond.address) as first, dialled(served.pond.address) as second:
        first.sendall(hello)
        proof = credentials.proof(hello, first.recv(handshake.OFFER.size), served.pond.address)
        second.sendall(hello)
        assert len(second.recv(handshake.OFFER.size)) == handshake.OFFER.size
        second.sendall(proof)
        assert second.recv(1) == handshake.REFUSED
        first.sendall(proof)
        assert first.recv(1) == handshake.WELCOME


def test_a_holder_of_the_read_only_token_cannot_pass_for_the_pond(served: Served) -> None:
    """It knows the secret of readers, and by what the pond is known; it cannot sign as the pond does."""

    both = base64.urlsafe_b64decode(served.reading.removeprefix("read."))
    known = [handshake.Doorkeeper(served.reading) for _ in range(3)]
    for doorkeeper, part in zip(known[1:], (both[:32], both[32:]), strict=True):
        doorkeeper._key = Ed25519PrivateKey.from_private_bytes(part)

    def sign_as_well_as_it_can(impostor: Impostor, connection: socket.socket) -> None:
        hello = impostor.hear(connection, handshake.HELLO.size)
        doorkeeper = known[(impostor.connections - 1) % len(known)]
        connection.sendall(doorkeeper.offer(hello, impostor.address))

    with Impostor("127.0.0.1:0", sign_as_well_as_it_can) as impostor:
        for token in (served.reading, served.token) * len(known):
            with pytest.raises(NotThePond):
                mp.connect(impostor.address, token)
        assert impostor.connections == 2 * len(known)
        assert len(impostor.heard) == impostor.connections * handshake.HELLO.size


def test_wrong_tokens(served: Served) -> None:
    with pytest.raises(NotThePond) as caught:
        mp.connect(served.pond.address, "x" * 43)
    assert caught.value.address == served.pond.address
    assert caught.value.hint
    # The pond's identity, but not the readers' secret.
    whole = bytearray(served.reading.encode())
    whole[10] = ord("A") if whole[10] != ord("A") else ord("B")
    with pytest.raises(Unauthorised):
        mp.connect(served.pond.address, whole.decode())
    for token in (served.token, served.reading):
        with mp.connect(served.pond.address, token) as joined:
            assert list(joined.states()) == ["s"]


def test_a_server_that_is_not_there_and_names_that_are_none(served: Served) -> None:
    credentials = handshake.Credentials(served.token)
    for name in ("container-0-0000000000000000", "..", "../token", "/etc/passwd", "a/b", "", "pond\n"):
        with dialled(served.pond.address) as connection:
            hello = credentials.hello(name)
            connection.sendall(hello)
            offer = connection.recv(handshake.OFFER.size)
            if name.startswith("container"):
                connection.sendall(credentials.proof(hello, offer, served.pond.address))
                assert connection.recv(1) == handshake.GONE
            else:
                assert offer == b"", name
    missing = dialer_to(served.pond.address, served.token)("unix:/x/container-0-0000000000000000")
    with pytest.raises(Unavailable, match="has ended"):
        missing.call(Locate())
    missing.close()


# What a stranger can use up


def test_many_idle_connections_cost_a_bounded_number_of_handles(served: Served) -> None:
    before = handles()
    connections = []
    try:
        for number in range(1100):
            with suppress(OSError):
                connections.append(dialled(served.pond.address))
                if number % 3 == 1:
                    connections[-1].sendall(b"mill")
        of_the_pond = handles() - before - len(connections)
        assert of_the_pond <= gate.PENDING_MAX + 8
        # While they hang there, the pond is opened to who has a token, and commits.
        with mp.connect(served.pond.address, served.token) as joined:
            state = joined.state("s")
            state.update(key="k", at="t", value="v", name="feed")(ROWS, 1)
    finally:
        for connection in connections:
            connection.close()
    assert settles(lambda: handles() <= before + 8)


def test_a_flood_of_connections_ends_nothing_and_keeps_nobody_out(served: Served) -> None:
    """Some say nothing, some a byte just when they are ended, some the first step of a handshake."""
    ends = threading.Event()

    def flood(first: bytes) -> None:
        connections: list[socket.socket] = []
        while not ends.is_set():
            with suppress(OSError):
                connections.append(dialled(served.pond.address))
                connections[-1].sendall(first)
            for other in connections[-80:]:
                with suppress(OSError):
                    other.send(b"" if first else b"x")
            for old in connections[:-80]:
                old.close()
            del connections[:-80]
        for connection in connections:
            connection.close()

    firsts = [b"", b"", handshake.Credentials(served.token).hello("pond")]
    threads = [threading.Thread(target=flood, args=(first,)) for first in firsts]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2)
        assert settles(lambda: _joins(served))
    finally:
        ends.set()
        for thread in threads:
            thread.join()
    assert _joins(served)


def test_what_is_sent_before_the_handshake_reaches_nobody(served: Served) -> None:
    """HTTP/2, a bomb of gzip, noise: the connection is closed after the first bytes, and nothing is kept."""
    before = resident_bytes()
    for first in (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        os.urandom(1000),
        b"\0" * 1000,
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with dialled(served.pond.address) as connection:
            with suppress(ConnectionError):
                for _ in range(200):
                    connection.sendall(first.ljust(10_000, b"\0"))
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
    # One that says hello as it should, and does not know the secret.
    for role in (served.token, served.reading):
        with dialled(served.pond.address) as connection:
            connection.sendall(handshake.Credentials(role).hello("pond"))
            assert len(connection.recv(handshake.OFFER.size)) == handshake.OFFER.size
            connection.sendall(os.urandom(handshake.PROOF_BYTES))
            with suppress(ConnectionError):
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with suppress(ConnectionError):
                assert connection.recv(1) == handshake.REFUSED
                assert connection.recv(1) == b""
    assert resident_bytes() - before < 20 << 20
    with mp.connect(served.pond.address, served.token) as joined:
        assert list(joined.states()) == ["s"]


def test_a_handshake_has_a_time_to_end_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HANDSHAKE_S", 0.3)
    with dialled(served.pond.address) as connection:
        connection.sendall(handshake.MAGIC)
        began = time.monotonic()
        assert connection.recv(1) == b""
        assert time.monotonic() - began < 5


def test_readers_do_not_keep_others_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "READERS_MAX", 3)

    def joined(token: str) -> Any:
        connection = dialer_to(served.pond.address, token).pond(served.pond.address)
        connection.call(Locate())
        return connection

    readers = []
    try:
        readers += [joined(served.reading) for _ in range(3)]
        with pytest.raises(Unavailable, match="too many"):
            joined(served.reading)
        readers.append(joined(served.token))
    finally:
        for reader in readers:
            reader.close()
    assert settles(lambda: _joins(served))


def _joins(served: Served) -> bool:
    try:
        mp.connect(served.pond.address, served.reading).close()
    except MillpondError:
        return False
    return True


def test_a_reader_that_asks_nothing_is_let_go(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "READER_IDLE_S", 0.3)
    reader = TokenTunnel(served.pond.address, "pond", lambda: served.reading)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(reader.path)
        connection.settimeout(10)
        while connection.recv(4096):
            pass
    reader.close()


def test_closing_a_pond_ends_its_connections(tmp_path: Path) -> None:
    threads, before = set(threading.enumerate()), handles()
    pond = mp.open(tmp_path / "pond", threads=1, slices=1, port=0)
    token = (tmp_path / "pond" / "token").read_text()
    left = mp.connect(pond.address, token)
    with dialled(pond.address):
        pond.close()
    with pytest.raises(Unavailable):
        left.states()
    left.close()
    assert settles(lambda: set(threading.enumerate()) <= threads)
    assert settles(lambda: handles() <= before + 2)
    assert not (tmp_path / "pond" / "sockets").exists()


def test_closing_a_pond_waits_for_no_turn_of_its_readers(tmp_path: Path) -> None:
    """Of two that have large messages, the one that came first waits for the other."""
    pond = mp.open(tmp_path / "pond", threads=1, slices=1, port=0)
    try:
        token = (tmp_path / "pond" / "token.read").read_text().strip()
        large = b"\0" + (8 << 20).to_bytes(4)
        begun = HTTP2 + b"\0\0\0\x01\x04\0\0\0\x01" + b"\0\0\5\0\0\0\0\0\x01" + large
        first, second = (shaken(pond.address, token, "pond") for _ in range(2))
        with first, second:
            second.sendall(begun)
            time.sleep(0.5)
            first.sendall(begun)
            time.sleep(0.5)
            began = time.monotonic()
            pond.close()
            assert time.monotonic() - began < 10
    finally:
        pond.close()


def shaken(address: str, token: str, server: str) -> socket.socket:
    """A connection to a server behind the gate."""
    credentials = handshake.Credentials(token)
    connection = dialled(address)
    hello = credentials.hello(server)
    connection.sendall(hello)
    offer = connection.recv(handshake.OFFER.size, socket.MSG_WAITALL)
    connection.sendall(credentials.proof(hello, offer, address))
    assert connection.recv(1) == handshake.WELCOME
    return connection


def test_a_server_that_accepts_nobody_holds_nobody_up(served: Served) -> None:
    name = "container-9-0000000000000000"
    path = served.root / "sockets" / name
    with socket.socket(socket.AF_UNIX) as idle, socket.socket(socket.AF_UNIX) as waiting:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            idle.bind(name)
            idle.listen(0)
            waiting.connect(name)
        finally:
            os.chdir(here)
        with pytest.raises(AssertionError):
            shaken(served.pond.address, served.reading, name)
        assert _joins(served)
    path.unlink()


def test_a_child_that_was_forked_ends_nothing_of_its_parents(served: Served) -> None:
    tunnel = TokenTunnel(served.pond.address, "pond", lambda: served.token)
    directory = Path(tunnel._directory.path)
    child = os.fork()
    if child == 0:
        tunnel._stop()
        os._exit(0)
    os.waitpid(child, 0)
    assert directory.exists()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(tunnel.path)
        connection.settimeout(10)
        connection.sendall(HTTP2)
        assert connection.recv(1) == b"\0"
    tunnel.close()
    assert not directory.exists()


def test_a_connection_that_is_forgotten_leaves_nothing(served: Served) -> None:
    threads = len(threading.enumerate())
    connection: Any = dialer_to(served.pond.address, served.token).pond(served.pond.address)
    connection.call(Locate())
    directory = Path(connection._tunnel._directory.path)
    assert directory.exists()
    del connection
    assert settles(lambda: not directory.exists())
    assert settles(lambda: len(threading.enumerate()) <= threads)
