"""How a pond comes up: a root directory, a token, a coordinator in this process, containers as its children."""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import secrets
import stat
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import IO, Any, Literal, get_args

from millpond import private
from millpond.client.client import Client
from millpond.client.link import Link
from millpond.coordinator.hosting import CODE_SECONDS, Embedded
from millpond.coordinator.journal import JOURNAL
from millpond.coordinator.service import CoordinatorService
from millpond.coordinator.spark_cluster import Cluster, check_session
from millpond.coordinator.spark_hosting import SparkHosting
from millpond.durable.files import OsFiles
from millpond.errors import BadOption, BadRoot, FewTaskSlots, MillpondError, NotPrivate, PondInUse
from millpond.pond.pond import Pond
from millpond.pond.workers import check_workers
from millpond.runtime import Threads
from millpond.wire.connection import LocalConnection
from millpond.wire.flight import FlightDialer, FlightService, dialer_to
from millpond.wire.gate import Gate, check_host
from millpond.wire.handshake import read_only_token
from millpond.wire.house import Locate
from millpond.wire.sockets import POND, SCHEME, SocketDirectory

ADDRESS_PATTERN = r"unix:/.+|[^/]+:\d{1,5}"
SLICES_MAX = 65_535
CODE_SECONDS_MIN = 0.1
# What a container needs before it holds anything is some 300 MiB.
MEMORY_MIN = 512 << 20
_OF_A_POND = r"(lock|token|journal|containers?|snapshots|waiting|sockets|grants)\b"
ORPHANS_TIMEOUT_S = 30.0
UPKEEP_S = 0.5
Trust = Literal["all", "data"]
Where = Literal["embedded", "spark", "standalone"]


def open_pond(
    root: str | os.PathLike[str],
    spark: Any = None,
    containers: int = 1,
    threads: int | None = None,
    slices: int = 64,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    code_seconds: float = CODE_SECONDS,
    memory: int | None = None,
    trust: Trust = "all",
    hosting: Where = "embedded",
) -> Pond:
    """Opens the pond under `root`, with all that it held, or makes a new one. Opening a root runs the code in it.

    A root that came from somebody else is opened with `trust="data"`: then none of its rules and transactions is
    compiled or run, and nothing that it holds is changed. What it holds can be read, but for what only its code could
    tell: a State with an update rule of its own, and a group of tables whose newest epochs are in no snapshot yet. Those,
    and whatever would change the pond or run code, are refused with `NotTrusted`.

    Starts `containers` child processes with `threads` threads each (by default the cores are shared out); they
    end with this process, however it ends. `slices` counts for a new pond only: it never changes afterwards.
    Other processes of this user may join at `pond.address` by `mp.connect`; with a `port` (0 takes a free one) the
    pond listens there too, at a `host` on this machine, for any user who has a token. One process at a time has a
    root open.

    Transactions and rules of your own have `code_seconds` to end in, for each epoch or question: then they are ended,
    and the epoch is refused with `CodeTookTooLong`; `math.inf` is for no limit. `memory` is how many bytes each
    container may ask the system for; user code that goes beyond is refused with `OutOfMemory`. Of what is left beside
    its own 300 MiB, a quarter is for rows to be committed, a quarter for questions and answers on their way. By default
    it is three quarters of what the machine has.

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
    if threads is not None:
        _check_count("threads", threads, 1, 1024)
    if port is not None:
        _check_count("port", port, 0, 65_535)
    _check_seconds("code_seconds", code_seconds)
    if memory is not None:
        _check_count(
            "memory", memory, MEMORY_MIN, sys.maxsize, f"give bytes, at least {MEMORY_MIN:,} (512m), or None"
        )
    _check_choice("trust", trust, get_args(Trust), 'trust="data" reads a root without running the code in it')
    check_host(host)
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
        embedded.start(containers, threads, slices, host, port, code_seconds, memory, trust)
    except BaseException as error:
        embedded.close()
        if isinstance(error, OSError) and not isinstance(error, MillpondError) and error.filename is not None:
            raise _unusable(path, error) from None
        raise
    return _with_spark(Pond(embedded.client(), embedded.address, embedded, spark))


def connect(address: str, token: str, spark: Any = None) -> Pond:
    """Joins a pond that another process runs. Its token is in the file `token` under its root.

    The one in `token.read` may read every State, and change none.
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
        check_workers(spark)
    dial = dialer_to(address, token)
    connection = dial.pond(address)
    try:
        connection.call(Locate())
    except BaseException:
        connection.close()
        raise
    client = Client(connection, dial, link=Link(address, token))
    return _with_spark(Pond(client, address, spark=spark))


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
        self._gate: Gate | None = None
        self._closing = threading.Event()
        atexit.register(self.close)

    def start(
        self,
        containers: int,
        threads: int,
        slices: int,
        host: str,
        port: int | None,
        code_seconds: float,
        memory: int | None,
        trust: Trust,
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
        dial = FlightDialer(self._token)
        coordinator = CoordinatorService(files, self._root, dial, Threads(), only_reads=trust == "data")
        self._coordinator = coordinator
        # First, as the port may be taken; whoever joins before the pond is open is told to try again.
        self._sockets = SocketDirectory.under(self._root)
        self._server = FlightService(coordinator, self._token, self._sockets, POND)
        if port is not None:
            self._gate = Gate(self._token, self._sockets, host, port)
        where = (self._root, self._sockets.path, threads, coordinator.recover, code_seconds, memory, trust)
        hosting = Embedded(*where) if self._cluster is None else SparkHosting(self._cluster, *where)
        coordinator.start(hosting, containers, slices)
        threading.Thread(target=self._maintain, name="millpond-coordinator", daemon=True).start()

    def _maintain(self) -> None:
        while not self._closing.wait(UPKEEP_S):
            coordinator = self._coordinator
            if coordinator is not None:
                with suppress(MillpondError, OSError):
                    coordinator.maintain()

    @property
    def address(self) -> str:
        assert self._server is not None
        return self._server.address if self._gate is None else self._gate.address

    def client(self) -> Client:
        assert self._server is not None
        link = Link(self._server.address, token_file=os.path.join(self._root, "token"))
        return Client(LocalConnection(self._coordinator), FlightDialer(self._token), link=link)

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
        if self._sockets is not None:
            self._sockets.remove()
            self._sockets = None
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None


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
