"""Direct calls of a program's methods that only read: the containers that have what they see are asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from millpond.client.client import Client
from millpond.errors import NullKey, Rejected, SchemaMismatch, Unavailable, UnknownUpdater
from millpond.ops.free_tasks import FreeTasks
from millpond.programs.graph import REJECTS, RETURNS, Graph, Method, Task
from millpond.programs.local import bound
from millpond.programs.packing import pack, unpack
from millpond.programs.tokens import Routed, Token, places_of, sliced, slices_of_keys
from millpond.wire.base import SliceId, Turn, operator_of
from millpond.wire.connection import SlicedBatch
from millpond.wire.epochs import AskTurns
from millpond.wire.programs import ProgramSpec, RunTasks

# How long a call waits for a moment at which all that it sees is of one state, and how often it looks.
AGREE_S_MAX = 30.0
AGREE_PAUSE_S = (0.0005, 0.02)
# How long it looks for a state that is no older than one that was seen before, until it asks for one.
OLDER_S_MAX = 0.25
_STATE = list[tuple[str, Turn]]


class DirectReads:
    """Runs a call that only reads from task to task: each is run by the container that has its entries."""

    def __init__(self, client: Client, spec: ProgramSpec, code: bytes, graph: Graph) -> None:
        self._client = client
        self._spec = spec
        self._code = code
        self._free = FreeTasks(graph)
        self._lock = client.runtime.lock()
        # Of each writer the newest turn that was seen: what a client has seen, it sees from then on.
        self._newest: dict[str, Turn] = {}

    def call(self, method: Method, arguments: Mapping[str, Any]) -> Any:
        """What it returns, as whole epochs left the program: all that it saw is of one state."""
        given = checked(method, arguments)
        runtime = self._client.runtime
        began, (pause, longest) = runtime.now(), AGREE_PAUSE_S
        known, spec = self._newest, self._spec
        while True:
            try:
                over, state = self._attempt(spec, method, given)
            except SchemaMismatch:
                # It may have other lanes by now: the same code goes on with these.
                before, spec = spec, self._client.specs(ProgramSpec).get(spec.name, spec)
                if spec == before:
                    raise
                self._spec = spec
                continue
            if over is not None:
                if all(turn >= known.get(writer, turn) for writer, turn in state.items()):
                    self._note(state)
                    break
                # Some have applied an epoch that others are about to.
                if runtime.now() > began + OLDER_S_MAX:
                    self._await_visible(state)
                    known = {}
            if runtime.now() > began + AGREE_S_MAX:
                raise Unavailable(
                    f"epochs of program {self._spec.name!r} are under way all the time: {method.name} did not see one state",
                    hint="try again, or ask by call(), as an epoch of its own",
                    address="",
                )
            runtime.sleep(pause)
            pause = min(2 * pause, longest)
        if over.task == REJECTS:
            reason = str(unpack(over.values, ["string"])[0])
            raise Rejected(reason, reason=reason)
        return unpack(over.values, [method.returns or "long"])[0]

    def _note(self, state: Mapping[str, Turn]) -> None:
        with self._lock:
            before = self._newest
            if any(writer not in before or turn > before[writer] for writer, turn in state.items()):
                newest = {writer: max(turn, before.get(writer, turn)) for writer, turn in state.items()}
                self._newest = {**before, **newest}

    def _await_visible(self, state: Mapping[str, Turn]) -> None:
        """What is seen after this is new enough: also where writers were forgotten, and began anew."""
        for writer in list(state)[:1]:
            with suppress(UnknownUpdater):
                self._client.call(AskTurns(self._spec.name, operator_of(writer)))
        with self._lock:
            self._newest = {}

    def _attempt(
        self, spec: ProgramSpec, method: Method, given: Mapping[str, Any]
    ) -> tuple[Token | None, dict[str, Turn]]:
        """How the call ended, and where writers stood; None if what it saw is not of one state."""
        routed = self._entering(spec, method, given)
        message = RunTasks(spec.name, self._code, method.name, lanes=spec.lanes)
        seen: set[bytes] = set()
        while True:
            tokens = routed

            def rows(slices: list[SliceId], of: int, tokens: Routed = tokens) -> SlicedBatch:
                return sliced([(number, token) for number, token in tokens if number in slices], of)

            wanted = sorted({number for number, _ in tokens})
            routed = []
            for ran, batch in self._client.exchange_slices(message, rows, wanted):
                seen.update(ran.seen)
                if len(seen) > 1:
                    return None, {}
                *columns, numbers = (column.to_pylist() for column in batch.columns)
                routed += zip(
                    map(SliceId, numbers), (Token(*row) for row in zip(*columns, strict=True)), strict=True
                )
            made = [token for _, token in routed]
            if self._free.can_run(method, made, spec.lanes):
                token, values = self._free.run(method, made)
                made = [token]
                if token.task >= 0:
                    routed = self._routed(spec, method, method.tasks[token.task], values, token)
            for token in made:
                if token.task in (RETURNS, REJECTS):
                    return token, _state_in(seen)

    def _entering(self, spec: ProgramSpec, method: Method, given: Mapping[str, Any]) -> Routed:
        first = method.tasks[0]
        values = [given[variable.name] for variable in first.inputs]
        packed = pack(values, [variable.type for variable in first.inputs])
        number = 0 if first.key is None else self._slice_of(given[first.key])
        return self._routed(spec, method, first, values, Token(0, number, 0, 0, 0, packed))

    def _routed(
        self, spec: ProgramSpec, method: Method, task: Task, values: Sequence[Any], token: Token
    ) -> Routed:
        """A call on its way to a task, by all places where that runs."""
        number = 0
        if task.key is not None:
            key = values[[variable.name for variable in task.inputs].index(task.key)]
            if key is None:
                raise self._free.failed(method, task.line, "a key is None")
            number = self._slice_of(key)
        slices = self._client.placement().slices
        return [(to, token._replace(at=at)) for to, at in places_of(spec, task, number, token.entry, slices)]

    def _slice_of(self, key: Any) -> int:
        [number] = slices_of_keys([key], self._client.placement().slices)
        return number


def _state_in(seen: Collection[bytes]) -> dict[str, Turn]:
    return {writer: turn for each in seen for writer, turn in msgspec.msgpack.decode(each, type=_STATE)}


def checked(method: Method, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call as values of their types. BadOption for what does not fit, NullKey for a first key that is None."""
    given, key = bound(method, arguments), method.tasks[0].key
    if key is not None and given[key] is None:
        raise NullKey(f"{key} of {method.name} is None", hint="a key is not None", column=key, rows=1)
    return given
