"""How a program comes to a pond: it opens one under a root, or joins one that another process runs."""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import Any, Literal, get_args

from millpond import private
from millpond.client.client import Client
from millpond.client.handing_out import HandedOut
from millpond.coordinator.hosting import CODE_SECONDS
from millpond.coordinator.journal import JOURNAL
from millpond.coordinator.passes import Given
from millpond.coordinator.spark_cluster import Cluster, check_session
from millpond.errors import BadOption, BadRoot, FewTaskSlots, MillpondError
from millpond.ops.limits import parse_bytes
from millpond.pond.embedded import EmbeddedPond, Listening
from millpond.pond.pond import Pond
from millpond.pond.roots import Trust, checked_root, own_root, unusable
from millpond.pond.workers import check_workers
from millpond.wire.authority import Bundle, given
from millpond.wire.credentials import Credentials
from millpond.wire.flight import dialer_to
from millpond.wire.house import Locate
from millpond.wire.passes import TaskPass
from millpond.wire.sockets import POND, SCHEME, TLS_SCHEME

ADDRESS_PATTERN = r"unix:/.+|[^/]+:\d{1,5}"
SLICES_MAX = 65_535
CODE_SECONDS_MIN = 0.1
# What a container needs before it holds anything is some 300 MiB.
MEMORY_MIN = 512 << 20
Where = Literal["embedded", "spark", "standalone"]
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
    memory: int | str | None = None,
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
    if isinstance(memory, str):
        memory = parse_bytes(memory) or 0
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
    path = checked_root(root)
    if trust == "data" and not os.path.isdir(os.path.join(path, JOURNAL)):
        raise BadRoot(
            f"{path} holds no pond that could be read", hint="give the root of a pond that exists", root=path
        )
    if cluster is not None:
        threads = threads or cluster.task_cpus
        _check_slots(cluster, containers, threads)
    else:
        threads = threads or max(1, (os.cpu_count() or 1) // containers)
    embedded = EmbeddedPond(own_root(path, trust), cluster)
    try:
        listening = Listening(host, port, own)
        embedded.start(containers, threads, slices, listening, code_seconds, memory, trust, backups)
    except BaseException as error:
        embedded.close()
        if isinstance(error, OSError) and not isinstance(error, MillpondError) and error.filename is not None:
            raise unusable(path, error) from None
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
