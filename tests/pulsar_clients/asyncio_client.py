"""`pulsar.asyncio` behind the names of the blocking client, so that a scenario is written once.

The loop runs in a thread of its own. What `pulsar.asyncio` does not have is an AttributeError or a TypeError here as well,
from which `runner` learns that this client cannot run the scenario.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pulsar
import pulsar.asyncio


class AsyncioClient:
    """As `pulsar.Client`."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = self._wait(self._opened(url, settings))

    @staticmethod
    async def _opened(url: str, settings: dict[str, Any]) -> Any:
        return pulsar.asyncio.Client(url, **settings)

    def _wait(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def create_producer(self, topic: str, **settings: Any) -> _Producer:
        settings = {"batching_enabled": False, **settings}  # its default is another one
        return _Producer(self._wait(self._client.create_producer(topic, **settings)), self._loop)

    def subscribe(self, topic: Any, subscription: str, **settings: Any) -> _Consumer:
        if isinstance(topic, re.Pattern):
            topic, settings = topic.pattern, {"is_pattern_topic": True, **settings}
        return _Consumer(self._wait(self._client.subscribe(topic, subscription, **settings)), self._loop)

    def create_reader(self, topic: str, start: Any, **settings: Any) -> _Reader:
        return _Reader(self._wait(self._client.create_reader(topic, start, **settings)), self._loop)

    def get_topic_partitions(self, topic: str) -> Any:
        return self._wait(self._client.get_topic_partitions(topic))

    def shutdown(self) -> None:
        self._client.shutdown()

    def close(self) -> None:
        self._wait(self._client.close())


class _Resource:
    """A producer, consumer or reader: coroutines are waited for, the rest is passed on."""

    def __init__(self, wrapped: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._wrapped = wrapped
        self._loop = loop
        self._receiving: concurrent.futures.Future[Any] | None = None  # a receive that outlived its timeout

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._wrapped, name)
        if not asyncio.iscoroutinefunction(method):
            return method
        return lambda *given, **named: self._start(method(*given, **named)).result()

    def seek(self, where: Any) -> None:
        wrapped = where if isinstance(where, int | pulsar.MessageId) else pulsar.MessageId.wrap(where)
        self._start(self._wrapped.seek(wrapped)).result()

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _next(self, receive: Callable[[], Coroutine[Any, Any, Any]], timeout_millis: int | None) -> Any:
        waiting = self._receiving or self._start(receive())
        self._receiving = waiting
        try:
            message = waiting.result(None if timeout_millis is None else timeout_millis / 1000)
        except concurrent.futures.TimeoutError:
            raise pulsar.Timeout from None
        except BaseException:
            self._receiving = None
            raise
        self._receiving = None
        return message


class _Producer(_Resource):
    def send_async(self, content: Any, callback: Callable[[Any, Any], None], **named: Any) -> None:
        async def send() -> None:
            try:
                sent = await self._wrapped.send(content, **named)
            except pulsar.asyncio.PulsarException as error:
                callback(error.error(), None)
            else:
                callback(pulsar.Result.Ok, sent)

        self._start(send())


class _Consumer(_Resource):
    def receive(self, timeout_millis: int | None = None) -> Any:
        return self._next(self._wrapped.receive, timeout_millis)


class _Reader(_Resource):
    def read_next(self, timeout_millis: int | None = None) -> Any:
        return self._next(self._wrapped.read_next, timeout_millis)
