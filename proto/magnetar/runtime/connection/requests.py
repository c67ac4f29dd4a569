"""Requests of one connection that wait for their answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from magnetar.proto.commands import Command, Ok
from magnetar.proto.errors import MagnetarError, MalformedFrame, RequestTimeout, TooManyRequests
from magnetar.proto.frames import MAX_HEADER_BYTES

from .transport import Piece


class Reply(NamedTuple):
    """A successful answer."""

    result: Any
    payload: bytes

    @classmethod
    def of(cls, answer: Ok, payload: bytes) -> Reply:
        """Inverse of `encode_answer`. Raises MalformedFrame."""
        if not answer.in_payload:
            return cls(answer.result, payload)
        try:
            return cls(msgspec.msgpack.decode(payload), b"")
        except (msgspec.MsgspecError, RecursionError) as error:
            raise MalformedFrame(f"the result of an answer cannot be decoded: {error}") from None


def encode_answer(
    request_id: int, result: Any, payload: Piece | Sequence[Piece]
) -> tuple[bytes, Piece | Sequence[Piece]]:
    """Header and payload of an Ok. A result that is too large for a header goes where the payload would."""
    header = Ok(request_id, result).encode()
    if len(header) <= MAX_HEADER_BYTES or payload:
        return header, payload
    return Ok(request_id, None, True).encode(), msgspec.msgpack.encode(result)


class PendingRequests:
    """Futures and timers by request id. An answer that nobody waits for (any more) is dropped.

    At most `limit` wait at a time; `peer` describes who is asked, for messages.
    """

    __slots__ = ("_last_id", "_limit", "_loop", "_peer", "_pending")

    def __init__(self, limit: int, peer: Callable[[], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit = limit
        self._peer = peer
        self._pending: dict[int, tuple[asyncio.Future[Reply], asyncio.TimerHandle]] = {}
        self._last_id = 0

    def next_id(self) -> int:
        """Counts up from 1."""
        self._last_id += 1
        return self._last_id

    def add(self, command: Command, timeout_s: float) -> asyncio.Future[Reply]:
        """The future of a new request, which fails with RequestTimeout in time. Raises TooManyRequests."""
        if len(self._pending) >= self._limit:
            raise TooManyRequests(
                f"{len(self._pending)} requests to {self._peer()} wait for an answer already"
            )
        answer: asyncio.Future[Reply] = self._loop.create_future()
        timer = self._loop.call_later(timeout_s, self._expire, command, timeout_s)
        self._pending[command.request_id] = answer, timer
        return answer

    def forget(self, request_id: int) -> None:
        """Nobody waits any more."""
        self._take(request_id)

    def resolve(self, request_id: int, reply: Reply) -> None:
        """The answer came."""
        answer = self._take(request_id)
        if answer is not None and not answer.done():
            answer.set_result(reply)

    def reject(self, request_id: int, error: MagnetarError) -> None:
        """A failure came, or the time is over."""
        answer = self._take(request_id)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def fail_all(self, make_error: Callable[[], MagnetarError]) -> None:
        """The connection ended: each request gets an error of its own."""
        for request_id in list(self._pending):
            self.reject(request_id, make_error())

    def _take(self, request_id: int) -> asyncio.Future[Reply] | None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return None
        pending[1].cancel()
        return pending[0]

    def _expire(self, command: Command, timeout_s: float) -> None:
        name = type(command).__name__
        self.reject(
            command.request_id,
            RequestTimeout(f"{self._peer()} did not answer {name} in {timeout_s:g} s; it may still happen"),
        )
