"""Where a consumer has come to, for a subscription that is not durable: a reader's, or one with durable=False.

Such a subscription ends at the broker with its last connection. The consumer then asks for a new one behind the last message
that it handed out: nothing comes twice, nothing is left out. The place in a durable subscription is the broker's: there this
says only where it begins if it does not exist yet.
"""

from __future__ import annotations

from magnetar.proto.commands import LastMessageId
from magnetar.proto.ids import MessageId

from ..connection.broker_connection import BrokerConnection
from ..messages import Message
from ..options import ConsumerOptions, WireStart, start_on_wire
from .session import ConsumerSession


class ResumePoint:
    """Where the subscription of one consumer is made again after a lost connection."""

    def __init__(self, session: ConsumerSession, options: ConsumerOptions) -> None:
        self._session = session
        self._durable = options.durable
        self._start = start_on_wire(options.start)  # as asked for, or by the last seek
        self._last: MessageId | None = None  # the last message handed out since
        self._latest_at_start: MessageId | None = None  # the topic's last message when "latest" was asked for
        self._subscribed_before = False
        self._last_time_ms = 0  # when the last message handed out was stored

    def start(self) -> WireStart:
        """Where the subscription begins if the broker has none of this name (any more)."""
        if self._durable:
            return self._start
        position = self._last
        if position is None and self._start[0] == "latest" and self._subscribed_before:
            # Nothing was handed out yet: what arrived since the beginning must not be skipped.
            if self._latest_at_start is None:
                return ("earliest", None)
            position = self._latest_at_start
        if position is None:
            return self._start
        return ("id", position._replace(index=position.index + 1).to_bytes())

    async def subscribed(self, connection: BrokerConnection) -> None:
        """The broker knows the consumer, which has no permits yet."""
        if not self._durable and self._start[0] == "latest" and not self._subscribed_before:
            timeout = self._session.pool.options.operation_timeout
            self._note_latest(await connection.request(LastMessageId(0, self._session.id), timeout))
        self._subscribed_before = True

    def handed_out(self, last: Message) -> None:
        """`last` and everything before it was given to the user."""
        self._last = last.id
        self._last_time_ms = last.delivery.entry.append_time_ms

    def skipped(self, entry: MessageId) -> None:
        """This entry, whose first message this is, was passed."""
        if self._last is None or entry > self._last:
            self._last = entry._replace(entry=entry.entry + 1, index=-1)

    def cluster_switched(self) -> None:
        """An id means another message now: it goes on at the time of the last one, or begins where it was to begin."""
        if self._last is not None and not self._durable:
            self._start = ("time", self._last_time_ms)
        elif self._start[0] == "id":
            self._start = ("earliest", None)
        self._last = self._latest_at_start = None
        self._subscribed_before = False

    async def sought_to(self, start: WireStart) -> None:
        """A seek succeeded."""
        if self._durable:
            return
        self._start, self._last = start, None
        self._subscribed_before = False
        if start[0] == "latest":
            self._note_latest(await self._session.call(LastMessageId(0, self._session.id)))
        self._subscribed_before = True

    def is_behind(self, last: MessageId) -> bool | None:
        """True if a message up to `last`, the topic's last one, was not handed out; None: depends on when it was stored."""
        if self._last is not None:
            return last > self._last
        match self._start:
            case ("latest", _):
                return self._latest_at_start is None or last > self._latest_at_start
            case ("id", first):
                return last >= MessageId.from_bytes(first)
            case ("time", _):
                return None
        return True

    def _note_latest(self, answer: bytes | None) -> None:
        self._latest_at_start = None if answer is None else MessageId.from_bytes(answer)
