"""A ZooKeeper session as its client sees it: which server to dial, when to ping, when nobody may rely on it any more.

    WAITING ──backoff over──> DIALING ──Opened──> INTRODUCING ──Introduced──> CONNECTED ──CloseAsked──> CLOSING ──> ENDED
       ^                          │ DialFailed,       │ ConnectionLost,           │ ConnectionLost,
       │                          │ too slow          │ too slow                  │ silence
       └──all hosts were tried────┴───────────────────┴── next host at once <─────┘

    from every state but ENDED, checked before each event:
        now >= fence_at                   ──> ENDED (FENCED, or CLOSED if it was CLOSING)
        Introduced with session id 0      ──> ENDED (EXPIRED): the servers no longer know the session
        CloseAsked without a connection   ──> ENDED (CLOSED): the session ends by its timeout

A session that has an id and no connection is *suspended*: its next connection presents the id, and nothing is lost but
the answers that were awaited. An ended session never comes back; whoever needs another makes one.

**Self-fence.** The servers end a session `timeout_s` after the last request that they received from it. `proven_at` is
the *send* time of the newest request known to be answered, which is earlier. At `proven_at` + 2/3 `timeout_s` the
session is over for its owner, though the servers may still keep it. The third that is left covers a server that
answered and died before its leader heard of the session (half a tick; a timeout is at least two ticks), and the clocks'
different pace. With a timeout of 4 s:

    0      a request is sent, and answered later: proven_at
    0.67   nothing else was answered: a ping (1/6)
    1.67   nothing was received for 1/4 after it: the connection is given up, the next host dialed; 0.67 s (1/6) for each
    2.67   self-fence (2/3)
    4.00   the servers end the session at the earliest
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

# Shares of the session's timeout.
PING_SHARE = 1 / 6
SILENCE_SHARE = 1 / 4
ATTEMPT_SHARE = 1 / 6
CLOSE_SHARE = 1 / 4
FENCE_SHARE = 2 / 3
# A connection that went silent is noticed, and one host is dialed for its whole time, before the fence.
assert PING_SHARE + SILENCE_SHARE + ATTEMPT_SHARE < FENCE_SHARE
# A long timeout is no reason to wait so long for one host, or for the answer to a farewell.
MAX_ATTEMPT_S = 3.0
MAX_CLOSE_S = 2.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0


class State(enum.Enum):
    """See the drawing above."""

    WAITING = enum.auto()
    DIALING = enum.auto()
    INTRODUCING = enum.auto()
    CONNECTED = enum.auto()
    CLOSING = enum.auto()
    ENDED = enum.auto()


class End(enum.Enum):
    """Why a session is over."""

    CLOSED = "it was closed"
    EXPIRED = "the servers ended it"
    FENCED = "no server answered in time"


# --- events ----------------------------------------------------------------------------------------------------------


class Signal(enum.Enum):
    """Events without fields."""

    STARTED = enum.auto()  # the first event
    OPENED = enum.auto()  # the transport to the host that was dialed is there
    DIAL_FAILED = enum.auto()  # there is no transport to it
    CONNECTION_LOST = enum.auto()  # the transport is gone, or what came over it was no answer
    WOKEN = enum.auto()  # `wake_at` is over, or somebody wants to know how things stand
    CLOSE_ASKED = enum.auto()  # the owner is done
    CLOSE_ANSWERED = enum.auto()  # the servers ended the session as they were asked to


@dataclass(frozen=True, slots=True)
class Introduced:
    """The server's answer to Introduce; a session id of 0: it does not know the session."""

    session_id: int
    password: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Heard:
    """Bytes arrived. `answered_sent_at`: when the newest request among those answered was sent, if there is one."""

    answered_sent_at: float | None = None
    pong: bool = False


Event = Signal | Introduced | Heard

# --- instructions ----------------------------------------------------------------------------------------------------


