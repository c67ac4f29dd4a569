"""The open delivery of a consumer, whose messages are handed out, and what its broker is told of that.

    0 .......... taken ............ shown .............. reported ............. all of it
      handed out    may be taken     the report leaves      not reported yet

Under a dead-letter policy the broker is told of each message before the user can take it: one that ends the process counts
all the same. What it was told of, and nobody took, is taken back. Without a policy all of a delivery is shown at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from operator import length_hint

from magnetar.proto.commands import ACK_ROW, HandedOut, encode_rows
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY

from ..connection.attachment import Attachment
from ..messages import Message
from .acks import rows_of_ids

# Messages that are reported as handed out before a loop that may take them in one turn has done so.
MAX_AHEAD = 1024
ALL_HERE = MAX_MESSAGES_PER_ENTRY  # who takes a whole delivery at once


class OpenDelivery:
    """The open delivery of one consumer. left: what may be taken, until the delivery is left; taking from it hands out."""

    def __init__(
        self, attachment: Attachment, handed_out: Callable[[Message], object], *, reports: bool
    ) -> None:
        """`handed_out` is told how far the user has come; `reports`: under a dead-letter policy."""
        self._attachment = attachment
        self._handed_out = handed_out
        self._reports = reports
        self._messages: list[Message] = []
        self._shown = self._reported = 0  # so many of these
        self.held = 0  # seeks under way: no more is shown meanwhile
        self._part: list[Message] = []  # what was shown last: clearing it ends every iteration over it
        self.left: Iterator[Message] = iter(self._part)
        self._ahead = 1  # as many may be reported next before they are taken
        self._turn_end: asyncio.Handle | None = None  # until then `_ahead` messages may be taken
        self._showing = asyncio.Lock()

    @property
    def withholds(self) -> bool:
        """True if it has more than may be taken: `show` shows some of it."""
        return not self.held and self._shown < len(self._messages)

    def open(self, messages: list[Message]) -> None:
        """Another one; the last one is closed."""
        self._messages = messages
        if not self._reports:
            self._show(len(messages))

    def close(self) -> None:
        """What is left of it is not handed out."""
        self.note_handed_out()
        self._part.clear()
        self._messages, self._shown, self._reported = [], 0, 0

    def note_handed_out(self) -> None:
        """Tells `handed_out` of the last message that was taken."""
        taken = self._shown - length_hint(self.left)
        if taken > 0:
            self._handed_out(self._messages[taken - 1])

    def _show(self, end: int) -> None:
        self.note_handed_out()
        self._part = self._messages[self._shown : end]
        self._shown = self._reported = end
        self.left = iter(self._part)

    async def show(self, count: int | None) -> bool:
        """Shows more, once the broker is told; False without a connection: what is here comes again on the next one.

        count: how many are about to be taken at once; None: one after another, perhaps many in a turn of the loop.

        Of messages that have come for the first time a loop may take many in a turn: they are reported together, twice as
        many each time, and what is left at the end of the turn is taken back. If the process is killed in that turn, these
        count once although nobody has seen them; what comes again is reported one by one.
        """
        async with self._showing:
            if length_hint(self.left) or not self.withholds:
                return True  # another task was faster
            connection, messages, first = self._attachment.connection, self._messages, self._shown
            if connection is None or connection.closed:
                return False
            if count is None:
                count_now = 1
                if not messages[first].redelivery_count:
                    if self._turn_end is not None:
                        self._ahead = min(2 * self._ahead, MAX_AHEAD)
                    count_now = self._ahead
            else:
                count_now = count
            end = min(first + count_now, len(messages))
            if self._turn_end is not None:
                self._turn_end.cancel()
                self._turn_end = None
            self._reported = end
            try:
                await connection.send_now(*self._report(messages[first:end]))
            except BaseException:
                self.take_back()
                raise
            # Otherwise it was left or taken back meanwhile.
            if self._messages is messages and self._reported == end:
                self._show(end)
                if count is None:
                    self._turn_end = asyncio.get_running_loop().call_soon(self.take_back)
            return True

    def take_back(self) -> None:
        """What was reported, and is not taken, is not handed out after all."""
        if not self._reports:
            return
        self._turn_end = None
        taken = self._shown - length_hint(self.left)
        messages = self._messages[taken : self._reported]
        self._part.clear()
        self._shown = self._reported = taken
        if messages:
            self._ahead = 1
            if self._attachment.connection is not None:
                self._attachment.connection.send(*self._report(messages, taken_back=True))

    def _report(self, messages: Sequence[Message], *, taken_back: bool = False) -> tuple[bytes, bytes]:
        first, last = messages[0], messages[-1]
        if last.index - first.index + 1 == len(messages):
            rows = first.delivery.rows(first.index, last.index + 1)
        else:
            rows = rows_of_ids(message.id for message in messages)
        header = HandedOut(0, self._attachment.id, first.delivery.epoch, taken_back).encode()
        return header, encode_rows(ACK_ROW, rows)
