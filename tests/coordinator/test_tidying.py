"""What cannot be removed now is tried again, and stops nobody."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from millpond.errors import StageLost
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond
from millpond.wire.house import LetGo


def test_a_container_that_has_heard_of_a_slice_since_lets_go_later() -> None:
    pond = LocalPond(LossyFiles(), "/pond", 2, 4)
    coordinator = pond.coordinator
    state = pond.state("s", key="long", value="long")
    feed = state.update(key="k", at="at", value="v", name="feed")
    feed(pa.table({"k": list(range(20)), "at": [10] * 20, "v": [1] * 20}), 0)
    containers = coordinator._containers
    ask = containers.ask
    refused: list[int] = []

    def refuse(container: int, message: Any) -> Any:
        if isinstance(message, LetGo):
            refused.append(container)
            raise StageLost("this came too late", container=container)
        return ask(container, message)

    containers.ask = refuse
    coordinator._checkpoint_and_tidy()
    assert refused
    assert coordinator._tidying._tidied is None
    containers.ask = ask
    coordinator._tidying.tidy()
    assert coordinator._tidying._tidied is not None
