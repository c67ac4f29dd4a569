"""The transport to bookies over TCP: one connection per bookie for all ledgers, opened when it is first needed.

Re-adds of recoveries go over a connection of their own: a stale writer of this very process may have the same entry in
flight, and an AddDone row does not say which of the two it answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from magnetar.proto.commands import BookieInfo, Command, ReadEntries, ReadLastConfirmed, WriteLastConfirmed
from magnetar.proto.errors import MalformedFrame
from magnetar.runtime.connection import ConnectionOptions, Reply

from .bookie_connection import BookieChannel
from .directory import BookieDirectory
from .settings import LedgerSettings
from .transport import AddCallback, LastConfirmed, ReadResult


class TcpTransport:
    """BookieTransport over TCP. `options` are those of every connection; the directory tells the addresses."""

    def __init__(
        self, bookies: BookieDirectory, settings: LedgerSettings, options: ConnectionOptions
    ) -> None:
        self._bookies = bookies
        self._settings = settings
        self._options = replace(
            options,
            handshake_timeout_s=min(options.handshake_timeout_s, settings.connect_timeout_s),
            # The bound that counts is max_outstanding_bytes, which fails adds one by one and by name.
            max_buffered_bytes=max(options.max_buffered_bytes, 2 * settings.max_outstanding_bytes),
        )
        self._channels: dict[str, BookieChannel] = {}
        self._recovery_channels: dict[str, BookieChannel] = {}
        self._closed = False

    def add(
        self, bookie: str, entry: bytes, ledger_id: int, entry_id: int, *, recovery: bool, done: AddCallback
    ) -> None:
        """See BookieTransport."""
        channel = None if recovery else self._channels.get(bookie)
        (channel or self._channel(bookie, recovery)).add(entry, ledger_id, entry_id, done)

    async def read(
        self, bookie: str, ledger_id: int, first: int, last: int, *, max_bytes: int = 0, fence: bool = False
    ) -> ReadResult:
        """See BookieTransport."""
        reply = await self._ask(bookie, ReadEntries(0, ledger_id, first, last, max_bytes, fence))
        payload = reply.payload
        try:
            sizes, last_add_confirmed = reply.result["sizes"], reply.result["last_add_confirmed"]
            entries: list[bytes] = []
            position = 0
            for size in sizes:
                entries.append(payload[position : position + size])
                position += size
            if position != len(payload) or not entries:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise MalformedFrame(
                f"bookie {bookie} answered ReadEntries with {len(payload)} bytes that do not fit {reply.result!r:.100}"
            ) from None
        return ReadResult(entries, last_add_confirmed)

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        """See BookieTransport."""
        result = (await self._ask(bookie, ReadLastConfirmed(0, ledger_id, fence))).result
        try:
            return LastConfirmed(result["last_add_confirmed"], result["last_entry"])
        except (TypeError, KeyError):
            raise MalformedFrame(f"bookie {bookie} answered ReadLastConfirmed with {result!r:.100}") from None

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        """See BookieTransport."""
        await self._ask(bookie, WriteLastConfirmed(0, ledger_id, last_add_confirmed))

    async def info(self, bookie: str) -> dict[str, Any]:
        """See BookieTransport."""
        result = (await self._ask(bookie, BookieInfo(0))).result
        if not isinstance(result, dict):
            raise MalformedFrame(f"bookie {bookie} answered BookieInfo with {result!r:.100}")
        return result

    async def close(self) -> None:
        """See BookieTransport."""
        self._closed = True
        channels = [*self._channels.values(), *self._recovery_channels.values()]
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _ask(self, bookie: str, command: Command) -> Reply:
        connection = await self._channel(bookie, recovery=False).connected()
        return await connection.request(command, timeout=self._settings.read_timeout_s)

    def _channel(self, bookie: str, recovery: bool) -> BookieChannel:
        channels = self._recovery_channels if recovery else self._channels
        channel = channels.get(bookie)
        if channel is None:
            channel = channels[bookie] = BookieChannel(
                bookie, self._bookies, self._settings, self._options, recovery
            )
            if self._closed:
                channel.refuse()
        return channel
