"""Checkpoints every few seconds of a large State under updates, beside none.

One container of one thread, no backups. Its bounds are such that it takes no checkpoint by itself: those that are counted are
those that were asked for. One client updates 1,000 random keys an epoch all the time, one asks 100 keys by `now` all the
time. Asynchronous: somebody else calls `pond.checkpoint()`, and epochs go on. Synchronous: the client that updates calls it
between two epochs, and waits for it, as systems do that stop for a checkpoint. Delta: what has changed is written; full:
every slice that has changed is written whole. Rounds without and with checkpoints alternate; the share is of the medians.

Those clients want more than two cores have, and wait for each other. How long a checkpoint alone makes one wait shows with clients
that are unhurried: an epoch ten times a second, and questions with 5 ms between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from millpond.bench.elastic_load import BUCKET_S, SLICES, Clients, Loaded, Notes, loaded_pond
from millpond.container.holdings.base import Bounds

NEVER = 1 << 60
EPOCH_ROWS = 1_000
QUESTION_ROWS = 100
SHARES = {"delta": Bounds().delta_share, "full": -1.0}
"""What of a slice may have changed before it is written whole."""
UNHURRIED = {"update": 0.1, "ask": 0.005}
"""Seconds between two calls of a client."""
WAYS = ("none", "asynchronous", "synchronous", "none, unhurried", "asynchronous, unhurried")


class Round(NamedTuple):
    begin: float
    end: float
    notes: dict[str, Notes]
    figures: dict[str, float]


def run(
    mb: float, every_s: float, rounds: Mapping[str, int], ways: Sequence[str], progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """So many rounds of each kind; the first of the ways is "none"."""
    results = []
    for kind, count in rounds.items():
        progress(f"checkpoints, {kind}: loading {mb:,.0f} MB")
        bounds = Bounds(log_bytes=NEVER, log_records=NEVER, delta_share=SHARES[kind])
        with loaded_pond([0] * SLICES, mb, bounds=bounds) as loaded:
            held_mb = loaded.bytes_of(0) / 1e6
            measured: dict[str, list[Round]] = {way: [] for way in ways}
            for _ in range(count):
                for way in ways:
                    progress(f"checkpoints: {kind}, {way}")
                    measured[way].append(_round(loaded, way, every_s))
            results += [
                _result(kind, way, measured, held_mb, every_s)
                for way in ways
                if kind == "delta" or not way.startswith("none")
            ]
    return results


def _round(loaded: Loaded, way: str, every_s: float) -> Round:
    # What the round before left dirty is not this one's.
    loaded.pond.checkpoint()
    before = _figures(loaded)
    pauses = UNHURRIED if way.endswith("unhurried") else dict.fromkeys(UNHURRIED, 0.0)
    with Clients(loaded) as clients:
        clients.start(
            "update",
            kind="update",
            rows=EPOCH_ROWS,
            pause_s=pauses["update"],
            checkpoint_every_s=every_s if way == "synchronous" else 0.0,
        )
        clients.start("ask", kind="ask", rows=QUESTION_ROWS, pause_s=pauses["ask"])
        clients.await_ready()
        time.sleep(min(1.0, every_s / 2))
        begin = time.monotonic()
        end = begin + 3 * every_s
        took = []
        for number in range(3):
            time.sleep(max(0.0, begin + (number + 0.5) * every_s - time.monotonic()))
            if way.startswith("asynchronous"):
                started = time.monotonic()
                loaded.pond.checkpoint()
                took.append(time.monotonic() - started)
        time.sleep(max(0.0, end - time.monotonic()))
        end = time.monotonic()
        after = _figures(loaded)
    figures = {name: after[name] - before[name] for name in ("checkpoints", "checkpoint_bytes", "merges")}
    # The container tells the longest since it began, loading included: it is this round's only if it has grown.
    if after["snapshot_pause_ms_max"] > before["snapshot_pause_ms_max"]:
        figures["snapshot_pause_ms_max"] = after["snapshot_pause_ms_max"]
    if took:
        figures["checkpoint_s"] = float(np.median(took))
    return Round(begin, end, clients.notes, figures)


def _figures(loaded: Loaded) -> dict[str, float]:
    figures: dict[str, float] = loaded.pond.metrics()["containers"][0]
    return figures


def _result(
    kind: str, way: str, measured: dict[str, list[Round]], held_mb: float, every_s: float
) -> dict[str, Any]:
    rounds = measured[way]
    rates = [each.notes["update"].rate(each.begin, each.end) * EPOCH_ROWS for each in rounds]
    ask_rates = [each.notes["ask"].rate(each.begin, each.end) for each in rounds]
    none = measured["none, unhurried" if way.endswith("unhurried") else "none"]
    of_none = [each.notes["update"].rate(each.begin, each.end) * EPOCH_ROWS for each in none]
    stalls = [each.notes["update"].gap_ms(each.begin, each.end) for each in rounds]
    ask_stalls = [each.notes["ask"].gap_ms(each.begin, each.end) for each in rounds]
    taken = sum(each.figures["checkpoints"] for each in rounds)
    share = float(np.median(rates) / np.median(of_none))
    result: dict[str, Any] = {
        "system": f"millpond, {way.replace('none', 'no checkpoints')}"
        if way.startswith("none")
        else f"millpond, {kind}, {way}",
        "section": "checkpoints",
        "setup": f"1 container of 1 thread, {SLICES} slices, a checkpoint every {every_s:g} s",
        "held_mb": held_mb,
        "updates_per_s": float(np.median(rates)),
        "asks_per_s": float(np.median(ask_rates)),
        "vs_none": share,
        "update_gap_ms": max(stalls),
        "gap_ms": max(ask_stalls),
        "ask_ms_max": _longest_ms(rounds, "ask"),
        "update_ms_max": _longest_ms(rounds, "update"),
        "checkpoints": taken,
        "mb_each": sum(each.figures["checkpoint_bytes"] for each in rounds) / 1e6 / max(taken, 1),
        "checkpoint_s": float(np.median([each.figures.get("checkpoint_s", np.nan) for each in rounds])),
        "timeline": {
            "bucket_s": BUCKET_S,
            "series": {
                "epochs/s": rounds[-1].notes["update"].timeline(rounds[-1].begin, rounds[-1].end),
                "answers/s": rounds[-1].notes["ask"].timeline(rounds[-1].begin, rounds[-1].end),
            },
            "spans": [],
        },
    }
    pauses = [each.figures.get("snapshot_pause_ms_max") for each in rounds]
    if any(pauses):
        result["snapshot_pause_ms_max"] = max(pause for pause in pauses if pause is not None)
    if np.isnan(result["checkpoint_s"]):
        del result["checkpoint_s"]
    if (kind, way) == ("delta", "asynchronous"):
        result |= {
            f"{figure}_before": max(each.notes[name].gap_ms(each.begin, each.end) for each in none)
            for figure, name in (("update_gap_ms", "update"), ("gap_ms", "ask"))
        }
        result |= {"aim": "vs_none >= 0.95", "reached": share >= 0.95}
    elif (kind, way) == ("delta", "asynchronous, unhurried"):
        # What a client sees, not what the container says of its own pause.
        result |= {
            f"{figure}_before": _longest_ms(none, name)
            for figure, name in (("ask_ms_max", "ask"), ("update_ms_max", "update"))
        }
        result |= {"aim": "ask_ms_max < 20", "reached": result["ask_ms_max"] < 20}
    return result


def _longest_ms(rounds: Sequence[Round], name: str) -> float:
    """How long a client has waited at most for an answer."""
    return max(float(each.notes[name].latencies_ms(each.begin, each.end).max()) for each in rounds)
