"""The same client without `await`: for scripts, threads and notebooks.

    from magnetar.client.blocking import connect

    with connect("magnetar://127.0.0.1:7650") as client:
        producer = client.create_producer("orders")
        producer.send(b"one")
        consumer = client.subscribe("orders", "billing", start="earliest")
        for message in consumer:
            consumer.ack(message)

Each client runs an event loop in a thread of its own; its methods may be called from any thread but that one, in the
process that made it: a process that was forked connects anew. A call
costs a change of threads (about 50 us): for speed use `send_many` and `batches`, or the asyncio client. Iterating costs one
call per delivery, not per message.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from magnetar.proto.errors import AlreadyClosed, InvalidArgument
from magnetar.proto.ids import MessageId

from . import client as aio
from .administration import Admin as AsyncAdmin
from .consumer import Consumer as AsyncConsumer
from .durations import Duration, in_seconds
from .messages import Message, MessageBatch
from .producer import Producer as AsyncProducer
from .receipts import Receipt as AsyncReceipt
from .receiving import Reader as AsyncReader
from .receiving import Receiving, check_max_messages
from .table_view import TableView as AsyncTableView
from .topic.open_delivery import ALL_HERE

__all__ = [
    "Admin",
    "Client",
    "Consumer",
    "Message",
    "MessageBatch",
    "MessageId",
    "Producer",
    "Reader",
    "Receipt",
    "TableView",
    "connect",
]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
A_co = TypeVar("A_co", bound=AbstractAsyncContextManager[Any], covariant=True)
R_co = TypeVar("R_co", bound=Receiving, covariant=True)


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="magnetar client", daemon=True)
        self._stopped = False
        # Held to start something and to stop: what is started is known to the loop before it stops.
        self._starting = threading.Lock()
        self._process = os.getpid()
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            # Calls of other threads, such as requests that pause before they are tried again: these threads wait for them.
            left = sorted(asyncio.all_tasks(self._loop), key=asyncio.Task.get_name)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine and waits for its result; an interrupt cancels it. Raises AlreadyClosed when the loop stops."""
        future = self.start(coroutine)
        try:
            while not future.done():
                # A signal that another thread took is handled when this one has looked.
                with contextlib.suppress(TimeoutError):  # or its result, which is raised below
                    return future.result(0.5)
            return future.result()
        except concurrent.futures.CancelledError:
            if not self._stopped:
                raise
            raise AlreadyClosed("the client was closed meanwhile; connect again") from None
        except BaseException:
            future.cancel()
            raise

    def time(self) -> float:
        """The clock of the loop, in seconds."""
        return self._loop.time()

    @property
    def stopped(self) -> bool:
        """True once the client was closed, and everything that it had opened with it; and in a forked process."""
        return self._stopped or self._forked

    @property
    def _forked(self) -> bool:
        """True in a process that was forked: it has neither the thread nor connections of its own."""
        return os.getpid() != self._process

    def check_process(self) -> None:
        """Raises AlreadyClosed in a forked process."""
        if self._forked:
            raise AlreadyClosed(
                "the client was made in another process, which has its connections; connect after the fork"
            )

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine in the background."""
        try:
            self.check_process()
        except AlreadyClosed:
            coroutine.close()
            raise
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise InvalidArgument(
                "the blocking client cannot be used from its own thread; use the asyncio client there"
            )
        with self._starting:
            if not self._stopped:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise AlreadyClosed("the client is closed; connect again")

    def soon(self, call: Callable[[], object]) -> None:
        """Runs a call in the loop, waiting neither for it nor for a lock: a signal handler may do this."""
        if not self.stopped:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    def stop(self) -> None:
        """Ends the thread; may be called again, and does nothing in a forked process."""
        if self._forked:
            return
        with self._starting:
            if self._stopped:
                return
            self._stopped = True
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


class _Facade(Generic[T_co]):
    """Stands for an object of the asyncio client, whose methods run in its loop's thread."""

    def __init__(self, thread: LoopThread, inner: T_co) -> None:
        self._thread = thread
        self._inner = inner

    def _following(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """The items of an iterator of the asyncio client, which ends with this one."""
        try:
            while True:
                try:
                    yield self._thread.wait(_awaited(anext(items)))
                except StopAsyncIteration:
                    return
        finally:
            if not self._thread.stopped:
                self._thread.wait(items.aclose())


class _Closing(_Facade[A_co]):
    """`with` leaves as `async with` does."""

    def close(self) -> None:
        """Flushes what is pending and leaves; does nothing when it is closed, or the client is."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        if not self._thread.stopped:
            self._thread.wait(_awaited(self._inner.__aexit__(*exc_info)))


F = TypeVar("F")


# Methods made by these three have the arguments and the docstring of the method that they are made from.


def _waiting(method: Callable[Concatenate[A, P], Awaitable[T]]) -> Callable[Concatenate[_Facade[A], P], T]:
    """Waits for what a method of the asyncio client returns."""

    def call(facade: _Facade[A], /, *args: P.args, **options: P.kwargs) -> T:
        async def run() -> T:
            return await method(facade._inner, *args, **options)

        return facade._thread.wait(run())

    functools.update_wrapper(call, method)
    return call


def _calling(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[_Facade[A], P], T]:
    """Runs a plain method in the loop's thread."""

    def call(facade: _Facade[A], /, *args: P.args, **options: P.kwargs) -> T:
        async def run() -> T:
            return method(facade._inner, *args, **options)

        return facade._thread.wait(run())

    functools.update_wrapper(call, method)
    return call


def _reading(attribute: Any) -> Any:
    """A property of the asyncio client's, read as it is, with its docstring."""
    return property(lambda facade: attribute.fget(facade._inner), doc=attribute.__doc__)


def _made(
    facade_class: Callable[[LoopThread, T], F], method: Callable[Concatenate[_Facade[A], P], T]
) -> Callable[Concatenate[_Facade[A], P], F]:
    """Puts a facade over what the method returns."""

    def call(facade: _Facade[A], /, *args: P.args, **options: P.kwargs) -> F:
        return facade_class(facade._thread, method(facade, *args, **options))

    functools.update_wrapper(call, method)
    return call


class Receipt:
    """The receipt of a message sent by `send_nowait`: `result` waits for its id."""

    __slots__ = ("_receipt", "_thread")

    def __init__(self, thread: LoopThread, receipt: AsyncReceipt) -> None:
        self._thread = thread
        self._receipt = receipt

    @property
    def done(self) -> bool:
        """True once `result` does not wait."""
        return self._receipt.done

    def result(self, timeout: Duration | None = None) -> MessageId:
        """The message's id, or its error. Raises TimeoutError after `timeout` seconds."""

        async def wait() -> MessageId:
            async with asyncio.timeout(None if timeout is None else in_seconds(timeout)):
                return await self._receipt

        return self._thread.wait(wait())


class Producer(_Closing[AsyncProducer]):
    """Does what magnetar.client.Producer does."""

    send = _waiting(AsyncProducer.send)
    send_many = _waiting(AsyncProducer.send_many)
    send_stream = _waiting(AsyncProducer.send_stream)
    flush = _waiting(AsyncProducer.flush)
    send_nowait = _made(Receipt, _calling(AsyncProducer.send_nowait))

    topic: str = _reading(AsyncProducer.topic)
    name: str = _reading(AsyncProducer.name)
    topic_epoch: int = _reading(AsyncProducer.topic_epoch)
    last_sequence_id: int = _reading(AsyncProducer.last_sequence_id)
    ended: bool = _reading(AsyncProducer.ended)


class _Receiving(_Closing[R_co]):
    """What Consumer and Reader share."""

    last_message_id = _waiting(Receiving.last_message_id)
    last_message_ids = _waiting(Receiving.last_message_ids)
    seek = _waiting(Receiving.seek)
    skip = _waiting(Receiving.skip)

    topic: str = _reading(Receiving.topic)
    trimmed_gaps: int = _reading(Receiving.trimmed_gaps)
    unfinished_messages: int = _reading(Receiving.unfinished_messages)
    ended: bool = _reading(Receiving.ended)
    reached_end: bool = _reading(Receiving.reached_end)

    def stop(self) -> None:
        """Does what Consumer.stop does; it waits for nothing, and may be called by a signal handler."""
        self._thread.soon(self._inner.stop)

    def __iter__(self) -> Iterator[Message]:
        """Messages, for ever; ends when this is stopped or closed. Leaving the loop loses nothing."""
        while True:
            for message in self._left():
                yield message
                self._thread.check_process()  # it may have been forked meanwhile
            if not self._thread.wait(self._inner._refill(1)):
                return

    def _left(self) -> Iterator[Message]:
        """What is left of the open delivery, to be taken by the caller's thread: what is taken in the loop's thread is lost
        if the wait for it is interrupted. Raises AlreadyClosed in a forked process, whose parent hands it out."""
        self._thread.check_process()
        return self._inner._source.open_messages()

    def receive(self, timeout: Duration | None = None) -> Message:
        """As that of magnetar.client.Consumer. An interrupt (Ctrl-C) loses no message."""
        return self._take(1, timeout)[0]

    def receive_batch(self, max_messages: int | None = None, timeout: Duration | None = None) -> MessageBatch:
        """As that of magnetar.client.Consumer. An interrupt (Ctrl-C) loses no message."""
        if max_messages is not None:
            check_max_messages(max_messages)
        return self._take(max_messages, timeout)

    def _take(self, count: int | None, timeout: Duration | None) -> MessageBatch:
        thread = self._thread
        deadline = None if timeout is None else thread.time() + in_seconds(timeout)
        while not (batch := MessageBatch(islice(self._left(), count))):
            left = None if deadline is None else deadline - thread.time()
            thread.wait(self._inner._wait_for_message(left, count or ALL_HERE))
        return batch

    def stream(self, message: Message) -> Generator[bytes, None, None]:
        """As that of magnetar.client.Consumer."""
        return self._following(self._inner.stream(message))

    def batches(self) -> Iterator[MessageBatch]:
        """Messages as they arrived, a batch at a time. Ends as iterating does."""
        while True:
            if batch := MessageBatch(self._left()):
                yield batch
            if not self._thread.wait(self._inner._refill(ALL_HERE)):
                return


class Consumer(_Receiving[AsyncConsumer]):
    """Does what magnetar.client.Consumer does."""

    ack = _waiting(AsyncConsumer.ack)
    ack_cumulative = _waiting(AsyncConsumer.ack_cumulative)
    nack = _waiting(AsyncConsumer.nack)
    redeliver_unacknowledged = _waiting(AsyncConsumer.redeliver_unacknowledged)
    reconsume_later = _waiting(AsyncConsumer.reconsume_later)
    pause = _calling(AsyncConsumer.pause)
    resume = _calling(AsyncConsumer.resume)
    unsubscribe = _waiting(AsyncConsumer.unsubscribe)

    topics: list[str] = _reading(AsyncConsumer.topics)
    subscription: str = _reading(AsyncConsumer.subscription)
    active: bool = _reading(AsyncConsumer.active)


class Reader(_Receiving[AsyncReader]):
    """Does what magnetar.client.Reader does."""

    has_message_available = _waiting(AsyncReader.has_message_available)

    def read_next(self, timeout: Duration | None = None) -> Message:
        """As `receive`."""
        return self.receive(timeout)


class TableView(_Closing[AsyncTableView]):
    """Does what magnetar.client.TableView does."""

    refresh = _waiting(AsyncTableView.refresh)
    get = _calling(AsyncTableView.get)
    keys = _calling(AsyncTableView.keys)
    values = _calling(AsyncTableView.values)
    items = _calling(AsyncTableView.items)
    __getitem__ = _calling(AsyncTableView.__getitem__)
    __contains__ = _calling(AsyncTableView.__contains__)
    __len__ = _calling(AsyncTableView.__len__)

    topic: str = _reading(AsyncTableView.topic)
    size_bytes: int = _reading(AsyncTableView.size_bytes)

    def __iter__(self) -> Iterator[str | bytes]:
        """The keys of this moment."""
        return iter(self.keys())

    def changes(self) -> Generator[tuple[str | bytes, bytes | None], None, None]:
        """Keys with their new values, None for one that was deleted, from now on; see magnetar.client.TableView."""

        async def begin() -> AsyncGenerator[tuple[str | bytes, bytes | None], None]:
            return self._inner.changes()

        return self._following(self._thread.wait(begin()))


class Admin(_Facade[AsyncAdmin]):
    """Does what magnetar.client.Admin does."""

    list_topics = _waiting(AsyncAdmin.list_topics)
    topic_stats = _waiting(AsyncAdmin.topic_stats)
    partitions = _waiting(AsyncAdmin.partitions)
    create_topic = _waiting(AsyncAdmin.create_topic)
    update_partitions = _waiting(AsyncAdmin.update_partitions)
    terminate_topic = _waiting(AsyncAdmin.terminate_topic)
    delete_topic = _waiting(AsyncAdmin.delete_topic)
    compact_topic = _waiting(AsyncAdmin.compact_topic)
    compaction_status = _waiting(AsyncAdmin.compaction_status)
    remove_compaction = _waiting(AsyncAdmin.remove_compaction)
    create_subscription = _waiting(AsyncAdmin.create_subscription)
    seek_subscription = _waiting(AsyncAdmin.seek_subscription)
    skip_messages = _waiting(AsyncAdmin.skip_messages)
    clear_backlog = _waiting(AsyncAdmin.clear_backlog)
    peek_messages = _waiting(AsyncAdmin.peek_messages)
    expire_messages = _waiting(AsyncAdmin.expire_messages)
    delete_subscription = _waiting(AsyncAdmin.delete_subscription)
    topic_policies = _waiting(AsyncAdmin.topic_policies)
    update_topic_policies = _waiting(AsyncAdmin.update_topic_policies)
    namespace_policies = _waiting(AsyncAdmin.namespace_policies)
    update_namespace_policies = _waiting(AsyncAdmin.update_namespace_policies)
    broker_policies = _waiting(AsyncAdmin.broker_policies)
    update_broker_policies = _waiting(AsyncAdmin.update_broker_policies)
    bookies = _waiting(AsyncAdmin.bookies)
    brokers = _waiting(AsyncAdmin.brokers)
    busiest = _waiting(AsyncAdmin.busiest)
    diagnose = _waiting(AsyncAdmin.diagnose)
    bundles = _waiting(AsyncAdmin.bundles)
    unload_bundle = _waiting(AsyncAdmin.unload_bundle)
    split_bundle = _waiting(AsyncAdmin.split_bundle)
    administer = _waiting(AsyncAdmin.administer)
    owners = _waiting(AsyncAdmin.owners)
    drain = _waiting(AsyncAdmin.drain)


class Client(_Closing[aio.Client]):
    """Made by `connect`; closing it ends its thread. admin: see magnetar.client.Client."""

    def __init__(self, thread: LoopThread, inner: aio.Client) -> None:
        super().__init__(thread, inner)
        self.admin = Admin(thread, inner.admin)

    create_producer = _made(Producer, _waiting(aio.Client.create_producer))
    subscribe = _made(Consumer, _waiting(aio.Client.subscribe))
    create_reader = _made(Reader, _waiting(aio.Client.create_reader))
    create_table_view = _made(TableView, _waiting(aio.Client.create_table_view))
    switch_to = _waiting(aio.Client.switch_to)

    connection_state: str = _reading(aio.Client.connection_state)
    service_url: str = _reading(aio.Client.service_url)
    cluster_switches: int = _reading(aio.Client.cluster_switches)

    def __exit__(self, *exc_info: Any) -> None:
        try:
            super().__exit__(*exc_info)
        finally:
            self._thread.stop()


def _connecting(open: Callable[P, Awaitable[aio.Client]]) -> Callable[P, Client]:
    def call(*args: P.args, **options: P.kwargs) -> Client:
        thread = LoopThread()
        try:
            return Client(thread, thread.wait(_awaited(open(*args, **options))))
        except BaseException:
            thread.stop()
            raise

    functools.update_wrapper(call, open)
    return call


connect = _connecting(aio.connect)
