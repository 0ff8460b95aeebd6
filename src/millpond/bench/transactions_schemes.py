"""The schemes that TStream is measured against (its section 3), over our tables and our compiled transactions.

Every executor is a thread that takes each n-th event in time order and does it from beginning to end. What differs is how
the executors keep the order:

- lal: a transaction waits for its turn (one counter for all), takes the locks of its records, and passes the turn on.
- lwm: in its turn a transaction only notes how many writers each of its records has had before it; then it waits until
  they are done. A writer makes a new version, so that nobody waits for readers.
- pat: records are in partitions; a transaction waits for its turn in each of its partitions, and needs no locks.
- no-lock: nothing is kept in order. The outcome is wrong; it shows what the order costs.

All of them get what they need to know of each transaction (its records; for pat, its number in each partition) worked
out beforehand, in compiled code.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from millpond.kernels._jit import NO_C_ENTRY, NO_ENTRY
from millpond.stores.threads import in_threads
from millpond.txn.compiler import arguments
from millpond.txn.compiler.arithmetic import NAMES
from millpond.txn.compiler.codegen import BodyKernel
from millpond.txn.run.execution import EpochRun
from millpond.txn.run.plans import CompiledEpoch

SCHEMES = ("lal", "lwm", "pat", "no-lock")
ORDERED = SCHEMES[:3]  # those whose outcome is that of serial execution
PARTITIONS = 16  # of records, by their keys, as the generators of the applications see them
LINE = 8  # longs in a cache line
LOG_ROOM = 1 << 12
YIELD_AFTER = 1 << 12  # looks at a counter, before the core is offered to others

Longs = NDArray[np.int64]


# Atomic access to one element of an int64 array

_emitting: Any = cgutils


def _inlined(function: Any) -> Any:
    return intrinsic(function)


def _place(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return _emitting.get_item_pointer(context, builder, signature.args[0], array, [args[1]])


@_inlined
def _seen(_typing: Any, array: Any, at: Any) -> Any:
    """The value, and all that was written before it was stored."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_place(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.int64), emit


@_inlined
def _show(_typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Stores the value, for `_seen`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _place(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), emit


@_inlined
def _add(_typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Adds to the value, whoever else does so."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", _place(context, builder, signature, args), args[2], "acq_rel")
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), emit


@_inlined
def _pause(_typing: Any) -> Any:
    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(_emitting.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), emit


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_part = numba.njit(nogil=True, forceinline=True, boundscheck=False, **NO_ENTRY)
_kernel = numba.njit(nogil=True, boundscheck=False, **NO_C_ENTRY)


@_part
def _await(array, at, value):  # type: ignore[no-untyped-def]
    """Until the value is reached, by counting up."""
    looks = 0
    while _seen(array, at) < value:
        looks += 1
        if looks % YIELD_AFTER == 0:
            _sched_yield()
        else:
            _pause()


@_part
def _await_below(array, at, value):  # type: ignore[no-untyped-def]
    """Until the value is no longer above."""
    looks = 0
    while _seen(array, at) > value:
        looks += 1
        if looks % YIELD_AFTER == 0:
            _sched_yield()
        else:
            _pause()


# Lock ahead. A lock is 0, or how many readers hold it, or a great many for a writer.

_WRITER = 1 << 40


@_part
def _lal_enter(e, turn, locks, starts, rows, writes):  # type: ignore[no-untyped-def]
    _await(turn, 0, e)
    # Only who has the turn takes locks: for a writer a plain store will do.
    for j in range(starts[e], starts[e + 1]):
        at = rows[j] * LINE
        if writes[j] != 0:
            _await_below(locks, at, 0)
            _show(locks, at, _WRITER)
        else:
            _await_below(locks, at, _WRITER - 1)
            _add(locks, at, 1)
    _show(turn, 0, e + 1)


