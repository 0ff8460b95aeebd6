"""A network of simulated processes: what is sent arrives late, twice, in another order, or never."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pyarrow as pa

from millpond.errors import MillpondError, Unavailable, error_named
from millpond.testing.simulation.faults import Faults
from millpond.testing.simulation.scheduler import Process, Scheduler, Task
from millpond.wire.base import Call, Exchange, Read, Request
from millpond.wire.codec import decode, encode
from millpond.wire.connection import Answer, Dialer, Handler, SlicedBatch, checked, reply_to

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class _Request:
    """One call on its way: what the far side is to do, and who waits for the answer."""

    number: int
    name: str
    source: Process
    address: str
    serve: Callable[[Handler], Any]
    caller: Task
    answer: Any = None
    answered: bool = False
    over: bool = False
    arrivals: int = 0
    replies: int = 0
    """On their way: what was sent before a process died still arrives."""


@dataclass
class _Address:
    process: Process
    handler: Handler
    last_arrived: dict[Process, int] = field(default_factory=dict)


class Network:
    """Who serves where. An address is free again when its process has ended."""

    def __init__(self, scheduler: Scheduler, faults: Faults) -> None:
        self._scheduler = scheduler
        self._faults = faults
        self._serving: dict[str, _Address] = {}
        self._open: dict[_Request, None] = {}
        self._cut_until_s: dict[frozenset[Process], float] = {}
        self._numbers = 0
        self.travelling = 0
        """Messages that are on their way."""
        self._strikes: dict[Process, tuple[str, Callable[[], None]]] = {}
        self.on_failure: Callable[[Exception], None] = lambda error: None
        """Told what a handler raised that is no error of the pond's."""

    def serve(self, process: Process, handler: Handler, address: str) -> None:
        assert address not in self._serving, f"{address} is taken"
        self._serving[address] = _Address(process, handler)
        process.on_exit.append(lambda: self._hang_up(address))

    def dialer(self, process: Process) -> Dialer:
        def dial(address: str) -> SimConnection:
            return SimConnection(self, process, address)

        return dial

    def cut(self, one: Process, other: Process, seconds: float) -> None:
        """Nothing passes between the two for so long."""
        self._cut_until_s[frozenset((one, other))] = self._scheduler.now + seconds

    def strike(self, process: Process, event: Callable[[], None], kind: str = "") -> None:
        """The event happens just after the process has sent its next reply, to a message of that kind or to any."""
        self._strikes = {one: other for one, other in self._strikes.items() if one.alive}
        self._strikes[process] = (kind, event)

    def mend(self) -> None:
        self._cut_until_s.clear()

    def ask(self, source: Process, address: str, message: Request, serve: Callable[[Handler], T]) -> T:
        """What the handler at the address answers or raises."""
        scheduler, faults = self._scheduler, self._faults
        scheduler.pause()
        caller = scheduler.task()
        assert caller.process is source, f"{caller} asks by a connection of {source.name}"
        self._numbers += 1
        name = f"{type(message).__name__}#{self._numbers}"
        request = _Request(self._numbers, name, source, address, serve, caller)
        self._open[request] = None
        scheduler.note(f"asks {address} {name}")
        self._send(request, "request", lambda: self._arrive(request))
        if faults.strikes(faults.weather.doubled):
            self._send(request, "request", lambda: self._arrive(request))
        seconds = min(message.seconds, faults.weather.patience_s)
        answered = request.answered or scheduler.wait(f"{address} to answer {name}", seconds)
        request.over = True
        self._open.pop(request, None)
        if not answered:
            scheduler.note(f"gives up {name}")
            raise Unavailable(f"{address} did not answer within {seconds} s", address=address)
        scheduler.note(f"has {name}: {_brief(request.answer)}")
        if isinstance(request.answer, Exception):
            raise request.answer
        answer: T = request.answer
        return answer

    def paced(self, batches: Iterable[T]) -> Iterator[T]:
        """Others may come between two batches, and after the last one: some take as long as a message does."""
        for batch in batches:
            yield batch
            if self._faults.strikes(self._faults.weather.delayed):
                self._scheduler.sleep(self._faults.duration(self._faults.weather.delay_s))
            else:
                self._scheduler.pause()

    def _send(self, request: _Request, what: str, arrive: Callable[[], None]) -> bool:
        """Whether it will arrive."""
        faults, weather = self._faults, self._faults.weather
        if faults.strikes(weather.lost):
            faults.fire(f"{what} lost", request.name)
            return False
        seconds = faults.duration(weather.latency_s)
        if faults.strikes(weather.delayed):
            seconds += faults.duration(weather.delay_s)
            faults.fire(f"{what} delayed", f"{request.name} by {seconds:.3f} s")
        self.travelling += 1

        def end() -> None:
            self.travelling -= 1
            arrive()

        self._scheduler.at(seconds, end)
        return True

    def _is_cut(self, request: _Request, what: str) -> bool:
        there = self._serving.get(request.address)
        if there is None:
            return False
        if self._scheduler.now >= self._cut_until_s.get(frozenset((request.source, there.process)), 0.0):
            return False
        self._faults.fire(f"{what} cut off", request.name)
        return True

    def _arrive(self, request: _Request) -> None:
        """The request is there: a task of that process serves it."""
        if self._is_cut(request, "request"):
            return
        there = self._serving.get(request.address)
        if there is None:
            self._refuse(request)
            return
        request.arrivals += 1
        if request.arrivals > 1:
            self._faults.fire("request doubled", request.name)
        last = there.last_arrived.get(request.source, 0)
        if request.number < last:
            self._faults.fire("request reordered", request.name)
        there.last_arrived[request.source] = max(last, request.number)
        there.process.spawn(lambda: self._handle(request, there.handler), request.name)

    def _handle(self, request: _Request, handler: Handler) -> None:
        try:
            answer = request.serve(handler)
        except MillpondError as error:
            answer = error_named(type(error).__name__)(error.message, hint=error.hint, **error.attributes())
        except Exception as error:  # noqa: BLE001 - as the real server does
            self._scheduler.note(f"failed: {error!r}")
            self.on_failure(error)
            answer = MillpondError(f"the pond failed: {type(error).__name__}: {error}")
        self._scheduler.pause()
        if self._send(request, "reply", lambda: self._answer(request, answer)):
            request.replies += 1
        process = self._scheduler.task().process
        kind, strike = self._strikes.get(process, ("", None))
        if strike is not None and request.name.startswith(kind):
            del self._strikes[process]
            self._scheduler.at(0.0, strike)

    def _answer(self, request: _Request, answer: Any) -> None:
        """The first answer counts; whoever has given up hears none."""
        if request.answered or request.over or self._is_cut(request, "reply"):
            return
        request.answered, request.answer = True, answer
        self._open.pop(request, None)
        self._scheduler.wake(request.caller)

    def _refuse(self, request: _Request) -> None:
        if self._faults.strikes(self._faults.weather.silent):
            self._faults.fire("silence", request.name)
            return
        error = Unavailable(f"nothing serves at {request.address}", address=request.address)
        self._scheduler.at(self._faults.weather.latency_s, lambda: self._answer(request, error))

    def _hang_up(self, address: str) -> None:
        """The process that served there is dead: who waits for it hears so, or does not."""
        del self._serving[address]
        for request in [request for request in self._open if request.address == address]:
            if request.arrivals and not request.replies:
                self._refuse(request)


