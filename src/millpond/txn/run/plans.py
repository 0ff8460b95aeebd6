"""How an epoch runs: the cheapest of the plans that give what serial execution gives.

- serial: one compiled pass in time order.
- chains: the operations of each key in time order, keys shared out among threads. Where transactions touch one key
  each, they are shared out whole; where their operations on several keys do not depend on each other, each thread
  does those on its own keys. A fault that couples them after all (an overflow, say) puts the tables back, and the
  epoch runs serially.
- groups: transactions that are connected by keys, some of them written, run on one thread.
- rounds: each transaction runs in a round after all earlier ones that it conflicts with; a wide round runs on all
  threads, narrow ones run together in one pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from millpond.errors import BadOption
from millpond.stores.tables import TableStore
from millpond.stores.threads import in_parts, in_threads
from millpond.txn.compiler.bodycode import PART_SHIFT
from millpond.txn.compiler.codegen import BodyKernel, run_body
from millpond.txn.compiler.values import FIRST_MISSING
from millpond.txn.run import grouping
from millpond.txn.run.watch import NOT_BEGUN, Watch

PlanName = Literal["serial", "chains", "groups", "rounds"]
PLANS: tuple[str, ...] = get_args(PlanName)
Longs = NDArray[np.int64]

# Nanoseconds, measured once; they need not be right, only in proportion.
_EVENT_NS = 2.0
_TOUCH_NS = 2.5
_MISS_NS = 25.0  # more, per touch of a table that no cache holds
_CACHE_BYTES = 4 << 20
_SPLIT_NS = 12.0  # to share out one event
_SCAN_NS = 7.0  # to tell whose key a touch is of, and to guess that wrong half the time
_JOIN_NS = 20.0  # to join the keys of one touch
_ROUND_NS = 40.0  # to find the round by one touch
_BARRIER_NS = 100_000.0
_WIDE = 4096  # events in a round that are worth waking threads for


@dataclass
class Touches:
    """Every touch of a row by an event, in no certain order of events. Rows are numbered over all tables."""

    event: Longs
    row: Longs
    write: NDArray[np.uint8]
    rows: int


@dataclass
class CompiledEpoch:
    """A compiled epoch, keys resolved. `args` are those of the body kernel that do not depend on the thread."""

    events: int
    body: BodyKernel
    apart: BodyKernel | None
    single: tuple[bool, ...]  # of each kind: whether it touches one row only
    weight: float  # steps per event, beyond its touches
    args: Mapping[str, Any]
    stores: Sequence[TableStore]
    put_back: Callable[[], None]  # makes the tables as they were before the epoch
    touches: Callable[[], Touches]
    touch_count: int
    kind_of: Longs
    threads: int
    is_late: bool  # whether some of its events find their rows as they run
    more: Callable[[], Mapping[str, Any]]  # makes room for such rows
    watch: Watch | None = None


@dataclass
class Figures:
    """What was counted and chosen."""

    plan: str = "serial"
    events: int = 0
    touches: int = 0
    threads: int = 1
    components: int | None = None
    largest: int | None = None
    rounds: int | None = None
    redone: bool = False
    estimates_us: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def possible(work: CompiledEpoch) -> list[str]:
    """The plans that are correct for these functions."""
    if work.is_late:
        return ["serial"]
    return [plan for plan in PLANS if plan != "chains" or all(work.single) or work.apart is not None]


def run(work: CompiledEpoch, plan: str | None) -> Figures:
    """Runs all events, by the plan given or by the cheapest."""
    figures = Figures(events=work.events, touches=work.touch_count, threads=work.threads)
    if plan is not None and plan not in PLANS:
        raise BadOption(f"plan={plan!r} is none of {', '.join(PLANS)}", option="plan")
    if plan is not None and plan not in possible(work):
        plan = "serial"  # a plan that would not be correct is not for forcing
    shares: list[Longs] | None = None
    if plan is None:
        plan, shares = _choose(work, figures)
    figures.plan = plan
    match plan:
        case "chains" if all(work.single):
            _each(work, _by_row(work))
        case "chains":
            _run_apart(work, figures)
        case "groups":
            _each(work, _groups(work, figures) if shares is None else shares)
        case "rounds":
            _run_rounds(work, figures)
        case _:
            _call(work, work.body, np.arange(work.events))
    return figures


def _choose(work: CompiledEpoch, figures: Figures) -> tuple[str, list[Longs] | None]:
    """The cheapest plan by estimate. Components are counted only where they could pay."""
    memory = sum(store.cells.nbytes for store in work.stores)
    touch = _TOUCH_NS + (_MISS_NS if memory > _CACHE_BYTES else 0.0)
    serial = work.events * (_EVENT_NS + work.weight) + work.touch_count * touch
    estimates = {"serial": serial}
    n = work.threads
    if n > 1 and work.events > 0 and not work.is_late:
        shared = serial / n + _BARRIER_NS
        if all(work.single):
            estimates["chains"] = shared + _SPLIT_NS * work.events
        elif work.apart is not None:
            estimates["chains"] = shared + _SCAN_NS * work.touch_count
        estimates["groups"] = shared + _JOIN_NS * work.touch_count + _SPLIT_NS * work.events
        estimates["rounds"] = shared + _ROUND_NS * work.touch_count + 2 * _SPLIT_NS * work.events
    plan = min(estimates, key=lambda name: estimates[name])
    shares = None
    if plan == "groups":
        shares = _groups(work, figures)
        largest = max(len(share) for share in shares)
        estimates["groups"] += serial * (largest / work.events - 1 / n)
        estimates["rounds"] += _JOIN_NS * work.touch_count
        # What the count has cost is spent, whatever comes next.
        estimates = {name: value for name, value in estimates.items() if name != "chains"}
        plan = min(estimates, key=lambda name: estimates[name])
    figures.estimates_us = {name: round(value / 1000) for name, value in estimates.items()}
    return plan, shares if plan == "groups" else None


def _call(work: CompiledEpoch, body: BodyKernel, todo: Longs, **own: Any) -> None:
    given = {**work.args, "parts": 1, "part": 0, **own}
    with nullcontext() if work.watch is None else work.watch.passing(todo, given["status"]):
        run_body(body, given, todo, work.more)


def _each(work: CompiledEpoch, shares: Sequence[Longs]) -> None:
    """Runs each share on a thread of its own."""
    in_threads([partial(_call, work, work.body, todo) for todo in shares if len(todo)])


# Chains


def _by_row(work: CompiledEpoch) -> list[Longs]:
    touches = work.touches()
    owner = np.zeros(work.events, np.int64)
    owner[touches.event] = (touches.row >> PART_SHIFT) % work.threads
    return _by_owner(owner, work.threads)


def _by_owner(owner: Longs, threads: int) -> list[Longs]:
    """The events of each thread, in one pass, however many threads there are."""
    bounds = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=threads))])
    events = np.empty(len(owner), np.int64)
    grouping.part_owners(owner, bounds[:-1].copy(), events)
    return [events[start:stop] for start, stop in itertools.pairwise(bounds)]


def _run_apart(work: CompiledEpoch, figures: Figures) -> None:
    """Each thread passes over all events and does what concerns its own rows."""
    assert work.apart is not None
    todo = np.arange(work.events)
    parts = 1 << (
        work.threads.bit_length() - 1
    )  # a power of two: to divide would cost more than most operations
    statuses = [np.full(work.events, NOT_BEGUN, np.int32) for _ in range(parts)]

    def part(number: int) -> None:
        assert work.apart is not None
        _call(work, work.apart, todo, parts=parts, part=number, status=statuses[number])

    in_threads([partial(part, number) for number in range(parts)])
    alone = np.array(work.single)

    def merge(start: int, stop: int) -> tuple[bool, NDArray[np.int32]]:
        merged = np.stack([status[start:stop] for status in statuses])
        failed = merged.max(axis=0)
        # What all threads found without looking at a row, they found alike.
        differ = (merged != failed).any(axis=0) | _is_missing(failed)
        coupled = (failed > 0) & ~alone[work.kind_of[start:stop]] & differ
        return bool(coupled.any()), np.where(failed > 0, failed, merged.min(axis=0))

    merged = in_parts(merge, work.events, work.threads)  # more threads have more to merge
    if any(coupled for coupled, _ in merged):
        figures.redone = True
        work.put_back()
        _call(work, work.body, todo)
        return
    np.concatenate([status for _, status in merged], out=work.args["status"])


def _is_missing(status: NDArray[np.int32]) -> NDArray[np.bool_]:
    return (status >= FIRST_MISSING) & (status < FIRST_MISSING + 1000)


# Groups and rounds


def _groups(work: CompiledEpoch, figures: Figures) -> list[Longs]:
    touches = work.touches()
    written = _written(touches)
    parent = np.arange(touches.rows)
    first = np.full(work.events, -1, np.int64)
    grouping.components(touches.event, touches.row, written, parent, first)
    sizes = np.zeros(touches.rows, np.int64)
    grouping.component_sizes(first, parent, sizes)
    roots = np.flatnonzero(sizes)
    order = roots[np.argsort(-sizes[roots], kind="stable")]
    loads = np.zeros(work.threads, np.int64)
    thread_of = np.zeros(touches.rows, np.int64)
    grouping.share_out(order, sizes, loads, thread_of)
    free = np.flatnonzero(first < 0)
    owner = thread_of[first] if touches.rows else np.zeros(work.events, np.int64)
    owner[free] = np.arange(len(free)) % work.threads
    figures.components = len(roots)
    figures.largest = int(sizes.max(initial=0))
    return _by_owner(owner, work.threads)


def _written(touches: Touches) -> NDArray[np.uint8]:
    out = np.zeros(touches.rows, np.uint8)
    out[touches.row[touches.write != 0]] = 1
    return out


def _run_rounds(work: CompiledEpoch, figures: Figures) -> None:
    touches = work.touches()
    by_event = np.argsort(touches.event, kind="stable")
    starts = np.zeros(work.events + 1, np.int64)
    np.cumsum(np.bincount(touches.event, minlength=work.events), out=starts[1:])
    level = np.zeros(work.events, np.int64)
    wrote, read = np.zeros(touches.rows, np.int64), np.zeros(touches.rows, np.int64)
    grouping.levels(starts, touches.row[by_event], touches.write[by_event], wrote, read, level)
    order = np.argsort(level, kind="stable")
    bounds = np.concatenate([[0], np.cumsum(np.bincount(level))])
    figures.rounds = len(bounds) - 1
    pending = 0
    for start, stop in itertools.pairwise(bounds):
        if stop - start >= _WIDE:
            _call(work, work.body, order[pending:start])
            _each(
                work, [np.ascontiguousarray(part) for part in np.array_split(order[start:stop], work.threads)]
            )
            pending = stop
    _call(work, work.body, order[pending:])
