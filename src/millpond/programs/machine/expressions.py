"""Expressions of a body as text of a compiled function, each with its kind."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from millpond.programs.compiler.tasks import STATE
from millpond.programs.machine.kinds import ARRAYS, MAPS, NUMBERS, VECTORS, Value, item_of

LONG_MIN, LONG_MAX = -(1 << 63), (1 << 63) - 1
_COMPARING = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
# Of a long beside a double: what `compare` gives then, and the same the other way round.
_MIXED = {"<": "== -1", "<=": "in (-1, 0)", ">": "== 1", ">=": "in (0, 1)", "==": "== 0", "!=": "!= 0"}
_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_LONGS = {
    ast.Add: "add_longs", ast.Sub: "sub_longs", ast.Mult: "mul_longs", ast.FloorDiv: "floor_longs", ast.Mod: "mod_longs",
    ast.Div: "div_longs",
}  # fmt: skip
_DOUBLES = {ast.Div: "div_doubles", ast.FloorDiv: "floor_doubles", ast.Mod: "mod_doubles"}
_NATIVE = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^"}
_MATH = ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tanh", "atan", "fabs")
_MATH_TESTS = ("isnan", "isinf", "isfinite")
_MATH_WHOLE = ("floor", "ceil", "trunc")
_MATH_VALUES = ("pi", "e", "inf", "nan", "tau")
_RESULTS: dict[str, dict[tuple[str, tuple[str, ...]], str]] = {
    "vector": {
        ("keys", ()): "array<long>",
        ("values", ()): "array<double>",
        ("total", ()): "double",
        ("get", ("long",)): "double",
        ("get", ("long", "double")): "double",
        ("dot", ("vector",)): "double",
        ("dot", ("array<double>",)): "double",
        ("top", ("long",)): "array<long>",
        ("without", ("vector",)): "vector",
        ("copy", ()): "vector",
        ("array", ("long",)): "array<double>",
    },
    "matrix": {
        ("keys", ()): "array<long>",
        ("multiply", ("vector",)): "vector",
        ("column", ("long",)): "vector",
    },
}
"""What methods give, by their names and the kinds of their arguments."""


class Expressions:
    """What `Function` does with expressions. Statements that come before one are written first."""

    def __init__(self) -> None:
        self.kinds: dict[str, str] = {}
        self.defined: set[str] = set()
        self.lines: list[str] = []
        self.aliases: dict[str, str] = {}
        """Of variables of comprehensions."""
        self.depth = 1
        self.count = 0

    def refuse(self, node: ast.AST, why: str) -> NoReturn:
        raise NotImplementedError

    def poll(self) -> None:
        raise NotImplementedError

    def called_function(self, name: str, node: ast.Call) -> Value | None:
        """A call of a function of the user's, if it is one."""
        raise NotImplementedError

    def constant_of(self, name: str, node: ast.AST) -> Value:
        """A name that is no variable."""
        self.refuse(node, f"{name} is not known")

    # Text

    def write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    @contextmanager
    def under(self, head: str) -> Iterator[None]:
        self.write(head)
        self.depth += 1
        yield
        self.write("pass")
        self.depth -= 1

    def fresh(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def kept(self, value: Value) -> Value:
        name = self.fresh()
        self.write(f"{name} = {value.text}")
        return Value(name, value.kind)

    def name(self, variable: str) -> str:
        """Of a variable of the user's."""
        return self.aliases.get(variable, variable if variable == STATE else f"v_{variable}")

    def kind_of(self, variable: str, node: ast.AST) -> str:
        if variable not in self.defined:
            if variable in self.kinds:
                self.refuse(node, f"{variable} may have no value")
            return ""
        return self.kinds[variable]

    # Values

    def value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=value):
                return self.constant(value, node)
            case ast.Name(id=name):
                kind = self.kind_of(name, node)
                return Value(self.name(name), kind) if kind else self.constant_of(name, node)
            case ast.BinOp():
                return self.arithmetic(node.op, self.value(node.left), self.value(node.right), node)
            case ast.UnaryOp():
                return self.unary(node)
            case ast.Compare():
                return self.comparison(node)
            case ast.BoolOp():
                return self.both(node)
            case ast.IfExp():
                test = self.truth(self.value(node.test), node.test)
                left, right = self.value(node.body), self.value(node.orelse)
                if left.kind != right.kind:
                    self.refuse(node, f"{ast.unparse(node)} is a {left.kind} or a {right.kind}")
                return Value(f"({left.text} if {test} else {right.text})", left.kind)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
            case ast.ListComp(generators=[_]):
                return self.listed(node)
            case ast.List(elts=elements) if elements:
                return self.literal(elements, node)
            case ast.Attribute(value=ast.Name(id="math"), attr=attr) if attr in _MATH_VALUES:
                return Value(
                    {"pi": "np.pi", "e": "np.e", "inf": "np.inf", "nan": "np.nan"}.get(attr, "math.tau"),
                    "double",
                )
        self.refuse(node, f"{ast.unparse(node)} is not compiled")

    def constant(self, value: object, node: ast.AST) -> Value:
        if isinstance(value, bool):
            return Value(repr(value), "boolean")
        if isinstance(value, int) and LONG_MIN <= value <= LONG_MAX:
            return Value(f"np.int64({value})", "long")
        if isinstance(value, float):
            text = {"inf": "np.inf", "-inf": "-np.inf", "nan": "np.nan"}.get(repr(value), repr(value))
            return Value(text, "double")
        words = "a text" if isinstance(value, str) else "None" if value is None else repr(value)
        self.refuse(node, f"{words} is not compiled")

    def literal(self, elements: Sequence[ast.expr], node: ast.AST) -> Value:
        values = [self.value(element) for element in elements]
        kinds = {value.kind for value in values}
        if kinds not in ({"long"}, {"double"}):
            self.refuse(node, "a list holds something else than longs or doubles")
        [kind] = kinds
        name = self.fresh()
        self.write(f"{name} = np.empty({len(values)}, np.{_dtype(kind)})")
        for place, value in enumerate(values):
            self.write(f"{name}[{place}] = {value.text}")
        return Value(name, f"array<{kind}>")

    def truth(self, value: Value, node: ast.AST) -> str:
        match value.kind:
            case "boolean":
                return f"({value.text})"
            case "long" | "double":
                return f"({value.text} != 0)"
        if value.kind in (*ARRAYS, *VECTORS, *MAPS):
            return f"(len({value.text}) != 0)"
        self.refuse(node, f"a {value.kind} is no test")

    def double(self, value: Value) -> str:
        return value.text if value.kind == "double" else f"np.float64({value.text})"

    def long(self, value: Value) -> str:
        return value.text if value.kind == "long" else f"np.int64({value.text})"

    def key(self, node: ast.expr) -> Value:
        value = self.value(node)
        if value.kind != "long":
            self.refuse(node, f"the key {ast.unparse(node)} is a {value.kind}, and no long")
        return value

    # Arithmetic

    def arithmetic(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        kinds = {left.kind, right.kind}
        if kinds <= set(NUMBERS):
            return self.of_numbers(op, left, right, node)
        if left.kind in VECTORS and right.kind in VECTORS and isinstance(op, ast.Add | ast.Sub):
            return Value(f"({left.text} {_NATIVE[type(op)]} {right.text})", "vector")
        if left.kind in VECTORS and right.kind in ("long", "double") and isinstance(op, ast.Mult | ast.Div):
            sign = "*" if isinstance(op, ast.Mult) else "/"
            divisor = self.double(right) if sign == "*" else f"not_zero({self.double(right)}, control)"
            return Value(f"({left.text} {sign} {divisor})", "vector")
        if right.kind in VECTORS and left.kind in ("long", "double") and isinstance(op, ast.Mult):
            return Value(f"({right.text} * {self.double(left)})", "vector")
        if left.kind == right.kind and left.kind in ARRAYS[:2] and isinstance(op, ast.Add):
            return Value(f"joined({left.text}, {right.text})", left.kind)
        self.refuse(node, f"an operation on a {left.kind} and a {right.kind} is not compiled")

    def of_numbers(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        kinds = {left.kind, right.kind}
        if isinstance(op, ast.BitAnd | ast.BitOr | ast.BitXor):
            if kinds in ({"boolean"}, {"long"}):
                return Value(f"({left.text} {_NATIVE[type(op)]} {right.text})", left.kind)
        elif "double" in kinds:
            one, other = self.double(left), self.double(right)
            if type(op) in _DOUBLES:
                return Value(f"{_DOUBLES[type(op)]}({one}, {other}, control)", "double")
            if isinstance(op, ast.Add | ast.Sub | ast.Mult):
                return Value(f"({one} {_NATIVE[type(op)]} {other})", "double")
        elif type(op) in _LONGS:
            kind = "double" if isinstance(op, ast.Div) else "long"
            return Value(f"{_LONGS[type(op)]}({self.long(left)}, {self.long(right)}, control)", kind)
        self.refuse(node, f"{type(op).__name__} on a {left.kind} and a {right.kind} is not compiled")

    def unary(self, node: ast.UnaryOp) -> Value:
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            if isinstance(number, int | float) and not isinstance(number, bool):
                return self.constant(-number, node)
        value = self.value(node.operand)
        if isinstance(node.op, ast.Not):
            return Value(f"(not {self.truth(value, node)})", "boolean")
        if value.kind in NUMBERS and isinstance(node.op, ast.USub | ast.UAdd):
            if value.kind == "double":
                return value if isinstance(node.op, ast.UAdd) else Value(f"(-{value.text})", "double")
            long = self.long(value)
            return Value(long if isinstance(node.op, ast.UAdd) else f"sub_longs(0, {long}, control)", "long")
        self.refuse(node, f"{ast.unparse(node)} is not compiled")

    # Tests

    def comparison(self, node: ast.Compare) -> Value:
        sides = [node.left, *node.comparators]
        if len(sides) > 2:
            texts = []
            values = [
                None if _asks_inside(op) else self.kept(self.value(side))
                for op, side in zip([ast.Eq(), *node.ops], sides, strict=True)
            ]
            for n, op in enumerate(node.ops):
                left, right = values[n], values[n + 1]
                if left is None or right is None:
                    self.refuse(node, f"{ast.unparse(node)} is not compiled")
                texts.append(self.compared(op, left, right, node).text)
            return Value(f"({' and '.join(texts)})", "boolean")
        op, other = node.ops[0], sides[1]
        if isinstance(op, ast.Is | ast.IsNot):
            if isinstance(other, ast.Constant) and other.value is None:
                self.value(node.left)  # nothing that is compiled is None
                return Value(repr(isinstance(op, ast.IsNot)), "boolean")
            self.refuse(node, f"{ast.unparse(node)} is not compiled")
        if isinstance(op, ast.In | ast.NotIn):
            inside = self.inside(node.left, other, node)
            return Value(f"(not {inside})" if isinstance(op, ast.NotIn) else inside, "boolean")
        return self.compared(op, self.value(node.left), self.value(other), node)

    def compared(self, op: ast.cmpop, left: Value, right: Value, node: ast.AST) -> Value:
        sign = _COMPARING.get(type(op))
        if sign is None or not {left.kind, right.kind} <= set(NUMBERS):
            self.refuse(node, f"a {left.kind} is compared with a {right.kind}")
        if left.kind == "double" and right.kind != "double":
            return Value(f"(compare({self.long(right)}, {left.text}) {_MIXED[_TURNED[sign]]})", "boolean")
        if right.kind == "double" and left.kind != "double":
            return Value(f"(compare({self.long(left)}, {right.text}) {_MIXED[sign]})", "boolean")
        if left.kind == "double":
            return Value(f"({left.text} {sign} {right.text})", "boolean")
        return Value(f"({self.long(left)} {sign} {self.long(right)})", "boolean")

    def inside(self, item: ast.expr, owner: ast.expr, node: ast.AST) -> str:
        whole = self.value(owner)
        if whole.kind == "matrix" and isinstance(item, ast.Tuple) and len(item.elts) == 2:
            row, column = map(self.key, item.elts)
            return f"(({row.text}, {column.text}) in {whole.text})"
        if whole.kind in (*VECTORS, *MAPS, "matrix"):
            return f"({self.key(item).text} in {whole.text})"
        if whole.kind == "array<long>":
            return f"holds({whole.text}, {self.key(item).text})"
        self.refuse(node, f"{ast.unparse(node)} is not compiled")

    def both(self, node: ast.BoolOp) -> Value:
        values = [self.value(each) for each in node.values]
        kinds = {value.kind for value in values}
        if kinds == {"boolean"}:
            word = " and " if isinstance(node.op, ast.And) else " or "
            return Value(f"({word.join(value.text for value in values)})", "boolean")
        if len(kinds) != 1:
            self.refuse(node, f"{ast.unparse(node)} is of several types")
        chosen = values[-1]
        for value in reversed(values[:-1]):
            first = self.kept(value)
            test = self.truth(first, node)
            texts = (first.text, chosen.text) if isinstance(node.op, ast.Or) else (chosen.text, first.text)
            chosen = Value(f"({texts[0]} if {test} else {texts[1]})", value.kind)
        return chosen

    # Places

    def place(self, base: ast.expr, place: ast.expr) -> tuple[Value, list[Value]]:
        """What has an entry, and the keys of that."""
        if isinstance(base, ast.Subscript) and not isinstance(place, ast.Tuple):
            owner, keys = self.place(base.value, base.slice)
            if owner.kind == "matrix" and len(keys) == 1:
                return owner, [*keys, self.key(place)]
        owner = self.value(base)
        keys = [self.key(each) for each in (place.elts if isinstance(place, ast.Tuple) else [place])]
        if owner.kind not in ("matrix", *VECTORS, *MAPS) or len(keys) > (2 if owner.kind == "matrix" else 1):
            self.refuse(base, f"{ast.unparse(base)}[...] of a {owner.kind} is not compiled")
        return owner, keys

    def entry_kind(self, owner: Value, keys: Sequence[Value], node: ast.AST) -> str:
        if owner.kind in MAPS:
            return item_of(owner.kind)
        if owner.kind == "matrix" and len(keys) == 1:
            self.refuse(node, "a row is changed as a whole")
        return "double"

    def entry(self, owner: Value, keys: Sequence[Value], node: ast.AST) -> Value:
        index = ", ".join(key.text for key in keys)
        if owner.kind == "matrix" and len(keys) == 1:
            return Value(f"{owner.text}[{index}]", "row")
        return Value(f"{owner.text}[{index}]", self.entry_kind(owner, keys, node))

    def subscript(self, node: ast.Subscript) -> Value:
        if not isinstance(node.value, ast.Subscript) or isinstance(node.slice, ast.Slice):
            owner = self.value(node.value)
            if owner.kind in ARRAYS:
                return self.item(owner, node)
        owner, keys = self.place(node.value, node.slice)
        return self.entry(owner, keys, node)

    def item(self, owner: Value, node: ast.Subscript) -> Value:
        if not isinstance(node.slice, ast.Slice):
            index = self.value(node.slice)
            if index.kind not in ("long", "boolean"):
                self.refuse(node, f"an index is a {index.kind}")
            return Value(f"item_at({owner.text}, {self.long(index)}, control)", item_of(owner.kind))
        if node.slice.step is not None:
            self.refuse(node, "a slice has a step")
        bounds = []
        for bound in (node.slice.lower, node.slice.upper):
            value = None if bound is None else self.value(bound)
            if value is not None and value.kind != "long":
                self.refuse(node, f"a slice begins or ends at a {value.kind}")
            bounds.append("" if value is None else value.text)
        return Value(f"{owner.text}[{bounds[0]} : {bounds[1]}]", owner.kind)

    # Calls

    def call(self, node: ast.Call) -> Value:
        if node.keywords:
            self.refuse(node, f"{ast.unparse(node)} names arguments")
        match node.func:
            case ast.Attribute(value=ast.Name(id="math"), attr=attr):
                return self.of_math(attr, node)
            case ast.Attribute(value=base, attr=attr):
                return self.method(self.value(base), attr, node)
            case ast.Name(id=name):
                found = self.called_function(name, node)
                return self.builtin(name, node) if found is None else found
        self.refuse(node, f"{ast.unparse(node)} is not compiled")

    def of_math(self, attr: str, node: ast.Call) -> Value:
        values = [self.value(argument) for argument in node.args]
        if len(values) == 1 and values[0].kind in NUMBERS:
            argument = self.double(values[0])
            if attr in _MATH:
                return Value(f"math_{attr}({argument}, control)", "double")
            if attr in _MATH_TESTS:
                return Value(f"math.{attr}({argument})", "boolean")
            if attr in _MATH_WHOLE:
                whole = f"to_long(math_{attr}({argument}), control)"
                return Value(whole if values[0].kind == "double" else self.long(values[0]), "long")
        self.refuse(node, f"math.{attr} is not compiled")

    def method(self, owner: Value, attr: str, node: ast.Call) -> Value:
        values = [self.value(argument) for argument in node.args]
        if owner.kind in ARRAYS and attr == "copy" and not values:
            return owner
        given = tuple("vector" if value.kind in VECTORS else value.kind for value in values)
        kind = "vector" if owner.kind in VECTORS else "map" if owner.kind in MAPS else owner.kind
        if kind == "map":
            # Of what is absent, and of no type then, compiled code knows nothing.
            item = item_of(owner.kind)
            results = {("keys", ()): "array<long>", ("get", ("long", item)): item}
            if item != "boolean":
                results["values", ()] = f"array<{item}>"
        else:
            results = _RESULTS.get(kind, {})
        if (attr, given) not in results:
            self.refuse(node, f"{attr} of a {owner.kind} is not compiled")
        return Value(
            f"{owner.text}.{attr}({', '.join(value.text for value in values)})", results[attr, given]
        )

    def builtin(self, name: str, node: ast.Call) -> Value:
        arguments = node.args
        if name in ("sum", "any", "all") and len(arguments) == 1:
            inner = arguments[0]
            if isinstance(inner, ast.GeneratorExp | ast.ListComp) and len(inner.generators) == 1:
                return self.folded(name, inner)
        if name == "mp_Vector" and not arguments:
            return Value("mp_Vector()", "vector")
        values = [self.value(argument) for argument in arguments]
        found = self.converted(name, values, node) or self.gathered(name, values)
        if found is None:
            kinds = ", ".join(f"a {value.kind}" for value in values)
            self.refuse(node, f"{name} of {kinds or 'nothing'} is not compiled")
        return found

    def converted(self, name: str, values: Sequence[Value], node: ast.AST) -> Value | None:
        """Of builtins what makes one number of another."""
        if len(values) != 1 or values[0].kind not in NUMBERS:
            return self.truth_of(name, values, node)
        [value] = values
        match name, value.kind:
            case "int", "double":
                return Value(f"to_long(math_trunc({value.text}), control)", "long")
            case "int", _:
                return Value(self.long(value), "long")
            case "float", _:
                return Value(self.double(value), "double")
            case "abs", "double":
                return Value(f"abs({value.text})", "double")
            case "abs", "long":
                return Value(f"abs_long({value.text}, control)", "long")
        return self.truth_of(name, values, node)

    def truth_of(self, name: str, values: Sequence[Value], node: ast.AST) -> Value | None:
        if name != "bool" or len(values) != 1:
            return None
        return Value(self.truth(values[0], node), "boolean")

    def gathered(self, name: str, values: Sequence[Value]) -> Value | None:
        """Of builtins what makes one value of many, or many of many."""
        kinds, texts = [value.kind for value in values], [value.text for value in values]
        if name in ("min", "max") and len(values) > 1 and set(kinds) in ({"long"}, {"double"}):
            made = texts[0]
            for text in texts[1:]:
                made = f"{'least' if name == 'min' else 'most'}({made}, {text})"
            return Value(made, kinds[0])
        if len(values) != 1:
            return None
        [kind], [text] = kinds, texts
        if name == "len" and kind in (*ARRAYS, *VECTORS, *MAPS):
            return Value(f"np.int64(len({text}))", "long")
        if name in ("list", "sorted") and kind in (*VECTORS, *MAPS, "matrix"):
            return Value(f"{text}.keys()", "array<long>")
        if name in ("mp_total", "mp_average") and kind == "collection<vector>":
            return Value(f"{name[3:]}_of({text})", "vector")
        if kind not in ARRAYS[:2]:
            return None
        return self.of_array(name, text, kind)

    def of_array(self, name: str, text: str, kind: str) -> Value | None:
        item = item_of(kind)
        whole = "sum_longs" if item == "long" else "total_doubles"
        match name:
            case "min" | "max":
                return Value(f"{name}_of({text}, control)", item)
            case "sum":
                return Value(
                    f"sum_longs({text}, control)" if item == "long" else f"sum_doubles({text})", item
                )
            case "mp_total":
                return Value(f"{whole}({text}, control)", item)
            case "mp_average":
                divided = "div_longs" if item == "long" else "div_doubles"
                count = f"len({text})" if item == "long" else f"np.float64(len({text}))"
                return Value(f"{divided}({whole}({text}, control), {count}, control)", "double")
            case "sorted" if item == "long":
                return Value(f"np.sort({text})", kind)
            case "list":
                return Value(text, kind)
        return None

    # Loops inside of expressions

    def iterated(self, node: ast.expr, target: ast.expr) -> tuple[str, list[tuple[ast.expr, Value]]]:
        """The head of a loop, and what each of its variables is set to."""
        at = self.fresh()
        match node, target:
            case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]), _ if 1 <= len(args) <= 3:
                values = [self.value(argument) for argument in args]
                if any(value.kind != "long" for value in values):
                    self.refuse(node, "a range goes over something else than longs")
                bounds = [self.kept(value).text for value in values]
                bounds = ["np.int64(0)", *bounds] if len(bounds) == 1 else bounds
                step = bounds[2] if len(bounds) == 3 else "np.int64(1)"
                self.write(f"check_range({bounds[0]}, {bounds[1]}, {step}, control)")
                head = f"for {at} in range({bounds[0]}, {bounds[1]}, whole_step({step})):"
                return head, [(target, Value(at, "long"))]
            case ast.Call(func=ast.Name(id="enumerate"), args=[inner], keywords=[]), ast.Tuple(
                elts=[number, item]
            ):
                array = self.array_of(inner)
                value = Value(f"{array.text}[{at}]", item_of(array.kind))
                return f"for {at} in range(len({array.text})):", [(number, Value(at, "long")), (item, value)]
            case ast.Call(func=ast.Name(id="zip"), args=args, keywords=keywords), ast.Tuple(elts=items) if (
                len(args) == len(items) > 0
            ):
                arrays = [self.array_of(inner) for inner in args]
                strict = any(isinstance(each.value, ast.Constant) and each.value.value for each in keywords)
                length = f"len({arrays[0].text})"
                for array in arrays[1:]:
                    function = "same_length" if strict else "least"
                    length = f"{function}({length}, len({array.text}){', control' if strict else ''})"
                values = [Value(f"{array.text}[{at}]", item_of(array.kind)) for array in arrays]
                return f"for {at} in range({length}):", list(zip(items, values, strict=True))
            case ast.Call(func=ast.Attribute(value=base, attr="items"), args=[], keywords=[]), ast.Tuple(
                elts=[key, item]
            ):
                owner = self.value(base)
                if owner.kind not in (*VECTORS, "map<long>", "map<double>"):
                    self.refuse(node, f"items of a {owner.kind} is not compiled")
                keys = self.kept(Value(f"{owner.text}.keys()", "array<long>"))
                kind = item_of(owner.kind) or "double"
                values = [self.kept(Value(f"{owner.text}.values()", f"array<{kind}>"))]
                pairs = [
                    (key, Value(f"{keys.text}[{at}]", "long")),
                    (item, Value(f"{values[0].text}[{at}]", kind)),
                ]
                return f"for {at} in range(len({keys.text})):", pairs
        array = self.array_of(node)
        return f"for {at} in range(len({array.text})):", [
            (target, Value(f"{array.text}[{at}]", item_of(array.kind)))
        ]

    def array_of(self, node: ast.expr) -> Value:
        """What is iterated over, as an array."""
        value = self.value(node)
        if value.kind in (*VECTORS, *MAPS, "matrix"):
            value = Value(f"{value.text}.keys()", "array<long>")
        if value.kind not in ARRAYS:
            self.refuse(node, f"a loop over a {value.kind or ast.unparse(node)} is not compiled")
        return self.kept(value)

    @contextmanager
    def within(self, generator: ast.comprehension) -> Iterator[None]:
        """Inside of the loop of a comprehension, whose variables are its own."""
        before = dict(self.kinds), set(self.defined), dict(self.aliases)
        head, targets = self.iterated(generator.iter, generator.target)
        with self.under(head):
            self.poll()
            for target, value in targets:
                if not isinstance(target, ast.Name):
                    self.refuse(target, "a comprehension sets variables")
                own = self.kept(value)
                self.aliases[target.id], self.kinds[target.id] = own.text, own.kind
                self.defined.add(target.id)
            for test in generator.ifs:
                with self.under(f"if not {self.truth(self.value(test), test)}:"):
                    self.write("continue")
            yield
        self.kinds, self.defined, self.aliases = before

    def listed(self, node: ast.ListComp) -> Value:
        [generator] = node.generators
        name, count = self.fresh(), self.fresh()
        place = len(self.lines)
        depth = self.depth
        with self.within(generator):
            value = self.value(node.elt)
            if value.kind not in ("long", "double"):
                self.refuse(node, f"a list of {value.kind}s is not compiled")
            self.write(f"{name} = pushed({name}, {count}, {value.text})")
            self.write(f"{count} += 1")
        begin = "    " * depth
        self.lines[place:place] = [
            f"{begin}{name} = np.empty(8, np.{_dtype(value.kind)})",
            f"{begin}{count} = np.int64(0)",
        ]
        return self.kept(Value(f"{name}[:{count}]", f"array<{value.kind}>"))

    def folded(self, name: str, node: ast.GeneratorExp | ast.ListComp) -> Value:
        """sum, any and all of a comprehension."""
        [generator] = node.generators
        whole, place, depth = self.fresh(), len(self.lines), self.depth
        with self.within(generator):
            value = self.value(node.elt)
            if name == "sum":
                if value.kind not in NUMBERS:
                    self.refuse(node, f"a sum of {value.kind}s is not compiled")
                kind = "double" if value.kind == "double" else "long"
                added = self.arithmetic(ast.Add(), Value(whole, kind), value, node)
                self.write(f"{whole} = {added.text}")
            else:
                kind = "boolean"
                test = self.truth(value, node)
                with self.under(f"if {test if name == 'any' else f'not {test}'}:"):
                    self.write(f"{whole} = {name == 'any'}")
                    self.write("break")
        begin = {"long": "np.int64(0)", "double": "0.0"}.get(kind, repr(name == "all"))
        self.lines.insert(place, "    " * depth + f"{whole} = {begin}")
        return Value(whole, kind)


def _dtype(kind: str) -> str:
    return "int64" if kind == "long" else "float64"


def _asks_inside(op: ast.cmpop) -> bool:
    return isinstance(op, ast.In | ast.NotIn | ast.Is | ast.IsNot)
