"""A Pond as its users see it."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from millpond.client.client import Client
from millpond.errors import BadOption, UnknownState
from millpond.pond.state import State
from millpond.rules import CompactRule, UpdateRule, keep_latest, put
from millpond.schema import check_key_types, format_ddl, parse_ddl
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
        update: UpdateRule | None = None,
        compact: CompactRule | None = None,
    ) -> State:
        """The State of that name; made if the pond has none yet. `key` and `value` are DDL strings.

        Without `key` and `value` the State must exist. A State that exists must have the schema asked for.
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
        _check_rule("update", update, UpdateRule, "mp.put()")
        _check_rule("compact", compact, CompactRule, "mp.keep_latest()")
        key_schema = parse_ddl(key, "key")
        check_key_types(key_schema)
        spec = StateSpec(
            name=name,
            key=format_ddl(key_schema),
            value=format_ddl(parse_ddl(value, "value")),
            update=update or put(),
            compact=compact or keep_latest(),
        )
        self._client.call(OpenState(spec))
        return State(self._client, spec)

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


def _check_rule(option: str, rule: object, kind: type, example: str) -> None:
    if rule is not None and not isinstance(rule, kind):
        raise BadOption(
            f"{option}={rule!r} is not a rule for {option}",
            hint=f"for example {option}={example}",
            option=option,
        )
