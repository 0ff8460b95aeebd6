"""Rules: what runs beside the state when a row updates it, a row asks it, or old values are compacted.

A rule is a small frozen value. Those of Millpond travel by name, a user's own as source text (`code.capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec

from millpond.code.capture import Code, capture
from millpond.errors import BadRule
from millpond.times import TimeKind, parse_duration

UpdateName = Literal["put", "add", "edges", "custom"]
CompactName = Literal["keep_latest", "keep_all", "ttl", "net_edges", "custom"]
FetchName = Literal[
    "latest", "as_of", "values", "count", "total", "smallest", "largest", "neighbours", "changes", "custom"
]
"""What is asked of a slice. `changes`, of which walks are made, is for Millpond itself."""
HOPS_MAX = 5
PATHS_MAX = 1_000_000
RETURNS = {int: "long", float: "double", bool: "boolean", str: "string"}


class UpdateRule(msgspec.Struct, frozen=True):
    """`add` and `custom` fold: the value at a time is made of all updates up to it."""

    name: UpdateName
    code: Code | None = None

    @property
    def folds(self) -> bool:
        return self.name in ("add", "custom")

    @property
    def replaces(self) -> bool:
        """Whether an update takes the place of one with the same key and time."""
        return self.name == "put"


class CompactRule(msgspec.Struct, frozen=True):
    """`span` is how long a value lives, in units of times of the kind `span_kind`; 0 for ever."""

    name: CompactName
    code: Code | None = None
    span: int = 0
    span_kind: Literal["", "timestamp", "long"] = ""


class Walk(msgspec.Struct, frozen=True):
    """Paths to the vertex in the column `to`: for each number of hops how far back its edges may be; 0 for ever."""

    to: str
    spans: dict[int, int]
    span_kind: Literal["", "timestamp", "long"]
    limit: int


class FetchRule(msgspec.Struct, frozen=True):
    """`returns` is the type that a user's own rule gives, as DDL. `paths` comes with its walk, and asks for changes."""

    name: FetchName | Literal["paths"]
    code: Code | None = None
    returns: str = ""
    walk: Walk | None = None
    column: str = ""
    """In a window: the value column that it is of, where there are several."""


# Updates


def put() -> UpdateRule:
    """Add `(time, value)` to the key's value set; a value at the same time is replaced."""
    return UpdateRule("put")


def add() -> UpdateRule:
    """Accumulate: the value as of T is the sum, column by column, of all updates with time <= T.

    Columns are long or double (float too), or arrays of these, added item by item: a shorter array counts as if
    it went on with zeros. Longs wrap around beyond 2**63, as NumPy's do.
    """
    return UpdateRule("add")


def edges() -> UpdateRule:
    """Neighbours of a vertex: each update adds one (`true`) or takes it away (`false`) at its time.

    The first value column is the neighbour, the last one a boolean; columns between them belong to the edge.
    All updates of one time are kept.
    """
    return UpdateRule("edges")


def update_rule(given: UpdateRule | Callable[..., Any]) -> UpdateRule:
    """A rule as it is; a function `(old, new) -> value` as a rule of the user's own."""
    return (
        given if isinstance(given, UpdateRule) else UpdateRule("custom", capture(given, "update", "update"))
    )


# Compaction


def keep_latest() -> CompactRule:
    """Below fetch progress F keep only the newest value of each key; from F on keep all."""
    return CompactRule("keep_latest")


def keep_all() -> CompactRule:
    """Keep every value for ever."""
    return CompactRule("keep_all")


def ttl(span: str | int | timedelta) -> CompactRule:
    """A value lives for `span` after its time: later reads do not see it. Otherwise as `keep_latest`.

    A duration for timestamps ("2 days"), an integer for logical time.
    """
    amount = parse_duration(span)
    if amount == 0:
        raise BadRule("ttl of zero would keep nothing", hint='for example mp.ttl("2 days")', rule="ttl")
    kind: TimeKind = "timestamp" if isinstance(span, (str, timedelta)) else "long"
    return CompactRule("ttl", span=amount, span_kind=kind)


def net_edges() -> CompactRule:
    """For `edges`: below fetch progress F keep of each neighbour the last addition, unless it was taken away since."""
    return CompactRule("net_edges")


def compact_rule(given: CompactRule | Callable[..., Any]) -> CompactRule:
    """A rule as it is; a function `(times, column, ...) -> which to keep` as a rule of the user's own."""
    return (
        given
        if isinstance(given, CompactRule)
        else CompactRule("custom", capture(given, "compaction", "compact"))
    )


# Fetches


def latest(column: str = "") -> FetchRule:
    """The newest value of the range; null if there is none."""
    return FetchRule("latest", column=column)


def as_of() -> FetchRule:
    """The newest value up to the end of the range, even if it is older than the range; null if there is none.

    With `isolation="uncommitted"` the beginning of the range then says just how stale an answer may be.
    """
    return FetchRule("as_of")


