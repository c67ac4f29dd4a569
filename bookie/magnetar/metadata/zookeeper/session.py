"""A session with its sockets and timers: carries out what `core.session` decides, and is what the owner of a session sees.

Each session has a connection of its own, so what is asked over it is done in this session or not at all: an ephemeral
node never lands in another. The store has one session for plain reads and writes, replaced when it ends, and one for
each `open_session`.

Whether a session is lost is decided by the clock at the moment of asking. A process that was stopped, or whose loop was
busy, for longer than the session lasts hears "lost" first of all, before any timer or any answer that waits in a
socket.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from magnetar.proto.errors import AlreadyClosed
from magnetar.runtime.connection.addresses import format_address
from magnetar.runtime.tasks import begin

from . import wire
from .connection import MAX_PENDING, Answer, Connection, Progress
from .core.session import (
    Act,
    Dial,
    End,
    Ended,
    Event,
    Heard,
    Instruction,
    Introduce,
    Introduced,
    SessionCore,
    Signal,
    State,
)
from .wire import Handshake, Opcode, Request

_log = logging.getLogger("magnetar.metadata.zookeeper")


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the servers are, and what all sessions of a store share."""

    hosts: Sequence[tuple[str, int]]  # in the order in which they are tried
    credentials: str | None  # user:password
    tls: ssl.SSLContext | None
    clock: Callable[[], float]  # seconds; goes on while the machine sleeps
    jitter: Callable[[], float]  # uniform in [0, 1)
    progress: Progress = field(default_factory=Progress)
    # The newest failure of each host, by its place in `hosts`.
    failures: dict[int, str] = field(default_factory=dict)

    def host_name(self, number: int) -> str:
        """host:port."""
        return format_address(self.hosts[number])


