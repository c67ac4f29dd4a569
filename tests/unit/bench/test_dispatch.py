"""`python -m bench dispatch` calls a broker's parts itself: it has to follow them."""

from __future__ import annotations

import pytest
from bench import dispatch


def test_every_case_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "MANY", 3)
    monkeypatch.setattr(dispatch, "PUBLISHES", 300)
    assert dispatch.main(["--rounds", "1"]) == 0
    assert "Shared, 3 consumers with permits" in capsys.readouterr().out
    assert not caplog.records, "callbacks of the loop that fail, and tasks that begin anew"
