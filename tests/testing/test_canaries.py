"""Promises broken on purpose, one at a time and in one place: the simulator finds each, or it is the simulator that fails.

A canary is a piece of the pond's source replaced by another. Its seed is one that finds it; without the canary the same
seed passes. Where the source has changed, the canary says so: look for the place where the promise is kept now.

Not here, because simulated ponds have no rules of the user's own: a rule for which memory ran out. Nor what is short of
memory while a log is replayed: by design it stays away until the pond is opened again.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any, NamedTuple

import pytest

from millpond.container import recovery
from millpond.container.checkpoints import Checkpoints
from millpond.container.core import Core
from millpond.container.holdings.base import HeldSlice
from millpond.container.holdings.group import GroupHolding, GroupStore
from millpond.container.holdings.keyed import KeyedHolding
from millpond.container.service import ContainerService
from millpond.container.staging import Staged
from millpond.coordinator import catalogue, fetches, updates
from millpond.coordinator.commits import Commits
from millpond.coordinator.epochs import EpochCommit
from millpond.coordinator.membership import Membership
from millpond.coordinator.slices import Slices
from millpond.coordinator.telling import Telling
from millpond.coordinator.tidying import Tidying
from millpond.durable import arrow_files
from millpond.stores import readiness
from millpond.stores.undo import TableUndo
from millpond.stores.versioned import VersionedSlice
from millpond.testing import simulate
from millpond.txn.run.interpreter import InterpretedFunction


class Edit(NamedTuple):
    owner: Any
    name: str
    kept: str
    broken: str


DIGESTS = "(digest, rows) == (digest_of(self.message), rows_of(self.message))"
CANARIES: dict[str, tuple[int, list[Edit]]] = {
    "no deduplication": (
        33,
        [Edit(KeyedHolding, "each", "if held.has_seen(record.writer, record.turn):", "if False:")],
    ),
    "no sync of the log before it is prepared": (
        21,
        [
            Edit(
                arrow_files,
                "put_content",
                "files.sync(temporary)",
                "kind == 'log' or files.sync(temporary)",
            )
        ],
    ),
    "no term check at the decision": (
        71,
        [
            Edit(
                Commits,
                "_decide",
                "if not self._containers.members.serves(container, term):",
                "if False:",
            )
        ],
    ),
    "answers at U, too": (
        2,
        [Edit(readiness, "before", "times < int(progress)", "times <= int(progress)")],
    ),
    "a torn slice goes on": (249, [Edit(HeldSlice, "changing", "self.torn = True", "pass")]),
    "published before all have applied": (
        3,
        [
            Edit(
                EpochCommit,
                "_step",
                "if self._waiting or self._away:",
                "if (self._waiting and self.phase is not Phase.APPLY) or self._away:",
            )
        ],
    ),
    # Two defences: one alone holds.
    "every attempt counts": (
        1,
        [
            Edit(
                Staged,
                "find",
                "[attempts.get(attempt) for attempt in sorted(chosen.items())]",
                "list(attempts.values())",
            ),
            Edit(EpochCommit, "_step", DIGESTS, "True"),
        ],
    ),
    "waiting rows are forgotten": (
        0,
        [
            Edit(
                fetches,
                "pin",
                "previous=before.turn if before is not None and before.waiting else None",
                "previous=None",
            )
        ],
    ),
    "transactions are not undone": (113, [Edit(GroupHolding, "_take_back", "undo(held.store)", "pass")]),
    "U is published while an epoch is unseen": (
        504,
        [Edit(Commits, "progress", "unseen.commit.held_back if unseen is not None else {}", "{}")],
    ),
    "logs are replayed in the order of directories": (
        274,
        [
            Edit(
                recovery,
                "_read_logs",
                "in order.static_order():",
                "in sorted(needed, key=lambda key: key[:2]):",
            )
        ],
    ),
    "late orders about slices count": (
        64,
        [
            Edit(
                ContainerService,
                "_check_order",
                "if any(order < self._orders.get(number, 0) for number in slices):",
                "if False:",
            )
        ],
    ),
    "a transaction for which memory ran out is aborted": (
        89,
        [
            Edit(
                InterpretedFunction,
                "run",
                "except OF_THE_MACHINE:\n",
                "except ():\n",
            )
        ],
    ),
    "a container whose restart failed is given up": (
        40,
        [
            Edit(
                Membership,
                "recover",
                "if self._closing or container not in self.members.members:",
                "if self._closing or self.members.members[container].failures:",
            )
        ],
    ),
    "word of a new State is sent once": (
        5,
        [
            Edit(
                Telling,
                "_tell",
                "containers.ask_patiently(container, call)",
                "with suppress(MillpondError):\n                        containers.ask(container, call)",
            )
        ],
    ),
    "F passes what the last epoch would ask again": (
        720,
        [
            Edit(
                catalogue,
                "progressed",
                "lowest += [pin.late_below for pin in asking.pins[last:]]",
                "pass",
            )
        ],
    ),
    "F passes rows that wait": (
        32,
        [Edit(catalogue, "progressed", "if pin.waiting and pin.lowest is not None", "if False")],
    ),
    "damage of a file goes unnoticed": (
        1456,
        [Edit(arrow_files, "check_content", "if actual != checksum:", "if False:")],
    ),
    "what is kept through the pond is not synced": (
        10,
        [Edit(arrow_files, "put_content", "files.sync(temporary)", "writer or files.sync(temporary)")],
    ),
    "turns are tidied that may be asked for again": (
        10,
        [Edit(Tidying, "tidy_turns", "if t < last and t not in needed", "if t < last")],
    ),
    "snapshots overlook events that wait": (
        12,
        [Edit(GroupStore, "export", "for w, rows in self.delayed.items()", "for w, rows in ()")],
    ),
    "rows count again in another query": (
        13,
        [Edit(updates, "check_first", 'if known and history == "continue":', "if False:")],
    ),
    "an epoch begins before the last one is answered": (
        38,
        [Edit(fetches, "_check_next", "if last is not None and not last.answered:", "if False:")],
    ),
    "what was staged is kept for ever": (
        7,
        [Edit(Staged, "expire", "if now_s - part.at_s > STAGED_S_MAX", "if False")],
    ),
    "a query that was given up is not forgotten": (
        451,
        [
            Edit(
                catalogue,
                "forget",
                "progressed(replace(fetcher, queries=asking, ended=ended))",
                "progressed(fetcher)",
            )
        ],
    ),
    "slices are left with nobody": (
        40,
        [Edit(Slices, "_carry_out", "self.containers.recover(container, broken=True)", "pass")],
    ),
    "an updater that was left out begins where it stood": (
        18,
        [
            Edit(
                catalogue,
                "awake",
                "watermark=max(updater.watermark, update_progress)",
                "watermark=updater.watermark",
            )
        ],
    ),
    "a row that changes stays clean": (
        13,
        [Edit(TableUndo, "mark", "flags[rows[rows < before]] = 1", "pass")],
    ),
    "an entry that changes stays clean": (
        2,
        [Edit(VersionedSlice, "insert", "compaction.mark(ids, self._dirty.flags)", "pass")],
    ),
}

# Promises that hold twice, or that a fault breaks only in a rare order: no seed is known that finds these.
SOUGHT: dict[str, tuple[int, list[Edit]]] = {
    "a container counts while its successor recovers": (
        31,
        [Edit(Membership, "_bring_up", "self.members.ended(container)", "pass")],
    ),
    "a late prepare counts": (
        284,
        [Edit(Core, "begin", "if message.ballot < self._ballots.get(message.resident, 0):", "if False:")],
    ),
    "files of the last owner go before the journal knows": (
        0,
        [
            Edit(
                Checkpoints,
                "add",
                "self._unconfirmed |= set(new)",
                "self._remove_leftovers(set(new))",
            ),
        ],
    ),
}


def release(edit: Edit, patch: pytest.MonkeyPatch) -> None:
    """Puts the broken code in the place of the kept."""
    function = getattr(edit.owner, edit.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(edit.kept) == 1, f"{edit.owner.__name__}.{edit.name} has changed"
    module = sys.modules[function.__module__]
    code = compile(
        source.replace(edit.kept, edit.broken), module.__file__ or "", "exec", annotations.compiler_flag
    )
    scope: dict[str, Any] = {}
    exec(code, module.__dict__, scope)
    patch.setattr(edit.owner, edit.name, scope[edit.name])
    for module in [module for name, module in sys.modules.items() if name.startswith("millpond.")]:
        if getattr(module, edit.name, None) is function:  # imported by name
            patch.setattr(module, edit.name, scope[edit.name])


@pytest.mark.parametrize("name", [*CANARIES, *SOUGHT])
def test_a_canary_has_its_place_in_the_source(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in (CANARIES | SOUGHT)[name][1]:
        kept = getattr(edit.owner, edit.name)
        release(edit, monkeypatch)
        assert getattr(edit.owner, edit.name) is not kept


SEEDS_MAX = 400
"""Any change of the pond changes what a seed means: where the one that is noted finds nothing, others are tried."""


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CANARIES)
def test_a_canary_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    noted, edits = CANARIES[name]
    with monkeypatch.context() as patch:
        for edit in edits:
            release(edit, patch)
        failed = (report for seed in (noted, *range(SEEDS_MAX)) if not (report := simulate(seed)).passed)
        found = next(failed, None)
    assert found is not None, f"{name!r} is not found within {SEEDS_MAX} seeds"
    assert f"--start {found.seed} " in str(found)
    report = simulate(found.seed)
    assert report.passed, report