def values(column: str = "") -> FetchRule:
    """All values of the range in time order, as an array; empty if there is none."""
    return FetchRule("values", column=column)


def count(column: str = "") -> FetchRule:
    """How many values the range holds, null ones included."""
    return FetchRule("count", column=column)


def total(column: str = "") -> FetchRule:
    """The sum of the range's values; nulls are ignored, null if nothing is left."""
    return FetchRule("total", column=column)


def smallest(column: str = "") -> FetchRule:
    """The smallest value of the range; nulls are ignored, null if nothing is left."""
    return FetchRule("smallest", column=column)


def largest(column: str = "") -> FetchRule:
    """The largest value of the range (NaN above all numbers); nulls are ignored, null if nothing is left."""
    return FetchRule("largest", column=column)


def neighbours() -> FetchRule:
    """For `edges`: the neighbours whose last update in the range adds them, oldest first, as an array."""
    return FetchRule("neighbours")


def paths(
    *,
    to: str,
    hops: int | Sequence[int] | Mapping[int, str | int | timedelta],
    limit: int = 1_000,
) -> FetchRule:
    """For `edges`: the paths from the vertex that is asked about to the one in the column `to`, as an array of arrays.

    `hops` says how many edges a path has, from 1 to 5: a number, several, or for each how old its edges may be at the time
    that is asked for ("48 hours", or an integer for logical time). A path visits no vertex twice. Of a row's paths at most
    `limit` are taken: those of the fewest hops, then those of the oldest edges, from the first edge on.

    The State holds each edge at both its ends: its key is a vertex and a boolean, true where the edges lead to the
    neighbour and false where they come from it.
    """
    if not isinstance(to, str):
        raise BadRule(
            f"to={to!r} is not the name of a column",
            hint='for example mp.paths(to="src", hops=2)',
            rule="paths",
        )
    whole = isinstance(limit, int) and not isinstance(limit, bool)
    if not whole or not 1 <= limit <= PATHS_MAX:
        raise BadRule(
            f"limit={limit!r} is no number of paths", hint=f"give one from 1 to {PATHS_MAX:,}", rule="paths"
        )
    spans = _spans_of(hops)
    kinds = {isinstance(span, (str, timedelta)) for span in spans.values() if span is not None}
    if len(kinds) > 1:
        raise BadRule(
            f"hops={hops!r} has both durations and integers",
            hint="durations go with timestamps, integers with logical time",
            rule="paths",
        )
    kind: Literal["", "timestamp", "long"] = "" if not kinds else "timestamp" if kinds.pop() else "long"
    amounts = {n: 0 if span is None else parse_duration(span) for n, span in sorted(spans.items())}
    if any(amounts[n] == 0 and span is not None for n, span in spans.items()):
        raise BadRule(
            f"hops={hops!r}: within a span of zero there are no edges",
            hint='for example hops={2: "48 hours"}; hops=2 for edges of any age',
            rule="paths",
        )
    return FetchRule("paths", walk=Walk(to, amounts, kind, limit))


def _spans_of(hops: Any) -> dict[int, Any]:
    if isinstance(hops, Mapping):
        spans = dict(hops)
    elif isinstance(hops, Sequence) and not isinstance(hops, str):
        spans = dict.fromkeys(hops)
    else:
        spans = {hops: None}
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in spans)
    if not spans or not whole or not all(1 <= n <= HOPS_MAX for n in spans):
        raise BadRule(
            f"hops={hops!r} does not say how many edges a path has",
            hint=f'from 1 to {HOPS_MAX}, for example hops=3, hops=[2, 3] or hops={{2: "48 hours"}}',
            rule="paths",
        )
    return spans


def fetch_rule(given: FetchRule | Callable[..., Any]) -> FetchRule:
    """A rule as it is; a function `(times, column, ...) -> value` as a rule of the user's own.

    What the function is said to return tells the type of the answer: `-> float`, or DDL as in `-> "array<long>"`.
    """
    if isinstance(given, FetchRule):
        if given.column:
            raise BadRule(
                f"{given.name}({given.column!r}) names a column, and a fetch asks for all of them",
                hint=f"mp.{given.name}(); columns are named in windows",
                rule=given.name,
            )
        return given
    code = capture(given, "fetch", "rule")
    returns = getattr(given, "__annotations__", {}).get("return")
    if isinstance(returns, str):
        # With `from __future__ import annotations` even `-> float` is text, and DDL text is quoted twice.
        returns = returns.strip("'\"")
        returns = {kind.__name__: kind for kind in RETURNS}.get(returns, returns)
    found = RETURNS.get(returns) if isinstance(returns, type) else returns
    if not found:
        raise BadRule(
            f"the fetch rule {code.name!r} does not say what it returns",
            hint='write for example: def rule(times, price) -> float, or -> "array<long>"',
            rule=code.name,
        )
    return FetchRule("custom", code, str(found))
