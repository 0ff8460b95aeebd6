"""A key/value store: calls of `millpond.apps.key_values` beside Redis and Ray actors, half of them reads.

Streamed: batches of calls by Arrow tables, the reads of a batch an epoch of one operator and the writes one of another. Direct:
so many callers as the depth says, each with one call at a time. Redis gets as many commands in a pipeline, an actor as many
calls before the first is awaited; latency there is that of the whole pipeline. What Millpond acknowledges is on disk, and exactly
once; the others keep it in memory. Every value that is read is checked.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pyarrow as pa

from millpond.apps.key_values import KeyValues
from millpond.bench.programs_pond import CONTAINERS, Scale, opened, percentiles

DEPTHS = (1, 20)
READ_MS, WRITE_MS = 2.0, 10.0
SYNCS = 50

Key = Callable[[], str]


def run(scale: Scale, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    return [*_millpond(scale, progress), *_redis(scale, progress), *_ray(scale, progress)]


def _millpond(scale: Scale, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    keys = [f"key-{number}" for number in range(scale.kv_keys)]
    setup = f"{scale.kv_keys:,} keys; millpond: {CONTAINERS} containers of 1 thread"
    with opened() as pond:
        store = pond.program("kv", KeyValues)
        put = store.call("put", name="puts")
        get = store.call("get", into="read", name="gets")
        put(pa.table({"key": keys, "value": keys}), 0)
        get(pa.table({"key": keys[:1]}), 0)
        progress("kv: streamed")
        rng = np.random.default_rng(1)
        calls = 0
        began = time.perf_counter()
        for epoch in count(1):
            chosen = [keys[n] for n in rng.integers(len(keys), size=scale.kv_batch // 2)]
            put(pa.table({"key": chosen, "value": chosen}), epoch)
            rows = get(pa.table({"key": chosen}), epoch)
            _check(rows["read"].to_pylist(), chosen)
            calls += 2 * len(chosen)
            if time.perf_counter() - began > scale.seconds:
                break
        rate = calls / (time.perf_counter() - began)
        yield {
            "system": f"millpond, streamed, batches of {scale.kv_batch:,}",
            "section": "kv",
            "setup": setup,
            "calls_per_s": rate,
        }
        store.put(keys[0], keys[0])
        for depth in DEPTHS:
            progress(f"kv: direct, {depth} callers")
            yield {
                "system": f"millpond, direct, {depth} at once",
                "section": "kv",
                **_aimed(_callers(keys, store.get, store.put, depth, scale.seconds), depth),
            }


def _aimed(result: dict[str, float], depth: int) -> dict[str, Any]:
    if depth > 1:
        return dict(result)
    sync = _sync_ms()
    read, write = result["read_p50_ms"], result["write_p50_ms"]
    aims = {
        f"read p50 <= {READ_MS:g} ms": read <= READ_MS,
        f"write p50 <= {WRITE_MS:g} ms and a sync ({sync:.2f} ms)": write <= WRITE_MS + sync,
    }
    return {**result, "sync_p50_ms": sync, "aims": aims}


def _callers(
    keys: list[str],
    get: Callable[[str], str | None],
    put: Callable[[str, str], None],
    depth: int,
    seconds: float,
) -> dict[str, float]:
    """Threads that read and write by turns, each one call after the other."""
    reads: list[float] = []
    writes: list[float] = []
    failures: list[BaseException] = []
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        try:
            while time.perf_counter() < until:
                key = keys[rng.integers(len(keys))]
                began = time.perf_counter()
                value = get(key)
                done = time.perf_counter()
                put(key, key)
                reads.append(1e3 * (done - began))
                writes.append(1e3 * (time.perf_counter() - done))
                _check([value], [key])
        except BaseException as failure:  # noqa: BLE001 - told below
            failures.append(failure)

    threads = [threading.Thread(target=work, args=[number]) for number in range(depth)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    rate = (len(reads) + len(writes)) / (time.perf_counter() - began)
    return {
        "calls_per_s": rate,
        **percentiles("read", np.array(reads)),
        **percentiles("write", np.array(writes)),
    }


def _check(told: list[str | None], expected: list[str]) -> None:
    if told != expected:
        raise RuntimeError(f"wrong values: {told[:3]} instead of {expected[:3]}")


def _sync_ms() -> float:
    """What it takes to have a few bytes on disk, where ponds of this bench are."""
    took = []
    with tempfile.TemporaryFile(prefix="millpond-bench-") as file:
        for _ in range(SYNCS):
            file.write(b"x" * 512)
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            took.append(1e3 * (time.perf_counter() - began))
    return float(np.median(took))


# Peers: commands by pipelines


def _pipelines(
    keys: list[str], send: Callable[[list[str], bool], list[Any]], depth: int, seconds: float
) -> dict[str, float]:
    """One client, which reads and writes by turns, so many commands at once."""
    rng = np.random.default_rng(1)
    took: dict[bool, list[float]] = {True: [], False: []}
    calls = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for writes in (False, True):
            chosen = [keys[n] for n in rng.integers(len(keys), size=depth)]
            start = time.perf_counter()
            told = send(chosen, writes)
            took[writes].append(1e3 * (time.perf_counter() - start))
            calls += depth
            if not writes:
                _check(told, chosen)
    return {
        "calls_per_s": calls / (time.perf_counter() - began),
        **percentiles("read", np.array(took[False])),
        **percentiles("write", np.array(took[True])),
    }


def _redis(scale: Scale, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("redis") is None:
        progress("kv: Redis skipped, its client is not installed (pip install 'millpond[bench]')")
        return
    import redis

    from millpond.bench.adcamp_peers import find_redis, redis_server

    path = find_redis(progress)
    if path is None:
        return
    keys = [f"key-{number}" for number in range(scale.kv_keys)]
    with redis_server(path) as port, redis.Redis(port=port, decode_responses=True) as client:
        client.mset(dict(zip(keys, keys, strict=True)))

        def send(chosen: list[str], writes: bool) -> list[Any]:
            pipe = client.pipeline(transaction=False)
            for key in chosen:
                pipe.set(key, key) if writes else pipe.get(key)
            return list(pipe.execute())

        for depth in DEPTHS:
            progress(f"kv: Redis, pipelines of {depth}")
            yield {
                "system": f"redis, pipelines of {depth}",
                "section": "kv",
                "note": "redis: one client, in memory only",
                **_pipelines(keys, send, depth, scale.seconds),
            }


def _ray(scale: Scale, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    if importlib.util.find_spec("ray") is None:
        progress("kv: Ray skipped, it is not installed (pip install ray)")
        return
    import ray  # type: ignore[import-not-found,unused-ignore] # a peer, which nobody else needs

    class Store:
        def __init__(self) -> None:
            self._values: dict[str, str] = {}

        def get(self, key: str) -> str | None:
            return self._values.get(key)

        def put(self, key: str, value: str) -> None:
            self._values[key] = value

    try:
        ray.init(num_cpus=CONTAINERS, include_dashboard=False, log_to_driver=False)
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are measured
        progress(f"kv: Ray skipped, it does not start here: {error}")
        return
    try:
        made = ray.remote(Store)
        stores: list[Any] = [made.remote() for _ in range(CONTAINERS)]
        keys = [f"key-{number}" for number in range(scale.kv_keys)]
        of_key = {key: stores[number % CONTAINERS] for number, key in enumerate(keys)}
        ray.get([of_key[key].put.remote(key, key) for key in keys])

        def send(chosen: list[str], writes: bool) -> list[Any]:
            if writes:
                return list(ray.get([of_key[key].put.remote(key, key) for key in chosen]))
            return list(ray.get([of_key[key].get.remote(key) for key in chosen]))

        for depth in DEPTHS:
            progress(f"kv: Ray, {depth} at once")
            yield {
                "system": f"ray, {depth} at once",
                "section": "kv",
                "note": f"ray: {CONTAINERS} actors, in memory only",
                **_pipelines(keys, send, depth, scale.seconds),
            }
    finally:
        ray.shutdown()
