"""What a program became, in words."""

from __future__ import annotations

from millpond.errors import BadOption
from millpond.programs.graph import Graph, Method, Task


class Explanation(str):
    """A text, which notebooks show as a picture."""

    __slots__ = ("graph",)
    graph: Graph

    def _repr_svg_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """The graph as a picture, a text of SVG."""
        from millpond.programs.svg import drawn  # noqa: PLC0415 - few ask for it

        return drawn(self.graph)


def graph_of(cls: type) -> Graph:
    """The graph of a program. BadOption if the class is none."""
    graph: Graph | None = getattr(cls, "__millpond_graph__", None)
    if graph is None:
        raise BadOption(f"{cls!r} is no program", hint="put @mp.program above the class", option="cls")
    return graph


def explain(cls: type) -> Explanation:
    """The graph of a program: its fields, the tasks of each method, the rounds, and why. `.svg()` draws it."""
    graph = graph_of(cls)
    made = Explanation("\n".join(_lines(graph)))
    made.graph = graph
    return made


def _lines(graph: Graph) -> list[str]:
    lanes = f"{graph.lanes} lane{'s' if graph.lanes > 1 else ''}"
    out = [
        f"program {graph.name}: {len(graph.fields)} fields, {len(graph.methods)} methods, {lanes}",
        "",
        "state",
    ]
    for field in graph.fields:
        spread = f"{graph.lanes} lanes" if field.kind == "partial" else f"by {field.key}"
        own = graph.class_of(field.name)
        element = field.element if own is None else own.name
        out.append(
            f"  {field.name}: {field.kind} {element}, {spread}, values {field.value}, round {field.level + 1}"
        )
    for method in graph.methods:
        out += ["", heading(method)]
        out += [f"  {line}" for task in method.tasks for line in _task(method, task)]
    out += ["", "rounds"]
    out += [f"  {n + 1}: {', '.join(names)}" for n, names in enumerate(graph.levels)]
    how = (
        "serial: an epoch equals its calls one after the other"
        if graph.serial
        else "round-synchronous: calls of an epoch take turns, round by round"
    )
    out += ["", how, *(f"  because {reason}" for reason in graph.why)]
    return out


def heading(method: Method) -> str:
    """A method and what it is, in a line."""
    parameters = ", ".join(
        f"{p.name} {p.type}" + (f" = {p.default!r}" if p.optional else "") for p in method.parameters
    )
    facts = ["read-only" if method.read_only else "writes", *(["may reject"] if method.rejects else [])]
    returns = f" -> {method.returns}" if method.returns else ""
    return f"{method.name}({parameters}){returns}: {', '.join(facts)}"


def where(task: Task) -> str:
    """Where a task runs, in a few words."""
    words = {
        "partitioned": f"{task.field}[{task.key}]",
        "lane": f"{task.field}, lane of {task.key}",
        "everywhere": f"{task.field}, all lanes",
        "none": "no state",
    }
    return words[task.access]


def dispatch(task: Task, following: Task) -> str:
    """How what a task gives gets to the next one."""
    if following.gathers:
        return "all-to-one"
    return {
        "partitioned": f"partitioned by {following.key}",
        "lane": f"by the lane of {following.key}",
        "everywhere": "one-to-all",
        "none": "stays",
    }[following.access]


def _task(method: Method, task: Task) -> list[str]:
    does = "writes" if task.writes else "reads" if task.field else "computes"
    takes = ", ".join(f"{v.name} {v.type}" for v in task.inputs) or "nothing"
    out = [f"TE {task.number + 1}, line {task.line}: {does} {where(task)}", f"     takes {takes}"]
    for number in task.next:
        other = method.tasks[number]
        back = ", a cycle" if number <= task.number else ""
        out.append(f"     then TE {number + 1}, {dispatch(task, other)}{back}")
    return out
