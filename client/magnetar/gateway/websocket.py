"""Pulsar's WebSocket API: a producer, a consumer or a reader is a WebSocket, a message a text frame of JSON.

    producer   {"payload": base64, "key", "properties", "context", ...}   --> {"result": "ok", "messageId", "context"}
    consumer   <-- {"messageId", "payload", "properties", "publishTime", "redeliveryCount", "key"}
               {"messageId"}                                       acknowledges it
               {"type": "negativeAcknowledge", "messageId"}        it comes again
               {"type": "permit", "permitMessages"}                so many more, with ?pullMode=true
               {"type": "unsubscribe"}  {"type": "isEndOfTopic"}
    reader     as a consumer; an acknowledgement only makes room for another message

At most receiverQueueSize messages are on their way and not acknowledged. What cannot be opened is refused with a status
before the WebSocket is; a wrong frame is answered, and costs itself only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import WSMsgType, web

from magnetar.client import Consumer, Message, Reader
from magnetar.client.options import DeadLetterPolicy
from magnetar.proto.errors import InvalidArgument, MagnetarError, MalformedFrame, TopicTerminated
from magnetar.runtime.tasks import awaited

from .messages import Outgoing, decoded, from_base64, id_text, received, start_of

if TYPE_CHECKING:
    from .gateway import Gateway, Names

_HEARTBEAT_S = 30.0
_MOST_FRAME_BYTES = 16 << 20
_MOST_PENDING = 1_000  # messages of a producer that are not confirmed


class _Query(msgspec.Struct, rename="camel"):
    """What a URL may say; what is not known is passed over, as Pulsar does."""

    # Producers.
    producer_name: str | None = None
    send_timeout_millis: int = 30_000
    batching_enabled: bool = True
    compression_type: str = "none"
    access_mode: str = "shared"
    max_pending_messages: int = _MOST_PENDING
    # Consumers and readers.
    subscription_type: str = "Exclusive"
    subscription_mode: Literal["Durable", "NonDurable"] = "Durable"
    subscription_initial_position: str = "latest"
    receiver_queue_size: int = 1_000
    priority_level: int = 0
    ack_timeout_millis: int = 0
    negative_ack_redelivery_delay: int = 60_000
    max_redeliver_count: int = 0
    dead_letter_topic: str | None = None
    pull_mode: bool = False
    message_id: str = "latest"


class _Asked(msgspec.Struct, rename="camel"):
    """A frame of a consumer."""

    message_id: str = ""
    type: str = "ack"
    permit_messages: int = 0


def _query(request: web.Request) -> _Query:
    if not web.WebSocketResponse().can_prepare(request):
        raise MalformedFrame("this path is a WebSocket: connect with ws://, not with a plain request")
    try:
        found = msgspec.convert(dict(request.query), _Query, strict=False)
    except msgspec.ValidationError as error:
        raise MalformedFrame(f"the query is not as it should be: {error}") from None
    if found.receiver_queue_size < 1 or found.max_pending_messages < 1:
        raise InvalidArgument("receiverQueueSize and maxPendingMessages have to be 1 or more")
    return found


async def _opened(request: web.Request) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(heartbeat=_HEARTBEAT_S, max_msg_size=_MOST_FRAME_BYTES)
    await socket.prepare(request)
    return socket


async def _send(socket: web.WebSocketResponse, value: Mapping[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the other loop finds out
        await socket.send_str(msgspec.json.encode(value).decode())


# --- producers -----------------------------------------------------------------------------------------------------------


async def producer(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """Answers come as the messages are stored."""
    from .gateway import topic_of

    query, client = _query(request), await gateway.client()
    options: dict[str, Any] = {
        "name": query.producer_name,
        "send_timeout": query.send_timeout_millis / 1000 or 30.0,
        "batching": query.batching_enabled,
        "compression": query.compression_type.lower(),
        "access_mode": query.access_mode.lower(),
        "chunking": True,
    }
    room = asyncio.Semaphore(min(query.max_pending_messages, _MOST_PENDING))
    async with client.create_producer(topic_of(names), **options) as made:
        socket = await _opened(request)

        async def send(text: str) -> None:
            context = None
            try:
                wanted = decoded(text, Outgoing)
                context = wanted.context
                value = None if wanted.payload is None else from_base64(wanted.payload, "payload")
                found = await made.send(value, **wanted.fields())
                answer: dict[str, Any] = {"result": "ok", "messageId": id_text(found)}
            except MagnetarError as error:
                answer = {"result": f"send-error:{error.code}", "errorMsg": error.message}
            finally:
                room.release()
            await _send(socket, answer if context is None else {**answer, "context": context})

        async with asyncio.TaskGroup() as sends:
            async for frame in socket:
                if frame.type == WSMsgType.TEXT:
                    await room.acquire()
                    sends.create_task(send(frame.data))
    return socket


# --- consumers and readers -----------------------------------------------------------------------------------------------


async def consumer(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """Messages come as long as there is room for them."""
    from .gateway import topic_of

    query, client = _query(request), await gateway.client()
    options: dict[str, Any] = {
        "type": query.subscription_type.lower(),
        "durable": query.subscription_mode == "Durable",
        "start": start_of(query.subscription_initial_position.lower()),
        "receiver_queue_messages": query.receiver_queue_size,
        "priority_level": query.priority_level,
        "ack_timeout": query.ack_timeout_millis / 1000 or None,
        "nack_delay": query.negative_ack_redelivery_delay / 1000,
    }
    if query.max_redeliver_count or query.dead_letter_topic:
        options["dead_letter"] = DeadLetterPolicy(
            max_redeliver_count=query.max_redeliver_count or 16, topic=query.dead_letter_topic
        )
    async with client.subscribe(topic_of(names), names["subscription"], **options) as made:
        return await _Session(made, query).run(request)


async def reader(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """As a consumer, from `messageId` on."""
    from .gateway import topic_of

    query, client = _query(request), await gateway.client()
    async with client.create_reader(topic_of(names), start=start_of(query.message_id)) as made:
        return await _Session(made, query).run(request)


class _Session:
    """A consumer or a reader, and its WebSocket."""

    def __init__(self, source: Consumer | Reader, query: _Query) -> None:
        self._source = source
        self._permits = 0 if query.pull_mode else query.receiver_queue_size
        self._pull = query.pull_mode
        self._room = asyncio.Event()  # set while permits are left
        self._out: dict[str, Message] = {}  # sent and not acknowledged, by the text of its id
        self._grant(0)

    async def run(self, request: web.Request) -> web.StreamResponse:
        socket = await _opened(request)
        sending = awaited(self._send_all(socket), "messages of a WebSocket")
        try:
            async for frame in socket:
                if frame.type == WSMsgType.TEXT:
                    try:
                        await self._handle(decoded(frame.data, _Asked), socket)
                    except MagnetarError as error:
                        await _send(socket, {"errorCode": error.code, "errorMsg": error.message})
        finally:
            sending.cancel()
            with contextlib.suppress(asyncio.CancelledError, MagnetarError):
                await sending
        return socket

    async def _send_all(self, socket: web.WebSocketResponse) -> None:
        try:
            while True:
                await self._room.wait()
                message = await self._source.receive()
                row = received(message)
                self._out[row["messageId"]] = message
                self._grant(-1)
                await _send(socket, row)
        except TopicTerminated:  # whoever asks isEndOfTopic is told
            pass
        except MagnetarError as error:
            await socket.close(code=1011, message=error.message.encode()[:120])

    def _grant(self, more: int) -> None:
        self._permits += more
        self._room.set() if self._permits > 0 else self._room.clear()

    async def _handle(self, asked: _Asked, socket: web.WebSocketResponse) -> None:
        if asked.type == "permit":
            self._grant(max(asked.permit_messages, 0) if self._pull else 0)
        elif asked.type == "isEndOfTopic":
            await _send(socket, {"endOfTopic": str(self._source.reached_end).lower()})
        elif asked.type == "unsubscribe":
            if isinstance(self._source, Consumer):
                await self._source.unsubscribe()
            await socket.close()
        elif asked.type in ("ack", "negativeAcknowledge"):
            await self._done(asked)
        else:
            raise InvalidArgument(
                f"type is {asked.type[:40]!r}; want ack, negativeAcknowledge, permit, unsubscribe or isEndOfTopic"
            )

    async def _done(self, asked: _Asked) -> None:
        message = self._out.pop(asked.message_id, None)
        if message is None:
            raise InvalidArgument(
                f"message {asked.message_id[:60]!r} is not one that waits to be acknowledged here"
            )
        if not self._pull:
            self._grant(1)
        if isinstance(self._source, Consumer):
            if asked.type == "ack":
                await self._source.ack(message)
            else:
                self._source.nack(message)
