"""What messages say of themselves, and what is refused before anyone acts on it."""

from __future__ import annotations

import msgspec
import pytest

from millpond.code.capture import Code
from millpond.errors import BadMessage
from millpond.wire import base, epochs, house, questions, states
from millpond.wire.codec import decode, encode


@pytest.mark.parametrize("kind", ["banana", "Long", "date"])
def test_a_kind_of_time_that_there_is_not_is_refused(kind: str) -> None:
    report = questions.Report("s", "feed", 5, None, "long")
    assert decode(encode(report)) == report
    raw = msgspec.msgpack.decode(encode(report)) | {"time_kind": kind}
    with pytest.raises(BadMessage):
        decode(msgspec.msgpack.encode(raw))


def test_what_waits_for_files_or_for_epochs_may_take_long() -> None:
    for message in (
        *(house.Adopt, house.Confirm, house.Release, house.AddResident, house.DropResident),
        *(house.ForgetWriters, house.Checkpoint, house.CheckpointAll, house.OpenResident, house.Forget),
        *(epochs.Prepare, epochs.Apply, epochs.CommitEpoch),
    ):
        assert message.seconds == base.LONG_CALL_S, message


def test_a_question_brings_code_or_does_not() -> None:
    plain = states.Question("s", "latest")
    own = states.Question("s", "custom", Code("f", "def f(): ..."))
    assert (plain.brings_code, plain.seconds) == (False, base.CALL_S)
    assert (own.brings_code, own.seconds) == (True, base.LONG_CALL_S)
    assert plain.permitted - own.permitted == {"reader"}


def test_the_turn_after() -> None:
    turn = base.Turn(base.Epoch(3), 2)
    assert turn < turn.next_drain < turn.next_epoch
    assert (turn.next_drain, turn.next_epoch) == (base.Turn(base.Epoch(3), 3), base.Turn(base.Epoch(4)))
