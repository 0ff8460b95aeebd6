"""Rules of update, fetch and compaction: whole histories against the naive oracle, and each promise by hand."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rules_oracle import Columns, RuleOracle

import millpond as mp
import millpond.coordinator.tidying
import millpond.ops.intake
import millpond.stores.versioned
from millpond.code.rules import fetch_rule
from millpond.container.holdings.state import StateHolding
from millpond.errors import BadRule, BelowFetchProgress, EpochChanged, RuleFailed, RuleInterpreted
from millpond.ops.committing import commit_staged
from millpond.ops.intake import Part
from millpond.stores.folds import Fold
from millpond.stores.versioned import VersionedSlice
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.base import LOCAL_QUERY, Turn
from millpond.wire.epochs import EpochPlan, Receipt
from millpond.wire.states import RowsWork

LONG, DOUBLE, FLOAT, TEXT, FLAG = pa.int64(), pa.float64(), pa.float32(), pa.string(), pa.bool_()
LOWEST, HIGHEST = -(2**63), 2**63 - 1
KEYS = (0, 1, 2)
"""The last one never gets a value."""
DELAY = 7
SPAN = 4
SLICES = 2


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator tidies up when it is told to: a history is the same every time."""
    monkeypatch.setattr(millpond.coordinator.tidying, "TIDY_S", math.inf)


@pytest.fixture
def pond() -> Iterator[LocalPond]:
    with LocalPond(LossyFiles(), containers=2, slices=4) as opened:
        yield opened
        opened.validate()


# Rules of a user's own


def shifted(old: int, new: int) -> int:
    """The order of updates shows in the value."""
    return old * 10 + new


def joined(old: str, new: str) -> str:
    return old + "," + new


def mixed(old: Any, new: Any) -> Any:
    """Two columns, each of which depends on both."""
    return old.total + new.total, old.last * 0.5 + new.last + old.total


def guarded(old: int, new: int) -> int:
    if new < 0:
        raise ValueError("below zero")
    return old * 10 + new


def guarded_in_python(old: int, new: int) -> int:
    words = {"limit": 0, "what": "below zero"}
    if new < words["limit"]:
        raise ValueError(words["what"])
    return old * 10 + new


def weighed(times: Any, value: Any) -> float:
    """The order, the times and the values all show in the answer."""
    answer = 0.0
    for place in range(len(times)):
        answer = answer * 3.0 + times[place] * 5.0 + value[place]
    return answer


def listed(times: Any, value: Any) -> str:
    return " ".join(f"{when}:{what}" for when, what in zip(times, value, strict=True))


def doubled(times: Any, value: Any) -> "array<long>":  # noqa: F722 - DDL, no name
    return [2 * int(what) for what in value]


def first_is_last(times: Any, value: Any) -> bool:
    return value[0] == value[len(value) - 1]


def only_the_newest(times: Any, value: Any) -> Any:
    return times == times[-1]


def only_the_smallest(times: Any, value: Any) -> Any:
    return value == value.min()


def the_two_newest(times: Any, value: Any) -> Any:
    keep = np.zeros(len(times), dtype=np.bool_)
    keep[-2:] = True
    return keep


def none_at_all(times: Any, value: Any) -> Any:
    return times > times[-1]


# Kinds of States, and what is asked of them

Expected = Callable[[RuleOracle, Any, "int | None", int], Any]


@dataclass(frozen=True)
class Read:
    """A fetch rule, and what the oracle says of one column of its answer.

    `newest`: the answer is made of what holds at the end of the range, so that compaction must leave it alone.
    `ranged`: it also takes the beginning of a range into account.
    """

    rule: Any
    answers: tuple[Expected, ...]
    newest: bool = False
    ranged: bool = True


def held(number: int, how: str) -> Expected:
    def answer(oracle: RuleOracle, key: Any, low: int | None, high: int) -> Any:
        value = getattr(oracle, how)(key, low, high)
        return None if value is None else value[number]

    return answer


def over(function: Callable[[list[Any]], Any], number: int = 0) -> Expected:
    return lambda oracle, key, low, high: function(oracle.column(key, low, high, number))


def own(function: Callable[..., Any]) -> Expected:
    def answer(oracle: RuleOracle, key: Any, low: int | None, high: int) -> Any:
        times = oracle.times(key, low, high)
        return function(np.array(times), oracle.column(key, low, high)) if times else None

    return answer


def beside(number: int) -> Expected:
    return lambda oracle, key, low, high: [edge[number] for edge in oracle.neighbours(key, low, high)]


def newest_of(columns: int) -> list[Read]:
    return [
        Read(mp.latest(), tuple(held(n, "latest") for n in range(columns)), newest=True),
        Read(mp.as_of(), tuple(held(n, "as_of") for n in range(columns)), newest=True, ranged=False),
    ]


