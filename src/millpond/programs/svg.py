"""A graph as a picture: fields and tasks, round by round from left to right, a row for each method."""

from __future__ import annotations

from html import escape

from millpond.programs.explain import dispatch, heading, where
from millpond.programs.graph import Graph, Method

WIDE, HIGH, GAP, LEFT, TOP = 190, 46, 60, 16, 40
_STYLE = (
    "text{font:12px sans-serif;fill:#1c2733}.small{font-size:10px;fill:#5b6b7b}.head{font-weight:bold}"
    ".task{fill:#eef4fa;stroke:#33658a}.writes{fill:#fdf0e1;stroke:#b5651d}.field{fill:#e8f3e8;stroke:#3a7d44}"
    ".edge{fill:none;stroke:#33658a;marker-end:url(#tip)}.access{stroke:#3a7d44;stroke-dasharray:3 3;fill:none}"
)


def drawn(graph: Graph) -> str:
    """The picture, as a text of SVG."""
    columns = max(len(method.tasks) for method in graph.methods)
    width = 2 * LEFT + max(columns * (WIDE + GAP), len(graph.fields) * (WIDE + GAP), 480)
    out: list[str] = []
    how = "serial" if graph.serial else "round-synchronous"
    out.append(_text(LEFT, 22, f"{graph.name}: {len(graph.levels)} rounds, {how}", "head"))
    places: dict[str, tuple[int, int]] = {}
    for n, field in enumerate(graph.fields):
        x, y = LEFT + n * (WIDE + GAP), TOP
        places[field.name] = (x + WIDE // 2, y + HIGH)
        spread = f"{graph.lanes} lanes" if field.kind == "partial" else f"by {field.key}"
        words = f"{field.kind} {field.element}, {spread}, round {field.level + 1}"
        out.append(_box(x, y, "field", field.name, words, HIGH // 2))
    top = TOP + HIGH + GAP
    for method in graph.methods:
        out += _method(method, places, top)
        top += HIGH + 2 * GAP
    marker = (
        '<marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    )
    tip = f'<defs>{marker}<path d="M0 0L8 4L0 8z" fill="#33658a"/></marker></defs>'
    size = f'width="{width}" height="{top}" viewBox="0 0 {width} {top}"'
    inner = "".join(out)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>{tip}{inner}</svg>'


def _method(method: Method, places: dict[str, tuple[int, int]], top: int) -> list[str]:
    out = [_text(LEFT, top - 8, heading(method), "head")]
    for task in method.tasks:
        x = LEFT + task.number * (WIDE + GAP)
        if task.field is not None:
            field_x, field_y = places[task.field]
            out.insert(0, f'<path class="access" d="M{x + WIDE // 2} {top}L{field_x} {field_y}"/>')
        out.append(
            _box(
                x,
                top,
                "writes" if task.writes else "task",
                f"TE {task.number + 1}, line {task.line}",
                where(task),
                6,
            )
        )
        out += [_edge(x, LEFT + n * (WIDE + GAP), top, dispatch(task, method.tasks[n])) for n in task.next]
    return out


def _edge(start: int, end: int, top: int, words: str) -> str:
    middle = top + HIGH // 2
    if end == start + WIDE + GAP:
        path = f"M{start + WIDE} {middle}L{end} {middle}"
        label = _text(start + WIDE + 3, middle + 34, words, "small")
    else:  # over others, or back, as in a cycle
        low = top + HIGH + 26
        path = f"M{start + WIDE // 2 + 20} {top + HIGH}V{low}H{end + WIDE // 2 - 20}V{top + HIGH}"
        label = _text(min(start, end) + WIDE // 2 + 24, low - 4, words, "small")
    return f'<path class="edge" d="{path}"/>{label}'


def _box(x: int, y: int, kind: str, name: str, words: str, round_by: int) -> str:
    shape = f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDE}" height="{HIGH}" rx="{round_by}"/>'
    return shape + _text(x + 10, y + 19, name) + _text(x + 10, y + 35, words, "small")


def _text(x: int, y: int, words: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(words)}</text>'