@_part
def _lal_leave(e, locks, starts, rows, writes):  # type: ignore[no-untyped-def]
    for j in range(starts[e], starts[e + 1]):
        at = rows[j] * LINE
        if writes[j] != 0:
            _show(locks, at, 0)
        else:
            _add(locks, at, -1)


# Low water mark


@_part
def _lwm_note(e, turn, noted, mine, starts, rows, writes):  # type: ignore[no-untyped-def]
    _await(turn, 0, e)
    start = starts[e]
    for j in range(start, starts[e + 1]):
        at = rows[j] * LINE
        mine[j - start] = noted[at]
        if writes[j] != 0:
            noted[at] += 1
    _show(turn, 0, e + 1)


@_part
def _lwm_enter(e, j, done, mine, here, versions, starts, rows, writes, cells, base):  # type: ignore[no-untyped-def]
    """One record: its version for this transaction, a new one if it may write."""
    row = rows[j]
    before = mine[j - starts[e]]
    _await(done, row * LINE, before)
    first = (row - base) * versions
    old = first + (before & (versions - 1))
    if writes[j] != 0:
        new = first + ((before + 1) & (versions - 1))
        for cell in range(cells.shape[1]):
            cells[new, cell] = cells[old, cell]
        here[row] = new
    else:
        here[row] = old


@_part
def _lwm_leave(e, done, mine, starts, rows, writes):  # type: ignore[no-untyped-def]
    start = starts[e]
    for j in range(start, starts[e + 1]):
        if writes[j] != 0:
            _show(done, rows[j] * LINE, mine[j - start] + 1)


# Partitions


@_part
def _pat_enter(e, counters, starts, partitions, numbers):  # type: ignore[no-untyped-def]
    for j in range(starts[e], starts[e + 1]):
        _await(counters, partitions[j] * LINE, numbers[j])


@_part
def _pat_leave(e, counters, starts, partitions, numbers):  # type: ignore[no-untyped-def]
    for j in range(starts[e], starts[e + 1]):
        _show(counters, partitions[j] * LINE, numbers[j] + 1)


# What is worked out beforehand


@_kernel
def _gather_sets(event, row, write, starts, rows, writes, mark):  # type: ignore[no-untyped-def]
    """The records of each event, each once, with whether the event may write to it. `starts` ends as offsets."""
    for j in range(event.shape[0]):
        starts[event[j] + 1] += 1
    for e in range(starts.shape[0] - 1):
        starts[e + 1] += starts[e]
    for j in range(event.shape[0] - 1, -1, -1):
        e = event[j] + 1
        # Offsets go down to the starts of their events, which lie one place further on.
        starts[e] -= 1
        rows[starts[e]] = row[j]
        writes[starts[e]] = write[j]
    kept = 0
    count = starts.shape[0] - 1
    for e in range(count):
        begin = starts[e + 1]
        end = starts[e + 2] if e + 2 <= count else event.shape[0]
        starts[e] = kept
        for j in range(begin, end):
            r = rows[j]
            if mark[r] > starts[e]:
                writes[mark[r] - 1] |= writes[j]
            else:
                rows[kept] = r
                writes[kept] = writes[j]
                kept += 1
                mark[r] = kept
    starts[count] = kept


@_kernel
def _gather_partitions(starts, rows, partition_of, begins, partitions, numbers, following):  # type: ignore[no-untyped-def]
    """The partitions of each event, each once, and its number among the events of each."""
    last = np.full(following.shape[0], -1, np.int64)
    kept = 0
    for e in range(starts.shape[0] - 1):
        begins[e] = kept
        for j in range(starts[e], starts[e + 1]):
            p = partition_of[rows[j]]
            if last[p] != e:
                last[p] = e
                partitions[kept] = p
                numbers[kept] = following[p]
                following[p] += 1
                kept += 1
    begins[starts.shape[0] - 1] = kept


