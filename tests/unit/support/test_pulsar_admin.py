"""What `make test-pulsar-admin` compares, and when it is skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pulsar_admin import golden
from pulsar_admin.distribution import Missing, distribution
from pulsar_admin.known import explained
from pulsar_admin.run import report


def noted(status: int = 200, answer: Any = None, seen: str | None = None, exit: int = 0) -> dict[str, Any]:
    """As the recorder notes it."""
    answer = {"messageTTL": 120, "msgInCounter": 5} if answer is None else answer
    exchange = {"method": "GET", "path": "/admin", "body": None, "status": status, "answer": answer}
    seen = '{"messageTTL": 120, "msgInCounter": 5}' if seen is None else seen
    return {"command": "$ one", "http": [exchange], "seen": seen, "exit": exit}


GOLDEN = golden.row(noted())


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (noted(status=404, answer={"reason": "no"}), "status: 404, not 200, of GET /admin"),
        (noted(answer={"messageTTL": 120}), "answer.msgInCounter is missing"),
        (noted(seen='{"messageTTL": 60, "msgInCounter": 5}'), "printed.messageTTL is 60, not 120"),
        (noted(seen="Exception in thread main"), "printed is ['Exception in thread main'], not"),
        (noted(exit=1), "exit code: 1, not 0"),
        ({**noted(), "http": []}, "requests: [], not [["),
    ],
)
def test_each_difference_is_noticed(differs: dict[str, Any], said: str) -> None:
    assert golden.compared(GOLDEN, noted()) == []
    assert any(one.startswith(said) for one in golden.compared(GOLDEN, differs))


def test_what_is_of_one_run_is_none() -> None:
    later = noted(
        answer={"messageTTL": 120, "msgInCounter": 9}, seen='{"messageTTL": 120, "msgInCounter": 9}\nGoodbye!'
    )
    assert golden.compared(GOLDEN, later) == []


def test_of_an_error_the_tool_prints_the_reason_that_was_answered() -> None:
    pulsar = golden.row(
        noted(404, {"reason": "Tenant not found"}, "Tenant not found\n\nReason: Tenant not found")
    )
    ours = noted(404, {"reason": "there is no acme"}, "there is no acme\n\nReason: there is no acme")
    assert golden.compared(pulsar, ours) == []
    other = noted(404, {"reason": "there is no acme"}, "HTTP 404\n\nReason: HTTP 404")
    assert "another reason" in golden.compared(pulsar, other)[0]


def test_what_the_table_does_not_explain_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert explained("brokers version", "printed[0] is '0.1.0', not '4.0.6'") is not None
    assert explained("brokers version", "status: 500, not 200, of GET /version: []") is None
    monkeypatch.setattr(golden, "rows", lambda: [GOLDEN])
    assert report([noted(exit=1)]) == 1
    assert "1 commands, 0 the same, 0 differ as the table says, 1 unexplained" in capsys.readouterr().out


def test_without_java_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Missing, match="there is no `java` here; pulsar-admin needs Java 17"):
        distribution(tmp_path)