class Act(enum.Enum):
    """Instructions without fields."""

    ATTACHED = enum.auto()  # the connection belongs to the session now: requests may go out
    DETACHED = enum.auto()  # it does not any more: whatever was sent and not answered has an unknown outcome
    PING = enum.auto()  # send a ping
    CLOSE_SESSION = enum.auto()  # send the request that ends the session
    DROP = enum.auto()  # close the transport, once what was written before is sent


@dataclass(frozen=True, slots=True)
class Dial:
    """Open a transport to host number `host`; a dial under way is abandoned."""

    host: int


@dataclass(frozen=True, slots=True)
class Introduce:
    """Send the first frame; a session id of 0 asks for a new session."""

    session_id: int
    password: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The last instruction."""

    why: End


Instruction = Act | Dial | Introduce | Ended


class SessionCore:
    """See the module docstring. `hosts` is how many there are, in the order in which they are tried."""

    def __init__(self, hosts: int, timeout_s: float, jitter: Callable[[], float]) -> None:
        self._hosts = hosts
        self._jitter = jitter  # uniform in [0, 1)
        self.state = State.WAITING
        self.why: End | None = None  # set exactly while ENDED
        self.session_id = 0  # 0 until the servers gave one
        self.password = b""
        # As asked for; from the first Introduced on, as the servers granted it.
        self.timeout_s = timeout_s
        # Send time of the newest request known to be answered; -inf without a session. Never goes back.
        self.proven_at = -math.inf
        self._host = 0  # the one that was dialed last
        self._failures = (
            0  # hosts that failed in a row; a connection that broke within a second has failed, too
        )
        self._entered_at = 0.0  # of the present state: since when
        self._retry_at = 0.0  # WAITING: until when
        self._heard_at = 0.0  # CONNECTED: when bytes arrived last
        self._ping_sent_at: float | None = None  # CONNECTED: a ping without its answer

    @property
    def fence_at(self) -> float:
        """When the session is over for its owner; infinite while there is none yet."""
        return self.proven_at + FENCE_SHARE * self.timeout_s if self.session_id else math.inf

    @property
    def wake_at(self) -> float:
        """When the next WOKEN must come at the latest."""
        match self.state:
            case State.ENDED:
                return math.inf
            case State.WAITING:
                due = self._retry_at
            case State.DIALING | State.INTRODUCING:
                due = self._entered_at + min(ATTEMPT_SHARE * self.timeout_s, MAX_ATTEMPT_S)
            case State.CLOSING:
                due = self._entered_at + min(CLOSE_SHARE * self.timeout_s, MAX_CLOSE_S)
            case _:
                due = self._ping_at if self._ping_sent_at is None else self._silent_at
        return min(due, self.fence_at)

    @property
    def _ping_at(self) -> float:
        return self.proven_at + PING_SHARE * self.timeout_s

    @property
    def _silent_at(self) -> float:
        assert self._ping_sent_at is not None
        return max(self._heard_at, self._ping_sent_at) + SILENCE_SHARE * self.timeout_s

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """The one way in. After ENDED nothing happens any more."""
        if self.state is State.ENDED:
            return []
        if now >= self.fence_at:
            # First of all: what the event brings was decided on before it was known how much time went by.
            if self.state is State.CLOSING:
                return self._end(End.CLOSED)
            farewell: list[Instruction] = [Act.CLOSE_SESSION] if self.state is State.CONNECTED else []
            return [*farewell, *self._end(End.FENCED)]
        match event:
            case Signal.STARTED:
                return self._dial(now)
            case Signal.OPENED if self.state is State.DIALING:
                self._enter(State.INTRODUCING, now)
                return [Introduce(self.session_id, self.password, self.timeout_s)]
            case Signal.DIAL_FAILED if self.state is State.DIALING:
                return self._next_host(now)
            case Introduced() if self.state is State.INTRODUCING:
                return self._introduced(event, now)
            case Heard():
                return self._heard(event, now)
            case Signal.CONNECTION_LOST:
                return self._connection_lost(now)
            case Signal.WOKEN:
                return self._woken(now)
            case Signal.CLOSE_ASKED:
                return self._close_asked(now)
            case Signal.CLOSE_ANSWERED if self.state is State.CLOSING:
                return self._end(End.CLOSED)
        return []  # of a transport that was given up meanwhile

    def check(self) -> None:
        """The invariants, for tests."""
        assert (self.why is not None) == (self.state is State.ENDED)
        assert self.session_id or self.proven_at == -math.inf
        assert self.session_id or self.state not in (State.CONNECTED, State.CLOSING)
        assert self._ping_sent_at is None or self.state is State.CONNECTED
        assert 0 <= self._host < self._hosts
        assert self.wake_at <= self.fence_at or self.state is State.ENDED

    # --- inside ------------------------------------------------------------------------------------------------------

    def _enter(self, state: State, now: float) -> None:
        self.state = state
        self._entered_at = now
        self._ping_sent_at = None

    def _end(self, why: End) -> list[Instruction]:
        attached = self.state in (State.CONNECTED, State.CLOSING)
        dropped: list[Instruction] = [] if self.state is State.WAITING else [Act.DROP]
        self.state = State.ENDED
        self.why = why
        self._ping_sent_at = None
        return [*([Act.DETACHED] if attached else []), *dropped, Ended(why)]

    def _dial(self, now: float) -> list[Instruction]:
        self._enter(State.DIALING, now)
        return [Dial(self._host)]

    def _next_host(self, now: float) -> list[Instruction]:
        """The host did not do. After a round of all of them there is a pause, which grows."""
        self._failures += 1
        self._host = (self._host + 1) % self._hosts
        if self._failures % self._hosts:
            return self._dial(now)
        rounds = self._failures // self._hosts
        pause = min(FIRST_BACKOFF_S * 2 ** min(rounds - 1, 10), MAX_BACKOFF_S, ATTEMPT_SHARE * self.timeout_s)
        self._enter(State.WAITING, now)
        self._retry_at = now + pause * (0.5 + self._jitter() / 2)
        return []

    def _introduced(self, event: Introduced, now: float) -> list[Instruction]:
        if not event.session_id:
            return self._end(End.EXPIRED)
        self.session_id, self.password, self.timeout_s = event.session_id, event.password, event.timeout_s
        self.proven_at = max(self.proven_at, self._entered_at)  # when the first frame was sent
        self._heard_at = now
        self._enter(State.CONNECTED, now)
        return [Act.ATTACHED]

    def _heard(self, event: Heard, now: float) -> list[Instruction]:
        if self.state is not State.CONNECTED:
            return []
        self._heard_at = now
        if event.pong and self._ping_sent_at is not None:
            self.proven_at = max(self.proven_at, self._ping_sent_at)
            self._ping_sent_at = None
        if event.answered_sent_at is not None:
            self.proven_at = max(self.proven_at, event.answered_sent_at)
        return self._woken(now)

    def _connection_lost(self, now: float) -> list[Instruction]:
        match self.state:
            case State.DIALING | State.INTRODUCING:
                return [Act.DROP, *self._next_host(now)]
            case State.CONNECTED:
                if now - self._entered_at >= MAX_BACKOFF_S:
                    self._failures = 0
                return [Act.DETACHED, Act.DROP, *self._next_host(now)]
            case State.CLOSING:  # the servers close the connection after their answer, or have died
                return self._end(End.CLOSED)
        return []

    def _close_asked(self, now: float) -> list[Instruction]:
        if self.state is State.CLOSING:
            return []
        if self.state is not State.CONNECTED:
            return self._end(End.CLOSED)
        self._enter(State.CLOSING, now)
        return [Act.CLOSE_SESSION]

    def _woken(self, now: float) -> list[Instruction]:
        if now < self.wake_at:
            return []
        match self.state:
            case State.WAITING:
                return self._dial(now)
            case State.DIALING | State.INTRODUCING:
                return [Act.DROP, *self._next_host(now)]
            case State.CLOSING:
                return self._end(End.CLOSED)
            case State.CONNECTED if self._ping_sent_at is None:
                self._ping_sent_at = now
                return [Act.PING]
        return self._connection_lost(now)
