"""The state of a program: its annotated fields, and types as users write them."""

from __future__ import annotations

import ast
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from millpond.programs.annotations import Kind
from millpond.programs.compiler.own import BadElement, Own, capture_errors
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.elements import DenseMatrix, Element, Map, Matrix, StateElement, Vector
from millpond.programs.merging import Collection
from millpond.programs.values import travels

_TYPES = {int: "long", float: "double", bool: "boolean", str: "string"}
_SE_HINT = (
    "keep state in fields of the class: name: mp.Partitioned[T] or mp.Partial[T], with T one of mp.Map[K, V], mp.Vector,"
    " mp.Matrix, mp.DenseMatrix, or an mp.StateElement of your own"
)


class StateField(NamedTuple):
    """A field as the class has it; `key` and `value` are types."""

    name: str
    kind: typing.Literal["partitioned", "partial"]
    element: typing.Literal["map", "vector", "matrix", "dense"]
    key: str
    value: str
    line: int
    own: Own | None = None
    """Where it is of a class of the user's: what the field holds are the entries of a map, then."""
    by_column: bool = False
    """Of a matrix: what methods name first is the column."""


def fields_of(source: ProgramSource) -> dict[str, StateField]:
    """The fields of a class. BadProgram for what cannot be state."""
    found: dict[str, StateField] = {}
    names = source.globals_of(next(iter(source.functions)))
    for node in source.tree.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                if value is not None and name in source.attributes:
                    continue
                if value is not None:
                    raise source.refuse(
                        node, f"the field {name} has a value", "fields begin empty: leave it out"
                    )
                found[name] = _field(source, node, name, evaluated(source, annotation, names))
            case ast.Assign(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Name) and target.id not in source.attributes:
                        raise source.refuse(
                            node,
                            f"{target.id} is state that is in no state class, or a constant that is no number or text",
                            _SE_HINT,
                        )
            case ast.FunctionDef(name="__init__" | "__post_init__"):
                raise source.refuse(
                    node,
                    f"{node.name} would make state that is in no state class; fields begin empty",
                    f"leave it out, and {_SE_HINT}",
                    node.name,
                )
    if not found:
        raise source.refuse(source.tree, "it has no state", _SE_HINT)
    return found


def _field(source: ProgramSource, node: ast.AnnAssign, name: str, hint: Any) -> StateField:
    kind = next((k for k in getattr(hint, "__metadata__", ()) if isinstance(k, Kind)), None)
    if kind is None:
        raise source.refuse(node, f"the field {name} is neither Partitioned nor Partial", _SE_HINT)
    element = hint.__origin__
    if isinstance(element, type) and issubclass(element, StateElement):
        return _own_field(source, node, name, kind.name, element)
    if element is Map:
        raise source.refuse(
            node,
            f"the field {name} does not say what its Map holds",
            "for example mp.Map[str, int]; keys are int or str, values int, float, bool, str, lists of these, or mp.Vector",
        )
    if typing.get_origin(element) is Map:
        key, value = (type_of(part) for part in typing.get_args(element))
        if key not in ("long", "string") or not travels(value) or value.startswith("collection"):
            raise source.refuse(
                node,
                f"the field {name} cannot hold {ast.unparse(node.annotation)}",
                "keys of a Map are int or str, values int, float, bool, str, lists of these, or mp.Vector",
            )
        return StateField(name, kind.name, "map", key, value, node.lineno)
    names: dict[Any, typing.Literal["vector", "matrix", "dense"]] = {
        Vector: "vector",
        Matrix: "matrix",
        DenseMatrix: "dense",
    }
    if element not in names:
        raise source.refuse(
            node, f"the field {name} is a {ast.unparse(node.annotation)}, which is no state class", _SE_HINT
        )
    return StateField(name, kind.name, names[element], "long", "double", node.lineno)


def _own_field(
    source: ProgramSource,
    node: ast.AnnAssign,
    name: str,
    kind: typing.Literal["partitioned", "partial"],
    cls: type[StateElement[Any, Any]],
) -> StateField:
    try:
        own = capture_errors(cls)
    except BadElement as error:
        raise source.refuse(node, f"the field {name}: {error.why}", error.hint) from None
    return StateField(name, kind, "map", own.key, own.value, node.lineno, own)


def evaluated(source: ProgramSource, annotation: ast.expr, names: Mapping[str, Any], method: str = "") -> Any:
    """What an annotation stands for; a text that is no Python is DDL, and stays text."""
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    if not isinstance(text, str) or (isinstance(annotation, ast.Constant) and type_of(text)):
        return text
    try:
        return eval(text, dict(names))  # noqa: S307 - as Python itself does with annotations
    except (SyntaxError, NameError, TypeError, AttributeError) as error:
        if isinstance(annotation, ast.Constant):
            return text
        raise source.refuse(
            annotation, f"the annotation {text} cannot be read: {error}", method=method
        ) from None


def type_of(hint: Any) -> str:
    """The name of a type among those that travel; empty if it is none."""
    if isinstance(hint, str):
        text = hint.replace(" ", "").lower().replace("bigint", "long")
        return text if travels(text) else ""
    if hint in _TYPES:
        return _TYPES[hint]
    if isinstance(hint, type) and issubclass(hint, Element):
        return hint.TYPE if travels(hint.TYPE) else ""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, Collection) and len(args) == 1:
        kind = f"{'array' if origin is list else 'collection'}<{type_of(args[0])}>"
        return kind if travels(kind) else ""
    rest = [arg for arg in args if arg is not type(None)]
    if len(rest) == 1 and len(rest) < len(args):
        return type_of(rest[0])  # of `int | None`: every type has null
    return ""
