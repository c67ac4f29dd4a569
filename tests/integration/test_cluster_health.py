"""/health/ready of real daemons, while what they need is taken away and given back."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.service_process import ServiceProcess

from support.forked_commands import run_magnetar
from support.zookeeper import ensemble_or_skip

pytestmark = [pytest.mark.timeout(180), pytest.mark.integration, pytest.mark.real]
SESSION = ("--set", "daemon.session_timeout_s=2", "--set", "repair.session_timeout_s=2")


def ready(process: ServiceProcess) -> tuple[int, list[str]]:
    """The status, and the names of the reasons."""
    url = f"http://127.0.0.1:{process.ports['http']}/health/ready"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, list(json.load(answer)["reasons"])
    except urllib.error.HTTPError as refused:
        return refused.code, list(json.load(refused)["reasons"])


def wait(process: ServiceProcess, wanted: tuple[int, list[str]]) -> None:
    deadline = time.monotonic() + 40
    while (found := ready(process)) != wanted:
        assert time.monotonic() < deadline, (process.command, found, process.errors())
        time.sleep(0.05)


def live(process: ServiceProcess) -> bool:
    url = f"http://127.0.0.1:{process.ports['http']}/health/live"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return bool(answer.status == 200)


def test_what_is_missing_is_told_and_its_return_is_noticed(tmp_path: Path) -> None:
    with ensemble_or_skip(tmp_path / "zookeeper") as ensemble, ExitStack() as stack:
        ensemble.start()
        url = f"{ensemble.url}/cluster"

        def daemon(command: str, name: str, *arguments: str) -> ServiceProcess:
            line = ["--metadata", url, *SESSION, *arguments]
            data = None if command == "autorecovery" else tmp_path / name
            process = ServiceProcess(data, command=command, arguments=line)
            stack.callback(process.kill)
            process.start()
            return process

        run_magnetar("cluster", "init", "--metadata", url).check_returncode()
        bookies = [daemon("bookie", name, "--id", name) for name in ("b1", "b2")]
        quorums = [f"broker.{name}=2" for name in ("ensemble_size", "write_quorum", "ack_quorum")]
        broker = daemon("broker", "broker", *(part for quorum in quorums for part in ("--set", quorum)))
        repairs = daemon("autorecovery", "repairs")
        everybody = [*bookies, broker, repairs]
        for process in everybody:
            wait(process, (200, []))
        bookies[1].stop()
        wait(broker, (503, ["bookies"]))
        assert live(broker)
        bookies[1].start()
        wait(broker, (200, []))
        ensemble.servers[0].pause()
        wait(bookies[0], (503, ["unregistered"]))
        wait(repairs, (503, ["session"]))
        assert live(bookies[0])
        assert live(repairs)
        ensemble.servers[0].resume()
        wait(bookies[0], (200, []))
        wait(repairs, (200, []))
