"""A program as its users see it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec

from millpond.client.client import Client
from millpond.errors import BadOption
from millpond.ops.direct import DirectReads
from millpond.ops.direct_writes import RESULT, DirectWrites, as_name, column_of, operator_name
from millpond.ops.program import ProgramCall
from millpond.programs.entries import entries_in, field_specs, name_since, place_of, value_of
from millpond.programs.graph import BY_COLUMN, Graph, Method, across
from millpond.programs.rows import ONCE
from millpond.wire.base import check_name
from millpond.wire.epochs import AskTurns
from millpond.wire.programs import ProgramSpec, ReadEntries
from millpond.wire.questions import AskProgress, ResidentProgress

# How often one looks whether containers have heard of a migration.
LOOK_S = 0.01


class Program:
    """A program by its name: `call` makes operators of its methods."""

    def __init__(self, client: Client, spec: ProgramSpec, graph: Graph) -> None:
        self._client = client
        self._spec = spec
        self.graph = graph
        self._code = msgspec.msgpack.encode(graph)
        self.version = graph.version
        """Of this code: `versions` tells which one ran an epoch."""
        self._reads = DirectReads(client, spec, self._code, graph)
        self._direct: dict[tuple[str, bool], DirectWrites] = {}
        self._lock = client.runtime.lock()

    @property
    def name(self) -> str:
        return self._spec.name

    @property
    def place(self) -> tuple[str, None]:
        return self._spec.name, None

    def __repr__(self) -> str:
        return f"<program {self.name}: {', '.join(method.name for method in self.graph.methods)}>"

    def call(
        self,
        method: str,
        *,
        name: str | None = None,
        into: str | None = None,
        limit: str | float | timedelta | None = None,
        memory: str | int | None = None,
        history: str = "continue",
        **columns: str,
    ) -> ProgramCall:
        """An operator `(rows, epoch)` that calls a method with each row, exactly once.

        `columns` say by which columns the method's parameters are given, as in `user="user_id"`; one that has the parameter's
        own name need not be told, and one with a default may be left out. The rows come back with what was returned in the
        column `into`. `limit` and `memory` are what the calls of an epoch may take in a container. `name` is the operator's, for
        ever: the method's, if none is given; `history` as for `State.update`.
        """
        found = self._method(method)
        return ProgramCall(
            self._client,
            self._spec,
            self._code,
            found,
            as_name(found.name) if name is None else name,
            _arguments(found, columns),
            into=into,
            limit=limit,
            memory=memory,
            history=history,
            version=self.version,
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the program, to be called directly: see `ask`."""
        methods = [method.name for method in self.graph.methods]
        if name.startswith("_") or name not in methods:
            raise AttributeError(
                f"a program has no attribute {name!r}, and {self._spec.name!r} no such method: it has {', '.join(methods)}"
            )
        return partial(self.ask, name)

    def ask(self, method: str, /, *values: Any, idempotency_key: str | None = None, **arguments: Any) -> Any:
        """Calls a method directly: `program.ask("get_rec", user=7)`, or `program.get_rec(user=7)`.

        A method that only reads sees what whole epochs left, all of it of one state. One that writes is durable when this
        returns: calls of several threads are committed together. What a call with an `idempotency_key` did is done once
        however often it is called, by any process: a key is remembered for a quarter of an hour, and for longer while it is
        among the program's last 20,000. `Rejected` if the program turns it away.
        """
        found = self._method(method)
        names = [parameter.name for parameter in found.parameters]
        if len(values) > len(names) or set(names[: len(values)]) & set(arguments):
            raise BadOption(
                f"{method} takes ({', '.join(names)})", hint="give each argument once", option="arguments"
            )
        arguments = {**dict(zip(names, values, strict=False)), **arguments}
        if found.read_only:
            return self._reads.call(found, arguments)
        return self._writes(found, once=idempotency_key is not None).call(arguments, idempotency_key)

    def _writes(self, method: Method, *, once: bool) -> DirectWrites:
        with self._lock:
            if (method.name, once) not in self._direct:
                call = ProgramCall(
                    self._client,
                    self._spec,
                    self._code,
                    method,
                    operator_name(method.name),
                    {parameter.name: column_of(parameter.name) for parameter in method.parameters},
                    into=None if method.returns is None else RESULT,
                    history="shared",
                    once=ONCE if once else None,
                    version=self.version,
                )
                self._direct[method.name, once] = DirectWrites(self._client, call, method, once=once)
            return self._direct[method.name, once]

    def close(self) -> None:
        """Lets go of what the pond remembers of this process's direct calls. Closing the pond does it, too."""
        with self._lock:
            direct, self._direct = list(self._direct.values()), {}
        for writes in direct:
            writes.close()

    def progress(self) -> ResidentProgress:
        """Which operators there are (`updaters`), and how many epochs are visible (`seen`)."""
        return self._client.call(AskProgress(self._spec.name))

    def versions(self, name: str, query: str | None = None) -> dict[int, str]:
        """Which version of the code ran the last epochs of the operator of that name: by their numbers, 64 at most.

        Of the query that began last, or the one that is named. The pond remembers it, also of processes that are gone.
        """
        code = self._client.call(AskTurns(self.name, name)).code
        turns = list(code.values())[-1:] if query is None else [code.get(query, [])]
        return {turn.number: version for found in turns for turn, version in found}

    def entries(self, field: str) -> dict[Any, Any]:
        """What a field holds: its entries by key, of a partial one those of each lane by its number. For tests and a look.

        Each slice is as whole epochs left it; epochs that are decided meanwhile may be in some of them and not in others.
        """
        while True:
            # It may have been migrated since this process got it.
            fields = self._client.specs(ProgramSpec).get(self.name, self._spec).fields
            spec = fields.get(field)
            if spec is None:
                known = ", ".join(fields)
                raise BadOption(
                    f"program {self.name!r} has no field {field!r}", hint=f"it has: {known}", option="field"
                )
            rows = self._client.read(lambda slices: ReadEntries(self.name, field, slices))
            if set(rows.column("field").unique().to_pylist()) <= {name_since(field, spec)}:
                break
            self._client.runtime.sleep(LOOK_S)
        lanes: dict[int, dict[Any, Any]] = {}
        for batch in rows.to_batches():
            for entry in entries_in(batch):
                value = value_of(spec, entry)
                shown = value.tolist() if spec.element == "dense" else value
                lanes.setdefault(entry.lane, {})[place_of(spec, entry)] = shown
        ordered = {lane: dict(sorted(found.items())) for lane, found in sorted(lanes.items())}
        if spec.kind == "partial":
            return ordered
        whole: dict[Any, Any] = next(iter(ordered.values()), {})
        return across(whole) if spec.key == BY_COLUMN else whole

    def _method(self, name: str) -> Method:
        for method in self.graph.methods:
            if method.name == name:
                return method
        known = ", ".join(method.name for method in self.graph.methods)
        raise BadOption(
            f"program {self.name!r} has no method {name!r}", hint=f"it has: {known}", option="method"
        )


