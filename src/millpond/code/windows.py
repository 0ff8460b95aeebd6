"""Windows and aggregates as users name them: small frozen values that travel, a user's own functions as source text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import msgspec

from millpond.code.capture import Code, capture
from millpond.code.rules import FetchRule, fetch_rule
from millpond.errors import BadOption, BadRule
from millpond.times import TIME_MAX, TIME_MIN, TimeKind, format_duration, parse_duration

Duration = str | int | timedelta
WindowKind = Literal["tumbling", "sliding", "session", "counted", "everything", "assigned"]
AggregateName = Literal[
    "count", "total", "mean", "smallest", "largest", "top", "fold", "latest", "values", "median", "percentile",
    "where_largest", "custom",
]  # fmt: skip
INCREMENTAL = ("count", "total", "mean", "smallest", "largest", "top", "fold")
"""What can be kept as a few numbers, whatever the rows."""
_OURS = (fetch_rule.__module__, __name__, "millpond.programs.merging")
"""Where aggregates come from: who names one of these has forgotten to call it."""
SLIDES_MAX = 100_000
TOP_MAX = 1_000


class WindowCode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rows belong together. Durations are in units of times of the kind `span_kind`; 0 where there is none.

    `size` is the length of tumbling and sliding windows, the gap of sessions, the number of rows of counted ones.
    """

    kind: WindowKind
    size: int = 0
    slide: int = 0
    offset: int = 0
    longest: int = 0
    or_after: int = 0
    gap_column: str = ""
    touching: bool = False
    gap: Code | None = None
    ends_when: Code | None = None
    assign: Code | None = None
    span_kind: Literal["", "timestamp", "long"] = ""

    @property
    def codes(self) -> list[Code]:
        return [code for code in (self.gap, self.ends_when, self.assign) if code is not None]

    @property
    def is_cut(self) -> bool:
        """Whether sessions end before their gap is over: where, only all of their rows tell."""
        return self.longest > 0 or self.ends_when is not None

    @property
    def is_aligned(self) -> bool:
        """Whether windows fire for all keys at the same time."""
        return self.kind in ("tumbling", "sliding", "everything", "assigned")

    def __str__(self) -> str:
        size, slide = (
            format_duration(span) if self.span_kind == "timestamp" else str(span)
            for span in (self.size, self.slide)
        )
        match self.kind:
            case "tumbling":
                return f"tumbling({size})"
            case "sliding":
                return f"sliding({size} every {slide})"
            case "session":
                gap = self.gap_column or (self.gap.name if self.gap is not None else size)
                return f"session({gap})"
            case "counted":
                return f"counted({self.size})"
            case "assigned":
                return f"assigned({self.assign.name if self.assign is not None else ''})"
        return self.kind


