"""A layer imports only from layers below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "millpond"

# From the top down. Every package and module of the house has its place.
LAYERS: list[set[str]] = [
    {"cli", "apps", "bench", "monitor"},
    {"__init__"},
    {"pond"},
    {"ops"},
    {"client"},
    {"coordinator"},
    {"container"},
    {"txn", "programs"},
    {"stores"},
    {"kernels"},
    {"durable"},
    {"wire"},
    {"code"},
    {"times"},
    {"schema"},
    {"runtime"},
    {"private"},
    {"errors"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

MODULES = sorted(SOURCE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def is_for_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and is_for_type_checking(node):
            for other in node.orelse:
                yield other
                yield from runtime_nodes(other)
        else:
            yield node
            yield from runtime_nodes(node)


def imported_layers(source: str) -> set[str]:
    """The layers of millpond that a source imports when it runs, anywhere in it."""
    found = set()
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "millpond":
            modules = [f"millpond.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        else:
            continue
        for module in modules:
            package, _, rest = module.partition(".")
            if package == "millpond":
                name = rest.partition(".")[0]
                is_layer = (SOURCE / name).is_dir() or (SOURCE / f"{name}.py").exists()
                found.add(name if name and is_layer else "__init__")
    return found


def allowed(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    if importer == "testing":
        return RANK[imported] >= RANK["pond"]  # it runs whole ponds; what people run is not its matter
    if imported == "testing":
        return RANK[importer] == 0  # demonstrations compare with the oracle; the product never does
    if (importer, imported) == ("pond", "coordinator"):
        return True  # `mp.open` runs one
    if importer in ("pond", "ops", "client") and imported in ("coordinator", "container"):
        return False  # they ask the servers by messages, from wherever they are
    return RANK[importer] <= RANK[imported]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_layer_imports_only_downwards(path: Path) -> None:
    layer = layer_of(path)
    assert layer in RANK or layer == "testing", f"'{layer}' has no place in LAYERS"
    wrong = sorted(name for name in imported_layers(path.read_text()) if not allowed(layer, name))
    assert not wrong, f"{layer} must not import {', '.join(wrong)}"


def test_the_check_sees_imports_of_every_form() -> None:
    source = """
from __future__ import annotations
import typing
from typing import TYPE_CHECKING
import numpy, millpond.kernels.index as index
from millpond import times, open
if TYPE_CHECKING:
    from millpond.pond import Pond
else:
    import millpond.wire
def late():
    from millpond.schema import parse_ddl
"""
    assert imported_layers(source) == {"kernels", "times", "__init__", "wire", "schema"}


def test_the_check_refuses_upward_imports() -> None:
    assert not allowed("kernels", "stores")
    assert not allowed("container", "__init__")
    assert not allowed("stores", "testing")
    assert not allowed("testing", "cli")
    assert not allowed("pond", "testing")
    assert not allowed("ops", "container")
    assert not allowed("pond", "container")
    assert not allowed("client", "coordinator")
    assert allowed("pond", "coordinator")
    assert allowed("testing", "pond")
    assert allowed("cli", "pond")
    assert allowed("stores", "kernels")


def test_the_oracle_shares_no_code_with_what_it_checks() -> None:
    assert imported_layers((SOURCE / "testing" / "oracle.py").read_text()) <= {"errors"}


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 10