def all_of(columns: int) -> list[Read]:
    return [
        Read(mp.values(), tuple(over(list, n) for n in range(columns))),
        Read(mp.count(), (over(len),)),
    ]


NUMBERS = [
    Read(mp.total(), (over(lambda values: sum(values) if values else None),)),
    Read(mp.smallest(), (over(lambda values: min(values, default=None)),)),
    Read(mp.largest(), (over(lambda values: max(values, default=None)),)),
]
OWN = [Read(fetch_rule(rule), (own(rule),)) for rule in (weighed, listed, doubled, first_is_last)]


def edges_of(columns: int) -> list[Read]:
    return [Read(mp.neighbours(), tuple(beside(n) for n in range(columns)), newest=True)]


small = st.integers(-3, 6)
halves = st.integers(-8, 8).map(lambda number: number / 2)
vectors = st.lists(small, max_size=3)
half_vectors = st.lists(halves, max_size=3)


@dataclass(frozen=True)
class Kind:
    value: str
    types: tuple[pa.DataType, ...]
    drawn: st.SearchStrategy[Columns]
    reads: Sequence[Read]
    update: Any = field(default_factory=mp.put)
    compact: Any = None
    span: int | None = None
    seq: bool = False
    text_keys: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        parts = [part.split() for part in self.value.split(", ")]
        return tuple(part[0] for part in parts) if len(parts[0]) > 1 else ("value",)

    def oracle(self, delay: int = DELAY) -> RuleOracle:
        update = self.update if callable(self.update) else self.update.name
        return RuleOracle(update, self.names, self.span, delay)


KINDS = {
    "put": Kind("long", (LONG,), st.tuples(small), newest_of(1) + all_of(1) + NUMBERS + OWN),
    "put-seq": Kind("long", (LONG,), st.tuples(small), newest_of(1) + all_of(1), seq=True),
    "put-ttl": Kind(
        "string",
        (TEXT,),
        st.tuples(st.sampled_from(["", "a", "b", "long enough to lie elsewhere"])),
        newest_of(1) + all_of(1) + OWN[1:2],
        compact=mp.ttl(SPAN),
        span=SPAN,
        text_keys=True,
    ),
    "put-own-compaction": Kind("long", (LONG,), st.tuples(small), newest_of(1), compact=only_the_newest),
    "add": Kind("long", (LONG,), st.tuples(small), newest_of(1) + all_of(1) + NUMBERS, mp.add()),
    "add-keep-all": Kind(
        "long", (LONG,), st.tuples(small), newest_of(1) + all_of(1) + NUMBERS, mp.add(), mp.keep_all()
    ),
    "add-ttl": Kind(
        "long",
        (LONG,),
        st.tuples(small),
        newest_of(1) + all_of(1) + NUMBERS,
        mp.add(),
        mp.ttl(SPAN),
        SPAN,
        seq=True,
    ),
    "add-vectors": Kind(
        "a double, b array<long>, c float, d array<double>",
        (DOUBLE, pa.list_(LONG), FLOAT, pa.list_(DOUBLE)),
        st.tuples(halves, vectors, halves, half_vectors),
        newest_of(4) + all_of(4),
        mp.add(),
        text_keys=True,
    ),
    "add-vectors-ttl": Kind(
        "array<float>",
        (pa.list_(FLOAT),),
        st.tuples(half_vectors),
        newest_of(1) + all_of(1),
        mp.add(),
        mp.ttl(SPAN),
        SPAN,
    ),
    "edges": Kind(
        "n long, added boolean",
        (LONG, FLAG),
        st.tuples(st.integers(0, 3), st.booleans()),
        edges_of(1),
        mp.edges(),
    ),
    "edges-seq": Kind(
        "n string, weight double, added boolean",
        (TEXT, DOUBLE, FLAG),
        st.tuples(st.sampled_from(["", "a", "bb"]), halves, st.booleans()),
        edges_of(2),
        mp.edges(),
        mp.net_edges(),
        seq=True,
        text_keys=True,
    ),
    "edges-keep-all": Kind(
        "n long, tags array<long>, added boolean",
        (LONG, pa.list_(LONG), FLAG),
        st.tuples(st.integers(0, 3), vectors, st.booleans()),
        edges_of(2) + all_of(3),
        mp.edges(),
        mp.keep_all(),
    ),
    "edges-ttl": Kind(
        "n long, added boolean",
        (LONG, FLAG),
        st.tuples(st.integers(0, 3), st.booleans()),
        edges_of(1) + all_of(2),
        mp.edges(),
        mp.ttl(SPAN),
        SPAN,
    ),
    "own": Kind(
        "long", (LONG,), st.tuples(st.integers(0, 9)), newest_of(1) + all_of(1) + NUMBERS + OWN, shifted
    ),
    "own-seq": Kind(
        "long", (LONG,), st.tuples(st.integers(0, 9)), newest_of(1) + all_of(1), shifted, seq=True
    ),
    "own-ttl": Kind(
        "long",
        (LONG,),
        st.tuples(st.integers(0, 9)),
        newest_of(1) + all_of(1),
        shifted,
        mp.ttl(SPAN),
        SPAN,
    ),
    "own-keep-all": Kind(
        "long", (LONG,), st.tuples(st.integers(0, 9)), newest_of(1) + all_of(1), shifted, mp.keep_all()
    ),
    "own-in-python": Kind(
        "string",
        (TEXT,),
        st.tuples(st.sampled_from(["", "a", "bb"])),
        newest_of(1) + all_of(1),
        joined,
        text_keys=True,
    ),
    "own-two-columns": Kind(
        "total long, last double",
        (LONG, DOUBLE),
        st.tuples(st.integers(0, 3), halves),
        newest_of(2) + all_of(2),
        mixed,
    ),
    "own-that-fails": Kind("long", (LONG,), st.tuples(st.integers(-2, 9)), newest_of(1) + all_of(1), guarded),
    "own-that-fails-in-python": Kind(
        "long", (LONG,), st.tuples(st.integers(-2, 9)), newest_of(1) + all_of(1), guarded_in_python
    ),
}


