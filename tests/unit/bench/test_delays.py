"""`python -m bench delays` calls a broker's parts itself: it has to follow them."""

from __future__ import annotations

import pytest
from bench import delays


def test_every_case_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(delays, "RATE", 2_000)
    assert delays.main(["--seconds", "0.5", "--pending", "2000"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("100.0% delivered") == 3
    assert "its index is whole" in printed
