"""State classes of a user's own: the same in a pond as in plain Python, moved, killed and migrated as all fields are."""

from __future__ import annotations

import math
import random

import pytest
from both_ways import both, define, graph
from test_program_plain import entries, in_pond, outcome

import millpond as mp
from millpond.errors import BadProgram, ProgramFailed
from millpond.programs.compiler.own import own_class
from millpond.programs.local import Call
from millpond.programs.plain import state_of
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

SLICES = 8


def fingerprint(text: str) -> int:
    number = 14695981039346656037
    for byte in text.encode():
        number = ((number ^ byte) * 1099511628211) % 2**64
    return number


def larger(left: int, right: int) -> int:
    return max(left, right)


class Distinct(mp.StateElement[int, int]):
    """How many different texts there were, about: a HyperLogLog's registers."""

    REGISTERS = 16
    merged = larger

    def add(self, text: str) -> int:
        number = fingerprint(text)
        register, rest = number % self.REGISTERS, number // self.REGISTERS
        rank = 1
        while rest % 2 == 0 and rank < 40:
            rank += 1
            rest //= 2
        self.state[register] = max(self.state[register], rank)
        return register

    def registers(self) -> list[int]:
        return [self._register(number) for number in range(self.REGISTERS)]

    def _register(self, number: int) -> int:
        return self.state.get(number, 0)

    def forget(self, register: int) -> None:
        if register in self.state:
            del self.state[register]


class Newest(mp.StateElement[str, list[str]]):
    """Of each key the last three texts."""

    def add(self, who: str, what: str) -> None:
        self.state[who] = [what, *(self.state[who] or [])][:3]

    def of(self, who: str) -> list[str]:
        return self.state.get(who, [])

    def drop(self, who: str) -> list[str]:
        return self.state.pop(who, [])

    def steal(self, who: str, whom: str) -> None:
        self.state[whom] = self.state[who]


@mp.program(lanes=2)
class Visits:
    newest: mp.Partitioned[Newest]
    distinct: mp.Partial[Distinct]

    def visit(self, who: str, page: str) -> int:
        self.newest.add(who, page)
        return self.distinct.add(page)

    def last(self, who: str) -> list[str]:
        return self.newest.of(who)

    def leave(self, who: str, register: int) -> list[str]:
        if len(self.newest.of(who)) == 0:
            mp.reject("never came")
        gone = self.newest.drop(who)
        self.distinct.forget(register)
        return gone

    def pages(self) -> list[int]:
        merged = [0] * 16
        for part in mp.everywhere(self.distinct).registers():
            merged = [max(a, b) for a, b in zip(merged, part, strict=True)]
        return merged

    def reset(self) -> None:
        mp.everywhere(self.distinct).clear()


def drawn(chance: random.Random, count: int) -> list[Call]:
    calls: list[Call] = []
    for _ in range(count):
        who, page = f"u{chance.randrange(6)}", f"p{chance.randrange(40)}"
        calls += [("visit", {"who": who, "page": page})] * chance.randint(1, 3)
        calls.append(("last", {"who": who}))
        if chance.random() < 0.2:
            calls.append(("leave", {"who": who, "register": chance.randrange(16)}))
    return [*calls, ("pages", {}), ("reset", {}), ("visit", {"who": "x", "page": "y"}), ("pages", {})]


def test_a_graph_is_the_plain_class() -> None:
    methods = {method.name: method for method in graph(Visits).methods}
    assert {name for name, method in methods.items() if method.read_only} == {"last", "pages"}
    assert methods["pages"].returns == "array<long>"
    both(Visits, drawn(random.Random(1), 20), epochs=1)
    assert "newest: partitioned Newest" in mp.explain(Visits)