# Histories

Step = tuple[str, Any]
LIGHT = {"fetch", "checkpoint"}
"""Steps that leave all rows where they are. What they spoil all the same, the checks after the next steps see."""


class World:
    """A pond and the oracle, that the same happens to."""

    def __init__(self, kind: Kind, containers: int = 2) -> None:
        self.kind = kind
        self.files = LossyFiles()
        self.containers = containers
        self.oracle = kind.oracle()
        self.epochs = self.steps = 0
        self.open()

    def open(self) -> None:
        self.pond = LocalPond(self.files, containers=self.containers, slices=SLICES)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuleInterpreted)
            self.state = self.pond.state(
                "s",
                key="string" if self.kind.text_keys else "long",
                value=self.kind.value,
                update=self.kind.update,
                compact=self.kind.compact,
            )
            self.fetches = [
                [
                    self.state.fetch(key="k", at="high", rule=read.rule, into=self.into(read)),
                    self.state.fetch(key="k", between=("low", "high"), rule=read.rule, into=self.into(read)),
                ]
                for read in self.kind.reads
            ]
        self.feed = self.state.update(
            key="k",
            at="t",
            value=[f"v{number}" for number in range(len(self.kind.types))],
            delay=DELAY,
            seq="seq" if self.kind.seq else None,
            name="feed",
        )

    def into(self, read: Read) -> list[str]:
        return [f"a{number}" for number in range(len(read.answers))]

    def key(self, key: int) -> Any:
        return f"key {key}" if self.kind.text_keys else key

    def do(self, step: Step) -> None:
        what, how = step
        if what == "rows":
            self.rows(*how)
        elif what == "fetch":
            self.state.report("reader", fetch=how)
            self.oracle.report(how)
        elif what == "maintain":
            self.pond.maintain()
        elif what == "checkpoint":
            self.pond.checkpoint()
        elif what == "kill":
            self.pond.hosting.kill(how % self.containers)
            for container in range(self.containers):
                self.pond.coordinator.recover(container)
        elif what == "reopen":
            self.pond.close()
            self.open()
        else:
            self.state.finish("feed")
            self.oracle.finish()

    def rows(self, rows: Sequence[tuple[int, int, Columns]], seq: Sequence[int]) -> None:
        """Rows whose place in the table says nothing if there is a `seq`."""
        table = pa.table(
            {
                "k": pa.array([self.key(row[0]) for row in rows], TEXT if self.kind.text_keys else LONG),
                "t": pa.array([row[1] for row in rows], LONG),
                **{
                    f"v{n}": pa.array([row[2][n] for row in rows], of) for n, of in enumerate(self.kind.types)
                },
                "seq": pa.array(seq, LONG),
            }
        )
        self.feed(table, self.epochs)
        self.epochs += 1
        self.oracle.epoch(rows, seq if self.kind.seq else None)

    def questions(self) -> list[tuple[int, int | None, int]]:
        """Every time as of which may be asked, and ranges: from F on, and others."""
        start = 0 if math.isinf(self.oracle.fetch_progress) else int(self.oracle.fetch_progress)
        lows = {start - 1, start, start + 2, start + 5, -1}
        highs = (start, start + 1, start + 4, start + 9, 25)
        ats = [(key, None, high) for key in KEYS for high in range(-1, 26)]
        return [*ats, *((key, low, high) for key in KEYS for low in sorted(lows) for high in highs)]

    def check(self, what: str = "") -> None:
        """Everything; after a step that leaves all rows where they are, only what each key holds."""
        self.steps += 1
        progress = self.state.progress()
        assert progress.update == self.oracle.update_progress
        assert progress.fetch == self.oracle.fetch_progress
        self.pond.validate()
        self.check_snapshot()
        questions = self.questions()
        for read, (at, between) in zip(self.kind.reads, self.fetches, strict=True):
            if what in LIGHT and not read.newest:
                continue
            for fetch, ranged in ((at, False), (between, True)):
                asked = [question for question in questions if (question[1] is not None) == ranged]
                allowed = [question for question in asked if self.allowed(read, question)]
                self.compare(read, fetch, allowed)
                # What is refused may be answered all the same, but not wrongly.
                below = [q for q in asked if q[2] < self.oracle.update_progress and not self.allowed(read, q)]
                if below:
                    with suppress(BelowFetchProgress):
                        self.compare(read, fetch, [below[self.steps * 7 % len(below)]])

    def check_snapshot(self) -> None:
        at = 25 if math.isinf(self.oracle.update_progress) else int(self.oracle.update_progress) - 1
        if not self.oracle.allowed(None, at, newest=True):
            return
        found = self.state.snapshot(at).to_pylist()
        rows = [(row.pop("key"), row.pop("time"), *row.values()) for row in found]
        right = [
            (self.key(key), entry.time, *entry.value)
            for key in KEYS
            for entry in self.oracle.snapshot(key, at)
        ]
        assert sorted(rows, key=repr) == sorted(right, key=repr)

    def allowed(self, read: Read, question: tuple[int, int | None, int]) -> bool:
        _, low, high = question
        return self.oracle.allowed(low if read.ranged else None, high, read.newest)

    def compare(self, read: Read, fetch: Any, asked: Sequence[tuple[int, int | None, int]]) -> None:
        table = pa.table(
            {
                "k": pa.array([self.key(key) for key, _, _ in asked], TEXT if self.kind.text_keys else LONG),
                "low": pa.array([low for _, low, _ in asked], LONG),
                "high": pa.array([high for _, _, high in asked], LONG),
            }
        )
        answers = fetch.now(table)
        for number, expected in enumerate(read.answers):
            found = answers[f"a{number}"].to_pylist()
            right = [expected(self.oracle, key, low, high) for key, low, high in asked]
            if found != right:
                wrong = [
                    (question, one, other)
                    for question, one, other in zip(asked, found, right, strict=True)
                    if one != other
                ]
                raise AssertionError(f"{read.rule.name}: (key, low, high), found, expected: {wrong[:5]}")


