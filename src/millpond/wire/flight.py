"""Arrow Flight between processes: a thin shell that authenticates, limits, and carries errors across.

A server listens on a Unix socket that only its owner can reach; others come through a gate (`wire.gate`). Every call
needs a token all the same, whatever its kind: it says what the caller may do. Errors of the handler travel as
themselves; any other failure of the transport is `Unavailable`, which callers may retry.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.flight as fl

from millpond.errors import (
    BadMessage,
    MillpondError,
    OutOfMemory,
    Unauthorised,
    Unavailable,
    error_named,
    no_answer,
    token_refused,
)
from millpond.wire.base import Call, Exchange, Read, Request
from millpond.wire.codec import BATCH_BYTES_MAX, CONTROL_BYTES_MAX, check_size, decode, encode
from millpond.wire.connection import Answer, Handler, R, SlicedBatch, check_alike, checked, reply_to
from millpond.wire.credentials import Credentials, credentials_of
from millpond.wire.keyring import Accepted, accepted_by
from millpond.wire.roles import LETS_USE, NAMES, Role
from millpond.wire.sockets import POND, SCHEME, TLS_SCHEME, SocketDirectory, name_in, role_let_in
from millpond.wire.tls import TlsTunnel
from millpond.wire.tunnel import TokenTunnel, Tunnel

# gRPC carries errors in trailers, which are small.
_ERROR_BYTES_MAX = 4000
_HEADER = "authorization"
# What gRPC answers where a server has no memory for another thread.
_NO_THREAD = "Threadpool Exhausted"
# Calls at the same time. Those with the read-only token take none from the others.
CALLS_MAX = 1024
READING_CALLS_MAX = 64
# Of these, such that read whole slices: each holds one, for as long as it takes to be received.
READING_SLICES_MAX = 4


class _Caller(fl.ServerMiddleware):  # type: ignore[misc]
    """What the role of a caller allows, as long as the call lasts."""

    def __init__(self, role: Role, calls: _Calls, slices: _Calls) -> None:
        super().__init__()
        self.role = role
        self._slices = slices
        self._held = [calls]

    @property
    def reads_only(self) -> bool:
        return self.role == "reader"

    def call_completed(self, exception: Any) -> None:
        for each in self._held:
            each.end()

    def begin_slices(self) -> None:
        """It reads whole slices."""
        self._slices.begin()
        self._held.append(self._slices)

    def check(self, message: Any) -> None:
        """Each message says who may send it. What is no request is for the handler to refuse, but not to a reader."""
        is_request = isinstance(message, Request)
        if (self.role in message.permitted) if is_request else not self.reads_only:
            return
        code = is_request and self.role in message.senders
        what = "send code" if code else f"ask for {type(message).__name__}"
        raise Unauthorised(f"{NAMES[self.role]} cannot {what}", hint=_HINTS.get(self.role, ""))


_HINTS: dict[Role, str] = {
    "reader": "use the token in the file `token` under the pond's root",
    "task": "do it in the program that runs the tasks",
    "client": "that is for the pond's own processes alone",
}


class _CheckBearer(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call that does not carry the bearer of a role, before anything else looks at it."""

    def __init__(self, accepted: Accepted) -> None:
        super().__init__()
        self._accepted = accepted
        self._calls = {False: _Calls(CALLS_MAX), True: _Calls(READING_CALLS_MAX)}
        self._slices = {False: _Calls(CALLS_MAX), True: _Calls(READING_SLICES_MAX)}

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> _Caller:
        role = self._accepted.role_of(str(headers.get(_HEADER, [""])[0]))
        if role is None:
            raise fl.FlightUnauthenticatedError("the token is missing or wrong")
        calls = self._calls[role == "reader"]
        with _ErrorsToWire():
            calls.begin()
        return _Caller(role, calls, self._slices[role == "reader"])


