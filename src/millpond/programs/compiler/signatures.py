"""What operations and functions give, by name."""

from __future__ import annotations

from millpond.programs.compiler.composite import SET

METHODS: dict[str, dict[str, str]] = {
    "string": {
        **dict.fromkeys(["lower", "upper", "strip", "lstrip", "rstrip", "replace", "join", "title", "capitalize", "removeprefix", "removesuffix", "format"], "string"),
        **dict.fromkeys(("split", "splitlines", "rsplit"), "array<string>"),
        **dict.fromkeys(("find", "count", "index", "rfind"), "long"),
        **dict.fromkeys(["startswith", "endswith", "isdigit", "isalpha", "isalnum", "islower", "isupper", "isspace"], "boolean"),
    },
    "vector": {
        "keys": "array<long>", "values": "array<double>", "array": "array<double>", "total": "double", "dot": "double",
        "get": "double", "top": "array<long>", "without": "vector", "copy": "vector",
        "items": "array<tuple<long,double>>",
    },
    "matrix": {"keys": "array<long>", "column": "vector", "multiply": "vector", "copy": "matrix"},
    "dense": {"keys": "array<long>", "copy": "dense"},
}  # fmt: skip
OF_BUILTINS = {
    **dict.fromkeys(("len", "int"), "long"),
    "float": "double",
    "str": "string",
    **dict.fromkeys(("bool", "all", "any", "isinstance"), "boolean"),
    "mp_Vector": "vector",
    "mp_Matrix": "matrix",
    "mp_DenseMatrix": "dense",
}
OF_SETS = {
    **dict.fromkeys(["copy", "union", "intersection", "difference", "symmetric_difference"], SET),
    **dict.fromkeys(["isdisjoint", "issubset", "issuperset"], "boolean"),
}
LONG_MATH = ("floor", "ceil", "trunc", "gcd", "lcm", "comb", "perm", "factorial", "isqrt")
