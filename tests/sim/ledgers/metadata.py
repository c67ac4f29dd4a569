"""A metadata service outside of every simulated process: linearizable; sessions expire, answers get lost.

    client: put ──latency──> applied here, at one moment ──latency──> answer
                  (lost: never applied)                   (lost: applied, and the client does not know)

A client that hears nothing gets RequestTimeout, as from a real service's client library. What was sent is applied even when
its sender has died or stands still. A session ends when its holder was dead, paused or cut off for its timeout; a lost one
is told as soon as its holder can hear it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from magnetar.ledger import LedgerMetadata
from magnetar.metadata.ledgers import ledger_of_path, ledger_path
from magnetar.metadata.local import LocalSession
from magnetar.metadata.paths import INSTANCE_PATH
from magnetar.metadata.store import Create, Operation, Session, Versioned
from magnetar.proto.errors import AlreadyClosed, MagnetarError, RequestTimeout
from support.memory_metadata import MemoryMetadataStore
from support.sim import SimLoop, SimProcess, current_process

SERVICE = "metadata"  # its name in `SimNetwork.block`
CLUSTER = 77  # its instance
TIMEOUT_S = 1.0
BEATS = 4  # looks at a session per timeout


@dataclass
class Chances:
    """Of one operation; seconds are virtual."""

    lost_request: float = 0.0
    lost_answer: float = 0.0
    latency_s: tuple[float, float] = (100e-6, 2e-3)
    slow: float = 0.0  # chance of an answer that takes up to 0.5 s


class MetadataService:
    """The one truth. `view` gives a process its MetadataStore."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.truth = MemoryMetadataStore(grouped=False)
        _at_once(self.truth.create(INSTANCE_PATH, CLUSTER.to_bytes(8, "big")))
        self.chances = Chances()
        self.sessions: list[ServiceSession] = []
        # Names of processes -> seconds that each way takes longer for them.
        self.slow: dict[str, float] = {}
        # Called for each change of a ledger when it becomes true: process, ledger, before, after.
        self.on_change: Callable[[str, int, LedgerMetadata, LedgerMetadata], None] = lambda *change: None
        # Called when a process sends a change: process, path, value.
        self.on_send: Callable[[str, str, bytes], None] = lambda *sent: None
        self._decoded: dict[int, tuple[int, LedgerMetadata]] = {}

    def view(self) -> ServiceClient:
        """For the process that calls."""
        process = current_process()
        assert process is not None
        return ServiceClient(self, process)

    def node(self, path: str) -> Versioned | None:
        """What is true now."""
        found: Versioned | None = _at_once(self.truth.get(path))[0]
        return found

    def ledger(self, ledger_id: int) -> LedgerMetadata | None:
        """What is true now; None if there is no such ledger."""
        node = self.node(ledger_path(ledger_id))
        if node is None:
            return None
        known = self._decoded.get(ledger_id)
        if known is None or known[0] != node.version:
            known = self._decoded[ledger_id] = (node.version, LedgerMetadata.decode(node.value, ledger_id))
        return known[1]

    async def put(self, process: str, path: str, value: bytes, version: int) -> int:
        """See MetadataStore."""
        ledger_id = ledger_of_path(path)
        before = None if ledger_id is None else self.ledger(ledger_id)
        new = await self.truth.put(path, value, version=version)
        if ledger_id is not None and before is not None:
            after = self.ledger(ledger_id)
            assert after is not None
            self.on_change(process, ledger_id, before, after)
        return new

    def travel_s(self, process: str = "") -> float:
        """One way."""
        rng = self.loop.rng
        seconds = rng.uniform(*self.chances.latency_s) + self.slow.get(process, 0.0)
        if self.chances.slow and rng.random() < self.chances.slow:
            seconds += rng.uniform(0.01, 0.5)
        return seconds

    def reachable(self, process: SimProcess) -> bool:
        """Both ways."""
        network = self.loop.network
        return not (
            network.partitioned
            or network.blocked(process.name, SERVICE)
            or network.blocked(SERVICE, process.name)
        )

    def expire_one(self) -> bool:
        """Ends a live session before its time; False if there is none."""
        live = [session for session in self.sessions if not session.over]
        if not live:
            return False
        session = self.loop.rng.choice(live)
        self.loop.trace.fault("session_expired", session.process.name)
        session.expire()
        return True


class ServiceSession:
    """Session of one process, as the service and as its holder see it."""

    def __init__(self, client: ServiceClient, inner: LocalSession, timeout_s: float) -> None:
        self.session_id = inner.session_id
        self.inner = inner
        self.process = client.process
        self.lost = False
        self.over = False
        self._client = client
        self._service = client.service
        self._timeout_s = timeout_s
        self._silent_s = 0.0
        self._closing = False
        self._callbacks: list[Callable[[], None]] = []
        self._context = contextvars.copy_context()
        self._beat_later()

    def when_lost(self, callback: Callable[[], None]) -> None:
        """See Session."""
        if self.lost:
            self._service.loop.call_soon(callback)
        else:
            self._callbacks.append(callback)

    async def close(self) -> None:
        """See Session. Should the request be lost, the session ends by its silence."""
        self._closing = True
        await self._client.ask(self.inner.close)
        self.over = True

    def expire(self) -> None:
        """Its nodes go at once; its holder hears of it when it can."""
        self.over = True
        self._service.truth.expire(self.session_id)
        self._tell()

    def _beat_later(self) -> None:
        self._service.loop.call_outside(self._timeout_s / BEATS, self._beat)

    def _beat(self) -> None:
        if self.over:
            return
        self._silent_s = 0.0 if self._pings() else self._silent_s + self._timeout_s / BEATS
        if self._silent_s >= self._timeout_s:
            self._service.loop.trace.fault("session_timeout", self.process.name)
            self.expire()
        else:
            self._beat_later()

    def _pings(self) -> bool:
        """True if the service hears the holder now."""
        process = self.process
        return not self._closing and process.alive and not process.paused and self._service.reachable(process)

    def _tell(self) -> None:
        if not self.process.alive:
            return
        if not self._service.reachable(self.process):
            self._service.loop.call_outside(0.1, self._tell)
            return

        def lose() -> None:
            self.lost = True
            for callback in self._callbacks:
                callback()

        self._service.loop.call_later(self._service.travel_s(), lose, context=self._context)


