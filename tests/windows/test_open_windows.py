"""What is open is told as of one epoch, whatever comes while it is read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import millpond as mp
from millpond.container.holdings.window import WindowHolding
from millpond.errors import Unavailable
from millpond.pond.window import READS_MAX
from millpond.testing import LossyFiles
from millpond.testing.local import LocalPond

KEYS = 50


@pytest.mark.parametrize("by_key", [False, True])
def test_an_epoch_that_comes_while_open_windows_are_read(
    monkeypatch: pytest.MonkeyPatch, by_key: bool
) -> None:
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    window = pond.window("w", key="k long", window=mp.tumbling(100), aggregate={"rows": mp.count()})
    over = window.over(key="k", at="t")
    rows = pa.table({"k": list(range(KEYS)), "t": [1] * KEYS})
    over(rows, 0)
    asks = "ask_each" if by_key else "read"
    ask = getattr(window._client, asks)
    disturbing = [1, 2]

    def disturbed(*message: Any) -> Any:
        answer = ask(*message)
        if disturbing:
            with monkeypatch.context() as undisturbed:  # an epoch asks for what it fired in the same way
                undisturbed.setattr(window._client, asks, ask)
                over(rows, disturbing.pop(0))
        return answer

    monkeypatch.setattr(window._client, asks, disturbed)
    result = window.now(list(range(KEYS)) if by_key else None)
    assert disturbing == []
    assert result["rows"].to_pylist() == [3] * KEYS, "as of the last epoch, which nothing disturbed"
    disturbing += range(3, 3 + READS_MAX)
    with pytest.raises(Unavailable, match="an epoch came in between") as caught:
        window.now(list(range(KEYS)) if by_key else None)
    assert "fewer keys" in (caught.value.hint or "")
    assert disturbing == []
    pond.validate()


@pytest.mark.parametrize("began_before", [False, True])
@pytest.mark.parametrize("by_key", [False, True])
def test_while_an_epoch_becomes_visible_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, by_key: bool, began_before: bool
) -> None:
    pond = LocalPond(LossyFiles(), containers=2, slices=4)
    window = pond.window("w", key="k long", window=mp.tumbling(100), aggregate={"rows": mp.count()})
    over = window.over(key="k", at="t")
    rows = pa.table({"k": list(range(KEYS)), "t": [1] * KEYS})
    over(rows, 0)
    before, apply = window.progress(), WindowHolding.apply
    containers, told = [], []

    def halfway(self: WindowHolding, ready: Any) -> int:
        containers.append(self)
        if len(containers) == 2:
            with pytest.raises(Unavailable) as caught:
                window.now(list(range(KEYS)) if by_key else None)
            told.append(caught.value.message)
        return apply(self, ready)

    with monkeypatch.context() as patch:
        patch.setattr(WindowHolding, "apply", halfway)
        if began_before:
            patch.setattr(window, "_settled", lambda: before)
        over(rows, 1)
    assert len(containers) == 2
    assert ("came in between" if began_before else "is decided, and was not visible") in told[0]
    assert window.now()["rows"].to_pylist() == [2] * KEYS
    pond.validate()
