"""Ponds under load for `millpond bench elastic`: a State of a given size where it is wanted, and clients that note what they see."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import millpond as mp
from millpond.bench.elastic_client import STATE, Task
from millpond.container.holdings.base import Bounds
from millpond.coordinator.hosting import Embedded

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SLICES = 64
BATCH = 500_000
BACKUPS_S_MAX = 120.0
BUCKET_S = 0.1


class Loaded(NamedTuple):
    """A pond with a State that has so many keys, each with one version, none newer than `newest`."""

    pond: mp.Pond
    root: str
    keys: int
    newest: int

    @property
    def coordinator(self) -> Any:
        return self.pond._owner._coordinator  # type: ignore[union-attr]  # noqa: SLF001 - the bench looks inside

    def bytes_of(self, container: int) -> float:
        slices = self.pond.metrics()["slices"].values()
        return float(sum(each["bytes"] for each in slices if each["container"] == container))

    def slices_of(self, container: int) -> list[int]:
        return [number for number, owner in self.pond.placement().items() if owner == container]


@contextmanager
def loaded_pond(
    owners: Sequence[int],
    mb: float,
    backups: int = 0,
    threads: int = 1,
    bounds: Bounds | None = None,
    spark: SparkSession | None = None,
) -> Iterator[Loaded]:
    """Slices are where `owners` says; container 0 holds `mb` megabytes, by what `metrics` says, and the others in proportion.

    With `spark` its executors host the containers.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="millpond-bench-"))
        if bounds is not None:
            stack.enter_context(_bounded(bounds))
        root = os.path.join(folder, "pond")
        sizes: Any = {"containers": max(owners) + 1, "threads": threads, "slices": len(owners)}
        hosted: Any = {} if spark is None else {"spark": spark, "hosting": "spark"}
        pond = stack.enter_context(mp.open(root, **sizes, **hosted, backups=backups))
        empty = Loaded(pond, root, 0, 0)
        if pond.placement() != dict(enumerate(owners)):
            empty.coordinator.place(list(owners))
        state = pond.state(STATE, key="long", value="long", compact=mp.keep_all())
        await_backups(pond)
        feed = state.update(key="k", at="t", value="v", name="load")
        keys = epoch = 0
        while True:
            held = empty.bytes_of(0) / 1e6
            if held >= mb:
                break
            # As many more as are likely to be missing, in rounds that are small enough.
            missing = BATCH if not keys else math.ceil(keys * (mb / held - 1) * 1.02)
            rows = np.arange(keys, keys + max(1_000, min(BATCH, missing, int(mb * 2_000))))
            feed(pa.table({"k": rows, "t": np.full(len(rows), epoch), "v": rows}), epoch)
            keys += len(rows)
            epoch += 1
        state.report("load", update=epoch)  # U has passed all that was loaded, and stays there
        pond.checkpoint()
        await_backups(pond)
        yield Loaded(pond, root, keys, epoch - 1)


def await_backups(pond: mp.Pond) -> None:
    """Until every slice has as many as are wanted."""
    deadline = time.monotonic() + BACKUPS_S_MAX
    while any(
        each.get("backups", 0) < each.get("backups_wanted", 0) for each in pond.metrics()["slices"].values()
    ):
        if time.monotonic() > deadline:
            raise RuntimeError("backups do not become complete")
        time.sleep(0.1)


@contextmanager
def _bounded(bounds: Bounds) -> Iterator[None]:
    """Containers that are started meanwhile keep their files within other bounds than all others do."""
    usual = Embedded._command  # noqa: SLF001 - there is no option for it

    def command(self: Embedded, container: int) -> list[str]:
        words = usual(self, container)
        at = words.index("millpond.container.process")
        return [
            *words[:at],
            "millpond.bench.elastic_container",
            msgspec.json.encode(bounds).decode(),
            *words[at + 1 :],
        ]

    Embedded._command = command  # type: ignore[method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        Embedded._command = usual  # type: ignore[method-assign]  # noqa: SLF001


class Notes(NamedTuple):
    """What a client saw: when each call began and ended, by the machine's monotonic clock."""

    began: npt.NDArray[np.float64]
    ended: npt.NDArray[np.float64]
    failures: int

    def rate(self, begin: float, end: float) -> float:
        """Answered calls a second."""
        return float(((self.ended >= begin) & (self.ended < end)).sum() / (end - begin))

    def gap_ms(self, begin: float, end: float) -> float:
        """The longest time between two answers of which one, or what is between them, lies in there."""
        gaps = np.diff(self.ended)
        inside = (self.ended[1:] > begin) & (self.ended[:-1] < end)
        return float(gaps[inside].max() * 1e3) if inside.any() else math.nan

    def gap_ms_within(self, begin: float, end: float) -> float:
        """The longest time between two answers that both lie in there: what follows it has no part in it."""
        gaps = np.diff(self.ended[(self.ended >= begin) & (self.ended < end)])
        return float(gaps.max() * 1e3) if len(gaps) else math.nan

    def latencies_ms(self, begin: float, end: float) -> npt.NDArray[np.float64]:
        """Of calls that were under way in there."""
        inside = (self.ended > begin) & (self.began < end)
        return (self.ended - self.began)[inside] * 1e3

    def timeline(self, begin: float, end: float) -> list[float]:
        """Calls a second in buckets of `BUCKET_S`."""
        edges = np.arange(begin, end, BUCKET_S)
        return [round(float(n) / BUCKET_S, 1) for n in np.histogram(self.ended, edges)[0]]


class Clients:
    """Clients by name, which run until the end of the `with`; then `notes` has what they saw."""

    def __init__(self, pond: Loaded) -> None:
        self._pond = pond
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self.notes: dict[str, Notes] = {}

    def __enter__(self) -> Self:
        return self

    def start(self, name: str, **task: Any) -> None:
        given = {"slices": list(range(len(self._pond.pond.placement()))), "rows": 100, "pause_s": 0.0, **task}
        full = Task(
            root=self._pond.root,
            address=self._pond.pond.address,
            name=f"{name}_{time.monotonic_ns()}",
            slices_of_pond=len(self._pond.pond.placement()),
            keys=self._pond.keys,
            newest=self._pond.newest,
            notes=self._file(name),
            **given,
        )
        # Ours, so that it finds the same millpond.
        paths = [str(Path(mp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._processes[name] = subprocess.Popen(  # noqa: S603 - our own
            [sys.executable, "-m", "millpond.bench.elastic_client", msgspec.json.encode(full).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)},
        )

    def await_ready(self) -> None:
        for name, process in self._processes.items():
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError(f"the client {name} ended before it was answered")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for process in self._processes.values():
            if kind is not None:
                process.kill()
            assert process.stdin is not None
            process.stdin.close()
        for name, process in self._processes.items():
            process.wait(150)
            assert process.stdout is not None
            process.stdout.close()
            if kind is None:
                self.notes[name] = self._read(name)

    def _read(self, name: str) -> Notes:
        with np.load(self._file(name)) as file:
            answered = ~file["failed"]
            ended = (file["began"] + file["took"])[answered]
            return Notes(file["began"][answered], ended, int(file["failed"].sum()))

    def _file(self, name: str) -> str:
        return os.path.join(os.path.dirname(self._pond.root), f"{name}.npz")