class _Calls:
    """Calls that are under way. Each has a thread of the server, also while it says nothing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self._open >= self._most:
                raise Unavailable(
                    f"{self._open} calls are under way with this token, as many as there may be",
                    hint="try again in a moment",
                    address="",
                )
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1


class FlightService(fl.FlightServerBase):  # type: ignore[misc]
    """Serves one handler at a Unix socket of that name, to those who are `accepted`; with a token alone, to its holders."""

    def __init__(
        self, handler: Handler, accepted: Accepted | str, sockets: SocketDirectory, name: str
    ) -> None:
        middleware = self.middleware(accepted)
        self._handler = handler
        self.address = sockets.address_of(name)
        super().__init__(f"grpc+unix://{sockets.path_of(name)}", middleware=middleware)

    @staticmethod
    def middleware(accepted: Accepted | str) -> dict[str, fl.ServerMiddlewareFactory]:
        """What every call goes through first."""
        if isinstance(accepted, str):
            accepted = accepted_by(accepted)
        return {"caller": _CheckBearer(accepted)}

    def do_action(self, context: Any, action: fl.Action) -> Iterator[fl.Result]:
        with _ErrorsToWire():
            if action.type != "call":
                raise BadMessage(f"there is no action {action.type!r}")
            check_size(action.body.size, CONTROL_BYTES_MAX, "message")
            message = decode(memoryview(action.body))
            _caller(context).check(message)
            reply = encode(self._handler.call(message))
        return iter([fl.Result(pa.py_buffer(reply))])

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _ErrorsToWire():
            message = decode(descriptor.command or b"")
            caller = _caller(context)
            caller.check(message)
            answer = self._handler.exchange(message, checked(message, _incoming(reader)), caller.reads_only)
            try:
                reply = encode(answer.message)
                if answer.batch is None:
                    writer.write_metadata(reply)
                else:
                    check_size(answer.batch.nbytes, BATCH_BYTES_MAX, "batch")
                    writer.begin(answer.batch.schema)
                    writer.write_with_metadata(answer.batch, reply)
            finally:
                answer.sent()

    def do_get(self, context: Any, ticket: fl.Ticket) -> fl.FlightDataStream:
        with _ErrorsToWire():
            message = decode(ticket.ticket)
            _caller(context).check(message)
            _caller(context).begin_slices()
            schema, batches = self._handler.read(message)
        return fl.GeneratorStream(schema, _outgoing(batches))

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _ErrorsToWire():
            raise BadMessage("rows come by exchange, not by put")

    def list_flights(self, context: Any, criteria: bytes) -> Iterator[fl.FlightInfo]:
        with _ErrorsToWire():
            raise BadMessage("a pond lists no flights")

    def get_flight_info(self, context: Any, descriptor: Any) -> fl.FlightInfo:
        with _ErrorsToWire():
            raise BadMessage("a pond plans no flights")

    def get_schema(self, context: Any, descriptor: Any) -> fl.SchemaResult:
        with _ErrorsToWire():
            raise BadMessage("a pond plans no flights")

    def list_actions(self, context: Any) -> list[fl.ActionType]:
        return [fl.ActionType("call", "one message in, one message out")]


def _caller(context: Any) -> _Caller:
    """Who calls; Unauthorised if it was let in as somebody who may do less."""
    caller: _Caller = context.get_middleware("caller")
    let_in = role_let_in(context.peer())
    if let_in is not None and caller.role not in LETS_USE[let_in]:
        raise Unauthorised(
            f"{NAMES[let_in]} cannot call as {NAMES[caller.role]}",
            hint="take certificate and token from the same files of the pond's root",
        )
    return caller


def _incoming(reader: Any) -> Iterator[SlicedBatch]:
    while True:
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, MemoryError):
                raise
            raise BadMessage(f"a batch could not be read: {error}") from None
        if chunk.data is None or chunk.app_metadata is None or chunk.app_metadata.size % 4:
            raise BadMessage("rows come as batches with their per-slice counts")
        yield SlicedBatch(chunk.data, np.frombuffer(chunk.app_metadata, dtype=np.int32))


def _outgoing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The batches; an error on the way travels as itself, too."""
    with _ErrorsToWire():
        yield from batches


class FlightConnection:
    """One handler in another process, at a Unix socket or behind a gate. Safe to share between threads.

    Nothing is sent before it is known who serves there.
    """

    def __init__(self, address: str, credentials: str | Credentials, tunnel: Tunnel | None = None) -> None:
        self.address = address if tunnel is None else tunnel.address
        self._sockets: SocketDirectory | None = None
        self._tunnel = tunnel
        if tunnel is not None:
            path = tunnel.path
        else:
            self._sockets = SocketDirectory(os.path.dirname(address.removeprefix(SCHEME)))
            path = self._sockets.path_of(name_in(address))
        # No limit on what is received: the sender holds itself to its own.
        self._begin(fl.connect(f"grpc+unix://{path}"), credentials)

    def _begin(self, client: fl.FlightClient, credentials: str | Credentials) -> None:
        self._client = client
        self._credentials = credentials_of(credentials)
        self._bearer = ""
        self._options: dict[float, fl.FlightCallOptions] = {}

    def _options_of(self, message: Request) -> fl.FlightCallOptions:
        """Its deadline, and the bearer as it is now."""
        seconds, bearer = message.seconds, self._credentials.bearer()
        if bearer != self._bearer:
            self._bearer, self._options = bearer, {}
        options = self._options.get(seconds)
        if options is None:
            headers = [(_HEADER.encode(), bearer.encode())]
            options = self._options[seconds] = fl.FlightCallOptions(timeout=seconds, headers=headers)
        return options

    def call(self, message: Call[R]) -> R:
        try:
            action = fl.Action("call", encode(message))
            (result,) = self._client.do_action(action, self._options_of(message))
            return reply_to(message, memoryview(result.body))
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            raise self._told(error) from None

    def exchange(self, message: Exchange[R], batches: Sequence[SlicedBatch]) -> Answer[R]:
        check_alike(batches)
        try:
            writer, reader = self._client.do_exchange(
                fl.FlightDescriptor.for_command(encode(message)), self._options_of(message)
            )
            with writer:
                try:
                    for number, (batch, counts) in enumerate(batches):
                        if number == 0:
                            writer.begin(batch.schema)
                        writer.write_with_metadata(batch, counts.tobytes())
                    writer.done_writing()
                except (fl.FlightError, pa.ArrowException, OSError):
                    # The handler's own word, if it said one, tells more than the broken pipe.
                    reader.read_chunk()
                    raise
                chunk = reader.read_chunk()
            return Answer(reply_to(message, memoryview(chunk.app_metadata)), chunk.data)
        except (fl.FlightError, pa.ArrowException, OSError, StopIteration) as error:
            raise self._told(error) from None

    def read(self, message: Read) -> pa.Table:
        try:
            return self._client.do_get(fl.Ticket(encode(message)), self._options_of(message)).read_all()
        except (fl.FlightError, pa.ArrowException, OSError) as error:
            raise self._told(error) from None

    def _told(self, error: BaseException) -> MillpondError:
        """What the error says; of a connection that could not be made, why."""
        problem = self._tunnel.problem if self._tunnel is not None else None
        told = _from_wire(error, self.address)
        if not isinstance(told, Unavailable):
            return told
        if self._sockets is not None and self._sockets.is_gone:
            return Unavailable(
                f"the pond at {self.address} was closed",
                hint="if it is open again, join it anew with mp.connect",
                address=self.address,
            )
        return told if problem is None else problem

    def close(self) -> None:
        self._client.close()
        for each in (self._tunnel, self._sockets):
            if each is not None:
                each.close()


