"""The paths of topics on a broker's HTTP, for programs without a client. Each request becomes calls of `magnetar.client`.

    POST /topics/DOMAIN/TENANT/NAMESPACE/TOPIC                        publishes; .../partitions/N: to one partition
    GET  /topics/.../subscription/NAME?messages=10&timeoutMs=1000     takes messages of a shared subscription
    POST /topics/.../subscription/NAME/acknowledge                    what was taken is done with; else it comes again
    GET  /topics/.../events?start=latest                              a tail as server-sent events; resumes by Last-Event-ID
    GET  /ws/v2/producer/...  /ws/v2/consumer/.../NAME  /ws/v2/reader/...     WebSockets (`websocket`)
    GET  /tail.html                                                   a page that shows a tail, by these events
    GET  /admin/v2/brokers/health                                     a message really goes through

The client is one of this gateway, and is made for the first request. What was taken and is not acknowledged within IDLE_S
goes to others; any broker takes the acknowledgement, since an id says all that is needed.

    REQUEST --answered--> over
    what goes on (events, WebSockets) --`close`: WebSockets are closed with 1001, the rest is cancelled--> over
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from magnetar.client import (
    Client,
    Consumer,
    Message,
    MessageId,
    Producer,
    Reader,
    ReceiveTimeout,
    connect,
)
from magnetar.client.options import behind
from magnetar.proto.errors import (
    InvalidArgument,
    MagnetarError,
    MessageTooLarge,
    ServiceNotReady,
    TopicTerminated,
    Unsupported,
)
from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.runtime.tasks import end_all

from . import websocket
from .kept import Kept
from .messages import (
    Names,
    Outgoing,
    Published,
    decoded,
    failed,
    id_of,
    id_text,
    received,
    start_of,
    stored,
    topic_of,
)

IDLE_S: Final = 60.0
_MOST_KEPT = 1_000
_MOST_MESSAGES = 1_000  # of one request
_MOST_BYTES = 16 << 20  # of one answer, but for its last message
_MOST_FRAME_BYTES = 16 << 20  # of a WebSocket
_MOST_QUEUED_BYTES = 32 << 20  # of all consumers, whoever does not read
_MOST_WAIT_MS = 60_000
_MOST_PLACES = 200  # a header has at most 8 KiB
_HEARTBEAT_S = 15.0
_PING_S = 30.0
_SLOWEST_S = 60.0  # who takes nothing for so long has left
_CLOSE_S = 1.0
_EVENTS: Final = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
_TOPIC: Final = (
    r"/(?P<domain>persistent|non-persistent)/(?P<tenant>[^/]+)/(?P<namespace>[^/]+)/(?P<topic>[^/]+)"
)
_SUBSCRIPTION: Final = rf"{_TOPIC}/subscription/(?P<subscription>[^/]+)"

Answer = Callable[["Gateway", web.Request, Names], Awaitable[web.StreamResponse]]


class Gateway:
    """Made for one service; `close` in the end."""

    def __init__(self, url: str, broker: str, max_message_bytes: int, idle_s: float = IDLE_S) -> None:
        """`broker`: whose HTTP this is. A request publishes `max_message_bytes` at most, in one message or several. What was
        taken waits `idle_s` for its acknowledgement.
        """
        self._url = url
        self._broker = broker
        self.max_body_bytes = max_message_bytes * 7 // 5  # JSON escapes some characters
        self.idle_s = idle_s
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._waiting: dict[asyncio.Task[Any], None] = {}  # requests that may wait for messages for long
        self._sockets: dict[web.WebSocketResponse, None] = {}
        self.producers: Kept[Producer] = Kept("producers of HTTP", idle_s, _MOST_KEPT)
        self.consumers: Kept[Consumer] = Kept("consumers of HTTP", idle_s, _MOST_KEPT)

    async def handle(self, request: web.Request) -> web.StreamResponse | None:
        """None: the path is none of these. Raises MagnetarError; ConnectionError, who asked has left; UnicodeDecodeError."""
        path = request.rel_url.raw_path
        for method, pattern, answer in _PATHS:
            if request.method == method and (found := pattern.fullmatch(path)) is not None:
                names = {name: unquote(text, errors="strict") for name, text in found.groupdict("").items()}
                return await answer(self, request, names)
        return None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A request that is cancelled when this is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = None
        try:
            yield
        finally:
            self._waiting.pop(task)

    @contextlib.asynccontextmanager
    async def socket(self, request: web.Request) -> AsyncIterator[web.WebSocketResponse]:
        """The WebSocket of a request, closed when this is."""
        socket = web.WebSocketResponse(timeout=_CLOSE_S, heartbeat=_PING_S, max_msg_size=_MOST_FRAME_BYTES)
        await socket.prepare(request)
        self._sockets[socket] = None
        try:
            yield socket
        finally:
            self._sockets.pop(socket)

    async def client(self) -> Client:
        """Connected once. Raises ConnectionLost, ServiceNotReady."""
        async with self._opening:
            if self._closed:
                raise ServiceNotReady("this broker stops; try again")
            if self._client is None:
                self._client = await connect(self._url, max_queued_bytes=_MOST_QUEUED_BYTES)
            return self._client

    async def close(self) -> None:
        """Nothing of it is left; in seconds, whatever those who asked do."""
        self._closed = True
        async with self._opening:
            pass  # who opens the client has it
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                closing = (one.close(code=1001, message=b"the broker stops") for one in list(self._sockets))
                await asyncio.gather(*closing, return_exceptions=True)
        await end_all(self._waiting)
        await asyncio.gather(self.producers.close(), self.consumers.close())
        if self._client is not None:
            await self._client.close()

    async def produce(self, topic: str, published: Published) -> list[dict[str, Any]]:
        """Sends them in their order; what became of each."""
        client, name = await self.client(), published.producer_name

        async def opened() -> Producer:
            return await client.create_producer(topic, name=name, chunking=True)

        sending = [(one.text(), one.fields()) for one in published.messages]
        async with self.producers.use((topic, name), opened) as producer:
            sends = (producer.send(value, **fields) for value, fields in sending)
            found = await asyncio.gather(*sends, return_exceptions=True)
        results = []
        for one in found:
            if isinstance(one, BaseException) and not isinstance(one, MagnetarError):
                raise one
            results.append(failed(one) if isinstance(one, MagnetarError) else stored(one))
        return results

    def taking(self, request: web.Request, names: Names) -> AbstractAsyncContextManager[Consumer]:
        """The consumer of requests for a subscription. Raises what is wrong with the query."""
        topic, subscription = topic_of(names), names["subscription"]
        start = start_of(request.query.get("start", "latest"))

        async def opened() -> Consumer:
            client = await self.client()
            return await client.subscribe(
                topic, subscription, type="shared", start=start, ack_timeout=self.idle_s
            )

        return self.consumers.use((topic, subscription), opened)


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """Of the query. Raises InvalidArgument."""
    text = request.query.get(name, str(default))
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) > most:
        raise InvalidArgument(f"{name} is {text[:40]!r}; want 0 to {most}")
    return int(text)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


async def _produce(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    try:  # without the limit that holds for the administration
        body = await request.clone(client_max_size=gateway.max_body_bytes).read()
    except web.HTTPRequestEntityTooLarge:
        raise MessageTooLarge(
            f"the body is larger than {gateway.max_body_bytes} bytes: send it in several requests; a client of Magnetar "
            "sends messages of any size, by chunking=True"
        ) from None
    published = decoded(body, Published)
    if len(published.messages) > _MOST_MESSAGES:
        raise InvalidArgument(f"{len(published.messages)} messages in one request; at most {_MOST_MESSAGES}")
    topic = topic_of(names)
    if partition := names["partition"]:
        topic += f"-partition-{int(partition)}"
    results = await gateway.produce(topic, published)
    return _json({"messagePublishResults": results, "schemaVersion": 0})


async def _consume(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    wanted = number(request, "messages", 1, _MOST_MESSAGES)
    timeout_s = number(request, "timeoutMs", 1_000, _MOST_WAIT_MS) / 1000
    taken: list[Message] = []
    size = 0
    with gateway.waiting():
        async with gateway.taking(request, names) as consumer:
            try:
                while len(taken) < wanted and size < _MOST_BYTES:
                    taken.append(await consumer.receive(timeout=0.0 if taken else timeout_s))
                    size += len(taken[-1].value or b"")
            except (ReceiveTimeout, TopicTerminated):
                pass
            except MagnetarError:
                if not taken:  # else the next request is told
                    raise
            if request.transport is None:  # who asked has left
                consumer.nack(taken, delay=0.0)
    return _json([received(message) for message in taken])


async def _acknowledge(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    """Durable when it is answered; as often as one likes."""
    ids = [id_of(one) for one in decoded(await request.read(), list[str])]
    async with gateway.taking(request, names) as consumer:
        if ids:
            await consumer.ack(ids, receipt=True)
    return web.Response(status=204)


async def _events(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """The id of an event says how far each partition was read, so that its reader goes on in each behind that."""
    last, topic = request.headers.get("Last-Event-ID", ""), topic_of(names)
    start = start_of(request.query.get("start", "latest"))
    places = {one.partition: one for one in map(id_of, last.split(",") if last else ())}
    single = NO_PARTITION in places or TopicName.parse(topic).partition != NO_PARTITION
    options: dict[str, Any] = {"start": start}
    if last and single:
        options = {"start": next(iter(places.values())), "inclusive": False}
    elif last and start == "latest":
        options = {"start": "earliest"}  # partitions that have no place were empty, or are new
    client, response = await gateway.client(), web.StreamResponse(headers=_EVENTS)
    with gateway.waiting(), contextlib.suppress(ConnectionError, TimeoutError):  # who asked has left
        async with client.create_reader(topic, **options) as reader:
            if last and not single:
                await reader.seek(lambda name: _behind(places, TopicName.parse(name).partition))
            elif not last and start == "latest":
                with contextlib.suppress(Unsupported):  # a non-persistent topic
                    found = (await reader.last_message_ids()).values()
                    places = {one.partition: one for one in found if one is not None}
            await response.prepare(request)
            await _write(response, b": open\n\n")
            try:
                while not reader.reached_end:
                    await _write(response, await _event(reader, places))
                await _write(response, b"event: end\ndata: the topic is terminated\n\n")
            except MagnetarError as error:
                await _write(response, b"event: failed\ndata: %s\n\n" % msgspec.json.encode(error.message))
    return response


def _behind(places: Mapping[int, MessageId], partition: int) -> MessageId | None:
    return behind(places[partition]) if partition in places else None


async def _write(response: web.StreamResponse, text: bytes) -> None:
    async with asyncio.timeout(_SLOWEST_S):
        await response.write(text)


async def _event(reader: Reader, places: dict[int, MessageId]) -> bytes:
    """Notes where it is. Of more partitions than a header has room for, a tail that breaks off begins anew."""
    try:
        message = await reader.receive(timeout=_HEARTBEAT_S)
    except ReceiveTimeout:
        return b": nothing new\n\n"  # finds out whether somebody is there
    except TopicTerminated:
        return b""
    places[message.id.partition] = message.id
    place = ",".join(map(id_text, places.values())) if len(places) <= _MOST_PLACES else ""
    return b"id: %s\ndata: %s\n\n" % (place.encode(), msgspec.json.encode(received(message)))


_PAGE: Final = """<!doctype html><meta charset="utf-8"><title>Magnetar: a tail</title>
<style>body { font: 14px sans-serif; margin: 2em } li { font-family: monospace }</style>
<form>persistent://<input name="topic" placeholder="public/default/orders" size="40"><button>follow</button></form>
<p id="state"></p><ol id="messages"></ol>
<script>
const topic = new URLSearchParams(location.search).get("topic");
const say = text => document.getElementById("state").textContent = text;
if (topic) {
  document.querySelector("input").value = topic;
  const events = new EventSource(`/topics/persistent/${topic.split("/").map(encodeURIComponent).join("/")}/events`);
  events.onopen = () => say("following");
  events.onerror = () => say("not connected; trying again where it stopped");
  events.addEventListener("end", () => { say("the topic is terminated"); events.close(); });
  events.onmessage = event => {
    const message = JSON.parse(event.data), row = document.createElement("li");
    const bytes = Uint8Array.from(atob(message.payload ?? ""), letter => letter.charCodeAt(0));
    row.textContent = `${message.publishTime} ${message.key ?? ""} ${new TextDecoder().decode(bytes)}`;
    document.getElementById("messages").prepend(row);
  };
}
</script>"""


async def _page(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    return web.Response(text=_PAGE, content_type="text/html")


async def _health(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    """A message goes through a topic for this, whoever serves that."""
    client, topic = await gateway.client(), f"persistent://magnetar/system/health-{gateway._broker}"
    async with client.create_reader(topic) as reader:
        (sent,) = await gateway.produce(topic, Published([Outgoing(payload="well?")]))
        if sent["errorCode"]:
            raise ServiceNotReady(f"a message for the health check was not stored: {sent['errorMsg']}")
        while id_text((await reader.receive(timeout=10.0)).id) != sent["messageId"]:
            pass
    return web.Response(text="ok")


_PATHS: Final[tuple[tuple[str, re.Pattern[str], Answer], ...]] = (
    ("POST", re.compile(rf"/topics{_TOPIC}(?:/partitions/(?P<partition>\d{{1,9}}))?"), _produce),
    ("GET", re.compile(rf"/topics{_SUBSCRIPTION}"), _consume),
    ("POST", re.compile(rf"/topics{_SUBSCRIPTION}/acknowledge"), _acknowledge),
    ("GET", re.compile(rf"/topics{_TOPIC}/events"), _events),
    ("GET", re.compile(rf"/ws/v2/producer{_TOPIC}"), websocket.producer),
    ("GET", re.compile(rf"/ws/v2/consumer{_TOPIC}/(?P<subscription>[^/]+)"), websocket.consumer),
    ("GET", re.compile(rf"/ws/v2/reader{_TOPIC}"), websocket.reader),
    ("GET", re.compile(r"/tail\.html"), _page),
    ("GET", re.compile(r"/admin/v2/brokers/health"), _health),
)
