"""Tasks of a direct call that access nothing: they run where the call was made, which saves a way to a container."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.code.capture import OF_USER_CODE
from millpond.code.capture import described as error_in_words
from millpond.errors import MillpondError, ProgramFailed, Rejected
from millpond.programs.bodies import bodies, file_of
from millpond.programs.graph import REJECTS, RETURNS, Graph, Method, Task
from millpond.programs.merging import Collection
from millpond.programs.packing import pack, unpack
from millpond.programs.tokens import Token
from millpond.programs.values import inner_of


class FreeTasks:
    """Of one program."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._bodies = bodies(graph)

    def can_run(self, method: Method, tokens: Sequence[Token], lanes: int) -> bool:
        """Whether that is what comes next of a call; where it gathers, of all lanes, which are so many."""
        tasks = {token.task for token in tokens}
        task = method.tasks[tokens[0].task] if len(tasks) == 1 and tokens[0].task >= 0 else None
        return task is not None and task.field is None and (not task.gathers or len(tokens) == lanes)

    def run(self, method: Method, tokens: Sequence[Token]) -> tuple[Token, Sequence[Any]]:
        """Runs it, and those after it that access nothing: what comes then, and its inputs as they are, or packed where the
        call has ended.
        """
        parts = sorted(tokens, key=lambda each: each.at)
        token, task = parts[0], method.tasks[parts[0].task]
        types = [variable.type for variable in task.inputs]
        values: Sequence[Any]
        if task.gathers:
            columns = [unpack(part.values, [inner_of(types[0]), *types[1:]]) for part in parts]
            values = [Collection(column[0] for column in columns), *columns[0][1:]]
        else:
            values = unpack(token.values, types)
        while True:
            if token.steps >= self._graph.max_rounds:
                raise self.failed(method, task.line, f"it went through {token.steps:,} tasks")
            following, values = self._call(method, task, values)
            token = token._replace(task=following, steps=token.steps + 1)
            if following < 0:
                kind = "string" if following == REJECTS else method.returns or "long"
                return token._replace(values=self._packed(method, task, values, [kind])), ()
            behind, task = task, method.tasks[following]
            types = [variable.type for variable in task.inputs]
            packed = self._packed(method, behind, values, types)
            values = unpack(packed, types)
            if task.field is not None or task.gathers:
                return token._replace(values=packed), values

    def _call(self, method: Method, task: Task, values: Sequence[Any]) -> tuple[int, Sequence[Any]]:
        try:
            following, given = self._bodies[method.name, task.number](None, *values)
        except Rejected as rejected:
            return REJECTS, [rejected.reason]
        except MillpondError:
            raise
        except OF_USER_CODE as error:
            line, trace = task.line, error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code.co_filename == file_of(method.name, task.number):
                    line = task.lines[trace.tb_lineno - 1]
                trace = trace.tb_next
            raise self.failed(method, line, error_in_words(error)) from error
        return following, [None] if following == RETURNS and method.returns is None else given

    def _packed(self, method: Method, task: Task, values: Sequence[Any], types: Sequence[str]) -> bytes:
        try:
            return pack(values, types)
        except (TypeError, ValueError, OverflowError) as error:
            raise self.failed(method, task.line, error_in_words(error)) from error

    def failed(self, method: Method, line: int, why: str) -> ProgramFailed:
        return ProgramFailed(
            f"method {method.name!r} of program {self._graph.name!r} failed in line {line} of {self._graph.file}: {why}",
            hint="mend the method, or what it is given",
            program=self._graph.name,
            method=method.name,
            line=line,
            row=0,
        )
