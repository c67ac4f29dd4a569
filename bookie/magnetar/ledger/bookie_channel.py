"""The way to one bookie: a connection that is made when it is first needed, and made again after its end, with backoff.

    (none) ──first call──> connecting ──introduced──> ready ──lost, or silent for the add timeout──> (none)
       ^── failed: calls fail at once until the backoff is over ──┘

A channel lives as long as the transport; a link (`bookie_link`) is one connection of it, with its outstanding adds.

The backoff ends early when the directory says that the bookie is back, or when it is about to be written to
(`expect`): else a bookie that is writable for placement would fail the first adds of the ledger that is placed on it.
"""

from __future__ import annotations

import asyncio

from magnetar.proto.errors import BookieUnavailable, ConnectionLost, MagnetarError
from magnetar.runtime.connection import Connection

from .bookie_link import BookieLink, Destination
from .core.outstanding_adds import AddCallback


class BookieChannel:
    """At most one link takes calls at a time."""

    __slots__ = (
        "_closed",
        "_delay_s",
        "_destination",
        "_ending",
        "_link",
        "_loop",
        "_retry_at",
        "_returns",
        "_why",
    )

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._loop = asyncio.get_running_loop()
        self._link: BookieLink | None = None  # connecting or ready
        self._ending: dict[BookieLink, None] = {}  # given up, socket not closed yet
        self._delay_s = 0.0  # backoff after the last failure, 0 after a success
        self._retry_at = 0.0  # loop time before which calls fail at once
        self._returns = 0  # of the bookie, at the last failure; more of them end the backoff
        self._why: MagnetarError = BookieUnavailable(f"bookie {destination.bookie} was not asked yet")
        self._closed = False

    def add(
        self, entry: bytes, ledger_id: int, entry_id: int, done: AddCallback, deferred: bool = False
    ) -> None:
        """Sends an add; `done` as BookieTransport.add says."""
        link = self._link or self._open()
        if link is None:
            self._loop.call_soon(done, self._destination.bookie, ledger_id, entry_id, self._why.code)
        else:
            link.add(entry, ledger_id, entry_id, done, deferred)

    def force(self, ledger_id: int) -> None:
        """See BookieTransport. What an earlier link sent has failed with it."""
        if self._link is not None:
            self._link.force(ledger_id)

    async def connected(self) -> Connection:
        """The connection, made if need be. BookieUnavailable, ConnectionLost."""
        link = self._link or self._open()
        if link is None:
            raise type(self._why)(self._why.message)
        return await link.connected()

    def expect(self) -> None:
        """The next call tries to connect, whatever the backoff says. The delay after another failure stays what it is."""
        self._retry_at = 0.0

    def refuse(self) -> None:
        """Takes no more calls."""
        self._closed = True
        self._why = ConnectionLost("the transport to the bookies is closed")

    async def close(self) -> None:
        """Closes the connection; adds fail with ConnectionLost. No socket is left when it returns, 1 s later at most."""
        self.refuse()
        if self._link is not None:
            self._link.close()
        while self._ending:
            # Not the future itself: who is cancelled here must not cancel it for others who close.
            await asyncio.wait([next(iter(self._ending)).closed])

    def _open(self) -> BookieLink | None:
        if self._closed:
            return None
        returns = self._destination.bookies.returns(self._destination.bookie)
        if self._loop.time() < self._retry_at and returns == self._returns:
            return None
        self._link = BookieLink(self._destination, self)
        return self._link

    # --- LinkOwner ----------------------------------------------------------------------------------------------------

    def link_ready(self) -> None:
        self._delay_s = 0.0

    def link_given_up(self, link: BookieLink, error: MagnetarError) -> None:
        self._ending[link] = None
        if self._link is link:
            self._link = None
        if self._closed:
            return
        self._why = error
        if not isinstance(error, ConnectionLost):
            # Not reached, or hung. A connection that broke is tried again at once: the bookie may just have restarted.
            settings = self._destination.settings
            doubled = self._delay_s * 2 if self._delay_s else settings.reconnect_backoff_s
            self._delay_s = min(doubled, settings.reconnect_backoff_max_s)
            self._retry_at = self._loop.time() + self._delay_s
            self._returns = self._destination.bookies.returns(self._destination.bookie)

    def link_closed(self, link: BookieLink) -> None:
        self._ending.pop(link, None)