def test_in_a_pond_with_kills_moves_and_replays() -> None:
    chance = random.Random(2)
    plain = mp.plain(Visits, slices=SLICES)
    files = LossyFiles(1)
    with LocalPond(files, containers=3, slices=SLICES) as pond:
        visits = pond.program("visits", Visits)
        for epoch in range(4):
            calls = [
                {"who": f"u{chance.randrange(6)}", "page": f"p{chance.randrange(40)}"} for _ in range(12)
            ]
            wanted = [outcome(plain, "visit", call) for call in calls]
            assert in_pond(visits, "visit", calls, epoch) == wanted
            if epoch == 2:
                pond.checkpoint()
            pond.move(chance.sample(range(SLICES), 2), to=chance.randrange(3))
            victim = chance.randrange(3)
            pond.hosting.kill(victim)
            pond.coordinator.recover(victim)
            assert in_pond(visits, "visit", calls, epoch) == wanted, "again"
            who = calls[0]["who"]
            assert visits.last(who=who) == plain.last(who=who)
            assert visits.pages() == plain.pages()
            for call in ({"who": who, "register": wanted[0][0]}, {"who": "nobody", "register": 0}):
                assert outcome(visits, "leave", call) == outcome(plain, "leave", call)
        assert entries(visits) == state_of(plain)
        pond.validate()
    with LocalPond(files, containers=2, slices=SLICES) as pond:
        visits = pond.program("visits", Visits)
        assert entries(visits) == state_of(plain)
        assert visits.last(who=who) == plain.last(who=who)
        visits.reset()
        assert visits.pages() == [0] * 16


@mp.program(lanes=2)
class Wrong:
    newest: mp.Partitioned[Newest]

    def swap(self, who: str) -> None:
        self.newest.add(who, "one")
        self.newest.steal(who, "other")


def test_an_epoch_that_fails_in_a_method_of_the_class_changes_nothing() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        wrong = pond.program("wrong", Wrong)
        with pytest.raises(ProgramFailed, match="a call reaches one key") as error:
            wrong.swap(who="me")
        assert error.value.line == graph(Wrong).method("swap").line + 2
        assert wrong.entries("newest") == {}
        with pytest.raises(TypeError, match="a call reaches one key"):
            mp.plain(Wrong).swap(who="me")
        pond.validate()


def smaller(left: int, right: int) -> int:
    return min(left, right)


def test_fewer_lanes_merge_its_entries() -> None:
    with LocalPond(LossyFiles(1), containers=2, slices=SLICES) as pond:
        visits = pond.program("visits", Visits)
        calls = [{"who": f"u{n % 5}", "page": f"p{n}"} for n in range(30)]
        in_pond(visits, "visit", calls, 0)
        pages = visits.pages()
        narrow = graph(Visits)._replace(lanes=1)
        narrow_visits = pond.program("visits", narrow, migrate=True)
        assert narrow_visits.pages() == pages, "the larger ones of both lanes"
        wide = graph(Visits)._replace(lanes=2)
        pond.program("visits", wide, migrate=True)
        in_pond(visits, "visit", calls, 1)
        added = {"distinct": mp.Migration(merge=smaller)}
        assert pond.program("visits", narrow, migrate=added).pages() != pages, (
            "what migrate= says goes before"
        )


HEAD = """
@mp.program(lanes=2)
class P:
    own: mp.Partitioned[Newest]
    some: mp.Partial[Distinct]

    def go(self, k: int, s: str):
        BODY
"""
BODIES = [
    ('self.own[s]', "is no call of a method of Newest", "add, of, drop"),
    ('x = s in self.own', "is no call of a method of Newest", "add"),
    ('self.own.clear()', "without a key", ""),
    ('self.own.pop(s)', "is no call of a method of Newest", "add"),
    ('x = self.some', "what is done to it", "operations"),
    ('x = mp.everywhere(self.some).copy()', "side effect", "only reads"),
    ('x = mp.everywhere(self.some).add(s)', "side effect", "only reads"),
    ('self.own.add(k, s)', "a key of own is a string", "convert"),
    ('self.some.forget(k)\n        mp.reject("no")', "after a write", "test first"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "why", "hint"), BODIES)
