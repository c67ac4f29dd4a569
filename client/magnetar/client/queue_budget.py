"""The bytes that all receiver queues of a client share, sans I/O.

budget 10 MiB, windows of 16 MiB    a asks first and is granted 10 MiB; b and c get 64 KiB each, which is guaranteed
a's user takes 6 MiB out            whoever asks next gets up to 6 MiB less what the guarantee has overdrawn
"""

from __future__ import annotations

# What each queue may have however full the budget is, so that none waits for another: each of them gets ahead by itself.
GUARANTEED_BYTES = 64 * 1024


class QueueBudget:
    """`used`: what waits in receiver queues, and what brokers may still send to them.

    At most `limit` and GUARANTEED_BYTES for each queue; a queue may be overshot by a batch, as its broker overshoots.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
