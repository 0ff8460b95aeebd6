"""Graphs written by hand, as a translator would give them, and the same in plain Python."""

from __future__ import annotations

from typing import Any

from millpond.programs.graph import Field, Graph, Method, Parameter, Task, Variable


def task(
    number: int,
    source: str,
    inputs: str,
    field: str | None = None,
    access: Any = "none",
    key: str | None = None,
    *,
    writes: bool = False,
    gathers: bool = False,
    level: int = 0,
) -> Task:
    """`inputs` are names and types, as in "user long, row vector"."""
    variables = tuple(Variable(*each.split(" ")) for each in inputs.split(", ") if each)
    names = ", ".join(variable.name for variable in variables)
    lines = [f"def te(state, {names}):", *(f"    {line}" for line in source.strip("\n").splitlines())]
    numbers = tuple(range(100 * number, 100 * number + len(lines)))
    return Task(
        number,
        field,
        access,
        key,
        variables,
        "\n".join(lines),
        numbers,
        writes,
        100 * number,
        gathers,
        level,
        (),
    )


def method(
    name: str, parameters: str, returns: str | None, tasks: list[Task], *, rejects: bool = False
) -> Method:
    """`parameters` as in "user long, k long=10"."""
    known = []
    for each in parameters.split(", ") if parameters else []:
        variable, kind = each.split(" ")
        kind, _, default = kind.partition("=")
        known.append(Parameter(variable, kind, bool(default), int(default) if default else None))
    read_only = not any(each.writes for each in tasks)
    return Method(name, tuple(known), returns, tuple(tasks), read_only, rejects, 1)


def graph(
    name: str, fields: list[Field], methods: list[Method], lanes: int = 1, max_rounds: int = 100
) -> Graph:
    levels = max(field.level for field in fields) + 1
    names = tuple(tuple(f.name for f in fields if f.level == level) for level in range(levels))
    return Graph(name, "by_hand.py", lanes, max_rounds, tuple(fields), tuple(methods), names, True, (), ())


def store(value: str = "string", key: str = "long") -> Graph:
    """A key/value store."""
    put = task(
        0,
        "state[key] = value\nreturn -1, (None,)",
        f"key {key}, value {value}",
        "kept",
        "partitioned",
        "key",
        writes=True,
    )
    get = task(0, "return -1, (state[key],)", f"key {key}", "kept", "partitioned", "key")
    drop = task(
        0,
        "if key not in state:\n    return -2, ('unknown',)\nwas = state[key]\ndel state[key]\nreturn -1, (was,)",
        f"key {key}",
        "kept",
        "partitioned",
        "key",
        writes=True,
    )
    return graph(
        "Store",
        [Field("kept", "partitioned", "map", key, value, 0, 1)],
        [
            method("put", f"key {key}, value {value}", None, [put]),
            method("get", f"key {key}", value, [get]),
            method("drop", f"key {key}", value, [drop], rejects=True),
        ],
    )


def recommender(lanes: int = 2) -> Graph:
    """The paper's collaborative filtering: rows by user, and a co-occurrence matrix in lanes."""
    add = [
        task(
            0,
            "row = state[user]\nfresh = item not in row\nothers = row.keys()\nrow[item] = rating\n"
            "if not fresh:\n    return -1, (None,)\nreturn 1, (user, item, others)",
            "user long, item long, rating double",
            "user_item",
            "partitioned",
            "user",
            writes=True,
        ),
        task(
            1,
            "for other in others:\n    state[item, other] += 1\n    state[other, item] += 1\nreturn -1, (None,)",
            "user long, item long, others array<long>",
            "co_occ",
            "lane",
            "user",
            writes=True,
            level=1,
        ),
    ]
    ask = [
        task(0, "return 1, (state[user], k)", "user long, k long", "user_item", "partitioned", "user"),
        task(
            1,
            "return 2, (state.multiply(row), row, k)",
            "row vector, k long",
            "co_occ",
            "everywhere",
            level=1,
        ),
        task(
            2,
            "return -1, (mp_total(parts).without(row).top(k),)",
            "parts collection<vector>, row vector, k long",
            gathers=True,
            level=2,
        ),
    ]
    return graph(
        "Recommender",
        [
            Field("user_item", "partitioned", "matrix", "long", "double", 0, 1),
            Field("co_occ", "partial", "matrix", "long", "double", 1, 2),
        ],
        [
            method("add_rating", "user long, item long, rating double", None, add),
            method("get_rec", "user long, k long=10", "array<long>", ask),
        ],
        lanes,
    )
