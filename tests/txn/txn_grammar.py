"""Random transaction functions, as text, and events for them."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
from txn_oracle import OracleTable

from millpond.code.tables import TableSpec

TABLES = {
    "a": TableSpec(
        "long", "x long, y double, s string, b boolean", {"x": 5, "y": 0.5, "s": "none", "b": True}
    ),
    "m": TableSpec("long", "x long, y double"),
    "w": TableSpec("string", "x long, s string", {"x": 0, "s": ""}),
    "p": TableSpec("g string, i int", "x long, c short, m decimal(6,2), h float, t date", {
        "x": 1, "c": 30000, "m": "12.50", "h": 0.5, "t": 3,
    }),
    "q": TableSpec("i long, j long, n long", "x long, y double", {"x": 2, "y": 0.0}),
}  # fmt: skip
FIELDS = ("i", "j", "n", "f", "g", "d", "e", "items", "weights")
SCHEMA = pa.schema(
    {
        "time": pa.int64(), "seq": pa.int64(), "kind": pa.string(), "i": pa.int64(), "j": pa.int64(),
        "n": pa.int64(), "f": pa.float64(), "g": pa.string(), "d": pa.int32(), "e": pa.decimal128(9, 3),
        "items": pa.list_(pa.int64()), "weights": pa.list_(pa.float64()),
    }
)  # fmt: skip
HEADER = f"({', '.join([*TABLES, *FIELDS])})"

Draw = Any


class Grammar:
    """Statements under way. Clean longs are those that keys may be made of."""

    def __init__(self, draw: Draw, late: bool) -> None:
        self.draw = draw
        self.late = late  # whether keys may come from rows
        self.clean = ["i", "j", "n"]
        self.longs = ["i", "j", "n"]
        self.doubles = ["f"]
        self.lines: list[str] = [f"    kept = {self.row('m')}", "    z = n"]
        self.loops = 0
        self.locals = 0

    def pick(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def key(self) -> str:
        name = self.pick(*self.clean)
        if self.late and self.draw(st.integers(0, 3)) == 0:
            return self.pick(f"a[{name}].x", f"q[i, j, {name}].x % 3", *self.longs, "len(seen)", "w[g].x")
        return self.pick(
            name, name, name, f"{name} % 4", f"{name} + 1", "items[0]", f"items[{name}]", f"{name} // n",
            "2", "i if i > j else j",
        )  # fmt: skip

    def keys(self, table: str) -> str:
        match table:
            case "w":
                return self.pick("g", "g", "'one'")
            case "p":
                return self.pick("g", "g", "'two'") + ", " + self.key()
            case "q":
                return f"{self.key()}, {self.pick('i', 'j')}, {self.pick('1', 'n % 2')}"
        return self.key()

    def row(self, table: str) -> str:
        return f"{table}[{self.keys(table)}]"

    def whole(self, table: str) -> str:
        """A key as one value."""
        return f"({self.keys(table)})"

    def decimal(self) -> str:
        part = self.pick("e", "e", f"{self.row('p')}.m")
        other = self.pick("e", "2", f"{self.row('p')}.m")
        return self.pick(
            part, f"({part} + {other})", f"({part} * {self.pick('e', '3', 'j')})",
            f"(1 - {part})", f"-{part}", f"abs({part})", f"round({part}, 1)", f"({part} if i > j else e)", f"max({part}, e)",
        )  # fmt: skip

    def long(self, depth: int = 2) -> str:
        if depth == 0:
            return self.pick(*self.longs, "1", "3", "-2", "7", "9223372036854775807")
        if self.draw(st.integers(0, 4)) == 0:
            whole = self.pick("int", "round", "math.floor", "math.ceil")
            column = self.pick("p.x", "p.c", "p.t", "q.x")
            return self.pick(f"{self.row(column[0])}.{column[2]}", f"{whole}({self.decimal()})", "d")
        part = self.long(depth - 1)
        other = self.long(depth - 1)
        return self.pick(
            part, part, f"({part} + {other})", f"({part} - {other})", f"({part} * {other})",
            f"({part} // {other})", f"({part} % {other})", f"min({part}, {other})", f"max({part}, {other}, 4)",
            f"abs({part})", f"{self.row(self.pick('a', 'm'))}.x", f"{self.row('w')}.x", "len(items)",
            f"int({self.double(depth - 1)})", f"({part} & {other})", f"({part} ^ 5)", f"({part} if {self.test(0)} else {other})",
            f"-({part})", f"({part} >> 2)", f"({part} << 3)", "items[1]", f"round({self.double(depth - 1)})",
            f"int({self.mixed()})",
        )  # fmt: skip

    def double(self, depth: int = 2) -> str:
        if depth == 0:
            return self.pick(*self.doubles, "0.25", "3.0", "-1.5")
        if self.draw(st.integers(0, 4)) == 0:
            return self.pick(f"{self.row('p')}.h", f"float({self.decimal()})")
        part, other = self.double(depth - 1), self.double(depth - 1)
        number = self.long(depth - 1)
        return self.pick(
            part, f"({part} + {number})", f"({part} - {other})", f"({part} * {other})", f"({part} / {other})",
            f"({number} / {self.long(depth - 1)})", f"({part} // {other})", f"({part} % {other})",
            f"{self.row(self.pick('a', 'm'))}.y", "weights[0]", f"math.sqrt({part})", f"float({number})",
            f"min({part}, {other})", f"math.floor({part}) * 0.5",
            f"float({self.mixed()})", f"({self.mixed()} + {part})",
        )  # fmt: skip

    def mixed(self) -> str:
        """A long on some paths and a double on others, as `z` is."""
        number, part = self.long(0), self.double(0)
        return self.pick(
            "z", "z", f"({number} if i > j else {part})", f"max({number}, {part})", f"min({part}, {number}, z)",
            f"(z + {number})", f"(z * {part})", f"(z // {number})", "-z", "abs(z)", f"({number} or {part})",
        )  # fmt: skip

    def string(self) -> str:
        return self.pick("g", f"{self.row('a')}.s", f"{self.row('w')}.s", "'two'")

    def test(self, depth: int = 1) -> str:
        sign = self.pick("<", "<=", "==", "!=", ">", ">=")
        if self.draw(st.integers(0, 3)) == 0:
            table = self.pick("a", "p", "q")
            return self.pick(
                f"{self.decimal()} {sign} {self.pick('e', 'n', '1')}",
                f"{self.whole(table)} {self.pick('in', 'not in')} {table}",
            )
        one = self.pick(
            f"{self.long(depth)} {sign} {self.long(depth)}",
            f"{self.double(depth)} {sign} {self.long(depth)}",
            f"{self.mixed()} {sign} {self.pick(self.long(depth), 'z', 'f')}",
            f"{self.string()} {self.pick('==', '!=')} {self.string()}",
            f"{self.row('a')}.b",
            f"1 <= {self.pick(*self.clean)} < 4",
            f"{self.pick(*self.clean)} in (1, 2, 5)",
        )
        if depth:
            return self.pick(one, one, f"{one} and {self.test(0)}", f"{one} or {self.test(0)}", f"not {one}")
        return one

    def block(self, depth: int, indent: str) -> None:
        kept = (list(self.clean), list(self.longs), list(self.doubles))
        for _ in range(self.draw(st.integers(1, 3))):
            self.statement(depth, indent)
        self.clean, self.longs, self.doubles = kept

    def statement(self, depth: int, indent: str) -> None:  # noqa: C901 - a case for each
        kinds = ["write", "write", "augment", "augment", "local", "update", "abort", "row", "alias", "mixed"]
        kinds += ["delete", "get", "types", "types"] + (["collect", "while"] if self.late else [])
        kinds += ["if", "if", "for", "for"] if depth else []
        kinds += ["break"] if self.loops else []
        say = lambda line: self.lines.append(indent + line)  # noqa: E731 - short and local
        match self.pick(*kinds):
            case "write":
                say(
                    self.pick(
                        f"{self.row(self.pick('a', 'm', 'w'))}.x = {self.long()}",
                        f"{self.row(self.pick('a', 'm'))}.y = {self.double()}",
                        f"{self.row(self.pick('a', 'w'))}.s = {self.string()}",
                        f"{self.row('a')}.b = {self.test(0)}",
                    )
                )
            case "augment":
                op = self.pick("+=", "-=", "+=", "*=")
                say(
                    self.pick(
                        f"{self.row(self.pick('a', 'm', 'w'))}.x {op} {self.long()}",
                        f"{self.row(self.pick('a', 'm'))}.y {op} {self.double()}",
                    )
                )
            case "local":
                self.locals += 1
                name = f"v{self.locals}"
                if self.draw(st.booleans()):
                    say(f"{name} = {self.long()}")
                    self.longs.append(name)
                else:
                    say(f"{name} = {self.double()}")
                    self.doubles.append(name)
            case "update":
                mine = [name for name in self.longs if name.startswith("v")]
                say(f"{self.pick(*mine)} += {self.long()}" if mine else "pass")
            case "alias":
                say(f"kept.x += {self.long(1)}" if self.draw(st.booleans()) else f"kept = {self.row('m')}")
            case "row":
                self.locals += 1
                say(f"r{self.locals} = {self.row('a')}")
                say(f"r{self.locals}.x += {self.long(1)}")
            case "mixed":
                say(
                    self.pick(
                        f"z = {self.mixed()}",
                        f"z = {self.pick(self.long(), self.double())}",
                        f"z {self.pick('+=', '-=', '*=')} {self.pick(self.long(1), self.double(1), self.mixed())}",
                        f"{self.row(self.pick('a', 'm'))}.y = {self.mixed()}",
                    )
                )
            case "delete":
                table = self.pick("a", "m", "p", "q")
                key = self.keys(table)
                if self.draw(st.integers(0, 5)):
                    say(f"if ({key}) in {table}:")
                    say(f"    del {table}[{key}]")
                else:
                    say(f"del {table}[{key}]")
            case "get":
                self.locals += 1
                name = f"r{self.locals}"
                say(f"{name} = {self.pick('a.get(i)', 'a.get(j)', 'm.get(i)', 'q.get((i, j, 1))')}")
                if self.draw(st.integers(0, 5)):
                    say(f"if {name} is {self.pick('', 'not ')}None:")
                    say(f"    {self.row('a')}.x += 1")
                    say("else:")
                    say(f"    {name}.x = {name}.x + {self.long(0)}")
                else:
                    say(f"{name}.x = {self.long(0)}")
            case "types":
                say(
                    self.pick(
                        f"{self.row('p')}.c {self.pick('=', '+=', '-=')} {self.long(1)}",
                        f"{self.row('p')}.m {self.pick('=', '+=', '-=', '*=')} {self.decimal()}",
                        f"{self.row('p')}.h {self.pick('=', '+=')} {self.double(1)}",
                        f"{self.row('p')}.t = {self.pick('d', 'd + 1', self.long(0))}",
                        f"{self.row('q')}.x += {self.long(1)}",
                    )
                )
            case "collect":
                say(
                    self.pick(
                        f"seen.add({self.long(1)})",
                        f"order.append({self.long(1)})",
                        "order.append(len(seen))",
                    )
                )
                if self.draw(st.booleans()) and not self.loops:
                    self.locals += 1
                    say(f"for o{self.locals} in order:")
                    say(f"    {self.pick('a', 'm')}[o{self.locals}].x = len(order) - o{self.locals}")
                else:
                    say(f"if {self.long(0)} in {self.pick('seen', 'order')}:")
                    say(f"    {self.row('a')}.x -= 1")
            case "while":
                self.locals += 1
                say(f"u{self.locals} = {self.pick('0', 'i')}")
                say(f"while u{self.locals} < {self.pick('3', 'len(items)', 'min(a[i].x, 4)')}:")
                say(f"    u{self.locals} += 1")
                say(f"    {self.row(self.pick('a', 'q'))}.x += u{self.locals}")
            case "abort":
                say(f"if {self.test()}:")
                say(f"    abort('{self.pick('enough', 'no')}')")
            case "break":
                say(f"if {self.test(0)}:")
                say(f"    {self.pick('break', 'continue')}")
            case "if":
                say(f"if {self.test()}:")
                self.block(depth - 1, indent + "    ")
                if self.draw(st.booleans()):
                    say("else:")
                    self.block(depth - 1, indent + "    ")
            case "for":
                self.locals += 1
                name = f"k{self.locals}"
                over = self.pick(
                    "items",
                    "items",
                    "range(3)",
                    "range(len(items))",
                    f"range({self.pick('n % 3', 'j')})",
                    "range(-9223372036854775807, n, 4611686018427387904)",
                )
                say(f"for {name} in {over}:")
                kept = (list(self.clean), list(self.longs))
                self.clean.append(name)
                self.longs.append(name)
                self.loops += 1
                self.block(depth - 1, indent + "    ")
                self.loops -= 1
                self.clean, self.longs = kept


@st.composite
def functions(draw: Draw, name: str, results: tuple[str, ...]) -> str:
    """A function that returns values of those types, on some paths."""
    grammar = Grammar(draw, late := draw(st.booleans()))
    if late:
        grammar.lines[:0] = ["    seen = set()", "    order = []", "    order.append(1)"]
    if draw(st.booleans()):
        grammar.lines.append(f"    c = {grammar.pick('i + 1', 'n % 3', 'i * j', 'items[0]')}")
        grammar.clean.append("c")
        grammar.longs.append("c")
    for _ in range(draw(st.integers(1, 4))):
        grammar.statement(2, "    ")
    if results:
        for indent in ("        ", "    "):
            if indent == "        ":
                if draw(st.booleans()):
                    continue
                grammar.lines.append(f"    if {grammar.test()}:")
            made = {"long": grammar.long, "double": grammar.double, "string": grammar.string}
            grammar.lines.append(f"{indent}return {', '.join(made[type_]() for type_ in results)}")
    return f"def {name}{HEADER}:\n" + "\n".join(grammar.lines) + "\n"


RESULTS = {"first": ("long",), "second": ("long", "double"), "third": ()}


@st.composite
def function_sets(draw: Draw) -> dict[str, str]:
    count = draw(st.integers(1, 3))
    return {name: draw(functions(name, RESULTS[name])) for name in list(RESULTS)[:count]}


SMALL = st.integers(0, 5)
LONGS = st.one_of(
    SMALL, SMALL, st.sampled_from([-1, -7, 2**63 - 1, -(2**63), 2**53 + 1, -(2**53) - 1, 2**62])
)
DOUBLES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.5, -2.25, 1e300, 2.0**53, 2.0**63, float("inf"), float("nan")]),
    st.floats(-10, 10),
)


@st.composite
def epochs(draw: Draw, kinds: list[str]) -> list[dict[str, Any]]:
    event = st.fixed_dictionaries(
        {
            "time": st.integers(0, 8), "seq": st.integers(0, 3), "kind": st.sampled_from(kinds),
            "i": SMALL, "j": SMALL, "n": LONGS, "f": DOUBLES, "g": st.sampled_from(["", "one", "two", "x"]),
            "d": SMALL, "e": st.decimals(-99, 9999, places=3),
            "items": st.lists(SMALL, max_size=4), "weights": st.lists(DOUBLES, max_size=2),
        }
    )  # fmt: skip
    return draw(st.lists(event, min_size=1, max_size=25))


def oracle_tables() -> dict[str, OracleTable]:
    zeros: dict[str, Any] = {"double": 0.0, "float": 0.0, "string": "", "boolean": False}
    out = {}
    for name, spec in TABLES.items():
        types = {column.split()[0]: column.split()[1] for column in re.split(r",(?![^(]*\))", spec.value)}
        zero = {
            name: Decimal("0.00") if type_.startswith("decimal") else zeros.get(type_, 0)
            for name, type_ in types.items()
        }
        default = spec.default and {
            name: Decimal(value) if types[name].startswith("decimal") else value
            for name, value in spec.default.items()
        }
        out[name] = OracleTable(name, zero, default, types, 1 if name == "p" else None)
    return out


def rows_by_key(name: str, snapshot: pa.Table) -> dict[Any, dict[str, Any]]:
    """Rows as the oracle has them, dates as days."""
    if "t" in snapshot.column_names:
        place = snapshot.column_names.index("t")
        snapshot = snapshot.set_column(place, "t", snapshot["t"].cast(pa.int32()))
    out = {}
    count = len(TABLES[name].keys)
    for row in snapshot.to_pylist():
        values = list(row.items())
        key = tuple(value for _, value in values[:count])
        out[key[0] if count == 1 else key] = dict(values[count:])
    return out
