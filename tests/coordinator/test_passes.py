"""Certificates of containers are renewed, and one that does not answer is not sent one at every turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.coordinator import passes
from millpond.coordinator.members import Members
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


def none_ended(container: int, term: Term) -> bool:
    return False


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

    issued.maintain(tell, none_ended)
    assert not told, "it is new"
    clock.now += LIFE_S["container"]
    for _ in range(60):
        issued.maintain(tell, none_ended)
        clock.now += TRIED_AGAIN_S / 20
    assert len(told) == 3
    issued.close()


def test_what_a_container_had_to_show_is_revoked_when_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, by whatever way it ended: others are told, once; when it would have run out anyway they need not know."""
    clock = Clock()
    monkeypatch.setattr(passes, "time", clock)
    issued, members = Passes(str(tmp_path), "s" * 43), Members()
    told: dict[int, tuple[str, ...]] = {}
    shown: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def tell(container: int, message: Any) -> None:
        told[container] = message.revoked
        shown[container].append(message.bundle.serial)

    def starts(container: int, term: int) -> tuple[str, ...]:
        keys = issued.container(container, Term(term), "127.0.0.1")
        assert keys.bundle is not None
        shown[container].append(keys.bundle.serial)
        issued.maintain(tell, members.has_ended)
        members.started(container, Term(term))
        issued.maintain(tell, members.has_ended)
        return keys.revoked

    members.join([0, 1, 2])
    for container in (0, 1, 2):
        assert starts(container, container + 1) == ()
    clock.now += LIFE_S["container"] / 2
    issued.maintain(tell, members.has_ended)
    assert told == {0: (), 1: (), 2: ()}, "renewed: each has shown two by now"

    # One is relieved. Its successor is long in coming.
    members.ended(0)
    before = shown[0].copy()
    told.clear()
    issued.maintain(tell, members.has_ended)
    assert told == {1: tuple(before), 2: tuple(before)}
    told.clear()
    issued.maintain(tell, members.has_ended)
    assert told == {}
    assert starts(0, 4) == tuple(before)
    assert told == {}

    # One starts twice, the first of which never served; and one leaves for good.
    members.ended(1)
    issued.container(1, Term(5), "127.0.0.1")
    assert set(starts(1, 6)) > {*before, *shown[1][:-1]}
    members.leave(2)
    issued.maintain(tell, members.has_ended)
    assert set(told[0]) > {*before, *shown[2]}

    clock.now += LIFE_S["container"] + 1.0
    issued.maintain(tell, members.has_ended)
    told.clear()
    clock.now += LIFE_S["container"] / 2
    issued.maintain(tell, members.has_ended)
    assert told == {0: (), 1: ()}
    issued.close()
