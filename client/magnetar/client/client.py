"""Client: the connections of one application to the service, and what it makes on them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from magnetar.proto.commands import (
    Command,
    CreateTopic,
    DeleteSubscription,
    DeleteTopic,
    ListTopics,
    Lookup,
    Partitions,
    TopicStats,
)
from magnetar.proto.errors import AlreadyClosed, InvalidArgument, MagnetarError, Unsupported
from magnetar.proto.ids import TopicName, check_subscription_name
from magnetar.runtime.clock import Clock, SystemClock
from magnetar.runtime.connection import ConnectionOptions

from .attachment import until_answered
from .consumer import Consumer
from .link import Link
from .options import SUBSCRIPTION_TYPES, ClientOptions, ConsumerOptions, ProducerOptions, Start, parse_url
from .producer import Producer
from .reader import Reader

# What leaving (closing a producer or consumer) waits for the broker's answer: leaving works without it as well.
_LEAVE_TIMEOUT_S = 5.0


class Closable(Protocol):
    """What `Opening` opens."""

    async def close(self) -> None:
        """Ends it."""
        ...


C = TypeVar("C", bound=Closable)
M = TypeVar("M", Producer, Consumer, Reader)


class Opening(Generic[C]):
    """Something about to be opened: await it, or use it with `async with`, which closes it at the end."""

    __slots__ = ("_open", "_opened")

    def __init__(self, open: Callable[[], Awaitable[C]]) -> None:
        self._open = open
        self._opened: C | None = None

    def __await__(self) -> Generator[Any, None, C]:
        return self._open().__await__()

    async def __aenter__(self) -> C:
        self._opened = await self._open()
        return self._opened

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._opened is not None
        await self._opened.close()

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __getattr__(self, name: str) -> NoReturn:
            # A forgotten `await`: "Opening" means nothing to whoever wrote `connect(url).subscribe(...)`.
            raise AttributeError(
                f"this is not open yet and has no {name!r}; await it first, or use `async with ... as ...`"
            )


def connect(
    url: str,
    *,
    operation_timeout: float = 30.0,
    connect_timeout: float = 10.0,
    ping_interval: float = 30.0,
    backoff_first: float = 0.1,
    backoff_max: float = 5.0,
    max_message_bytes: int = 5 * 1024 * 1024,
    tls: ssl.SSLContext | None = None,
    name: str = "python",
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> Opening[Client]:
    """Connects to the service at `magnetar://host:port`: `await connect(url)`, or `async with connect(url) as client`.

    Times in seconds. operation_timeout: for everything that asks the service something. backoff_first, backoff_max: pauses
    between attempts to reconnect. `clock` and `rng` are for simulations. Raises InvalidArgument for another kind of URL,
    ConnectionLost when nothing answers there.
    """
    host, port = parse_url(url)
    options = ClientOptions(
        operation_timeout=operation_timeout,
        connect_timeout=connect_timeout,
        ping_interval=ping_interval,
        backoff_first=backoff_first,
        backoff_max=backoff_max,
        max_message_bytes=max_message_bytes,
        tls=tls,
    )

    async def open_client() -> Client:
        client = Client(host, port, options, name, clock or SystemClock(), rng or random.Random(_seed()))
        try:
            await client.open()
        except BaseException:
            await client.close()
            raise
        return client

    return Opening(open_client)


def _seed() -> int:
    # The one place where chance enters: reader names must differ between processes.
    return random.SystemRandom().getrandbits(64)


class Client:
    """Made by `connect`; used from one event loop. Methods named create_... and subscribe can be awaited or entered."""

    def __init__(
        self, host: str, port: int, options: ClientOptions, name: str, clock: Clock, rng: random.Random
    ) -> None:
        self.options = options
        self.clock = clock
        self.rng = rng
        self._service = (host, port)
        self._connection_options = ConnectionOptions(
            name=f"client {name}",
            max_message_bytes=options.max_message_bytes,
            ping_interval_s=options.ping_interval,
            handshake_timeout_s=options.connect_timeout,
            tls=options.tls,
        )
        self._links: dict[tuple[str, int], asyncio.Task[Link]] = {}
        # In the order in which they were made; closed the other way round.
        self._members: dict[Producer | Consumer | Reader, None] = {}
        self._last_id = 0
        self._closed = False

    async def open(self) -> None:
        """Connects once, so that a wrong address is found at once."""
        await self._link(self._service)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    # --- producers, consumers, readers -------------------------------------------------------------------------------

    def create_producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        batching: bool = True,
        batching_max_messages: int = 1000,
        batching_max_bytes: int = 128 * 1024,
        batching_max_delay: float = 0.001,
        compression: str = "none",
        send_timeout: float = 30.0,
        max_pending_bytes: int = 64 * 1024 * 1024,
        block_when_full: bool = True,
    ) -> Opening[Producer]:
        """A producer for `topic`, which is created if it does not exist.

        batching=False: each message is a batch of one in a frame of its own. A batch is sent when it is full, at the end of
        the loop turn if nothing is in flight, else after batching_max_delay seconds. compression: none, lz4 or zstd.
        Messages that are not confirmed within send_timeout seconds fail. max_pending_bytes bounds what is not confirmed:
        there `send_nowait` raises ProducerQueueFull and `send` waits, or raises too with block_when_full=False.
        """
        options = ProducerOptions(
            name=name,
            batching=batching,
            batching_max_messages=batching_max_messages,
            batching_max_bytes=batching_max_bytes,
            batching_max_delay=batching_max_delay,
            compression=compression,
            send_timeout=send_timeout,
            max_pending_bytes=max_pending_bytes,
            block_when_full=block_when_full,
        )
        full_name = str(TopicName.parse(topic))
        return Opening(lambda: self._open(Producer(self, full_name, options, self._new_id())))

    def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        type: str = "exclusive",
        start: Start = "latest",
        durable: bool = True,
        name: str = "",
        receiver_queue_messages: int | None = None,
        receiver_queue_bytes: int = 16 * 1024 * 1024,
        ack_group_messages: int = 1000,
        ack_group_delay: float = 0.1,
        nack_delay: float = 60.0,
    ) -> Opening[Consumer]:
        """A consumer of a subscription, which is created at `start` if it does not exist.

        type: "exclusive" (one consumer) or "shared" (messages are spread over consumers); start: "latest", "earliest", a
        MessageId (inclusive), ms since the epoch, or a datetime (without tzinfo it is local time). receiver_queue_messages
        bounds what waits in the client (None: 1,000, growing while the consumer keeps up, within receiver_queue_bytes). Acks
        are sent every ack_group_messages or ack_group_delay seconds; nack_delay is in seconds.

        durable=False: the subscription lives in the broker's memory alone, keeps no data from being trimmed, and ends with
        its last consumer. A consumer that lost its connection goes on behind the last message that it handed out: what it
        did not acknowledge until then does not come again. Raises ConsumerBusy if the subscription exists and is of the
        other kind.
        """
        if type not in SUBSCRIPTION_TYPES:
            raise InvalidArgument(f"unknown subscription type {type!r}; use 'exclusive' or 'shared'")
        options = ConsumerOptions(
            name=name,
            durable=durable,
            receiver_queue_messages=receiver_queue_messages,
            receiver_queue_bytes=receiver_queue_bytes,
            ack_group_messages=ack_group_messages,
            ack_group_delay=ack_group_delay,
            nack_delay=nack_delay,
        )
        full_name, subscription = str(TopicName.parse(topic)), check_subscription_name(subscription)
        return Opening(
            lambda: self._open(Consumer(self, full_name, subscription, type, start, options, self._new_id()))
        )

    def create_reader(
        self,
        topic: str,
        *,
        start: Start = "latest",
        name: str = "",
        receiver_queue_messages: int | None = None,
        receiver_queue_bytes: int = 16 * 1024 * 1024,
    ) -> Opening[Reader]:
        """A reader of `topic` from `start` on: no subscription stays behind, nothing is acknowledged.

        start: as for `subscribe`.
        """
        options = ConsumerOptions(
            name=name,
            durable=False,
            receiver_queue_messages=receiver_queue_messages,
            receiver_queue_bytes=receiver_queue_bytes,
        )
        full_name = str(TopicName.parse(topic))

        def reader() -> Reader:
            subscription = f"reader-{self.rng.getrandbits(64):016x}"
            what = f"reader of {full_name}"
            return Reader(self, full_name, subscription, "exclusive", start, options, self._new_id(), what)

        return Opening(lambda: self._open(reader()))

    # --- administration ----------------------------------------------------------------------------------------------

    async def list_topics(self, namespace: str = "") -> list[str]:
        """Full names of the topics of `tenant/namespace` ("": of all), sorted."""
        names: list[str] = []
        more = True
        while more:
            page = await self.request(ListTopics(0, namespace, names[-1] if names else ""))
            names += page["topics"]
            more = page["more"] and bool(page["topics"])
        return names

    async def topic_stats(self, topic: str) -> dict[str, Any]:
        """Figures of a topic (WIRE.md). Raises TopicNotFound."""
        name = str(TopicName.parse(topic))
        return dict(await self.request(TopicStats(0, name), topic=name))

    async def create_topic(self, topic: str) -> None:
        """Creates a topic; fine if it exists."""
        await self.request(CreateTopic(0, str(TopicName.parse(topic))))

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic and all its messages; while producers or consumers are connected only with `force`."""
        name = str(TopicName.parse(topic))
        await self.request(DeleteTopic(0, name, force), topic=name)

    async def delete_subscription(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Deletes a subscription; while consumers are connected only with `force`. Raises SubscriptionNotFound."""
        name = str(TopicName.parse(topic))
        command = DeleteSubscription(0, name, check_subscription_name(subscription), force)
        await self.request(command, topic=name)

    async def request(self, command: Command, *, topic: str | None = None, payload: bytes = b"") -> Any:
        """Asks the broker of `topic` (None: the one of the URL), again after retryable errors, up to operation_timeout.

        VersionConflict is raised at once: the same compare-and-set can only fail again.
        """

        async def ask() -> Any:
            link = await (self._link(self._service) if topic is None else self.link_of_topic(topic))
            return await link.request(command, self.options.operation_timeout, payload)

        return await until_answered(ask, self.options, self.rng, type(command).__name__)

    # --- closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Closes producers (flushing), consumers, readers and connections. Raises what a producer could not send."""
        if self._closed:
            return
        failure: MagnetarError | None = None
        for member in reversed(list(self._members)):
            try:
                await member.close()
            except MagnetarError as error:
                failure = failure or error
        self._closed = True
        tasks, self._links = list(self._links.values()), {}
        for task in tasks:
            task.cancel()
        # Opened ones too, whose cancelling does nothing. A link is closed when its socket is: the loop may end next.
        for link in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(link, Link):
                await link.close()
        if failure is not None:
            raise failure

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # --- for producers, consumers and readers ------------------------------------------------------------------------

    async def _open(self, member: M) -> M:
        if self._closed:
            raise AlreadyClosed("the client is closed; connect again")
        self._members[member] = None
        try:
            await member.open()
        except BaseException:
            self.forget(member)
            raise
        return member

    def forget(self, member: Producer | Consumer | Reader | Any) -> None:
        """A member was closed."""
        self._members.pop(member, None)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    async def link_of_topic(self, topic: str) -> Link:
        """The connection to the broker that serves `topic`. Raises what the look-up failed with."""
        timeout = self.options.operation_timeout
        service = await self._link(self._service)
        found = await service.request(Lookup(0, topic), timeout)
        address = parse_url(found["url"])
        partitions = (await service.request(Partitions(0, topic), timeout))["partitions"]
        if partitions:
            raise Unsupported(f"{topic} has {partitions} partitions, which this client cannot address yet")
        return service if address == self._service else await self._link(address)

    async def _link(self, address: tuple[str, int]) -> Link:
        """The connection to a broker, opened if there is none; those who ask meanwhile wait for the same one."""
        if self._closed:
            raise AlreadyClosed("the client is closed; connect again")
        task = self._links.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().closed)):
            task = asyncio.get_running_loop().create_task(
                Link.open(*address, self._connection_options, self.options.connect_timeout),
                name=f"connect {address[0]}:{address[1]}",
            )
            task.add_done_callback(_retrieved)
            self._links[address] = task
        return await asyncio.shield(task)

    async def tell_leaving(self, link: Link, command: Command) -> None:
        """Tells the broker that a producer or consumer is closed; it finds out itself if that fails."""
        with contextlib.suppress(MagnetarError):
            await link.request(command, min(_LEAVE_TIMEOUT_S, self.options.operation_timeout))


def _retrieved(task: asyncio.Task[Link]) -> None:
    """Marks the outcome as seen: whoever asks next opens another connection."""
    if not task.cancelled():
        task.exception()
