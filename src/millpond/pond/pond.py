"""A Pond as its users see it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from millpond.client.client import Client
from millpond.errors import BadOption, UnknownState
from millpond.ops.flow import Flow
from millpond.pond.state import State
from millpond.rules import (
    CompactRule,
    UpdateRule,
    compact_rule,
    keep_latest,
    net_edges,
    put,
    update_rule,
)
from millpond.schema import check_key_types, format_ddl, parse_ddl
from millpond.stores.ruleset import check_rules, warn_if_interpreted
from millpond.wire.messages import (
    AskMetrics,
    Checkpoint,
    ContainerInfo,
    ListStates,
    Locate,
    OpenState,
    Placement,
    StateList,
    StateSpec,
    check_name,
)


class Owner(Protocol):
    """Whatever must end with the pond: its coordinator and containers, if this process runs them."""

    def close(self) -> None: ...


class Pond:
    """Everything under one root. Made by `mp.open` or `mp.connect`; closes as a context manager or by `close()`."""

    def __init__(self, client: Client, address: str, owner: Owner | None = None, spark: Any = None) -> None:
        self._client = client
        self._owner = owner
        self.address = address
        self.link = client.link
        self.spark = spark

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and the pond itself if this process opened it. What was acknowledged stays."""
        self._client.close()
        if self._owner is not None:
            self._owner.close()

    def state(
        self,
        name: str,
        key: str | None = None,
        value: str | None = None,
        update: UpdateRule | Callable[..., Any] | None = None,
        compact: CompactRule | Callable[..., Any] | None = None,
    ) -> State:
        """The State of that name; made if the pond has none yet. `key` and `value` are DDL strings.

        `update` and `compact` are rules: of Millpond, or functions of your own, `(old, new) -> value` and
        `(times, column, ...) -> which to keep`. Without `key` and `value` the State must exist. A State that exists must have the schema asked for.
        """
        check_name(name, "the state")
        if key is None and value is None and update is None and compact is None:
            return self._existing(name)
        if key is None or value is None:
            raise BadOption(
                f"state {name!r} needs both key= and value=",
                hint="give both, or neither and no rules to get a state as it is",
                option="key" if key is None else "value",
            )
        key_schema, value_schema = parse_ddl(key, "key"), parse_ddl(value, "value")
        check_key_types(key_schema)
        updating = put() if update is None else update_rule(update)
        usual = net_edges() if updating.name == "edges" else keep_latest()
        compacting = usual if compact is None else compact_rule(compact)
        check_rules(value_schema, updating, compacting)
        for rule in (updating, compacting):
            warn_if_interpreted(value_schema, rule)
        spec = StateSpec(
            name=name,
            key=format_ddl(key_schema),
            value=format_ddl(value_schema),
            update=updating,
            compact=compacting,
        )
        self._client.call(OpenState(spec))
        return State(self._client, spec)

    def flow(self, name: str) -> Flow:
        """Several sources, updates and fetches as one streaming query with one checkpoint: see `Flow`."""
        return Flow(self._client, check_name(name, "the flow"))

    def states(self) -> dict[str, State]:
        """All States by name."""
        listed: StateList = self._client.call(ListStates())
        return {
            spec.name: State(self._client, spec) for spec in sorted(listed.states, key=lambda spec: spec.name)
        }

    def containers(self) -> list[ContainerInfo]:
        """The containers that serve now: id, pid, address, slices."""
        return list(self._locate().containers)

    def placement(self) -> dict[int, int]:
        """Which container serves each slice: `{slice: container id}`."""
        return dict(enumerate(self._locate().owners))

    def metrics(self) -> dict[str, Any]:
        """Figures of the coordinator, of each container and of each State."""
        figures: dict[str, Any] = msgspec.to_builtins(self._client.call(AskMetrics()))
        del figures["type"]
        return figures

    def checkpoint(self) -> None:
        """Snapshots what changed and truncates the logs, now. Happens by itself as the logs grow."""
        self._client.call(Checkpoint())

    def _locate(self) -> Placement:
        placement: Placement = self._client.call(Locate())
        return placement

    def _existing(self, name: str) -> State:
        states = self.states()
        if name not in states:
            raise UnknownState(
                f"there is no state {name!r} in this pond",
                hint=f"it holds: {', '.join(states) or 'none yet'}; to make one, give key= and value=",
                state=name,
            )
        return states[name]
