"""What the pond holds, as messages and files tell of it: a tagged spec for each kind, and a tagged work for its epochs.

A *resident* is a named thing in the pond, of any kind: a State, a group of tables. Each kind has a module beside this one.
"""

from __future__ import annotations

import msgspec

from millpond.times import Progress
from millpond.wire.base import Count, ResidentId
from millpond.wire.dedups import DedupSpec
from millpond.wire.groups import GroupSpec, TransactionWork
from millpond.wire.joins import JoinSpec
from millpond.wire.programs import MigrationWork, ProgramSpec, ProgramWork
from millpond.wire.states import RowsWork, StateSpec
from millpond.wire.windows import WindowSpec, WindowWork

Spec = StateSpec | GroupSpec | WindowSpec | JoinSpec | DedupSpec | ProgramSpec
Work = RowsWork | TransactionWork | WindowWork | ProgramWork | MigrationWork


class Resident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A resident as containers learn of it. `born` tells it from an earlier one of the same name."""

    spec: Spec
    born: Count
    fetch_progress: Progress
    final_below: Progress
    epochs: Count = 0
    """How many of its epochs whoever recovers it has, all of them decided."""

    @property
    def id(self) -> ResidentId:
        return ResidentId(f"{self.spec.name}.{self.born}")