@st.composite
def histories(draw: st.DrawFn, kind: Kind) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw(st.integers(2, 7))):
        what = draw(st.sampled_from(["rows", "rows", "fetch", "maintain", "checkpoint", "kill", "reopen"]))
        how: Any = None
        if what == "rows":
            # Times run ahead slowly, so that most rows are in time and out of order.
            start = 2 * len(steps)
            row = st.tuples(
                st.sampled_from(KEYS[:-1]),
                st.sampled_from([start + more for more in (0, 1, 4, DELAY, DELAY + 2)]),
                kind.drawn,
            )
            rows = draw(st.lists(row, min_size=1, max_size=9))
            how = (rows, draw(st.permutations(range(len(rows)))))
        elif what == "fetch":
            how = draw(st.integers(0, 22))
        elif what == "kill":
            how = draw(st.integers(0, 1))
        steps.append((what, how))
    return steps


def run(kind: Kind, steps: Sequence[Step]) -> World:
    """The history with a check after every step, then with everything final and compacted."""
    world = World(kind)
    for step in steps:
        world.do(step)
        world.check(step[0])
    for step in (("finish", None), ("maintain", None), ("reopen", None), ("maintain", None)):
        world.do(step)
        world.check()
    world.pond.close()
    return world


def search(name: str, examples: int, shrink: bool = True) -> None:
    """Many histories of one kind of State."""
    kind = KINDS[name]

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    @given(histories(kind))
    def check(steps: list[Step]) -> None:
        run(kind, steps)

    check()


@pytest.mark.parametrize("name", KINDS)
def test_any_history_is_answered_as_the_oracle_does(name: str) -> None:
    search(name, examples=4)


# Each promise by hand


