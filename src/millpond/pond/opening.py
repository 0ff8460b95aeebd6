"""How a pond comes up: a root directory, a token, a coordinator in this process, containers as its children."""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import IO, Any, Literal, NamedTuple, get_args

from millpond import private
from millpond.client.client import Client
from millpond.client.handing_out import HandedOut
from millpond.client.link import Link
from millpond.coordinator.detector import BEAT_S
from millpond.coordinator.hosting import CODE_SECONDS, Embedded
from millpond.coordinator.journal import JOURNAL
from millpond.coordinator.passes import Front, Given, Passes
from millpond.coordinator.service import CoordinatorService
from millpond.coordinator.spark_cluster import Cluster, check_session
from millpond.coordinator.spark_hosting import SparkHosting
from millpond.durable.files import OsFiles
from millpond.errors import BadOption, BadRoot, FewTaskSlots, MillpondError, NotPrivate, PondInUse
from millpond.pond.figures import as_metrics, log_line
from millpond.pond.pond import Pond
from millpond.pond.workers import check_workers
from millpond.runtime import Threads
from millpond.wire.authority import Bundle, given
from millpond.wire.connection import LocalConnection
from millpond.wire.credentials import Credentials
from millpond.wire.flight import FlightDialer, FlightService, dialer_to
from millpond.wire.gate import Gate, Port, is_loopback
from millpond.wire.handshake import read_only_token
from millpond.wire.house import Locate
from millpond.wire.passes import TaskPass
from millpond.wire.sockets import POND, SCHEME, TLS_SCHEME, SocketDirectory, machine

ADDRESS_PATTERN = r"unix:/.+|[^/]+:\d{1,5}"
SLICES_MAX = 65_535
CODE_SECONDS_MIN = 0.1
# What a container needs before it holds anything is some 300 MiB.
MEMORY_MIN = 512 << 20
_OF_A_POND = (
    r"(lock|token|tasks|client|journal|containers?|snapshots|backups|waiting|sockets|landmark|grants)\b"
)
ORPHANS_TIMEOUT_S = 30.0
UPKEEP_S = 0.5
Trust = Literal["all", "data"]
Where = Literal["embedded", "spark", "standalone"]
_log = logging.getLogger("millpond")
AnyPath = str | os.PathLike[str]


