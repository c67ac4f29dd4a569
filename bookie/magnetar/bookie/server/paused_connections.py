"""Connections whose adds wait for room in the write cache: they are not read, and hear that the bookie is alive.

For a ledger client, a bookie that is silent for the add timeout has failed (rule 21). A bookie whose write cache is full
still works as fast as its disk does. It says so by an AddDone frame without rows, twice a second. It stays silent when its
disk hangs (`Bookie.waits_for_room`).
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..engine import Bookie

# Add timeouts are seconds.
NOTICE_INTERVAL_S = 0.5


class _PausedConnection(Protocol):
    def adds_paused(self) -> None:
        """Sends the peer an AddDone without rows: its adds wait."""
        ...

    def adds_accepted(self) -> None:
        """Resumes reading."""
        ...


class PausedConnections:
    """The paused connections, in the order in which they were paused."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._paused: dict[_PausedConnection, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def pause(self, connection: _PausedConnection) -> None:
        """Pauses a connection whose adds wait."""
        self._paused[connection] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._notice)

    def forget(self, connection: _PausedConnection) -> None:
        """Forgets a connection that was closed."""
        self._paused.pop(connection, None)

    def release(self) -> None:
        """Resumes all connections: the write cache has room again."""
        self.close()
        paused, self._paused = self._paused, {}
        for connection in paused:
            connection.adds_accepted()

    def close(self) -> None:
        """Stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _notice(self) -> None:
        self._timer = None
        if not self._paused:
            return
        if self._bookie.waits_for_room:
            for connection in list(self._paused):
                connection.adds_paused()
        self._timer = asyncio.get_running_loop().call_later(NOTICE_INTERVAL_S, self._notice)
