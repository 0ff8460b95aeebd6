"""One history of transactions, driven through a pond and through a serial model; and how the two are compared.

The model is made of dicts and of the tests' own interpreter of transaction functions: it shares no code with what
it checks.
"""

from __future__ import annotations

import copy
import inspect
import math
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Protocol

import pyarrow as pa
from txn_oracle import OracleTable, run_serially

import millpond as mp
from millpond.durable.files import Files
from millpond.errors import RuleInterpreted
from millpond.ops.transactions import Transactions
from millpond.testing.local import LocalPond
from millpond.wire.groups import ReadDelayed
from millpond.wire.questions import AskProgress

ROOT = "/pond"
SLICES = 5
Event = dict[str, Any]


@dataclass(frozen=True)
class Kept:
    """A table of the tests. What moves between tables is in their columns `v`."""

    key: str
    value: str
    zero: dict[str, Any]
    default: dict[str, Any] | None
    group: str = "tables"


TABLES = {
    "a": Kept("long", "v long", {"v": 0}, {"v": 100}),
    "b": Kept("string", "v long, note string", {"v": 0, "note": ""}, {"v": 0, "note": "none"}),
    "c": Kept("id long", "v long, r double, ok boolean", {"v": 0, "r": 0.0, "ok": False}, None),
    "d": Kept("string", "v long, seen timestamp", {"v": 0, "seen": 0}, {"v": 7, "seen": 0}, "side"),
    "e": Kept("long", "v long", {"v": 0}, {"v": 0}),
    "o": Kept(
        "g string, n long", "v long, paid decimal(9,2)", {"v": 0, "paid": Decimal("0.00")}, None, "side"
    ),
}
SCHEMA = pa.schema(
    {
        "at": pa.int64(), "seq": pa.int64(), "kind": pa.string(), "i": pa.int64(), "j": pa.int64(),
        "n": pa.int64(), "g": pa.string(), "parts": pa.list_(pa.int64()), "who": pa.string(),
    }
)  # fmt: skip


@mp.transaction(results="left, there")
def move(a, b, c, i, j, n, g, parts):
    a[i].v -= n
    b[g].v += n
    b[g].note = g
    if a[i].v < 0:
        mp.abort("poor")
    for part in parts:
        b[g].v -= part
        c[j].v += part
    if c[j].v > 60:
        mp.abort("full")
    c[j].r = c[j].v / n
    c[j].ok = c[j].v > 20
    return a[i].v, c[j].r


@mp.transaction
def make(c, j):
    c[j].ok = True


@mp.transaction(results="left")
def back(a, c, i, j, n):
    if c[j].v < n:
        mp.abort("nothing there")
    c[j].v -= n
    a[i].v += n
    return c[j].v


