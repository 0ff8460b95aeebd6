"""Questions about the text of a method: which places of the state it accesses, and how."""

from __future__ import annotations

import ast
from collections import Counter

from millpond.errors import BadProgram
from millpond.programs.compiler import helpers
from millpond.programs.compiler.accesses import Accesses, Site, field_in
from millpond.programs.compiler.fields import StateField
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.syntax import bound_names, is_pure_sum, loaded

LANE = "row_key"
"""The variable that holds the key by which a row's lane goes."""


class Asking:
    """What `Normaliser` knows of one method, with what it calls."""

    accesses: Accesses

    def __init__(
        self,
        source: ProgramSource,
        fields: dict[str, StateField],
        methods: dict[str, ast.FunctionDef],
        method: str,
    ) -> None:
        self.source = source
        self.fields = fields
        self.methods = methods
        self.method = method
        self.stack: list[str] = [method]
        self.lanes = self.reaches_lanes(method)
        """Whether it matters to the method which key is the last one."""
        self.numbers: Counter[str] = Counter()
        self.used: set[str] = {n.id for m in methods.values() for n in ast.walk(m) if isinstance(n, ast.Name)}
        self.used |= {a.arg for m in methods.values() for a in ast.walk(m) if isinstance(a, ast.arg)}
        self.temporary: set[str] = set()
        """Variables for what an expression, or a helper, gives, on its way to where it is used."""
        self.of_helpers: set[str] = set()
        """Variables that nobody reads once their helper has returned."""

    def refuse(self, node: ast.AST, why: str, hint: str = "") -> BadProgram:
        return self.source.refuse(node, why, hint, self.stack[-1])

    def side_effect(self, node: ast.AST) -> BadProgram:
        return self.refuse(
            node,
            f"{ast.unparse(node)} has a side effect under global access, where all lanes run at once",
            "what is done everywhere only reads; mp.everywhere(self.field).assign(value) and .clear(), as a statement of its"
            " own, do the same in all lanes",
        )

    def fresh(self, base: str) -> str:
        stem = base.lstrip("_") or "x"
        number = self.numbers[stem] + 1
        while f"{stem}_{number}" in self.used:
            number += 1
        self.numbers[stem] = number
        self.used.add(f"{stem}_{number}")
        return f"{stem}_{number}"

    def of_helper(self, base: str) -> str:
        own = self.fresh(base)
        self.source.said[own] = base
        self.of_helpers.add(own)
        return own

    def passing(self, base: str) -> str:
        """One that is temporary."""
        own = self.fresh(base)
        self.temporary.add(own)
        return own

    # Questions

    def reaches_lanes(self, method: str) -> bool:
        """Whether a method, or a helper that it calls, accesses a lane."""
        found, pending = {method}, [method]
        while pending:
            for node in ast.walk(self.methods[pending.pop()]):
                if field_in(node, self.fields) and self.fields[field_in(node, self.fields)].kind == "partial":
                    return True
                helper = helpers.helper_called(node, self.source)
                if helper and helper not in found:
                    found.add(helper)
                    pending.append(helper)
        return False

    def calls_helper(self, node: ast.AST) -> bool:
        return any(helpers.helper_called(n, self.source) for n in ast.walk(node))

    def touches(self, node: ast.AST) -> bool:
        return bool(self.accesses.all(node)) or self.calls_helper(node)

    def sites(self, node: ast.AST) -> frozenset[Site]:
        return frozenset(
            Site(
                a.field,
                a.access,
                (a.lane or LANE) if a.access == "lane" else ast.unparse(a.key) if a.key is not None else "",
            )
            for a in self.accesses.all(node)
        )

    def differs(self, node: ast.AST, other: ast.AST) -> bool:
        """Whether a node accesses state elsewhere than the other one."""
        return bool(self.sites(node) - self.sites(other))

    def needs_hoisting(self, node: ast.AST) -> bool:
        """Whether it cannot stay as it is: it accesses several places, calls helpers, or has keys that are found on the way."""
        found = self.accesses.all(node)
        if self.calls_helper(node) or len(self.sites(node)) > 1:
            return True
        if self.lanes and any(a.key is not None and a.node is not node for a in found):
            return True  # whether it is accessed, and is the last key then, shows where it is a statement
        inner = {n for c in ast.walk(node) if isinstance(c, ast.comprehension) for n in bound_names(c.target)}
        inner |= {a.arg for c in ast.walk(node) if isinstance(c, ast.Lambda) for a in c.args.args}
        return any(
            a.access == "everywhere"
            or (a.key is not None and (not is_pure_sum(a.key) or bool(inner & loaded(a.key))))
            for a in found
        )

    def is_row(self, node: ast.AST) -> bool:
        """Whether it is a row of a matrix, as it is in the state."""
        if not isinstance(node, ast.Subscript) or isinstance(node.slice, ast.Tuple):
            return False
        field = field_in(node.value, self.fields)
        return bool(field) and self.fields[field].element == "matrix"

    def is_field(self, node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        )
