"""Rules that do not fit: each is refused with a typed error that says how to mend it, and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.errors import (
    BadDuration,
    BadOption,
    BadRule,
    BadType,
    MillpondError,
    NullValue,
    RuleFailed,
    SchemaMismatch,
    WrongColumn,
    WrongType,
)
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

LONG, DOUBLE, TEXT, FLAG = pa.int64(), pa.float64(), pa.string(), pa.bool_()
EDGES = "n long, w double, added boolean"


@pytest.fixture
def pond() -> Iterator[LocalPond]:
    with LocalPond(LossyFiles(), containers=2) as opened:
        yield opened
        opened.validate()


def kept(old: int, new: int) -> int:
    return old


def swapped(new: int, old: int) -> int:
    return old - new


def third(old: int, new: int, more: int) -> int:
    return old


def lonely(old: int) -> int:
    return old


def untold(times: Any, value: Any):  # type: ignore[no-untyped-def]
    return 1


def misnamed(times: Any, price: Any) -> float:
    return 1.0


def too_few(times: Any) -> float:
    return 1.0


def misnamed_mask(times: Any, price: Any) -> Any:
    return times > 0


def strange(times: Any, value: Any) -> "nonsense":  # noqa: F821, UP037 - what it is refused for
    return 1


def rows_of(times: Any, value: Any) -> "a long, b long":  # noqa: F722 - what it is refused for
    return 1, 2


def refused(kind: type[MillpondError], call: Callable[[], Any], *named: str) -> MillpondError:
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.hint, "it says how to mend it"
    for text in named:
        assert text in str(caught.value)
    return caught.value


# Rules that do not fit a State

UNFIT: dict[str, tuple[type[MillpondError], dict[str, Any], str]] = {
    "add strings": (BadRule, {"value": "string", "update": mp.add()}, "'value'"),
    "add ints": (BadRule, {"value": "int", "update": mp.add()}, "'value'"),
    "add booleans": (BadRule, {"value": "a long, b boolean", "update": mp.add()}, "'b'"),
    "add decimals": (BadRule, {"value": "decimal(10,2)", "update": mp.add()}, "'value'"),
    "add arrays of strings": (BadRule, {"value": "a long, b array<string>", "update": mp.add()}, "'b'"),
    "add arrays of arrays": (BadRule, {"value": "array<array<long>>", "update": mp.add()}, "'value'"),
    "add structs": (BadRule, {"value": "struct<a:long>", "update": mp.add()}, "'value'"),
    "add timestamps": (BadRule, {"value": "timestamp", "update": mp.add()}, "'value'"),
    "edges of one column": (BadRule, {"value": "boolean", "update": mp.edges()}, "edges()"),
    "edges without a flag": (BadRule, {"value": "n long, m long", "update": mp.edges()}, "edges()"),
    "edges to doubles": (BadRule, {"value": "n double, added boolean", "update": mp.edges()}, "edges()"),
    "edges to arrays": (BadRule, {"value": "n array<long>, added boolean", "update": mp.edges()}, "edges()"),
    "edges that keep latest": (
        BadRule,
        {"value": EDGES, "update": mp.edges(), "compact": mp.keep_latest()},
        "keep_latest()",
    ),
    "net edges of put": (BadRule, {"value": EDGES, "compact": mp.net_edges()}, "net_edges()"),
    "net edges of add": (
        BadRule,
        {"value": "long", "update": mp.add(), "compact": mp.net_edges()},
        "net_edges()",
    ),
    "three arguments": (BadRule, {"value": "long", "update": third}, "(old, new)"),
    "one argument": (BadRule, {"value": "long", "update": lonely}, "(old, new)"),
    "mask of another column": (BadRule, {"value": "long", "compact": misnamed_mask}, "(times, value)"),
    "a fetch rule to update": (BadOption, {"value": "long", "update": mp.latest()}, "update="),
    "an update rule to compact": (BadOption, {"value": "long", "compact": mp.put()}, "compact="),
    "the maker of a rule": (BadOption, {"value": "long", "update": mp.add}, "update="),
    "a name": (BadOption, {"value": "long", "update": "add"}, "update="),
    "a class": (BadOption, {"value": "long", "update": int}, "update="),
}


@pytest.mark.parametrize("case", UNFIT)
def test_rules_that_do_not_fit_make_no_state(pond: LocalPond, case: str) -> None:
    kind, options, named = UNFIT[case]
    refused(kind, lambda: pond.state("s", key="long", **options), named)
    assert pond.states() == {}


@pytest.mark.parametrize("span", [0, "0 seconds"])
def test_a_span_of_nothing(span: Any) -> None:
    error = refused(BadRule, lambda: mp.ttl(span), "ttl")
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("span", [-1, "-1 day", 1.5, True, None, "soon", "1 month"])
def test_what_is_no_span(span: Any) -> None:
    refused(BadDuration, lambda: mp.ttl(span))


def test_a_span_of_another_kind_than_the_times(pond: LocalPond) -> None:
    state = pond.state("a", key="long", value="long", compact=mp.ttl("2 days"))
    feed = state.update(key="k", at="t", value="v", name="feed")
    refused(MillpondError, lambda: feed(pa.table({"k": [1], "t": [1], "v": [1]}), 0), "are texts with a unit")
    other = pond.state("b", key="long", value="long", compact=mp.ttl(5))
    feed = other.update(key="k", at="t", value="v", name="feed")
    moment = pa.array([datetime(2026, 1, 1, tzinfo=UTC)])
    refused(MillpondError, lambda: feed(pa.table({"k": [1], "t": moment, "v": [1]}), 0), "are integers, and")
    assert [figures["versions"] for figures in pond.metrics()["states"].values()] == [0, 0]


# Fetch rules


FETCHES: dict[str, tuple[type[MillpondError], Any, str]] = {
    "no annotation": (BadRule, untold, "'untold'"),
    "another column": (BadRule, misnamed, "(times, value)"),
    "a column missing": (BadRule, too_few, "(times, value)"),
    "a type that there is not": (BadType, strange, "nonsense"),
    "no annotation is possible": (BadRule, lambda times, value: 1.0, "returns"),
    "neighbours of no edges": (BadRule, mp.neighbours(), "neighbours()"),
    "an update rule": (BadOption, mp.add(), "rule="),
    "a compaction rule": (BadOption, mp.keep_all(), "rule="),
}


@pytest.mark.parametrize("case", FETCHES)
def test_fetch_rules_that_do_not_fit(pond: LocalPond, case: str) -> None:
    kind, rule, named = FETCHES[case]
    state = pond.state("s", key="long", value="long")
    refused(kind, lambda: state.fetch(key="k", at="t", rule=rule), named)


def test_a_fetch_rule_gives_one_column(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long")
    with pytest.raises(BadRule, match="one value"):
        state.fetch(key="k", at="t", rule=rows_of)


# Nulls


NULLS: dict[str, tuple[Any, str, dict[str, Any], str]] = {
    "add": (mp.add(), "long", {"v0": pa.array([1, None], LONG)}, "value"),
    "the second column of add": (
        mp.add(),
        "a long, b double",
        {"v0": pa.array([1, 2], LONG), "v1": pa.array([None, 1.0], DOUBLE)},
        "b",
    ),
    "a vector": (mp.add(), "array<long>", {"v0": pa.array([[1], None], pa.list_(LONG))}, "value"),
    "an item of a vector": (
        mp.add(),
        "array<long>",
        {"v0": pa.array([[1], [None]], pa.list_(LONG))},
        "value",
    ),
    "a rule of one's own": (kept, "long", {"v0": pa.array([None, 1], LONG)}, "value"),
    "a neighbour": (
        mp.edges(),
        "n long, added boolean",
        {"v0": pa.array([1, None], LONG), "v1": pa.array([True, True], FLAG)},
        "n",
    ),
    "whether it was added": (
        mp.edges(),
        "n string, added boolean",
        {"v0": pa.array(["a", "b"], TEXT), "v1": pa.array([True, None], FLAG)},
        "added",
    ),
}


@pytest.mark.parametrize("case", NULLS)
def test_nulls_that_a_rule_cannot_take_change_nothing(pond: LocalPond, case: str) -> None:
    rule, value, columns, named = NULLS[case]
    state = pond.state("s", key="long", value=value, update=rule)
    feed = state.update(key="k", at="t", value=list(columns), name="feed")
    table = pa.table({"k": [1, 2], "t": [1, 2], **columns})
    before = (state.progress(), pond.metrics()["states"])
    error = refused(NullValue, lambda: feed(table, 0), named)
    assert (error.column, error.rows) == (named, 1)
    assert (state.progress(), pond.metrics()["states"]) == before


def test_nulls_beside_a_neighbour_and_under_put_are_values(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value=EDGES, update=mp.edges())
    feed = state.update(key="k", at="t", value=["n", "w", "a"], name="feed")
    feed(pa.table({"k": [1], "t": [1], "n": [7], "w": pa.array([None], DOUBLE), "a": [True]}), 0)
    state.finish("feed")
    found = state.fetch(key="k", at="t").now(pa.table({"k": [1], "t": [1]}))
    assert (found["n"].to_pylist(), found["w"].to_pylist()) == ([[7]], [[None]])


# The order of rows


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1, None], LONG), NullValue),
        (pa.array(["a", "b"]), WrongType),
        (pa.array([0.5, 1.5]), WrongType),
        (None, WrongColumn),
    ],
    ids=["null", "string", "double", "missing"],
)
def test_a_seq_that_is_no_order(pond: LocalPond, column: Any, kind: type[MillpondError]) -> None:
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="t", value="v", seq="seq", name="feed")
    table = pa.table({"k": [1, 2], "t": [1, 2], "v": [1, 2]})
    if column is not None:
        table = table.append_column("seq", column)
    error: Any = refused(kind, lambda: feed(table, 0), "'seq'")
    assert error.column == "seq"
    assert state.progress().update == float("-inf")


# The same State again


def test_a_state_with_other_rules_is_another_state(pond: LocalPond) -> None:
    pond.state("s", key="long", value="long", update=mp.add(), compact=mp.ttl(5))
    assert pond.state("s", key="long", value="long", update=mp.add(), compact=mp.ttl(5)).name == "s"
    for update, compact in (
        (mp.put(), mp.ttl(5)),
        (mp.add(), mp.ttl(6)),
        (mp.add(), mp.keep_all()),
        (kept, mp.ttl(5)),
        (mp.add(), None),
    ):
        error: Any = refused(
            SchemaMismatch,
            lambda update=update, compact=compact: pond.state(
                "s", key="long", value="long", update=update, compact=compact
            ),
        )
        assert error.existing != error.requested


def test_a_rule_may_name_its_arguments_as_it_likes(pond: LocalPond) -> None:
    """They are given by place: the older value first."""
    state = pond.state("s", key="long", value="long", update=swapped)
    state.update(key="k", at="t", value="v", name="feed")(
        pa.table({"k": [1, 1], "t": [1, 2], "v": [9, 2]}), 0
    )
    state.finish("feed")
    found = state.fetch(key="k", at="t", into="a").now(pa.table({"k": [1], "t": [2]}))
    assert found["a"].to_pylist() == [2 - 9]


def speechless(times: Any, value: Any) -> int:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    raise Odd


def garbled(times: Any, value: Any) -> int:
    raise ValueError("a\ud800c" * 10_000)


@pytest.mark.filterwarnings("ignore::millpond.errors.RuleInterpreted")
@pytest.mark.parametrize(("rule", "told"), [(speechless, "Odd"), (garbled, r"ValueError: a\ud800c")])
def test_whatever_a_fetch_rule_raises_can_be_told(pond: LocalPond, rule: Any, told: str) -> None:
    state = pond.state("s", key="long", value="long")
    state.update(key="k", at="t", value="v", name="feed")(pa.table({"k": [1], "t": [1], "v": [5]}), 0)
    state.finish("feed")
    asked = pa.table({"k": [1], "low": [0], "t": [1]})
    with pytest.raises(
        RuleFailed, match=re.escape(f"the fetch rule {rule.__name__!r} failed: {told}")
    ) as caught:
        state.fetch(key="k", between=("low", "t"), into="x", rule=rule).now(asked)
    assert len(str(caught.value)) < 50_000
