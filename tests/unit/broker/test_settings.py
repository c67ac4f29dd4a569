"""Settings that cannot be are refused with one sentence that names the setting."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from magnetar.broker import BrokerSettings
from magnetar.broker.settings import _ZERO
from magnetar.proto.errors import InvalidSetting

NUMBERS = [
    field.name
    for field in fields(BrokerSettings)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool)
]


@pytest.mark.parametrize("name", NUMBERS)
def test_no_number_is_negative_and_only_some_are_zero(name: str) -> None:
    bad: dict[str, Any] = {name: -1}
    with pytest.raises(InvalidSetting, match=name):
        BrokerSettings(**bad)
    if name in _ZERO:
        BrokerSettings(**(bad | {name: 0}))
    else:
        with pytest.raises(InvalidSetting, match=name):
            BrokerSettings(**(bad | {name: 0}))


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (
            {"min_ledger_age_ms": 2, "max_ledger_age_ms": 1},
            "min_ledger_age_ms=2 must not exceed max_ledger_age_ms=1",
        ),
        # Regression: a broker /brokers/a/b ran, and nobody found it.
        ({"name": "a/b"}, "broker setting name is 'a/b'; it must be a plain name"),
        ({"name": ""}, "broker setting name is ''; it must be a plain name"),
        ({"tail_cache_share": 1.0}, "tail_cache_share is a share: it must be less than 1"),
        ({"max_ledger_entries": 1 << 43}, "max_ledger_entries must not exceed"),
        ({"unreadable_entry_policy": "ignore"}, "must be 'stop' or 'skip', not 'ignore'"),
    ],
)
def test_settings_that_cannot_be_together(bad: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSetting, match=said):
        BrokerSettings(**bad)