class FlightDialer:
    """Connects by the way that an address says, with what this process has to show.

    `unix:` is a socket of this user's; `tls:host:port/name` a server that must show that it is called so. Where the pond
    is reached at a `gate`, all that it has at sockets is reached through there: `host:port` on loopback by a token,
    `tls:host:port/pond` by a certificate.
    """

    def __init__(self, credentials: str | Credentials, gate: str = "") -> None:
        self._credentials = credentials_of(credentials)
        self._gate = gate

    def __call__(self, address: str) -> FlightConnection:
        if address.startswith(TLS_SCHEME):
            server = name_in(address)
            tunnel = self._by_tls(address, server, server == POND)
        elif self._gate.startswith(TLS_SCHEME):
            tunnel = self._by_tls(self._gate, name_in(address), True)
        elif self._gate:
            tunnel = TokenTunnel(self._gate, name_in(address), self._credentials.token)
        else:
            return FlightConnection(address, self._credentials)
        return FlightConnection(address, self._credentials, tunnel)

    def _by_tls(self, address: str, server: str, through_pond: bool) -> Tunnel:
        host = address.removeprefix(TLS_SCHEME).rpartition("/")[0]
        return TlsTunnel(host, server, self._credentials.bundle, through_pond)

    def pond(self, address: str) -> FlightConnection:
        """The coordinator of the pond that is reached there."""
        return self(POND if self._gate else address)


def dialer_to(address: str, credentials: str | Credentials) -> FlightDialer:
    """By the way that the address of a pond says."""
    return FlightDialer(credentials, "" if address.startswith(SCHEME) else address)


class _ErrorsToWire:
    """Sends what goes wrong inside as itself: code, message, hint and attributes."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, fl.FlightError) or not isinstance(error, Exception):
            return
        if isinstance(error, MemoryError) and not isinstance(error, MillpondError):
            error = OutOfMemory(
                "the pond has not enough memory for this request",
                hint="ask or send fewer rows at once, or open the pond with a larger memory=",
                what="a request",
            )
        if not isinstance(error, MillpondError):
            error = MillpondError(f"the pond failed: {type(error).__name__}: {error}")
        raise fl.FlightServerError(error.message[:500], extra_info=_error_bytes(error)) from error


def _error_bytes(error: MillpondError) -> bytes:
    body = {"code": type(error).__name__, "message": error.message[:2000], "hint": error.hint[:1000]}
    data = msgspec.msgpack.encode(body | {"attributes": error.attributes()})
    return data if len(data) <= _ERROR_BYTES_MAX else msgspec.msgpack.encode(body | {"attributes": {}})


def _from_wire(error: BaseException, address: str) -> MillpondError:
    extra = getattr(error, "extra_info", b"")
    if extra:
        body = msgspec.msgpack.decode(extra)
        return error_named(body["code"])(body["message"], hint=body["hint"], **body["attributes"])
    if isinstance(error, fl.FlightUnauthenticatedError):
        return token_refused(address)
    if isinstance(error, pa.ArrowInvalid) and _NO_THREAD not in str(error):
        return BadMessage(str(error))
    return no_answer(address, type(error).__name__)