class Aggregate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of a window's rows. `column` is the value column that it is of; empty for the only one, or for rows.

    `number` is how many of `top`, or which `percentile`. `code` is a user's: of the whole window, or with `zero` and
    `merge` what adds a row.
    """

    name: AggregateName
    column: str = ""
    number: float = 0
    columns: tuple[str, ...] = ()
    code: Code | None = None
    merge: Code | None = None
    zero: tuple[int | float, ...] = ()
    returns: str = ""

    @property
    def is_incremental(self) -> bool:
        return self.name in INCREMENTAL

    @property
    def codes(self) -> list[Code]:
        return [code for code in (self.code, self.merge) if code is not None]

    @property
    def reads(self) -> tuple[str, ...]:
        """The columns that it needs, as far as it names them."""
        return (*((self.column,) if self.column else ()), *self.columns)

    def __str__(self) -> str:
        number = f"{self.number:g}" if self.name in ("top", "percentile") else ""
        name = self.code.name if self.code is not None else self.name
        return f"{name}({', '.join(part for part in (number, *self.reads) if part)})"


# Windows


def tumbling(size: Duration, offset: Duration = 0) -> WindowCode:
    """Windows of one length, one behind the other: [n * size + offset, (n + 1) * size + offset)."""
    amounts, kind = _amounts("tumbling", size=size, offset=offset)
    return WindowCode(
        "tumbling", size=amounts["size"], offset=amounts["offset"] % amounts["size"], span_kind=kind
    )


def sliding(size: Duration, slide: Duration, offset: Duration = 0) -> WindowCode:
    """Windows of length `size`, one begun every `slide`: a row belongs to all that it falls into.

    A row is kept once, whatever the ratio: windows are made of panes, as long as both lengths have in common.
    """
    amounts, kind = _amounts("sliding", size=size, slide=slide, offset=offset)
    if amounts["slide"] > amounts["size"]:
        raise BadOption(
            f"sliding({size!r}, {slide!r}) would leave out rows between its windows",
            hint="slide is at most size; for windows side by side mp.tumbling",
            option="slide",
        )
    if amounts["size"] // math.gcd(amounts["size"], amounts["slide"]) > SLIDES_MAX:
        raise BadOption(
            f"sliding({size!r}, {slide!r}) has more than {SLIDES_MAX:,} panes a window",
            hint="choose a slide that divides the size, or a longer one",
            option="slide",
        )
    offset_units = amounts["offset"] % amounts["slide"]
    return WindowCode(
        "sliding", size=amounts["size"], slide=amounts["slide"], offset=offset_units, span_kind=kind
    )


def session(
    gap: Duration | Callable[..., Any] | None = None,
    *,
    column: str = "",
    longest: Duration | None = None,
    ends_when: Callable[..., Any] | None = None,
    touching: bool = False,
) -> WindowCode:
    """Rows of a key that follow each other within `gap`: [first, last + gap).

    The gap is a duration, or for each row the number in the value column `column`, or what a function of the value
    columns gives. A session is cut after `longest`, and right behind a row for which the function `ends_when` is true.
    A row exactly a gap after the one before begins a session of its own, unless they are `touching`.
    """
    if (gap is None) == (not column):
        raise BadOption(
            "a session has one gap", hint='mp.session("10 minutes") or mp.session(column="gap")', option="gap"
        )
    check_column(column)
    if not isinstance(touching, bool):
        raise BadOption(f"touching={touching!r} is neither", hint="True or False", option="touching")
    durations = {} if gap is None or callable(gap) else {"gap": gap}
    amounts, kind = _amounts("session", **durations, **({} if longest is None else {"longest": longest}))
    return WindowCode(
        "session",
        size=amounts.get("gap", 0),
        longest=amounts.get("longest", 0),
        gap_column=column,
        touching=touching,
        gap=capture(gap, "gap", "gap") if callable(gap) else None,
        ends_when=None if ends_when is None else capture(ends_when, "session", "ends_when"),
        span_kind=kind,
    )


def counted(rows: int, or_after: Duration | None = None) -> WindowCode:
    """Every so many rows of a key, as they come; of one epoch in the order of their times.

    With `or_after` a window that has fewer fires once the watermark is so far behind the first of them.
    """
    if not isinstance(rows, int) or isinstance(rows, bool) or not 1 <= rows <= TIME_MAX:
        raise BadOption(
            f"counted({rows!r}) counts no rows", hint="for example mp.counted(100)", option="rows"
        )
    amounts, kind = _amounts("counted", **({} if or_after is None else {"or_after": or_after}))
    return WindowCode("counted", size=rows, or_after=amounts.get("or_after", 0), span_kind=kind)


def everything() -> WindowCode:
    """One window for all time, of each key: it fires when its sources have finished, or as `emit` says."""
    return WindowCode("everything")


def windows(assign: Callable[..., Any], *, fires_at: object = None) -> WindowCode:
    """Windows of your own: a function `(time) -> [(start, end), ...]` says to which a row belongs, whatever its key.

    A window fires when it ends: `fires_at` is refused, for there is nothing to be estimated.
    """
    if fires_at is not None:
        raise BadOption(
            f"fires_at={fires_at!r} of windows whose ends are known: a window that your function gives fires at its end",
            hint="leave it out; have the function give the end at which a window is to fire",
            option="fires_at",
        )
    return WindowCode("assigned", assign=capture(assign, "window", "window"))


def _amounts(what: str, **durations: Duration) -> tuple[dict[str, int], Literal["", "timestamp", "long"]]:
    amounts = {name: parse_duration(duration) for name, duration in durations.items()}
    for name, amount in amounts.items():
        if amount == 0 and name != "offset":
            raise BadOption(
                f"{what} with {name}={durations[name]!r}", hint="make it longer than nothing", option=name
            )
    kinds: set[TimeKind] = {
        "timestamp" if isinstance(durations[name], str | timedelta) else "long"
        for name, amount in amounts.items()
        if amount
    }
    if len(kinds) > 1:
        raise BadOption(
            f"{what} has both durations and integers",
            hint="durations go with timestamps, integers with logical time",
            option=what,
        )
    return amounts, kinds.pop() if kinds else ""


# Aggregates


def mean(column: str = "") -> Aggregate:
    """The mean of the window's values, a double; nulls are ignored, null if nothing is left."""
    return Aggregate("mean", column)


