"""Client: the connections of one application to the service, and what it makes on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import warnings
from collections.abc import Awaitable, Callable, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from magnetar.proto.errors import AlreadyClosed, AlreadyExists, InvalidArgument, Unsupported
from magnetar.proto.ids import NO_PARTITION, MessageId, TopicName
from magnetar.runtime.clock import SystemClock

from .administration import Admin
from .connection.broker_connection import ABORT_TIMEOUT_S, CLOSE_TIMEOUT_S
from .connection.brokers import check_resolvable
from .connection.pool import ConnectionPool
from .consumer import Consumer
from .dead_letters import DeadLetters
from .failover import ClusterFailover
from .member import Member
from .options import (
    ClientOptions,
    ConsumerOptions,
    DeadLetterPolicy,
    ProducerOptions,
    ReaderOptions,
    TableViewOptions,
    behind,
    function_taken_by,
    reading,
    taken_by,
)
from .partitioned_producer import PartitionedProducer
from .producer import Producer
from .receiving import Reader, Receiving
from .service_url import AutoFailover, parse_url
from .table_view import TableView
from .topic.consumer import TopicConsumer
from .topic.producer import TopicProducer
from .topic_pattern import NamedTopics, PatternTopics, TopicPattern, checked_topics
from .topics_consumer import ChangingTopics, TopicsConsumer
from .topics_watch import PartitionsWatch, TopicsWatch

log = logging.getLogger("magnetar.client")

C = TypeVar("C", bound=AbstractAsyncContextManager[Any])
M = TypeVar("M", bound=Member)
OnClosed = Callable[[], object]


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

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._opened is not None
        await self._opened.__aexit__(*exc_info)

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __enter__(self) -> NoReturn:
            raise TypeError(
                "use `async with`, or connect from magnetar.client.blocking for code without asyncio"
            )

        def __exit__(self, *exc_info: Any) -> None: ...

        def __aiter__(self) -> NoReturn:
            raise TypeError("this is not open yet; await it first, or use `async with ... as ...`")

        def __getattr__(self, name: str) -> NoReturn:
            # A forgotten `await`: "Opening" means nothing to whoever wrote `connect(url).subscribe(...)`.
            raise AttributeError(
                f"this is not open yet and has no {name!r}; await it first, or use `async with ... as ...`"
            )


@function_taken_by(ClientOptions)
def connect(options: ClientOptions) -> Opening[Client]:
    """Connects to the service at `magnetar://host:port`: `await connect(url)`, or `async with connect(url) as client`.

    The URL may name several brokers of a cluster, `magnetar://a:7650,b:7650`, or a name with SRV records,
    `magnetar+srv://example.org`: any of them that answers will do. An AutoFailover names several clusters.

    Durations in seconds, or timedeltas. operation_timeout: for everything that asks the service something. backoff_first,
    backoff_max: pauses between attempts to reconnect. max_queued_bytes: what all consumers and readers of the client may
    have in their receiver queues, or have asked for; beyond it each of them may have 64 KiB and a batch, so that none waits
    for another. max_pending_bytes bounds what all producers of the client have sent and is not confirmed, as theirs does
    for each of them; None leaves it to them. on_connection_state is called in the client's loop with each new
    `connection_state`.

    `clock` and `rng` are for simulations. Raises InvalidArgument for another kind of URL, ConnectionLost when nothing
    answers there.
    """
    failover = options.url if isinstance(options.url, AutoFailover) else None
    services = (parse_url(options.url),) if failover is None else failover.services
    for service in services:
        check_resolvable(service)

    async def open_client() -> Client:
        rng = options.rng or random.Random(_seed())
        client = Client(ConnectionPool(services[0], options, options.clock or SystemClock(), rng), failover)
        try:
            await client._open()
        except BaseException:
            await client.abort()
            raise
        return client

    return Opening(open_client)


def _seed() -> int:
    # The one place where chance enters: reader names must differ between processes.
    return random.SystemRandom().getrandbits(64)


def name_of(wanted: TopicPattern | list[str]) -> str:
    """What a consumer of it says it consumes."""
    return str(wanted) if isinstance(wanted, TopicPattern) else ", ".join(wanted)


class Client:
    """Made by `connect`; used from one event loop. Methods named create_... and subscribe can be awaited or entered.

    admin: what operators ask of topics, subscriptions, policies and the cluster.
    """

    def __init__(self, pool: ConnectionPool, failover: AutoFailover | None = None) -> None:
        self.admin = Admin(pool)
        self._pool = pool
        self._failover = None if failover is None else ClusterFailover(pool, failover)
        # By id, in the order in which they were made; closed the other way round.
        self._members: dict[int, Member] = {}
        self._last_id = 0
        self._closed = False
        self._closing = asyncio.Lock()

    async def _open(self) -> None:
        """Connects once, so that a wrong address is found at once."""
        await (self._pool.to_service() if self._failover is None else self._failover.open())

    @property
    def options(self) -> ClientOptions:
        """What it was made with."""
        return self._pool.options

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    @property
    def connection_state(self) -> str:
        """One of "connected", "reconnecting" (something that is open here has no broker now) and "closed"."""
        return self._pool.state

    # --- clusters ----------------------------------------------------------------------------------------------------

    @property
    def service_url(self) -> str:
        """The URL of the cluster that is used now."""
        return str(self._pool.service)

    @property
    def cluster_switches(self) -> int:
        """How often the client went to another cluster, by `switch_to` or by its AutoFailover."""
        return self._pool.cluster

    async def switch_to(self, url: str) -> None:
        """Goes to another cluster with all producers, consumers and readers, which attach there in the background.

        What is not confirmed yet is sent there again. Subscriptions go on where they stand there, or begin at their `start`;
        readers go on at the time of the last message that they handed out. Messages that were received before cannot be
        acknowledged any more. Raises ConnectionLost, and stays, if nothing answers at `url`.
        """
        service = parse_url(url)
        check_resolvable(service)
        self._check_open()
        if self._failover is not None:
            raise InvalidArgument(
                "this client goes from cluster to cluster by itself (AutoFailover); connect with a URL to switch by hand"
            )
        if service == self._pool.service:
            return
        error = await self._pool.probe(service)
        if error is not None:
            raise error
        log.warning("this client leaves %s for %s", self._pool.service, service)
        self._pool.switch(service)

    # --- producers, consumers, readers -------------------------------------------------------------------------------

    @taken_by(ProducerOptions)
    def create_producer(self, options: ProducerOptions) -> Opening[Producer]:
        """A producer for `topic`, which is created if it does not exist.

        batching=False: each message is a batch of one in a frame of its own. A batch is sent when it is full, at the end of
        the loop turn if nothing is in flight, else after batching_max_delay seconds. batching_by_key makes a batch for each
        key of what was collected, which the service gives to key_shared consumers without decoding it.

        compression: none, lz4, zstd, zlib or snappy. Messages that are not confirmed within send_timeout seconds fail.
        max_pending_bytes bounds what is not confirmed: there `send_nowait` raises ProducerQueueFull and `send` waits, or
        raises too with block_when_full=False. It is shared evenly by the partitions of a topic.

        chunking=True: a message that is larger than max_message_bytes is sent in parts, and received as one.

        access_mode: "shared", or alone: "exclusive" raises ProducerFenced while others produce to the topic,
        "wait_for_exclusive" waits, without a timeout, until they have left, and "exclusive_with_fencing" ends them. Whose
        place was taken raises ProducerFenced from every call.

        routing, of a partitioned topic: messages with a key go by its routing_hash ("murmur3" or "java", as Pulsar's
        clients), the others to one partition after the other ("round_robin", a batch to each) or to one that is chosen by
        chance ("single"). A function of an OutgoingMessage and the number of partitions says it for each message.
        """
        return self._opening_producer(options)

    def _opening_producer(self, options: ProducerOptions, *, copies: bool = False) -> Opening[Producer]:
        def new_producer(options: ProducerOptions) -> TopicProducer:
            return TopicProducer(self._pool, options, self._new_id(), lambda: None, copies=copies)

        async def make(producer_id: int, on_closed: OnClosed) -> Producer:
            count = await self._partitions_of(options.topic)
            if count:
                watch = PartitionsWatch(self._pool, options.topic, count, producer_id)
                return Producer(PartitionedProducer(self._pool, options, watch, new_producer, on_closed))
            return Producer(TopicProducer(self._pool, options, producer_id, on_closed, copies=copies))

        return self._opening(make)

    async def _partitions_of(self, topic: str) -> int:
        """How many a topic has; 0: it has none, or is a partition itself."""
        if TopicName.parse(topic).partition != NO_PARTITION:
            return 0
        return await self._pool.partitions_of(topic, create=True)

    @taken_by(ConsumerOptions)
    def subscribe(self, options: ConsumerOptions) -> Opening[Consumer]:
        """A consumer of a subscription, which is created at `start` if it does not exist.

        topic: a name, several, or a compiled pattern: then all topics of its namespace (that of `tenant/namespace/...`, else
        public/default) whose names it matches as a whole, also those that are made later, from their beginning: the service
        tells of them, and they are looked for every discovery_interval seconds. Topics whose names end in -DLQ or -RETRY
        belong to it only if the pattern has one of these in it, and single partitions if it has -partition- in it. Several
        topics share the receiver queue.

        type: "exclusive" (one consumer), "failover" (one is active, the others wait for its place), "shared" (messages are
        spread over consumers) or "key_shared" (spread by key, each key in order at one consumer). priority_level (failover,
        shared): consumers with a lower number come first. hash_ranges (key_shared, exclusive): the slots, (first, last) of 0
        to 65,535, that this consumer wants; without them the consumers share all slots evenly. What is in none of those of
        an exclusive consumer does not come, and is acknowledged.

        start: "latest", "earliest", a MessageId (inclusive), ms since the epoch, or a datetime (local if it has no tzinfo).
        receiver_queue_messages bounds what waits in the client (None: 1,000, growing while the consumer keeps up, within
        receiver_queue_bytes). Acks are sent every ack_group_messages or ack_group_delay seconds. With fail_on_trimmed
        receiving raises MessageLost, once, where messages that were to come next had been trimmed.

        A message in parts is put together here; max_pending_chunked_messages at most may lack some, and after
        expire_incomplete_chunked_messages seconds without another part it is let go. With stream_chunks it is handed out
        with its first part (StreamedMessage), and `stream` reads it.

        A message that is nacked is delivered again after nack_delay seconds, or after a pause that grows with its redelivery
        count by nack_backoff. With an ack_timeout, of 1 s or more, so is one that was handed out so many seconds ago and is
        neither acknowledged nor nacked. None: it comes again when this consumer leaves. dead_letter says when a message is
        given up and where it goes then; retry=True is for `reconsume_later`. Both are for shared and key_shared.

        durable=False: the subscription lives in the broker's memory alone, keeps no data from being trimmed, and ends with
        its last consumer. A consumer that lost its connection goes on behind the last message that it handed out: what it
        did not acknowledge until then does not come again. Raises ConsumerBusy if the subscription exists and is of the
        other kind. read_compacted (exclusive, failover; all consumers alike): of what was compacted each key's last message.
        """
        topic, subscription = options.topic, options.subscription
        wanted = TopicPattern(topic) if isinstance(topic, re.Pattern) else checked_topics(topic)
        if (policy := options.letter_policy) is not None and isinstance(wanted, list):
            policy.check_names(wanted, subscription)

        async def make(consumer_id: int, on_closed: OnClosed) -> Consumer:
            what = f"consumer {subscription!r} of {wanted if isinstance(wanted, TopicPattern) else ', '.join(wanted[:3])}"
            letters = None if policy is None else self._letters(what, subscription, policy, wanted)
            topics: list[str] | ChangingTopics
            if isinstance(wanted, TopicPattern):
                watch = TopicsWatch(self._pool, wanted.namespace, self._new_id())
                leaves_out = (lambda topic: False) if letters is None else letters.is_letter_topic
                topics = PatternTopics(wanted, self.admin, watch, options.discovery_interval, leaves_out)
            else:
                names = wanted if letters is None else letters.with_retry_topics(wanted, retry=options.retry)
                topics = await self._named_topics(names, options)
            if isinstance(topics, list) and len(topics) == 1:
                consumer = TopicConsumer(
                    self._pool, topics[0], consumer_id, what, options, on_closed, delivery_filter=letters
                )
                return Consumer(topics[0], subscription, consumer, letters)
            several = self._topics_consumer(
                what, f"consumer {subscription!r}", topics, options, letters, on_closed
            )
            return Consumer(name_of(wanted), subscription, several, letters)

        return self._opening(make)

    async def _named_topics(self, names: list[str], options: ConsumerOptions) -> list[str] | NamedTopics:
        """The same names if none of them is partitioned."""
        counts = await asyncio.gather(*map(self._partitions_of, names))
        watches = [
            PartitionsWatch(self._pool, name, count, self._new_id())
            for name, count in zip(names, counts, strict=True)
            if count
        ]
        if watches and isinstance(options.start, MessageId):
            raise InvalidArgument(
                f"{watches[0].topic} is partitioned, and a message id is a place in one partition: start at 'earliest', "
                "'latest' or a time, and seek to the id, or give seek a function that says where each partition is to go"
            )
        return NamedTopics(self._pool, names, watches, options.discovery_interval) if watches else names

    def _topics_consumer(
        self,
        what: str,
        kind: str,
        topics: list[str] | ChangingTopics,
        options: ConsumerOptions,
        letters: DeadLetters | None,
        on_closed: OnClosed,
    ) -> TopicsConsumer:
        """The consumer of several topics or partitions, and of the retry topics of all of them."""
        of_pattern = isinstance(topics, PatternTopics)
        # One for all partitions: failover consumers take turns by it.
        options = replace(options, name=options.name or f"consumer-{self._pool.rng.getrandbits(64):016x}")

        def expand(topics: list[str]) -> list[str]:
            if letters is None or not of_pattern:
                return topics
            return letters.with_retry_topics(topics, retry=options.retry)

        def new_consumer(
            topic: str, on_wake: Callable[[TopicConsumer], object], later: bool
        ) -> TopicConsumer:
            letter_topic = letters is not None and letters.is_retry_topic(topic)
            own_options = replace(options, start="earliest") if letter_topic or later else options
            if letter_topic:
                own_options = replace(own_options, dead_letter=None, retry=False)
            may_make = TopicName.parse(topic).partition == NO_PARTITION and (letter_topic or not of_pattern)
            return TopicConsumer(
                self._pool,
                topic,
                self._new_id(),
                f"{kind} of {topic}",
                own_options,
                lambda: None,
                create=may_make,
                on_wake=on_wake,
                delivery_filter=letters,
            )

        return TopicsConsumer(what, self._pool, topics, new_consumer, on_closed, expand=expand)

    def _letters(
        self, what: str, subscription: str, policy: DeadLetterPolicy, wanted: list[str] | TopicPattern
    ) -> DeadLetters:
        async def open_producer(topic: str) -> Producer:
            return await self._opening_producer(ProducerOptions(topic, chunking=True), copies=True)

        async def make_subscription(topic: str, name: str) -> None:
            with contextlib.suppress(
                AlreadyExists, Unsupported
            ):  # a non-persistent topic has none without a consumer
                await self.admin.create_subscription(topic, name, start="earliest")

        return DeadLetters(
            what,
            subscription,
            policy,
            open_producer,
            make_subscription,
            self._pool.await_end,
            of_letters=isinstance(wanted, list) or wanted.of_letters,
        )

    @taken_by(ReaderOptions)
    def create_reader(self, options: ReaderOptions) -> Opening[Reader]:
        """A reader of `topic` from `start` on: no subscription stays behind, nothing is acknowledged.

        start, fail_on_trimmed, read_compacted: as for `subscribe`. inclusive=False: behind the message whose id `start` is.
        """
        start = options.start
        if isinstance(start, MessageId) and not options.inclusive:
            start = behind(start)
        consumer_options = reading(options, self._unknown_subscription(), start)

        async def make(consumer_id: int, on_closed: OnClosed) -> Reader:
            consumer = await self._reading_consumer(consumer_id, "reader", consumer_options, on_closed)
            return Reader(str(consumer_options.topic), consumer)

        return self._opening(make)

    @taken_by(TableViewOptions)
    def create_table_view(self, options: TableViewOptions) -> Opening[TableView]:
        """The last value of each key of `topic`, in memory, which follows the topic until it is closed.

        It is opened once it has all that the topic has at that moment. A topic that is compacted now and then is read
        faster.
        """
        consumer_options = reading(options, self._unknown_subscription(), "earliest", read_compacted=True)

        async def make(consumer_id: int, on_closed: OnClosed) -> TableView:
            consumer = await self._reading_consumer(consumer_id, "table view", consumer_options, on_closed)
            return TableView(str(consumer_options.topic), consumer)

        return self._opening(make)

    def _unknown_subscription(self) -> str:
        return f"reader-{self._pool.rng.getrandbits(64):016x}"

    async def _reading_consumer(
        self, consumer_id: int, kind: str, options: ConsumerOptions, on_closed: OnClosed
    ) -> TopicConsumer | TopicsConsumer:
        """A consumer of a subscription that nobody else knows."""
        topic = str(options.topic)
        what = f"{kind} of {topic}"
        topics = await self._named_topics([topic], options)
        if isinstance(topics, list):
            return TopicConsumer(self._pool, topic, consumer_id, what, options, on_closed)
        return self._topics_consumer(what, kind, topics, options, None, on_closed)

    # --- closing -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Stops consumers, closes producers (flushing), consumers, readers, connections. Raises what could not be sent.

        Cancelled, it does the rest without flushing and without waiting for the service.
        """
        self._pool.set_state("closed")
        async with self._closing:
            failures: list[BaseException] = []
            try:
                members = list(reversed(self._members.values()))
                for member in members:
                    if isinstance(member, Receiving):
                        member.stop()
                # Producers first: who waits for a receipt before an acknowledgement can still send that.
                for producers in (True, False):
                    closing = [one.close() for one in members if isinstance(one, Producer) is producers]
                    ended = await asyncio.gather(*closing, return_exceptions=True)
                    failures += [error for error in ended if error is not None]
                await self._end(CLOSE_TIMEOUT_S)
            except BaseException:
                await self.abort()
                raise
            if failures:
                raise failures[0]

    async def abort(self) -> None:
        """Closes at once: what is not confirmed fails, and nothing but the sockets is waited for, 0.1 s at most."""
        await self._end(ABORT_TIMEOUT_S)

    async def _end(self, timeout: float) -> None:
        self._closed = True
        self._pool.set_state("closed")
        if self._failover is not None:
            self._failover.close()
        for member in reversed(list(self._members.values())):
            member.abort()
        await self._pool.close(timeout)

    def __del__(self, warn: Callable[..., None] = warnings.warn) -> None:
        if not self._closed:
            for unclosed in (*self._members.values(), self):
                warn(f"{unclosed!r} was not closed", ResourceWarning, source=self)

    def __repr__(self) -> str:
        return f"<Client of {self.service_url}>"

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.close()
        else:
            await self.abort()

    # --- members -----------------------------------------------------------------------------------------------------

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _opening(self, make: Callable[[int, OnClosed], Awaitable[M]]) -> Opening[M]:
        async def open_member() -> M:
            self._check_open()
            member_id = self._new_id()
            member = await make(member_id, partial(self._members.pop, member_id, None))
            self._check_open()  # it may have been closed meanwhile
            self._members[member_id] = member
            try:
                await member._open()
                self._check_open()  # what it began after that nobody would end
            except BaseException:
                member.abort()
                raise
            return member

        return Opening(open_member)

    def _check_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the client is closed; connect again")
