"""A user's functions as source text: what may travel, what is refused, and that they do the same where they arrive."""

from __future__ import annotations

import functools
import json
import math
import math as mathematics
import pickletools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import millpond as mp
from millpond.code.capture import Code, capture
from millpond.errors import BadOption, BadRule, SchemaMismatch
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

FACTOR = 3
RATE = 0.25
NAME = "a name"
IS_ON = True
NARROW = np.int32(7)
HUGE = 2**70
NOT_A_NUMBER = math.nan
TABLE = {"a": 1}
ITEMS = [1, 2]
scale = 100


def travelled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it arrives: through bytes, as on the wire and in the journal."""
    code = capture(function, "update", "update")
    loaded: Callable[..., Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(code), type=Code).load()
    return loaded


def no_rule(function: Any, *named: str) -> BadRule:
    with pytest.raises(BadRule) as caught:
        capture(function, "update", "update")
    assert caught.value.hint
    assert caught.value.rule
    for text in named:
        assert text in str(caught.value)
    return caught.value


# What may travel


def numbers(old: int, new: int) -> float:
    return old * FACTOR + new * RATE + NARROW + IS_ON


def words(old: str, new: str) -> str:
    return f"{old} {NAME} {new}"


def squared(x: float) -> float:
    return x * x


def distance(x: float, y: float) -> float:
    return math.sqrt(squared(x) + squared(y))


def helped(old: float, new: float) -> float:
    """Calls a function that calls another one."""
    return distance(old, new) * FACTOR


def by_other_names(old: float, new: float) -> float:
    return float(np.maximum(old, new)) + mathematics.floor(new)


def repeated(old: int, new: int) -> int:
    return new if old <= 0 else repeated(old - 1, new + 2)


def with_parts(old: int, new: int) -> int:
    def inner(x: int) -> int:
        return x + FACTOR

    twice = lambda x: 2 * inner(x)  # noqa: E731 - a rule may hold one
    return sum(twice(each) for each in (old, new)) + len([n for n in range(new) if n % 2])


def annotated(old: json.JSONDecoder, new: TABLE = 5) -> LossyFiles:  # type: ignore[valid-type]
    """Annotations stay behind."""
    total: int = old + new
    return total


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (numbers, (5, 8)),
        (words, ("x", "y")),
        (helped, (3.0, 4.0)),
        (by_other_names, (2.5, 1.5)),
        (repeated, (3, 4)),
        (with_parts, (3, 4)),
        (annotated, (1, 2)),
    ],
)
def test_a_function_does_the_same_where_it_arrives(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    assert travelled(function)(*arguments) == function(*arguments)


def test_a_function_may_be_called_top() -> None:
    def top(old: int, new: int) -> int:
        most = max(old, new)
        return most + 0

    assert travelled(top)(2, 3) == 3


def test_lambdas_and_closures() -> None:
    local = 11
    plain = lambda old, new: old * local + new  # noqa: E731 - what is tested
    assert travelled(plain)(2, 3) == 25
    assert travelled(lambda old, new: max(old, new) + FACTOR)(2, 3) == 6
    many = {
        "one": lambda old, new: (
            old + new
        ),
        "two": lambda a, b, c: a,
    }  # fmt: skip
    assert travelled(many["one"])(2, 3) == 5

    def inside(old: int, new: int) -> int:
        return old * local - new

    assert travelled(inside)(2, 3) == 19


def test_what_is_captured_is_what_it_was_then() -> None:
    local = 1

    def rule(old: int, new: int) -> int:
        return old + new * local

    code = capture(rule, "update", "update")
    local = 1000
    assert code.load()(1, 1) == 2
    assert capture(rule, "update", "update") != code


def test_it_is_source_text_and_plain_constants() -> None:
    code = capture(helped, "update", "update")
    assert (code.name, code.constants, code.modules) == ("helped", {"FACTOR": ("int", "3")}, {"math": "math"})
    for name in ("helped", "distance", "squared"):
        assert f"def {name}(" in code.source
    assert '"""' not in code.source
    assert "float" not in code.source


def shadowed_by_a_parameter(old: int, new: int) -> int:
    def inner(scale: int) -> int:
        return scale + 1

    return inner(old) + scale * new


def shadowed_by_a_comprehension(old: int, new: int) -> int:
    return old + sum([scale for scale in (1, 2)]) + scale * new  # noqa: C416


def handles(old: int, new: int) -> int:
    try:
        return old // new
    except ZeroDivisionError as error:
        return len(str(error))


def matches(old: int, new: int) -> int:
    match new:
        case 0:
            return old
        case other:
            return other


@pytest.mark.parametrize("function", [shadowed_by_a_parameter, shadowed_by_a_comprehension, handles, matches])
def test_names_are_read_as_python_reads_them(function: Callable[..., Any]) -> None:
    for arguments in ((7, 2), (7, 0)):
        assert travelled(function)(*arguments) == function(*arguments)


