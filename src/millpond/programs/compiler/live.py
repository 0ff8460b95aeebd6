"""Which variables a task needs from the one before: those that it, or one after it, reads before it sets them."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from millpond.programs.compiler.split import LEAVE, Raw
from millpond.programs.compiler.syntax import loaded


def inputs_of(tasks: Sequence[Raw], variables: set[str]) -> list[set[str]]:
    """For each task the ones of these variables that are live where it begins."""
    found: list[set[str]] = [set() for _ in tasks]
    while True:
        before = [set(names) for names in found]
        for number, task in enumerate(tasks):
            live = _Live(found, tasks).block(task.body, set())
            if task.site is not None and task.site.key:
                live.add(task.site.key)
            found[number] = (live & variables) - {task.gathered}
        if found == before:
            return found


def read_after(body: Sequence[ast.stmt]) -> dict[int, set[str]]:
    """For each assignment of a whole method, by its `id`, the variables that are read after it before they are set."""
    walk = _Live([], [])
    walk.block(body, set())
    return walk.after


@dataclass
class _Loop:
    at_break: set[str]
    at_continue: set[str]


class _Live:
    def __init__(self, inputs: list[set[str]], tasks: Sequence[Raw]) -> None:
        self.inputs = inputs
        self.tasks = tasks
        self.loops: list[_Loop] = []
        self.after: dict[int, set[str]] = {}

    def block(self, statements: Sequence[ast.stmt], after: set[str]) -> set[str]:
        live = after
        for statement in reversed(statements):
            live = self.statement(statement, live)
        return live

    def statement(self, node: ast.stmt, after: set[str]) -> set[str]:
        match node:
            case ast.Return(
                value=ast.Call(func=ast.Name(id=word), args=[ast.Constant(value=number), *first])
            ) if word == LEAVE:
                assert isinstance(number, int)
                return self.inputs[number].union(*map(_read, first))
            case ast.Return() | ast.Raise():
                return _read(node)
            case ast.Break():
                return set(self.loops[-1].at_break)
            case ast.Continue():
                return set(self.loops[-1].at_continue)
            case ast.If():
                return _read(node.test) | self.block(node.body, after) | self.block(node.orelse, after)
            case ast.While() | ast.For():
                return self.loop(node, after)
            case ast.Try():
                return self.guarded(node, after)
            case ast.Assign(targets=[target], value=value) | ast.AnnAssign(target=target, value=value):
                self.after.setdefault(id(node), set()).update(after)
                return (after - _set(target)) | (_read(value) if value else set()) | _read(target)
            case ast.AugAssign(target=target):
                return after | _read(node) | ({target.id} if isinstance(target, ast.Name) else set())
        return after | _read(node)

    def guarded(self, node: ast.Try, after: set[str]) -> set[str]:
        """It may fail anywhere: then nothing is set yet that what comes then reads."""
        last = self.block(node.finalbody, after)
        failed = last if node.finalbody else set[str]()
        for handler in node.handlers:
            failed = (
                failed | (_read(handler.type) if handler.type else set()) | self.block(handler.body, last)
            )
        return failed | self.block(node.body, self.block(node.orelse, last))

    def loop(self, node: ast.While | ast.For, after: set[str]) -> set[str]:
        head = _read(node.test) if isinstance(node, ast.While) else set()
        live = after | head
        while True:
            self.loops.append(_Loop(after, live))
            body = self.block(node.body, live)
            self.loops.pop()
            if isinstance(node, ast.For):
                body -= _set(node.target)
            grown = live | body
            if grown == live:
                break
            live = grown
        live |= self.block(node.orelse, after)
        return live | (_read(node.iter) if isinstance(node, ast.For) else set())


def _read(node: ast.AST) -> set[str]:
    return {n for n in loaded(node) if n != "self"}


def _set(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    return set().union(*map(_set, target.elts)) if isinstance(target, ast.Tuple | ast.List) else set()
