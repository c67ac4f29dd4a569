"""The id of a message that is stored in chunks: it is that of its first chunk, and knows where the others are.

As bytes, text, and against other ids it is the id of the first chunk: a start or a seek to it finds the whole message.
"""

from __future__ import annotations

from magnetar.proto.commands import AckRow
from magnetar.proto.ids import MessageId


class ChunkedMessageId(MessageId):
    """chunks: where the chunks are that have come; of a message that is still coming it grows."""

    chunks: list[AckRow]

    @classmethod
    def of(cls, first: MessageId, chunks: list[AckRow]) -> ChunkedMessageId:
        """`chunks` may be changed later."""
        found = cls(*first)
        found.chunks = chunks
        return found


def last_place(message_id: MessageId) -> MessageId:
    """The id itself, or that of the last chunk: everything up to there is everything up to the message."""
    if isinstance(message_id, ChunkedMessageId) and hasattr(message_id, "chunks"):
        ledger, entry, _, index = max(message_id.chunks)
        return MessageId(ledger, entry, index, message_id.partition)
    return message_id
