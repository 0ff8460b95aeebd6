"""What it costs that programs last: checkpoints while calls come, and how long a pond is without those who were killed.

Checkpoints: a store of keys and values gets batches of writes; rounds without a checkpoint, and with one after the other begun
every few seconds by somebody else, alternate. The cost is by the medians of both.

Recovery: so many containers hold all slices but one for each of their peers, and are killed at once (kill -9). Nobody holds
backups: peers read slices from the root, each its share. Without answers is the time until a value of each slice has been read.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

import millpond as mp
from millpond.apps.key_values import KeyValues
from millpond.bench.programs_pond import CONTAINERS, SLICES, Scale, opened
from millpond.errors import Unavailable
from millpond.programs.slicing import slice_of

COST = 0.05
SHAPES = ((1, 1), (2, 1), (1, 2), (2, 2))
"""How many are lost, and how many take over."""
LOAD = 20_000
WAIT_S = 120.0
VALUE = "v" * 100


def checkpoints(scale: Scale, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    keys = [f"key-{number}" for number in range(scale.entries[-1])]
    rates: dict[bool, list[float]] = {False: [], True: []}
    took: list[float] = []
    with opened() as pond:
        _, put, epochs = _loaded(pond, keys)
        for number in range(scale.checkpoint_rounds):
            for with_them in (False, True):
                progress(f"checkpoint: round {number + 1} {'with' if with_them else 'without'}")
                pond.checkpoint()
                rates[with_them].append(_round(pond, put, epochs, keys, scale, took if with_them else None))
    without, held = (float(np.median(rates[each])) for each in (False, True))
    cost = 1 - held / without
    setup = (
        f"{len(keys):,} entries, batches of {scale.kv_batch:,} writes, {scale.checkpoint_rounds} rounds of"
        f" {scale.seconds:g} s each way, a checkpoint every {scale.checkpoint_every_s:g} s"
    )
    return [
        {"system": "millpond, none", "section": "checkpoint", "calls_per_s": without, "setup": setup},
        {
            "system": "millpond, with checkpoints",
            "section": "checkpoint",
            "calls_per_s": held,
            "checkpoint_s": float(np.median(took)),
            "checkpoints": len(took),
            "cost": cost,
            "aims": {f"cost <= {COST:.0%}": cost <= COST},
        },
    ]


def _loaded(pond: mp.Pond, keys: list[str]) -> tuple[Any, Any, Any]:
    store = pond.program("kv", KeyValues)
    put, epochs = store.call("put", name="puts"), count()
    for start in range(0, len(keys), LOAD):
        part = keys[start : start + LOAD]
        put(pa.table({"key": part, "value": [VALUE] * len(part)}), next(epochs))
    pond.checkpoint()
    return store, put, epochs


def _round(
    pond: mp.Pond, put: Any, epochs: Any, keys: list[str], scale: Scale, took: list[float] | None
) -> float:
    """Calls a second."""
    ended = threading.Event()

    def keep() -> None:
        while not ended.is_set() and took is not None:
            began = time.perf_counter()
            pond.checkpoint()
            took.append(time.perf_counter() - began)
            ended.wait(max(0.0, scale.checkpoint_every_s - took[-1]))

    keeper = threading.Thread(target=keep)
    rng = np.random.default_rng(1)
    calls = 0
    began = time.perf_counter()
    keeper.start()
    try:
        while time.perf_counter() - began < scale.seconds:
            chosen = [keys[n] for n in rng.integers(len(keys), size=scale.kv_batch)]
            put(pa.table({"key": chosen, "value": [VALUE] * len(chosen)}), next(epochs))
            calls += len(chosen)
        return calls / (time.perf_counter() - began)
    finally:
        ended.set()
        keeper.join()


def recovery(scale: Scale, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    return [
        _recovered(lost, peers, entries, progress)
        for entries in scale.entries
        for lost, peers in (SHAPES if entries == scale.entries[-1] else SHAPES[:1])
    ]


def _recovered(lost: int, peers: int, entries: int, progress: Callable[[str], None]) -> dict[str, Any]:
    progress(f"recovery: {lost} to {peers}, {entries:,} entries")
    keys = [f"key-{number}" for number in range(entries)]
    asked = {slice_of(key, SLICES): key for key in keys}
    with opened(containers=lost + peers) as pond:
        owners = {number: lost + number if number < peers else number % lost for number in range(SLICES)}
        for container in range(lost + peers):
            pond.move([number for number, owner in owners.items() if owner == container], container)
        store, _, _ = _loaded(pond, keys)
        held = sum(each["bytes"] for each in pond.metrics()["slices"].values()) / 1e6
        victims = [info.pid for info in pond.containers() if info.id < lost]
        began = time.perf_counter()
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wanted = {number: key for number, key in asked.items() if number >= peers}
        while wanted:
            number, key = next(iter(wanted.items()))
            if time.perf_counter() - began > WAIT_S:
                raise RuntimeError(f"slice {number} does not answer again")
            try:
                if store.get(key) != VALUE:
                    raise RuntimeError(f"{key} is not what it was")
                del wanted[number]
            except Unavailable:
                time.sleep(0.005)
        seconds = time.perf_counter() - began
    return {
        "system": "millpond",
        "section": "recovery",
        "work": f"{lost}-to-{peers}",
        "setup": f"containers of 1 thread, which share {CONTAINERS} cores; {SLICES} slices, no backups",
        "entries": entries,
        "held_mb": held,
        "without_answers_s": seconds,
    }
