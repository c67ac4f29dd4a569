"""Sections, what is derived from what, and which source wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnetar.cli.wiring.settings import (
    DaemonSettings,
    SettingSources,
    load_all,
    parse_bookies,
    service_settings,
)
from magnetar.proto.errors import InvalidSetting


def test_the_bookie_lives_below_the_data_directory() -> None:
    settings = service_settings(SettingSources(flags={"daemon": {"data": "/x"}}))
    assert settings.bookie.data_directory == "/x/bookie"
    assert settings.metadata_directory == "/x/metadata"
    assert settings.lock_path == "/x/LOCK"


def test_a_given_setting_is_not_derived(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[bookie]\ndata-directory = "/from-file"\n')
    assert service_settings(SettingSources(str(file))).bookie.data_directory == "/from-file"
    environment = {"MAGNETAR_BOOKIE_DATA_DIRECTORY": "/from-environment"}
    assert (
        service_settings(SettingSources(str(file), environment)).bookie.data_directory == "/from-environment"
    )


def test_the_source_of_a_derived_setting_says_so() -> None:
    bookie = load_all(SettingSources())[1]
    assert bookie.sources["data_directory"] == "derived"


def test_larger_messages_make_room_for_themselves() -> None:
    settings = service_settings(SettingSources(flags={"daemon": {"max_message_bytes": "100MiB"}}))
    entry = settings.bookie.max_entry_bytes
    assert entry > 100 << 20
    assert settings.bookie.write_cache_bytes >= 2 * entry
    assert settings.bookie.journal_ring_bytes > entry


def test_batches_become_entries_as_far_as_bookies_take_them() -> None:
    assert service_settings(SettingSources()).broker.attach_min_bytes == 12 << 20
    settings = service_settings(SettingSources(flags={"bookie": {"max_entry_bytes": "6MiB"}}))
    assert settings.broker.attach_min_bytes == 5 << 20


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        ({}, "magnetar://127.0.0.1:7650"),
        ({"host": "0.0.0.0", "advertised_host": "mq.example"}, "magnetar://mq.example:7650"),
        ({"host": "::1", "port": "1"}, "magnetar://[::1]:1"),
    ],
)
def test_what_clients_are_told(flags: dict[str, str], url: str) -> None:
    assert service_settings(SettingSources(flags={"daemon": flags})).broker.service_url == url


def test_a_wildcard_is_never_told_to_clients() -> None:
    assert DaemonSettings(host="0.0.0.0").host_for_clients not in ("", "0.0.0.0")


def test_a_variable_without_its_section_is_told(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"MAGNETAR_PORT": "7001", "MAGNETAR_HTTP_PORT": "tcp://10.0.0.1:8080", "MAGNETAR_URL": "x"}
    assert service_settings(SettingSources(environment=environment)).daemon.port == 7650
    (record,) = caplog.records
    assert "MAGNETAR_PORT is no setting; did you mean MAGNETAR_DAEMON_PORT?" in record.getMessage()


def test_an_unknown_section_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text("[boker]\nname = 1\n")
    with pytest.raises(InvalidSetting, match=r"\[boker\].*did you mean broker"):
        service_settings(SettingSources(str(file)))


def test_bookies_by_address_or_by_id() -> None:
    assert parse_bookies(["h:1", "b2=h:2", "[::1]:3"]) == {
        "h:1": ("h", 1),
        "b2": ("h", 2),
        "[::1]:3": ("::1", 3),
    }
    with pytest.raises(InvalidSetting, match="twice"):
        parse_bookies(["h:1", "h:1"])
    with pytest.raises(InvalidSetting, match="host:port"):
        parse_bookies(["nonsense"])


def test_a_bookie_leaves_the_http_port_to_a_broker_on_the_same_host() -> None:
    assert service_settings(SettingSources(), "bookie").daemon.http_port == 8000
    assert service_settings(SettingSources(), "broker").daemon.http_port == 8080
    flags = {"daemon": {"http_port": 9}}
    assert service_settings(SettingSources(flags=flags), "bookie").daemon.http_port == 9


def test_no_limit_can_be_said_in_text_where_a_file_can_say_it() -> None:
    flags = {"broker": {"retention_ms": "-1", "retention_bytes": " -1 "}}
    broker = service_settings(SettingSources(flags=flags)).broker
    assert (broker.retention_ms, broker.retention_bytes) == (-1, -1)
    for section, setting in (
        ("broker", "max_ledger_bytes"),
        ("ledger", "add_timeout_s"),
        ("daemon", "drain_s"),
    ):
        with pytest.raises(InvalidSetting, match=setting):
            service_settings(SettingSources(flags={section: {setting: "-1"}}))
