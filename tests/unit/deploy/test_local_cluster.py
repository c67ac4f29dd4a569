"""`make cluster`: the command lines of its daemons are right, and what is in its way is said in one line."""

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import honcho.manager
import pytest
import run_all
from members import Cluster, WrongState

from magnetar.cli.wiring.flags import parse_flags
from magnetar.cli.wiring.settings import DaemonSettings, ServiceSettings, SettingSources, service_settings

DEPLOY = Path(__file__).parents[3] / "deploy" / "cluster"


def settings_of(cluster: Cluster) -> Iterator[tuple[str, ServiceSettings]]:
    for member in cluster.members():
        if member.kind != "zookeeper":
            command, *rest = cluster.arguments(member)
            yield (
                member.name,
                service_settings(SettingSources(flags=parse_flags(command, rest).sections), command),
            )


def test_the_daemons_have_good_settings_and_ports_of_their_own(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, 100)
    for name, settings in settings_of(cluster):
        member = next(member for member in cluster.members() if member.name == name)
        own = settings.daemon.bookie_port if member.kind == "bookie" else settings.daemon.port
        assert (own, settings.daemon.http_port) == (member.port, member.http_port)
        assert settings.daemon.data == str(tmp_path / name)
    ports = [port for member in Cluster(tmp_path, 9, 0).members() for port in member.ports]
    assert len(set(ports)) == len(ports) == 3 * 3 + 3 * 2 + 9 * 2


def test_every_broker_is_named_and_in_the_service_url(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 3, 0)
    names = [settings.broker.name for name, settings in settings_of(cluster) if name.startswith("broker")]
    assert names == ["broker-1", "broker-2", "broker-3"]
    assert cluster.service_url == "magnetar://127.0.0.1:7650,127.0.0.1:7651,127.0.0.1:7652"
    assert cluster.metadata == "zk://127.0.0.1:2181,127.0.0.1:2182,127.0.0.1:2183/magnetar"


def test_the_servers_of_the_ensemble_know_each_other(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, 10)
    second = cluster.of_kind("zookeeper")[1]
    path = Path(cluster.command(second)[-1])
    text = path.read_text()
    assert (path.parent / "myid").read_text() == "2"
    assert "clientPort=2192\n" in text
    for number in (1, 2, 3):
        assert f"server.{number}=127.0.0.1:{2890 + number}:{2990 + number}\n" in text


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"CLUSTER_BROKERS": "0"}, "BROKERS=0 is not a number from 1 to 9"),
        ({"CLUSTER_BROKERS": "many"}, "BROKERS=many is not a number"),
        ({"CLUSTER_PORTS": "-1"}, "CLUSTER_PORTS=-1 is not a number"),
    ],
)
def test_wrong_numbers_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(WrongState, match=words):
        Cluster.of_environment(environment)


def test_nobody_is_killed_who_may_still_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: on a busy machine the drains took more than honcho's 5 s, and it killed what was left of the cluster."""
    monkeypatch.setattr("honcho.command.main", lambda: None)
    monkeypatch.setattr("honcho.manager.KILL_WAIT", 5)
    run_all.main()
    assert 2 * DaemonSettings().drain_s < honcho.manager.KILL_WAIT, "brokers, and then bookies"


def check(data: Path, offset: int, **environment: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "CLUSTER_DATA": str(data), "CLUSTER_PORTS": str(offset), **environment}
    line = [sys.executable, str(DEPLOY / "local.py"), "check"]
    return subprocess.run(line, capture_output=True, text=True, env=given, timeout=60)


def refusal(data: Path, offset: int, **environment: str) -> str:
    done = check(data, offset, **environment)
    assert done.returncode == 78, done
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.real
def test_what_is_in_the_way_is_said_in_one_line(tmp_path: Path) -> None:
    if shutil.which("java") is None:
        pytest.skip("no Java")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        offset = taken.getsockname()[1] - 3182  # the second bookie's
        line = refusal(tmp_path / "data", offset)
        assert f"{taken.getsockname()[1]} of bookie-2" in line
        assert "CLUSTER_PORTS" in line
    (tmp_path / "file").write_text("")
    assert "see CLUSTER_DATA" in refusal(tmp_path / "file" / "data", 20_000)
    assert "there is no Java on this machine" in refusal(tmp_path, 20_000, PATH="/nowhere")


@pytest.mark.real
def test_a_daemon_that_is_not_there_cannot_be_stopped(tmp_path: Path) -> None:
    for name, words in (("bookie-9", "there is no daemon bookie-9"), ("bookie-2", "start the cluster")):
        line = [sys.executable, str(DEPLOY / "local.py"), "stop", name]
        given = {**os.environ, "CLUSTER_DATA": str(tmp_path)}
        done = subprocess.run(line, capture_output=True, text=True, env=given, timeout=60)
        assert (done.returncode, words in done.stderr) == (78, True)


@pytest.mark.real
def test_a_daemon_is_found_from_a_shell_that_knows_no_numbers(tmp_path: Path) -> None:
    """Regression: of a cluster of three brokers, or on other ports, some daemons could not be stopped."""
    if shutil.which("java") is None:
        pytest.skip("no Java")
    assert check(tmp_path, 20_000, CLUSTER_BROKERS="3").returncode == 0
    given = {name: value for name, value in os.environ.items() if not name.startswith("CLUSTER_")}
    line = [sys.executable, str(DEPLOY / "local.py"), "stop", "broker-3"]
    given["CLUSTER_DATA"] = str(tmp_path)
    done = subprocess.run(line, capture_output=True, text=True, env=given, timeout=60)
    assert "broker-3 is not running" in done.stderr