@dataclass
class Sets:
    """The records of event e are `rows[starts[e]:starts[e + 1]]`, numbered over all tables."""

    starts: Longs
    rows: Longs
    writes: NDArray[np.uint8]
    bases: Longs  # of each table: the number of its first record


def _sets(work: CompiledEpoch) -> Sets:
    touches = work.touches()
    count = len(touches.event)
    starts = np.zeros(work.events + 1, np.int64)
    rows, writes = np.empty(count, np.int64), np.empty(count, np.uint8)
    mark = np.zeros(touches.rows, np.int64)
    _gather_sets(touches.event, touches.row, touches.write, starts, rows, writes, mark)
    bases = np.concatenate([[0], np.cumsum([len(store.index) for store in work.stores])])
    return Sets(starts, rows, writes, bases)


# Transactions between `enter` and `leave`


@lru_cache(maxsize=64)
def _between(source: str, enter: tuple[str, ...], leave: tuple[str, ...], more: tuple[str, ...]) -> Any:
    """The body kernel with statements around each event, and more parameters."""
    head, loop, rest = source.partition("        st = 0\n")
    rest, _, end = rest.rpartition("\n")
    head = head.replace("def body(", f"def body({', '.join(more)}, ", 1)
    before, after = ("".join(f"        {line}\n" for line in lines) for lines in (enter, leave))
    text = head + loop + before + rest + "\n" + after + end
    given: dict[str, Any] = {**NAMES, **_PARTS}
    exec(compile(text, "<scheme>", "exec"), given)  # noqa: S102 - our own text
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False, **NO_C_ENTRY)(given["body"])


_PARTS = {
    "lal_enter": _lal_enter,
    "lal_leave": _lal_leave,
    "lwm_note": _lwm_note,
    "lwm_enter": _lwm_enter,
    "lwm_leave": _lwm_leave,
    "pat_enter": _pat_enter,
    "pat_leave": _pat_leave,
}


def prepare(scheme: str, run: EpochRun, work: CompiledEpoch, executors: int) -> Callable[[], None]:
    """All that a scheme needs to know beforehand; what it gives does the events, once."""
    makers = {"lal": _lal, "lwm": _lwm, "pat": _pat, "no-lock": _no_lock}
    return makers[scheme](run, work, executors)


def _start(
    work: CompiledEpoch,
    body: BodyKernel,
    kernel: Any,
    executors: int,
    more: Callable[[int], tuple[Any, ...]],
    given: Mapping[str, Any],
) -> None:
    def executor(number: int) -> None:
        todo = np.arange(number, work.events, executors)
        own = {**given, "todo": todo, "room": LOG_ROOM, "parts": 1, "part": 0}
        done = kernel(*more(number), *(own[name] for name in body.parameters))
        assert done == len(todo), "a transaction with more writes than a benchmark has"

    in_threads([partial(executor, number) for number in range(executors)])


def _lal(_run: EpochRun, work: CompiledEpoch, executors: int) -> Callable[[], None]:
    sets = _sets(work)
    turn, locks = np.zeros(LINE, np.int64), np.zeros(LINE * int(sets.bases[-1]), np.int64)
    kernel = _between(
        work.body.source,
        ("lal_enter(e, turn, locks, starts, rows, writes)",),
        ("lal_leave(e, locks, starts, rows, writes)",),
        ("turn", "locks", "starts", "rows", "writes"),
    )
    more = (turn, locks, sets.starts, sets.rows, sets.writes)
    return lambda: _start(work, work.body, kernel, executors, lambda _: more, work.args)


