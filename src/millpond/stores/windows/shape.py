"""What everyone who handles a window's rows needs to know of them; derived once from its spec."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import pyarrow as pa
from msgspec.structs import replace

from millpond.code.capture import Code
from millpond.code.windows import Aggregate, WindowCode
from millpond.errors import BadOption, BadRule, WrongColumn
from millpond.schema import KEY, TIME, KeyKind, key_kind, parse_ddl
from millpond.stores import views
from millpond.stores.windows.cells import CellLayout
from millpond.stores.windows.sifting import can_sift
from millpond.times import TIME_MAX

Pattern = Literal["rmw", "aar", "aur"]
START, END, CUT = "_start", "_end", "_cut"
"""Columns of staged rows: where a row's window or pane begins and ends, and whether its session ends with it."""
OF_STAGED_ROWS = (START, END, CUT)
WINDOW_START, WINDOW_END = "window_start", "window_end"
SESSION_ID, RETRACTED = "session_id", "retracted"
"""Columns that updates of sessions have beside their aggregates."""
VALUE = "value"
"""The name of the only value column, where nobody gives it one."""
TIMESTAMP = pa.timestamp("us", tz="UTC")
NO_KEY = "_all boolean"
"""The key of windows that are not by key: all rows have the same."""


class Chosen(NamedTuple):
    """A pattern, and why it is that."""

    pattern: Pattern
    why: str


class WindowShape:
    """`staged` are the columns of rows as they are sent and kept: folded into cells where the pattern is `rmw`.

    A window stays for `lateness` after its end. With `updates` it is sent while it changes, too.
    """

    def __init__(
        self,
        key: str,
        value: str,
        window: WindowCode,
        aggregates: Mapping[str, Aggregate],
        hint: Pattern | Literal[""] = "",
        *,
        lateness: int = 0,
        updates: bool = False,
    ) -> None:
        self.lateness = lateness
        self.updates = updates
        self.keys = parse_ddl(key, "key")
        self.values = parse_ddl(value, "value") if value else pa.schema([])
        self.is_keyed = key != NO_KEY
        self.key_kind: KeyKind = key_kind(self.keys)
        self.key_type: pa.DataType = pa.int64() if self.key_kind == "i64" else pa.binary()
        self.window = window
        self.aggregates = resolved(window, aggregates, self.values.names)
        self.chosen = choose_pattern(window, self.aggregates, self.values, hint)
        self.pane = math.gcd(window.size, window.slide) if window.kind == "sliding" else window.size
        self.layout = CellLayout(self.values, self.aggregates) if self.pattern == "rmw" else None
        spans = {"session": [END], "assigned": [START, END]}.get(window.kind, [])
        if self.layout is not None:
            named = [START, *(name for name in spans if name != START)]
            columns = [*((name, pa.int64()) for name in named), *self.layout.schema]
        else:
            cut = [(CUT, pa.bool_())] if window.ends_when is not None else []
            columns = [(TIME, pa.int64()), *((name, pa.int64()) for name in spans), *cut, *self.values]
        self.staged = pa.schema([(KEY, self.key_type), *columns])

    @property
    def pattern(self) -> Pattern:
        return self.chosen.pattern

    def pane_start(self, pane: int) -> int:
        """Where a pane begins that is known by this time: the first of all, which is known by the first time, before that."""
        return pane - (pane - self.window.offset) % self.pane

    def pane_end(self, pane: int) -> int:
        """Where it ends, as far as there is time."""
        return min(self.pane_start(pane) + self.pane, TIME_MAX)

    @property
    def fires_once(self) -> bool:
        """Whether a window is gone with its first result."""
        return not self.lateness and not self.updates

    @property
    def has_ids(self) -> bool:
        """Whether results tell which session they are of, and which are no more."""
        return self.updates and self.window.kind == "session"

    @property
    def is_sifted(self) -> bool:
        """Whether rows need not be sent that others of the same key and pane outdo."""
        return self.layout is None and self.window.is_aligned and can_sift(self.aggregates)

    @property
    def longs(self) -> list[str]:
        """The columns of times of staged rows."""
        return [name for name in self.staged.names if name in (TIME, START, END)]

    def results(
        self, columns: Mapping[str, pa.Array], keys: Sequence[pa.Array], time_type: pa.DataType
    ) -> pa.Table:
        """Rows as users get them: the window, the key, the aggregates; of updates of sessions their ids."""
        starts, ends = (columns[name].view(time_type) for name in (WINDOW_START, WINDOW_END))
        named = dict(zip(self.keys.names, keys, strict=True)) if self.is_keyed else {}
        own = [*self.aggregates, *((SESSION_ID, RETRACTED) if self.has_ids else ())]
        return pa.table(
            {WINDOW_START: starts, WINDOW_END: ends, **named, **{name: columns[name] for name in own}}
        )


def time_type(kind: str) -> pa.DataType:
    return TIMESTAMP if kind == "timestamp" else pa.int64()


def columns_needed(
    window: WindowCode, aggregates: Mapping[str, Aggregate], values: Sequence[str] = ()
) -> list[str]:
    """The value columns that a window reads, in the order in which they are named; `values` as in `resolved`."""
    every: list[str] = []
    for aggregate in resolved(window, aggregates, values).values():
        every += aggregate.reads
    for code in (window.gap, window.ends_when):
        every += [] if code is None else parameters(code)
    return list(dict.fromkeys([*every, *([window.gap_column] if window.gap_column else [])]))


