"""The position of a reader, which keeps its place itself and acknowledges nothing.

After a lost connection it goes on behind the last message that it handed out: nothing twice, nothing left out.
"""

from __future__ import annotations

from magnetar.proto.commands import LastMessageId
from magnetar.proto.ids import MessageId

from ..connection.broker_connection import BrokerConnection
from ..messages import Delivery, Message
from ..options import ReaderOptions, WireStart, start_on_wire
from .progress import Progress
from .session import ConsumerSession


class ReadPosition(Progress):
    """Of one reader."""

    def __init__(self, session: ConsumerSession, options: ReaderOptions) -> None:
        self._session = session
        self._start = start_on_wire(options.start)
        self._last: MessageId | None = None  # the last message handed out
        self._floor = _floor_of(self._start)  # what lies before it was handed out, or is not wanted
        self._latest_at_start: MessageId | None = None
        self._subscribed_before = False

    def is_behind(self, last: MessageId) -> bool | None:
        """True if a message up to `last`, the topic's last one, was not handed out; None: depends on when it was stored."""
        if self._last is not None:
            return last > self._last
        match self._start[0]:
            case "latest":
                return self._latest_at_start is None or last > self._latest_at_start
            case "id":
                return self._floor is None or last >= self._floor
            case "time":
                return None
        return True

    # --- what the consumer asks --------------------------------------------------------------------------------------

    def start(self) -> WireStart:
        """As Progress.start: behind what was handed out."""
        position = self._last
        if position is None and self._start[0] == "latest" and self._subscribed_before:
            # Nothing was handed out yet: what arrived since the reader was made must not be skipped.
            if self._latest_at_start is None:
                return ("earliest", None)
            position = self._latest_at_start
        if position is None:
            return self._start
        self._floor = position._replace(index=position.index + 1)
        return ("id", position.to_bytes())

    async def subscribed(self, connection: BrokerConnection) -> None:
        """As Progress.subscribed."""
        if self._start[0] == "latest" and not self._subscribed_before:
            timeout = self._session.pool.options.operation_timeout
            self._note_latest(await connection.request(LastMessageId(0, self._session.id), timeout))
        self._subscribed_before = True

    def opened(self, delivery: Delivery) -> None:
        """As Progress.opened."""
        if self._floor is not None:
            delivery.mark_before(self._floor)

    def handed_out(self, last: Message) -> None:
        """As Progress.handed_out."""
        self._last = last.id

    async def moved_to(self, start: WireStart) -> None:
        """As Progress.moved_to."""
        self._start, self._floor, self._last = start, _floor_of(start), None
        self._subscribed_before = False
        if start[0] == "latest":
            self._note_latest(await self._session.call(LastMessageId(0, self._session.id)))
        self._subscribed_before = True

    def _note_latest(self, answer: bytes | None) -> None:
        self._latest_at_start = None if answer is None else MessageId.from_bytes(answer)


def _floor_of(start: WireStart) -> MessageId | None:
    return MessageId.from_bytes(start[1]) if start[0] == "id" else None
