"""The session's one timer, on the loop that daemons run on."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.metadata.zookeeper.session import Servers, ZooKeeperSession


@pytest.mark.asyncio(loop_factories=["uvloop", "asyncio"])
async def test_what_is_due_at_once_is_armed_again() -> None:
    """A process that was stopped for a while finds its time passed, and an answer comes before the timer."""
    servers = Servers([("127.0.0.1", 1)], None, None, asyncio.get_running_loop().time, lambda: 0.0)
    session = ZooKeeperSession(servers, 4.0)
    for _ in range(2):
        session._arm()
    await session.close()
