"""What no program may do, told from the text of its methods alone."""

from __future__ import annotations

import ast

from millpond.programs.compiler.source import ProgramSource

STATEMENTS_MAX = 5_000
"""Of a method with the helpers that it calls, and of its tasks together."""
_PLAIN = "write it as plain statements of the method, or as a function outside of the class"
REFUSED: dict[type[ast.AST], tuple[str, str]] = {
    ast.AsyncFunctionDef: (
        "async has no place in a program",
        "write def: the pond runs calls side by side by itself",
    ),
    ast.Await: ("await has no place in a program", "take what is waited for as an argument"),
    ast.AsyncFor: ("async has no place in a program", "write for"),
    ast.AsyncWith: ("async has no place in a program", "take what is needed as an argument"),
    ast.With: (
        "with has no place in a program: it reaches for something outside",
        "take what it gives as an argument",
    ),
    ast.FunctionDef: (
        "a function cannot be defined inside a method",
        "make it a method, or define it outside of the class",
    ),
    ast.ClassDef: (
        "a class cannot be defined inside a method",
        "define it outside, and let values be numbers, text and lists",
    ),
    ast.Global: (
        "global state would not be there where the method runs",
        "keep state in fields of the class",
    ),
    ast.Nonlocal: (
        "state of another function would not be there where the method runs",
        "keep state in fields of the class",
    ),
    ast.Import: ("import belongs outside of the class", "import math above; other modules cannot be used"),
    ast.ImportFrom: (
        "import belongs outside of the class",
        "import math above; other modules cannot be used",
    ),
    ast.Yield: ("yield would give results one by one", "collect them in a list, and return it"),
    ast.YieldFrom: ("yield would give results one by one", "collect them in a list, and return it"),
    ast.NamedExpr: ("an assignment inside an expression", "write := as a statement of its own"),
    ast.Starred: ("* hides how many values there are", "write the values out"),
    ast.Match: ("match has no place in a program yet", "write it as if and elif"),
    ast.TryStar: ("except* has no place in a program", _PLAIN),
}


def check_class(source: ProgramSource) -> None:
    """BadProgram for what a class may not have beside its fields."""
    for node in source.tree.body:
        if isinstance(node, ast.AsyncFunctionDef):
            why, hint = REFUSED[ast.AsyncFunctionDef]
            raise source.refuse(node, why, hint, node.name)
        if isinstance(node, ast.FunctionDef):
            check_method(source, node)


def check_method(source: ProgramSource, tree: ast.FunctionDef) -> None:
    """BadProgram for what a method may not do whatever it is about."""
    arguments = tree.args
    if arguments.vararg or arguments.kwarg:
        raise source.refuse(
            tree,
            "*args and **kwargs hide what a call brings",
            "name each parameter, with its type",
            tree.name,
        )
    if tree.decorator_list:
        raise source.refuse(
            tree.decorator_list[0],
            f"@{ast.unparse(tree.decorator_list[0])} would not travel with the method",
            "leave the decorator out: methods of a program are plain ones",
            tree.name,
        )
    names = [*arguments.posonlyargs, *arguments.args]
    if not names or names[0].arg != "self":
        raise source.refuse(
            tree, "the first parameter is not self", f"write def {tree.name}(self, ...)", tree.name
        )
    for node in (inner for statement in tree.body for inner in ast.walk(statement)):
        if type(node) in REFUSED:
            why, hint = REFUSED[type(node)]
            raise source.refuse(node, why, hint, tree.name)
        if isinstance(node, ast.Name) and node.id == "self" and not isinstance(node.ctx, ast.Load):
            raise source.refuse(node, "self is set to something else", "use another name", tree.name)


BUILTINS = frozenset(
    [
        "abs",
        "all",
        "any",
        "bool",
        "dict",
        "divmod",
        "enumerate",
        "float",
        "frozenset",
        "int",
        "isinstance",
        "len",
        "list",
        "max",
        "min",
        "pow",
        "range",
        "reversed",
        "round",
        "set",
        "sorted",
        "str",
        "sum",
        "tuple",
        "zip",
        "ArithmeticError",
        "AssertionError",
        "Exception",
        "IndexError",
        "KeyError",
        "LookupError",
        "OverflowError",
        "TypeError",
        "ValueError",
        "ZeroDivisionError",
    ]
)
_OUTSIDE = (
    "it reaches out of the program (I/O)",
    "take what it gives as an argument, and return what is to go out",
)
_CLOCK = (
    "it reads the clock, which tells another time when the call runs again",
    "take the time as an argument",
)
_CHANCE = (
    "chance would fall otherwise when the call runs again",
    "take the random value, or a seed, as an argument",
)
REFUSED_BUILTINS = {
    **dict.fromkeys(("open", "input", "print", "breakpoint"), _OUTSIDE),
    **dict.fromkeys(("hash", "id"), ("it differs from process to process", "use the value itself as a key")),
    **dict.fromkeys(
        (
            "eval",
            "exec",
            "compile",
            "__import__",
            "globals",
            "locals",
            "vars",
            "getattr",
            "setattr",
            "delattr",
        ),
        ("it hides what is done", "write out what it does"),
    ),
}
REFUSED_MODULES = {
    **dict.fromkeys(("time", "datetime", "calendar", "zoneinfo"), _CLOCK),
    **dict.fromkeys(("random", "secrets", "uuid"), _CHANCE),
    **dict.fromkeys(
        (
            "os",
            "posix",
            "io",
            "sys",
            "socket",
            "pathlib",
            "shutil",
            "subprocess",
            "requests",
            "urllib",
            "http",
            "sqlite3",
            "logging",
        ),
        _OUTSIDE,
    ),
}


_UNSET = ("what it holds at first is chance", "write np.zeros(...), or np.full(...)")
_SETTING = ("it changes what others in the process do", "write out what it does")
REFUSED_IN_NUMPY = {
    **dict.fromkeys(
        (
            "DataSource",
            "fromfile",
            "fromregex",
            "genfromtxt",
            "info",
            "load",
            "loadtxt",
            "memmap",
            "save",
            "savetxt",
            "savez",
            "savez_compressed",
            "show_config",
            "show_runtime",
        ),
        _OUTSIDE,
    ),
    # Of the text "now" it makes the time.
    "datetime64": _CLOCK,
    **dict.fromkeys(("empty", "empty_like", "ndarray"), _UNSET),
    **dict.fromkeys(("setbufsize", "seterr", "seterrcall", "set_printoptions"), _SETTING),
}
"""Of numpy, by name; all else of it is the same everywhere."""
REFUSED_OF_ARRAYS = dict.fromkeys(("dump", "tofile"), _OUTSIDE)
NUMPY_MODULES = ("numpy.char", "numpy.fft", "numpy.linalg", "numpy.polynomial", "numpy.strings")


def why_not_module(module: str) -> tuple[str, str]:
    """Why nothing of a module can be used, and what to do."""
    if module == "numpy.random" or module.startswith("numpy.random."):
        return _CHANCE
    return REFUSED_MODULES.get(
        module.split(".", maxsplit=1)[0],
        (
            f"the module {module} may not be there where the method runs",
            "use math, the operations of the fields, or a plain function outside of the class",
        ),
    )
