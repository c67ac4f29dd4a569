"""The table that `make cluster` prints: who serves where, and what to do with it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

from members import BOOKIES, Cluster

from magnetar.cli.terminal.tables import print_table
from magnetar.cli.wiring.cluster_facts import bookie_facts, broker_facts
from magnetar.cli.wiring.metadata import open_store, system_rng
from magnetar.metadata.identity import cluster_instance
from magnetar.proto.errors import MagnetarError

WAIT_S = 60.0
POLL_S = 0.05


def show(cluster: Cluster, marker: Path, began: float) -> int:
    """Makes the metadata, waits for the daemons, prints the table, and stays until a signal comes."""
    signals = {signal.SIGTERM, signal.SIGINT}
    try:
        instance = asyncio.run(_all_there(cluster, marker))
    except (MagnetarError, TimeoutError) as error:
        print(f"make cluster: not all daemons came up in {WAIT_S:g} s: {error}")
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _print(cluster, instance, time.monotonic() - began)
    signal.sigwait(signals)
    return 0


async def _all_there(cluster: Cluster, marker: Path) -> str:
    async with asyncio.timeout(WAIT_S), open_store(cluster.metadata, WAIT_S, make_root=True) as store:
        instance = await cluster_instance(store, system_rng())
        marker.touch()  # noqa: ASYNC240 - nothing else runs in this loop
        while True:
            writable = sum(bookie["state"] == "writable" for bookie in await bookie_facts(store))
            ready = sum(broker["state"] == "ready" for broker in await broker_facts(store))
            if writable >= BOOKIES and ready >= cluster.brokers and _listening(cluster):
                return f"{instance:016x}"
            await asyncio.sleep(POLL_S)


def _listening(cluster: Cluster) -> bool:
    for broker in cluster.of_kind("broker"):
        try:
            socket.create_connection(("127.0.0.1", broker.port), timeout=1).close()
        except OSError:
            return False
    return True


def _print(cluster: Cluster, instance: str, seconds: float) -> None:
    rows = []
    for member in cluster.members():
        scheme = {"zookeeper": "zk", "bookie": "bookie", "broker": "magnetar"}[member.kind]
        pages = f"http://127.0.0.1:{member.http_port}/health" if member.http_port else ""
        rows.append((member.name, f"{scheme}://127.0.0.1:{member.port}", pages))
    magnetar = os.path.relpath(Path(cluster.python).parent / "magnetar")
    control = f"{os.path.relpath(cluster.python)} deploy/cluster/local.py"
    print(f"cluster {instance} serves after {seconds:.1f} s; data in {os.path.relpath(cluster.data)}")
    print_table("", ("daemon", "address", "health, and /metrics"), rows)
    print(f"service URL   {cluster.service_url}")
    print(f"metadata      {cluster.metadata}")
    print(f"produce       {magnetar} produce orders -m hello --url {cluster.service_url}")
    print(
        f"consume       {magnetar} consume orders -s billing --start earliest -n 1 --url {cluster.service_url}"
    )
    print(f"look          {magnetar} cluster status --metadata {cluster.metadata}")
    print(f"one daemon    {control} stop bookie-2   (start, restart; or kill -9 it: it comes back)")
    print("stop          Ctrl-C; the data stay", flush=True)
