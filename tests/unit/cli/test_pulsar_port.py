"""The port of Pulsar's protocol: whoever did not ask for it may do without."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace

import pytest

from magnetar.cli.wiring.daemons import _with_ports
from magnetar.cli.wiring.settings import ServiceSettings, SettingSources, service_settings


def on(port: int, *, given: bool) -> ServiceSettings:
    settings = service_settings(SettingSources(flags={"daemon": {"port": "7650"}}))
    return replace(settings, broker=replace(settings.broker, pulsar_port=port), pulsar_port_given=given)


def test_the_default_port_that_is_taken_is_left_out_and_a_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.WARNING):
        port = taken.getsockname()[1]
        found = _with_ports(on(port, given=False), "standalone", 8080).broker
    assert (found.pulsar_port, found.pulsar_url_for_clients) == (0, "")
    assert f"port {port} on 127.0.0.1 is in use" in caplog.text
    assert "--pulsar-port" in caplog.text


def test_a_port_that_was_given_stays_and_so_does_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert _with_ports(on(port, given=True), "standalone", 8080).broker.pulsar_port == port
    assert _with_ports(on(port, given=False), "standalone", 8080).broker.pulsar_port == port


@pytest.mark.parametrize(
    ("flags", "url", "given"),
    [
        ({}, "pulsar://127.0.0.1:6650", False),
        ({"daemon": {"host": "::1"}}, "pulsar://[::1]:6650", False),
        ({"daemon": {"advertised_host": "mq"}, "broker": {"pulsar_port": "6651"}}, "pulsar://mq:6651", True),
        ({"broker": {"pulsar_url": "pulsar://proxy:1"}}, "pulsar://proxy:1", False),
        ({"broker": {"pulsar_port": "0"}}, "", True),
    ],
)
def test_what_look_ups_answer(flags: dict[str, dict[str, str]], url: str, given: bool) -> None:
    settings = service_settings(SettingSources(flags=flags))
    assert (settings.broker.pulsar_url_for_clients, settings.pulsar_port_given) == (url, given)
