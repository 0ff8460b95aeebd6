"""From two readings of a pond's metrics: what its containers and slices do a second. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millpond.pond.figures import Metrics, too_few_backups

Floats = npt.NDArray[np.float64]
UNKNOWN = math.nan
"""A rate that cannot be told: nothing to compare with, or the count began anew."""


class Reading(NamedTuple):
    """What a pond said of itself, and when by this machine's clock, in seconds since 1970."""

    metrics: Metrics
    taken_s: float


@dataclass(frozen=True)
class ContainerLoad:
    """`cpu` is in cores. One that is `away` tells nothing but why."""

    id: int
    updates: float
    fetches: float
    cpu: float
    bytes: float
    keys: float
    figures: Mapping[str, float]
    away: str = ""


@dataclass(frozen=True)
class SliceLoads:
    """An entry for each slice. Updates and fetches are rows a second, `cpu` is in cores."""

    number: npt.NDArray[np.int64]
    container: npt.NDArray[np.int64]
    updates: Floats
    fetches: Floats
    cpu: Floats
    bytes: Floats
    keys: Floats
    moving: npt.NDArray[np.bool_]
    bare: npt.NDArray[np.bool_]
    """Whether it has too few backups."""
    away: npt.NDArray[np.bool_]
    """Whether its container tells nothing."""

    @property
    def rows(self) -> Floats:
        return self.updates + self.fetches

    def of(self, container: int) -> SliceLoads:
        mine = self.container == container
        return SliceLoads(*(getattr(self, name)[mine] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.number)


@dataclass(frozen=True)
class PondLoads:
    containers: dict[int, ContainerLoad]
    slices: SliceLoads
    epochs: float
    """A second."""

    def total(self, figure: str) -> float:
        """Of all containers, as far as it is known."""
        values = [getattr(each, figure) for each in self.containers.values()]
        known = [value for value in values if not math.isnan(value)]
        return sum(known) if known else UNKNOWN


def loads_of(before: Reading | None, now: Reading) -> PondLoads:
    """What went on between the readings. Without one before, sizes are known, and no rates."""
    metrics, old = now.metrics, before.metrics if before is not None else _EMPTY
    seconds = {
        container: _seconds(old["containers"].get(container), figures)
        for container, figures in metrics["containers"].items()
    }
    slices = _slices(metrics, old["slices"], seconds)
    held = _held(slices)
    containers = {
        container: ContainerLoad(
            container,
            _rate(old["containers"].get(container), figures, "rows_applied", seconds[container]),
            _rate(old["containers"].get(container), figures, "rows_fetched", seconds[container]),
            _rate(old["containers"].get(container), figures, "cpu_s", seconds[container]),
            *held(container),
            figures,
        )
        for container, figures in metrics["containers"].items()
    }
    for container, why in metrics["away"].items():
        containers[container] = ContainerLoad(
            container, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, {}, why or "it does not answer"
        )
    pond, pond_before = metrics["coordinator"], old["coordinator"] or None
    return PondLoads(
        dict(sorted(containers.items())),
        slices,
        _rate(pond_before, pond, "epochs_committed", _seconds(pond_before, pond)),
    )


_EMPTY: Metrics = {"containers": {}, "slices": {}, "coordinator": {}}


def _seconds(before: Mapping[str, float] | None, now: Mapping[str, float]) -> float:
    """Between the readings, by the clock of who was asked; unknown for one that began anew meanwhile."""
    if not before or before.get("pid") != now.get("pid"):
        return UNKNOWN
    seconds = now["up_s"] - before["up_s"]
    return seconds if seconds > 0 else UNKNOWN


def _rate(before: Mapping[str, float] | None, now: Mapping[str, float], name: str, seconds: float) -> float:
    if before is None or now[name] < before[name]:
        return UNKNOWN
    return (now[name] - before[name]) / seconds


def _held(slices: SliceLoads) -> Callable[[int], tuple[float, float]]:
    def held(container: int) -> tuple[float, float]:
        mine = slices.container == container
        return float(slices.bytes[mine].sum()), float(slices.keys[mine].sum())

    return held


def _slices(metrics: Metrics, before: Mapping[int, Any], seconds: Mapping[int, float]) -> SliceLoads:
    figures: dict[int, dict[str, float]] = metrics["slices"]
    numbers = np.array(list(figures), np.int64)
    container = np.array([each["container"] for each in figures.values()], np.int64)
    old = [before.get(number, {}) for number in figures]
    stayed = container == np.array([each.get("container", -1) for each in old], np.int64)
    lasted = np.array([seconds.get(owner, UNKNOWN) for owner in container.tolist()], np.float64)

    def column(name: str, of: Any) -> Floats:
        return np.array([each.get(name, 0) for each in of], np.float64)

    def rate(name: str) -> Floats:
        grown = column(name, figures.values()) - column(name, old)
        return np.where(stayed & (grown >= 0), grown, UNKNOWN) / lasted

    moving = {number for move in metrics["moves"] for number in move["slices"]}
    bare = set(too_few_backups(figures))
    return SliceLoads(
        number=numbers,
        container=container,
        updates=rate("rows_updated"),
        fetches=rate("rows_fetched"),
        cpu=rate("cpu_s"),
        bytes=column("bytes", figures.values()),
        keys=column("keys", figures.values()),
        moving=np.isin(numbers, list(moving)),
        bare=np.isin(numbers, list(bare)),
        away=np.isin(container, list(metrics["away"])),
    )


def as_rates(loads: PondLoads) -> dict[str, Any]:
    """The rates alone, for JSON: null where one cannot be told."""

    def known(value: float) -> float | None:
        return None if math.isnan(value) else round(value, 6)

    names = ("updates", "fetches", "cpu")
    columns = [getattr(loads.slices, name).tolist() for name in names]
    return {
        "epochs": known(loads.epochs),
        "containers": {
            str(container): {name: known(getattr(load, name)) for name in names}
            for container, load in loads.containers.items()
        },
        "slices": {
            str(number): {name: known(value) for name, value in zip(names, values, strict=True)}
            for number, *values in zip(loads.slices.number.tolist(), *columns, strict=True)
        },
    }