def fill(
    state: mp.State, times: Sequence[Any], values: Sequence[Any], of: pa.DataType = LONG, epoch: int = 0
) -> None:
    """Rows of key 1; the State's only updater, `feed`."""
    feed = state.update(key="k", at="t", value="v", delay=1000, name="feed")
    feed(pa.table({"k": [1] * len(times), "t": times, "v": pa.array(values, of)}), epoch)


def answers(state: mp.State, times: Sequence[int], rule: Any = None) -> list[Any]:
    asked = pa.table({"k": [1] * len(times), "t": pa.array(times, LONG)})
    found: list[Any] = state.fetch(key="k", at="t", into="a", rule=rule).now(asked)["a"].to_pylist()
    return found


def same_for_ever(files: LossyFiles, pond: LocalPond, look: Callable[[mp.State], Any]) -> Any:
    """What `look` sees now; the same after compaction, a checkpoint, a kill, and on the same files again."""
    seen = look(pond.state("s"))
    pond.maintain()
    assert look(pond.state("s")) == seen, "after compaction"
    pond.checkpoint()
    assert look(pond.state("s")) == seen, "after a checkpoint"
    pond.hosting.kill(0)
    pond.coordinator.recover(0)
    assert look(pond.state("s")) == seen, "after a kill"
    pond.close()
    with LocalPond(files) as again:
        assert look(again.state("s")) == seen, "after it was opened again"
    return seen


@pytest.fixture
def files() -> LossyFiles:
    return LossyFiles()


@pytest.fixture
def lone(files: LossyFiles) -> LocalPond:
    """A pond of one container, closed by the test."""
    return LocalPond(files)