class ServiceWatch:
    """See magnetar.metadata.Watch."""

    def __init__(self, client: ServiceClient, path: str, callback: Callable[[str], None]) -> None:
        self._client = client
        self._callback = callback
        self._context = contextvars.copy_context()
        self._inner = client.service.truth.watch(path, self._changed)

    def close(self) -> None:
        """See Watch."""
        self._inner.close()
        self._callback = lambda path: None

    def _changed(self, path: str) -> None:
        service, process = self._client.service, self._client.process
        if not process.alive:
            self._inner.close()
        elif not service.reachable(process):
            service.loop.call_outside(0.1, self._changed, path)
        else:
            service.loop.call_later(service.travel_s(), lambda: self._callback(path), context=self._context)


class ServiceClient:
    """MetadataStore of one process."""

    def __init__(self, service: MetadataService, process: SimProcess) -> None:
        self.service = service
        self.process = process
        self._closed = False

    async def get(self, path: str) -> Versioned | None:
        """See MetadataStore."""
        found: Versioned | None = await self.ask(lambda: self.service.truth.get(path))
        return found

    async def create(self, path: str, value: bytes, *, session: Session | None = None) -> int:
        """See MetadataStore."""
        inner = _inner(session)
        version: int = await self.ask(lambda: self.service.truth.create(path, value, session=inner))
        return version

    async def put(self, path: str, value: bytes, *, version: int) -> int:
        """See MetadataStore."""
        name = self.process.name
        self.service.on_send(name, path, value)
        new: int = await self.ask(lambda: self.service.put(name, path, value, version))
        return new

    async def delete(self, path: str, *, version: int | None = None) -> None:
        """See MetadataStore."""
        await self.ask(lambda: self.service.truth.delete(path, version=version))

    async def children(self, path: str, *, after: str = "", limit: int = 0) -> list[str]:
        """See MetadataStore."""
        names: list[str] = await self.ask(lambda: self.service.truth.children(path, after=after, limit=limit))
        return names

    async def next_id(self, name: str, count: int = 1) -> int:
        """See MetadataStore."""
        number: int = await self.ask(lambda: self.service.truth.next_id(name, count))
        return number

    async def commit(self, operations: Sequence[Operation]) -> None:
        """See MetadataStore."""
        inner = [
            op._replace(session=_inner(op.session)) if isinstance(op, Create) else op for op in operations
        ]
        await self.ask(lambda: self.service.truth.commit(inner))

    def watch(self, path: str, callback: Callable[[str], None]) -> ServiceWatch:
        """See MetadataStore."""
        return ServiceWatch(self, path, callback)

    async def open_session(self, timeout_s: float) -> ServiceSession:
        """See MetadataStore."""
        inner: LocalSession = await self.ask(lambda: self.service.truth.open_session(timeout_s))
        session = ServiceSession(self, inner, timeout_s)
        self.service.sessions = [old for old in self.service.sessions if not old.over] + [session]
        return session

    async def close(self) -> None:
        """See MetadataStore. Sessions end by their silence."""
        self._closed = True

    async def ask(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Sends the operation and waits for its answer."""
        if self._closed:
            raise AlreadyClosed("the metadata store is closed")
        service = self.service
        loop, chances = service.loop, service.chances
        answer: asyncio.Future[Any] = loop.create_future()
        lost_request = chances.lost_request and loop.rng.random() < chances.lost_request
        lost_answer = chances.lost_answer and loop.rng.random() < chances.lost_answer
        timer = loop.call_later(TIMEOUT_S, self._timed_out, answer)

        def arrive() -> None:
            if loop.network.partitioned or loop.network.blocked(self.process.name, SERVICE):
                return
            result, error = _at_once(operation())
            if lost_answer:
                loop.trace.fault("metadata_answer_lost", self.process.name)
            else:
                loop.call_outside(service.travel_s(self.process.name), answered, result, error)

        def answered(result: Any, error: MagnetarError | None) -> None:
            if answer.done() or loop.network.partitioned or loop.network.blocked(SERVICE, self.process.name):
                return  # the timer ends the waiting
            timer.cancel()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        if lost_request:
            loop.trace.fault("metadata_request_lost", self.process.name)
        else:
            loop.call_outside(service.travel_s(self.process.name), arrive)
        return await answer

    @staticmethod
    def _timed_out(answer: asyncio.Future[Any]) -> None:
        if not answer.done():
            answer.set_exception(RequestTimeout("the metadata service did not answer"))


def _inner(session: Session | None) -> LocalSession | None:
    if session is None:
        return None
    assert isinstance(session, ServiceSession)
    return session.inner


def _at_once(work: Awaitable[Any]) -> tuple[Any, MagnetarError | None]:
    """Runs a coroutine of the local store, which never waits."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return done.value, None
    except MagnetarError as error:
        return None, error
    raise AssertionError("an operation of the metadata tree waited")
