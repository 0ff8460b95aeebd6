"""A pond in this process: a coordinator, its containers, and the sockets and gates by which others come."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import IO, NamedTuple

from millpond import private
from millpond.client.client import Client
from millpond.client.link import Link
from millpond.coordinator.detector import BEAT_S
from millpond.coordinator.hosting import Embedded
from millpond.coordinator.passes import Front, Given, Passes
from millpond.coordinator.service import CoordinatorService
from millpond.coordinator.spark_cluster import Cluster
from millpond.coordinator.spark_hosting import SparkHosting
from millpond.durable.files import OsFiles
from millpond.errors import BadRoot, MillpondError, PondInUse
from millpond.pond.figures import as_metrics, log_line
from millpond.pond.roots import Trust, await_orphans, token_of, unusable
from millpond.runtime import Threads
from millpond.wire.connection import LocalConnection
from millpond.wire.flight import FlightDialer, FlightService
from millpond.wire.gate import Gate, Port, is_loopback
from millpond.wire.handshake import read_only_token
from millpond.wire.sockets import POND, SCHEME, TLS_SCHEME, SocketDirectory, machine

UPKEEP_S = 0.5
_log = logging.getLogger("millpond")


class Listening(NamedTuple):
    """Where the pond is to listen beside its socket, if at a port, and by which certificate of the user's own, if any."""

    host: str
    port: int | None
    own: Given | None


class EmbeddedPond:
    """What `open_pond` starts and `close` ends."""

    def __init__(self, root: str, cluster: Cluster | None = None) -> None:
        self._root = root
        self._cluster = cluster
        self._lock_file: IO[bytes] | None = None
        self._token = ""
        self._coordinator: CoordinatorService | None = None
        self._sockets: SocketDirectory | None = None
        self._server: FlightService | None = None
        self._passes: Passes | None = None
        self._gate: Port | None = None
        self._address = self._elsewhere = ""
        self._closing = threading.Event()
        atexit.register(self.close)

    def start(
        self,
        containers: int,
        threads: int,
        slices: int,
        listening: Listening,
        code_seconds: float,
        memory: int | None,
        trust: Trust,
        backups: int,
    ) -> None:
        files = OsFiles()
        try:
            self._lock_file = private.append_to(os.path.join(self._root, "lock"))  # held until close
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Under the lock: of two that open a new root at once, only one makes its token.
            # Whoever made a root that is not trusted knows the token in it.
            self._token = token_of(self._root, renewed=trust != "all")
            private.write_text(os.path.join(self._root, "token.read"), f"{read_only_token(self._token)}\n")
        except BlockingIOError:
            raise PondInUse(
                f"the pond at {self._root} is open already, here or in another process",
                hint=f"use the pond that is open, join it with {_joining(self._root)}, or close it first",
                root=self._root,
            ) from None
        except BadRoot:
            raise
        except OSError as error:
            raise unusable(self._root, error) from None
        await_orphans(self._root)
        passes = self._passes = Passes(self._root, self._token, listening.own)
        dial = FlightDialer(passes.coordinator())
        coordinator = CoordinatorService(files, self._root, dial, Threads(), only_reads=trust == "data")
        self._coordinator = coordinator
        # First, as the port may be taken; whoever joins before the pond is open is told to try again.
        self._sockets = SocketDirectory.under(self._root)
        self._server = FlightService(
            Front(coordinator, passes), passes.keyring.accepted(), self._sockets, POND
        )
        if (
            self._cluster is not None
            and listening.port is None
            and not is_loopback(self._cluster.driver_host)
        ):
            # Tasks on other machines reach the pond there.
            listening = listening._replace(host=self._cluster.driver_host, port=0)
        self._listen(listening)
        where = (self._root, self._sockets.path, threads, coordinator.recover, passes.container)
        limits = (code_seconds, memory, trust)
        hosting = (
            Embedded(*where, *limits)
            if self._cluster is None
            else SparkHosting(self._cluster, *where, *limits)
        )
        coordinator.start(hosting, containers, slices, backups)

        def renew() -> None:
            # What another pond at this root hands out lies at the same paths.
            if not coordinator.is_replaced:
                passes.maintain(coordinator.tell, coordinator.has_ended)

        self._every(UPKEEP_S, "millpond-coordinator", coordinator.maintain, renew)
        self._every(BEAT_S, "millpond-beat", coordinator.beat)

    def _every(self, seconds: float, name: str, *works: Callable[[], object]) -> None:
        """Has work done every so often until the pond closes, whatever goes wrong once."""

        def go_on() -> None:
            while not self._closing.wait(seconds):
                for work in works:
                    try:
                        work()
                    except (MillpondError, OSError):
                        pass  # somebody is away
                    except Exception:  # noqa: BLE001 - an interpreter that ends starts no threads, for one
                        _log.info("%s has failed, and goes on", name, exc_info=True)

        threading.Thread(target=go_on, name=name, daemon=True).start()

    def _listen(self, listening: Listening) -> None:
        assert self._passes is not None
        assert self._sockets is not None
        host, port, own = listening
        if port is None:
            return
        if is_loopback(host) and own is None:
            self._gate = Gate(self._token, self._sockets, host, port, self._passes.keyring.tasks)
            self._address = self._gate.address
        else:
            self._gate = self._passes.listen(self._sockets, host, port)
            self._address = _reached_from_elsewhere(self._gate.address)
            self._elsewhere = f"{TLS_SCHEME}{self._address}/{POND}"

    def revoke(self) -> None:
        assert self._passes is not None
        assert self._coordinator is not None
        self._passes.revoke(self._coordinator.tell)

    def log_figures(self, seconds: float) -> None:
        """From now on, every so often."""
        coordinator = self._coordinator
        assert coordinator is not None

        def log() -> None:
            _log.info("%s", log_line(as_metrics(coordinator.metrics())))

        self._every(min(seconds, threading.TIMEOUT_MAX), "millpond-figures", log)

    @property
    def address(self) -> str:
        assert self._server is not None
        return self._address or self._server.address

    def client(self) -> Client:
        assert self._server is not None
        assert self._passes is not None
        assert self._sockets is not None
        link = Link(
            self._server.address, self._passes.task_file, self._elsewhere, machine(self._sockets.path)
        )
        dial = FlightDialer(self._passes.client())
        return Client(LocalConnection(self._coordinator), dial, link=link)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing.set()
        # The coordinator first: calls that wait for a container are let go, and the server need not wait for them.
        is_replaced = False
        if self._coordinator is not None:
            self._coordinator.close()
            is_replaced = self._coordinator.is_replaced
            self._coordinator = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._server is not None:
            self._server.shutdown()
            self._server = None
        # Once the root is another's, so are the files and sockets at these paths.
        if self._passes is not None:
            if not is_replaced:
                self._passes.close()
            self._passes = None
        if self._sockets is not None:
            if is_replaced:
                self._sockets.close()
            else:
                self._sockets.remove()
            self._sockets = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


def _reached_from_elsewhere(address: str) -> str:
    """What other machines call it: a gate that listens everywhere is known by this machine's name."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else address  # noqa: S104 - not bound here


def _joining(root: str) -> str:
    """How another process of the same user joins the pond that is open."""
    sockets = os.path.join(root, private.SOCKETS)
    if not os.path.exists(os.path.join(sockets, POND)):
        return "mp.connect(address, token)"
    address = f"{SCHEME}{sockets}/{POND}"
    return f"mp.connect({address!r}, token=open({os.path.join(root, 'token')!r}).read())"
