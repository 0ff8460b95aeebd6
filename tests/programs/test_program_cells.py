"""Elements of cells are what plain ones are, in Python and in compiled code: over epochs, undone ones too."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
from both_ways import DRAWN, EXAMPLES
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millpond.kernels import cells as at
from millpond.programs.columns import Columns
from millpond.programs.decided import ABSENT
from millpond.programs.elements import Map, Matrix, Vector
from millpond.programs.entries import ENTRIES, batch_for, items_of
from millpond.programs.tracked_cells import TrackedCells, tracked
from millpond.wire.programs import FieldSpec

LEAST, MOST = -(1 << 63), (1 << 63) - 1
KEYS = st.one_of(st.integers(0, 12), st.sampled_from([LEAST, MOST, -1, 1 << 40]))
DOUBLES = st.one_of(
    st.integers(-3, 3).map(float), st.sampled_from([-0.0, math.inf, -math.inf, 0.1, 1e300]), st.floats(-9, 9)
)
LONGS = st.one_of(st.integers(-3, 3), st.sampled_from([LEAST, MOST]))


def same(found: Any, wanted: Any) -> None:
    """Also of the sign of zeros, and where numbers are none."""
    assert repr(found) == repr(wanted)


class Both(RuleBasedStateMachine):
    """A field of cells beside a plain element, and the plain ones from before the epoch and at each mark."""

    kind, value = "matrix", ""
    values: Any = DOUBLES

    def __init__(self) -> None:
        super().__init__()
        self.field = tracked(self.kind, "long", self.value)
        assert isinstance(self.field, TrackedCells)
        self.plain: Any = {"matrix": Matrix, "vector": Vector}.get(
            self.kind, lambda: Map("long", self.value)
        )()
        self.before = self.plain.copy()
        self.marks: list[tuple[int, Any]] = []
        self.saved: dict[Any, Any] = {}
        self.spec = FieldSpec("partitioned", self.kind, "long", self.value)

    @property
    def cells(self) -> Any:
        return self.field.element

    @property
    def both(self) -> tuple[Any, Any]:
        return self.cells, self.plain

    @rule()
    def settle(self) -> None:
        self.field.settle()
        self.before, self.marks = self.plain.copy(), []

    @rule()
    def put_back(self) -> None:
        self.field.put_back()
        self.plain, self.marks = self.before.copy(), []

    @rule()
    def mark(self) -> None:
        self.marks.append((self.field.mark(), self.plain.copy()))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def undo(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.marks) - 1))
        self.field.undo_to(self.marks[at][0])
        self.plain = self.marks[at][1].copy()
        self.marks = self.marks[: at + 1]

    @rule()
    def save(self) -> None:
        """What is dirty leads from what was saved to what is decided; what is not is the same in both."""
        self.apply(self.saved, self.field.unsaved())
        self.field.clean()
        same(self.sorted(self.saved), self.before.entries())

    @rule()
    def clear(self) -> None:
        for each in self.both:
            each.clear()

    @rule()
    def copied(self) -> None:
        self.field = self.field.copy()

    @precondition(lambda self: not self.field.is_changed)
    @rule(data=st.data())
    def put(self, data: st.DataObject) -> None:
        """As a log is applied."""
        place = st.tuples(KEYS, KEYS) if self.kind == "matrix" else KEYS
        items = data.draw(st.lists(st.tuples(place, st.one_of(self.values, st.just(ABSENT))), max_size=6))
        self.field.put(items, dirty=True)
        for key, value in items:
            if value is ABSENT:
                del self.plain[key]
            else:
                self.plain[key] = value
        self.before, self.marks = self.plain.copy(), []

    def apply(self, entries: dict[Any, Any], items: Any) -> None:
        """The way of columns through Arrow."""
        batch = batch_for("f", self.spec, -1, items)
        assert batch.schema.equals(ENTRIES)
        padded = pa.concat_batches([batch, batch]).slice(len(items))
        read = items_of(self.spec, padded)
        assert isinstance(read, Columns)
        for column in ("rows", "keys", "flags"):
            assert getattr(read, column).tolist() == getattr(items, column).tolist()
        other = tracked(self.kind, "long", self.value)
        other.put(list(entries.items()))
        other.put(read)
        entries.clear()
        entries.update(other.items())

    def sorted(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        return {place: entries[place] for place in sorted(entries)}

    @invariant()
    def agree(self) -> None:
        cells, plain = self.both
        same(cells.entries(), plain.entries())
        same(dict(self.field.items()), plain.entries())
        same(cells.keys(), plain.keys())
        decided = self.field.decided_element()
        same(decided.entries(), self.before.entries())
        same(decided.keys(), self.before.keys())
        assert len(self.field) == len(plain.entries())
        changes = self.before.copy().entries()
        self.apply(changes, self.field.changed())
        same(self.sorted(changes), plain.entries())
        self.more(cells, plain)
        self.more(decided, self.before)

    def more(self, found: Any, wanted: Any) -> None:
        for key in (0, 3, LEAST):
            same((key in found, found[key], found.get(key)), (key in wanted, wanted[key], wanted.get(key)))
        same((len(found), found.values(), found.items()), (len(wanted), wanted.values(), wanted.items()))

    def teardown(self) -> None:
        self.field.validate()


class Lines(Both):
    """What maps and vectors have."""

    @rule(key=KEYS, data=st.data())
    def set(self, key: int, data: st.DataObject) -> None:
        value = data.draw(self.values)
        for each in self.both:
            each[key] = value

    @rule(key=KEYS)
    def delete(self, key: int) -> None:
        for each in self.both:
            del each[key]


class Vectors(Lines):
    kind = "vector"

    @rule(key=KEYS, x=DOUBLES)
    def increase(self, key: int, x: float) -> None:
        for each in self.both:
            each[key] += x

    @rule(other=st.dictionaries(KEYS, DOUBLES), times=st.sampled_from([1.0, -2.0, 0.0]))
    def add(self, other: dict[int, float], times: float) -> None:
        for each in self.both:
            each.add(Vector(other), times)

    @rule()
    def add_itself(self) -> None:
        for each in self.both:
            each.add(each)

    @rule(other=st.lists(DOUBLES, max_size=3))
    def assign(self, other: list[float]) -> None:
        for each in self.both:
            each.assign(other)

    def more(self, found: Any, wanted: Any) -> None:
        super().more(found, wanted)
        same(found.array(4), wanted.array(4))
        same((found.total(), found.dot([1.0, 2.0])), (wanted.total(), wanted.dot([1.0, 2.0])))
        same((found + wanted, found / 2, 2 * found), (wanted + wanted, wanted / 2, 2 * wanted))
        same(
            (found.without(Vector({1: 1.0})), found.copy()), (wanted.without(Vector({1: 1.0})), wanted.copy())
        )
        same(found.top(3), wanted.top(3))


class Longs(Lines):
    kind, value = "map", "long"
    values = st.one_of(LONGS, st.none())

    @rule(key=KEYS)
    def pop(self, key: int) -> None:
        found, wanted = (each.pop(key, 7) for each in self.both)
        same(found, wanted)

    @rule(entries=st.dictionaries(KEYS, LONGS))
    def assign(self, entries: dict[int, int]) -> None:
        other: Map[int, int] = Map("long", "long")
        for key, value in entries.items():
            other[key] = value
        for each in self.both:
            each.assign(other)


class Doubles(Longs):
    value = "double"
    values = st.one_of(DOUBLES, st.none())


class Booleans(Lines):
    kind, value = "map", "boolean"
    values = st.one_of(st.booleans(), st.none())


class Matrices(Both):
    @rule(row=KEYS, key=KEYS, x=DOUBLES)
    def set(self, row: int, key: int, x: float) -> None:
        for each in self.both:
            each[row, key] = x

    @rule(row=KEYS, keys=st.lists(KEYS, max_size=14))
    def increase(self, row: int, keys: list[int]) -> None:
        for each in self.both:
            for key in keys:
                each[row, key] += 1
                each[key, row] += 1

    @rule(row=KEYS, key=KEYS)
    def delete(self, row: int, key: int) -> None:
        for each in self.both:
            del each[row, key]

    @rule(row=KEYS)
    def delete_row(self, row: int) -> None:
        for each in self.both:
            del each[row]

    @rule(row=KEYS, other=st.dictionaries(KEYS, DOUBLES))
    def assign(self, row: int, other: dict[int, float]) -> None:
        for each in self.both:
            each[row] = Vector(other)

    @rule(row=KEYS, other=KEYS)
    def add_rows(self, row: int, other: int) -> None:
        for each in self.both:
            each[row].add(each[other], 0.5)

    @rule()
    def add_all(self) -> None:
        for each in self.both:
            each.add(each.copy())

    @rule()
    def assign_all(self) -> None:
        for each in self.both:
            each.assign(each / 2)

    @rule()
    def with_a_grid(self) -> None:
        """As after much was multiplied."""
        self.field._control[at.WORK] = 1 << 40  # type: ignore[attr-defined] # cells

    def more(self, found: Any, wanted: Any) -> None:
        for key in (0, 3, LEAST):
            same(
                (key in found, found[key].items(), found[key, 3]),
                (key in wanted, wanted[key].items(), wanted[key, 3]),
            )
            same(((key, 3) in found, found.column(key)), ((key, 3) in wanted, wanted.column(key)))
            same(len(found[key]), len(wanted[key]))
        for vector in ({1: 2.0, 3: -0.5}, {}, {i: 0.1 * i for i in range(40)}, {2: math.inf, 3: 1.0}):
            same(found.multiply(Vector(vector)), wanted.multiply(Vector(vector)))


for _machine in (Vectors, Longs, Doubles, Booleans, Matrices):
    _case = _machine.TestCase
    _case.settings = settings(DRAWN, max_examples=EXAMPLES or 8, stateful_step_count=30)
    globals()[f"Test{_machine.__name__}"] = _case
del _case, _machine
