"""The same client without `await`: for scripts, threads and notebooks.

    from magnetar.client.blocking import connect

    with connect("magnetar://127.0.0.1:7650") as client:
        producer = client.create_producer("orders")
        producer.send(b"one")
        consumer = client.subscribe("orders", "billing", start="earliest")
        for message in consumer:
            consumer.ack(message)

Each client runs an event loop in a thread of its own; its methods may be called from any thread but that one. A call
costs a change of threads (about 50 us): for speed use `send_many` and `batches`, or the asyncio client. Iterating costs one
call per delivery, not per message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Generic, Self, TypeVar

from magnetar.proto.batch import Key, Properties
from magnetar.proto.errors import AlreadyClosed, InvalidArgument
from magnetar.proto.ids import MessageId

from . import client as aio
from .consumer import Consumer as AsyncConsumer
from .messages import Message, MessageBatch
from .options import Start
from .producer import Producer as AsyncProducer
from .reader import Reader as AsyncReader
from .receipts import Receipt as AsyncReceipt
from .receiving import Receiving
from .topic.acknowledger import Acknowledgeable

__all__ = [
    "Client",
    "Consumer",
    "Message",
    "MessageBatch",
    "MessageId",
    "Producer",
    "Reader",
    "Receipt",
    "connect",
]

T = TypeVar("T")
A = TypeVar("A", bound=AbstractAsyncContextManager[Any])
R = TypeVar("R", bound=Receiving)


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="magnetar client", daemon=True)
        self._stopped = False
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and waits for its result; an interrupt cancels it."""
        future = self.start(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def stopped(self) -> bool:
        """True once the client was closed, and everything that it had opened with it."""
        return self._stopped

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine in the background."""
        if self._stopped or threading.current_thread() is self._thread:
            coroutine.close()
            if self._stopped:
                raise AlreadyClosed("the client is closed; connect again")
            raise InvalidArgument(
                "the blocking client cannot be used from its own thread; use the asyncio client there"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Runs a plain function in the loop's thread."""

        async def run() -> T:
            return function(*args, **options)

        return self.wait(run())

    def stop(self) -> None:
        """Ends the thread; may be called again."""
        if not self._stopped:
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _Facade(Generic[A]):
    """Of an object of the asyncio client, whose methods run in its loop's thread. `with` leaves as `async with` does."""

    def __init__(self, thread: LoopThread, inner: A) -> None:
        self._thread = thread
        self._inner = inner

    def close(self) -> None:
        """Flushes what is pending and leaves; does nothing when it is closed, or the client is."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if not self._thread.stopped:
            self._thread.wait(_awaited(self._inner.__aexit__(*exc_info)))


def connect(url: str, **options: Any) -> Client:
    """As magnetar.client.connect, with its options; raises what it raises."""
    thread = LoopThread()
    try:
        return Client(thread, thread.wait(_awaited(aio.connect(url, **options))))
    except BaseException:
        thread.stop()
        raise


class Client(_Facade[aio.Client]):
    """Made by `connect`; closing it ends its thread."""

    def create_producer(self, topic: str, **options: Any) -> Producer:
        """As magnetar.client.Client.create_producer."""
        return Producer(self._thread, self._opened(self._inner.create_producer, topic, **options))

    def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        type: str = "exclusive",
        start: Start = "latest",
        **options: Any,
    ) -> Consumer:
        """As magnetar.client.Client.subscribe."""
        opened = self._opened(self._inner.subscribe, topic, subscription, type=type, start=start, **options)
        return Consumer(self._thread, opened)

    def create_reader(self, topic: str, *, start: Start = "latest", **options: Any) -> Reader:
        """As magnetar.client.Client.create_reader."""
        return Reader(self._thread, self._opened(self._inner.create_reader, topic, start=start, **options))

    def list_topics(self, namespace: str = "") -> list[str]:
        """Full names of topics, sorted."""
        return self._thread.wait(self._inner.list_topics(namespace))

    def topic_stats(self, topic: str) -> dict[str, Any]:
        """Figures of a topic."""
        return self._thread.wait(self._inner.topic_stats(topic))

    def create_topic(self, topic: str) -> None:
        """Creates a topic."""
        self._thread.wait(self._inner.create_topic(topic))

    def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic."""
        self._thread.wait(self._inner.delete_topic(topic, force=force))

    def delete_subscription(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Deletes a subscription."""
        self._thread.wait(self._inner.delete_subscription(topic, subscription, force=force))

    def __exit__(self, *exc_info: Any) -> None:
        try:
            super().__exit__(*exc_info)
        finally:
            self._thread.stop()

    def _opened(self, open: Callable[..., aio.Opening[Any]], *args: Any, **options: Any) -> Any:
        return self._thread.wait(_awaited(open(*args, **options)))


class Receipt:
    """Of a message sent by `send_nowait`: `result` waits for its id."""

    __slots__ = ("_receipt", "_thread")

    def __init__(self, thread: LoopThread, receipt: AsyncReceipt) -> None:
        self._thread = thread
        self._receipt = receipt

    @property
    def done(self) -> bool:
        """True once `result` does not wait."""
        return self._receipt.done

    def result(self, timeout: float | None = None) -> MessageId:
        """The message's id, or its error. Raises TimeoutError after `timeout` seconds."""

        async def wait() -> MessageId:
            async with asyncio.timeout(timeout):
                return await self._receipt

        return self._thread.wait(wait())


class Producer(_Facade[AsyncProducer]):
    """As magnetar.client.Producer."""

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return self._inner.topic

    @property
    def name(self) -> str:
        """Name of the producer."""
        return self._inner.name

    def send(
        self,
        value: bytes | None,
        key: Key = None,
        *,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
    ) -> MessageId:
        """Sends, and returns the id when the message is durable."""
        return self._thread.wait(self._inner.send(value, key, properties=properties, event_time=event_time))

    def send_nowait(
        self,
        value: bytes | None,
        key: Key = None,
        *,
        properties: Properties | None = None,
        event_time: datetime | int | None = None,
    ) -> Receipt:
        """Sends in the background. Raises ProducerQueueFull at the memory bound."""
        receipt = self._thread.call(
            self._inner.send_nowait, value, key, properties=properties, event_time=event_time
        )
        return Receipt(self._thread, receipt)

    def send_many(
        self,
        values: Sequence[bytes | None],
        *,
        keys: Sequence[Key] | None = None,
        properties: Sequence[Properties | None] | None = None,
        event_times: Sequence[datetime | int | None] | None = None,
    ) -> list[MessageId]:
        """Sends many messages as one batch, and returns their ids when all are durable."""
        return self._thread.wait(
            self._inner.send_many(values, keys=keys, properties=properties, event_times=event_times)
        )

    def flush(self) -> None:
        """Waits until everything sent is durable."""
        self._thread.wait(self._inner.flush())


class _Receiving(_Facade[R]):
    """What Consumer and Reader share."""

    @property
    def topic(self) -> str:
        """Full name of the topic."""
        return self._inner.topic

    def __iter__(self) -> Iterator[Message]:
        """Messages, for ever. Leaving the loop loses nothing."""
        while True:
            # The iterator belongs to the receiver and is emptied by it; taking from it needs no change of threads.
            yield from self._inner.open_messages()
            if not self._thread.wait(self._inner.refill()):
                return

    def receive(self, timeout: float | None = None) -> Message:
        """The next message. Raises ReceiveTimeout after `timeout` seconds."""
        for message in self._inner.open_messages():
            return message
        return self._thread.wait(self._inner.receive(timeout))

    def batches(self) -> Iterator[MessageBatch]:
        """Messages as they arrived, a batch at a time."""
        while True:
            batch = self._thread.wait(self._inner.receive_batch())
            if batch is None:
                return
            yield batch

    def seek(self, start: Start | Message) -> None:
        """Goes to a position."""
        self._thread.wait(self._inner.seek(start))


class Consumer(_Receiving[AsyncConsumer]):
    """As magnetar.client.Consumer."""

    @property
    def subscription(self) -> str:
        """Name of the subscription."""
        return self._inner.subscription

    def ack(self, messages: Acknowledgeable, *, receipt: bool = False) -> None:
        """Acknowledges a message, an id, a batch or an iterable."""
        self._thread.wait(self._inner.ack(messages, receipt=receipt))

    def ack_cumulative(self, message: Message | MessageId, *, receipt: bool = False) -> None:
        """Acknowledges everything up to a message."""
        self._thread.wait(self._inner.ack_cumulative(message, receipt=receipt))

    def nack(self, messages: Message | Iterable[Message]) -> None:
        """Has messages delivered again later."""
        self._thread.call(self._inner.nack, messages)

    def unsubscribe(self) -> None:
        """Deletes the subscription and closes the consumer."""
        self._thread.wait(self._inner.unsubscribe())


class Reader(_Receiving[AsyncReader]):
    """As magnetar.client.Reader."""

    def read_next(self, timeout: float | None = None) -> Message:
        """As `receive`."""
        return self.receive(timeout)

    def has_message_available(self) -> bool:
        """True if the topic holds a message that this reader has not handed out."""
        return self._thread.wait(self._inner.has_message_available())
