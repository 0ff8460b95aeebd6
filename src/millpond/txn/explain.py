"""What a transaction does, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from millpond.kernels._jit import JIT_ENABLED
from millpond.txn.compiler.facts import EVENT_FRAME, WHOLE, Analysis, Use
from millpond.txn.functions import TransactionFunction

if TYPE_CHECKING:
    from millpond.txn.run.transaction_set import TransactionSet


def explain_function(function: TransactionFunction, found: Analysis, runs: str = "") -> str:
    """The facts of one function. `runs` says whether it is compiled, where that is known."""
    lines = [f"transaction {found.name}({', '.join(found.parameters)})"]
    if function.file:
        lines[0] += f"   {function.file}:{found.tree.lineno}"
    facts = {
        "tables": ", ".join(found.tables) or "none",
        "fields": ", ".join(found.fields) or "none",
        "reads": _uses(found, found.reads),
        "writes": _uses(found, found.writes),
        "depends": _dependencies(found),
        "aborts": "\n".join(
            dict.fromkeys(
                f'"{abort.reason}" (line {abort.line})'
                for abort in sorted(found.aborts, key=lambda a: a.line)
            )
        )
        or "only for errors and missing keys",
        "results": ", ".join(function.result_names) or "none",
        "runs": runs or "compiled, unless the types of the events forbid it",
        "plan": _plan(found),
    }
    for name, text in facts.items():
        first, *rest = text.splitlines()
        lines.append(f"  {name:<9}{first}")
        lines += [" " * 11 + line for line in rest]
    return "\n".join(lines)


def explain_set(transactions: TransactionSet) -> str:
    slow: dict[str, str] = {}
    fast: set[str] = set()
    for prepared in transactions.prepared:
        slow |= prepared.slow
        fast |= set(prepared.functions)
    parts = []
    for kind, function in transactions.kinds.items():
        text = explain_function(function, transactions.found[kind], _runs(kind, slow, fast))
        parts.append(f"kind {kind!r}: {text}")
    parts.append(f"plan of the epoch: {_epoch_plan(transactions.found)}")
    return "\n\n".join(parts)


def _runs(kind: str, slow: Mapping[str, str], fast: set[str]) -> str:
    if kind in slow:
        return f"interpreted: {slow[kind]}"
    if kind in fast:
        return "compiled" if JIT_ENABLED else "as generated code: numba's compiler is switched off"
    return ""


def _uses(found: Analysis, uses: Iterable[Use]) -> str:
    """`table[key].column, column (lines)`, a row to a line."""
    columns: dict[int, dict[str, None]] = {}
    lines: dict[int, set[int]] = {}
    for use in sorted(uses, key=lambda use: (use.slot, use.line)):
        columns.setdefault(use.slot, {})[use.column] = None
        lines.setdefault(use.slot, set()).add(use.line)
    out = []
    for slot, names in columns.items():
        where = ", ".join(str(line) for line in sorted(lines[slot]))
        each = " in each round of a loop" if found.slots[slot].frame != EVENT_FRAME else ""
        columns_of = [name for name in names if name != WHOLE]
        text = found.slot_text(slot) + (f".{', '.join(columns_of)}" if columns_of else "")
        out.append(f"{text}{'' if columns_of else ' as a whole'}{each} (line {where})")
    return "\n".join(dict.fromkeys(out)) or "nothing"


def _dependencies(found: Analysis) -> str:
    pairs: dict[tuple[str, str], set[int]] = {}
    for use in found.writes:
        for other in use.depends - {use.slot}:
            pair = (found.slot_text(use.slot), found.slot_text(other))
            pairs.setdefault(pair, set()).add(use.line)
    out = [
        f"{written} on {read} (line {', '.join(map(str, sorted(lines)))})"
        for (written, read), lines in sorted(pairs.items())
    ]
    out += [
        f'abort "{abort.reason}" on {found.slot_texts(abort.depends)} (line {abort.line})'
        for abort in sorted(found.aborts, key=lambda abort: abort.line)
        if abort.depends
    ]
    return "\n".join(dict.fromkeys(out)) or "no key on another"


def _plan(found: Analysis) -> str:
    if found.is_late:
        reasons = sorted(found.late, key=lambda late: (late.line, late.why))
        lines = [f"line {late.line}: {late.why}" for late in reasons]
        cost = (
            "it finds its rows one by one as it runs, so that nothing runs beside it: an epoch with such events "
            "takes one thread"
        )
        return "\n".join(["serial only: " + cost, *dict.fromkeys(lines)])
    if found.single:
        return "chains: it touches one key"
    why = found.coupling()
    if not why:
        return "chains: its operations on different keys are independent"
    return f"serial, groups or rounds: {why}"


def _epoch_plan(found: Mapping[str, Analysis]) -> str:
    late = [kind for kind, facts in found.items() if facts.is_late]
    if late:
        rest = "; of an epoch without them, the cheapest" if len(late) < len(found) else ""
        return f"serial: {', '.join(late)} {'finds' if len(late) == 1 else 'find'} rows late{rest}"
    coupled = [kind for kind, facts in found.items() if facts.coupling()]
    if coupled:
        return f"serial, groups or rounds, whichever is cheapest: {', '.join(coupled)} couples keys"
    return "serial, chains, groups or rounds, whichever is cheapest"
