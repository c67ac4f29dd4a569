"""Options of `magnetar topics policies` as people write them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from magnetar.cli.commands.brokers import brokers_app
from magnetar.cli.commands.objects import namespaces_app
from magnetar.cli.commands.policies import changed_by, changes, parameter, shown
from magnetar.cli.commands.topics import topics_app
from magnetar.cli.terminal.session import EXIT_USAGE
from magnetar.proto.policy_table import BY_POLICY, DESCRIBED
from support.policy_page import PAGE, page_with, table


def changed(**given: Any) -> dict[str, Any]:
    """What these options set, by the names of their parameters."""
    texts = [(row, given.pop(parameter(row), None)) for row in DESCRIBED]
    return changed_by(
        changes(row, text)
        for row, some in texts
        for text in ([] if some is None else some if row.by_subscription else [some])
    )


def test_what_is_not_given_is_not_changed() -> None:
    assert changed() == {}
    assert changed(
        retention="1h 30m",
        retention_size="10GB",
        ttl="7d",
        subscription_ttl=["a=90s", "b=infinite", "c=inherit"],
    ) == {
        "retention_ms": 5_400_000,
        "retention_bytes": 10**10,
        "message_ttl_ms": 7 * 86_400_000,
        "subscription_ttl_ms": {"a": 90_000, "b": 0, "c": None},
    }
    assert changed(retention="infinite", retention_size="Infinite", ttl="infinite") == {
        "retention_ms": -1,
        "retention_bytes": -1,
        "message_ttl_ms": 0,
    }
    assert changed(retention="inherit", retention_size="inherit", ttl="0") == {
        "retention_ms": None,
        "retention_bytes": None,
        "message_ttl_ms": 0,
    }


@pytest.mark.parametrize("text", ["3", "", "three days", "-1d", "3y"])
def test_a_wrong_time_names_its_option(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    options: list[dict[str, Any]] = [{"retention": text}, {"ttl": text}, {"subscription_ttl": [f"a={text}"]}]
    for given in options:
        with pytest.raises(SystemExit) as ended:
            changed(**given)
        assert ended.value.code == EXIT_USAGE
    errors = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in errors] == ["--retention", "--ttl", "--subscription-ttl"]


def test_values_are_shown_as_they_are_given() -> None:
    texts = {
        ("retention_ms", -1): "infinite",
        ("retention_ms", 0): "0",
        ("retention_bytes", 0): "0",
        ("message_ttl_ms", 0): "infinite",
        ("max_delivery_delay_ms", 0): "infinite",
        ("max_delayed_messages", 0): "infinite",
        ("deduplication", False): "off",
        ("retention_ms", 259_200_000): "3d",
        ("message_ttl_ms", 5_400_000): "90m",
        ("message_ttl_ms", 1_500): "1500ms",
        ("retention_bytes", 10**10): "10GB",
        ("retention_bytes", 10 << 30): "10GiB",
        ("retention_bytes", 1_234): "1234",
    }
    assert {key: shown(*key) for key in texts} == texts


def test_durability_as_people_write_it() -> None:
    assert changed(durability="3/3/2", minimum_write_quorum="2", flush="ASYNC") == {
        "ensemble_size": 3,
        "write_quorum": 3,
        "ack_quorum": 2,
        "minimum_write_quorum": 2,
        "flush": "async",
    }
    assert changed(durability="inherit", minimum_write_quorum="off", flush="inherit") == {
        "ensemble_size": None,
        "write_quorum": None,
        "ack_quorum": None,
        "minimum_write_quorum": 0,
        "flush": None,
    }
    assert shown("ensemble_size", 3) == "3"
    assert shown("flush", "async") == "async"
    assert shown("minimum_write_quorum", 2) == "2"
    assert shown("minimum_write_quorum", 0) == "off"
    for text, policy in (
        ("fast", "fast"),
        ("preferred:fast", "preferred:fast"),
        ("any", ""),
        ("inherit", None),
    ):
        assert changed(bookie_group=text) == {"bookie_group": policy}
    assert shown("bookie_group", "") == "any"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"durability": "3/3"},
            "--durability is '3/3'; want ensemble size, write quorum and ack quorum, as 3/3/2",
        ),
        ({"durability": "3/x/2"}, "--durability is '3/x/2'"),
        (
            {"minimum_write_quorum": "-1"},
            "--minimum-write-quorum is '-1'; want a number, off or inherit",
        ),
        ({"flush": "never"}, "--flush is 'never'; want sync, async or inherit"),
    ],
)
def test_wrong_durability_names_its_option(
    options: dict[str, str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        changed(**options)
    assert ended.value.code == EXIT_USAGE
    assert line in capsys.readouterr().err


def test_every_policy_is_an_option_of_its_levels_and_on_the_page() -> None:
    for app, level in ((topics_app, "topic"), (namespaces_app, "namespace"), (brokers_app, "broker")):
        (found,) = [one for one in app.registered_commands if one.name == "policies"]
        assert found.callback is not None
        options = {parameter(row) for row in DESCRIBED if level in row.levels}
        assert options <= inspect.signature(found.callback).parameters.keys(), level
    page = PAGE.read_text()
    assert page == page_with(table(), page), "`python -m support.policy_page` writes the page"
    assert all(f"`{policy}`" in page for policy in BY_POLICY)


def test_words_and_names_are_separated_by_commas(capsys: pytest.CaptureFixture[str]) -> None:
    assert changed(
        subscription_types="exclusive, key_shared",
        replication_clusters="east,west",
        schema_compatibility="full",
    ) == {
        "subscription_types": ["exclusive", "key_shared"],
        "replication_clusters": ["east", "west"],
        "schema_compatibility": "FULL",
    }
    assert changed(max_mark_delete_rate="0.5", publish_rate="infinite") == {
        "max_mark_delete_rate": 0.5,
        "publish_rate_messages": -1,
    }
    for policy, value, text in (
        ("subscription_types", ["shared", "failover"], "shared,failover"),
        ("replication_clusters", [], "none"),
        ("max_mark_delete_rate", 0.5, "0.5"),
        ("of a newer broker", 7, "7"),
    ):
        assert shown(policy, value) == text
    with pytest.raises(SystemExit):
        changed(subscription_types="any")
    assert (
        "--subscription-types is 'any'; want exclusive, shared, failover, key_shared or inherit"
        in capsys.readouterr().err
    )