def test_longs_wrap_around_when_they_are_added(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long", update=mp.add())
    fill(state, [1, 2], [HIGHEST, 1])
    state.finish("feed")
    assert answers(state, [1, 2]) == [HIGHEST, LOWEST]


def test_infinities_and_nan_do_not_spoil_what_was_before(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="double", update=mp.add())
    fill(state, [1, 2, 3], [1.5, math.inf, -math.inf], DOUBLE)
    state.finish("feed")
    assert repr(answers(state, [1, 2, 3])) == "[1.5, inf, nan]"


def test_a_sum_of_floats_is_the_same_from_files(files: LossyFiles, lone: LocalPond) -> None:
    state = lone.state("s", key="long", value="float", update=mp.add())
    fill(state, [1, 2, 3], [2.0**24, 1.0, 1.0], FLOAT)
    state.report("reader", fetch=3)
    state.finish("feed")
    same_for_ever(files, lone, lambda state: answers(state, [3]))


def test_a_replayed_epoch_is_not_added_again(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long", update=mp.add())
    for _ in range(2):
        fill(state, [1, 1], [5, 5])
    state.finish("feed")
    assert answers(state, [1]) == [10]


def test_a_value_that_a_rule_refuses_is_counted_and_changes_nothing(pond: LocalPond) -> None:
    for name, rule in (("compiled", guarded), ("interpreted", guarded_in_python)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuleInterpreted)
            state = pond.state(name, key="long", value="long", update=rule)
        fill(state, [1, 2, 3], [7, -1, 4])
        state.finish("feed")
        assert answers(state, [1, 2, 3]) == [7, 7, 74]
        assert pond.metrics()["states"][name]["rule_failures"] == 1


def divided(old: int, new: int) -> int:
    return old // new


def test_a_division_by_zero_is_a_failure_of_the_rule(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long", update=divided)
    fill(state, [1, 2, 3], [8, 0, 2])
    state.finish("feed")
    assert answers(state, [1, 2, 3]) == [8, 8, 4]
    assert pond.metrics()["states"]["s"]["rule_failures"] == 1


def test_a_failure_elsewhere_does_not_change_what_overflow_gives(files: LossyFiles, lone: LocalPond) -> None:
    state = lone.state("s", key="long", value="long", update=guarded)
    fill(state, [1, 2], [2**62, 4])
    fill(state, [3], [-1], epoch=1)
    state.finish("feed")
    same_for_ever(files, lone, lambda state: answers(state, [1, 2, 3]))


def grown(old: list[int], new: list[int]) -> list[int]:
    old.extend(new)
    return old


def grown_in_vain(old: list[int], new: list[int]) -> list[int]:
    old.extend(new)
    raise ValueError("after all")


@pytest.mark.filterwarnings("ignore::millpond.RuleInterpreted")
def test_a_rule_that_writes_into_the_old_value_changes_no_earlier_one(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="array<long>", update=grown)
    fill(state, [1, 2, 3], [[1], [2], [3]], pa.list_(LONG))
    state.finish("feed")
    assert answers(state, [1, 2, 3]) == [[1], [1, 2], [1, 2, 3]]


@pytest.mark.filterwarnings("ignore::millpond.RuleInterpreted")
def test_a_rule_that_fails_after_it_wrote_leaves_the_old_value(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="array<long>", update=grown_in_vain)
    fill(state, [1, 2], [[1], [2]], pa.list_(LONG))
    state.finish("feed")
    assert answers(state, [1, 2]) == [[1], [1]]


def scribbling(times: Any, value: Any) -> int:
    value[0] = 77
    times[0] = 0
    return 1


def test_a_fetch_rule_cannot_change_what_is_held(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long")
    fill(state, [1, 2], [5, 6])
    state.finish("feed")
    with suppress(RuleFailed):
        answers(state, [2], scribbling)
    assert answers(state, [1, 2], mp.values()) == [[5], [5, 6]]


def scribbling_mask(times: Any, value: Any) -> Any:
    value[0] = 77
    return times > 0


def test_a_compaction_rule_cannot_change_what_is_held(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long", compact=scribbling_mask)
    fill(state, [1, 2], [5, 6])
    state.report("reader", fetch=3)
    state.finish("feed")
    pond.maintain()
    assert answers(state, [3], mp.values()) == [[5, 6]]


def beyond(times: Any, value: Any) -> int:
    return value[len(value) + 3]


def positive(times: Any, value: Any) -> int:
    if value[0] < 0:
        raise ValueError("below zero")
    return len(value)


@pytest.mark.parametrize("rule", [beyond, positive])
def test_an_error_in_a_fetch_rule_is_told(pond: LocalPond, rule: Any) -> None:
    state = pond.state("s", key="long", value="long")
    fill(state, [1, 2], [-5, 6])
    state.finish("feed")
    with pytest.raises(RuleFailed) as caught:
        answers(state, [2], rule)
    assert caught.value.rule == rule.__name__
    assert answers(state, [0, 2], mp.count()) == [0, 2]


def test_user_rules_of_every_type_and_of_nothing(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long")
    fill(state, [1, 2], [5, 6])
    state.finish("feed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {
            rule.__name__: answers(state, [0, 1, 2], rule)
            for rule in (weighed, listed, doubled, first_is_last)
        }
    assert found == {
        "weighed": [None, 10.0, 46.0],
        "listed": [None, "1:5", "1:5 2:6"],
        "doubled": [None, [10], [10, 12]],
        "first_is_last": [None, True, False],
    }
    told = [str(warning.message) for warning in caught if warning.category is RuleInterpreted]
    assert ["'listed'" in text or "'doubled'" in text for text in told] == [True, True]
    assert all("string" in text or "list" in text for text in told), "the reason is named"


def test_a_rule_that_cannot_be_compiled_warns_with_the_reason(pond: LocalPond) -> None:
    with pytest.warns(RuleInterpreted, match="'joined'.*string"):
        pond.state("s", key="long", value="string", update=joined)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pond.state("t", key="long", value="long", update=shifted)


def test_every_update_of_edges_is_there_or_refused_after_compaction(
    files: LossyFiles, lone: LocalPond
) -> None:
    state = lone.state("s", key="long", value="n long, added boolean", update=mp.edges())
    feed = state.update(key="k", at="t", value=["n", "added"], delay=100, name="feed")
    feed(pa.table({"k": [1, 1, 1], "t": [1, 2, 3], "n": [7, 7, 8], "added": [True, False, True]}), 0)
    state.report("reader", fetch=5)
    state.finish("feed")

    def counted(state: mp.State) -> Any:
        try:
            return answers(state, [5], mp.count())
        except BelowFetchProgress:
            return "refused"

    assert same_for_ever(files, lone, counted) in ([3], "refused")


def test_order_of_neighbours_is_that_of_their_last_addition(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="n string, added boolean", update=mp.edges())
    feed = state.update(key="k", at="t", value=["n", "added"], delay=100, name="feed")
    rows = [("a", 1, True), ("b", 1, True), ("c", 2, True), ("b", 3, False), ("a", 4, True), ("b", 5, True)]
    names, times, added = zip(*rows, strict=True)
    feed(pa.table({"k": [1] * 6, "t": times, "n": names, "added": added}), 0)
    state.finish("feed")
    asked = pa.table({"k": [1] * 5, "t": [1, 2, 3, 4, 5]})
    assert state.fetch(key="k", at="t").now(asked)["n"].to_pylist() == [
        ["a", "b"],
        ["a", "b", "c"],
        ["a", "c"],
        ["c", "a"],
        ["c", "a", "b"],
    ]


@pytest.mark.parametrize("span", [1, 5, HIGHEST])
def test_a_value_lives_just_its_span_at_the_ends_of_time_too(pond: LocalPond, span: int) -> None:
    state = pond.state("s", key="long", value="long", compact=mp.ttl(span))
    feed = state.update(key="k", at="t", value="v", delay=HIGHEST, name="feed")
    held_at = [LOWEST, -5, HIGHEST]
    feed(pa.table({"k": [1] * 3, "t": held_at, "v": [1, 2, 3]}), 0)
    state.finish("feed")
    asked = [LOWEST, LOWEST + 1, LOWEST + 5, -6, -5, -4, 0, HIGHEST - 6, HIGHEST - 1, HIGHEST]
    expected = []
    for at in asked:
        alive = [value for value, time in enumerate(held_at, 1) if 0 <= at - time < span]
        expected.append(alive[-1] if alive else None)
    assert answers(state, asked) == expected


def test_a_span_of_timestamps(pond: LocalPond) -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    for name, span in (("text", "2 hours"), ("delta", timedelta(hours=2))):
        state = pond.state(name, key="long", value="long", update=mp.add(), compact=mp.ttl(span))
        times = [noon, noon + timedelta(hours=1), noon + timedelta(hours=3)]
        feed = state.update(key="k", at="t", value="v", delay="1 day", name="feed")
        feed(pa.table({"k": [1] * 3, "t": times, "v": [1, 10, 100]}), 0)
        state.finish("feed")
        asked = [noon + timedelta(hours=hours, microseconds=-1) for hours in (1, 3, 4, 5)]
        found = state.fetch(key="k", at="t", into="a").now(pa.table({"k": [1] * 4, "t": asked}))
        assert found["a"].to_pylist() == [1, 11, 100, 100]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (only_the_newest, [[40]]),
        (only_the_smallest, [[10]]),
        (the_two_newest, [[30, 40]]),
        (none_at_all, [[]]),
    ],
)
def test_a_compaction_rule_of_ones_own_says_what_is_kept(
    files: LossyFiles, lone: LocalPond, rule: Any, expected: list[Any]
) -> None:
    state = lone.state("s", key="long", value="long", compact=rule)
    fill(state, [1, 2, 3, 4, 9], [20, 10, 30, 40, 5])
    state.report("reader", fetch=5)
    state.finish("feed")
    lone.maintain()
    assert same_for_ever(files, lone, lambda state: answers(state, [5], mp.values())) == expected


def ends(times: Any, value: Any) -> Any:
    return (times == times[0]) | (times == times[-1])


@pytest.mark.parametrize("update", [mp.add(), lambda old, new: old + new], ids=["add", "own"])
@pytest.mark.parametrize("rule", [the_two_newest, ends])
def test_what_is_folded_takes_no_compaction_of_ones_own(lone: LocalPond, rule: Any, update: Any) -> None:
    with pytest.raises(BadRule, match="folded"):
        lone.state("s", key="long", value="long", update=update, compact=rule)


def failing_mask(times: Any, value: Any) -> Any:
    return value[: len(value) - 1] > 0


def test_a_compaction_rule_that_fails_keeps_everything_and_is_counted(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long", compact=failing_mask)
    fill(state, [1, 2, 3], [1, 2, 3])
    state.report("reader", fetch=5)
    state.finish("feed")
    pond.maintain()
    assert answers(state, [5], mp.values()) == [[1, 2, 3]]
    assert pond.metrics()["states"]["s"]["rule_failures"] >= 1


def test_compaction_does_take_place(pond: LocalPond) -> None:
    """Else that it changes no answer would say nothing."""
    expected = {"put": 1, "add": 1, "own": 1, "put-ttl": 0, "edges": 1, "add-keep-all": 3}
    for name, left in expected.items():
        kind = KINDS[name]
        world = World(kind)
        value: Columns = {"edges": (7, True), "put-ttl": ("a",)}.get(name, (1,))
        world.do(("rows", ([(0, time, value) for time in (1, 2, 3)], (0, 1, 2))))
        world.do(("finish", None))
        world.do(("fetch", 20))
        assert world.pond.metrics()["states"]["s"]["versions"] == 3
        world.do(("maintain", None))
        assert world.pond.metrics()["states"]["s"]["versions"] == left, name
        world.check()


def test_seq_counts_whatever_the_partitioning_of_rows(pond: LocalPond) -> None:
    rows = pa.table({"k": [1] * 4, "t": [1] * 4, "v": [4, 2, 3, 1], "seq": [4, 2, 3, 1]})
    for number, cuts in enumerate([[(0, 4)], [(0, 1), (1, 3)], [(3, 1), (0, 2), (2, 1)]]):
        state = pond.state(f"s{number}", key="long", value="long", update=shifted)
        feed = state.update(key="k", at="t", value="v", seq="seq", delay=10, name="feed")

        def stage(plan: EpochPlan, feed: Any = feed, cuts: Any = cuts) -> list[Receipt]:
            return [
                feed._intake.stage(
                    feed._client, rows.slice(start, count), plan, Part(LOCAL_QUERY, Turn(0), partition)
                )
                for partition, (start, count) in enumerate(cuts)
            ]

        commit_staged(pond._client, feed._intake, LOCAL_QUERY, Turn(0), stage, "long", RowsWork(), "continue")
        state.finish("feed")
        assert answers(state, [1]) == [1234]
        assert answers(state, [1], mp.values()) == [[1, 2, 3, 4]]


def test_an_epoch_with_seq_is_recognised_in_any_order(pond: LocalPond) -> None:
    state = pond.state("s", key="long", value="long", update=shifted)
    feed = state.update(key="k", at="t", value="v", seq="seq", delay=10, name="feed")
    rows = pa.table({"k": [1, 1], "t": [1, 1], "v": [5, 6], "seq": [2, 1]})
    feed(rows, 0)
    assert feed(rows.take([1, 0]), 0).replayed
    with pytest.raises(EpochChanged):
        feed(rows.set_column(3, "seq", pa.array([1, 2])), 0)
    state.finish("feed")
    assert answers(state, [1]) == [65]


# Canaries: with a promise broken on purpose, the search must find it


def assert_found(name: str) -> None:
    try:
        search(name, examples=60, shrink=False)
    except (AssertionError, BaseExceptionGroup):
        return
    raise RuntimeError(f"the search over {name!r} noticed nothing")


@pytest.mark.parametrize("name", ["add", "own"])
def test_a_fold_that_overlooks_what_comes_after_an_update_out_of_order(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sound = Fold.run

    def run_it(self: Fold, cells: Any, heaps: Any, positions: Any, step: Any) -> None:
        sound(self, cells, heaps, positions[:2], step[:2])

    monkeypatch.setattr(Fold, "run", run_it)
    assert_found(name)


@pytest.mark.parametrize("name", ["put-seq", "edges-seq", "own-seq"])
def test_a_seq_that_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        millpond.ops.intake, "sequence_of", lambda table, column: pa.array(range(len(table)), LONG)
    )
    assert_found(name)


@pytest.mark.parametrize("name", ["put-ttl", "edges-ttl"])
def test_values_that_live_for_ever(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(
        VersionedSlice, "_born", lambda self, lo, hi: np.full_like(hi, -(2**63)) if lo is None else lo
    )
    assert_found(name)


@pytest.mark.parametrize("name", ["add-ttl", "own-ttl"])
def test_a_sum_that_never_starts_anew(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sound = Fold.__init__

    def init(self: Fold, *given: Any) -> None:
        sound(self, *given)
        self._span = 0

    monkeypatch.setattr(Fold, "__init__", init)
    assert_found(name)


@pytest.mark.parametrize("name", ["add", "own", "edges", "put"])
def test_compaction_beyond_what_is_final_or_asked_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(StateHolding, "keep_from", property(lambda self: 12))
    assert_found(name)


AHEAD: list[Step] = [
    ("rows", ([(0, 10, (1,)), (0, 11, (2,))], (0, 1))),
    ("fetch", 20),
    ("maintain", None),
    ("rows", ([(0, 5, (3,))], (0,))),
]
"""F is ahead of U, and an update comes between."""


def test_what_is_not_final_is_not_compacted() -> None:
    world = run(KINDS["own"], AHEAD)
    assert world.oracle.folded(0, 20) == (312,)


def test_compaction_that_waits_for_fetch_progress_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_from(self: StateHolding) -> int | None:
        return None if math.isinf(self.fetch_progress) else int(self.fetch_progress)

    monkeypatch.setattr(StateHolding, "keep_from", property(keep_from))
    with pytest.raises(AssertionError):
        run(KINDS["own"], AHEAD)


@pytest.mark.parametrize("name", ["add", "own"])
def test_files_that_hold_updates_without_what_was_folded_before(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sound = VersionedSlice.export

    def export(self: VersionedSlice) -> pa.RecordBatch:
        fold, self.rules.fold = self.rules.fold, None
        try:
            return sound(self)
        finally:
            self.rules.fold = fold

    compacted: list[Step] = [("rows", ([(0, 10, (1,)), (0, 11, (2,))], (0, 1))), ("fetch", 20)]
    run(KINDS[name], compacted)
    monkeypatch.setattr(VersionedSlice, "export", export)
    with pytest.raises(AssertionError):
        run(KINDS[name], compacted)


def test_compaction_of_edges_that_keeps_what_was_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        millpond.stores.versioned,
        "net_neighbours",
        lambda offsets, neighbours, added: np.asarray(added.cast(pa.int8())).astype(np.uint8),
    )
    assert_found("edges")