@mp.transaction(results="said")
def tag(b, g, n):
    b[g].note = g + "/" + str(10 // n)
    return b[g].note


def dearer() -> Any:
    """The same name, other code: what is taken is taken twice."""

    @mp.transaction(results="left, there")
    def move(a, b, c, i, j, n, g, parts):
        a[i].v -= 2 * n
        b[g].v += 2 * n
        for part in parts:
            b[g].v -= part
            c[j].v += part
        if a[i].v < 0:
            mp.abort("poor")
        return a[i].v, 0.5

    return move


@mp.transaction(results="v")
def visit(d, g, n, at):
    if n > 5:
        mp.abort("too many")
    d[g].v += n
    d[g].seen = at
    return d[g].v


@mp.transaction(results="number, paid decimal(9,2)")
def number(d, o, g, n, parts):
    mine = d[g].v
    d[g].v += 1
    row = o[g, mine]
    row.v = n
    for part in parts:
        row.paid += round(row.paid, 1) + part
    if (g, n) in o and n > 8:
        mp.abort("taken")
    return mine, row.paid if n > 1 else None


@mp.transaction(results="gone")
def drop(d, o, g, n):
    gone = 0
    for back in range(n):
        row = o.get((g, d[g].v - 1 - back))
        if row is not None:
            del o[g, d[g].v - 1 - back]
            gone += 1
    if gone == 0:
        del o[g, n]
    return gone


@mp.transaction
def lend(a, e, i, j, n):
    a[i].v -= n
    e[j].v += n
    if n == 9:
        mp.abort("nine")


@dataclass(frozen=True)
class TransactionSet:
    """An operator as the tests build it."""

    name: str
    tables: tuple[str, ...]
    kinds: dict[str, Any]
    delay: int | None = None

    @property
    def group(self) -> str:
        return TABLES[self.tables[0]].group

    @property
    def sources(self) -> dict[str, str]:
        return {kind: source_of(function) for kind, function in self.kinds.items()}

    @property
    def results(self) -> dict[str, tuple[str, ...]]:
        return {kind: function.result_names for kind, function in self.kinds.items()}


def source_of(function: Any) -> str:
    text = textwrap.dedent(inspect.getsource(function.plain))
    return text[text.index("def ") :]


MAIN = TransactionSet("main", ("a", "b", "c"), {"move": move, "back": back, "tag": tag, "make": make})
DEARER = TransactionSet("main", ("a", "b", "c"), {"move": dearer(), "back": back})
OTHER = TransactionSet("other", ("a", "c"), {"back": back})
SLOW = TransactionSet("slow", ("a", "c"), {"back": back}, delay=10)
ASIDE = TransactionSet("aside", ("d",), {"visit": visit})
NUMBERS = TransactionSet("numbers", ("d", "o"), {"number": number, "drop": drop})
LENDER = TransactionSet("lender", ("a", "e"), {"lend": lend})


def event(kind: str, at: int, seq: int = 0, **given: Any) -> Event:
    usual = {"i": 1, "j": 1, "n": 1, "g": "x", "parts": [1], "who": f"{kind}{at}.{seq}"}
    return {"at": at, "seq": seq, "kind": kind, **usual, **given}


def table_of(events: Sequence[Event]) -> pa.Table:
    return pa.Table.from_pylist(list(events), schema=SCHEMA)


# The model


@dataclass
class Group:
    """Progress of the operators of a group: what is older than an operator's newest time, less its delay, is late."""

    marks: dict[str, float] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, list[Event]] = field(default_factory=dict)
    lowest: float = -math.inf

    def register(self, operator: str) -> None:
        self.marks.setdefault(operator, self.lowest)
        self.late.setdefault(operator, 0)
        self.waiting.setdefault(operator, [])

    def moved(self) -> None:
        self.lowest = max(self.lowest, min(self.marks.values()))


class Model:
    """What the pond must hold: the tables, and what the last epochs of each operator gave."""

    def __init__(self) -> None:
        self.tables: dict[str, OracleTable] = {}
        self.groups: dict[str, Group] = {}
        self.outputs: dict[str, dict[int, list[dict[str, Any]]]] = {}

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def open(self, name: str) -> None:
        kept = TABLES[name]
        self.tables.setdefault(name, OracleTable(name, kept.zero, kept.default, {"paid": "decimal(9,2)"}))
        self.groups.setdefault(kept.group, Group())

    def run(self, program: TransactionSet, epoch: int, events: Sequence[Event]) -> list[dict[str, Any]]:
        """The rows that the epoch gives: those that waited and run now, then its own that run or are late."""
        group, name = self.groups[program.group], program.name
        before = group.marks[name]
        after = max([before, *(one["at"] - (program.delay or 0) for one in events)])
        until = math.inf if program.delay is None else after
        shown, waiting = [], []
        for one in group.waiting[name]:
            (shown if one["at"] < until else waiting).append(one)
        late = [one for one in events if one["at"] < before]
        for one in events:
            (shown if one in late or one["at"] < until else waiting).append(one)
        group.waiting[name] = waiting
        group.late[name] += len(late)
        group.marks[name] = after
        group.moved()
        out = self._outputs(program, shown, late)
        self.outputs.setdefault(name, {})[epoch] = out
        return out

    def finish(self, program: TransactionSet) -> list[dict[str, Any]]:
        group, name = self.groups[program.group], program.name
        shown, group.waiting[name] = group.waiting[name], []
        group.marks[name] = max([group.marks[name], *(one["at"] + 1 for one in shown)])
        group.moved()
        return self._outputs(program, shown, [])

    def _outputs(
        self, program: TransactionSet, shown: Sequence[Event], late: Sequence[Event]
    ) -> list[dict[str, Any]]:
        tables = {name: self.tables[name] for name in program.tables}
        ran = [{**one, "time": one["at"]} for one in shown if one not in late]
        outcomes = iter(run_serially(program.sources, tables, ran))
        ended = [("late", None) if one in late else next(outcomes) for one in shown]
        return outputs_of(program.results, shown, ended)

    def total(self) -> int:
        """What each row has beyond its table's default, over the ring: no transaction changes the sum."""
        return sum(
            row["v"] - (table.default or table.zero)["v"]
            for name, table in self.tables.items()
            if name not in ("d", "o")
            for row in table.rows.values()
        )


