"""Options of `magnetar topics policies` as people write them."""

from __future__ import annotations

import pytest

from magnetar.cli.policies import _text, changed_by
from magnetar.cli.session import EXIT_USAGE


def test_what_is_not_given_is_not_changed() -> None:
    assert changed_by(None, None, None, []) == {}
    assert changed_by("1h 30m", "10GB", "7d", ["a=90s", "b=infinite", "c=inherit"]) == {
        "retention_ms": 5_400_000,
        "retention_bytes": 10**10,
        "message_ttl_ms": 7 * 86_400_000,
        "subscription_ttl_ms": {"a": 90_000, "b": 0, "c": None},
    }
    assert changed_by("infinite", "Infinite", "infinite", []) == {
        "retention_ms": -1,
        "retention_bytes": -1,
        "message_ttl_ms": 0,
    }
    assert changed_by("inherit", "inherit", "0", []) == {
        "retention_ms": None,
        "retention_bytes": None,
        "message_ttl_ms": 0,
    }


@pytest.mark.parametrize("text", ["3", "", "three days", "-1d", "3y"])
def test_a_wrong_time_names_its_option(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    options: list[tuple[str | None, str | None, list[str]]] = [
        (text, None, []),
        (None, text, []),
        (None, None, [f"a={text}"]),
    ]
    for retention, ttl, subscription_ttls in options:
        with pytest.raises(SystemExit) as ended:
            changed_by(retention, None, ttl, subscription_ttls)
        assert ended.value.code == EXIT_USAGE
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors] == ["--retention", "--ttl", "--subscription-ttl"]


def test_values_are_shown_as_they_are_given() -> None:
    shown = {
        ("retention_ms", -1): "no limit",
        ("message_ttl_ms", 0): "off",
        ("retention_ms", 259_200_000): "3d",
        ("message_ttl_ms", 5_400_000): "90m",
        ("message_ttl_ms", 1_500): "1500ms",
        ("retention_bytes", 10**10): "10GB",
        ("retention_bytes", 10 << 30): "10GiB",
        ("retention_bytes", 1_234): "1234",
    }
    assert {key: _text(*key) for key in shown} == shown
