"""`make cluster`: all of it starts, serves, outlives the loss of a daemon, and ends with Ctrl-C; nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from magnetar.client import connect
from support.local_cluster import LocalCluster

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, pytest.mark.real]


async def test_it_serves_comes_back_and_leaves_nothing(tmp_path: Path) -> None:
    local = LocalCluster(tmp_path)
    with local:
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
