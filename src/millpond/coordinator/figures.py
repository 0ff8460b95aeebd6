"""Figures of the whole pond, put together from what its containers tell and what the coordinator knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millpond.coordinator import fetches
from millpond.coordinator.commits import Commits
from millpond.coordinator.latency import Latencies
from millpond.coordinator.membership import Membership
from millpond.coordinator.memory import Memory
from millpond.errors import BadMessage, MillpondError
from millpond.runtime import Runtime
from millpond.wire.figures import (
    AskFigures,
    AskSlice,
    ContainerFigures,
    FetcherFigures,
    MoveFigures,
    PondMetrics,
    ProgressFigures,
    SliceByResident,
    SliceFigures,
)
from millpond.wire.questions import AskPending


class Figures:
    """Asks all containers at once, and waits for none that does not answer soon.

    `moves`, `task_slots`, `backups` and `backups_wanted` are set by whoever sees to them: empty where nobody does.
    The latter two have an entry for each slice.
    """

    def __init__(
        self,
        memory: Memory,
        containers: Membership,
        commits: Commits,
        latencies: Latencies,
        runtime: Runtime,
    ) -> None:
        self._memory = memory
        self._containers = containers
        self._commits = commits
        self._latencies = latencies
        self._runtime = runtime
        self._since_s = runtime.now()
        self.moves: list[MoveFigures] = []
        self.task_slots: dict[str, int] = {}
        self.backups: list[int] = []
        self.backups_wanted: list[int] = []

    def gather(self) -> PondMetrics:
        told, away = self._ask_all()
        return PondMetrics(
            coordinator=self._own(),
            containers={container: figures.metrics for container, figures in told.items()},
            residents=self._residents(told),
            slices=self._slices(told),
            away=away,
            progress=self._progress(),
            moves=list(self.moves),
            task_slots=dict(self.task_slots),
        )

    def of_slice(self, message: AskSlice) -> SliceByResident:
        owners = self._memory.record.owners
        if message.slice >= len(owners):
            raise BadMessage(f"slice {message.slice} is none of {len(owners)}")
        return self._containers.ask(owners[message.slice], message)

    def of(self, containers: Sequence[int]) -> dict[int, ContainerFigures]:
        """What these containers tell; without those that do not answer."""
        return self._ask(containers)[0]

    def _ask_all(self) -> tuple[dict[int, ContainerFigures], dict[int, str]]:
        return self._ask(self._containers.ids)

    def _ask(self, ids: Sequence[int]) -> tuple[dict[int, ContainerFigures], dict[int, str]]:
        def ask(container: int) -> ContainerFigures | MillpondError:
            try:
                return self._containers.ask(container, AskFigures())
            except MillpondError as error:
                return error

        answers = dict(zip(ids, self._runtime.map(ask, ids), strict=True))
        told = {c: answer for c, answer in answers.items() if isinstance(answer, ContainerFigures)}
        return told, {c: a.message for c, a in answers.items() if isinstance(a, MillpondError)}

    def _own(self) -> dict[str, float]:
        record = self._memory.record
        return {
            "up_s": self._runtime.now() - self._since_s,
            "slices": record.slices,
            "epochs_committed": self._commits.committed,
            "epochs_replayed": self._commits.replayed,
            "container_restarts": self._containers.members.restarts,
            "recovery_s_last": self._containers.recovery_s_last,
            "journal_entries": self._memory.journal.entries_written,
            "term": record.term,
        }

    def _residents(self, told: dict[int, ContainerFigures]) -> dict[str, dict[str, dict[str, Any]]]:
        residents: dict[str, dict[str, dict[str, Any]]] = {}
        for each in told.values():
            for plural, figures in each.residents.items():
                for name, own in figures.items():
                    total = residents.setdefault(plural, {}).setdefault(name, {})
                    for key, value in own.items():
                        total[key] = (
                            total[key] + value if key in total and isinstance(value, int | float) else value
                        )
        for name, known in list(self._memory.record.residents.items()):
            fetchers = self._latencies.figures(name)
            if fetchers:
                residents.setdefault(known.spec.plural, {}).setdefault(name, {})["fetchers"] = fetchers
        return residents

    def _slices(self, told: dict[int, ContainerFigures]) -> SliceFigures:
        """Of every slice; zeros for one whose container tells nothing."""
        owners = np.array(self._memory.record.owners, np.int64)
        columns = {name: np.zeros(len(owners), np.int64) for name in SliceFigures.COLUMNS[1:]}
        for container, figures in told.items():
            own = figures.slices.columns()
            # One that has just moved may be told of twice: its owner's word counts.
            mine = owners[own["slices"]] == container
            for name, column in columns.items():
                column[own["slices"][mine]] = own[name][mine]
        columns |= {"slices": np.arange(len(owners)), "owners": owners}
        for name, backups in (("backups", self.backups), ("backups_wanted", self.backups_wanted)):
            if len(backups) == len(owners):
                columns[name] = np.array(backups, np.int64)
        return SliceFigures.of(columns)

    def _progress(self) -> dict[str, ProgressFigures]:
        """As it is published. Nothing is waited for."""
        with self._memory.lock:
            record = self._memory.record
            return {
                name: self._progress_of(name, known.spec.plural) for name, known in record.residents.items()
            }

    def _progress_of(self, name: str, kind: str) -> ProgressFigures:
        progress = self._commits.progress(name)
        fetchers = {}
        for fetcher, own in progress.fetchers.items():
            pending = fetches.pending(self._memory.record, AskPending(name, fetcher), progress.update)
            fetchers[fetcher] = FetcherFigures(own, pending.rows, pending.since, pending.late)
        return ProgressFigures(
            kind=kind,
            update=progress.update,
            fetch=progress.fetch,
            time_kind=progress.time_kind,
            updaters=progress.updaters,
            fetchers=fetchers,
            held_by=[holder.updater for holder in progress.held_by],
            late=progress.late,
        )