def open_pond(
    root: str | os.PathLike[str],
    spark: Any = None,
    containers: int = 1,
    threads: int | None = None,
    slices: int = 64,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    certificate: AnyPath | None = None,
    key: AnyPath | None = None,
    code_seconds: float = CODE_SECONDS,
    memory: int | None = None,
    trust: Trust = "all",
    backups: int = 0,
    log_figures: float | None = None,
    hosting: Where = "embedded",
) -> Pond:
    """Opens the pond under `root`, with all that it held, or makes a new one. Opening a root runs the code in it.

    A root that came from somebody else is opened with `trust="data"`: then none of its rules and transactions is
    compiled or run, and nothing that it holds is changed. What it holds can be read, but for what only its code could
    tell: a State with an update rule of its own, and a group of tables whose newest epochs are in no snapshot yet. Those,
    and whatever would change the pond or run code, are refused with `NotTrusted`.

    Starts `containers` child processes with `threads` threads each (by default the cores are shared out); they
    end with this process, however it ends. `slices` counts for a new pond only: it never changes afterwards.
    Of each slice, `backups` other containers hold a copy that is as durable and as new as the slice itself: with one, any
    container may be lost with its disk, and its slices are served elsewhere at once. It takes as much memory and disk
    again, and an epoch is sent to the backups before it is acknowledged.
    Other processes of this user may join at `pond.address` by `mp.connect`; with a `port` (0 takes a free one) the
    pond listens there too. At a `host` on loopback that is for any user who has a token. At any other, as 0.0.0.0 for
    all of the machine, it is by TLS alone, for whoever also has a certificate of this opening: `client.pem` and
    `client.read.pem` under the root hold one each, with its key. The pond's own is made, too, or given as `certificate`
    and `key`, two files in PEM; with these, loopback is by TLS as well. One process at a time has a root open.

    Transactions and rules of your own have `code_seconds` to end in, for each epoch or question: then they are ended,
    and the epoch is refused with `CodeTookTooLong`; `math.inf` is for no limit. `memory` is how many bytes each
    container may ask the system for; user code that goes beyond is refused with `OutOfMemory`. Of what is left beside
    its own 300 MiB, a quarter is for rows to be committed, a quarter for questions and answers on their way. By default
    it is three quarters of what the machine has.

    With `log_figures`, the logger "millpond" says every so many seconds what `pond.metrics()` does: a line of JSON, in
    which slices are summed up.
    With `hosting="spark"` the containers run in tasks of the Spark application, one each, which they take for as long as
    the pond is open: NoTaskSlots tells if none would be left for queries. Each has by default as many threads as a task
    has cores. They end with their tasks and with this process.
    """
    _check_choice("hosting", hosting, get_args(Where), "where containers run")
    if hosting == "standalone":
        raise BadOption(
            'a pond with hosting="standalone" runs in a process of its own: it is not opened, but joined',
            hint=f"millpond serve --root {private.quoted(os.fspath(root))} prints how: mp.connect(address, token)",
            option="hosting",
        )
    _check_count("containers", containers, 1, 9_999)
    _check_count("slices", slices, 1, SLICES_MAX)
    _check_count("backups", backups, 0, 16)
    if threads is not None:
        _check_count("threads", threads, 1, 1024)
    if port is not None:
        _check_count("port", port, 0, 65_535)
    _check_seconds("code_seconds", code_seconds)
    if log_figures is not None:
        _check_seconds("log_figures", log_figures)
    if memory is not None:
        _check_count(
            "memory", memory, MEMORY_MIN, sys.maxsize, f"give bytes, at least {MEMORY_MIN:,} (512m), or None"
        )
    _check_choice("trust", trust, get_args(Trust), 'trust="data" reads a root without running the code in it')
    own = _given(host, port, certificate, key)
    if spark is not None or hosting == "spark":
        check_session(spark)
        check_workers(spark)
    cluster = Cluster(spark) if hosting == "spark" else None
    path = _checked_root(root)
    if trust == "data" and not os.path.isdir(os.path.join(path, JOURNAL)):
        raise BadRoot(
            f"{path} holds no pond that could be read", hint="give the root of a pond that exists", root=path
        )
    if cluster is not None:
        threads = threads or cluster.task_cpus
        _check_slots(cluster, containers, threads)
    else:
        threads = threads or max(1, (os.cpu_count() or 1) // containers)
    embedded = _EmbeddedPond(_own_root(path, trust), cluster)
    try:
        listening = _Listening(host, port, own)
        embedded.start(containers, threads, slices, listening, code_seconds, memory, trust, backups)
    except BaseException as error:
        embedded.close()
        if isinstance(error, OSError) and not isinstance(error, MillpondError) and error.filename is not None:
            raise _unusable(path, error) from None
        raise
    if log_figures is not None:
        embedded.log_figures(log_figures)
    return _with_spark(Pond(embedded.client(), embedded.address, embedded, spark))


def connect(
    address: str,
    token: str,
    spark: Any = None,
    *,
    certificate: AnyPath | None = None,
    shared: AnyPath | None = None,
) -> Pond:
    """Joins a pond that another process runs. Its token is in the file `token` under its root.

    The one in `token.read` may read every State, and change none. A pond at another address than loopback also asks for
    a certificate: `certificate` is a copy of `client.pem`, or `client.read.pem`, from its root.

    With `spark`, tasks have credentials of their own, which do not travel with them: they read them from a file. Where
    they do not see the pond's root, `shared` is a directory, of this user alone, that this program and its tasks see by
    one path; without, it is a temporary one, for tasks on this machine.
    """
    if not isinstance(address, str) or not re.fullmatch(ADDRESS_PATTERN, address):
        raise BadOption(
            f"{address!r} is not an address",
            hint="for example 127.0.0.1:8815, or unix:/path/to/the/root/sockets/pond; pond.address tells it",
            option="address",
        )
    token = token.strip() if isinstance(token, str) else ""
    if not re.fullmatch(r"[!-~]+", token):
        raise BadOption(
            "the token is empty or not a token",
            hint="it is in the file `token` under the pond's root",
            option="token",
        )
    if spark is not None:
        check_session(spark)
        check_workers(spark)
    bundle = None if certificate is None else Bundle.read(os.fspath(certificate))
    way = address
    if bundle is not None and not address.startswith(SCHEME):
        way = f"{TLS_SCHEME}{address}/{POND}"
    dial = dialer_to(way, Credentials(token, bundle=bundle))
    connection = dial.pond(way)
    try:
        root = connection.call(Locate()).root
        handed_out = HandedOut(connection, way, root, TaskPass(token, bundle), shared)
    except BaseException:
        connection.close()
        raise
    client = Client(connection, dial, link=handed_out.link)
    return _with_spark(Pond(client, address, handed_out, spark))


def _with_spark(pond: Pond) -> Pond:
    """Lets the pond's Spark session, if it has one, read States by `spark.read.format("millpond")`."""
    if pond.spark is not None and pond.link is not None:
        from millpond.pond.source import source_of

        pond.spark.dataSource.register(source_of(pond.link))
    return pond


class _EmbeddedPond:
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
        listening: _Listening,
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
            self._token = _token(self._root, renewed=trust != "all")
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
            raise _unusable(self._root, error) from None
        _await_orphans(self._root)
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
        threading.Thread(target=self._maintain, name="millpond-coordinator", daemon=True).start()
        threading.Thread(target=self._beat, name="millpond-beat", daemon=True).start()

    def _beat(self) -> None:
        while not self._closing.wait(BEAT_S):
            coordinator = self._coordinator
            if coordinator is not None:
                with suppress(MillpondError, OSError, RuntimeError):
                    coordinator.beat()

    def _listen(self, listening: _Listening) -> None:
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

    def _maintain(self) -> None:
        while not self._closing.wait(UPKEEP_S):
            coordinator, passes = self._coordinator, self._passes
            if coordinator is not None and passes is not None:
                # RuntimeError, too: where no thread can be started, say, it is tried again.
                with suppress(MillpondError, OSError, RuntimeError):
                    coordinator.maintain()
                with suppress(MillpondError, OSError, RuntimeError):
                    passes.maintain(coordinator.tell)

    def revoke(self) -> None:
        assert self._passes is not None
        assert self._coordinator is not None
        self._passes.revoke(self._coordinator.tell)

    def log_figures(self, seconds: float) -> None:
        """From now on, every so often."""

        def log() -> None:
            while not self._closing.wait(min(seconds, threading.TIMEOUT_MAX)):
                coordinator = self._coordinator
                if coordinator is not None:
                    with suppress(MillpondError, OSError):
                        _log.info("%s", log_line(as_metrics(coordinator.metrics())))

        threading.Thread(target=log, name="millpond-figures", daemon=True).start()

    @property
    def address(self) -> str:
        assert self._server is not None
        return self._address or self._server.address

    def client(self) -> Client:
        assert self._server is not None
        assert self._passes is not None
        link = Link(self._server.address, self._passes.task_file, self._elsewhere, machine())
        dial = FlightDialer(self._passes.client())
        return Client(LocalConnection(self._coordinator), dial, link=link)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._closing.set()
        # The coordinator first: calls that wait for a container are let go, and the server need not wait for them.
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None
        if self._gate is not None:
            self._gate.close()
            self._gate = None
        if self._server is not None:
            self._server.shutdown()
            self._server = None
        if self._passes is not None:
            self._passes.close()
            self._passes = None
        if self._sockets is not None:
            self._sockets.remove()
            self._sockets = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


class _Listening(NamedTuple):
    """Where the pond is to listen beside its socket, if at a port, and by which certificate of the user's own, if any."""

    host: str
    port: int | None
    own: Given | None


def _given(host: str, port: int | None, certificate: AnyPath | None, key: AnyPath | None) -> Given | None:
    if not isinstance(host, str) or not host:
        raise BadOption(f"{host!r} is not an address to listen on", hint="for example 0.0.0.0", option="host")
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise BadOption(
            "a certificate comes with its key",
            hint="give both, or neither to have one made",
            option="certificate",
        )
    if port is None:
        raise BadOption("a certificate is for a port to listen on", hint="give port=", option="certificate")
    return Given(*given(os.fspath(certificate), os.fspath(key)))


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


def _check_count(option: str, value: int, low: int, high: int, hint: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadOption(
            f"{option}={value!r} is not between {low} and {high}",
            hint=hint or f"give a whole number from {low} to {high}",
            option=option,
        )


def _check_choice(option: str, value: object, choices: tuple[str, ...], hint: str) -> None:
    if value not in choices:
        raise BadOption(f"{option}={value!r} is none of {choices}", hint=hint, option=option)


def _check_slots(cluster: Cluster, containers: int, threads: int) -> None:
    slots = cluster.check_slots(containers, threads)
    if slots.left < containers:
        warnings.warn(
            f"of the {slots.total} tasks that Spark runs at a time, containers take {slots.taken}: {slots.left} left for"
            " queries are fewer than there are containers, which will mostly wait for them",
            FewTaskSlots,
            stacklevel=3,
        )


def _check_seconds(option: str, value: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= CODE_SECONDS_MIN:
        raise BadOption(
            f"{option}={value!r} is not a number of seconds from {CODE_SECONDS_MIN} on",
            hint=f"for example {option}={CODE_SECONDS}, or math.inf for no limit",
            option=option,
        )


def _checked_root(root: object) -> str:
    path = os.fspath(root) if isinstance(root, str | os.PathLike) else root
    if not isinstance(path, str) or not path or "\0" in path:
        raise _bad_root(repr(root), "it is not a path")
    return os.path.abspath(path)


def _own_root(path: str, trust: Trust = "all") -> str:
    """The root without links, made if need be: this user's alone, with all that is in it. Nothing was read of it yet."""
    try:
        root = private.real_path(path, make=True)
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        private.check_directory(root)
        private.check_inside(root)
    except OSError as error:
        if isinstance(error, NotPrivate) and _is_for_something_else(root):
            # What would make a root of it is no good to what is there.
            hint = f"give a directory of its own, for example {private.quoted(os.path.join(root, 'pond'))}"
            raise _bad_root(path, error.message, hint) from None
        if isinstance(error, NotPrivate) and error.owner and trust == "all":
            why = f"{error.message}; rules and transactions in it are code, which would run as you"
            # Whoever made it knows its token.
            command = f"{error.hint} && rm -f {private.quoted(os.path.join(root, 'token'))}"
            raise _bad_root(
                path, why, f"only if you trust {error.owner}, and they do not have it open: {command}"
            ) from None
        raise _unusable(path, error) from None
    return root


def _is_for_something_else(root: str) -> bool:
    """Whether it holds anything, but nothing of a pond's; or is one for all users, as /tmp is."""
    try:
        names = os.listdir(root)
        shared = os.lstat(root).st_mode & stat.S_ISVTX
    except OSError:
        return False
    return bool(names) and bool(shared or not any(re.match(_OF_A_POND, name) for name in names))


def _unusable(root: str, error: OSError) -> BadRoot:
    if isinstance(error, NotPrivate):
        return _bad_root(root, error.message, error.hint)
    where = error.filename
    named = f"{private.shown(where)}: " if isinstance(where, str) and where != root else ""
    return _bad_root(root, f"{named}{error.strerror or error}")


def _bad_root(root: str, why: str, hint: str = "give a directory that this user may write to") -> BadRoot:
    return BadRoot(f"{private.shown(root)} cannot hold a pond: {why}", hint=hint, root=root)


def _token(root: str, renewed: bool = False) -> str:
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
        raise _bad_root(root, f"{path} holds no token of a pond", hint=f"rm {private.quoted(path)}")
    return token


def _await_orphans(root: str) -> None:
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
