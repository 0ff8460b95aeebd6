"""How an incarnation gets back what earlier ones acknowledged: snapshots, then the decided log records.

Nothing is guessed: whatever a manifest names must be there and whole, and at the end every slice's previous
owner must have shown every epoch that the coordinator decided.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from millpond.container.core import Core
from millpond.container.group import HeldGroup
from millpond.container.layout import (
    CONTAINERS,
    MANIFEST,
    Manifest,
    Needed,
    RecordHead,
    directory_name,
    incarnations,
    read_manifest,
    read_record,
    read_record_head,
    read_snapshot,
    record_numbers,
    record_path,
)
from millpond.durable.files import Files
from millpond.errors import CorruptFile
from millpond.wire.messages import Assign, Assigned


class Recovered(NamedTuple):
    manifest: Manifest
    summary: Assigned


class _Log(NamedTuple):
    """The log of an earlier incarnation: its manifest, the heads of its records by number, and which not to apply."""

    directory: str
    manifest: Manifest
    heads: dict[int, RecordHead]
    skipped: set[int]


def recover(core: Core, files: Files, root: str, assign: Assign) -> Recovered:
    """Fills `core` with its slices of every State, and tells the manifest to begin with.

    A slice comes from its last owner alone: from the snapshots that its manifest names, the logs that it
    still needed, and its own. Whatever else lies about is not looked at: it may be a live peer's.
    """
    for spec in assign.states:
        core.add_state(spec)
    found = [
        name for name in incarnations(files, root) if name != directory_name(assign.term, assign.container)
    ]
    manifests = {name: read_manifest(files, root, name) for name in found}
    owners = _last_owners(core, manifests, root, assign)
    logs = _read_logs(files, root, manifests, sorted(set(owners.values())), assign)
    for log in logs:
        if log.directory in owners.values():
            _check_complete(core, log, root, assign)
    snapshots = _load_snapshots(
        core, files, root, {number: manifests[name] for number, name in owners.items()}
    )
    records = rows = 0
    for log in logs:
        concerned = {
            number
            for number, owner in owners.items()
            if number in log.manifest.slices and log.directory in (owner, *manifests[owner].needs)
        }
        for seq, head in sorted(log.heads.items()):
            if seq in log.skipped or not _concerns(head, core, concerned):
                continue
            schema_of = core.held(head.state).schema_of
            rows += core.replay(read_record(files, root, log.directory, seq, schema_of), concerned)
            records += 1
    for state, writers in assign.decided.items():
        core.vector[state] = dict(writers)
    # Only now: while old records are applied again, updates come that are below today's progress.
    for name, held in core.states.items():
        held.advance(assign.fetch_progress[name], assign.final_below[name])
    manifest = Manifest(
        term=core.term,
        container=core.container,
        slices=core.owned,
        covered=0,
        vector=assign.decided,
        snapshots={
            name: {number: held.snapshot for number, held in state.slices.items() if held.snapshot}
            for name, state in core.states.items()
        },
        needs={
            log.directory: Needed(max(decided), sorted(log.skipped))
            for log in logs
            if (decided := set(log.heads) - log.skipped)
        },
    )
    discarded = sum(len(log.skipped) for log in logs)
    return Recovered(manifest, Assigned(snapshots, records, rows, discarded))


def _last_owners(core: Core, manifests: dict[str, Manifest], root: str, assign: Assign) -> dict[int, str]:
    """The directory of the last incarnation that owned each of our slices; manifests come oldest first."""
    owners = {number: name for name, manifest in manifests.items() for number in manifest.slices}
    missing = [number for number in core.owned if number not in owners]
    if missing and any(assign.decided.values()):
        path = os.path.join(root, CONTAINERS)
        raise CorruptFile(
            f"no directory under {path} holds slice {missing[0]}, though epochs were acknowledged",
            hint="restore the missing files from a backup copy",
            path=path,
        )
    return {number: owners[number] for number in core.owned if number in owners}


def _read_logs(
    files: Files, root: str, manifests: dict[str, Manifest], owners: list[str], assign: Assign
) -> list[_Log]:
    """The logs of these incarnations and all that they needed, oldest first."""
    needed: dict[str, Needed] = {}
    for owner in owners:
        for name, need in manifests[owner].needs.items():
            if name not in manifests:
                path = os.path.join(root, CONTAINERS, name, MANIFEST)
                raise CorruptFile(
                    f"{path} is missing, and {owner} needs its log",
                    hint="restore the directory from a backup copy",
                    path=path,
                )
            needed[name] = need
    logs = []
    for name in sorted({*owners, *needed}):
        last = needed[name].last if name in needed else 0
        numbers = record_numbers(files, root, name, manifests[name].covered, last)
        heads = {seq: read_record_head(files, root, name, seq) for seq in numbers}
        skipped = set(needed[name].skipped) if name in needed else _undecided(heads, assign)
        logs.append(_Log(name, manifests[name], heads, skipped))
    return logs


def _undecided(heads: dict[int, RecordHead], assign: Assign) -> set[int]:
    """Records that no acknowledgement rests on: beyond what was decided, or replaced before the decision."""
    newest = {(head.state, head.writer, head.epoch): seq for seq, head in sorted(heads.items())}
    return {
        seq
        for seq, head in heads.items()
        if newest[head.state, head.writer, head.epoch] != seq
        or head.epoch > assign.decided.get(head.state, {}).get(head.writer, -1)
    }


def _check_complete(core: Core, log: _Log, root: str, assign: Assign) -> None:
    """A slice's last owner must have every decided epoch: in what it stood on, or in its log."""
    for state, writers in assign.decided.items():
        if not core.held(state).places(log.manifest.slices):
            continue
        for writer, epoch in writers.items():
            logged = [
                head.epoch
                for seq, head in log.heads.items()
                if seq not in log.skipped and (head.state, head.writer) == (state, writer)
            ]
            if max(*logged, log.manifest.vector.get(state, {}).get(writer, -1), -1) < epoch:
                path = record_path(root, log.directory, max(log.heads, default=log.manifest.covered) + 1)
                raise CorruptFile(
                    f"{path} is missing: the log ends before epoch {epoch} of {writer}, which was acknowledged",
                    hint="restore the missing files from a backup copy",
                    path=path,
                )


def _load_snapshots(core: Core, files: Files, root: str, owners: dict[int, Manifest]) -> int:
    loaded = 0
    for name, state in core.states.items():
        for number, manifest in owners.items():
            if number not in state.slices:
                continue
            held = state.slices[number]
            held.snapshot = manifest.snapshots.get(name, {}).get(number)
            if held.snapshot:
                batches, held.vector = read_snapshot(
                    files, root, name, number, held.snapshot, state.rows_schema
                )
                for batch in batches:
                    held.store.load(batch)
                loaded += 1
    return loaded


def _concerns(head: RecordHead, core: Core, slices: set[int]) -> bool:
    """Whether a record has something for these slices. What transactions gave is kept also if they were none."""
    held = core.states.get(head.state)
    if isinstance(held, HeldGroup):
        return held.spec.home in slices
    return held is not None and any(counts[number] for counts in head.counts for number in slices)
