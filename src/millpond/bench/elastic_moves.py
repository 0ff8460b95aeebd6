"""Slices that move under load, and threads that change: what clients see of it.

Two containers of one thread. Container 0 serves 56 of 64 slices, and 48 of these move to container 1: by `pond.move` from
a backup (`backups=1`), by `pond.move` from a copy that has to be made first (`backups=0`), and stopped and copied through the
root by the coordinator's own `place`. Three clients, each a process: one asks 100 keys of slices that move, by `now`, all the
time; one asks keys of those that stay, every 5 ms; one updates 1,000 keys of all slices, epoch by epoch. Baseline are the
seconds before. A gap is the time between two answers to one client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from millpond.bench.elastic_load import BUCKET_S, SLICES, Clients, Loaded, Notes, loaded_pond

STAYS_AT_SOURCE = 8
AT_TARGET = 8
AFTER_S_MAX = 1.0
"""So long after a move, what clients see still counts as its doing; no longer than a third of the seconds before the next."""
QUESTION_ROWS = 100
EPOCH_ROWS = 1_000


class Span(NamedTuple):
    name: str
    begin: float
    end: float
    pause_ms: float = 0.0


def run(
    mb: float, seconds: float, backups_of_ponds: Sequence[int], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """From the backup with 1, from a copy and stopped with 0."""
    moving = list(range(SLICES - AT_TARGET - STAYS_AT_SOURCE))
    # So that what moves has that size.
    held_mb = mb * (SLICES - AT_TARGET) / len(moving)
    results: list[dict[str, Any]] = []
    for backups in backups_of_ponds:
        progress(f"moves, backups={backups}: loading {held_mb:,.0f} MB")
        with loaded_pond([0] * (SLICES - AT_TARGET) + [1] * AT_TARGET, held_mb, backups) as loaded:
            moved_mb = _megabytes(loaded, moving)
            spans: list[Span] = []
            with Clients(loaded) as clients:
                clients.start("moving", kind="ask", slices=moving, rows=QUESTION_ROWS)
                staying = [number for number in range(SLICES) if number not in moving]
                clients.start("staying", kind="ask", slices=staying, rows=QUESTION_ROWS, pause_s=0.005)
                clients.start("update", kind="update", rows=EPOCH_ROWS)
                clients.await_ready()
                time.sleep(seconds / 3)
                zero = time.monotonic()
                time.sleep(seconds)
                if backups:
                    progress("moves: from the backup")
                    spans.append(_moved(loaded, "from the backup", moving, 1))
                    time.sleep(seconds)
                    progress("moves: threads")
                    results_of_threads = _threads(loaded, spans)
                else:
                    progress("moves: from a copy")
                    spans.append(_moved(loaded, "from a copy", moving, 1))
                    time.sleep(seconds)
                    progress("moves: stop and copy")
                    spans.append(_placed(loaded, moving))
                time.sleep(seconds / 2)
                over = time.monotonic()
            for span in spans:
                if span.name == "threads":
                    results.append(_of_threads(clients.notes, span, results_of_threads))
                else:
                    results.append(_of_move(clients.notes, span, seconds, moved_mb, backups))
            results[-1 if not backups else -2]["timeline"] = _timeline(clients.notes, spans, zero, over)
    return results


def _megabytes(loaded: Loaded, slices: list[int]) -> float:
    figures = loaded.pond.metrics()["slices"]
    return float(sum(figures[number]["bytes"] for number in slices)) / 1e6


def _moved(loaded: Loaded, name: str, slices: list[int], to: int) -> Span:
    begin = time.monotonic()
    loaded.pond.move(slices, to=to, progress=False)
    return Span(name, begin, time.monotonic(), loaded.coordinator._migrations.pause_s_last * 1e3)  # noqa: SLF001


def _placed(loaded: Loaded, slices: list[int]) -> Span:
    owners = [0 if number in slices else owner for number, owner in loaded.pond.placement().items()]
    begin = time.monotonic()
    loaded.coordinator.place(owners)
    end = time.monotonic()
    return Span("stop and copy", begin, end, (end - begin) * 1e3)


def _threads(loaded: Loaded, spans: list[Span]) -> dict[str, Any]:
    """Up and down again, some times; whether anything moved."""
    before, moves = loaded.pond.placement(), len(loaded.pond.moves())
    took = []
    for threads in (2, 1) * 5:
        begin = time.monotonic()
        loaded.pond.scale(threads=threads)
        took.append(time.monotonic() - begin)
        spans.append(Span("threads", begin, time.monotonic()))
        time.sleep(0.2)
    now = {figures["threads"] for figures in loaded.pond.metrics()["containers"].values()}
    assert now == {1}, f"containers say that they have {now} threads"
    slices_moved = sum(owner != before[number] for number, owner in loaded.pond.placement().items())
    slices_moved += len(loaded.pond.moves()) - moves
    spans[-len(took) :] = [Span("threads", spans[-len(took)].begin, spans[-1].end)]
    return {
        "threads_ms_median": float(np.median(took)) * 1e3,
        "threads_ms_max": max(took) * 1e3,
        "slices_moved": slices_moved,
    }


def _of_threads(notes: dict[str, Notes], span: Span, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "system": "millpond, threads 1 to 2 and back",
        "section": "vertical",
        "setup": "backups=1, the state of the moves, under their load; five times up and five times down",
        **figures,
        "gap_ms": notes["moving"].gap_ms(span.begin, span.end),
        "aim": "threads_ms_max < 50, no slice moved",
        "reached": figures["threads_ms_max"] < 50 and figures["slices_moved"] == 0,
    }


def _of_move(
    notes: dict[str, Notes], span: Span, seconds: float, moved_mb: float, backups: int
) -> dict[str, Any]:
    # The baseline lies before it; what another move left to be done is over by then.
    calm = (span.begin - seconds * 0.75, span.begin)
    wide = (span.begin, span.end + min(AFTER_S_MAX, seconds / 3))
    asks, stays, updates = notes["moving"], notes["staying"], notes["update"]
    result: dict[str, Any] = {
        "system": f"millpond, {span.name}",
        "section": "move",
        "setup": f"2 containers of 1 thread, backups={backups}, {SLICES - AT_TARGET - STAYS_AT_SOURCE} of {SLICES} slices",
        "moved_mb": moved_mb,
        "move_s": span.end - span.begin,
        "pause_ms": span.pause_ms,
        "gap_ms": asks.gap_ms(*wide),
        "gap_ms_before": asks.gap_ms_within(*calm),
        "update_gap_ms": updates.gap_ms(*wide),
        "update_gap_ms_before": updates.gap_ms_within(*calm),
        "asks_per_s_before": asks.rate(*calm),
        "asks_lost_share": 1 - asks.rate(*wide) / asks.rate(*calm),
        "updates_per_s_before": updates.rate(*calm) * EPOCH_ROWS,
        "updates_lost_share": 1 - updates.rate(*wide) / updates.rate(*calm),
        "failures": sum(each.failures for each in notes.values()),
    }
    for when, (begin, end) in (("before", calm), ("moving", wide)):
        p50, p99 = np.percentile(stays.latencies_ms(begin, end), (50, 99))
        result |= {f"staying_p50_ms_{when}": float(p50), f"staying_p99_ms_{when}": float(p99)}
    if span.name == "from the backup":
        result |= {"aim": "gap_ms < 100", "reached": result["gap_ms"] < 100}
    return result


def _timeline(notes: dict[str, Notes], spans: list[Span], zero: float, over: float) -> dict[str, Any]:
    return {
        "bucket_s": BUCKET_S,
        "series": {
            "answers/s, slices that move": notes["moving"].timeline(zero, over),
            "answers/s, slices that stay": notes["staying"].timeline(zero, over),
            "epochs/s": notes["update"].timeline(zero, over),
        },
        "spans": [[span.name, span.begin - zero, span.end - zero] for span in spans],
    }
