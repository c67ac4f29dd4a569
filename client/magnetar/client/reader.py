"""Reader: reads a topic from a position on, keeps its place itself, acknowledges nothing.

After a lost connection it goes on behind the last message that it handed out: nothing twice, nothing left out.
"""

from __future__ import annotations

import asyncio
from operator import length_hint

from magnetar.proto.commands import LastMessageId
from magnetar.proto.ids import MessageId

from .messages import Message
from .receiver import Receiver

# How long has_message_available waits to see whether anything follows a start given as a time.
TIME_START_PATIENCE_S = 1.0


class Reader(Receiver):
    """Reads one topic. Made by `Client.create_reader`."""

    async def read_next(self, timeout: float | None = None) -> Message:
        """As `receive`."""
        return await self.receive(timeout)

    async def has_message_available(self) -> bool:
        """True if the topic holds a message that this reader has not handed out."""
        self._check_open()
        if length_hint(self._current) or self._queue:
            return True
        answer = await self._call(LastMessageId(0, self._id))
        if answer is None:
            return False
        last = MessageId.from_bytes(answer)
        position = self._position()
        if position is not None:
            return last > position
        kind, value = self._start
        if kind == "latest":
            return self._latest_at_start is None or last > self._latest_at_start
        if kind == "id":
            return last >= MessageId.from_bytes(value)
        if kind == "time":
            return await self._anything_within(TIME_START_PATIENCE_S)
        return True

    async def _anything_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self.refill()
        except TimeoutError:
            return False

    async def __aenter__(self) -> Reader:
        return self
