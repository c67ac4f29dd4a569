"""How many messages a topic has, or lie in a range of it: no session, no task, no bytes of messages."""

from __future__ import annotations

from .batch_source import OffsetsPiece, TopicReader
from .options import ReadOptions


def count_messages(service_url: str, topic: str = "", **options: str) -> int:
    """What `spark.read` with these options has rows for. Raises as it does.

        count_messages("magnetar://127.0.0.1:7650", "orders", start="2026-11-21T12:00:00Z")

    In place of `topic` there may be `topics` or `topics_pattern`. It takes a request to the broker, and a few entries where
    the range begins or ends within a ledger.
    """
    named = {"topic": topic} if topic else {}
    reader = TopicReader(ReadOptions.parse({"service_url": service_url, **named, **options}), ("offset",))
    return sum(piece.end - piece.first for piece in reader.partitions() if isinstance(piece, OffsetsPiece))