def outputs_of(
    results: Mapping[str, Sequence[str]], events: Sequence[Event], outcomes: Sequence[Any]
) -> list[dict[str, Any]]:
    """The rows that an operator must give for these outcomes."""
    names = dict.fromkeys(name for one in results.values() for name in one)
    out = []
    for one, (reason, values) in zip(events, outcomes, strict=True):
        found = dict(zip(results[one["kind"]], values or (), strict=False))
        out.append({**one, "committed": reason is None, "reason": reason, **names, **found})
    return out


# The pond


class World:
    """The pond, and the files it stands on. `start` again is a new process on the same files."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.pond: LocalPond
        self._operators: dict[int, Transactions] = {}

    def start(self, containers: int) -> None:
        self._operators.clear()
        self.pond = LocalPond(self.files, root=ROOT, containers=containers, slices=SLICES)

    def watch(self) -> None:
        for container in sorted(self.pond.hosting.services):
            self.pond.coordinator.recover(container)

    def operator(self, program: TransactionSet) -> Transactions:
        if id(program) not in self._operators:
            self._operators[id(program)] = self.pond.transactions(
                program.name,
                program.tables,
                program.kinds,
                kind="kind",
                at="at",
                seq="seq",
                delay=program.delay,
            )
        return self._operators[id(program)]

    def run(self, program: TransactionSet, epoch: int, events: Sequence[Event]) -> list[dict[str, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuleInterpreted)
            rows: list[dict[str, Any]] = self.operator(program)(table_of(events), epoch).to_pylist()
        return rows


class Step(Protocol):
    def on_pond(self, world: World) -> None: ...

    def on_model(self, model: Model) -> None: ...


@dataclass(frozen=True)
class Start:
    containers: int

    def on_pond(self, world: World) -> None:
        world.start(self.containers)

    def on_model(self, model: Model) -> None:
        pass


@dataclass(frozen=True)
class Open:
    table: str

    def on_pond(self, world: World) -> None:
        kept = TABLES[self.table]
        default = kept.default and {
            name: datetime.fromtimestamp(value, UTC) if name == "seen" else value
            for name, value in kept.default.items()
        }
        world.pond.table(self.table, kept.key, kept.value, default, group=kept.group)

    def on_model(self, model: Model) -> None:
        model.open(self.table)


@dataclass(frozen=True)
class Register:
    program: TransactionSet

    def on_pond(self, world: World) -> None:
        world.operator(self.program)

    def on_model(self, model: Model) -> None:
        model.groups[self.program.group].register(self.program.name)


@dataclass(frozen=True)
class Run:
    program: TransactionSet
    epoch: int
    events: tuple[Event, ...] = ()
    expected: list[dict[str, Any]] = field(default_factory=list, compare=False)

    def on_pond(self, world: World) -> None:
        found = world.run(self.program, self.epoch, self.events)
        # What the model gave when it came here; nothing where a test runs without one.
        assert not self.expected or found == self.expected, f"{self}\n{found}"

    def on_model(self, model: Model) -> None:
        self.expected[:] = model.run(self.program, self.epoch, self.events)

    def with_other_events(self) -> Run:
        """As a source may give them that could not say what it sent."""
        other = tuple({**one, "n": one["n"] + 1, "i": one["i"] + 1} for one in self.events[1:])
        return Run(self.program, self.epoch, other)

    def __repr__(self) -> str:
        return f"Run({self.program.name!r}, {self.epoch}, {len(self.events)} events)"


@dataclass(frozen=True)
class Finish:
    """All that waits for an operator runs."""

    program: TransactionSet
    expected: list[dict[str, Any]] = field(default_factory=list, compare=False)

    def on_pond(self, world: World) -> None:
        found = world.operator(self.program).finish()
        assert found is not None
        assert not self.expected or found.to_pylist() == self.expected, f"{self}\n{found}"

    def on_model(self, model: Model) -> None:
        self.expected[:] = model.finish(self.program)

    def __repr__(self) -> str:
        return f"Finish({self.program.name!r})"


@dataclass(frozen=True)
class Again:
    """An epoch that was acknowledged comes again, its events in another order."""

    of: Run

    def on_pond(self, world: World) -> None:
        found = world.run(self.of.program, self.of.epoch, self.of.events[::-1])
        assert not self.of.expected or found == self.of.expected, self.of

    def on_model(self, model: Model) -> None:
        pass


@dataclass(frozen=True)
class Checkpoint:
    def on_pond(self, world: World) -> None:
        world.pond.checkpoint()

    def on_model(self, model: Model) -> None:
        pass


@dataclass(frozen=True)
class Upkeep:
    def on_pond(self, world: World) -> None:
        world.pond.maintain()

    def on_model(self, model: Model) -> None:
        pass


def history(containers: int, then: int) -> list[Step]:
    """Three tables in a ring, three operators on them; another group beside; the pond is reopened once."""
    first = Run(
        MAIN,
        0,
        (
            *(event("make", 4, j, j=j) for j in (6, 5, 4, 2, 1)),
            event("move", 5, 1, i=1, g="x", j=1, n=20, parts=[10, 5]),
            event("back", 6, i=2, j=1, n=4),
            event("move", 5, 0, i=1, g="y", j=2, n=80, parts=[30]),  # runs before the first
            event("tag", 7, g="x", n=3),
            event("move", 9, i=3, g="", j=3, n=101),  # poor
            event("back", 8, i=2, j=9, n=1),  # no such key
        ),
    )
    third = Run(
        MAIN,
        2,
        (
            event("move", 14, i=4, g="ü", j=4, n=20, parts=[2, 2, 2]),
            event("move", 15, 2, i=9, g="x", j=4, n=90, parts=[40, 40]),  # full
            event("tag", 13, g="y", n=0),  # division by zero
            event("move", 12, 3, i=4, g="x", j=2, n=7, parts=[7]),
            event("move", 3, i=4, g="x", j=2, n=7, parts=[7]),  # late
            event("move", 15, i=5, g="x", j=5, n=0, parts=[1]),  # division by zero, after five writes
        ),
    )
    slow = Run(
        SLOW,
        1,
        (
            event("back", 36, i=3, j=1, n=2),
            event("back", 25, i=3, j=2, n=1),  # runs, after one that came before it
            event("back", 19, i=3, j=1),  # late
        ),
    )
    return [
        Start(containers),
        Open("a"),
        Open("b"),
        Open("c"),
        Register(MAIN),
        first,
        Run(MAIN, 1),
        Open("d"),
        Register(ASIDE),
        Run(ASIDE, 0, (event("visit", 50, g="u", n=2), event("visit", 40, g="u", n=9), event("visit", 41, g="v"))),
        Open("o"),
        Register(NUMBERS),
        Run(NUMBERS, 0, (
            *(event("number", 50 + at, g="u", n=at, parts=[at, 1]) for at in range(6)),
            event("number", 57, g="u", n=12),  # taken
            event("drop", 58, g="u", n=2),
            event("drop", 59, g="new", n=1),  # no such key
        )),
        Register(OTHER),
        Register(SLOW),
        # All of it waits.
        Run(SLOW, 0, (event("back", 30, i=3, j=1, n=1), event("back", 24, i=3, j=2, n=2), event("back", 27, i=3, j=1, n=3))),
        Checkpoint(),
        third,
        slow,
        Run(OTHER, 0, (event("back", 20, i=7, j=1, n=8), event("back", 19, i=7, j=1, n=50), event("back", 8))),
        Again(third),
        # Enough is there for one of the two operators only: for the one that comes first.
        Run(MAIN, 3, (event("move", 21, i=1, g="z", j=1, n=5), event("back", 20, i=1, j=1, n=5), event("back", 22, i=1, j=2, n=30))),
        Start(then),
        Again(third),
        Again(slow),
        Upkeep(),
        Run(SLOW, 2, (event("back", 41, i=3, j=4, n=1), event("back", 29, i=3, j=2, n=90), event("back", 31, i=3, j=2))),
        Run(DEARER, 4, (event("move", 30, i=6, g="x", j=6, n=10, parts=[4]), event("back", 31, i=6, j=6, n=3))),
        Run(ASIDE, 1, (event("visit", 60, g="u", n=3), event("visit", 60, 1, g="w", n=4))),
        Run(NUMBERS, 1, (
            event("drop", 70, g="u", n=9), event("number", 71, g="u", n=3), event("number", 72, g="u", n=12),
        )),
        Open("e"),
        Register(LENDER),
        Run(LENDER, 0, (event("lend", 33, i=6, j=1, n=9), event("lend", 32, i=6, j=1, n=8))),
        Checkpoint(),
        Upkeep(),
        Run(DEARER, 5, (event("move", 40, i=6, g="x", j=6, n=60), event("move", 41, i=8, g="q", j=8, n=3))),
        Finish(SLOW),
        Run(SLOW, 3, (event("back", 60, i=3, j=8, n=1), event("back", 41, i=3), event("back", 49, i=3, j=1, n=1))),
        Run(OTHER, 1, (event("back", 45, i=9, j=8, n=1),)),
        Checkpoint(),
        Upkeep(),
        Run(ASIDE, 2),
        Run(NUMBERS, 2, (event("drop", 80, g="u", n=1), event("number", 81, g="w", n=7, parts=[3]))),
        Run(LENDER, 1, (event("lend", 50, i=1, j=2, n=5),)),
        Checkpoint(),
        Upkeep(),
    ]  # fmt: skip


def models_of(steps: Iterable[Step]) -> list[Model]:
    """The model before the first step, after the first, and so on."""
    models = [Model()]
    for step in steps:
        models.append(models[-1].copy())
        step.on_model(models[-1])
    return models


# The picture: everything that a user could see


def picture_of_model(model: Model) -> dict[str, Any]:
    return {
        "tables": {name: table.rows for name, table in model.tables.items()},
        "progress": {name: (group.marks, group.late) for name, group in model.groups.items()},
        "waiting": {
            name: {operator: len(events) for operator, events in group.waiting.items()}
            for name, group in model.groups.items()
        },
    }


def picture_of_pond(pond: LocalPond) -> dict[str, Any]:
    tables = pond.tables()
    progress = {name: pond._client.call(AskProgress(name)) for name in {t.group for t in tables.values()}}
    return {
        "tables": {name: rows_of(table) for name, table in tables.items()},
        "progress": {name: (found.updaters, found.late) for name, found in progress.items()},
        "waiting": {
            name: {operator: waiting_in(pond, name, operator) for operator in found.updaters}
            for name, found in progress.items()
        },
    }


def waiting_in(pond: LocalPond, group: str, operator: str) -> int:
    home = next(table._group.home_slice for table in pond.tables().values() if table.group == group)
    return sum(pond._client.read_home(ReadDelayed(group, operator), home)["rows"].to_pylist())


def rows_of(table: mp.Table) -> dict[Any, dict[str, Any]]:
    """The rows by key. Read in two ways, which must agree."""
    snapshot = table.snapshot()
    keys = snapshot.column_names[: len(table.key.split(","))]
    rows = snapshot.cast(plain(snapshot.schema)).to_pylist()
    found = {}
    for row in rows:
        key = tuple(row.pop(name) for name in keys)
        found[key if len(keys) > 1 else key[0]] = row
    assert list(found) == sorted(found), "in the order of keys, each once"
    assert table.read(snapshot.select(keys)).equals(snapshot)
    if len(keys) == 1:
        assert table.read(snapshot[keys[0]]).equals(snapshot)
    return found


def plain(schema: pa.Schema) -> pa.Schema:
    """Timestamps as the numbers that transactions see."""
    return pa.schema(
        [field.with_type(pa.int64()) if pa.types.is_timestamp(field.type) else field for field in schema]
    )


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    found = []
    for part, wanted in expected.items():
        if sorted(wanted) != sorted(actual[part]):
            return [f"{part}: expected {sorted(wanted)}, found {sorted(actual[part])}"]
        found += [
            f"{part}, {name}: expected {wanted[name]}, found {actual[part][name]}"
            for name in wanted
            if wanted[name] != actual[part][name]
        ]
    return found


def check_same(model: Model, pond: LocalPond, note: str = "") -> None:
    found = differences(picture_of_model(model), picture_of_pond(pond))
    assert not found, "\n".join([note, *found])
    assert model.total() == 0
    pond.validate()