def check_columns(window: WindowCode, aggregates: Mapping[str, Aggregate], values: Sequence[str]) -> None:
    """That the value columns that a window reads are among those that it has."""
    missing = [name for name in columns_needed(window, aggregates, values) if name not in values]
    if missing:
        raise WrongColumn(
            f"value= has no column {', '.join(map(repr, missing))}",
            hint=f"it has: {', '.join(values)}; leave value= out, and the first rows tell columns and types",
            column=missing[0],
            available=list(values),
        )


def resolved(
    window: WindowCode, aggregates: Mapping[str, Aggregate], values: Sequence[str] = ()
) -> dict[str, Aggregate]:
    """Aggregates that name the columns that they are of: one that names none is of the only one.

    `values` are the value columns, where they are known.
    """
    named: dict[str, Aggregate] = {}
    for name, aggregate in aggregates.items():
        if aggregate.name != "custom":
            named[name] = aggregate
            continue
        assert aggregate.code is not None
        own = parameters(aggregate.code)
        if not own:
            raise BadRule(
                f"the aggregate {aggregate.code.name!r} takes nothing",
                hint="def rule(times, price) -> float: the times, then the columns it needs",
                rule=aggregate.code.name,
            )
        named[name] = replace(aggregate, columns=tuple(own[1:]))
    columns = list(dict.fromkeys(column for each in named.values() for column in each.reads))
    if not columns and VALUE not in values:
        columns = list(values)
    for name, aggregate in named.items():
        if aggregate.column or aggregate.name in ("count", "custom"):
            continue
        if len(columns) > 1:
            raise BadOption(
                f"{name}: {aggregate} does not say of which column it is",
                hint=f"one of {', '.join(columns)}, as in mp.{aggregate.name}({columns[0]!r})",
                option="aggregate",
            )
        named[name] = replace(aggregate, column=columns[0] if columns else VALUE)
    return named


def parameters(code: Code) -> list[str]:
    """The names of what a function takes."""
    for node in ast.parse(code.source).body:
        match node:
            case ast.FunctionDef(name=code.name, args=arguments):
                return [argument.arg for argument in arguments.args]
            case ast.Assign(targets=[ast.Name(id=code.name)], value=ast.Lambda(args=arguments)):
                return [argument.arg for argument in arguments.args]
    raise BadRule(f"the source of {code.name!r} does not define it", rule=code.name)


def choose_pattern(
    window: WindowCode,
    aggregates: Mapping[str, Aggregate],
    values: pa.Schema,
    hint: Pattern | Literal[""] = "",
) -> Chosen:
    """How the store of a window will be read."""
    whole = [name for name, aggregate in aggregates.items() if not aggregate.is_incremental]
    wide = [
        name
        for name, aggregate in aggregates.items()
        if aggregate.is_incremental
        and aggregate.name != "count"
        and not _is_number(values.field(aggregate.column).type)
    ]
    folds = not whole and not wide
    if window.kind == "counted" or window.is_cut:
        why = "which rows belong together is known once they are all there"
        chosen = Chosen("aur", f"{why}; each key's windows end by themselves")
    elif folds:
        chosen = Chosen("rmw", "all aggregates can be kept as a few numbers a window, changed in place")
    else:
        why = (
            f"{', '.join(whole)} need{'s' if len(whole) == 1 else ''} all rows of a window"
            if whole
            else f"{', '.join(wide)} {'is' if len(wide) == 1 else 'are'} of values without a fixed width,"
            " which are kept as they came"
        )
        if window.is_aligned:
            chosen = Chosen("aar", f"{why}; windows end for all keys at once")
        else:
            chosen = Chosen("aur", f"{why}; each key's windows end by themselves")
    if not hint or hint == chosen.pattern:
        return chosen
    if hint == "rmw":
        raise BadOption(
            f'pattern="rmw" does not do here: {chosen.why}', hint='pattern="aar" or "aur"', option="pattern"
        )
    if window.kind in ("counted", "session"):
        if hint == "aar":
            raise BadOption(
                'pattern="aar" is for windows that end for all keys at once',
                hint='pattern="aur"',
                option="pattern",
            )
    elif hint == "aur":
        raise BadOption(
            'pattern="aur" is for windows that each key has for itself',
            hint='pattern="aar"',
            option="pattern",
        )
    return Chosen(hint, f"as was asked for, where {chosen.pattern} would do: {chosen.why}")


def choose_early(
    window: WindowCode, aggregates: Mapping[str, Aggregate], hint: Pattern | Literal[""] = ""
) -> tuple[Chosen | None, Chosen | None]:
    """The same before the types of values are known: if all are numbers, and if none is; None where the hint does not do."""
    named = resolved(window, aggregates)
    columns = columns_needed(window, aggregates) or [VALUE]

    def chosen_of(type_: pa.DataType) -> Chosen | None:
        try:
            return choose_pattern(window, named, pa.schema([(name, type_) for name in columns]), hint)
        except BadOption:
            return None

    return chosen_of(pa.int64()), chosen_of(pa.string())


def _is_number(type_: pa.DataType) -> bool:
    return views.is_long(type_) or views.is_double(type_)
