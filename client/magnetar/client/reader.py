"""Reader: reads a topic from a position on, keeps its place itself, acknowledges nothing.

After a lost connection it goes on behind the last message that it handed out: nothing twice, nothing left out.
"""

from __future__ import annotations

import asyncio
from operator import length_hint
from typing import Any

from magnetar.proto.commands import LastMessageId
from magnetar.proto.ids import MessageId

from .link import Link
from .messages import Delivery, Message
from .receiver import Receiver

# How long has_message_available waits to see whether anything follows a start given as a time.
TIME_START_PATIENCE_S = 1.0


class Reader(Receiver):
    """Reads one topic. Made by `Client.create_reader`."""

    _durable = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last: MessageId | None = None  # the last message handed out before the open delivery
        self._latest_at_start: MessageId | None = None
        self._subscribed_before = False
        self._floor: MessageId | None = None  # what lies before it was handed out, or is not wanted
        self._set_floor(self._start)

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
        kind, _ = self._start
        if kind == "latest":
            return self._latest_at_start is None or last > self._latest_at_start
        if kind == "id":
            return self._floor is None or last >= self._floor
        if kind == "time":
            return await self._anything_within(TIME_START_PATIENCE_S)
        return True

    async def _anything_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self.refill()
        except TimeoutError:
            return False

    def _position(self) -> MessageId | None:
        """The last message handed out."""
        handed_out = len(self._messages) - length_hint(self._current)
        return self._messages[handed_out - 1].id if handed_out > 0 else self._last

    def _set_floor(self, start: tuple[str, Any]) -> None:
        kind, value = start
        self._floor = MessageId.from_bytes(value) if kind == "id" else None

    # --- what the receiver asks --------------------------------------------------------------------------------------

    def _subscribe_start(self) -> tuple[str, Any]:
        position = self._position()
        if position is None and self._start[0] == "latest" and self._subscribed_before:
            # Nothing was handed out yet: what arrived since the reader was made must not be skipped.
            if self._latest_at_start is None:
                return ("earliest", None)
            position = self._latest_at_start
        if position is None:
            return self._start
        self._floor = position._replace(index=position.index + 1)
        return ("id", position.to_bytes())

    async def _subscribed(self, link: Link) -> None:
        if self._start[0] == "latest" and not self._subscribed_before:
            await self._note_latest(await link.request(LastMessageId(0, self._id), self._timeout))
        self._subscribed_before = True

    async def _note_latest(self, answer: bytes | None) -> None:
        self._latest_at_start = None if answer is None else MessageId.from_bytes(answer)

    @property
    def _timeout(self) -> float:
        return self._client.options.operation_timeout

    def _arriving(self, delivery: Delivery) -> None:
        if self._floor is not None:
            delivery.mark_before(self._floor)

    def _handed_out(self, last: Message) -> None:
        self._last = last.id

    def _moved_to(self, start: tuple[str, Any]) -> None:
        self._start = start
        self._last = None
        self._subscribed_before = False
        self._set_floor(start)

    async def seek(self, start: Any) -> None:
        """As Receiver.seek."""
        await super().seek(start)
        if self._start[0] == "latest":
            await self._note_latest(await self._call(LastMessageId(0, self._id)))
        self._subscribed_before = True

    def detached(self) -> None:
        """Remembers the place before what is not handed out is dropped."""
        self._last = self._position()
        super().detached()

    async def __aenter__(self) -> Reader:
        return self
