"""Which files of slices become fewer, and what comes of them: from the files alone, without a look at live slices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from millpond.container.core import Core
from millpond.container.holdings.base import Bounds, HeldSlice, Holding, Saved
from millpond.container.layout import Ground, SnapshotHead, read_snapshot, snapshot_name
from millpond.durable.files import Files
from millpond.wire.base import SliceId

# Of one step of merging: so many bytes, before the manifest tells of them.
MERGE_BYTES = 64 << 20


class Merge(NamedTuple):
    """Files of one slice that are to become one: all of them, or `deltas` alone. `name` is what comes of it."""

    holding: Holding[Any]
    number: SliceId
    held: HeldSlice[Any]
    saved: Saved
    whole: bool
    name: str

    @property
    def merged(self) -> tuple[str, ...]:
        """The files that it replaces."""
        return self.saved.files if self.whole else self.saved.deltas

    @property
    def nbytes(self) -> int:
        return self.saved.delta_bytes + (self.saved.base_bytes if self.whole else 0)

    def is_of(self, core: Core) -> bool:
        """Whether the slice is still the one that it was."""
        holding = core.holdings.get(self.holding.name)
        return holding is self.holding and holding.slices.get(self.number) is self.held

    def rows(self, files: Files, root: str) -> pa.RecordBatch:
        """What the files hold together."""
        holding, resident_id = self.holding, self.holding.resident.id
        schema = holding.snapshot_schema
        batches = read_snapshot(files, root, self.merged, resident_id, self.number, schema)
        return holding.merged(batches, self.whole)

    @property
    def head(self) -> SnapshotHead:
        follows = None if self.whole else self.saved.base
        return SnapshotHead(self.holding.resident.id, self.number, follows, holds=self.saved.deltas[-1])

    def after(self, nbytes: int) -> Saved | None:
        """The slice's files once it is done; None if they have become others meanwhile."""
        now, before = self.held.saved, self.saved
        if now is None or self.held.anew or now.files[: len(before.files)] != before.files:
            return None
        later, more = now.deltas[len(before.deltas) :], now.delta_bytes - before.delta_bytes
        if self.whole:
            return Saved(self.name, nbytes, later, more)
        return Saved(now.base, now.base_bytes, (self.name, *later), nbytes + more)


def choose(
    core: Core,
    grounds: Mapping[SliceId, Ground],
    unconfirmed: Collection[SliceId],
    bounds: Bounds,
    numbers: Iterator[int],
    writer: str = "",
) -> list[Merge]:
    """Slices whose deltas have become too many, or too large beside the base: as many as are merged in one step."""
    chosen: list[Merge] = []
    nbytes = 0
    for holding in list(core.holdings.values()):
        for number, held in list(holding.slices.items()):
            saved = held.saved
            if saved is None or held.anew or number in unconfirmed or nbytes > MERGE_BYTES:
                continue
            # What a manifest that could not be written would have named is not merged.
            ground = grounds.get(number)
            if ground is None or tuple(ground.files_of(holding.resident.id)) != saved.files:
                continue
            too_many = len(saved.deltas) > bounds.deltas
            whole = saved.delta_bytes > bounds.deltas_share * saved.base_bytes + bounds.deltas_bytes
            whole |= too_many and saved.base_bytes <= bounds.deltas_bytes
            if whole or too_many:
                name = snapshot_name(number, core.term, next(numbers), writer, is_delta=not whole)
                chosen.append(Merge(holding, number, held, saved, whole, name))
                nbytes += chosen[-1].nbytes
    return chosen
