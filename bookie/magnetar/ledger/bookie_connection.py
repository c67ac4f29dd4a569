"""Connections to one bookie: opened when first needed, given up when silent, tried again with backoff.

    (none) ──first call──> connecting ──introduced──> ready ──lost, or silent for the add timeout──> (none)
       ^── failed: calls fail at once until the backoff is over ──┘

The backoff ends early when the directory says that the bookie is back, or when a ledger is about to be written there
(`expect`): else a bookie that is writable for placement would fail the first adds of the ledger that is placed on it.

A channel is the way to one bookie and lives as long as the transport; a link is one connection of it, with the adds that
are outstanding on it. When a link ends all its adds fail: what became of them at the bookie is not known.

Adds of one loop turn leave in one write (the connection gathers them), and come back as one AddDone frame per journal
sync. A bookie that is connected and silent has failed (rule 21): one coarse timer per link looks at the oldest add only,
because adds are answered in about the order in which they were sent. It fires twenty times per add timeout while adds
are outstanding, so a hung bookie is noticed between 1.0 and 1.05 add timeouts, at no cost per add.

A deferred add is answered twice. Once it is accepted no clock runs for it, until it is forced: then it is outstanding again.
It fails with its link all the same: the bookie that comes next on this channel may not know of it.

A slow bookie is not silent: it answers others, or says with AddDone frames without rows that adds wait for room in its
write cache. Both give it time, up to `_MAX_ADD_TIMEOUTS` add timeouts for one add: a queue of many MB before a slow disk
must not look like a hung one, and roll every ledger. A full bookie answers TooManyRequests before that, as it is set up.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from magnetar.proto.commands import (
    ADD_ACCEPTED,
    ADD_DONE_ROW,
    DEFERRED_SYNC,
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

from .directory import BookieDirectory
from .identities import MOST_INTRODUCTIONS, BookieIdentities
from .settings import MAX_ADD_TIMEOUTS, LedgerSettings
from .transport import AddCallback

_ADD_HEADER = AddEntry(0, False).encode()
_RECOVERY_HEADER = AddEntry(0, True).encode()
_DEFERRED_HEADER = AddEntry(0, deferred=True).encode()
_DONE_HEADER = AddDone(0).encode()
_TICKS_PER_TIMEOUT = 20
_MAX_ADD_TIMEOUTS = MAX_ADD_TIMEOUTS
# How long a closing connection may take to send what is queued; then it is aborted.
_CLOSE_TIMEOUT_S = 1.0
# After this many idle add timeouts a connection for re-adds is closed.
_IDLE_TIMEOUTS = 6


class BookieChannel:
    """The way to one bookie. `recovery`: its adds pass the fence."""

    __slots__ = (
        "_closed",
        "_delay_s",
        "_ending",
        "_link",
        "_retry_at",
        "_returns",
        "_why",
        "bookie",
        "bookies",
        "identities",
        "loop",
        "options",
        "recovery",
        "settings",
    )

    def __init__(
        self,
        bookie: str,
        bookies: BookieDirectory,
        settings: LedgerSettings,
        options: ConnectionOptions,
        identities: BookieIdentities,
        recovery: bool,
    ) -> None:
        self.bookie = bookie
        self.bookies = bookies
        self.settings = settings
        self.options = options
        self.identities = identities
        self.recovery = recovery
        self.loop = asyncio.get_running_loop()
        self._link: _Link | None = None  # connecting or ready
        self._ending: dict[_Link, None] = {}  # given up, socket not closed yet
        self._delay_s = 0.0  # backoff after the last failure, 0 after a success
        self._retry_at = 0.0  # loop time before which calls fail at once
        self._returns = 0  # of the bookie, at the last failure; more of them end the backoff
        self._why: MagnetarError = BookieUnavailable(f"bookie {bookie} was not asked yet")
        self._closed = False

    def add(
        self, entry: bytes, ledger_id: int, entry_id: int, done: AddCallback, deferred: bool = False
    ) -> None:
        """Sends an add; `done` as BookieTransport.add says."""
        link = self._link or self._open()
        if link is None:
            self.loop.call_soon(done, self.bookie, ledger_id, entry_id, self._why.code)
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

    def _open(self) -> _Link | None:
        if self._closed:
            return None
        if self.loop.time() < self._retry_at and self.bookies.returns(self.bookie) == self._returns:
            return None
        self._link = _Link(self)
        return self._link

    # --- called by links ---------------------------------------------------------------------------------------------

    def link_ready(self) -> None:
        """The connection is ready."""
        self._delay_s = 0.0

    def link_given_up(self, link: _Link, error: MagnetarError) -> None:
        """Takes no more calls for it; its socket may still be open."""
        self._ending[link] = None
        if self._link is link:
            self._link = None
        if self._closed:
            return
        self._why = error
        if not isinstance(error, ConnectionLost):
            # Not reached, or hung. A connection that broke is tried again at once: the bookie may just have restarted.
            settings = self.settings
            doubled = self._delay_s * 2 if self._delay_s else settings.reconnect_backoff_s
            self._delay_s = min(doubled, settings.reconnect_backoff_max_s)
            self._retry_at = self.loop.time() + self._delay_s
            self._returns = self.bookies.returns(self.bookie)

    def link_closed(self, link: _Link) -> None:
        """The link has ended, its socket included."""
        self._ending.pop(link, None)


class _DeferredLedger:
    """Deferred adds of one ledger over one link."""

    __slots__ = ("accepted", "forced", "last")

    def __init__(self) -> None:
        # Entry id -> callback: accepted, and not asked to be durable.
        self.accepted: dict[int, AddCallback] = {}
        self.last = -1  # entry that was sent last
        self.forced = -1  # the last one at the last force: up to there nothing stays in `accepted`


class _Link:
    """One connection, from the attempt to its end: a ConnectionHandler."""

    __slots__ = (
        "_bookie",
        "_channel",
        "_closing",
        "_connecting",
        "_connection",
        "_deferred",
        "_deferred_header",
        "_given_up",
        "_header",
        "_heard_tick",
        "_idle_ticks",
        "_limit",
        "_loop",
        "_outstanding_bytes",
        "_pending",
        "_tick",
        "_timer",
        "_unsent",
        "closed",
    )

    def __init__(self, channel: BookieChannel) -> None:
        self._channel = channel
        self._bookie = channel.bookie
        self._header = _RECOVERY_HEADER if channel.recovery else _ADD_HEADER
        self._limit = channel.settings.max_outstanding_bytes
        self._loop = channel.loop
        self._connection: Connection | None = None  # once ready
        # (ledger, entry) -> number of the tick in which it was sent, callback, bytes; oldest first.
        self._pending: dict[tuple[int, int], tuple[int, AddCallback, int]] = {}
        self._outstanding_bytes = 0  # of _pending
        # Taken while connecting: key, entry, deferred; all of them are in _pending.
        self._unsent: list[tuple[tuple[int, int], bytes, bool]] = []
        self._deferred: dict[int, _DeferredLedger] = {}  # by ledger
        self._deferred_header = _ADD_HEADER  # unless the bookie knows better
        self._tick = 0
        self._heard_tick = 0  # in which the last AddDone came, with rows or without
        self._idle_ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._given_up = False
        self._closing: asyncio.Task[None] | None = None  # waits for the end of the socket
        # Done when neither socket nor attempt is left.
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._connecting = self._loop.create_task(self._connect(), name=f"connect to bookie {self._bookie}")
        self._connecting.add_done_callback(self._connect_ended)

    def add(self, entry: bytes, ledger_id: int, entry_id: int, done: AddCallback, deferred: bool) -> None:
        """Hot path: 1.1 us, and 0.7 in the connection."""
        key = (ledger_id, entry_id)
        size = len(entry)
        outstanding = self._outstanding_bytes + size
        if outstanding > self._limit:
            self._refuse(key, done, TooManyRequests.code)
            return
        pending = self._pending
        if key in pending:  # two recoveries of one ledger: the first answer serves both
            tick, earlier, size = pending[key]
            pending[key] = (tick, _both(earlier, done), size)
            return
        if self._connection is None:
            self._unsent.append((key, entry, deferred))
        else:
            try:
                self._connection.send(self._deferred_header if deferred else self._header, entry)
            except MagnetarError as error:  # larger than the bookie takes
                self._refuse(key, done, error.code)
                return
        self._outstanding_bytes = outstanding
        pending[key] = (self._tick, done, size)
        if deferred:
            self._deferred_ledger(ledger_id).last = entry_id
        if self._timer is None:
            self._arm()

    def force(self, ledger_id: int) -> None:
        """What was sent of the ledger shall become durable; the clock runs for it again."""
        if self._connection is None:
            self._unsent = [
                (key, entry, deferred and key[0] != ledger_id) for key, entry, deferred in self._unsent
            ]
            return
        ledger = self._deferred.get(ledger_id)
        if ledger is None or self._deferred_header is _ADD_HEADER:
            return
        self._connection.send(ForceLedger(0, ledger_id).encode())
        ledger.forced = ledger.last
        accepted, ledger.accepted = ledger.accepted, {}
        for entry_id, done in accepted.items():
            self._pending[ledger_id, entry_id] = (self._tick, done, 0)
        if self._timer is None:
            self._arm()

    def _deferred_ledger(self, ledger_id: int) -> _DeferredLedger:
        ledger = self._deferred.get(ledger_id)
        if ledger is None:
            ledger = self._deferred[ledger_id] = _DeferredLedger()
        return ledger

    def _refuse(self, key: tuple[int, int], done: AddCallback, code: int) -> None:
        self._loop.call_soon(done, self._bookie, *key, code)

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

    def _introduced(self, connection: Connection) -> None:
        """Sends what was taken meanwhile."""
        self._connection = connection
        self._channel.link_ready()
        if DEFERRED_SYNC in connection.features:
            self._deferred_header = _DEFERRED_HEADER
        unsent, self._unsent = self._unsent, []
        for key, entry, deferred in unsent:
            try:
                connection.send(self._deferred_header if deferred else self._header, entry)
            except MagnetarError as error:
                _, done, size = self._pending.pop(key)
                self._outstanding_bytes -= size
                self._refuse(key, done, error.code)

    def runs_received(self, runs: list[Run]) -> None:
        """AddDone rows: each answers one add of this link."""
        pending, bookie = self._pending, self._bookie
        for header, payloads in runs:
            self._heard_tick = self._tick
            if header != _DONE_HEADER:
                command = decode_command(header)
                if not isinstance(command, AddDone):
                    raise MalformedFrame(f"a bookie sends AddDone and answers, not command {command.NUMBER}")
                if command.accepted:
                    self._accepted(payloads)
                    continue
            for payload in payloads:
                for ledger_id, entry_id, code in decode_rows(ADD_DONE_ROW, payload):
                    add = pending.pop((ledger_id, entry_id), None)
                    if add is not None:
                        self._outstanding_bytes -= add[2]
                        add[1](bookie, ledger_id, entry_id, code)
                    elif (ledger := self._deferred.get(ledger_id)) is not None:
                        done = ledger.accepted.pop(entry_id, None)
                        if done is not None:
                            done(bookie, ledger_id, entry_id, code)

    def _accepted(self, payloads: list[bytes]) -> None:
        """Rows of deferred adds that are not durable yet."""
        pending = self._pending
        for payload in payloads:
            for ledger_id, entry_id, _ in decode_rows(ADD_DONE_ROW, payload):
                key = (ledger_id, entry_id)
                add = pending.get(key)
                if add is None:
                    continue
                tick, done, size = add
                self._outstanding_bytes -= size
                ledger = self._deferred_ledger(ledger_id)
                if entry_id <= ledger.forced:
                    pending[key] = (tick, done, 0)  # the force came before this answer
                else:
                    del pending[key]
                    ledger.accepted[entry_id] = done
                done(self._bookie, ledger_id, entry_id, ADD_ACCEPTED)

    def connection_closed(self, error: MagnetarError | None) -> None:
        """Nothing can be sent or received any more; the socket may be there for a while longer."""
        if self._connection is not None:  # else the introduction notices
            self._give_up(
                ConnectionLost(error.message if error else f"bookie {self._bookie} closed the connection")
            )

    def writing_resumed(self) -> None:
        """Nothing waits for it: what may be outstanding is bounded by max_outstanding_bytes."""

    # --- the end -----------------------------------------------------------------------------------------------------

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
        """A connection to the bookie that is meant; None: its present start was not registered, and now it is."""
        channel = self._channel
        host, port = channel.bookies.address(self._bookie)
        expected = await channel.identities.expected(self._bookie)
        connection = await open_connection(
            host, port, self, replace(channel.options, expected_bookie=expected)
        )
        try:
            registered = await channel.identities.verify(self._bookie, expected, connection.bookie)
            if connection.closed:
                raise connection.transport.lost()
            if not registered:
                connection.close()
                await connection.wait_closed(_CLOSE_TIMEOUT_S)
        except BaseException:
            connection.abort()
            raise
        return connection if registered else None

    def _connect_ended(self, task: asyncio.Task[Connection]) -> None:
        if task.cancelled():
            self._closed()
        elif (error := task.exception()) is not None:
            assert isinstance(error, BookieUnavailable)
            self._give_up(error)
            self._closed()

    def _give_up(self, error: MagnetarError, *, flush: bool = False) -> None:
        """Leaves the connection to its end and fails what is outstanding."""
        if self._given_up:
            return
        self._given_up = True
        self._channel.link_given_up(self, error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is None:
            self._connecting.cancel()
        else:
            (self._connection.close if flush else self._connection.abort)()
            name = f"close to bookie {self._bookie}"
            self._closing = self._loop.create_task(self._await_closed(self._connection), name=name)
        pending, self._pending = self._pending, {}
        self._unsent = []
        deferred, self._deferred = self._deferred, {}
        for ledger_id, ledger in deferred.items():
            for entry_id, done in ledger.accepted.items():
                done(self._bookie, ledger_id, entry_id, error.code)
        for (ledger_id, entry_id), (_, done, _) in pending.items():
            try:
                done(self._bookie, ledger_id, entry_id, error.code)
            except Exception as failure:  # a failing callback must not stop those of other ledgers
                self._loop.call_exception_handler(
                    {
                        "message": f"the callback of an add to bookie {self._bookie} failed",
                        "exception": failure,
                    }
                )

    async def _await_closed(self, connection: Connection) -> None:
        await connection.wait_closed(_CLOSE_TIMEOUT_S)
        self._closed()

    def _closed(self) -> None:
        self._channel.link_closed(self)
        if not self.closed.done():
            self.closed.set_result(None)

    # --- the timer ---------------------------------------------------------------------------------------------------

    def _too_slow(self, slow: bool) -> RequestTimeout:
        timeout_s = self._channel.settings.add_timeout_s
        if slow:
            return RequestTimeout(
                f"bookie {self._bookie} is too slow: it did not store an add in {_MAX_ADD_TIMEOUTS} times "
                f"add_timeout_s={timeout_s:g} s, or fell silent on the way"
            )
        return RequestTimeout(f"bookie {self._bookie} was silent for add_timeout_s={timeout_s:g} s")

    def _arm(self) -> None:
        delay_s = self._channel.settings.add_timeout_s / _TICKS_PER_TIMEOUT
        self._timer = self._loop.call_later(delay_s, self._ticked)

    def _ticked(self) -> None:
        self._timer = None
        self._tick += 1
        if self._deferred:
            self._forget_finished_ledgers()
        oldest = next(iter(self._pending.values()), None)
        if oldest is not None:
            self._idle_ticks = 0
            waited = self._tick - oldest[0]
            silent = min(waited, self._tick - self._heard_tick)
            if silent > _TICKS_PER_TIMEOUT or waited > _MAX_ADD_TIMEOUTS * _TICKS_PER_TIMEOUT:
                self._give_up(self._too_slow(waited > silent))
                return
        elif not self._channel.recovery:
            return  # the next add arms it again
        else:
            self._idle_ticks += 1
            if self._idle_ticks > _IDLE_TIMEOUTS * _TICKS_PER_TIMEOUT:
                self.close()
                return
        self._arm()

    def _forget_finished_ledgers(self) -> None:
        """Forgets ledgers without outstanding adds: a link may outlive thousands of ledgers."""
        pending = self._pending
        deferred = self._deferred.items()
        for ledger_id in [
            n for n, ledger in deferred if not ledger.accepted and (n, ledger.last) not in pending
        ]:
            del self._deferred[ledger_id]


def _both(first: AddCallback, second: AddCallback) -> AddCallback:
    def done(bookie: str, ledger_id: int, entry_id: int, code: int) -> None:
        try:
            first(bookie, ledger_id, entry_id, code)
        finally:
            second(bookie, ledger_id, entry_id, code)

    return done