def program_spec(name: str, graph: Graph) -> ProgramSpec:
    return ProgramSpec(name=check_name(name, "the program"), lanes=graph.lanes, fields=field_specs(graph))


def graph_of(program: Any) -> Graph:
    """The graph of a class that is a program."""
    graph = program if isinstance(program, Graph) else getattr(program, "__millpond_graph__", None)
    if not isinstance(graph, Graph):
        raise BadOption(
            f"{program!r} is no program", hint="put @mp.program above the class", option="program"
        )
    return graph


def _arguments(method: Method, columns: dict[str, str]) -> dict[str, str]:
    """By parameter, the column that gives it. Those with a default that are not named are left to it."""
    known = {parameter.name for parameter in method.parameters}
    for name, column in columns.items():
        if name not in known:
            raise BadOption(
                f"{method.name} has no parameter {name!r}",
                hint=f"it has: {', '.join(parameter.name for parameter in method.parameters)}",
                option=name,
            )
        if not isinstance(column, str):
            raise BadOption(
                f"{name}={column!r} is not the name of a column",
                hint=f'for example {name}="{name}"',
                option=name,
            )
    return {
        parameter.name: columns.get(parameter.name, parameter.name)
        for parameter in method.parameters
        if parameter.name in columns or not parameter.optional
    }
