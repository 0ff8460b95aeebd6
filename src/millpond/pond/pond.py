"""A Pond as its users see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from msgspec.structs import replace

from millpond.client.client import Client
from millpond.client.link import Link
from millpond.code.rules import (
    CompactRule,
    UpdateRule,
    compact_rule,
    keep_latest,
    net_edges,
    put,
    update_rule,
)
from millpond.code.tables import TableSpec
from millpond.errors import BadOption, UnknownResident, unknown_state, unknown_table
from millpond.ops.flow import Flow
from millpond.ops.transactions import Transactions
from millpond.pond.figures import Metrics, as_metrics, exposition
from millpond.pond.scaling import await_moves, check_at_least_one, slice_ids
from millpond.pond.state import State
from millpond.pond.table import Table, default_row
from millpond.schema import check_key_types, format_ddl, parse_ddl
from millpond.stores.ruleset import check_rules, warn_if_interpreted
from millpond.times import parse_duration
from millpond.wire.base import check_name, check_query
from millpond.wire.figures import AskMetrics, AskSlice
from millpond.wire.groups import GroupSpec
from millpond.wire.house import CheckpointAll, ContainerInfo, Forget, Locate, OpenResident, Placement
from millpond.wire.moves import AskMoves, Autoscale, CancelMoves, MoveInfo, MoveSlices, Rebalance, Scale
from millpond.wire.states import StateSpec


class Owner(Protocol):
    """Whatever must end with the pond: its coordinator and containers, if this process runs them."""

    def close(self) -> None: ...


class Pond:
    """Everything under one root. Made by `mp.open` or `mp.connect`; closes as a context manager or by `close()`."""

    def __init__(self, client: Client, address: str, owner: Owner | None = None, spark: Any = None) -> None:
        self._client = client
        self._owner = owner
        self.address = address
        self.spark = spark

    @property
    def link(self) -> Link | None:
        """By what tasks reach the pond."""
        return self._client.link

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
        self._client.call(OpenResident(spec))
        return State(self._client, spec)

    def table(
        self,
        name: str,
        key: str | None = None,
        value: str | None = None,
        default: Mapping[str, Any] | None = None,
        *,
        group: str = "tables",
    ) -> Table:
        """The table of that name, for transactions; made if the pond has none yet. `key` and `value` are DDL strings.

        A key that has no row reads `default`, a value for each column; without a default, reading it aborts the
        transaction. Tables of one group live together in one container, and may take part in the same
        transactions; another group may live in another container. Without `key` and `value` the table must exist.
        """
        check_name(name, "the table")
        if key is None and value is None and default is None:
            return self._existing_table(name)
        if key is None or value is None:
            raise BadOption(
                f"table {name!r} needs both key= and value=",
                hint="give both, or neither and no default to get a table as it is",
                option="key" if key is None else "value",
            )
        columns = TableSpec(key, value).columns
        spec = TableSpec(key, value, default_row(columns, default))
        canonical = replace(spec, key=format_ddl(spec.keys), value=format_ddl(spec.columns))
        self._client.call(OpenResident(GroupSpec(check_name(group, "the group"), None, {name: canonical})))
        return self._existing_table(name)

    def tables(self) -> dict[str, Table]:
        """All tables by name."""
        tables = {
            name: Table(self._client, spec, name)
            for spec in self._client.specs(GroupSpec).values()
            for name in spec.tables
        }
        return dict(sorted(tables.items()))

    def transactions(
        self,
        name: str,
        tables: Sequence[Table | str],
        kinds: Mapping[str, Callable[..., Any]],
        *,
        kind: str = "type",
        at: str = "ts",
        seq: str | None = None,
        delay: str | int | timedelta | None = None,
        late: str | Callable[[Any, int], Any] = "output",
        limit: str | float | timedelta | None = None,
        memory: str | int | None = None,
        history: str = "continue",
    ) -> Transactions:
        """An operator `(rows, epoch)` that runs each event as a transaction, exactly once.

        `kinds` are the functions by the value of the column `kind`; with one function the column may be missing.
        The events of an epoch run as if one after the other in the order of the columns `at` and `seq`. With a
        `delay` they wait in the pond until the newest `at` is so far ahead of them, and run in that order across epochs.
        Events below the watermark, the newest `at` of the epochs before less the delay, are late: their outputs have
        the reason "late"; with `late="drop"` they have none, with `late="error"` the epoch is refused, and a function gets them
        as `(rows, epoch)`. An epoch whose events run for longer than `limit`, or for which their container
        takes more than `memory`, is refused, and the error names the event. `name` is the operator's, for ever: the same name continues where it stopped; `history` as for
        `State.update`.
        """
        if isinstance(tables, str | Table):
            tables = [tables]
        names = [table.name if isinstance(table, Table) else str(table) for table in tables]
        specs = self._client.specs(GroupSpec).values()
        groups = {table: spec for spec in specs for table in spec.tables}
        for table in names:
            if table not in groups:
                raise unknown_table(table, groups)
        found = {groups[table].name for table in names}
        if len(found) != 1:
            raise BadOption(
                f"transactions {name!r} need tables of one group, not of {', '.join(sorted(found)) or 'none'}",
                hint="tables that one transaction touches are made with the same group=",
                option="tables",
            )
        group = groups[names[0]]
        return Transactions(
            self._client,
            group,
            name,
            names,
            kinds,
            kind=kind,
            at=at,
            seq=seq,
            delay=delay,
            late=late,
            limit=limit,
            memory=memory,
            history=history,
        )

    def flow(self, name: str) -> Flow:
        """Several sources, updates and fetches as one streaming query with one checkpoint: see `Flow`."""
        return Flow(self._client, check_name(name, "the flow"))

    def states(self) -> dict[str, State]:
        """All States by name."""
        return {
            name: State(self._client, spec) for name, spec in sorted(self._client.specs(StateSpec).items())
        }

    def containers(self) -> list[ContainerInfo]:
        """The containers that serve now: id, pid, address, slices."""
        return list(self._locate().containers)

    def placement(self) -> dict[int, int]:
        """Which container serves each slice: `{slice: container id}`."""
        return dict(enumerate(self._locate().owners))

    def move(self, slices: int | Collection[int], to: int, *, progress: bool | None = None) -> list[MoveInfo]:
        """Has container `to` serve these slices, while queries go on. Returns when it does.

        Interrupted, it goes on by itself; `cancel_moves` ends it. `progress` shows a bar, by default on a terminal.
        """
        asked = self._client.call(MoveSlices(slice_ids(slices), to))
        return await_moves(self._client, asked, "moving slices", progress)

    def scale(
        self, containers: int | None = None, threads: int | None = None, *, progress: bool | None = None
    ) -> None:
        """Changes the number of containers, and of the threads of each, while queries go on.

        Returns when the slices are shared out evenly: as few as it takes move. Threads need no slice to move.
        Interrupted, it goes on by itself. `progress` shows a bar, by default on a terminal.
        """
        check_at_least_one("containers", containers)
        check_at_least_one("threads", threads)
        if containers is None and threads is None:
            raise BadOption("scale changes nothing", hint="give containers= or threads=", option="containers")
        asked = self._client.call(Scale(containers, threads))
        if containers is not None:
            await_moves(self._client, asked, f"scaling to {containers}", progress, scaling=True)

    def rebalance(self, by: str = "cpu", *, progress: bool | None = None) -> list[MoveInfo]:
        """Moves hot slices from containers with much load to those with little, while queries go on: the hottest first.

        `by` is what counts: "cpu" (time spent on slices of late), "rows" (updated and fetched) or "bytes" (held). Moves
        under way go on. Nothing moves where that would make the loads no more even, or where there is no memory for it: the
        log says so. Returns the moves, done. Interrupted, they go on by themselves.
        """
        choices: tuple[Literal["cpu", "rows", "bytes"], ...] = ("cpu", "rows", "bytes")
        for choice in choices:
            if by == choice:
                asked = self._client.call(Rebalance(choice))
                return await_moves(self._client, asked, "rebalancing", progress)
        raise BadOption(f"by={by!r} is not a choice", hint=f"one of {', '.join(choices)}", option="by")

    def autoscale(
        self,
        containers: tuple[int, int] | None,
        *,
        busy: tuple[float, float] = (0.2, 0.75),
        hold: str | float | timedelta = "30 seconds",
    ) -> None:
        """Lets the pond change the number of its containers by itself, between two bounds; `None` ends that.

        One more comes when containers' processors are busy for more than the higher share `busy` for as long as `hold`; one
        goes when they are less than the lower one for three times as long, and those that are left would do. Slices go from
        a container that has much more load than the others. It ends with the pond.
        """
        if containers is None:
            self._client.call(Autoscale())
            return
        if not isinstance(containers, tuple | list) or len(containers) != 2:
            raise BadOption(
                f"containers={containers!r} is not the fewest and the most that there may be",
                hint="for example pond.autoscale(containers=(1, 8)); None ends it, pond.scale(containers=3) sets a number",
                option="containers",
            )
        low, high = containers
        check_at_least_one("containers", low)
        check_at_least_one("containers", high)
        hold_s = float(hold) if isinstance(hold, int | float) else parse_duration(hold) / 1e6
        if low > high or not 0 <= busy[0] < busy[1] <= 1 or hold_s <= 0:
            raise BadOption(
                f"containers={containers!r}, busy={busy!r} and hold={hold!r} are no limits",
                hint='for example containers=(1, 8), busy=(0.2, 0.75), hold="30 seconds"',
                option="containers",
            )
        self._client.call(Autoscale(low, high, *busy, hold_s))

    def moves(self) -> list[MoveInfo]:
        """Moves of slices that are under way, and the last that are over: from where to where, how far, how long still."""
        return self._client.call(AskMoves()).moves

    def cancel_moves(self) -> None:
        """Ends the moves that are under way. Slices that have not been switched yet stay where they are."""
        self._client.call(CancelMoves())

    def metrics(self) -> Metrics:
        """Figures of the coordinator, of each container, State, group of tables and slice, and progress.

        Counts only grow, until a container begins anew or a slice moves: who asks twice works out rates, from `up_s`.
        """
        return as_metrics(self._client.call(AskMetrics()))

    def metrics_text(self) -> str:
        """The same figures as Prometheus reads them."""
        return exposition(self.metrics())

    def slice_metrics(self, number: int) -> dict[str, dict[str, float]]:
        """What one slice holds and has done, by the name of the State or group."""
        return self._client.call(AskSlice(number)).residents

    def revoke(self) -> None:
        """Issues `client.pem` and `client.read.pem` under the root anew, where the pond is reached by TLS.

        Whoever has no more than an earlier copy is let in no more, and their connections end. Only the process that opened
        the pond can do this; tokens stay as they are.
        """
        revoke = getattr(self._owner, "revoke", None)
        if revoke is None:
            raise BadOption(
                "only the process that opened the pond can revoke certificates",
                hint="call pond.revoke() there, or open the pond anew: certificates are good for one opening",
                option="revoke",
            )
        revoke()

    def checkpoint(self) -> None:
        """Snapshots what changed and truncates the logs, now. Happens by itself as the logs grow."""
        self._client.call(CheckpointAll())

    def forget(self, what: State | Table | str, name: str | None = None, query: str | None = None) -> None:
        """Lets go of a State or a table, with all that it holds; what the pond remembers of it has an end.

        With `name`, of an updater, fetcher or transactions operator of it: it holds U and F back no longer, rows that
        wait for it are dropped, and what it did stays. With `query`, too, only of that query of the operator. An
        operator that is built and used again begins as a new one.
        """
        if query is not None and name is None:
            raise BadOption("query= is a query of an operator", hint="give its name=, too", option="query")
        if query is not None:
            check_query(query)
        if name is not None:
            check_name(name, "the operator")
        resident, table = self._found(what).place if isinstance(what, str) else what.place
        self._client.call(Forget(resident, name, query, table if name is None else None))

    def _found(self, name: str) -> State | Table:
        """What has that name; no matter which it is, but it must be one."""
        check_name(name, "the state or table")
        states, tables = self.states(), self.tables()
        found = [of_kind[name] for of_kind in (states, tables) if name in of_kind]
        if len(found) > 1:
            raise BadOption(
                f"{name!r} is a State and a table",
                hint=f"say which: pond.forget(pond.state({name!r})), or pond.table",
                option="what",
            )
        if not found:
            known = ", ".join(sorted({*states, *tables})) or "none yet"
            raise UnknownResident(
                f"there is no {name!r} in this pond", hint=f"it holds: {known}", resident=name
            )
        return found[0]

    def _locate(self) -> Placement:
        return self._client.call(Locate())

    def _existing_table(self, name: str) -> Table:
        tables = self.tables()
        if name not in tables:
            raise unknown_table(name, tables)
        return tables[name]

    def _existing(self, name: str) -> State:
        states = self.states()
        if name not in states:
            raise unknown_state(name, states)
        return states[name]
