"""A broker on fakes, and clients that speak frames to its listener without a socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from magnetar.broker import Broker, BrokerSettings, ClientConnection
from magnetar.broker.service.broker import BrokerService
from magnetar.proto import commands as c
from magnetar.proto.batch import decode_batch, encode_batch
from magnetar.proto.entry import Entry
from magnetar.proto.errors import FrameTooLarge, MagnetarError
from magnetar.proto.frames import FrameParser, encode_frame
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import Clock
from support.fake_ledger import FakeLedgers
from support.memory_metadata import MemoryMetadataStore

TOPIC = TopicName.parse("orders")


class FakeClock:
    """Wall clock that the test moves."""

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self.now = now_ms

    def now_ms(self) -> int:
        """The time."""
        return self.now


@asynccontextmanager
async def running_broker(
    ledgers: Any = None,
    metadata: Any = None,
    clock: Clock | None = None,
    bookies: Any = None,
    archives: Any = None,
    **settings: Any,
) -> AsyncIterator[Broker]:
    """A started broker; closed in the end."""
    broker = Broker(
        metadata if metadata is not None else MemoryMetadataStore(),
        ledgers if ledgers is not None else FakeLedgers(),
        BrokerSettings(**{"cursor_flush_interval_ms": 1, "min_ledger_age_ms": 0, **settings}),
        clock or FakeClock(),
        bookies,
        archives,
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()


class Message:
    """A delivered message, as a client would see it."""

    def __init__(
        self, value: bytes, ledger: int, entry: int, index: int, redelivered: int, epoch: int
    ) -> None:
        self.value = value
        self.id = (ledger, entry, index)
        self.redelivered = redelivered
        self.epoch = epoch

    def row(self) -> tuple[int, int, int, int]:
        """As an AckRow."""
        ledger, entry, index = self.id
        return (ledger, entry, index, index)

    def __repr__(self) -> str:
        return f"<{self.value!r} {self.id}>"


def _fail(answer: asyncio.Future[Any], error: MagnetarError) -> None:
    """A test need not look at an answer: one that is dropped unread says nothing when it is collected, wherever that is."""
    answer.set_exception(error)
    answer.exception()


class FakeClient:
    """Both the connection that the listener writes to, and the client behind it."""

    address = "127.0.0.1:50000"
    client_version = "magnetar-python"

    def __init__(self, broker: Broker) -> None:
        self.writable = True
        self.max_frame_bytes = 1 << 30
        self.closed: MagnetarError | None = None
        self.paused: set[str] = set()
        self.broker = broker
        self.handler = ClientConnection(BrokerService(broker))
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.frames: list[tuple[c.Command, bytes]] = []
        self.messages: list[Message] = []
        self.receipts: list[tuple[int, ...]] = []
        self.failures: list[c.SendFailed] = []
        self.forbidden: set[str] = set()
        self.answer_probes = True
        self.probes: list[asyncio.Future[None]] = []
        self._parser = FrameParser()
        self._request_id = 0
        self._changed = asyncio.Event()
        self.handler.connection_ready(self)

    # --- Link --------------------------------------------------------------------------------------------------------

    def send(self, header: bytes, payload: Any = b"") -> None:
        """The listener sends a frame."""
        body = bytes(payload) if isinstance(payload, (bytes, bytearray, memoryview)) else b"".join(payload)
        if 2 + len(header) + len(body) > self.max_frame_bytes:
            raise FrameTooLarge(f"a frame of {len(body)} bytes is larger than agreed")
        command = c.decode_command(header)
        self.frames.append((command, body))
        if isinstance(command, c.Deliver):
            self._delivered(command, body)
        elif isinstance(command, c.Receipt):
            self.receipts += list(c.decode_rows(c.RECEIPT_ROW, body))
        elif isinstance(command, c.SendFailed):
            self.failures.append(command)
        self._changed.set()

    def answer(self, request_id: int, result: Any = None) -> None:
        """Ok."""
        if request_id:
            self.frames.append((c.Ok(request_id, result), b""))
            self.answers[request_id].set_result(msgspec.msgpack.decode(msgspec.msgpack.encode(result)))

    def answer_error(self, request_id: int, error: MagnetarError) -> None:
        """Failed."""
        if request_id:
            self.frames.append((c.Failed.of(request_id, error), b""))
            _fail(self.answers[request_id], error)

    def authorize(self, operation: str, resource: str) -> None:
        """Forbids what the test says."""
        if operation in self.forbidden:
            from magnetar.proto.errors import NotAuthorized

            raise NotAuthorized(f"{operation} on {resource}")

    def pause_reading(self, reason: str) -> None:
        """Noted."""
        self.paused.add(reason)
        self._changed.set()

    def resume_reading(self, reason: str) -> None:
        """Noted."""
        self.paused.discard(reason)
        self._changed.set()

    def probe(self) -> asyncio.Future[None]:
        """Done when the test lets it answer (`answer_probes`), or it is closed."""
        probe: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.probes.append(probe)
        if self.answer_probes:
            probe.set_result(None)
        return probe

    def close(self, error: MagnetarError | None = None) -> None:
        """The listener gives up on this client."""
        self.closed = error
        self.handler.connection_closed(error)

    # --- the client --------------------------------------------------------------------------------------------------

    def frame(self, command: c.Command, payload: bytes = b"") -> None:
        """Sends one frame."""
        self.bytes_received(encode_frame(command.encode(), payload))

    def bytes_received(self, data: bytes) -> None:
        """What a read from the socket would do."""
        self.handler.runs_received(self._parser.feed(data))

    def change_policies(self, topic: str = "", namespace: str = "", **changes: Any) -> Any:
        """As `ask`; of neither: for all brokers."""
        return self.ask(c.ChangePolicies, topic, namespace, payload=msgspec.msgpack.encode(changes))

    def ask(self, command_type: type[c.Command], *fields: Any, payload: bytes = b"", **named: Any) -> Any:
        """Sends a request; returns the future of its answer."""
        self._request_id += 1
        future = self.answers[self._request_id] = asyncio.get_running_loop().create_future()
        try:
            self.frame(command_type(self._request_id, *fields, **named), payload)
        except MagnetarError as error:
            _fail(future, error)
        return future

    async def producer(self, producer_id: int = 1, topic: str = "orders", **named: Any) -> dict[str, Any]:
        """Opens a producer."""
        answer: dict[str, Any] = await self.ask(c.CreateProducer, producer_id, topic, **named)
        return answer

    async def consumer(
        self,
        consumer_id: int = 1,
        subscription: str = "billing",
        *,
        topic: str = "orders",
        permits: int = 1000,
        start: tuple[str, Any] = ("earliest", None),
        **named: Any,
    ) -> dict[str, Any]:
        """Subscribes and grants permits."""
        answer: dict[str, Any] = await self.ask(
            c.Subscribe, consumer_id, topic, subscription, start=start, **named
        )
        if permits:
            self.frame(c.Flow(0, consumer_id, permits))
        return answer

    def publish(
        self, *values: bytes, first: int = 0, producer_id: int = 1, epoch: int = 0, time_ms: int = 0
    ) -> None:
        """Unbatched sends, as one read from the socket."""
        header = c.Send(0, producer_id, epoch).encode()
        self.bytes_received(
            b"".join(
                encode_frame(
                    header, encode_batch([value], sequence_id=first + number, publish_time_ms=time_ms)
                )
                for number, value in enumerate(values)
            )
        )

    def publish_batch(
        self, values: list[bytes], *, first: int = 0, producer_id: int = 1, epoch: int = 0, time_ms: int = 0
    ) -> None:
        """One batch."""
        batch = encode_batch(values, sequence_id=first, publish_time_ms=time_ms)
        self.frame(c.Send(0, producer_id, epoch), batch)

    def ack(self, *rows: tuple[int, int, int, int], consumer_id: int = 1, cumulative: bool = False) -> Any:
        """Acknowledges with a receipt; returns its future."""
        payload = c.encode_rows(c.ACK_ROW, rows)
        return self.ask(c.Ack, consumer_id, cumulative, payload=payload)

    def _delivered(self, command: c.Deliver, body: bytes) -> None:
        rows_size = command.ack_set_rows * c.ACK_SET_ROW.size
        hidden = {
            index
            for first, last in c.decode_rows(c.ACK_SET_ROW, body[:rows_size])
            for index in range(first, last + 1)
        }
        entry = Entry(body, rows_size)
        for position in range(entry.batch_count):
            index = entry.batch_start_index(position)
            start, end = entry.batch_bounds(position)
            # A batch that the ack set names as a whole is left out.
            for value in decode_batch(entry.data[start:end]).values if end > start else ():
                if index not in hidden:
                    assert value is not None
                    self.messages.append(
                        Message(
                            value,
                            command.ledger,
                            command.entry,
                            index,
                            command.redelivery_count,
                            command.consumer_epoch,
                        )
                    )
                index += 1

    @property
    def values(self) -> list[bytes]:
        """Values of the messages delivered so far."""
        return [message.value for message in self.messages]

    async def until(self, condition: Any, timeout: float = 5.0) -> None:
        """Waits until something that the listener did makes `condition()` true."""
        async with asyncio.timeout(timeout):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def received(self, count: int) -> list[bytes]:
        """Waits for that many messages in all."""
        await self.until(lambda: len(self.messages) >= count)
        return self.values

    async def confirmed(self, count: int) -> None:
        """Waits until that many messages are receipted."""
        await self.until(lambda: sum(row[1] for row in self.receipts) >= count)


async def settle(turns: int = 50) -> None:
    """Lets the loop run until nothing that is ready is left, as far as fakes go."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def degraded_topics(broker: Broker) -> float:
    """As /metrics has it after the next look for problems."""
    await broker.look_for_problems()
    return broker.figures()["degraded_topics"]
