"""Loops that go from task to task: a `while` is made of each, whose state is in variables; all others stay as they are."""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence

from millpond.programs.compiler.accesses import field_in
from millpond.programs.compiler.expressions import Expressions
from millpond.programs.compiler.split import changed_names
from millpond.programs.compiler.syntax import (
    Loop,
    Renaming,
    Replacing,
    assign,
    bound_names,
    constant,
    is_pure_sum,
    loaded,
    name,
    placed,
)


class Loops(Expressions):
    """What `Normaliser` does with loops."""

    def loop(self, node: ast.For) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        self.early_keys(node, out)
        iterated = self.settled(node.iter, out)
        made = placed(ast.For(node.target, iterated, self.block(node.body), node.orelse), node)
        if self.is_whole(made):
            return [*out, made]
        self.check_else(node)
        self.check_loop(node, made.body)
        if self.touches(iterated):
            if field_in(iterated, self.fields):
                iterated = placed(ast.Call(ast.Name("list", ast.Load()), [iterated], []), iterated)
            iterated = self.kept(iterated, out)
        return [*out, *self.unrolled(made, iterated)]

    def check_loop(self, node: ast.For, body: Sequence[ast.stmt]) -> None:
        """Python goes over a list as it is by then; what goes from task to task is a copy."""
        over = [node.iter]
        match node.iter:
            case ast.Call(func=ast.Name(id="zip" | "enumerate" | "reversed"), args=args):
                over = args
        names = {part.id for part in over if isinstance(part, ast.Name)}
        nodes = [n for statement in body for n in ast.walk(statement)]
        for inner in nodes:
            match inner:
                case ast.Assign(targets=[ast.Name(id=own)], value=ast.Name(id=other)) if other in names:
                    names.add(own)
        for part in (n for n in nodes if isinstance(n, ast.expr)):
            for changed in sorted(names & changed_names(part)):
                raise self.refuse(
                    part,
                    f"{changed} is changed while the loop on line {node.lineno} goes over it",
                    f"loop over a copy: for ... in {changed}.copy()",
                )

    def repeat(self, node: ast.While) -> list[ast.stmt]:
        out: list[ast.stmt] = []
        self.early_keys(node, out)
        before: list[ast.stmt] = []
        test = self.settled(copy.deepcopy(node.test), before)
        body = self.block(node.body)
        made = placed(ast.While(test, body, node.orelse), node)
        if not before and self.is_whole(made):
            return [*out, made]
        self.check_else(node)
        if not before and not self.touches(test):
            return [*out, made]
        leave = placed(ast.If(ast.UnaryOp(ast.Not(), test), [ast.Break()], []), node.test)
        return [*out, placed(ast.While(ast.Constant(True), [*before, leave, *body], []), node)]

    def unrolled(self, node: ast.For, iterated: ast.expr) -> list[ast.stmt]:
        """A loop that goes from task to task: where it is, is in variables."""
        at = self.fresh("at")
        first: list[ast.stmt]
        test: ast.expr
        match iterated, node.target:
            case ast.Call(func=ast.Name(id="range"), args=args), ast.Name() if len(args) <= 2:
                start = args[0] if len(args) == 2 else constant(0, node)
                stop = self.fresh("stop")
                first = [assign(at, start, node), assign(stop, args[-1], node)]
                test = ast.Compare(name(at, node), [ast.Lt()], [name(stop, node)])
                steps: list[ast.stmt] = [placed(ast.Assign([node.target], name(at, node)), node)]
            case ast.Call(func=ast.Name(id="zip"), args=args), ast.Tuple(elts=targets) if len(args) == len(
                targets
            ) and all(isinstance(each, ast.Name) for each in targets):
                first, test, steps = self.through(node, args, targets, at)
            case ast.Call(func=ast.Name(id="enumerate"), args=[arg]), ast.Tuple(
                elts=[number, ast.Name() as target]
            ):
                first, test, steps = self.through(node, [arg], [target], at)
                steps.append(placed(ast.Assign([number], name(at, node)), node))
            case _, ast.Name():
                first, test, steps = self.through(node, [iterated], [node.target], at)
            case _, ast.Tuple() if all(
                isinstance(n, ast.Name | ast.Tuple | ast.Load | ast.Store) for n in ast.walk(node.target)
            ):
                first, test, steps = self.through_parts(node, iterated, node.target, at)
            case _:
                raise self.refuse(
                    node,
                    f"a loop over {ast.unparse(iterated)} accesses state in several places, and its items cannot travel",
                    "loop over a list, range, zip or enumerate",
                )
        steps.append(placed(ast.AugAssign(ast.Name(at, ast.Store()), ast.Add(), ast.Constant(1)), node))
        made = placed(ast.While(test, [*steps, *node.body], []), node)
        return [*(placed(s, node) for s in first), made]

    def through(
        self, node: ast.For, lists: Sequence[ast.expr], targets: Sequence[ast.expr], at: str
    ) -> tuple[list[ast.stmt], ast.expr, list[ast.stmt]]:
        names = [self.fresh("items") for _ in lists]
        self.source.said.update(
            (own, self.source.said.get(ast.unparse(given), ast.unparse(given)))
            for own, given in zip(names, lists, strict=True)
        )
        first: list[ast.stmt] = [
            assign(own, ast.Call(ast.Name("list", ast.Load()), [given], []), node)
            for own, given in zip(names, lists, strict=True)
        ]
        first.append(assign(at, constant(0, node), node))
        lengths: list[ast.expr] = [
            ast.Call(ast.Name("len", ast.Load()), [name(own, node)], []) for own in names
        ]
        shortest = lengths[0] if len(lengths) == 1 else ast.Call(ast.Name("min", ast.Load()), lengths, [])
        test = ast.Compare(name(at, node), [ast.Lt()], [shortest])
        steps: list[ast.stmt] = [
            placed(ast.Assign([target], ast.Subscript(name(own, node), name(at, node), ast.Load())), node)
            for own, target in zip(names, targets, strict=True)
        ]
        return first, test, steps

    def through_parts(
        self, node: ast.For, iterated: ast.expr, target: ast.Tuple, at: str
    ) -> tuple[list[ast.stmt], ast.expr, list[ast.stmt]]:
        """Through a list for each variable that the items are taken apart into: items of several parts cannot travel."""
        whole: list[ast.stmt] = []
        items = self.kept(ast.Call(ast.Name("list", ast.Load()), [iterated], []), whole)
        targets = [n for n in ast.walk(target) if isinstance(n, ast.Name)]
        lists: list[ast.expr] = []
        for each in targets:
            own: dict[str, ast.expr] = {n.id: name(self.of_its_own(n.id), node) for n in targets}
            taken = Renaming(own).visit(copy.deepcopy(target))
            generator = ast.comprehension(taken, name(items.id, node), [], 0)
            lists.append(placed(ast.ListComp(own[each.id], [generator]), node))
        first, test, steps = self.through(node, lists, targets, at)
        of = f"for {ast.unparse(target)} in {ast.unparse(iterated)}"
        for statement, each in zip(first, targets, strict=False):
            self.source.said.update(dict.fromkeys(bound_names(statement), f"[{each.id} {of}]"))
        return [*whole, *first], test, steps

    def early_keys(self, node: Loop | ast.Try, out: list[ast.stmt]) -> None:
        """Keys that are the same all the time are put into variables before the loop, or try."""
        bound = bound_names(node)
        instead: dict[int, ast.expr] = {}
        named: dict[str, str] = {}
        for access in self.accesses.all(node):
            key = access.key
            if key is None or isinstance(key, ast.Name) or not is_pure_sum(key) or set(bound) & loaded(key):
                continue
            text = ast.unparse(key)
            if text not in named:
                named[text] = self.fresh("key")
                self.source.said[named[text]] = text
                out.append(assign(named[text], copy.deepcopy(key), key))
            instead[id(key)] = name(named[text], key)
        Replacing(instead).visit(node)

    def is_whole(self, node: Loop) -> bool:
        sites = self.sites(node)
        bound = bound_names(node)
        return not sites or (
            len(sites) == 1 and all(s.access != "everywhere" and s.key not in bound for s in sites)
        )

    def check_else(self, node: Loop) -> None:
        if node.orelse:
            raise self.refuse(
                node, "else of a loop that accesses state in several places", "use a variable, and if"
            )
