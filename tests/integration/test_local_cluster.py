"""`make cluster`: all of it starts, serves, outlives the loss of a daemon, and ends with Ctrl-C; nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnetar.client import connect
from support.local_cluster import RESTART, LocalCluster

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, pytest.mark.real]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """The last test ends it."""
    with LocalCluster(tmp_path_factory.mktemp("local")) as local:
        yield local


async def test_it_stops_at_what_does_not_come_back(local: LocalCluster) -> None:
    stop = RESTART[1].replace(" restart ", " stop ")
    done = await asyncio.to_thread(
        local.rolling_restart, "--command", stop, "--only", "bookie", "--timeout", "3"
    )
    assert done.returncode == 1
    assert "bookie bookie-1 was restarted and is not ready after 3 s" in done.stderr
    done = await asyncio.to_thread(local.rolling_restart, *RESTART, "--only", "bookie-2", "--timeout", "2")
    assert done.returncode == 1
    assert "bookie bookie-2 is not stopped: bookie bookie-1 is lost, for 2 s" in done.stderr
    await asyncio.to_thread(local.control, "start", "bookie-1")
    for arguments, words in (
        ((), "say how a daemon is restarted"),
        (("--via", "upstart"), "--via systemd or --via kubernetes"),
        (("--command", "false"), "`false` ended with code 1; nothing else was restarted"),
        (("--command", "restart {nam}"), "may have {name}, {kind}, {host}, {port}"),
        ((*RESTART, "--only", "bookie-9"), "there is no daemon bookie-9 in this cluster"),
    ):
        done = await asyncio.to_thread(local.rolling_restart, *arguments)
        assert (done.returncode != 0, words in done.stderr) == (True, True), (arguments, done.stderr)


async def test_it_serves_comes_back_and_leaves_nothing(local: LocalCluster) -> None:
    output = local.output()
    for member in local.cluster.members():
        assert f"{member.name} " in output
        assert f"127.0.0.1:{member.port}" in output
    assert f"service URL   {local.url}" in output
    async with connect(local.url) as client, client.create_producer("orders") as producer:
        await producer.send(b"0")
        killed = daemon_of(local, "bookie-2")
        os.kill(killed, signal.SIGKILL)
        await producer.send(b"1")
        while "bookie-2 ended with code -9; it is started again" not in local.output():
            await asyncio.sleep(0.05)
        await asyncio.to_thread(local.control, "restart", "bookie-1")
        await producer.send(b"2")
        await asyncio.to_thread(local.control, "restart", "broker-1")
        await producer.send(b"3")
        async with client.create_reader("orders", start="earliest") as reader:
            assert [(await reader.receive(timeout=20)).value for _ in range(4)] == [
                b"0",
                b"1",
                b"2",
                b"3",
            ]
    second = await asyncio.to_thread(local._run, "check")
    assert "a cluster runs on the data" in second.stderr
    assert await asyncio.to_thread(local.stop) == 130
    assert local.processes() == []
    output = local.output()
    assert "did not stop" not in output
    # What stands on another stops before it.
    ends = [output.find(f"{name} stopped (rc=0)") for name in ("broker.1", "bookie.1", "zookeeper.1")]
    assert -1 not in ends, output
    assert ends == sorted(ends)


def daemon_of(local: LocalCluster, name: str) -> int:
    """The process that the supervisor of this daemon runs."""
    supervisor = int((local.cluster.data / f"{name}.pid").read_text())
    (child,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(child)
