"""One writer of a cursor's pointer, whatever is asked of its subscription meanwhile, and whoever leaves in the middle of it.

Two writers are two owners to each other: the topic would be fenced, and all of its users would have to come again. The
metadata store is slow here, as a disk under load is, so that a change of a subscription lasts while others are asked for. It
notes where two writes of one pointer were under way, and where one met another one's version. Answers of it may be lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from magnetar.broker import Broker
from magnetar.broker.dispatch.subscription import SubscribeRequest, Subscription
from magnetar.broker.log.records import cursors_path
from magnetar.broker.service.broker import BrokerService
from magnetar.broker.service.results import ConsumerOpened
from magnetar.metadata.local import KeyValue
from magnetar.metadata.store import Operation, Versioned
from magnetar.proto.errors import ConnectionLost, MagnetarError, TopicNotServed, VersionConflict
from support.broker_kit import TOPIC, FakeClient, running_broker
from support.long_form import times
from support.memory_metadata import MemoryMetadataStore, ModelKeyValue
from support.virtual_time import in_virtual_time

WRITE_S = 0.01
STEP_S = 0.002
SEEDS = times(60, 600)


class SlowDisk(ModelKeyValue):
    """A synced write takes a while."""

    def open(self) -> KeyValue:
        """See ModelKeyValue."""
        handle: Any = super().open()

        async def write(changes: Mapping[bytes, bytes | None]) -> None:
            await asyncio.sleep(WRITE_S)
            handle.write_synced(changes)

        handle.write = write
        return handle  # type: ignore[no-any-return]


class Watched(MemoryMetadataStore):
    """See the module docstring."""

    def __init__(self) -> None:
        super().__init__(SlowDisk())
        self.wrong: list[str] = []
        self.losing: Random | None = None  # says which answers about pointers are lost
        self._under_way: set[str] = set()

    def _lose(self, *paths: str) -> None:
        if (
            self.losing is not None
            and any("/cursors/" in path for path in paths)
            and self.losing.random() < 0.2
        ):
            raise ConnectionLost("no answer")

    async def get(self, path: str) -> Versioned | None:
        """See MetadataStore."""
        self._lose(path)
        return await super().get(path)

    async def commit(self, operations: Sequence[Operation]) -> None:
        """See MetadataStore. It is done even if the caller is cancelled."""
        pointers = {one.path for one in operations if "/cursors/" in one.path}
        self._lose(*pointers)
        if pointers:
            self.wrong += [f"two writes of {path} at once" for path in pointers & self._under_way]
            self._under_way |= pointers
        work = asyncio.ensure_future(super().commit(operations))
        work.add_done_callback(lambda _: self._under_way.difference_update(pointers))
        try:
            await asyncio.shield(work)
        except VersionConflict as conflict:
            self.wrong += [str(conflict)] * bool(pointers)
            raise
        self._lose(*pointers)


class Port:
    """A consumer that leaves when its subscription is moved, and comes again, as Pulsar's do; and its connection."""

    address = "127.0.0.1:50000"
    client_version = "test"
    writable = True

    def __init__(self) -> None:
        self.peer = self
        self.opened: ConsumerOpened | None = None

    def authorize(self, operation: str, resource: str) -> None:
        """All of it."""

    async def probe(self) -> None:
        """It answers."""

    def leave(self, *, returns: bool = False) -> None:
        """Its connection is lost, or (`returns`) it comes again."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.subscription.remove_consumer(opened.consumer, lost=not returns, returns=returns)

    def sought(self) -> None:
        """See ConsumerPort."""
        self.leave(returns=True)

    def consumer_closed(self, error: MagnetarError) -> None:
        """See ConsumerPort."""
        self.opened = None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Play:
    """What clients ask of the subscriptions of one topic."""

    def __init__(self, broker: Broker, metadata: Watched) -> None:
        self.broker = broker
        self.metadata = metadata
        self.service = BrokerService(broker)
        self.ports: list[Port] = []  # that may have a consumer

    def subscription(self, name: str = "s") -> Subscription:
        """One that is there."""
        return self.broker.topics[str(TOPIC)].subscriptions[name]

    async def subscribe(self, name: str = "s", *, durable: bool = True) -> Port:
        """A consumer, let go of if whoever asked is gone by then."""
        port = Port()
        asked = SubscribeRequest(name, "shared", ("earliest", None), durable=durable)
        port.opened = await self.service.subscribe(port, str(TOPIC), asked, port=port)
        self.ports.append(port)
        return port

    async def unsubscribe(self, port: Port, *, force: bool = True) -> None:
        """By a consumer."""
        if port.opened is not None:
            await self.service.unsubscribe(port, port.opened, force=force)

    async def seek(self, port: Port) -> None:
        """By a consumer."""
        if port.opened is not None:
            await self.service.seek(port, port.opened, ("earliest", None))

    async def acknowledge(self, port: Port) -> None:
        """Something, by a consumer."""
        if port.opened is not None:
            cursor = port.opened.subscription.cursor
            cursor.redeliveries_changed()
            await cursor.flush()

    async def delete(self, name: str = "s") -> None:
        """By an administrator."""
        await self.service.delete_subscription(Port(), str(TOPIC), name, force=True)

    async def create(self, name: str = "s") -> None:
        """By an administrator."""
        await self.service.create_subscription(Port(), str(TOPIC), name, start=("earliest", None))

    async def unload(self) -> None:
        """The topic moves away, and may come again."""
        await self.broker.unload(TOPIC, TopicNotServed("it moves"))


@asynccontextmanager
async def playing(ledgers: Any = None) -> AsyncIterator[Play]:
    """A topic with three messages; in the end nothing was wrong, and what is stored is what there is."""
    metadata = Watched()
    async with running_broker(ledgers, metadata) as broker:
        client = FakeClient(broker)
        await client.producer()
        client.publish(b"a", b"b", b"c")
        await client.confirmed(3)
        client.handler.connection_closed(None)
        play = Play(broker, metadata)
        yield play
        await asyncio.sleep(1)
        assert metadata.wrong == []
        topic = await broker.topic(TOPIC, create=False)
        await asyncio.sleep(1)  # cursors of a topic that was just loaded
        durable = sorted(name for name, one in topic.subscriptions.items() if one.durable)
        assert await metadata.children(cursors_path(TOPIC)) == durable
        for name in durable:  # each is still written by its own cursor
            topic.subscriptions[name].cursor.reset(topic.log.normalise((0, 0, 0)))
            await topic.subscriptions[name].cursor.flush()
        assert metadata.wrong == []
        assert topic.not_served is None


Request = Callable[[Play, Port], Awaitable[Any]]
BEGUN: dict[str, Request] = {
    "subscribe": lambda play, port: play.subscribe("new"),
    "create": lambda play, port: play.create("new"),
    "unsubscribe": lambda play, port: play.unsubscribe(port),
    "delete": lambda play, port: play.delete(),
    "seek": lambda play, port: play.seek(port),
    "acknowledge": lambda play, port: play.acknowledge(port),
}
NEXT: dict[str, Request] = {
    "subscribe": lambda play, port: play.subscribe(),
    "subscribe new": lambda play, port: play.subscribe("new"),
    "create": lambda play, port: play.create(),
    "create new": lambda play, port: play.create("new"),
    "delete": lambda play, port: play.delete(),
    "delete new": lambda play, port: play.delete("new"),
    "unload": lambda play, port: play.unload(),
}


async def at_any_moment(begun: str, then: str, *, lost: bool) -> None:
    """One request, and at each moment of it the next one; the subscriptions can be used afterwards."""
    for number in range(20):
        async with playing() as play:
            port = await play.subscribe()
            served = play.broker.topics[str(TOPIC)]
            first = asyncio.ensure_future(BEGUN[begun](play, port))
            await asyncio.sleep(STEP_S * number)
            if lost:
                first.cancel()
                port.leave()
            await asyncio.gather(NEXT[then](play, port), return_exceptions=True)
            await asyncio.gather(first, return_exceptions=True)
            await play.subscribe()
            await play.subscribe("new")
            assert then == "unload" or play.broker.topics[str(TOPIC)] is served


@pytest.mark.parametrize("lost", [True, False])
@pytest.mark.parametrize("then", NEXT)
@pytest.mark.parametrize("begun", BEGUN)
def test_what_comes_next_waits_for_the_last_write_of_what_was_begun(
    begun: str, then: str, lost: bool
) -> None:
    """`lost`: the connection of whoever asked first."""
    in_virtual_time(at_any_moment)(begun, then, lost=lost)


async def walk(rng: Random, play: Play) -> None:
    """Many clients at once ask for anything, and leave at any moment."""
    names = ["s", "t"][: rng.randint(1, 2)]

    async def request() -> None:
        name, port = rng.choice(names), rng.choice([Port(), *play.ports[-5:]])
        match rng.randrange(11):
            case 0 | 1:
                await play.subscribe(name)
            case 2:
                await play.subscribe(name, durable=False)
            case 3:
                await play.unsubscribe(port)
            case 4:
                await play.unsubscribe(port, force=False)
            case 5:
                await play.seek(port)
            case 6:
                await play.acknowledge(port)
            case 7:
                await play.delete(name)
            case 8:
                await play.create(name)
            case 9:
                port.leave(returns=rng.random() < 0.3)
            case 10 if rng.random() < 0.3:
                await play.unload()

    asked: list[asyncio.Future[Any]] = []
    for _ in range(150):
        work = asyncio.ensure_future(request())
        asked.append(work)
        if rng.random() < 0.4:
            asyncio.get_running_loop().call_later(rng.random() * 4 * WRITE_S, work.cancel)
        await asyncio.sleep(rng.choice([0, rng.random() * WRITE_S, rng.random() * 4 * WRITE_S]))
        if rng.random() < 0.02:
            await asyncio.sleep(
                rng.choice([1, 61])
            )  # a reader that does not return is forgotten after a while
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        assert not isinstance(outcome, Exception) or isinstance(outcome, MagnetarError), repr(outcome)
        assert not isinstance(outcome, VersionConflict)


@pytest.mark.parametrize("lossy", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_whatever_is_asked_for_at_once_each_pointer_has_one_writer(
    part: int, lossy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`lossy`: answers of the metadata store are lost meanwhile."""
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):

        @in_virtual_time
        async def run(seed: int = seed) -> None:
            async with playing() as play:
                play.metadata.losing = Random(1_000_000 + seed) if lossy else None
                await walk(Random(seed), play)
                play.metadata.losing = None
                await asyncio.sleep(20 * lossy)  # what is not known is looked for

        caplog.clear()
        try:
            run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        assert [one for one in caplog.messages if "fenced" in one] == [], f"seed {seed}"
