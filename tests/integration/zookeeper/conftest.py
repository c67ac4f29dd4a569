"""The store on real servers: one that all tests share, each with a root of its own, behind a line that can break."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from support.zookeeper import Ensemble, open_store, zookeeper
from support.zookeeper_line import ZooKeeperLine

__all__ = ["line", "root", "zookeeper"]


@pytest_asyncio.fixture
async def root(zookeeper: Ensemble, tmp_path: Path) -> str:
    """Of this test."""
    name = f"/{tmp_path.name}"
    store = await open_store(zookeeper.url + name, make_root=True)
    await store.close()
    return name


@pytest_asyncio.fixture
async def line(zookeeper: Ensemble) -> AsyncIterator[ZooKeeperLine]:
    """To the shared server."""
    async with ZooKeeperLine(zookeeper.servers[0].port) as opened:
        yield opened
