"""A Pond as its users see it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, get_args

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
from millpond.code.windows import WindowCode, aggregates_of
from millpond.errors import BadOption, BadType, UnknownResident, unknown_state, unknown_table
from millpond.ops.flow import Flow
from millpond.ops.migration import migrate_program
from millpond.ops.transactions import Transactions
from millpond.ops.window import warn_if_interpreted as warn_of_window
from millpond.pond.dedup import Dedup, dedup_spec
from millpond.pond.figures import Metrics, as_metrics, exposition
from millpond.pond.firing import firing_of
from millpond.pond.join import Join, join_spec
from millpond.pond.program import Program, graph_of, program_spec
from millpond.pond.scaling import autoscale_limits, await_moves, check_at_least_one, container_id, slice_ids
from millpond.pond.state import State
from millpond.pond.table import Table, default_row
from millpond.pond.window import Window
from millpond.programs.cells import warm_up_for
from millpond.programs.migrating import Function, Migration
from millpond.schema import check_key_types, format_ddl, parse_ddl
from millpond.stores.ruleset import check_rules, warn_if_interpreted
from millpond.stores.windows.shape import NO_KEY, check_columns, columns_needed
from millpond.stores.windows.warming import warm_up, warm_up_joins
from millpond.times import parse_duration
from millpond.wire.base import check_name, check_query
from millpond.wire.dedups import DedupSpec
from millpond.wire.figures import AskMetrics, AskSlice
from millpond.wire.groups import GroupSpec
from millpond.wire.house import CheckpointAll, ContainerInfo, Forget, Locate, OpenResident, Placement
from millpond.wire.joins import JoinSpec
from millpond.wire.moves import AskMoves, Autoscale, CancelMoves, MoveInfo, MoveSlices, Rebalance, Scale
from millpond.wire.programs import ProgramSpec
from millpond.wire.states import StateSpec
from millpond.wire.windows import Pattern, WindowSpec

_Spec = TypeVar("_Spec", JoinSpec, DedupSpec, WindowSpec)


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
        self._programs: list[Program] = []

    @property
    def link(self) -> Link | None:
        """By what tasks reach the pond."""
        return self._client.link

    def __repr__(self) -> str:
        return f"<pond at {self.address}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, and the pond itself if this process opened it. What was acknowledged stays."""
        for program in self._programs:
            program.close()
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

    def window(
        self,
        name: str,
        key: str | None = None,
        window: WindowCode | None = None,
        aggregate: Mapping[str, Any] | None = None,
        *,
        value: str | None = None,
        pattern: Pattern | Literal[""] = "",
        lateness: str | int | timedelta = 0,
        emit: Literal["close", "update"] = "close",
        every: str | timedelta | None = None,
    ) -> Window:
        """The window operator of that name; made if the pond has none yet. `key` and `value` are DDL strings.

        `window` says which rows of a key belong together (`mp.tumbling`, `mp.sliding`, `mp.session`, `mp.counted`,
        `mp.everything`, `mp.windows`), `aggregate` what becomes of them, by the column of the results. The types of
        values are those of the first rows unless `value` tells them. How windows are kept follows from both; `pattern`
        overrides that where there is a choice. With the name alone the window must exist.

        A window fires when it closes. It stays for as long as `lateness` after that, and fires again in each epoch that
        brings rows for it. With `emit="update"` it gives its result in each epoch that changes it, too, and when it closes
        only if that is another. With `every="10 seconds"` the same, at most so often by the clock of the driver. Updates of
        sessions have a `session_id` that stays, and take sessions back that became part of others (`retracted`).
        """
        check_name(name, "the window")
        if key is None and window is None and aggregate is None:
            return Window(self._client, self._spec_of(WindowSpec, name))
        if not isinstance(window, WindowCode):
            raise BadOption(
                f"window={window!r} is no window",
                hint='for example window=mp.tumbling("10 seconds")',
                option="window",
            )
        key_schema = parse_ddl(key or NO_KEY, "key")
        check_key_types(key_schema)
        if key and format_ddl(key_schema) == NO_KEY:
            raise BadType(f"the key {NO_KEY!r} is reserved", hint="give the column another name", ddl=key)
        if pattern and pattern not in get_args(Pattern):
            raise BadOption(
                f"pattern={pattern!r} is not a choice", hint='"rmw", "aar" or "aur"', option="pattern"
            )
        values = None if value is None else format_ddl(parse_ddl(value, "value"))
        aggregates = aggregates_of(aggregate)
        window, firing = firing_of(window, lateness, emit, every)
        if value is not None:
            check_columns(window, aggregates, parse_ddl(value, "value").names)
        elif not columns_needed(window, aggregates):
            values = ""
        spec = WindowSpec(
            name=name,
            key=format_ddl(key_schema),
            value=values,
            window=window,
            aggregates=aggregates,
            pattern=pattern,
            lateness=firing.lateness,
            emit=firing.emit,
            every=firing.every,
        )
        warn_of_window(spec)
        if name not in self._client.specs(WindowSpec):
            # Here, once: containers and workers find compiled what they would compile, each for itself, in an epoch.
            warm_up()
        self._client.call(OpenResident(spec))
        return Window(self._client, self._client.specs(WindowSpec)[name])

    def windows(self) -> dict[str, Window]:
        """All window operators by name."""
        specs = self._client.specs(WindowSpec)
        return {name: Window(self._client, spec) for name, spec in sorted(specs.items())}

    def join(
        self,
        name: str,
        key: str | None = None,
        left: str | None = None,
        right: str | None = None,
        *,
        window: WindowCode | None = None,
        between: tuple[str | int | timedelta, str | int | timedelta] | None = None,
    ) -> Join:
        """The join of that name, of two streams; made if the pond has none yet. `key`, `left` and `right` are DDL strings.

        With a `window` (`mp.tumbling`, `mp.sliding`) all rows of a key that fall into the same one are pairs, which come out
        when it ends: `window_start`, `window_end`, the key, the left columns, the right ones. With `between=(low, high)` two
        rows of a key are a pair if left time + low <= right time <= left time + high, which comes out with the second of
        them: the key, `left_time`, `right_time`, the left columns, the right ones. With the name alone the join must exist.
        """
        if key is None and left is None and right is None and window is None and between is None:
            return Join(self._client, self._spec_of(JoinSpec, name))
        spec = join_spec(name, key, left, right, window, between)
        warm_up_joins()
        self._client.call(OpenResident(spec))
        return Join(self._client, self._client.specs(JoinSpec)[name])

    def joins(self) -> dict[str, Join]:
        """All joins by name."""
        return {name: Join(self._client, spec) for name, spec in sorted(self._client.specs(JoinSpec).items())}

    def dedup(
        self,
        name: str,
        key: str | None = None,
        within: str | int | timedelta | None = None,
        *,
        value: str | None = None,
    ) -> Dedup:
        """The deduplication of that name; made if the pond has none yet. `key` and `value` are DDL strings.

        The first row of a key passes; others at less than `within` from it are dropped and counted. Without `within` keys are
        remembered for ever. `value` are the columns that rows have which pass; by default those of the first rows. With the
        name alone it must exist.
        """
        if key is None and within is None and value is None:
            return Dedup(self._client, self._spec_of(DedupSpec, name))
        spec = dedup_spec(name, key, within, value)
        warm_up_joins()
        self._client.call(OpenResident(spec))
        return Dedup(self._client, self._client.specs(DedupSpec)[name])

    def dedups(self) -> dict[str, Dedup]:
        """All deduplications by name."""
        return {
            name: Dedup(self._client, spec) for name, spec in sorted(self._client.specs(DedupSpec).items())
        }

    def program(
        self, name: str, program: Any, *, migrate: bool | Mapping[str, bool | Function | Migration] = False
    ) -> Program:
        """The program of that name, of which the class is the code from now on; made if the pond has none yet.

        Fields that the class has and the program has not are empty. A field that exists must be as it was, and so must the
        number of lanes; or `migrate` says how what there is becomes what the class has: between two epochs, all of it or nothing.
        With True entries stay as they are, as far as they fit. Or it says by field what comes of its entries: True, a function of
        an entry's key and value that returns the new ones, or a `mp.Migration`, also for a new field. What is as the class has it
        already is not migrated again. With other lanes, what lane l had goes to lane l modulo their number, and is added there.
        """
        graph = graph_of(program)
        spec = program_spec(name, graph)
        # Here, as for windows: containers find compiled what they would compile.
        warm_up_for(field.types for field in spec.fields.values())
        if migrate is not False:
            migrate_program(self._client, spec, migrate, graph.merges)
        self._client.call(OpenResident(spec))
        self._programs.append(Program(self._client, self._client.specs(ProgramSpec)[name], graph))
        return self._programs[-1]

    def programs(self) -> list[str]:
        """The names of all programs. Their code is with whoever calls them."""
        return sorted(self._client.specs(ProgramSpec))

    def _spec_of(self, kind: type[_Spec], name: str) -> _Spec:
        specs = self._client.specs(kind)
        if check_name(name, f"the {kind.kind}") not in specs:
            known = ", ".join(sorted(specs)) or "none yet"
            raise UnknownResident(
                f"there is no {kind.kind} {name!r} in this pond", hint=f"it holds: {known}", resident=name
            )
        return specs[name]

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
        asked = self._client.call(MoveSlices(slice_ids(slices), container_id(to)))
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
        hold_s = float(hold) if isinstance(hold, int | float) else parse_duration(hold) / 1e6
        self._client.call(Autoscale(*autoscale_limits(containers, busy, hold_s), hold_s))

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
        [slice_id] = slice_ids([number])
        return self._client.call(AskSlice(slice_id)).residents

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

    def forget(
        self,
        what: State | Table | Window | Join | Dedup | Program | str,
        name: str | None = None,
        query: str | None = None,
    ) -> None:
        """Lets go of a State, table, window, join, dedup or program, with all that it holds; what the pond remembers has an end.

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
        resident, table = self._found(what) if isinstance(what, str) else what.place
        self._client.call(Forget(resident, name, query, table if name is None else None))

    def _found(self, name: str) -> tuple[str, str | None]:
        """The place of what has that name; no matter which it is, but it must be one."""
        check_name(name, "what is forgotten")
        tables = {table: place.place for table, place in self.tables().items()}
        kinds: list[type[StateSpec | WindowSpec | JoinSpec | DedupSpec | ProgramSpec]]
        kinds = [StateSpec, WindowSpec, JoinSpec, DedupSpec, ProgramSpec]
        others: dict[str, tuple[str, str | None]] = {
            resident: (resident, None) for kind in kinds for resident in self._client.specs(kind)
        }
        if name in tables and name in others:
            raise BadOption(
                f"{name!r} is a State and a table",
                hint=f"say which: pond.forget(pond.state({name!r})), or pond.table",
                option="what",
            )
        if name not in tables and name not in others:
            known = ", ".join(sorted({*tables, *others})) or "none yet"
            raise UnknownResident(
                f"there is no {name!r} in this pond", hint=f"it holds: {known}", resident=name
            )
        return tables[name] if name in tables else others[name]

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
