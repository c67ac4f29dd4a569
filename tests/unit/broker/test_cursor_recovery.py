"""Recovering the cursors of a topic, with cursors that fail as a test says."""

import asyncio
from typing import Any

import pytest

from magnetar.broker.cursors.recovery import CursorRecovery
from magnetar.broker.settings import BrokerSettings
from magnetar.proto.errors import BookieUnavailable, MagnetarError, ServiceNotReady
from magnetar.proto.ids import TopicName


class FakeCursor:
    """`error`: what reading it raises now."""

    def __init__(self) -> None:
        self.error: MagnetarError | None = BookieUnavailable("away")
        self.deleted = False

    async def recover(self, topology: Any) -> bool:
        """The pointer is there."""
        if self.error is not None:
            raise self.error
        return True

    async def delete(self) -> None:
        """It can be deleted when its pointer can be read."""
        if self.error is not None:
            raise self.error
        self.deleted = True


async def test_a_deletion_that_fails_leaves_a_cursor_that_is_still_recovered() -> None:
    cursor, recovered = FakeCursor(), asyncio.Event()
    made: Any = cursor
    topology: Any = None
    recovery = CursorRecovery(
        TopicName.parse("t"),
        topology,
        lambda name: made,
        lambda name, cursor: recovered.set(),
        BrokerSettings(retry_initial_ms=1, retry_max_ms=2),
    )
    await recovery.run(["s"])
    with pytest.raises(BookieUnavailable):
        await recovery.delete("s")
    assert not cursor.deleted
    cursor.error = None
    async with asyncio.timeout(5):
        await recovered.wait()
    assert not recovery.unavailable
    with pytest.raises(ServiceNotReady, match="was recovered just now"):
        await recovery.delete("s")
    await recovery.stop()
