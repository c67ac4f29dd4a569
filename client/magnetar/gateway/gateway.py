"""The paths of topics on a broker's HTTP, for programs without a client. Each request becomes calls of `magnetar.client`.

    POST /topics/DOMAIN/TENANT/NAMESPACE/TOPIC                        publishes; .../partitions/N: to one partition
    GET  /topics/.../subscription/NAME?messages=10&timeoutMs=1000     takes messages of a shared subscription
    POST /topics/.../subscription/NAME/acknowledge                    what was taken is done with; else it comes again
    GET  /topics/.../events?start=latest                              a tail as server-sent events; resumes by Last-Event-ID
    GET  /ws/v2/producer/...  /ws/v2/consumer/.../NAME  /ws/v2/reader/...     WebSockets (`websocket`)
    GET  /tail.html                                                   a page that shows a tail, by these events
    GET  /admin/v2/brokers/health                                     a message really goes through

The client is one of this gateway, and is made for the first request. Who takes messages and does not come back within
IDLE_S has left: what it did not acknowledge goes to others.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from magnetar.client import Client, Consumer, Message, Producer, ReceiveTimeout, connect
from magnetar.proto.errors import InvalidArgument, MagnetarError, MalformedFrame, MessageLost, MessageTooLarge

from . import websocket
from .kept import Kept
from .messages import Outgoing, Published, decoded, failed, id_text, received, start_of

IDLE_S: Final = 60.0
_MOST_KEPT = 1_000
_MOST_MESSAGES = 1_000  # of one request
_MOST_WAIT_MS = 60_000
_HEARTBEAT_S = 15.0
_TOPIC: Final = (
    r"/(?P<domain>persistent|non-persistent)/(?P<tenant>[^/]+)/(?P<namespace>[^/]+)/(?P<topic>[^/]+)"
)
_SUBSCRIPTION: Final = rf"{_TOPIC}/subscription/(?P<subscription>[^/]+)"

Names = Mapping[str, str]
Answer = Callable[["Gateway", web.Request, Names], Awaitable[web.StreamResponse]]


class Taking:
    """A consumer of requests, and what they have taken and not acknowledged."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.taken: dict[str, Message] = {}  # by the text of its id

    async def close(self) -> None:
        """What was not acknowledged goes to others."""
        await self.consumer.close()


class Gateway:
    """Made for one service; `close` in the end."""

    def __init__(self, url: str, broker: str, max_message_bytes: int) -> None:
        """`broker`: whose HTTP this is. A request publishes `max_message_bytes` at most, in one message or several."""
        self._url = url
        self._broker = broker
        self.max_body_bytes = max_message_bytes * 7 // 5  # JSON escapes some characters
        self._client: Client | None = None
        self._opening = asyncio.Lock()
        self.producers: Kept[Producer] = Kept("producers of HTTP", IDLE_S, _MOST_KEPT)
        self.consumers: Kept[Taking] = Kept("consumers of HTTP", IDLE_S, _MOST_KEPT)

    async def handle(self, request: web.Request) -> web.StreamResponse | None:
        """None: the path is none of these. Raises MagnetarError."""
        path = request.rel_url.raw_path
        for method, pattern, answer in _PATHS:
            if request.method == method and (found := pattern.fullmatch(path)) is not None:
                names = {name: unquote(text) for name, text in found.groupdict().items() if text is not None}
                return await answer(self, request, names)
        return None

    async def client(self) -> Client:
        """Connected once. Raises ConnectionLost."""
        async with self._opening:
            if self._client is None:
                self._client = await connect(self._url)
            return self._client

    async def close(self) -> None:
        """Nothing of it is left."""
        await self.producers.close()
        await self.consumers.close()
        if self._client is not None:
            await self._client.close()

    async def produce(self, topic: str, published: Published) -> list[dict[str, Any]]:
        """Sends them in their order; what became of each."""
        client, name = await self.client(), published.producer_name

        async def opened() -> Producer:
            return await client.create_producer(topic, name=name, chunking=True)

        async with self.producers.use((topic, name), opened) as producer:
            sends = [
                producer.send(
                    None if one.payload is None else one.payload.encode(),
                    **one.fields(),
                )
                for one in published.messages
            ]
            found = await asyncio.gather(*sends, return_exceptions=True)
            if producer.ended:
                self.producers.drop((topic, name))
        results = []
        for one in found:
            if isinstance(one, MagnetarError):
                results.append(failed(one))
            elif isinstance(one, BaseException):
                raise one
            else:
                results.append({"messageId": id_text(one), "errorCode": 0, "errorMsg": None})
        return results


def topic_of(names: Names) -> str:
    """The full name."""
    return "{domain}://{tenant}/{namespace}/{topic}".format_map(names)


def number(request: web.Request, name: str, default: int, most: int) -> int:
    """Of the query. Raises InvalidArgument."""
    text = request.query.get(name, str(default))
    if not text.isascii() or not text.isdecimal() or not 0 <= int(text) <= most:
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
    if partition := names.get("partition"):
        topic += f"-partition-{int(partition)}"
    results = await gateway.produce(topic, published)
    return _json({"messagePublishResults": results, "schemaVersion": 0})


async def _taking(gateway: Gateway, request: web.Request, names: Names) -> tuple[str, str, Any]:
    topic, subscription = topic_of(names), names["subscription"]
    client, start = await gateway.client(), start_of(request.query.get("start", "latest"))

    async def opened() -> Taking:
        return Taking(await client.subscribe(topic, subscription, type="shared", start=start))

    return topic, subscription, gateway.consumers.use((topic, subscription), opened)


async def _consume(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    wanted = number(request, "messages", 1, _MOST_MESSAGES)
    timeout_s = number(request, "timeoutMs", 1_000, _MOST_WAIT_MS) / 1000
    *_, using = await _taking(gateway, request, names)
    rows: list[dict[str, Any]] = []
    async with using as taking:
        with contextlib.suppress(ReceiveTimeout):
            while len(rows) < wanted:
                message = await taking.consumer.receive(timeout=0.0 if rows else timeout_s)
                row = received(message)
                taking.taken[row["messageId"]] = message
                rows.append(row)
    return _json(rows)


async def _acknowledge(gateway: Gateway, request: web.Request, names: Names) -> web.Response:
    """Durable when it is answered."""
    ids = decoded(await request.read(), list[str])
    *_, using = await _taking(gateway, request, names)
    async with using as taking:
        gone = [one for one in ids if one not in taking.taken]
        await taking.consumer.ack([taking.taken.pop(one) for one in ids if one not in gone], receipt=True)
    if gone:
        raise MessageLost(
            f"{len(gone)} of these messages are not held here any more ({gone[0][:60]}): they were acknowledged, or "
            f"given to others, since nobody came for {IDLE_S:.0f} s"
        )
    return web.Response(status=204)


async def _events(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    last = request.headers.get("Last-Event-ID", "")
    start = start_of(last or request.query.get("start", "latest"))
    client = await gateway.client()
    async with client.create_reader(topic_of(names), start=start, inclusive=not last) as reader:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        await response.write(b": open\n\n")
        while not reader.reached_end:
            try:
                row = received(await reader.receive(timeout=_HEARTBEAT_S))
            except ReceiveTimeout:
                await response.write(b": nothing new\n\n")  # finds out whether somebody is there
                continue
            await response.write(
                b"id: %s\ndata: %s\n\n" % (row["messageId"].encode(), msgspec.json.encode(row))
            )
        await response.write(b"event: end\ndata: the topic is terminated\n\n")
    return response


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
            raise MalformedFrame(sent["errorMsg"])
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
