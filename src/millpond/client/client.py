"""A connection to a pond: its coordinator, and through it all containers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from msgspec.structs import replace

from millpond.client.routing import ContainerRows, arrange, counts_of, in_order_asked, route, split
from millpond.client.runs import Runs
from millpond.durable.files import Files
from millpond.errors import BadOption, CodeFailed, MessageTooLarge, Moved, Unavailable
from millpond.runtime import Runtime, Threads
from millpond.stores.keys import Keys
from millpond.stores.rows import spread
from millpond.wire.base import Ask, Call, Read, SliceId
from millpond.wire.connection import Connection, Dialer, SlicedBatch
from millpond.wire.epochs import EpochCommitted, Stage, StageDone
from millpond.wire.house import ListResidents, Locate, Placement
from millpond.wire.questions import Pinned, ResidentProgress
from millpond.wire.specs import Spec

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
BYTES_MAX = 32 << 20
_T = TypeVar("_T")
R = TypeVar("R")
S = TypeVar("S", bound=Spec)
M = TypeVar("M", bound=Ask[Any] | Read)


class Routed(NamedTuple):
    """Rows for each container; row i of those that were routed is at `places[i]` of them in slice order."""

    places: npt.NDArray[np.int64]
    portions: list[ContainerRows]


class Client:
    """Safe to share between threads. Retries what is safe to retry: nothing that is asked here takes effect twice."""

    def __init__(
        self,
        coordinator: Connection,
        dial: Dialer,
        runtime: Runtime | None = None,
        link: Link | Callable[[], Link] | None = None,
        files: Files | None = None,
    ) -> None:
        self._link = link
        self.files = files
        """Where the root is; None for the disk of this machine."""
        self.runtime = runtime or Threads(threads=8, name="millpond-client")
        self.runs = Runs()
        self._coordinator = coordinator
        self._dial = dial
        self._lock = self.runtime.lock()
        self._placement: Placement | None = None
        # The last one: the coordinator tells what has changed since.
        self._known: Placement | None = None
        self._connections: dict[str, Connection] = {}
        self._closed = False
        # How many questions at once, by resident and answers, where these have no fixed width.
        self._rows_max: dict[tuple[str, pa.Schema], int] = {}
        # By resident, when it was born and how many of its epochs are known to be visible: both only grow.
        self._seen: dict[str, tuple[int, int]] = {}

    @property
    def link(self) -> Link | None:
        """By what tasks reach the pond; made when it is first asked for."""
        if callable(self._link):
            self._link = self._link()
        return self._link

    def call(self, message: Call[R]) -> R:
        """Asks the coordinator."""
        self._check_open()
        reply = self._coordinator.call(message)
        if isinstance(reply, ResidentProgress | Pinned | EpochCommitted):
            name: str = message.resident  # type: ignore[attr-defined]
            with self._lock:
                self._seen[name] = max((reply.born, reply.seen), self._seen.get(name, (0, 0)))
        return reply

    def _seeing(self, message: M) -> M:
        """The same, with what whoever answers it must have seen: what this client was told is there."""
        known = self._seen.get(message.resident, (0, 0))
        if known <= (message.born, message.seen):
            return message
        return replace(message, born=known[0], seen=known[1])

    def specs(self, kind: type[S]) -> dict[str, S]:
        """The residents of a kind by name."""
        listed = self.call(ListResidents(kind.kind)).residents
        return {spec.name: cast(S, spec) for spec in listed}

    def placement(self, version: int = 0) -> Placement:
        """Who serves which slice, as far as this client knows, but not as of an older version than that.

        Nobody waits while it asks, but those who ask.
        """
        self._check_open()
        placement = self._placement
        if placement is not None and placement.version >= version:
            return placement
        before = dict(self._seen)
        placement = self._located()
        with self._lock:
            # Those that were forgotten are none any more: but for what was learnt meanwhile, these are all.
            since = {name: seen for name, seen in self._seen.items() if seen != before.get(name)}
            self._seen = {
                **placement.seen,
                **{n: max(seen, placement.seen.get(n, (0, 0))) for n, seen in since.items()},
            }
            if self._placement is not None and self._placement.version > placement.version:
                return self._placement
            self._placement = self._known = placement
            # Connections to containers that have ended are let go.
            serving = {info.address for info in placement.containers}
            self._connections = {
                address: connection for address, connection in self._connections.items() if address in serving
            }
        return placement

    def _located(self) -> Placement:
        known = self._known
        if known is not None:
            news = self._coordinator.call(Locate(known.version))
            if news.since is None:
                return news
            if news.landmark == known.landmark:
                return news.completed(known)
        # Another opening of the pond counts for itself.
        return self._coordinator.call(Locate())

    def stage(
        self,
        message: Stage,
        schema: pa.Schema,
        keys: Keys,
        longs: Sequence[npt.NDArray[np.int64]],
        columns: Sequence[pa.Array],
        version: int = 0,
    ) -> int:
        """Sends a partition's rows to the owners of their slices; every container hears of the attempt.

        The columns of a row are its key, `longs` and `columns`; owners are as of that version, or a later one. Returns the
        rows' digest.
        """
        keys = keys.hashed()
        spans = _parts(len(keys), keys.nbytes + sum(column.nbytes for column in columns), ROWS_MAX)

        def send() -> list[StageDone]:
            placement = self.placement(version)
            batches: dict[int, list[SlicedBatch]] = {container: [] for container in placement.owners}
            for start, stop in spans:
                own, rest = (
                    [long[start:stop] for long in longs],
                    [c.slice(start, stop - start) for c in columns],
                )
                routed = self._routed(placement, schema, keys.part(start, stop), own, rest)
                for portion in routed.portions:
                    batches[portion.container].append(portion.rows)
            return self.runtime.map(
                lambda item: self._connection(placement, item[0]).exchange(message, item[1]).message,
                list(batches.items()),
            )

        return sum(staged.digest for staged in self._retry(send))

    def stage_home(self, message: Stage, home: SliceId, rows: pa.Table, version: int = 0) -> int:
        """Sends a partition's rows to the container that has their home slice, as of that version or a later one.

        Returns their digest.
        """
        spans = _parts(len(rows), rows.nbytes, ROWS_MAX)
        parts = [batch for start, stop in spans for batch in rows.slice(start, stop - start).to_batches()]

        def send(connection: Connection, slices: int) -> StageDone:
            sliced = [SlicedBatch(batch, counts_of(home, slices, batch.num_rows)) for batch in parts]
            return connection.exchange(message, sliced).message

        return self._at_home(home, send, version).digest

    def ask(
        self,
        message: Ask[Any],
        asked: pa.Schema,
        keys: Keys,
        longs: Sequence[npt.NDArray[np.int64]],
        answers: pa.Schema,
        code: str = "",
    ) -> list[pa.ChunkedArray]:
        """Asks about keys; the columns of a question are its key and `longs`, as `asked` names them.

        The answers, one column each, in the order of the questions. `code` names the user's, if the message brings it.
        """
        keys = keys.hashed()
        asking = (message.resident, answers)

        def ask(start: int, stop: int) -> list[pa.Array]:
            own = [long[start:stop] for long in longs]
            placement = self.placement()
            routed = self._routed(placement, asked, keys.part(start, stop), own, [])
            return in_order_asked(
                routed.portions, self._exchange_all(placement, message, routed.portions), routed.places
            )

        fixed = all(pa.types.is_primitive(field.type) for field in answers)
        parts: list[list[pa.Array]] = []
        done = 0
        while done < len(keys):
            rows_max = self._rows_max.get(asking, ROWS_MAX if fixed else WIDE_ROWS_MAX)
            stop = min(len(keys), done + _rows_of(len(keys), keys.nbytes, rows_max))
            try:
                parts.append(self._retry(partial(ask, done, stop), code))
            except MessageTooLarge:
                # Answers may be wider than any before: half as many questions.
                if stop - done == 1:
                    raise
                self._rows_max[asking] = max(1, (stop - done) // 2)
                continue
            if not fixed:
                self._learn(asking, parts[-1], stop - done)
            done = stop
        return [pa.chunked_array([part[i] for part in parts], field.type) for i, field in enumerate(answers)]

    def ask_each(self, message: Ask[Any], asked: pa.Schema, keys: Keys) -> list[pa.RecordBatch]:
        """Asks about keys, of which each may have any number of answers. What the containers say, in no order."""
        keys = keys.hashed()

        def ask() -> list[pa.RecordBatch]:
            placement = self.placement()
            routed = self._routed(placement, asked, keys, [], [])
            return self._exchange_all(placement, message, routed.portions)

        return self._retry(ask)

    def _learn(self, asking: tuple[str, pa.Schema], answers: Sequence[pa.Array], rows: int) -> None:
        """How many rows to ask at once, by the size of what they were answered; twice as many as before at most."""
        width = max(1, sum(column.nbytes for column in answers) // rows)
        fitting = max(1, min(ROWS_MAX, BYTES_MAX // width))
        self._rows_max[asking] = min(fitting, 2 * self._rows_max.get(asking, fitting))

    def _routed(
        self,
        placement: Placement,
        schema: pa.Schema,
        keys: Keys,
        longs: Sequence[npt.NDArray[np.int64]],
        columns: Sequence[pa.Array],
    ) -> Routed:
        routed = route(keys, placement.slices)
        arranged = [
            keys.spread(routed.places).to_arrow(),
            *(pa.array(spread(long, routed.places)) for long in longs),
            *arrange(columns, routed.places),
        ]
        return Routed(routed.places, split(routed, schema, arranged, placement))

    def _exchange_all(
        self, placement: Placement, message: Ask[Any], portions: Sequence[ContainerRows]
    ) -> list[pa.RecordBatch]:
        seeing = self._seeing(message)

        def ask(portion: ContainerRows) -> pa.RecordBatch:
            connection = self._connection(placement, portion.container)
            batch = connection.exchange(seeing, [portion.rows]).batch
            assert batch is not None
            return batch

        return self.runtime.map(ask, portions)

    def exchange_slices(
        self,
        message: Ask[R],
        rows: Callable[[list[SliceId], int], SlicedBatch],
        slices: Sequence[SliceId],
    ) -> list[tuple[R, pa.RecordBatch]]:
        """What the owners of these slices answer to rows, which `rows` gives for those of one of them, of so many slices."""

        def ask() -> list[tuple[R, pa.RecordBatch]]:
            placement = self.placement()
            wanted: dict[int, list[SliceId]] = {}
            for number in slices:
                wanted.setdefault(placement.owners[number], []).append(number)

            def ask_one(item: tuple[int, list[SliceId]]) -> tuple[R, pa.RecordBatch]:
                own = rows(item[1], placement.slices)
                answer = self._connection(placement, item[0]).exchange(self._seeing(message), [own])
                assert answer.batch is not None
                return answer.message, answer.batch

            return self.runtime.map(ask_one, list(wanted.items()))

        return self._retry(ask)

    def ask_home(self, message: Ask[Any], home: SliceId, rows: pa.RecordBatch) -> pa.Table:
        """Asks the container that has a home slice: in halves, where all at once are too many."""

        def ask(connection: Connection, slices: int) -> pa.RecordBatch | None:
            sliced = SlicedBatch(rows, counts_of(home, slices, rows.num_rows))
            return connection.exchange(self._seeing(message), [sliced]).batch

        try:
            batch = self._at_home(home, ask)
        except MessageTooLarge:
            half = rows.num_rows // 2
            if half == 0:
                raise
            return pa.concat_tables(
                self.ask_home(message, home, part) for part in (rows.slice(0, half), rows.slice(half))
            )
        assert batch is not None
        return pa.Table.from_batches([batch])

    def read_home(self, message: Read, home: SliceId) -> pa.Table:
        """What the container that has a home slice answers."""
        return self._at_home(home, lambda connection, _: connection.read(self._seeing(message)))

    def read(self, message: Callable[[list[SliceId]], Read], slices: Sequence[int] | None = None) -> pa.Table:
        """What all containers answer: each is asked, by a message of its own, about its part of all slices or of these."""

        def ask() -> pa.Table:
            placement = self.placement()
            wanted: dict[int, list[SliceId]] = {}
            for number in range(placement.slices) if slices is None else slices:
                wanted.setdefault(placement.owners[number], []).append(SliceId(number))
            return pa.concat_tables(
                self.runtime.map(
                    lambda item: self._connection(placement, item[0]).read(self._seeing(message(item[1]))),
                    list(wanted.items()),
                )
            )

        return self._retry(ask)

    def _at_home(self, home: SliceId, ask: Callable[[Connection, int], _T], version: int = 0) -> _T:
        """Asks the container that serves a slice of so many."""

        def work() -> _T:
            placement = self.placement(version)
            return ask(self._connection(placement, placement.owners[home]), placement.slices)

        return self._retry(work)

    def ask_any(self, first: int, ask: Callable[[Connection], _T]) -> _T:
        """Asks a container, whichever: by the number `first`, and the next one where that is away."""
        numbers = count(first)

        def work() -> _T:
            placement = self.placement()
            if not placement.containers:
                raise Unavailable("no container is up", hint="try again in a moment", address="")
            info = placement.containers[next(numbers) % len(placement.containers)]
            return ask(self._connection(placement, info.id))

        return self._retry(work)

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
            raise Unavailable(
                placement.away.get(container) or f"container {container} is not up",
                hint=f"container-{container}.log under the pond's root tells how it ended",
                address="",
            )
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


def _pids(placement: Placement) -> set[int]:
    return {info.pid for info in placement.containers}


def _parts(rows: int, nbytes: int, rows_max: int) -> list[tuple[int, int]]:
    """Cuts rows of so many bytes in all into spans that each fit a batch."""
    step = _rows_of(rows, nbytes, rows_max)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _rows_of(rows: int, nbytes: int, rows_max: int) -> int:
    """How many of so many rows, of so many bytes in all, fit a batch."""
    return max(1, min(rows_max, rows * BYTES_MAX // max(nbytes, 1)))
