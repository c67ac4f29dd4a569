"""One connection to a broker: frames out and in, requests and their answers, keep-alive."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from google.protobuf.message import Message

from magnetar.proto import errors as e
from magnetar.proto.pulsar import wire_pb2 as wire
from magnetar.proto.pulsar.commands import FIELDS, NO_REQUEST, decode, encode
from magnetar.proto.pulsar.frames import PING, PONG

S = wire.ServerError
# What programs tell apart; of the others the first three say that the same call may succeed later.
_ERRORS: dict[int, type[e.MagnetarError]] = {
    S.ServiceNotReady: e.LookupAgainError,
    S.PersistenceError: e.RetryableError,
    S.MetadataError: e.RetryableError,
    S.TooManyRequests: e.TooManyRequests,
    S.UnknownError: e.RetryableError,
    S.ProducerBusy: e.ProducerBusy,
    S.ConsumerBusy: e.ConsumerBusy,
    S.ProducerFenced: e.ProducerFenced,
    S.TopicNotFound: e.TopicNotFound,
    S.TopicTerminatedError: e.TopicTerminated,
}


def refused(code: int, text: str) -> e.MagnetarError:
    """The error that a broker answered."""
    return _ERRORS.get(code, e.InvalidCallError)(f"{S.Name(code)}: {text}")


class Handler(Protocol):
    """A producer or a consumer of a connection."""

    def received(self, name: str, command: Any, rest: bytes) -> None:
        """A command that names it."""

    def detached(self, connection: Connection) -> None:
        """The broker closed it, or the connection is lost."""


class Connection(asyncio.Protocol):
    """See the module docstring. Made by `PulsarClient`."""

    def __init__(self, first_request_id: int, ping_interval_s: float, client_version: str) -> None:
        self.ready: asyncio.Future[wire.CommandConnected] = asyncio.get_running_loop().create_future()
        self.closed = False
        self.handlers: dict[tuple[str, int], Handler] = {}  # by "producer" or "consumer", and its id
        self._transport: asyncio.Transport
        self._data = b""
        self._request_id = first_request_id
        self._requests: dict[int, asyncio.Future[Any]] = {}
        self._ping_interval_s = ping_interval_s
        self._client_version = client_version
        self._timer: asyncio.TimerHandle | None = None
        self._silent = False  # since the last look

    # --- asyncio.Protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """CONNECT."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.send(wire.CommandConnect(client_version=self._client_version, protocol_version=21))
        self._look()

    def data_received(self, data: bytes) -> None:
        """Cuts frames."""
        self._silent = False
        self._data += data
        while len(self._data) >= 8 and not self.closed:
            end = 4 + int.from_bytes(self._data[:4], "big")
            if len(self._data) < end:
                return
            body = 8 + int.from_bytes(self._data[4:8], "big")
            command, rest, self._data = self._data[8:body], self._data[body:end], self._data[end:]
            found = decode(command)
            name = FIELDS[found.type]
            self._received(name, getattr(found, name), rest)

    def connection_lost(self, error: Exception | None) -> None:
        """All that waits here learns of it."""
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        lost = e.ConnectionLost(f"the connection to the broker is lost: {error}")
        for waiting in (self.ready, *self._requests.values()):
            if not waiting.done():
                waiting.set_exception(lost)
                waiting.exception()  # somebody may have stopped waiting
        for handler in list(self.handlers.values()):
            handler.detached(self)
        self.handlers.clear()

    def close(self) -> None:
        """At once."""
        self._transport.abort()

    def _look(self) -> None:
        """A second silent interval ends the connection."""
        if self._silent:
            self.close()
            return
        self._silent = True
        self.write(PING)
        self._timer = asyncio.get_running_loop().call_later(self._ping_interval_s, self._look)

    # --- out ---------------------------------------------------------------------------------------------------------

    def write(self, frames: bytes) -> None:
        """Encoded frames; dropped when closed."""
        if not self.closed:
            self._transport.write(frames)

    def send(self, command: Message) -> None:
        """A command without an answer."""
        self.write(encode(command))

    async def ask(self, command: Any, timeout_s: float) -> Any:
        """Its answer. Raises what the broker answered, ConnectionLost, RequestTimeout."""
        if self.closed:
            raise e.ConnectionLost("the connection to the broker is lost")
        self._request_id += 1
        command.request_id = self._request_id
        answer = self._requests[command.request_id] = asyncio.get_running_loop().create_future()
        self.send(command)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise e.RequestTimeout(f"no answer to {type(command).__name__} within {timeout_s:g} s") from None
        finally:
            self._requests.pop(command.request_id, None)

    # --- in ----------------------------------------------------------------------------------------------------------

    def _received(self, name: str, command: Any, rest: bytes) -> None:
        if name == "connected":
            if not self.ready.done():  # whoever waited may have given up
                self.ready.set_result(command)
        elif name == "ping":
            self.write(PONG)
        elif name == "error":
            error = refused(command.error, command.message)
            if command.request_id == NO_REQUEST:
                self.close()
            else:
                self._answer(command.request_id, error)
        elif name in ("close_producer", "close_consumer"):
            kind = name.removeprefix("close_")
            if (handler := self.handlers.pop((kind, getattr(command, f"{kind}_id")), None)) is not None:
                handler.detached(self)
        elif name in ("send_receipt", "send_error"):
            self._hand("producer", command.producer_id, name, command, rest)
        elif name in ("message", "active_consumer_change", "reached_end_of_topic"):
            self._hand("consumer", command.consumer_id, name, command, rest)
        elif name == "producer_success" and not command.producer_ready:
            pass  # it waits for others; another one follows
        elif name != "pong":
            self._answer(command.request_id, _failure(name, command) or command)

    def _hand(self, kind: str, id: int, name: str, command: Any, rest: bytes) -> None:
        if (handler := self.handlers.get((kind, id))) is not None:
            handler.received(name, command, rest)

    def _answer(self, request_id: int, answer: Any) -> None:
        waiting = self._requests.get(request_id)
        if waiting is not None and not waiting.done():
            if isinstance(answer, e.MagnetarError):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)


def _failure(name: str, command: Any) -> e.MagnetarError | None:
    """Of commands that have their errors in their own answers."""
    if name in ("lookup_response", "partitioned_metadata_response"):
        failed = command.response == command.FAILED if name[0] == "l" else command.HasField("error")
    else:
        failed = name == "ack_response" and command.HasField("error")
    return refused(command.error, command.message) if failed else None
