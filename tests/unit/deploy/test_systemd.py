"""The systemd units: systemd accepts them, and what they say fits Magnetar."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest
from bench.service_process import ServiceProcess

from magnetar.cli.wiring.daemons import EXIT_USAGE, notify_supervisor
from magnetar.cli.wiring.flags import FLAGS
from magnetar.cli.wiring.settings import SettingSources, service_settings
from magnetar.runtime.lifecycle import EXIT_CONFIG, EXIT_FAILED
from support.daemon_lines import daemon_settings

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "deploy" / "systemd"


def unit(name: str) -> RawConfigParser:
    parser = RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=("#",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNITS / f"magnetar-{name}.service")
    return parser


def test_there_is_one_for_each_daemon() -> None:
    assert {path.name for path in UNITS.iterdir()} == {f"magnetar-{name}.service" for name in FLAGS}


@pytest.mark.parametrize("name", FLAGS)
def test_the_command_is_right_and_a_stop_has_time_to_hand_over(name: str) -> None:
    service = unit(name)["Service"]
    program, *line = shlex.split(service["ExecStart"])
    assert program == "/opt/magnetar/bin/magnetar"
    assert line[0] == name
    settings = daemon_settings(line, {})
    assert settings.daemon.drain_s < int(service["TimeoutStopSec"])
    if name != "autorecovery":
        assert settings.daemon.data.startswith("/var/lib/magnetar/")
        assert service["StateDirectory"] == "magnetar"
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["LimitNOFILE"]) >= 100_000


@pytest.mark.parametrize("name", FLAGS)
def test_what_a_restart_mends_is_restarted_and_nothing_else(name: str) -> None:
    service = unit(name)["Service"]
    assert service["Restart"] == "on-failure"
    left = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert left == {EXIT_USAGE, EXIT_CONFIG}
    assert EXIT_FAILED not in left


def test_the_settings_on_the_page_are_settings(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    files = re.findall(r"```toml\n# /etc/magnetar/(\w+)\.toml\n(.*?)```", page, re.DOTALL)
    for daemon, text in files:
        path = tmp_path / daemon
        path.write_text(text)
        settings = service_settings(SettingSources(str(path)), daemon)
        assert settings.daemon.host.startswith("10.0.0.")
    assert [daemon for daemon, _ in files] == ["bookie", "broker"]


def test_daemons_of_one_machine_have_data_and_http_ports_of_their_own() -> None:
    data, ports = [], []
    for name in ("bookie", "broker", "autorecovery"):
        settings = daemon_settings(shlex.split(unit(name)["Service"]["ExecStart"])[1:], {})
        ports.append(settings.daemon.http_port)
        data.append(settings.daemon.data)
    assert len(set(ports)) == 3
    assert data[0] != data[1]


@pytest.mark.real
def test_systemd_is_told_when_a_daemon_serves_and_when_it_stops(tmp_path: Path) -> None:
    assert all(unit(name)["Service"]["Type"] == "notify" for name in FLAGS)
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(path)
        listening.settimeout(20)
        service = ServiceProcess(tmp_path / "data", environment={"NOTIFY_SOCKET": path})
        try:
            service.start()
            assert listening.recv(100) == b"READY=1"
            assert service.stop() == 0
            assert listening.recv(100) == b"STOPPING=1"
        finally:
            if service.running:
                service.kill()
    for nobody in (path, "", "nonsense", "@nobody"):
        notify_supervisor(nobody, "READY=1")


def verify(*paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.real
def test_systemd_accepts_them(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    for path in UNITS.iterdir():
        text = path.read_text().replace(
            "/opt/magnetar/bin/magnetar", "/bin/true"
        )  # which is on every machine
        (tmp_path / path.name).write_text(text)
    done = verify(*sorted(tmp_path.iterdir()))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    wrong = tmp_path / "magnetar-wrong.service"
    wrong.write_text((tmp_path / "magnetar-broker.service").read_text().replace("RestartSec", "RestartAfter"))
    assert "RestartAfter" in verify(wrong).stderr
