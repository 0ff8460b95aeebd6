"""Certificates of containers are renewed, and one that does not answer is not sent one at every turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.coordinator import passes
from millpond.coordinator.passes import TRIED_AGAIN_S, Passes
from millpond.errors import Unavailable
from millpond.wire.authority import LIFE_S
from millpond.wire.base import Term


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def test_a_container_that_does_not_answer_is_sent_a_certificate_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(passes, "time", clock)
    issued = Passes(str(tmp_path), "s" * 43)
    issued.container(0, Term(1), "127.0.0.1")
    told: list[float] = []

    def tell(container: int, message: Any) -> None:
        told.append(clock.now)
        raise Unavailable("it has left", address="")

    issued.maintain(tell)
    assert not told, "it is new"
    clock.now += LIFE_S["container"]
    for _ in range(60):
        issued.maintain(tell)
        clock.now += TRIED_AGAIN_S / 20
    assert len(told) == 3
    issued.close()
