"""Helper methods, written into the methods that call them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence

from millpond.code.capture import expression_of, unless_said
from millpond.programs.compiler.source import ProgramSource
from millpond.programs.compiler.syntax import (
    always_returns,
    assign,
    bound_in,
    constant,
    has,
    name,
    placed,
    renamed,
)

MISSING_HINT = "give every parameter without a default a value"


def helper_called(node: ast.AST, source: ProgramSource) -> str:
    """The helper, if the node is `self.helper(...)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=attr)) if attr in source.methods:
            return attr
    return ""


def bind(source: ProgramSource, helper: ast.FunctionDef, call: ast.Call, caller: str) -> dict[str, ast.expr]:
    """The arguments of a call, by parameter."""
    parameters = [a.arg for a in [*helper.args.posonlyargs, *helper.args.args]][1:]
    given = dict(zip(parameters, call.args, strict=False))
    wrong = len(call.args) > len(parameters)
    only = [a.arg for a in helper.args.kwonlyargs]
    for keyword in call.keywords:
        wrong |= keyword.arg is None or keyword.arg in given or keyword.arg not in parameters + only
        given[keyword.arg or ""] = keyword.value
    defaults = dict(zip(reversed(parameters), reversed(helper.args.defaults), strict=False))
    defaults |= {a: d for a, d in zip(only, helper.args.kw_defaults, strict=True) if d is not None}
    defaults = {p: _as_it_was(source, helper, p, said) for p, said in defaults.items() if p not in given}
    for parameter in parameters + only:
        if parameter not in given:
            wrong |= parameter not in defaults
            given[parameter] = defaults.get(parameter, constant(None, call))
    if wrong:
        raise source.refuse(
            call, f"{ast.unparse(call)} does not fit the parameters of {helper.name}", MISSING_HINT, caller
        )
    return given


def _as_it_was(source: ProgramSource, helper: ast.FunctionDef, parameter: str, said: ast.expr) -> ast.expr:
    """A default: as it is written, if that says all, or else its value."""
    value = inspect.signature(source.functions[helper.name]).parameters[parameter].default
    try:
        return unless_said(said, expression_of(value))
    except ValueError:
        raise source.refuse(
            said,
            f"the default of {parameter} is a {type(value).__name__} from outside of the method",
            "let it be a number, text, None, or a list that is written there",
            helper.name,
        ) from None


def body_of(
    helper: ast.FunctionDef, arguments: dict[str, ast.expr], fresh: Callable[[str], str]
) -> tuple[list[ast.stmt], str]:
    """The statements of a helper with the arguments in it, names of its own, and its result in a variable."""
    bound = bound_in(helper.body)
    instead: dict[str, ast.expr] = {local: name(fresh(local), helper) for local in bound}
    first: list[ast.stmt] = []
    for parameter, value in arguments.items():
        if parameter not in bound and isinstance(value, ast.Name | ast.Constant):
            instead[parameter] = value
        else:
            own = fresh(parameter) if parameter not in instead else instead[parameter].id  # type: ignore[attr-defined] # a name
            instead[parameter] = name(own, value)
            first.append(assign(own, value, value))
    result = fresh(helper.name)
    body = renamed(helper.body, instead)
    return first + Unreturned(result, fresh("ended")).all(body, helper), result


class Unreturned:
    """Statements in which what was returned is in a variable instead, and what follows is skipped."""

    def __init__(self, result: str, ended: str) -> None:
        self.result = result
        self.ended = ended
        self.flagged = False

    def all(self, body: Sequence[ast.stmt], at: ast.AST) -> list[ast.stmt]:
        made = self.block(list(body), looping=False)
        first: list[ast.stmt] = []
        if self.flagged:
            first.append(assign(self.ended, constant(False, at), at))
        if self.flagged or not always_returns(body):
            first.append(assign(self.result, constant(None, at), at))
        return first + made

    def block(self, body: list[ast.stmt], looping: bool, marking: bool = False) -> list[ast.stmt]:
        """`marking`: something follows that is skipped where this returns."""
        out: list[ast.stmt] = []
        for i, statement in enumerate(body):
            rest = body[i + 1 :]
            if isinstance(statement, ast.Return):
                return [*out, *self.returned(statement, looping, marking)]
            if not has(statement, ast.Return):
                out.append(statement)
            elif not isinstance(statement, ast.If):
                return [*out, *self.loop(statement, rest, looping, marking)]
            elif looping:
                out.append(self.branches(statement, statement.body, statement.orelse, looping, marking))
            elif always_returns(statement.body):
                other = [*statement.orelse, *rest]
                return [*out, self.branches(statement, statement.body, other, looping, marking)]
            elif always_returns(statement.orelse):
                first = [*statement.body, *rest]
                return [*out, self.branches(statement, first, statement.orelse, looping, marking)]
            else:
                self.flagged = True
                out.append(self.branches(statement, statement.body, statement.orelse, looping, marking=True))
                return [*out, *self.unless_ended(statement, self.block(rest, looping, marking))]
        return out

    def returned(self, statement: ast.Return, looping: bool, marking: bool) -> list[ast.stmt]:
        out: list[ast.stmt] = [assign(self.result, statement.value or constant(None, statement), statement)]
        if looping or marking:
            self.flagged = True
            out.append(assign(self.ended, constant(True, statement), statement))
        return [*out, placed(ast.Break(), statement)] if looping else out

    def branches(
        self, at: ast.If, body: list[ast.stmt], other: list[ast.stmt], looping: bool, marking: bool
    ) -> ast.stmt:
        made = self.block(body, looping, marking) or [placed(ast.Pass(), at)]
        return placed(ast.If(at.test, made, self.block(other, looping, marking)), at)

    def unless_ended(self, at: ast.stmt, following: list[ast.stmt]) -> list[ast.stmt]:
        test = ast.UnaryOp(ast.Not(), name(self.ended, at))
        return [placed(ast.If(test, following, []), at)] if following else []

    def loop(self, statement: ast.stmt, rest: list[ast.stmt], looping: bool, marking: bool) -> list[ast.stmt]:
        if not isinstance(statement, ast.For | ast.While):
            return [statement, *self.block(rest, looping, marking)]
        self.flagged = True
        statement.body = self.block(statement.body, looping=True)
        if looping:
            leave = placed(ast.If(name(self.ended, statement), [ast.Break()], []), statement)
            return [statement, leave, *self.block(rest, looping)]
        return [statement, *self.unless_ended(statement, self.block(rest, looping, marking))]