def with_defaults(
    old: int, new: int, *, most: int = HUGE, by: Any = (None, -1, "x", (True,)), pick: Any = max
) -> Any:
    return pick(old, new), most, by


def with_others_defaults(old: float, new: float, low: float = -math.inf, narrow: Any = NARROW) -> float:
    return max(old, new, low) + narrow


def test_defaults_are_what_they_were_where_the_function_was_written() -> None:
    local = 11
    assert travelled(with_defaults)(2, 3) == with_defaults(2, 3)
    assert travelled(with_others_defaults)(2.0, 3.0) == with_others_defaults(2.0, 3.0)
    assert math.isnan(travelled(lambda old, new, at=NOT_A_NUMBER: at)(1, 2))
    assert travelled(lambda old, new, n=local: old * n + new)(2, 3) == 25
    said = capture(with_defaults, "update", "update").source
    assert "by=(None, -1, 'x', (True,))" in said
    assert f"most={HUGE}" in said


# What is refused


def keeps_a_list(old: int, new: int, seen: list[int] = []) -> int:  # noqa: B006 - what is tested
    seen.append(new)
    return len(seen)


def keeps_a_dict_by_name(old: int, new: int, *, seen: dict[str, int] = TABLE) -> int:
    return len(seen)


def keeps_a_set_in_a_tuple(old: int, new: int, seen: Any = (1, {2})) -> int:
    return len(seen)


def keeps_an_array(old: int, new: int, seen: Any = np.zeros(2)) -> int:  # noqa: B008 - what is tested
    return len(seen)


def calls_one_that_keeps(old: int, new: int) -> int:
    return keeps_a_list(old, new)


def counts_in_itself(old: int, new: int) -> int:
    counts_in_itself.seen = new  # type: ignore[attr-defined]
    return new


def counts_in_numpy(old: int, new: int) -> int:
    np.seen["a"] = new  # type: ignore[attr-defined]
    return new


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (keeps_a_list, "'keeps_a_list' has a list for the default of seen"),
        (keeps_a_dict_by_name, "has a dict for the default of seen"),
        (keeps_a_set_in_a_tuple, "has a tuple for the default of seen"),
        (keeps_an_array, "has a ndarray for the default of seen"),
        (calls_one_that_keeps, "'keeps_a_list' has a list"),
        (lambda old, new, seen=[]: len(seen), "has a list for the default of seen"),
        (counts_in_itself, "sets counts_in_itself.seen, which lives on from call to call"),
        (counts_in_numpy, "sets np.seen['a'], which lives on"),
    ],
    ids=["list", "dict by name", "set in a tuple", "array", "called", "lambda", "of itself", "of a module"],
)
def test_nothing_lives_on_from_call_to_call(function: Any, named: str) -> None:
    """What a function keeps would be undone, logged and moved by nobody."""
    no_rule(function, named)


def uses_a_dict(old: int, new: int) -> int:
    return old + TABLE["a"]


def uses_a_list(old: int, new: int) -> int:
    return old + ITEMS[0]


def uses_a_module(old: int, new: int) -> str:
    return json.dumps(old)


def uses_a_class(old: int, new: int) -> Any:
    return LossyFiles()


def uses_what_is_not_there(old: int, new: int) -> Any:
    return old + not_there  # type: ignore[name-defined]  # noqa: F821 - what is tested


def uses_one_that_does(old: int, new: int) -> Any:
    return uses_a_dict(old, new)


async def waits(old: int, new: int) -> int:
    return old


COUNT = 0


def writes_a_global(old: int, new: int) -> int:
    global COUNT  # noqa: PLW0603 - what is tested
    COUNT += 1
    return old + new


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (uses_a_dict, "'TABLE', a dict"),
        (uses_a_list, "'ITEMS', a list"),
        (uses_a_module, "'json', the module json"),
        (uses_a_class, "'LossyFiles'"),
        (uses_what_is_not_there, "'not_there', which is not defined"),
        (uses_one_that_does, "'TABLE'"),
    ],
)
def test_what_cannot_travel_is_named(function: Any, named: str) -> None:
    no_rule(function, named)


def test_a_coroutine_is_no_rule() -> None:
    with pytest.raises(BadRule, match="no plain function"):
        capture(waits, "update", "update")


def test_a_rule_that_would_count_in_a_global_is_refused() -> None:
    """It would fail on every update, or count where nobody looks."""
    no_rule(writes_a_global, "COUNT")


class Holder:
    def method(self, old: int, new: int) -> int:
        return old

    def __call__(self, old: int, new: int) -> int:
        return old


@pytest.mark.parametrize(
    "given",
    [
        Holder().method,
        Holder(),
        functools.partial(squared),
        max,
        math.sqrt,
        np.add,
        int,
        "sum",
        None,
        5,
        mp.put,
    ],
    ids=[
        *("method", "object", "partial", "built-in", "of math", "of numpy", "type"),
        *("text", "none", "number", "rule not called"),
    ],
)
def test_what_is_no_plain_function_is_no_rule(given: Any) -> None:
    with pytest.raises(BadOption) as caught:
        capture(given, "update", "update")
    assert caught.value.option == "update"
    assert caught.value.hint


