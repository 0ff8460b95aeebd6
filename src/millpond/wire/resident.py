"""What every kind of resident says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from millpond.wire.base import Name, SliceId


class ResidentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a resident of any kind says of itself; a kind adds what only its own holding and operators know.

    `kind` is the word for it, `plural` the word under which figures of all of them stand.
    """

    kind: ClassVar[str]
    plural: ClassVar[str]

    name: Name

    def places(self, slices: int) -> Sequence[SliceId]:
        """The slices that it lives in, of so many."""
        return [SliceId(number) for number in range(slices)]

    @property
    def runs_code(self) -> bool:
        """Whether its epochs run user code: they may take long, and end their container."""
        raise NotImplementedError

    @property
    def replays_code(self) -> bool:
        """Whether user code runs again when its log does: it may end whoever rebuilds its slices, too."""
        return self.runs_code

    @property
    def runs_rounds(self) -> bool:
        """Whether the containers that prepare an epoch of it send each other rows."""
        return False

    @property
    def span_kind(self) -> str:
        """The kind of time that its rules ask for; empty for any."""
        return ""