class ZooKeeperSession:
    """Session of MetadataStore. `on_ended` is called when it ends by itself."""

    def __init__(
        self,
        servers: Servers,
        timeout_s: float,
        *,
        on_attached: Callable[[Connection], None] = lambda connection: None,
        on_event: Callable[[str], None] = lambda path: None,
        on_ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.servers = servers
        self._core = SessionCore(len(servers.hosts), timeout_s, servers.jitter)
        self._loop = asyncio.get_running_loop()
        self._on_attached = on_attached
        self._on_event = on_event
        self._on_ended = on_ended
        self._callbacks: list[Callable[[], None]] = []
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0  # loop time; uvloop's handle of what is due at once does not say
        self._dialed = 0  # number of the host of `_current`
        self._dialing: asyncio.Task[None] | None = None
        self._current: Connection | None = None  # dialed, introduced or attached
        self._dropped: Connection | None = None  # the one before
        self._reason: str | None = None  # why the current one failed
        # Done at the next Attached, or at the end.
        self._changed: asyncio.Future[None] = self._loop.create_future()
        self._closing = False
        self.connection: Connection | None = None  # the one over which requests may go out

    # --- Session -----------------------------------------------------------------------------------------------------

    @property
    def session_id(self) -> int:
        """See Session. 0 until the servers gave one."""
        return self._core.session_id

    @property
    def timeout_s(self) -> float:
        """As the servers granted it."""
        return self._core.timeout_s

    @property
    def lost(self) -> bool:
        if self._core.why is None and self.servers.clock() >= self._core.fence_at:
            self._handle(Signal.WOKEN)
        return self._core.why in (End.EXPIRED, End.FENCED)

    @property
    def usable(self) -> bool:
        """Whether nodes may still be made with it."""
        return not self.lost and not self._closing

    def when_lost(self, callback: Callable[[], None]) -> None:
        """See Session; soon if it is lost already."""
        if self.lost:
            self._loop.call_soon(callback)
        else:
            self._callbacks.append(callback)

    async def close(self) -> None:
        """See Session. Without a connection the nodes go when the servers end the session, after its timeout."""
        self._closing = True
        self.connection = None
        self._handle(Signal.CLOSE_ASKED)
        while self._core.state is not State.ENDED:
            await asyncio.shield(self._changed)
        if self._dropped is not None:
            await asyncio.shield(self._dropped.closed)

    # --- for the store -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to connect."""
        self._handle(Signal.STARTED)

    async def attached(self) -> Connection:
        """The connection, when there is one with room for a request. AlreadyClosed when the session has ended."""
        while True:
            if not self.usable or self._core.state is State.ENDED:
                raise self.ended_error()
            if self.connection is None:
                await asyncio.shield(self._changed)
            elif self.connection.pending >= MAX_PENDING:
                await self.connection.room()
            else:
                return self.connection

    def ended_error(self) -> AlreadyClosed:
        """What a use of the session after its end raises."""
        why = End.CLOSED if self._core.why is None else self._core.why
        return AlreadyClosed(f"metadata session {self.session_id:#x} has ended ({why.value}); open a new one")

    # --- ConnectionOwner ---------------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        if connection is self._current:
            self._handle(Signal.OPENED)

    def introduced(self, connection: Connection, handshake: Handshake) -> None:
        if connection is self._current:
            self._handle(Introduced(handshake.session_id, handshake.password, handshake.timeout_s))

    def heard(self, connection: Connection, answered_sent_at: float | None, pong: bool) -> None:
        if connection is self._current:
            self._handle(Heard(answered_sent_at, pong))

    def event(self, path: str) -> None:
        self._on_event(path)

    def disconnected(self, connection: Connection, reason: str) -> None:
        if connection is self._current:
            self._reason = reason
            if self._core.state is State.INTRODUCING and self.servers.progress.zxid:
                self._reason += " before its first answer; does it know less than this process has seen?"
            self._handle(Signal.CONNECTION_LOST)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        for instruction in self._core.handle(event, self.servers.clock()):
            self._act(instruction)
        self._arm()

    def _act(self, instruction: Instruction) -> None:
        match instruction:
            case Dial(host):
                self._dial(host)
            case Introduce(session_id, password, timeout_s):
                self._introduce(session_id, password, timeout_s)
            case Act.ATTACHED:
                self._attach()
            case Act.DETACHED:
                self._detach()
            case Act.PING:
                assert self.connection is not None
                self.connection.ping()
            case Act.CLOSE_SESSION:
                self._close_session()
            case Act.DROP:
                self._drop()
            case Ended(why):
                self._ended(why)

    def _dial(self, host: int) -> None:
        self._dialed = host
        self._reason = None
        self._current = connection = Connection(self, self.servers.clock, self.servers.progress)
        work = self._connect(connection, *self.servers.hosts[host])
        # A task that is cancelled before its first turn runs no `finally`.
        self._dialing = begin(work, "connect to ZooKeeper", lambda _: connection.not_opened())

    async def _connect(self, connection: Connection, host: str, port: int) -> None:
        try:
            await self._loop.create_connection(lambda: connection, host, port, ssl=self.servers.tls)
        except (
            OSError,
            UnicodeError,
        ) as error:  # ssl.SSLError is an OSError, an impossible host name a UnicodeError
            if connection is self._current:
                self._reason = str(error)
                self._note_failure()
                self._handle(Signal.DIAL_FAILED)

    def _introduce(self, session_id: int, password: bytes, timeout_s: float) -> None:
        assert self._current is not None
        first = wire.connect_frame(self.servers.progress.zxid, timeout_s, session_id, password)
        self._current.introduce(first, self.servers.credentials)

    def _attach(self) -> None:
        self.connection = self._current
        assert self.connection is not None
        self.servers.failures.pop(self._dialed, None)
        host = self.servers.host_name(self._dialed)
        _log.info("metadata session %#x is connected to %s", self.session_id, host)
        self._on_attached(self.connection)
        self._wake()

    def _detach(self) -> None:
        self.connection = None
        if not self._closing:
            host, reason = self.servers.host_name(self._dialed), self._reason or "it did not answer in time"
            _log.warning(
                "metadata session %#x has lost its connection to %s: %s", self.session_id, host, reason
            )

    def _close_session(self) -> None:
        assert self._current is not None
        answer = self._current.request(Request(Opcode.CLOSE_SESSION, b""))
        answer.add_done_callback(self._close_answered)

    def _close_answered(self, answer: asyncio.Future[Answer]) -> None:
        self._handle(Signal.CLOSE_ANSWERED)

    def _drop(self) -> None:
        connection, self._current = self._current, None  # first: what its end reports is not news
        if connection is None:
            return
        self._note_failure()
        if self._dialing is not None:
            self._dialing.cancel()
        connection.close()
        self._dropped = connection

    def _note_failure(self) -> None:
        self.servers.failures[self._dialed] = self._reason or "it did not answer in time"

    def _ended(self, why: End) -> None:
        if why is not End.CLOSED:
            _log.warning("metadata session %#x has ended: %s", self.session_id, why.value)
            for callback in self._callbacks:
                self._loop.call_soon(callback)
            self._on_ended()
        self._callbacks.clear()
        self._wake()

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)
        self._changed = self._loop.create_future()

    def _arm(self) -> None:
        """One timer, never later than `wake_at`; one that is early finds nothing to do and goes on."""
        wake_at = self._core.wake_at
        if self._core.state is State.ENDED:
            if self._timer is not None:
                self._timer.cancel()
            return
        delay = max(0.0, wake_at - self.servers.clock())
        when = self._loop.time() + delay
        if self._timer is not None and not self._timer.cancelled():
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_later(delay, self._woken), when

    def _woken(self) -> None:
        self._timer = None
        self._handle(Signal.WOKEN)