def top(k: int, column: str = "") -> Aggregate:
    """The `k` largest values, the largest first, as an array; nulls are ignored."""
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= TOP_MAX:
        raise BadRule(f"top({k!r}) gives nothing", hint=f"a number from 1 to {TOP_MAX:,}", rule="top")
    return Aggregate("top", column, number=k)


def median(column: str = "") -> Aggregate:
    """The value in the middle, a double: of an even number the mean of the two; nulls are ignored."""
    return Aggregate("median", column)


def percentile(p: float, column: str = "") -> Aggregate:
    """The value below which a share `p` of all lies, between two in proportion, a double; nulls are ignored."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p <= 1:
        raise BadRule(f"percentile({p!r}) is none", hint="a share from 0 to 1, as in 0.95", rule="percentile")
    return Aggregate("percentile", column, number=float(p))


def collect(column: str = "") -> Aggregate:
    """All values in time order, as an array, nulls included: `values` by another name."""
    return Aggregate("values", column)


def where_largest(column: str, *columns: str) -> Aggregate:
    """Of the rows with the largest value in `column`, these columns, as an array of structs: all of them where there are ties."""
    return Aggregate("where_largest", column, columns=(column, *columns))


def fold(
    zero: float | tuple[float, ...],
    add: Callable[..., Any],
    merge: Callable[..., Any],
    column: str = "",
) -> Aggregate:
    """An aggregate of your own, kept as a number or a tuple of numbers.

    It begins with `zero`; `add(kept, value)` takes a row in, `merge(kept, other)` puts two together, in any order.
    """
    numbers = zero if isinstance(zero, tuple) else (zero,)
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise BadRule(
            f"zero={zero!r} is no number, and no tuple of numbers",
            hint="for other results give a function of the window's rows: def rule(times, price) -> str",
            rule="fold",
        )
    if any(isinstance(n, int) and not TIME_MIN <= n <= TIME_MAX for n in numbers):
        raise BadRule(f"zero={zero!r} is no long", hint="a double, as in 1e30, has more room", rule="fold")
    check_column(column)
    return Aggregate(
        "fold",
        column,
        zero=numbers,
        code=capture(add, "aggregate", "add"),
        merge=capture(merge, "aggregate", "merge"),
        returns="" if isinstance(zero, tuple) else ("double" if isinstance(zero, float) else "long"),
    )


def check_column(name: object) -> None:
    if not isinstance(name, str):
        raise BadOption(
            f"{name!r} is not the name of a column", hint='for example mp.median("price")', option="column"
        )


def aggregate_of(given: object) -> Aggregate:
    """An aggregate as it is; a rule of fetches as the aggregate that means the same; a function of the window's columns."""
    if isinstance(given, Aggregate):
        for name in (given.column, *given.columns):
            check_column(name)
        return given
    if isinstance(given, FetchRule):
        match given.name:
            case "count" | "total" | "smallest" | "largest" | "latest" | "values":
                return Aggregate(given.name, given.column)
            case "as_of":
                return Aggregate("latest", given.column)
        raise BadRule(
            f"{given.name}() is no aggregate of a window", hint="mp.count(), mp.median(...)", rule=given.name
        )
    if isinstance(given, tuple) and len(given) == 3:
        return fold(*given)
    if callable(given) and getattr(given, "__module__", "") in _OURS:
        name = getattr(given, "__name__", "")
        raise BadOption(
            f"mp.{name} was not called",
            hint=f'write mp.{name}(...), as in mp.total("price")',
            option="aggregate",
        )
    if callable(given):
        rule = fetch_rule(given)
        return Aggregate("custom", code=rule.code, returns=rule.returns)
    raise BadOption(
        f"{given!r} is no aggregate",
        hint='for example aggregate={"bids": mp.count(), "highest": mp.largest("price")}',
        option="aggregate",
    )


def aggregates_of(given: object) -> dict[str, Aggregate]:
    """Aggregates by the column of their results."""
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        raise BadOption(
            f"aggregate={given!r} names no results",
            hint='for example aggregate={"bids": mp.count()}',
            option="aggregate",
        )
    return {name: aggregate_of(each) for name, each in given.items()}