def test_what_methods_may_not_do_with_it(body: str, why: str, hint: str) -> None:
    with pytest.raises(BadProgram) as error:
        define(HEAD.replace("BODY", body), Newest=Newest, Distinct=Distinct)
    assert why in error.value.message
    assert hint in error.value.hint
    assert error.value.line is not None
    assert error.value.line >= 8


class Untyped(mp.StateElement):  # type: ignore[type-arg] # is told so
    def add(self, key: int) -> None:
        self.state[key] += 1


class Hidden(mp.StateElement[int, int]):
    def add(self, key: int) -> None:
        self.count = key


class Remembering(mp.StateElement[int, int]):
    def add(self, key: int, seen: list[int] = []) -> None:  # noqa: B006 - what is refused
        seen.append(key)
        self.state[key] = len(seen)


class Counting(mp.StateElement[int, int]):
    def add(self, key: int) -> None:
        math.seen = key  # type: ignore[attr-defined]


class Escaping(mp.StateElement[int, int]):
    def add(self, key: int) -> None:
        max(self, key)


class Drawing(mp.StateElement[int, float]):
    def add(self, key: int) -> None:
        self.state[key] = random.random()


class Ordered(mp.StateElement[int, str]):
    def add(self, key: int) -> None:
        self.state[key] = ",".join({"a", "b"})


class Beginning(mp.StateElement[int, int]):
    def __init__(self) -> None:
        self.seen = 0


class Keeping(mp.StateElement[int, int]):
    seen: list[int] = []  # noqa: RUF012 - is refused

    def add(self, key: int) -> None:
        self.seen.append(key)


class Static(mp.StateElement[int, int]):
    @staticmethod
    def add(key: int) -> int:
        return key


class MergingByChance(mp.StateElement[int, float]):
    def add(self, key: int) -> None:
        self.state[key] += 1

    def merged(left, right):  # type: ignore[no-untyped-def] # noqa: N805 - a function of two values
        return random.choice([left, right])


class OfFloats(mp.StateElement[float, int]):
    def add(self, key: float) -> None:
        self.state[key] += 1


CLASSES = [
    (Untyped, "does not say what its entries are"),
    (Hidden, r"sets self.count, which the pond does not see"),
    (Remembering, "'add' has a list for the default of seen"),
    (Counting, "sets math.seen, which lives on from call to call"),
    (Escaping, "uses self as a value"),
    (Drawing, "the module random"),
    (Ordered, "a set has another order"),
    (Beginning, "a __init__ of its own"),
    (Keeping, "neither a method nor"),
    (Static, "neither a method nor"),
    (MergingByChance, "the module random"),
    (OfFloats, "does not say what its entries are"),
]


@pytest.mark.parametrize(("cls", "why"), CLASSES, ids=[cls.__name__ for cls, _ in CLASSES])
def test_classes_that_are_refused(cls: type, why: str) -> None:
    with pytest.raises(BadProgram, match=why) as error:
        define(
            """
            @mp.program
            class P:
                own: mp.Partial[Own]

                def go(self, k: int):
                    self.own.add(k)
            """,
            Own=cls,
        )
    assert error.value.hint
    assert error.value.line == 4


def test_what_only_looks_is_told_by_the_text() -> None:
    reading = own_class(Distinct).reading
    assert reading == {"registers", "_register"}
    assert own_class(Newest).reading == {"of"}


def test_a_method_changes_no_list_of_its_caller() -> None:
    class Appending(mp.StateElement[int, list[int]]):
        def add(self, key: int, values: list[int]) -> int:
            values.append(key)
            self.state[key] = values
            return len(values)

    cls = define(
        """
        @mp.program
        class P:
            own: mp.Partitioned[Own]
            other: mp.Partitioned[mp.Map[int, int]]

            def go(self, k: int, xs: list[int]) -> int:
                n = self.own.add(k, xs)
                self.other[k] = len(xs)
                return n
        """,
        Own=Appending,
    )
    assert both(cls, [("go", {"k": 1, "xs": [5, 6]})])[0].value == 3