def test_source_that_cannot_be_found() -> None:
    names: dict[str, Any] = {}
    exec("def hidden(old, new): return old", names)
    no_rule(names["hidden"], "source", "'hidden'")


def test_two_lambdas_that_cannot_be_told_apart() -> None:
    pair = [lambda old, new: old, lambda old, new: new]
    no_rule(pair[0])


def doubling(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    @functools.wraps(function)
    def inner(old: int, new: int) -> int:
        return 2 * function(old, new)

    return inner


@doubling
def decorated(old: int, new: int) -> int:
    return old + new


def test_a_decorator_is_not_lost_in_silence() -> None:
    """Refused, or done: but not another function than the user called."""
    try:
        arrived = travelled(decorated)
    except BadRule:
        return
    assert arrived(1, 1) == decorated(1, 1)


def capped(old: int, new: int) -> int:
    return min(old + new, HUGE)


def test_a_constant_beyond_64_bits_travels_and_the_rule_is_interpreted() -> None:
    assert travelled(capped)(2**70, 2**70) == HUGE
    with pytest.warns(mp.RuleInterpreted, match="HUGE"), LocalPond(LossyFiles()) as pond:
        pond.state("s", key="long", value="long", update=capped)


def test_a_rule_too_long_is_refused(tmp_path: Any) -> None:
    path = tmp_path / "long_rule.py"
    path.write_text("def long(old, new):\n" + "    old = old + 1\n" * 6000 + "    return old\n")
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(BadRule, match="long"):
        capture(names["long"], "update", "update")


def test_code_that_names_another_module_is_not_loaded() -> None:
    with pytest.raises(BadRule, match="os"):
        Code("f", "def f(old, new):\n    return os.name", modules={"os": "os"}).load()
    with pytest.raises(BadRule, match="cannot be read"):
        Code("f", "def f(").load()
    with pytest.raises(BadRule, match="does not define"):
        Code("f", "def g(): pass").load()


# The same State again


def build(factor: float, comment: bool = False) -> Callable[[int, int], int]:
    if comment:

        def rule(old: int, new: int) -> int:
            """The same, with words and types of its own."""
            # And a comment.
            return old * factor + new

    else:

        def rule(old, new):  # type: ignore[no-untyped-def]
            return old * factor + new

    return rule


def open_state(pond: LocalPond, rule: Any) -> mp.State:
    return pond.state("s", key="long", value="double", update=rule)


def value_of(state: mp.State) -> Any:
    return state.fetch(key="k", at="t", into="a").now(pa.table({"k": [1], "t": [9]}))["a"].to_pylist()


def test_the_same_function_opens_the_same_state_and_another_does_not() -> None:
    files = LossyFiles()
    with LocalPond(files) as pond:
        state = open_state(pond, build(10))
        open_state(pond, build(10, comment=True))
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": [1, 1], "t": [1, 2], "v": [3.0, 4.0]}), 0)
        state.finish("feed")
        assert value_of(state) == [34.0]
    with LocalPond(files) as pond:
        assert value_of(pond.state("s")) == [34.0]
        assert value_of(open_state(pond, build(10, comment=True))) == [34.0]
        for other in (build(11), lambda old, new: old * 10 + new, helped, mp.put()):
            with pytest.raises(SchemaMismatch) as caught:
                open_state(pond, other)
            assert caught.value.existing != caught.value.requested


def test_a_constant_of_another_type_is_another_function() -> None:
    with LocalPond(LossyFiles()) as pond:
        open_state(pond, build(1))
        for other in (1.0, True):
            with pytest.raises(SchemaMismatch):
                open_state(pond, build(other))


def never(old: float, new: float) -> float:
    return old if new == NOT_A_NUMBER else new


def test_a_rule_with_nan_opens_the_same_state() -> None:
    with LocalPond(LossyFiles()) as pond:
        open_state(pond, never)
        open_state(pond, never)


def test_the_files_hold_the_source_and_nothing_pickled() -> None:
    files = LossyFiles()
    with LocalPond(files) as pond:
        state = open_state(pond, helped)
        feed = state.update(key="k", at="t", value="v", name="feed")
        feed(pa.table({"k": [1], "t": [1], "v": [3.0]}), 0)
        pond.checkpoint()
    contents = [bytes(inode.content) for inode in files._names.values()]
    assert any(b"def helped" in content for content in contents)
    for content in contents:
        # Since protocol 2 a pickle says so at its beginning.
        for protocol in range(2, 6):
            mark = bytes([0x80, protocol])
            for start in (at for at in range(len(content)) if content[at : at + 2] == mark):
                with pytest.raises((ValueError, IndexError, UnicodeDecodeError)):
                    operations = list(pickletools.genops(content[start:]))
                    if len(operations) < 4:
                        raise ValueError("two bytes that look like one")
