"""The two ways into a bookie: a TCP server, which makes a handler for each connection, and calls within one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from magnetar.proto.commands import Command, WaitLastConfirmed
from magnetar.runtime.connection import ConnectionOptions, FramedServer, start_server

from ..engine import Bookie
from .connection import BookieConnection, PausedConnections
from .requests import answer_long_poll, perform, wait_for_last_confirmed


class BookieServer:
    """Listens for ledger clients. The bookie is the caller's: it is closed after the server."""

    def __init__(self, bookie: Bookie) -> None:
        self._bookie = bookie
        self._server: FramedServer | None = None
        # In order of their coming: waking them must not depend on hashes.
        self._handlers: dict[BookieConnection, None] = {}
        self._paused = PausedConnections(bookie)

    @classmethod
    async def start(cls, bookie: Bookie, host: str, port: int, options: ConnectionOptions) -> BookieServer:
        """Raises InvalidSetting when the port cannot be used."""
        self = cls(bookie)
        options = replace(options, introduce=bookie.introduce)
        self._server = await start_server(host, port, self._handler, options)
        bookie.on_accepting.append(self._paused.release)
        return self

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """(host, port) of each listening socket."""
        assert self._server is not None
        return self._server.addresses

    async def close(self, drain_seconds: float) -> None:
        """Tells every peer, flushes, waits for running reads. Long polls end without an answer."""
        if self._paused.release in self._bookie.on_accepting:
            self._bookie.on_accepting.remove(self._paused.release)
        self._paused.close()
        if self._server is not None:
            await self._server.close(drain_seconds)
        await asyncio.gather(*[handler.ended() for handler in list(self._handlers)])

    def _handler(self) -> BookieConnection:
        return BookieConnection(self._bookie, self._handlers, self._paused)


class InProcessBookie:
    """What `ledger.local_transport.LocalBookie` asks for: adds are called, requests answered as over TCP."""

    def __init__(self, bookie: Bookie) -> None:
        self.add = bookie.add
        self.request_force = bookie.request_force
        self.on_accepting = bookie.on_accepting
        self._bookie = bookie

    @property
    def accepting(self) -> bool:
        return self._bookie.adds.accepting

    @property
    def waits_for_room(self) -> bool:
        return self._bookie.waits_for_room

    async def answer(self, command: Command) -> tuple[Any, Sequence[bytes]]:
        if isinstance(command, WaitLastConfirmed):
            result = await wait_for_last_confirmed(self._bookie, command)
            answer = await answer_long_poll(self._bookie, 0, command, result)
        else:
            answer = await perform(self._bookie, 0, command)
        payload = answer.payload
        return answer.result, (payload,) if isinstance(payload, bytes) else payload
