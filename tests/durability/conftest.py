from __future__ import annotations

import math

import pytest

import millpond.coordinator.tidying


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator tidies up when it is told to, not when time has passed: a history is the same every time."""
    monkeypatch.setattr(millpond.coordinator.tidying, "TIDY_S", math.inf)
