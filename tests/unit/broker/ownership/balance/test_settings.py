"""Settings: what does not fit is named, with a value that would."""

from typing import Any

import pytest

from magnetar.broker.ownership.balance import BalanceSettings
from magnetar.proto.errors import InvalidSetting
from magnetar.runtime.settings import load_settings


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"balance_interval_s": 0}, "balance_interval_s=0 must be above 0, e.g. balance_interval_s=30.0"),
        ({"move_cooldown_s": -1}, "move_cooldown_s=-1 must not be negative"),
        ({"move_cooldown_s": 1e9}, "move_cooldown_s=1000000000.0 must be at most a day"),
        ({"shed_threshold": 1.5}, "shed_threshold=1.5 is a share"),
        ({"shed_threshold": float("nan")}, "shed_threshold=nan must be above 0"),
        ({"overload": 0.1}, "overload=0.1 must be above shed_threshold=0.15"),
        ({"load_settle_s": 90.0}, "load_settle_s=90.0 must be below shed_rounds"),
        ({"max_moves_per_round": 5}, "max_moves_per_broker=10 must not exceed max_moves_per_round=5"),
        ({"max_bundles": 0}, "max_bundles=0 must be above 0"),
        ({"split_messages_per_s": -3.0}, "split_messages_per_s=-3.0 must be above 0"),
    ],
)
def test_what_does_not_fit_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        BalanceSettings(**given)
    assert words in caught.value.message


def test_they_are_read_like_those_of_a_daemon() -> None:
    environment = {
        "MAGNETAR_BALANCE_MOVE_COOLDOWN_S": "5m",
        "MAGNETAR_BALANCE_DEDICATED_GROUPS": "gold,silver",
    }
    loaded = load_settings(BalanceSettings, section="balance", environment=environment)
    assert loaded.value.move_cooldown_s == 300
    assert loaded.value.dedicated_groups == ("gold", "silver")
