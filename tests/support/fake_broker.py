"""A broker of one process and no disk over the real framed connection, for tests of the client.

It stores entries in lists, coalesces what one read brought, and can be made to hold receipts back, fail sends,
cut connections, forget to answer. Ledger ids count up with each restart of a topic's storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

from magnetar.proto.admission import AdmittedGroups, admit_groups
from magnetar.proto.commands import (
    ACK_ROW,
    ACK_SET_ROW,
    RECEIPT_ROW,
    Ack,
    CloseConsumer,
    CloseProducer,
    Command,
    CreateProducer,
    Deliver,
    Flow,
    GetPolicies,
    LastMessageId,
    ListTopics,
    Lookup,
    Partitions,
    PartitionsChanged,
    Receipt,
    Redeliver,
    Seek,
    Send,
    SendDelayed,
    SendFailed,
    Subscribe,
    TopicStats,
    Unsubscribe,
    WatchPartitions,
    decode_command,
    decode_rows,
    encode_rows,
)
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import (
    ConsumerBusy,
    InvalidArgument,
    MagnetarError,
    PartitionNotFound,
    UnknownCommand,
)
from magnetar.proto.frames import Run
from magnetar.proto.ids import DUPLICATE_ID, MessageId, TopicName
from magnetar.runtime.connection import Connection, ConnectionOptions, FramedServer, start_server

Position = tuple[int, int]  # entry, index

HELD = object()
"""What `FakeBroker.answer` returns for a request that it does not answer now."""


@dataclass
class StoredTopic:
    """Entries of one ledger, and the positions that each subscription acknowledged."""

    entries: list[Entry] = field(default_factory=list)
    acked: dict[str, set[Position]] = field(default_factory=dict)
    start: dict[str, Position] = field(default_factory=dict)
    epoch: dict[str, int] = field(default_factory=dict)
    message_count: int = 0
    last_ids: dict[str, int] = field(default_factory=dict)

    def last_id(self) -> MessageId | None:
        if not self.entries:
            return None
        return MessageId(1, len(self.entries) - 1, self.entries[-1].message_count - 1)

    def position(self, start: tuple[str, Any]) -> Position:
        kind, value = start
        if kind == "earliest":
            return (0, 0)
        if kind == "id":
            message_id = MessageId.from_bytes(value)
            return (message_id.entry, message_id.index)
        if kind == "time":
            for number, entry in enumerate(self.entries):
                if entry.append_time_ms >= value:
                    return (number, 0)
        return (len(self.entries), 0)


@dataclass(eq=False)
class FakeConsumer:
    """A consumer at the broker: `next` is the position to deliver next."""

    handler: Handler
    id: int
    topic: StoredTopic
    subscription: str
    durable: bool
    next: Position
    epoch: int
    messages: int = 0
    bytes: int = 0
    again: list[Position] = field(default_factory=list)

    def dispatch(self) -> None:
        topic = self.topic
        while self.messages > 0 and self.bytes > 0:
            number, index = self.next
            if number >= len(topic.entries):
                break
            entry = topic.entries[number]
            self.next = (number + 1, 0)
            acked = topic.acked.get(self.subscription, set()) if self.durable else set()
            wanted = [i for i in range(index, entry.message_count) if (number, i) not in acked]
            if not wanted:
                continue
            first = entry.batch_of(wanted[0])
            last = min(entry.batch_of(min(wanted[-1], wanted[0] + self.messages - 1)) + 1, entry.batch_count)
            if last < entry.batch_count:
                self.next = (number, entry.end_indexes[last - 1])
            self.deliver(number, first, last, set(wanted), 0)

    def deliver(self, number: int, first: int, last: int, wanted: set[int], redelivered: int) -> None:
        entry = self.topic.entries[number]
        start, end = entry.batch_start_index(first), entry.end_indexes[last - 1]
        hidden = [(i, i) for i in range(start, end) if i not in wanted]
        command = Deliver(0, self.id, self.epoch, 1, number, -1, redelivered, len(hidden))
        parts = entry.slice(first, last)
        self.messages -= end - start - len(hidden)
        self.bytes -= entry.batch_bounds(last - 1)[1] - entry.batch_bounds(first)[0]
        self.handler.connection.send(command.encode(), [encode_rows(ACK_SET_ROW, hidden), *parts])


class Handler:
    """One connection."""

    def __init__(self, broker: FakeBroker) -> None:
        self.broker = broker
        self.connection: Connection
        self.producers: dict[int, tuple[StoredTopic, str, int]] = {}
        self.watches: dict[int, str] = {}  # of partitions: id -> topic
        self.consumers: dict[int, FakeConsumer] = {}

    def connection_ready(self, connection: Connection) -> None:
        self.connection = connection
        self.broker.handlers.append(self)

    def connection_closed(self, error: MagnetarError | None) -> None:
        self.broker.handlers.remove(self)
        self.producers.clear()
        self.consumers.clear()

    def writing_resumed(self) -> None:
        pass

    def runs_received(self, runs: list[Run]) -> None:
        for header, payloads in runs:
            command = decode_command(header)
            if isinstance(command, Send):
                self.broker.frames_of_sends += len(payloads)
                self.broker.sent(self, command, payloads)
                continue
            for payload in payloads:
                self.broker.commands.append(command)
                if type(command) in self.broker.unanswered:
                    continue
                failure = self.broker.failures.pop(type(command), None)
                if failure is not None:
                    self.connection.answer_error(command.request_id, failure)
                    continue
                try:
                    result = self.broker.answer(self, command, payload)
                except MagnetarError as error:
                    self.connection.answer_error(command.request_id, error)
                else:
                    if result is not HELD:
                        self.connection.answer(command.request_id, result)
                self.broker.after(self, command)


class FakeBroker:
    """commands: every command received but SEND. failures: what the next command of a type is answered with.
    unanswered: command types that get no answer. hold_receipts: SENDs are stored, their receipts held back. lose_sends:
    SENDs are neither stored nor receipted. deduplicates: by name and sequence id.
    fail_next_send: the next SEND and all after it in its epoch fail with this. delay_next_send: the next SEND waits for this
    reason. partitions: how many a topic has, by full name; see `grow`.
    """

    def __init__(self) -> None:
        self.topics: dict[str, StoredTopic] = {}
        self.partitions: dict[str, int] = {}
        self.handlers: list[Handler] = []
        self.commands: list[Command] = []
        self.failures: dict[type[Command], MagnetarError] = {}
        self.unanswered: list[type[Command]] = []
        self.hold_receipts = False
        self.deduplicates = False
        self.lose_sends = False
        self.fail_next_send: MagnetarError | None = None
        self.delay_next_send: MagnetarError | None = None
        self.failed_epochs: dict[tuple[int, int], None] = {}
        self.held: list[tuple[Handler, bytes, bytes]] = []
        self.frames_of_sends = 0
        self.split_receipts = False
        self.now_ms = 1_700_000_000_000
        self.durable_acks: list[tuple[str, bool, list[tuple[int, ...]]]] = []
        self.server: FramedServer

    @classmethod
    async def start(cls, port: int = 0) -> Self:
        self = cls()
        await self.listen(port)
        return self

    async def listen(self, port: int) -> None:
        self.server = await start_server(
            "127.0.0.1", port, lambda: Handler(self), ConnectionOptions(name="fake broker")
        )

    @property
    def port(self) -> int:
        return self.server.addresses[0][1]

    @property
    def url(self) -> str:
        return f"magnetar://127.0.0.1:{self.port}"

    async def close(self) -> None:
        self.cut()
        await self.server.close(0.0)

    def cut(self) -> None:
        """Breaks every connection."""
        for handler in list(self.handlers):
            handler.connection.abort()

    def topic(self, name: str) -> StoredTopic:
        if "://" not in name:
            name = f"persistent://public/default/{name}"
        return self.topics.setdefault(name, StoredTopic())

    def received(self, kind: type[Command]) -> list[Any]:
        return [command for command in self.commands if isinstance(command, kind)]

    def store(
        self, topic: StoredTopic, batches: list[bytes], counts: list[int], name: str
    ) -> tuple[int, int]:
        entry = encode_entry(
            batches,
            counts,
            [0] * len(batches),
            [name],
            first_index=topic.message_count,
            append_time_ms=self.now_ms,
        )
        topic.entries.append(Entry(entry))
        topic.message_count += sum(counts)
        return 1, len(topic.entries) - 1

    def store_once(self, topic: StoredTopic, groups: AdmittedGroups, name: str) -> list[tuple[int, ...]]:
        """Receipt rows. With `deduplicates`, what is at or below the producer's last sequence id is not stored again."""
        last = topic.last_ids.get(name, -1) if self.deduplicates else -1
        fresh = 0  # ids rise: what was stored before comes first
        while fresh < len(groups.batches) and groups.last_sequence_id(fresh) <= last:
            fresh += 1
        stored = groups.part(fresh, len(groups.batches))
        place: tuple[int, int] = DUPLICATE_ID[:2]
        rows: list[tuple[int, ...]] = []
        index = 0
        for position, (sequence_id, count) in enumerate(zip(groups.sequence_ids, groups.counts)):
            if position == fresh:
                assert sequence_id > last, "a batch was stored in part"
                place = self.store(topic, stored.batches, stored.counts, name)
            if rows and rows[-1][0] + rows[-1][1] == sequence_id and rows[-1][2:4] == place:
                rows[-1] = (rows[-1][0], rows[-1][1] + count, *rows[-1][2:])
            else:
                rows.append((sequence_id, count, *place, index))
            index += count if position >= fresh else 0
        if stored.batches:
            topic.last_ids[name] = stored.last_sequence_id(len(stored.batches) - 1)
        return rows

    def sent(self, handler: Handler, command: Send, payloads: list[bytes]) -> None:
        epoch = (command.producer_id, command.epoch)
        if self.lose_sends or epoch in self.failed_epochs:
            return
        topic, name, current = handler.producers[command.producer_id]
        assert command.epoch == current
        groups = admit_groups(payloads)
        if self.fail_next_send is not None:
            error, self.fail_next_send = self.fail_next_send, None
            self.failed_epochs[epoch] = None
            failed = SendFailed(
                0, *epoch, groups.sequence_ids[0], error.code, int(error.action), error.message
            )
            handler.connection.send(failed.encode())
            return
        if self.delay_next_send is not None:
            error, self.delay_next_send = self.delay_next_send, None
            handler.connection.send(SendDelayed.of(*epoch, error).encode())
        count = len(groups.batches)
        halves = [groups]
        if self.split_receipts and count > 1:
            halves = [groups.part(0, count // 2), groups.part(count // 2, count)]
        for half in halves:
            rows = self.store_once(topic, half, name)
            receipt = (handler, Receipt(0, *epoch).encode(), encode_rows(RECEIPT_ROW, rows))
            if self.hold_receipts:
                self.held.append(receipt)
            else:
                receipt[0].connection.send(*receipt[1:])
        for other in self.handlers:
            for consumer in other.consumers.values():
                consumer.dispatch()

    def release_receipts(self) -> None:
        held, self.held = self.held, []
        self.hold_receipts = False
        for handler, header, payload in held:
            handler.connection.send(header, payload)

    def answer(self, handler: Handler, command: Command, payload: bytes) -> Any:
        match command:
            case Lookup():
                return {"url": self.url, "final": True}
            case GetPolicies():
                in_force = [["deduplication", "", self.deduplicates, "broker"]]
                return {"policies": {}, "version": 0, "in_force": in_force}
            case Partitions():
                return {"partitions": self.partitions.get(command.topic, 0)}
            case WatchPartitions():
                if not command.topic:
                    handler.watches.pop(command.watch_id, None)
                    return None
                handler.watches[command.watch_id] = command.topic
                return {"partitions": self.partitions.get(command.topic, 0)}
            case ListTopics():
                return {"topics": sorted(self.topics), "more": False}
            case TopicStats():
                return {"subscriptions": dict.fromkeys(self.topic(command.topic).start)}
            case CreateProducer():
                self.check_name(command.topic)
                name = command.name or f"producer-{command.producer_id}"
                handler.producers[command.producer_id] = (self.topic(command.topic), name, command.epoch)
                last = self.topic(command.topic).last_ids.get(name, -1) if self.deduplicates else -1
                return {"name": name, "epoch": command.epoch, "last_sequence_id": last}
            case CloseProducer():
                handler.producers.pop(command.producer_id, None)
            case Subscribe():
                return self.subscribe(handler, command)
            case Flow() | CloseConsumer() | Ack() | Redeliver() | Seek() | LastMessageId() | Unsubscribe():
                return self.of_consumer(handler.consumers.get(command.consumer_id), command, payload)
            case _:
                raise UnknownCommand(f"the fake broker does not know {type(command).__name__}")
        return None

    def check_name(self, topic: str) -> None:
        name = TopicName.parse(topic)
        if topic in self.partitions:
            raise InvalidArgument(f"{topic} is partitioned")
        if name.partition >= self.partitions.get(str(name.whole), 0):
            raise PartitionNotFound(f"{name.whole} has no partition {name.partition}")

    def grow(self, name: str, partitions: int) -> None:
        """A topic has so many partitions from now on, and who watches it is told; 0: it is deleted."""
        topic = str(TopicName.parse(name))
        self.partitions[topic] = partitions
        for number in range(partitions):
            self.topic(f"{topic}-partition-{number}")
        for handler in self.handlers:
            for watch_id, watched in handler.watches.items():
                if watched == topic:
                    handler.connection.send(PartitionsChanged(0, watch_id, partitions).encode())

    def subscribe(self, handler: Handler, command: Subscribe) -> dict[str, Any]:
        self.check_name(command.topic)
        topic = self.topic(command.topic)
        others = [c for h in self.handlers for c in h.consumers.values() if c.topic is topic]
        if command.type == "exclusive" and any(c.subscription == command.subscription for c in others):
            raise ConsumerBusy("the subscription has a consumer")
        name = command.subscription
        position = topic.position(command.start)
        if command.durable:
            position = topic.start.setdefault(name, position)
            topic.acked.setdefault(name, set())
        epoch = topic.epoch.setdefault(name, 0)
        consumer = FakeConsumer(handler, command.consumer_id, topic, name, command.durable, position, epoch)
        handler.consumers[command.consumer_id] = consumer
        return {"epoch": epoch, "position": [1, *position], "trimmed": False}

    def of_consumer(self, consumer: FakeConsumer | None, command: Command, payload: bytes) -> Any:
        if consumer is None:
            return None
        topic, name = consumer.topic, consumer.subscription
        match command:
            case Flow():
                consumer.messages += command.messages
                consumer.bytes += command.bytes
            case CloseConsumer():
                consumer.handler.consumers.pop(consumer.id)
            case Unsubscribe():
                topic.start.pop(name)
                topic.acked.pop(name)
            case LastMessageId():
                last = topic.last_id()
                return None if last is None else last.to_bytes()
            case Seek():
                consumer.next = topic.start[name] = topic.position(command.start)
                consumer.epoch = topic.epoch[name] = consumer.epoch + 1
                topic.acked[name] = set()
                return {"epoch": consumer.epoch, "position": [1, *consumer.next], "trimmed": False}
            case Ack():
                rows = list(decode_rows(ACK_ROW, payload))
                self.acknowledge(topic, name, rows, cumulative=command.cumulative)
                if command.request_id:
                    self.durable_acks.append((name, command.cumulative, rows))
            case Redeliver():
                for _ledger, entry, first, last in decode_rows(ACK_ROW, payload):
                    stored = topic.entries[entry]
                    batches = stored.batch_of(first), stored.batch_of(last) + 1
                    consumer.deliver(entry, *batches, set(range(first, last + 1)), 1)
        return None

    def after(self, handler: Handler, command: Command) -> None:
        if isinstance(command, Flow | Seek):
            consumer = handler.consumers.get(command.consumer_id)
            if consumer is not None:
                consumer.dispatch()

    def acknowledge(
        self, topic: StoredTopic, name: str, rows: list[tuple[int, ...]], *, cumulative: bool
    ) -> None:
        acked = topic.acked.setdefault(name, set())
        for _ledger, entry, first, last in rows:
            if cumulative:
                for number in range(entry):
                    acked.update((number, index) for index in range(topic.entries[number].message_count))
                first = 0
            acked.update((entry, index) for index in range(first, last + 1))
