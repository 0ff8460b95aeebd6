"""A connection to a pond: its coordinator, and through it all containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpond.client.receipts import receipt_of
from millpond.client.routing import ContainerRows, arrange, counts_of, in_order_asked, route, split
from millpond.client.runs import Runs
from millpond.durable.files import Files
from millpond.errors import BadOption, CodeFailed, MessageTooLarge, Moved, Unavailable
from millpond.runtime import Runtime, Threads
from millpond.stores.keys import Keys
from millpond.stores.rows import spread
from millpond.times import Progress
from millpond.wire.base import Call, SliceId
from millpond.wire.connection import Connection, Dialer, SlicedBatch
from millpond.wire.epochs import Receipt, Stage, StageDone
from millpond.wire.house import ListResidents, Locate, Placement
from millpond.wire.questions import FindRows, Question, ReadSlices
from millpond.wire.specs import Spec, StateShape

if TYPE_CHECKING:
    from millpond.client.link import Link

RETRY_S_MAX = 120.0
RETRY_PAUSE_S = (0.02, 0.5)
# Containers that a question of user code may cost before it is given up.
DEATHS_MAX = 3
# What goes into one batch: far below the limit of a message, large enough that a slice gets many rows.
ROWS_MAX = 1 << 20
# Answers without a fixed width may be much larger than their questions: so many rows before their width is known.
WIDE_ROWS_MAX = 1 << 17
BYTES_MAX = 64 << 20
_T = TypeVar("_T")
R = TypeVar("R")
S = TypeVar("S", bound=Spec)


class Client:
    """Safe to share between threads. Retries what is safe to retry: nothing that is asked here takes effect twice."""

    def __init__(
        self,
        coordinator: Connection,
        dial: Dialer,
        runtime: Runtime | None = None,
        link: Link | None = None,
        files: Files | None = None,
    ) -> None:
        self.link = link
        self.files = files
        """Where the root is; None for the disk of this machine."""
        self.runtime = runtime or Threads(threads=8, name="millpond-client")
        self.runs = Runs()
        self._coordinator = coordinator
        self._dial = dial
        self._lock = self.runtime.lock()
        self._placement: Placement | None = None
        self._connections: dict[str, Connection] = {}
        self._closed = False
        # How many rows of a fetch whose answers have no fixed width fit one batch.
        self._rows_max: dict[tuple[str, str], int] = {}

    def call(self, message: Call[R]) -> R:
        """Asks the coordinator."""
        self._check_open()
        return self._coordinator.call(message)

    def specs(self, kind: type[S]) -> dict[str, S]:
        """The residents of a kind by name."""
        listed = self.call(ListResidents(kind.kind)).residents
        return {spec.name: cast(S, spec) for spec in listed}

    def placement(self) -> Placement:
        """Who serves which slice, as far as this client knows. Nobody waits while it asks, but those who ask."""
        self._check_open()
        placement = self._placement
        if placement is not None:
            return placement
        placement = self._coordinator.call(Locate())
        with self._lock:
            if self._placement is not None and self._placement.version > placement.version:
                return self._placement
            self._placement = placement
            # Connections to containers that have ended are let go.
            serving = {info.address for info in placement.containers}
            self._connections = {
                address: connection for address, connection in self._connections.items() if address in serving
            }
        return placement

    def stage(
        self,
        message: Stage,
        schema: pa.Schema,
        keys: Keys,
        times: npt.NDArray[np.int64],
        values: Sequence[pa.Array],
        late: int,
    ) -> Receipt:
        """Sends a partition's rows to the owners of their slices; every container hears of the attempt."""

        nbytes = keys.nbytes + sum(column.nbytes for column in values)
        spans = _parts(len(times), nbytes, ROWS_MAX)
        keys = keys.hashed()

        def send() -> list[Any]:
            placement = self.placement()
            batches: dict[int, list[Any]] = {container: [] for container in placement.owners}
            for start, stop in spans:
                part = keys.part(start, stop)
                routed = route(part, placement.slices)
                columns = [
                    part.spread(routed.places).to_arrow(),
                    pa.array(spread(times[start:stop], routed.places)),
                    *arrange([column.slice(start, stop - start) for column in values], routed.places),
                ]
                for portion in split(routed, schema, columns, placement):
                    batches[portion.container].append(portion.rows)
            return self.runtime.map(
                lambda item: self._connection(placement, item[0]).exchange(message, item[1]).message,
                list(batches.items()),
            )

        staged: list[StageDone] = self._retry(send)
        return _receipt(message, staged, times, late)

    def stage_events(
        self, message: Stage, home: SliceId, events: pa.Table, times: npt.NDArray[np.int64], late: int
    ) -> Receipt:
        """Sends a partition's events to the container that has their group."""
        spans = _parts(len(events), events.nbytes, ROWS_MAX)
        parts = [batch for start, stop in spans for batch in events.slice(start, stop - start).to_batches()]

        def send() -> Any:
            placement = self.placement()
            sliced = [SlicedBatch(b, counts_of(home, placement.slices, b.num_rows)) for b in parts]
            connection = self._connection(placement, placement.owners[home])
            answer: Any = connection.exchange(message, sliced).message
            return answer

        return _receipt(message, [self._retry(send)], times, late)

    def fetch(
        self,
        message: Question,
        shape: StateShape,
        keys: Keys,
        lows: npt.NDArray[np.int64] | None,
        highs: npt.NDArray[np.int64],
        schema: pa.Schema,
    ) -> list[pa.ChunkedArray]:
        """The answers, one column each, in the order of the questions. `schema` is that of the answers."""
        asked = shape.questions if lows is None else shape.ranged_questions
        keys = keys.hashed()

        def ask(start: int, stop: int) -> list[pa.Array]:
            low = None if lows is None else lows[start:stop]
            return self._fetch_part(message, asked, keys.part(start, stop), low, highs[start:stop])

        fixed = all(pa.types.is_primitive(field.type) for field in schema)
        parts: list[list[pa.Array]] = []
        done = 0
        while done < len(highs):
            usual = ROWS_MAX if fixed else WIDE_ROWS_MAX
            rows_max = self._rows_max.get((message.resident, message.rule), usual)
            stop = min(len(highs), done + _rows_of(len(highs), keys.nbytes, rows_max))
            try:
                parts.append(
                    self._retry(partial(ask, done, stop), code=message.code.name if message.code else "")
                )
            except MessageTooLarge:
                # Answers may be wider than any before: half as many questions.
                if stop - done == 1:
                    raise
                self._rows_max[message.resident, message.rule] = max(1, (stop - done) // 2)
                continue
            if not fixed:
                self._learn(message, parts[-1], stop - done)
            done = stop
        return [pa.chunked_array([part[i] for part in parts], field.type) for i, field in enumerate(schema)]

    def _learn(self, message: Question, answers: Sequence[pa.Array], rows: int) -> None:
        """How many rows to ask at once, by the size of what they were answered; twice as many as before at most."""
        width = max(1, sum(column.nbytes for column in answers) // rows)
        fitting = max(1, min(ROWS_MAX, BYTES_MAX // width))
        asked = message.resident, message.rule
        self._rows_max[asked] = min(fitting, 2 * self._rows_max.get(asked, fitting))

    def _fetch_part(
        self,
        message: Question,
        asked: pa.Schema,
        keys: Keys,
        lows: npt.NDArray[np.int64] | None,
        highs: npt.NDArray[np.int64],
    ) -> list[pa.Array]:
        placement = self.placement()
        routed = route(keys, placement.slices)
        columns = [keys.spread(routed.places).to_arrow(), pa.array(spread(highs, routed.places))]
        if lows is not None:
            columns.append(pa.array(spread(lows, routed.places)))
        portions = split(routed, asked, columns, placement)

        def ask(portion: ContainerRows) -> pa.RecordBatch:
            batch = self._connection(placement, portion.container).exchange(message, [portion.rows]).batch
            assert batch is not None
            return batch

        return in_order_asked(portions, self.runtime.map(ask, portions), routed.places)

    def read(self, state: str, at: Progress, slices: Sequence[int] | None = None) -> pa.Table:
        """One row per key: of all slices, or of some."""

        def ask() -> pa.Table:
            placement = self.placement()
            wanted: dict[int, list[SliceId]] = {}
            for number in range(placement.slices) if slices is None else slices:
                wanted.setdefault(placement.owners[number], []).append(SliceId(number))
            return pa.concat_tables(
                self.runtime.map(
                    lambda item: self._connection(placement, item[0]).read(ReadSlices(state, at, item[1])),
                    list(wanted.items()),
                )
            )

        return self._retry(ask)

    def ask_home(self, home: SliceId, ask: Callable[[Connection], _T]) -> _T:
        """Asks the container that serves a slice."""

        def work() -> _T:
            placement = self.placement()
            return ask(self._connection(placement, placement.owners[home]))

        return self._retry(work)

    def find_rows(self, message: FindRows, home: SliceId, keys: pa.RecordBatch) -> pa.Table:
        """The rows of a table whose keys are there."""
        sliced = SlicedBatch(keys, counts_of(home, self.placement().slices, keys.num_rows))
        batch = self.ask_home(home, lambda connection: connection.exchange(message, [sliced]).batch)
        assert batch is not None
        return pa.Table.from_batches([batch])

    def close(self) -> None:
        """Nothing is asked from now on. What is being asked has a few seconds to end, and is then left to itself."""
        self._closed = True
        self.runtime.close()
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
        self._coordinator.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BadOption(
                "the pond is closed", hint="open it again with mp.open or mp.connect", option="pond"
            )

    def _connection(self, placement: Placement, container: int) -> Connection:
        info = next((info for info in placement.containers if info.id == container), None)
        if info is None:
            raise Unavailable(f"container {container} is not up", address="")
        with self._lock:
            self._check_open()
            if info.address not in self._connections:
                self._connections[info.address] = self._dial(info.address)
            return self._connections[info.address]

    def _retry(self, work: Callable[[], _T], code: str = "") -> _T:
        """Does the work; when a container is away or a slice has moved, asks anew where they are, and retries.

        Where it brings `code` of the user's, the end of several containers is the code's doing.
        """
        deadline = self.runtime.now() + RETRY_S_MAX
        pause, longest = RETRY_PAUSE_S
        ended: set[int] = set()
        while True:
            try:
                return work()
            except (Unavailable, Moved):
                if self.runtime.now() > deadline or self._closed:
                    raise
                with self._lock:
                    before, self._placement = self._placement, None
                self.runtime.sleep(pause)
                pause = min(2 * pause, longest)
                if code and before is not None:
                    ended |= _pids(before) - _pids(self.placement())
                if len(ended) >= DEATHS_MAX:
                    raise CodeFailed(
                        f"{len(ended)} containers ended while they ran {code!r}",
                        hint="mend the function, or give the pond more memory; containers' logs are under the root",
                    ) from None


def _receipt(message: Stage, staged: Sequence[StageDone], times: npt.NDArray[np.int64], late: int) -> Receipt:
    digest = sum(answer.digest for answer in staged)
    return receipt_of(message.partition, times, late, digest, attempt=message.attempt)


def _pids(placement: Placement) -> set[int]:
    return {info.pid for info in placement.containers}


def _parts(rows: int, nbytes: int, rows_max: int) -> list[tuple[int, int]]:
    """Cuts rows of so many bytes in all into spans that each fit a batch."""
    step = _rows_of(rows, nbytes, rows_max)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _rows_of(rows: int, nbytes: int, rows_max: int) -> int:
    """How many of so many rows, of so many bytes in all, fit a batch."""
    return max(1, min(rows_max, rows * BYTES_MAX // max(nbytes, 1)))
