"""What whoever waits for moves is told, whatever the pond still remembers of them."""

from __future__ import annotations

from typing import Any

import pytest

from millpond.errors import Unavailable
from millpond.pond.scaling import await_moves
from millpond.wire.base import SliceId
from millpond.wire.moves import AskMoves, MoveInfo, Moves, Stage


def move(number: int, stage: Stage) -> MoveInfo:
    return MoveInfo(number, [SliceId(number)], 0, 1, "move", stage, 0.0, 0.0, error=stage)


class Client:
    """Answers one after the other."""

    def __init__(self, *answers: list[MoveInfo]) -> None:
        self.answers = list(answers)

    def call(self, message: AskMoves) -> Moves:
        assert message.ids == [1, 2]
        return Moves(self.answers.pop(0))


def awaited(*answers: list[MoveInfo]) -> list[MoveInfo]:
    client: Any = Client(*answers)
    return await_moves(
        client, Moves([move(1, "waiting"), move(2, "waiting")]), "moving slices", progress=False
    )


def test_one_that_failed_and_was_forgotten_is_told() -> None:
    with pytest.raises(Unavailable, match="1 of 2 moves failed"):
        awaited([move(1, "failed"), move(2, "copying")], [move(2, "moved")])


def test_one_that_was_forgotten_before_anybody_looked_is_not_taken_for_moved() -> None:
    with pytest.raises(Unavailable, match="what became of 1 of 2 moves") as raised:
        awaited([move(1, "copying"), move(2, "copying")], [move(2, "moved")])
    assert raised.value.hint


def test_all_are_told_that_moved() -> None:
    moved = awaited([move(1, "moved"), move(2, "copying")], [move(2, "moved")])
    assert [each.stage for each in moved] == ["moved", "moved"]
