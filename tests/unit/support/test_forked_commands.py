"""A forked command is to its test what one is that `subprocess` starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.service_process import ServiceProcess

from support.forked_commands import run_magnetar, spawn

pytestmark = pytest.mark.real


def test_exit_codes_streams_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = run_magnetar("standalone", "--port")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "magnetar: --port needs a value: --port N\n"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text("[daemon]\nport = 1111\n")
    environment = {**os.environ, "MAGNETAR_DAEMON_HTTP_PORT": "2222"}
    shown = run_magnetar("config", "--config", "a.toml", environment=environment)
    assert shown.returncode == 0, shown.stderr
    assert "port = 1111" in shown.stdout
    assert "http_port = 2222" in shown.stdout


def test_a_daemon_is_killed_and_stopped(tmp_path: Path) -> None:
    service = ServiceProcess(tmp_path / "data")
    with service:
        assert type(service._process).__name__ == "ForkedProcess"
        assert {"daemon", "journal-writer", "storage-helper"} == set(service.processes())
        service.kill("daemon")
        assert (service.running, service.returncode) == (False, -9)
        service.start()
    assert service.returncode == 0


def test_what_the_server_has_not_imported_is_started_as_ever(tmp_path: Path) -> None:
    with (tmp_path / "errors").open("wb") as errors:
        line = [sys.executable, "-c", "print(7)"]
        plain = spawn(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=os.environ)
        assert plain.communicate() == (b"7\n", None)
        line = [sys.executable, "-m", "magnetar.cli.main", "--help"]
        other = {**os.environ, "LD_PRELOAD": ""}
        plain = spawn(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=other)
    assert isinstance(plain, subprocess.Popen)
    assert plain.communicate()[0]
