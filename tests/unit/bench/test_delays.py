"""`python -m bench delays` calls a broker's parts itself: it has to follow them."""

from __future__ import annotations

import pytest
from bench import delays


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RATE": 10_000, "DELAY_MS": 100, "SPREAD_MS": 100, "QUIET_S": 0.1}.items():
        monkeypatch.setattr(delays, name, value)
    assert delays.main(["--seconds", "0.3", "--pending", "2000"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("100.0% delivered") == 4  # three that are delayed, and one beside them that is not
    assert "its index is whole" in printed
