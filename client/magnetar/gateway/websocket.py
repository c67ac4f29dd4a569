"""Pulsar's WebSocket API: a producer, a consumer or a reader is a WebSocket, a message a text frame of JSON.

    producer   {"payload": base64, "key", "properties", "context", ...}   --> {"result": "ok", "messageId", "context"}
    consumer   <-- {"messageId", "payload", "properties", "publishTime", "redeliveryCount", "key"}
               {"messageId"}                                       acknowledges it
               {"type": "negativeAcknowledge", "messageId"}        it comes again
               {"type": "permit", "permitMessages"}                so many more, with ?pullMode=true
               {"type": "unsubscribe"}  {"type": "isEndOfTopic"}
    reader     as a consumer; an acknowledgement only makes room for another message

At most receiverQueueSize messages are on their way and not acknowledged, and no more than _MOST_HELD_BYTES. Of a producer at
most maxPendingMessages are not answered, and about 16 MB; then nothing more is read of it. What cannot be opened is refused
with a status before the WebSocket is; a wrong frame is answered, and costs itself only.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from aiohttp import WSMsgType, web

from magnetar.client import Consumer, Message, Reader
from magnetar.client.options import DEFAULT_MAX_REDELIVER_COUNT, DeadLetterPolicy
from magnetar.proto.errors import InvalidArgument, MagnetarError, MalformedFrame, TopicTerminated
from magnetar.runtime.tasks import awaited, end_all

from .messages import Names, Outgoing, decoded, from_base64, id_text, received, start_of, topic_of

if TYPE_CHECKING:
    from .gateway import Gateway

_MOST_PENDING = 1_000  # messages of a producer that are not answered
_UNIT_BYTES = 16 << 10  # a larger one counts as several
_MOST_HELD_BYTES = 64 << 20
_MODES = {
    "waitforexclusive": "wait_for_exclusive",
    "exclusivewithfencing": "exclusive_with_fencing",
}  # as Pulsar has them


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


async def _send(socket: web.WebSocketResponse, value: Mapping[str, Any]) -> None:
    with contextlib.suppress(ConnectionError):  # the other loop finds out
        await socket.send_str(msgspec.json.encode(value).decode())


# --- producers -----------------------------------------------------------------------------------------------------------


async def producer(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """Answers come as the messages are stored."""
    query, client = _query(request), await gateway.client()
    options: dict[str, Any] = {
        "name": query.producer_name,
        "send_timeout": query.send_timeout_millis / 1000 or 30.0,
        "batching": query.batching_enabled,
        "compression": query.compression_type.lower(),
        "access_mode": _MODES.get(query.access_mode.lower(), query.access_mode.lower()),
        "chunking": True,
    }
    most = min(query.max_pending_messages, _MOST_PENDING)
    room = asyncio.Semaphore(most)
    async with (
        client.create_producer(topic_of(names), **options) as made,
        gateway.socket(request) as socket,
    ):

        async def send(text: str, units: int) -> None:
            context = None
            try:
                wanted = decoded(text, Outgoing)
                context = wanted.context
                value = None if wanted.payload is None else from_base64(wanted.payload, "payload")
                found = await made.send(value, **wanted.fields())
                answer: dict[str, Any] = {"result": "ok", "messageId": id_text(found)}
            except MagnetarError as error:
                answer = {"result": f"send-error:{error.code}", "errorMsg": error.message}
            await _send(socket, answer if context is None else {**answer, "context": context})
            for _ in range(units):
                room.release()

        async with asyncio.TaskGroup() as sends:
            async for frame in socket:
                text = frame.data if frame.type == WSMsgType.TEXT else ""  # which is no JSON
                units = min(1 + len(text) // _UNIT_BYTES, most)
                for _ in range(units):
                    await room.acquire()
                sends.create_task(send(text, units))
    return socket


# --- consumers and readers -----------------------------------------------------------------------------------------------


async def consumer(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """Messages come as long as there is room for them."""
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
            max_redeliver_count=query.max_redeliver_count or DEFAULT_MAX_REDELIVER_COUNT,
            topic=query.dead_letter_topic,
        )
    async with client.subscribe(topic_of(names), names["subscription"], **options) as made:
        return await _Session(made, query).run(gateway, request)


async def reader(gateway: Gateway, request: web.Request, names: Names) -> web.StreamResponse:
    """As a consumer, from `messageId` on."""
    query, client = _query(request), await gateway.client()
    async with client.create_reader(topic_of(names), start=start_of(query.message_id)) as made:
        return await _Session(made, query).run(gateway, request)


class _Session:
    """A consumer or a reader, and its WebSocket."""

    def __init__(self, source: Consumer | Reader, query: _Query) -> None:
        self._source = source
        self._most = query.receiver_queue_size
        self._permits = 0 if query.pull_mode else None  # None: whoever acknowledges gets more
        self._room = asyncio.Event()  # set while a message may be sent
        self._held: dict[str, Message] = {}  # sent and not acknowledged, by the text of its id
        self._held_bytes = 0
        self._note()

    async def run(self, gateway: Gateway, request: web.Request) -> web.StreamResponse:
        async with gateway.socket(request) as socket:
            sending = awaited(self._send_all(socket), "messages of a WebSocket")
            try:
                async for frame in socket:
                    text = frame.data if frame.type == WSMsgType.TEXT else ""  # which is no JSON
                    try:
                        await self._handle(decoded(text, _Asked), socket)
                    except MagnetarError as error:
                        await _send(socket, {"errorCode": error.code, "errorMsg": error.message})
            finally:
                await end_all([sending])
        return socket

    async def _send_all(self, socket: web.WebSocketResponse) -> None:
        try:
            while True:
                await self._room.wait()
                message = await self._source.receive()
                row = received(message)
                if self._permits is not None:
                    self._permits -= 1
                if row["messageId"] not in self._held:  # else it comes again, and takes no more room
                    self._held_bytes += len(message.value or b"")
                self._held[row["messageId"]] = message
                self._note()
                await _send(socket, row)
        except TopicTerminated:  # whoever asks isEndOfTopic is told
            pass
        except MagnetarError as error:
            await socket.close(code=1011, message=error.message.encode()[:120])

    def _note(self) -> None:
        few = len(self._held) < self._most if self._permits is None else self._permits > 0
        self._room.set() if few and self._held_bytes < _MOST_HELD_BYTES else self._room.clear()

    async def _handle(self, asked: _Asked, socket: web.WebSocketResponse) -> None:
        if asked.type == "permit":
            if self._permits is not None:
                self._permits += max(asked.permit_messages, 0)
                self._note()
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
        message = self._held.pop(asked.message_id, None)
        if message is None:
            raise InvalidArgument(
                f"message {asked.message_id[:60]!r} is not one that waits to be acknowledged here"
            )
        self._held_bytes -= len(message.value or b"")
        self._note()
        if isinstance(self._source, Consumer):
            if asked.type == "ack":
                await self._source.ack(message)
            else:
                self._source.nack(message)