class SimConnection:
    """What one process asks of one address. Messages go through their encoding."""

    def __init__(self, network: Network, source: Process, address: str) -> None:
        self._network = network
        self._source = source
        self.address = address

    def call(self, message: Call[R]) -> R:
        sent = encode(message)
        return reply_to(message, self._ask(message, lambda handler: encode(handler.call(decode(sent)))))

    def exchange(self, message: Exchange[R], batches: Sequence[SlicedBatch]) -> Answer[R]:
        sent = encode(message)

        def serve(handler: Handler) -> tuple[bytes, pa.RecordBatch | None]:
            answer = handler.exchange(decode(sent), checked(message, self._network.paced(batches)))
            answer.sent()
            return encode(answer.message), answer.batch

        reply, batch = self._ask(message, serve)
        return Answer(reply_to(message, reply), batch)

    def read(self, message: Read) -> pa.Table:
        sent = encode(message)

        def serve(handler: Handler) -> pa.Table:
            schema, batches = handler.read(decode(sent))
            return pa.Table.from_batches(list(self._network.paced(batches)), schema)

        return self._ask(message, serve)

    def close(self) -> None:
        pass

    def _ask(self, message: Request, serve: Callable[[Handler], T]) -> T:
        return self._network.ask(self._source, self.address, message, serve)


def _brief(answer: Any) -> str:
    return type(answer).__name__ if isinstance(answer, Exception) else "answered"
