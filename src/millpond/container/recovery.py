"""How an incarnation gets back what earlier ones acknowledged: snapshots, then the decided log records.

Nothing is guessed: whatever a manifest names must be there and whole, and at the end every slice's previous
owner must have shown every epoch that the coordinator decided.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from millpond.container.core import Core
from millpond.container.layout import (
    CONTAINERS,
    Manifest,
    RecordHead,
    directory_name,
    incarnations,
    read_manifest,
    read_record,
    read_record_head,
    read_snapshot,
    record_numbers,
)
from millpond.errors import CorruptFile
from millpond.files import Files
from millpond.wire.messages import Assign, Assigned


class Recovered(NamedTuple):
    manifest: Manifest
    summary: Assigned


class _Log(NamedTuple):
    """The log of an earlier incarnation: its manifest, and the heads of its records by number."""

    directory: str
    manifest: Manifest
    heads: dict[int, RecordHead]
    undecided: set[int]


def recover(core: Core, files: Files, root: str, assign: Assign) -> Recovered:
    """Fills `core` with its slices of every State, and tells the manifest to begin with."""
    for spec in assign.states:
        held = core.add_state(spec)
        held.fetch_progress = assign.fetch_progress[spec.name]
    logs = _read_logs(files, root, assign)
    _check_complete(logs, assign)
    snapshots = _load_snapshots(core, files, root, logs)
    records = rows = 0
    for log in logs:
        for seq, head in sorted(log.heads.items()):
            if seq in log.undecided or not _concerns(head, core):
                continue
            schema = core.state(head.state).rows_schema
            rows += core.replay(read_record(files, root, log.directory, seq, schema), log.manifest.slices)
            records += 1
    for state, writers in assign.decided.items():
        core.vector[state] = dict(writers)
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
        needs={log.directory: sorted(log.undecided) for log in logs},
    )
    discarded = sum(len(log.undecided) for log in logs)
    return Recovered(manifest, Assigned(snapshots, records, rows, discarded))


def _read_logs(files: Files, root: str, assign: Assign) -> list[_Log]:
    own = directory_name(assign.term, assign.container)
    found = [name for name in incarnations(files, root) if name != own]
    manifests = {name: read_manifest(files, root, name) for name in found}
    skips: dict[str, set[int]] = {name: set() for name in found}
    for name, manifest in manifests.items():
        for needed, numbers in manifest.needs.items():
            if needed in skips:
                skips[needed].update(numbers)
            elif manifest.slices and _is_newest(manifest, manifests):
                path = os.path.join(root, CONTAINERS, needed)
                raise CorruptFile(f"{path} is missing, and {name} needs its log", path=path)
    logs = []
    for name, manifest in manifests.items():
        numbers = record_numbers(files, root, name, manifest.covered)
        heads = {seq: read_record_head(files, root, name, seq) for seq in numbers}
        logs.append(_Log(name, manifest, heads, skips[name] | _undecided(heads, assign)))
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


def _is_newest(manifest: Manifest, manifests: dict[str, Manifest]) -> bool:
    """Whether some slice has no later owner than this incarnation, so that what it needs is still needed."""
    later = {number for other in manifests.values() if other.term > manifest.term for number in other.slices}
    return not set(manifest.slices) <= later


def _check_complete(logs: list[_Log], assign: Assign) -> None:
    """Every slice's last owner must have every decided epoch, in its manifest or its log."""
    for number in assign.slices:
        owners = [log for log in logs if number in log.manifest.slices]
        if not owners:
            if any(assign.decided.values()):
                raise CorruptFile(
                    f"no directory under {CONTAINERS}/ holds slice {number}, though epochs were acknowledged",
                    path=CONTAINERS,
                )
            continue
        last = owners[-1]
        for state, writers in assign.decided.items():
            for writer, epoch in writers.items():
                reached = max(
                    (
                        head.epoch
                        for seq, head in last.heads.items()
                        if seq not in last.undecided and (head.state, head.writer) == (state, writer)
                    ),
                    default=-1,
                )
                if max(reached, last.manifest.vector.get(state, {}).get(writer, -1)) < epoch:
                    path = os.path.join(CONTAINERS, last.directory)
                    raise CorruptFile(
                        f"the log in {path} ends before epoch {epoch} of {writer}, which was acknowledged",
                        hint="restore the missing files from a backup copy",
                        path=path,
                    )


def _load_snapshots(core: Core, files: Files, root: str, logs: list[_Log]) -> int:
    loaded = 0
    for name, state in core.states.items():
        for number, held in state.slices.items():
            named = [log.manifest.snapshots.get(name, {}).get(number) for log in logs]
            held.snapshot = max((snapshot for snapshot in named if snapshot), default=None)
            if held.snapshot:
                batches, held.vector = read_snapshot(
                    files, root, name, number, held.snapshot, state.rows_schema
                )
                for batch in batches:
                    held.store.load(batch)
                loaded += 1
    return loaded


def _concerns(head: RecordHead, core: Core) -> bool:
    return head.state in core.states and any(
        any(counts[number] for number in core.owned) for counts in head.counts
    )
