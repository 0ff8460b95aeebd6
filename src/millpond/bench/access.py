"""What it costs that a server shows who it is: ways to the same server, and to a pond, on the same rows.

A server in a process of its own sends back what it is sent: over TCP as Flight has it, where nobody knows who serves;
over a Unix socket; through the gate, by which each byte is copied twice more; through the gate with the read-only token,
where what is sent is looked at, too; and through the gate by TLS, where it is encrypted. Beside the last one, TLS as Flight
has it, which asks nobody for a certificate. Then rows of a State: by the process that opened the pond, and by the ways to
join it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, NoReturn

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

import millpond as mp
from millpond.wire.authority import Authority, Bundle, server_name
from millpond.wire.base import Done
from millpond.wire.connection import Answer, Connection, SlicedBatch
from millpond.wire.credentials import Credentials
from millpond.wire.flight import FlightConnection, FlightService, dialer_to
from millpond.wire.gate import Gate
from millpond.wire.handshake import read_only_token
from millpond.wire.house import Locate, Placement
from millpond.wire.sockets import POND, TLS_SCHEME, SocketDirectory
from millpond.wire.states import Question
from millpond.wire.tls import TlsGate

TOKEN = "bench" * 8
BATCH = 1_000_000
ROUNDS = 20
CALLS = 2_000
KEYS = 100_000
SLICES = 64


class _Echo:
    """A handler that does nothing."""

    def call(self, message: Any) -> Placement:
        return Placement("", 0, [], [])

    def exchange(self, message: Any, batches: Iterator[SlicedBatch], reads_only: bool = False) -> Answer[Any]:
        (rows,) = batches
        return Answer(Done(), rows.batch.select([0]))

    def read(self, message: Any) -> NoReturn:
        raise NotImplementedError


class _OverTcp(FlightService):
    """As Flight has it."""

    def __init__(self, handler: Any, token: str) -> None:
        self._handler = handler
        fl.FlightServerBase.__init__(self, "grpc+tcp://127.0.0.1:0", middleware=self.middleware(token))


class _OverTls(FlightService):
    """As Flight has it."""

    def __init__(self, handler: Any, token: str, bundle: Bundle) -> None:
        self._handler = handler
        fl.FlightServerBase.__init__(
            self,
            "grpc+tls://127.0.0.1:0",
            middleware=self.middleware(token),
            tls_certificates=[(bundle.certificate, bundle.key)],
        )


class _ByTcp(FlightConnection):
    """As Flight has it, by TLS where there is an authority to know the server by."""

    def __init__(self, address: str, token: str, authority: str = "") -> None:
        self.address = address
        self._sockets = self._tunnel = None
        options = {"tls_root_certs": authority, "override_hostname": server_name(POND)} if authority else {}
        scheme = "grpc+tls" if authority else "grpc+tcp"
        self._begin(fl.connect(f"{scheme}://{address}", **options), token)


def serve(directory: str) -> None:
    """In a process of its own, until its input ends."""
    sockets = SocketDirectory(directory)
    over_tcp = _OverTcp(_Echo(), TOKEN)
    over_unix = FlightService(_Echo(), TOKEN, sockets, POND)
    gate = Gate(TOKEN, sockets, "127.0.0.1", 0)
    authority = Authority()
    own = authority.issue("coordinator", POND)
    over_tls = _OverTls(_Echo(), TOKEN, own)
    tls_gate = TlsGate(own.serving(), sockets, "127.0.0.1", 0)
    ports = [over_tcp.port, over_tls.port]
    bundles = [authority.issue("client"), authority.issue("reader")]
    addresses = [over_unix.address, gate.address, tls_gate.address]
    print(msgspec.json.encode([ports, addresses, bundles]).decode(), flush=True)
    sys.stdin.read()
    for each in (gate, tls_gate):
        each.close()
    for server in (over_unix, over_tls, over_tcp):
        server.shutdown()
    sockets.close()


def run(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    rounds, calls = (2, 100) if quick else (ROUNDS, CALLS)
    with tempfile.TemporaryDirectory(prefix="millpond-bench-") as folder:
        progress("a server that sends back what it is sent")
        found = _echoes(folder, rounds, calls)
        progress("one row of a pond")
        found += _ponds(os.path.join(folder, "pond"), rounds, calls)
    return found


def _echoes(folder: str, rounds: int, calls: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", __name__, folder]
    results = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603 - our own module
        assert server.stdout is not None
        assert server.stdin is not None
        told = msgspec.json.decode(
            server.stdout.readline(), type=tuple[list[int], list[str], tuple[Bundle, Bundle]]
        )
        (port, tls_port), (unix, gate, tls_gate), bundles = told
        reading = read_only_token(TOKEN)
        by_tls = f"{TLS_SCHEME}{tls_gate}/{POND}"
        full, reads = (
            Credentials(token, bundle=each) for token, each in zip((TOKEN, reading), bundles, strict=True)
        )
        ways: dict[str, Callable[[], FlightConnection]] = {
            "flight-tcp, nobody checked": lambda: _ByTcp(f"127.0.0.1:{port}", TOKEN),
            "millpond-unix": lambda: dialer_to(unix, TOKEN).pond(unix),
            "millpond-gate": lambda: dialer_to(gate, TOKEN).pond(gate),
            "millpond-gate, reader": lambda: dialer_to(gate, reading).pond(gate),
            "flight-tls, no client's certificate": lambda: _ByTcp(
                f"127.0.0.1:{tls_port}", TOKEN, bundles[0].authority
            ),
            "millpond-tls": lambda: dialer_to(by_tls, full).pond(by_tls),
            "millpond-tls, reader": lambda: dialer_to(by_tls, reads).pond(by_tls),
        }
        for system, dial in ways.items():
            with closing(dial()) as connection:
                results.append({"system": system, **_measured(connection, rounds, calls)})
        server.stdin.close()
    return results


def _measured(connection: Connection, rounds: int, calls: int) -> dict[str, Any]:
    longs = pa.array(np.arange(BATCH))
    batch = pa.record_batch({"_key": longs, "_time": longs})
    rows = SlicedBatch(batch, np.array([BATCH, *[0] * (SLICES - 1)], np.int32))
    question = Question("s", "latest")
    _seconds(lambda: connection.exchange(question, [rows]), 3)
    exchanges = _seconds(lambda: connection.exchange(question, [rows]), rounds)
    one = _seconds(lambda: connection.call(Locate()), calls)
    return {"rows_per_s": BATCH / float(np.median(exchanges)), "threads": 1, **_percentiles("call", one)}


def _ponds(root: str, rounds: int, calls: int) -> list[dict[str, Any]]:
    results = []
    with mp.open(root, port=0) as pond:
        state = pond.state("s", key="long", value="long")
        rows = np.arange(KEYS)
        state.update(key="k", at="t", value="v", name="feed")(pa.table({"k": rows, "t": rows, "v": rows}), 0)
        state.finish("feed")
        tokens = [open(os.path.join(root, name)).read() for name in ("token", "token.read")]  # noqa: SIM115
        ways: dict[str, Callable[[], AbstractContextManager[mp.Pond]]] = {
            "millpond-now": lambda: nullcontext(pond),
            "millpond-now-unix": lambda: mp.connect(f"unix:{root}/sockets/{POND}", tokens[0]),
            "millpond-now-gate": lambda: mp.connect(pond.address, tokens[0]),
            "millpond-now-gate, reader": lambda: mp.connect(pond.address, tokens[1]),
        }
        asked = pa.table({"k": np.arange(BATCH) % KEYS, "t": np.full(BATCH, KEYS)})
        row = pa.table({"k": [1], "t": [KEYS]})
        for system, join in ways.items():
            with join() as joined:
                fetch = joined.state("s").fetch(key="k", at="t", into="v")
                _seconds(lambda: fetch.now(asked), 3)  # noqa: B023 - called at once
                many = _seconds(lambda: fetch.now(asked), rounds)  # noqa: B023
                one = _seconds(lambda: fetch.now(row), calls)  # noqa: B023
            results.append(
                {
                    "system": system,
                    "rows_per_s": BATCH / float(np.median(many)),
                    "threads": 1,
                    **_percentiles("one_row", one),
                }
            )
    return results


def _percentiles(what: str, seconds: list[float]) -> dict[str, float]:
    return {f"{what}_p{part}_ms": float(np.percentile(seconds, part)) * 1e3 for part in (50, 99)}


def _seconds(work: Callable[[], object], times: int) -> list[float]:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found


if __name__ == "__main__":
    serve(sys.argv[1])
