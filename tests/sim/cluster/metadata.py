"""The metadata service as brokers see it: a session is over for its holder when the clock says so (rule 31).

    answered ping        2/3 of the timeout later         the whole timeout later
    |                    the holder calls it lost,        the service ends it: its nodes go
                         whether it runs or stands still

Of a session that is ended before its time (an operator of the service, a store that was restored) the holder learns late:
until then it is `deceived`, and what it does is not held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from magnetar.broker import Broker
from magnetar.broker.log.records import cursor_path, topic_path
from magnetar.broker.ownership.records import BROKERS_PATH, OWNERS_PATH, BrokerRecord, OwnerRecord
from magnetar.metadata.local import LocalSession
from magnetar.metadata.store import Create, Delete, Operation
from magnetar.proto.ids import TopicName
from sim.ledgers.metadata import (
    SERVICE,
    MetadataService,
    ServiceClient,
    ServiceSession,
    ServiceWatch,
)
from support.sim import SimLoop, SimProcess, current_process

SESSION_S = 2.0  # of brokers
FENCED_AT = 2 / 3  # of the timeout, after the last answered ping


class BrokerSession(ServiceSession):
    """See the module docstring."""

    def __init__(self, client: ServiceClient, inner: LocalSession, timeout_s: float) -> None:
        self._answered = client.service.loop.now
        self._told = self._called_back = False
        super().__init__(client, inner, timeout_s)
        self._fence_later()

    @property
    def lost(self) -> bool:
        """See Session."""
        return self._told or self._service.loop.now >= self._answered + FENCED_AT * self._timeout_s

    @lost.setter
    def lost(self, lost: bool) -> None:
        self._told = lost

    @property
    def deceived(self) -> bool:
        """It has ended, and its holder cannot know."""
        return self.over and not self.lost

    def _fence_later(self) -> None:
        answered = self._answered

        def look() -> None:
            if answered == self._answered and not self._closing:
                self._tell_now()

        self._service.loop.call_outside(FENCED_AT * self._timeout_s, look)

    def _pings(self) -> bool:
        process, network = self.process, self._service.loop.network
        sends = process.alive and not (self._closing or process.paused or self.lost or network.partitioned)
        sends = sends and not network.blocked(process.name, SERVICE)
        if sends and not network.blocked(SERVICE, process.name):
            self._answered = self._service.loop.now
            self._fence_later()
        return sends

    def _tell(self) -> None:
        if not self.process.alive:
            return
        if not self._service.reachable(self.process):
            self._service.loop.call_outside(0.1, self._tell)
        else:
            self._service.loop.call_outside(self._service.travel_s(), self._tell_now)

    def _tell_now(self) -> None:
        """In the name of its holder, who may stand still: then as soon as it goes on."""
        if self.process.alive:
            self._service.loop.call_later(0.0, self._lose, context=self._context)

    def _lose(self) -> None:
        self._told = True
        if not self._called_back:
            self._called_back = True
            for callback in self._callbacks:
                callback()


class BrokerWatch(ServiceWatch):
    """What it tells may be late, as it is from a server that is behind the others."""

    def _changed(self, path: str) -> None:
        service: Any = self._client.service
        if service.events_late_s:
            service.loop.call_outside(service.events_late_s, super()._changed, path)
        else:
            super()._changed(path)


class BrokerClient(ServiceClient):
    """The MetadataStore of a broker."""

    service: ClusterMetadata

    async def open_session(self, timeout_s: float) -> BrokerSession:
        """See MetadataStore."""
        inner: LocalSession = await self.ask(lambda: self.service.truth.open_session(timeout_s))
        session = BrokerSession(self, inner, timeout_s)
        self.service.sessions = [old for old in self.service.sessions if not old.over] + [session]
        self.service.holders[session.process.name] = session
        return session

    def watch(self, path: str, callback: Callable[[str], None]) -> BrokerWatch:
        """See MetadataStore."""
        return BrokerWatch(self, path, callback)

    async def delete(self, path: str, *, version: int | None = None) -> None:
        """See MetadataStore."""
        await self.ask(lambda: self.service.delete(self.process, path, version))

    async def commit(self, operations: Sequence[Operation]) -> None:
        """See MetadataStore."""
        if not any(isinstance(operation, Delete) for operation in operations):  # of what was divided
            for operation in operations:
                if isinstance(operation, Create) and operation.path.startswith(f"{OWNERS_PATH}/"):
                    self.service.on_take(self.process, operation.path)
        await super().commit(operations)


class ClusterMetadata(MetadataService):
    """Also knows who changed the record of each topic last: that broker has it, and has fenced its ledgers."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop)
        self.holders: dict[str, BrokerSession] = {}  # the last session of each broker
        # Path of a topic's or a cursor's record -> process that wrote it last, and when.
        self.writers: dict[str, tuple[str, float]] = {}
        self.brokers: dict[str, Broker] = {}  # those that serve, by the names of their processes
        self.takeovers = 0
        self.refusals = 0  # answers of brokers to clients that have come to the wrong one
        # The record of a topic was written, as whoever loads it does: what was not durable before is forgotten.
        self.on_load: Callable[[], None] = lambda: None
        # A broker asks for an owner's node: process, path.
        self.on_take: Callable[[SimProcess, str], None] = lambda *taken: None
        # A broker has deleted an owner's node: process, path, what it said.
        self.on_let_go: Callable[[SimProcess, str, OwnerRecord], None] = lambda *let_go: None
        self.events_late_s = 0.0  # what watches tell brokers travels so much longer; seconds
        self.destinations: dict[str, str] = {}  # path of an owner's node -> `to`, as it was last
        self.states: dict[str, list[str]] = {}  # what each broker said of itself, one after another

    def broker_view(self) -> BrokerClient:
        """For the process that calls."""
        process = current_process()
        assert process is not None
        return BrokerClient(self, process)

    async def put(self, process: str, path: str, value: bytes, version: int) -> int:
        """See MetadataService."""
        new = await super().put(process, path, value, version)
        if path.startswith("/topics/"):
            self.takeovers += self.writers.get(path, (process, 0.0))[0] != process
            self.writers[path] = process, self.loop.now
            self.on_load()
        elif path.startswith(f"{OWNERS_PATH}/"):
            self.destinations[path] = OwnerRecord.decode(value, path).to
        elif path.startswith(f"{BROKERS_PATH}/"):
            self.states.setdefault(process, []).append(BrokerRecord.decode(value, path).state)
        return new

    async def delete(self, process: SimProcess, path: str, version: int | None) -> None:
        """See MetadataStore."""
        node = self.node(path) if path.startswith(f"{OWNERS_PATH}/") else None
        await self.truth.delete(path, version=version)
        if node is not None:
            self.on_let_go(process, path, OwnerRecord.decode(node.value, path))

    def taken_from(self, process: str, topic: TopicName) -> str:
        """The name of another process that has taken the topic over; "": it has not been taken from this one."""
        writer, _ = self.writers.get(topic_path(topic), (process, 0.0))
        return "" if writer == process else writer

    def cursor_taken_from(self, process: str, topic: TopicName, subscription: str) -> bool:
        """Another process has written the cursor's record since the topic was taken over."""
        writer, at = self.writers.get(cursor_path(topic, subscription), (process, 0.0))
        _, taken_at = self.writers.get(topic_path(topic), (process, 0.0))
        return writer != process and at >= taken_at

    def session_over(self, process: str) -> bool:
        """The service has ended the session of a broker."""
        session = self.holders.get(process)
        return session is None or session.over

    def deceived(self, process: str) -> bool:
        """See the module docstring."""
        session = self.holders.get(process)
        return session is not None and session.deceived