def _lwm(run: EpochRun, work: CompiledEpoch, executors: int) -> Callable[[], None]:
    sets = _sets(work)
    total = int(sets.bases[-1])
    # An executor cannot be further ahead of another than one round, so that many versions are enough.
    versions = 1 << executors.bit_length()
    turn = np.zeros(LINE, np.int64)
    noted, done = np.zeros(LINE * total, np.int64), np.zeros(LINE * total, np.int64)
    longest = int(np.diff(sets.starts).max(initial=1))
    tables = range(len(work.stores))
    cells = []
    for store in work.stores:
        wide = np.zeros((len(store.index) * versions, store.cells.shape[1]), np.int64)
        wide[::versions] = store.cells[: len(store.index)]
        cells.append(wide)
    given = {**work.args}
    for table, wide in zip(tables, cells, strict=True):
        given |= {arguments.cells(table): wide, arguments.doubles(table): wide.view(np.float64)}
    enter = ["lwm_note(e, turn, noted, mine, starts, rows, writes)"]
    enter += ["for j in range(starts[e], starts[e + 1]):"]
    for table in tables:
        test = f"rows[j] < {table_end(table)}" if table + 1 < len(tables) else "True"
        enter += [f"    {'if' if table == 0 else 'elif'} {test}:"]
        enter += [
            f"        lwm_enter(e, j, done, mine, here, versions, starts, rows, writes, c_{table}, bases[{table}])"
        ]
    kernel = _between(
        _redirected(run, work.body.source),
        tuple(enter),
        ("lwm_leave(e, done, mine, starts, rows, writes)",),
        ("turn", "noted", "done", "mine", "here", "versions", "bases", "starts", "rows", "writes"),
    )

    def more(_executor: int) -> tuple[Any, ...]:
        mine, here = np.zeros(longest, np.int64), np.zeros(total, np.int64)
        return (turn, noted, done, mine, here, versions, sets.bases, sets.starts, sets.rows, sets.writes)

    def execute() -> None:
        _start(work, work.body, kernel, executors, more, given)
        for table, store in enumerate(work.stores):
            rows = np.arange(len(store.index))
            newest = done[(sets.bases[table] + rows) * LINE] & (versions - 1)
            store.cells[: len(rows)] = cells[table][rows * versions + newest]

    return execute


def table_end(table: int) -> str:
    return f"bases[{table + 1}]"


def _redirected(run: EpochRun, source: str) -> str:
    """The body, where each record is read and written at the version that is its transaction's."""
    functions = list(run.prepared.functions.values())
    tables = list(run.transactions.tables)

    def version(found: re.Match[str]) -> str:
        indent, slot, kind = found[1], int(found[2]), int(found[3])
        table = tables.index(functions[kind].found.slots[slot].table)
        return f"{found[0]}\n{indent}r{slot} = here[bases[{table}] + r{slot}] if r{slot} >= 0 else r{slot}"

    return re.sub(r"^( *)r(\d+) = flat_(\d+)\[.*\]$", version, source, flags=re.MULTILINE)


def _pat(_run: EpochRun, work: CompiledEpoch, executors: int) -> Callable[[], None]:
    sets = _sets(work)
    keys = [store.index.keys[:, 0] for store in work.stores]
    partition_of = np.concatenate(keys) % PARTITIONS
    begins = np.empty(work.events + 1, np.int64)
    partitions, numbers = np.empty(len(sets.rows), np.int64), np.empty(len(sets.rows), np.int64)
    following = np.zeros(PARTITIONS, np.int64)
    _gather_partitions(sets.starts, sets.rows, partition_of, begins, partitions, numbers, following)
    counters = np.zeros(LINE * PARTITIONS, np.int64)
    kernel = _between(
        work.body.source,
        ("pat_enter(e, counters, starts, partitions, numbers)",),
        ("pat_leave(e, counters, starts, partitions, numbers)",),
        ("counters", "starts", "partitions", "numbers"),
    )
    more = (counters, begins, partitions, numbers)
    return lambda: _start(work, work.body, kernel, executors, lambda _: more, work.args)


def _no_lock(_run: EpochRun, work: CompiledEpoch, executors: int) -> Callable[[], None]:
    kernel = _between(work.body.source, (), (), ("unused",))
    return lambda: _start(work, work.body, kernel, executors, lambda _: (0,), work.args)
