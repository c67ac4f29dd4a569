"""What is waiting to be written: the frames of one loop turn, gathered into one write.

Small pieces are joined, since a system call with a thousand 20-byte buffers costs more than the copy; payloads of
LARGE_BYTES and more are handed over as they are. What is sent while a read is being handled leaves at the end of that
read, everything else at the end of the loop turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

Piece = bytes | bytearray | memoryview

LARGE_BYTES = 32 * 1024
# More than this does not wait for the end of the turn: it would only come too late for `writable`.
_FLUSH_BYTES = 256 * 1024


class Output:
    """The pieces of one connection that its transport does not have yet."""

    __slots__ = ("_large", "_loop", "_pieces", "_scheduled", "_transport", "in_turn", "pending_bytes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._pieces: list[Piece] = []
        # One of the pieces is not to be joined.
        self._large = False
        self._scheduled = False
        # While True the owner promises to flush.
        self.in_turn = False
        self.pending_bytes = 0

    def attach(self, transport: asyncio.Transport) -> None:
        """The transport to write to."""
        self._transport = transport

    def add(self, pieces: Sequence[Piece], size: int) -> None:
        """Queues pieces of `size` bytes together."""
        self._pieces += pieces
        self.pending_bytes += size
        if size >= LARGE_BYTES:
            self._large = True
        if self.pending_bytes >= _FLUSH_BYTES:
            self.flush()
        elif not self.in_turn and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self._scheduled = False
        self.flush()

    def flush(self) -> None:
        """Hands everything to the transport."""
        pieces = self._pieces
        if not pieces or self._transport is None:
            return
        self._pieces = []
        self.pending_bytes = 0
        if self._large:
            self._large = False
            self._transport.writelines(gather(pieces))
        else:
            self._transport.write(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def drop(self) -> None:
        """Forgets everything; nothing can be written any more."""
        self._pieces = []
        self.pending_bytes = 0
        self._transport = None


def gather(pieces: Sequence[Piece]) -> list[Piece]:
    """Joins neighbouring small pieces; large ones stay as they are."""
    gathered: list[Piece] = []
    small: list[Piece] = []
    for piece in pieces:
        if len(piece) < LARGE_BYTES:
            small.append(piece)
            continue
        if small:
            gathered.append(small[0] if len(small) == 1 else b"".join(small))
            small = []
        gathered.append(piece)
    if small:
        gathered.append(small[0] if len(small) == 1 else b"".join(small))
    return gathered
