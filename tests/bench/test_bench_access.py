"""`millpond bench access` measures each way to the same rows."""

from __future__ import annotations

import pytest

from millpond.bench import access


@pytest.mark.long
def test_every_way_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "BATCH", 10_000)
    monkeypatch.setattr(access, "KEYS", 1_000)
    lines: list[str] = []
    results = access.run(True, lines.append)
    assert [result["system"] for result in results] == [
        "flight-tcp, nobody checked",
        "millpond-unix",
        "millpond-gate",
        "millpond-gate, reader",
        "flight-tls, no client's certificate",
        "millpond-tls",
        "millpond-tls, reader",
        "millpond-now",
        "millpond-now-unix",
        "millpond-now-gate",
        "millpond-now-gate, reader",
    ]
    for result in results:
        figures = [value for name, value in result.items() if name.endswith("_ms")]
        assert result["rows_per_s"] > 0
        assert len(figures) == 2
        assert 0 < figures[0] <= figures[1]
    assert len(lines) == 2
