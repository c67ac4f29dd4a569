"""The way to one bookie: a connection that is made when it is first needed, and made again after its end, with backoff.

    (none) ──first call──> connecting ──introduced──> ready ──lost, or silent for the add timeout──> (none)
       ^── failed: calls fail at once until the backoff is over ──┘

A channel lives as long as the transport. The backoff ends early when the directory says that the bookie is back, or when it
is about to be written to (`reset_backoff`): else a bookie that is writable for placement would fail the first adds of the
ledger that is placed on it.

A link is one connection of a channel, from the attempt to its end, with the adds that are outstanding on it:

    connecting ──introduced──> ready ──lost, silent for the add timeout, closed──> given up ──socket closed──> closed
        └──cannot be reached, is another bookie──────────────────────────────────────^

`core.outstanding_adds` decides about the adds: they are held while connecting, and fail together when the link is given up.
Those of one loop turn leave in one write (the connection gathers them), and come back as one AddDone frame per journal sync.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from magnetar.proto.commands import (
    ADD_ACCEPTED,
    ADD_DONE_ROW,
    AddDone,
    AddEntry,
    ForceLedger,
    decode_command,
    decode_rows,
)
from magnetar.proto.errors import (
    BookieUnavailable,
    ConnectionLost,
    MagnetarError,
    MalformedFrame,
    RequestTimeout,
    TooManyRequests,
    WrongBookie,
)
from magnetar.proto.frames import Run
from magnetar.runtime.connection import Connection, ConnectionOptions, open_connection
from magnetar.runtime.tasks import begin

from .add_clock import AddClock
from .core.outstanding_adds import (
    MAX_ADD_TIMEOUTS,
    TICKS_PER_TIMEOUT,
    AddCallback,
    AddOutcome,
    OutstandingAdds,
    Waited,
)
from .directory import BookieDirectory
from .identities import MOST_INTRODUCTIONS, BookieIdentities
from .settings import LedgerSettings

_ADD_HEADER = AddEntry(0, False).encode()
_RECOVERY_HEADER = AddEntry(0, True).encode()
_DEFERRED_HEADER = AddEntry(0, deferred=True).encode()
_DONE_HEADER = AddDone(0).encode()
_SEND, _REFUSED = AddOutcome.SEND, AddOutcome.REFUSED
# How long a closing connection may take to send what is queued; then it is aborted.
_CLOSE_TIMEOUT_S = 1.0
# After this many idle add timeouts a connection for re-adds is closed.
_IDLE_TIMEOUTS = 6


@dataclass(frozen=True, slots=True)
class Destination:
    """What every connection to one bookie needs. `recovery`: its adds pass the fence."""

    bookie: str
    recovery: bool
    bookies: BookieDirectory
    settings: LedgerSettings
    options: ConnectionOptions
    identities: BookieIdentities


class BookieLink:
    """A ConnectionHandler. Connects at once."""

    __slots__ = (
        "_adds",
        "_bookie",
        "_clock",
        "_closing",
        "_connecting",
        "_connection",
        "_destination",
        "_given_up",
        "_header",
        "_idle_ticks",
        "_loop",
        "_owner",
        "closed",
    )

    def __init__(self, destination: Destination, owner: BookieChannel) -> None:
        self._destination = destination
        self._owner = owner
        self._bookie = destination.bookie
        self._header = _RECOVERY_HEADER if destination.recovery else _ADD_HEADER
        self._loop = asyncio.get_running_loop()
        self._connection: Connection | None = None  # once ready
        self._adds = OutstandingAdds(destination.settings.max_outstanding_bytes)
        self._clock = AddClock(self._adds, destination.settings.add_timeout_s, self._ticked)
        self._idle_ticks = 0
        self._given_up = False
        self._closing: asyncio.Task[None] | None = None  # waits for the end of the socket
        # Done when neither socket nor attempt is left.
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._connecting = begin(self._connect(), f"connect to bookie {self._bookie}", self._connect_ended)

    def add(self, entry: bytes, ledger_id: int, entry_id: int, done: AddCallback, deferred: bool) -> None:
        """For every entry: 0.3 us, and what the connection takes."""
        connection = self._connection
        outcome = self._adds.add(ledger_id, entry_id, entry, done, deferred, connection is not None)
        if outcome is _SEND:
            assert connection is not None
            try:
                connection.send(_DEFERRED_HEADER if deferred else self._header, entry)
            except MagnetarError as error:
                self._unsendable(ledger_id, entry_id, error)
        elif outcome is _REFUSED:
            self._loop.call_soon(done, self._bookie, ledger_id, entry_id, TooManyRequests.code)
        if not self._clock.running:
            self._clock.start()

    def force(self, ledger_id: int) -> None:
        """What was sent of the ledger shall become durable; the clock runs for it again."""
        if not self._adds.force(ledger_id):
            return
        if self._connection is not None:
            self._connection.send(ForceLedger(0, ledger_id).encode())
        if not self._clock.running:
            self._clock.start()

    async def connected(self) -> Connection:
        """The connection once it is ready. BookieUnavailable, ConnectionLost."""
        if self._connection is not None:
            return self._connection
        # Others wait for the same attempt, so one who is cancelled must not cancel it.
        await asyncio.wait([self._connecting])
        if self._connecting.cancelled():
            raise ConnectionLost(f"the connection to bookie {self._bookie} was given up")
        error = self._connecting.exception()
        if isinstance(error, MagnetarError):
            raise type(error)(error.message)
        return self._connecting.result()

    def close(self) -> None:
        """On purpose: what is queued still leaves, what is outstanding fails."""
        self._give_up(ConnectionLost(f"the connection to bookie {self._bookie} was closed here"), flush=True)

    # --- ConnectionHandler -------------------------------------------------------------------------------------------

    def connection_ready(self, connection: Connection) -> None:
        """The introduction follows: see `_connect`."""
        if self._given_up:
            connection.abort()

    def runs_received(self, runs: list[Run]) -> None:
        """AddDone rows: each answers one add of this link."""
        answered, bookie = self._adds.answered, self._bookie
        for header, payloads in runs:
            self._adds.heard()  # also without rows: adds wait for room there
            if header != _DONE_HEADER:
                command = decode_command(header)
                if not isinstance(command, AddDone):
                    raise MalformedFrame(f"a bookie sends AddDone and answers, not command {command.NUMBER}")
                if command.accepted:
                    self._accepted(payloads)
                    continue
            for payload in payloads:
                for ledger_id, entry_id, code in decode_rows(ADD_DONE_ROW, payload):
                    if (done := answered(ledger_id, entry_id)) is not None:
                        done(bookie, ledger_id, entry_id, code)

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Nothing can be sent or received any more; the socket may be there for a while longer."""
        if self._connection is not None:  # else the introduction notices
            self._give_up(
                ConnectionLost(error.message if error else f"bookie {self._bookie} closed the connection")
            )

    def writing_resumed(self) -> None:
        """Nothing waits for it: what may be outstanding is bounded by max_outstanding_bytes."""

    def _accepted(self, payloads: list[bytes]) -> None:
        """Rows of deferred adds that are not durable yet."""
        for payload in payloads:
            for ledger_id, entry_id, _ in decode_rows(ADD_DONE_ROW, payload):
                if (done := self._adds.accepted(ledger_id, entry_id)) is not None:
                    done(self._bookie, ledger_id, entry_id, ADD_ACCEPTED)

    def _unsendable(self, ledger_id: int, entry_id: int, error: MagnetarError) -> None:
        """The entry is larger than the bookie takes."""
        if (done := self._adds.answered(ledger_id, entry_id)) is not None:
            self._loop.call_soon(done, self._bookie, ledger_id, entry_id, error.code)

    # --- the beginning -----------------------------------------------------------------------------------------------

    async def _connect(self) -> Connection:
        try:
            for _ in range(MOST_INTRODUCTIONS):
                if (connection := await self._introduce()) is not None:
                    self._introduced(connection)
                    return connection
            raise ConnectionLost("it restarts again and again")
        except WrongBookie:
            raise
        except Exception as error:  # such as a host name that is none
            reason = error.message if isinstance(error, MagnetarError) else repr(error)
            raise BookieUnavailable(f"bookie {self._bookie} cannot be reached: {reason}") from error

    async def _introduce(self) -> Connection | None:
        """A connection to the bookie that is meant; None: its present start was not registered, or not known; now it is."""
        destination = self._destination
        host, port = destination.bookies.address(self._bookie)
        expected = await destination.identities.expected(self._bookie)
        options = replace(destination.options, expected_bookie=expected)
        try:
            connection = await open_connection(host, port, self, options)
        except WrongBookie:  # the bookie itself says so
            if destination.identities.forget(self._bookie):
                return None
            raise
        try:
            registered = await destination.identities.verify(self._bookie, expected, connection.bookie)
            if connection.closed:
                raise connection.transport.lost()
            if not registered:
                connection.close()
                await connection.wait_closed(_CLOSE_TIMEOUT_S)
        except BaseException:
            connection.abort()
            raise
        return connection if registered else None

    def _introduced(self, connection: Connection) -> None:
        """Sends what was taken meanwhile."""
        self._connection = connection
        self._owner.link_ready()
        while (held := self._adds.next_held()) is not None:
            try:
                connection.send(_DEFERRED_HEADER if held.deferred else self._header, held.entry)
            except MagnetarError as error:
                self._unsendable(held.ledger_id, held.entry_id, error)

    def _connect_ended(self, task: asyncio.Task[Connection]) -> None:
        if task.cancelled():
            self._closed()
        elif (error := task.exception()) is not None:
            assert isinstance(error, BookieUnavailable)
            self._give_up(error)
            self._closed()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _ticked(self) -> bool:
        settings = self._destination.settings
        waited = self._adds.tick()
        if waited is Waited.IN_TIME:
            self._idle_ticks = 0
        elif waited is Waited.FOR_NOTHING:
            if not self._destination.recovery:
                return False  # the next add starts the clock again
            self._idle_ticks += 1
            if self._idle_ticks > _IDLE_TIMEOUTS * TICKS_PER_TIMEOUT:
                self.close()
        elif waited is Waited.SILENT:
            self._give_up(
                RequestTimeout(
                    f"bookie {self._bookie} was silent for add_timeout_s={settings.add_timeout_s:g} s"
                )
            )
        else:
            self._give_up(
                RequestTimeout(
                    f"bookie {self._bookie} is too slow: it did not store an add in {MAX_ADD_TIMEOUTS} times "
                    f"add_timeout_s={settings.add_timeout_s:g} s, or fell silent on the way"
                )
            )
        return True

    def _give_up(self, error: MagnetarError, *, flush: bool = False) -> None:
        """Leaves the connection to its end and fails what is outstanding."""
        if self._given_up:
            return
        self._given_up = True
        self._owner.link_given_up(self, error)
        if self._connection is None:
            self._connecting.cancel()
        else:
            (self._connection.close if flush else self._connection.abort)()
            self._closing = begin(self._await_closed(self._connection), f"close to bookie {self._bookie}")
        self._clock.end(self._bookie, error.code)

    async def _await_closed(self, connection: Connection) -> None:
        await connection.wait_closed(_CLOSE_TIMEOUT_S)
        self._closed()

    def _closed(self) -> None:
        self._owner.link_closed(self)
        if not self.closed.done():
            self.closed.set_result(None)


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

    def reset_backoff(self) -> None:
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
        returns = self._destination.bookies.return_count(self._destination.bookie)
        if self._loop.time() < self._retry_at and returns == self._returns:
            return None
        self._link = BookieLink(self._destination, self)
        return self._link

    # --- called by its links ------------------------------------------------------------------------------------------

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
            self._returns = self._destination.bookies.return_count(self._destination.bookie)

    def link_closed(self, link: BookieLink) -> None:
        self._ending.pop(link, None)
