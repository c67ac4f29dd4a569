"""The transport to bookies over TCP: up to three connections to each bookie, opened when they are first needed.

The first is for the adds of writers. Requests have a second one: a read or a fence must not wait behind adds, least of all
while the bookie takes none from the socket because its write cache is full. The adds of recoveries have a third one: a stale
writer in this process may have the same entry in flight, and an AddDone row does not say which of the two it answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from magnetar.proto.commands import BookieInfo, Command
from magnetar.runtime.connection import ConnectionOptions, Reply

from .bookie_link import BookieChannel, Destination
from .core.outstanding_adds import AddCallback
from .directory import BookieDirectory
from .identities import BookieIdentities, GivenIdentities
from .settings import LedgerSettings
from .transport import Answer, BookieTransport


class TcpTransport(BookieTransport):
    """BookieTransport over TCP. `options` are those of every connection; `bookies` has the addresses.

    `identities` verify that the peer is the bookie that is meant (rule 35); without them no peer is verified.
    """

    def __init__(
        self,
        bookies: BookieDirectory,
        settings: LedgerSettings,
        options: ConnectionOptions,
        identities: BookieIdentities | None = None,
    ) -> None:
        self._bookies = bookies
        self._settings = settings
        self._options = replace(
            options,
            handshake_timeout_s=min(options.handshake_timeout_s, settings.connect_timeout_s),
            # The bound that counts is max_outstanding_bytes, which fails adds one by one and by name.
            max_buffered_bytes=max(options.max_buffered_bytes, 2 * settings.max_outstanding_bytes),
        )
        self._identities = identities or GivenIdentities({})
        self._add_channels: dict[str, BookieChannel] = {}
        self._request_channels: dict[str, BookieChannel] = {}
        self._recovery_channels: dict[str, BookieChannel] = {}
        self._closed = False

    def add(
        self,
        bookie: str,
        entry: bytes,
        ledger_id: int,
        entry_id: int,
        *,
        recovery: bool,
        done: AddCallback,
        deferred: bool = False,
    ) -> None:
        channels = self._recovery_channels if recovery else self._add_channels
        channel = channels.get(bookie) or self._channel(channels, bookie)
        channel.add(entry, ledger_id, entry_id, done, deferred)

    def force(self, bookie: str, ledger_id: int) -> None:
        if (channel := self._add_channels.get(bookie)) is not None:  # recovery adds are never deferred
            channel.force(ledger_id)

    def reset_backoff(self, bookie: str) -> None:
        for channels in (self._add_channels, self._recovery_channels):
            if (channel := channels.get(bookie)) is not None:
                channel.reset_backoff()

    async def ask(self, bookie: str, command: Command, longer_s: float = 0.0) -> Answer:
        channels = self._request_channels
        channel = channels.get(bookie) or self._channel(channels, bookie)
        if isinstance(command, BookieInfo):
            channel.reset_backoff()  # a bookie that is back is noticed at once; the caller limits how often it asks
        connection = await channel.connected()
        reply = await connection.request(command, timeout=self._settings.read_timeout_s + longer_s)
        sizes = reply.result.get("sizes") if isinstance(reply.result, dict) else None
        return Answer(reply.result, (reply.payload,) if sizes is None else _cut(bookie, reply))

    async def close(self) -> None:
        self._closed = True
        channels = [
            channel
            for channels in (self._add_channels, self._request_channels, self._recovery_channels)
            for channel in channels.values()
        ]
        await asyncio.gather(*(channel.close() for channel in channels))

    def _channel(self, channels: dict[str, BookieChannel], bookie: str) -> BookieChannel:
        recovery = channels is self._recovery_channels
        destination = Destination(
            bookie, recovery, self._bookies, self._settings, self._options, self._identities
        )
        channel = channels[bookie] = BookieChannel(destination)
        if self._closed:
            channel.refuse()
        return channel


def _cut(bookie: str, reply: Reply) -> list[bytes]:
    """Splits the payload of an answer into entries of the given `sizes`. MalformedFrame if they do not add up to it."""
    entries: list[bytes] = []
    position = 0
    try:
        for size in reply.result["sizes"]:
            entries.append(reply.payload[position : position + size])
            position += size
    except TypeError:
        position = -1
    if position != len(reply.payload):
        raise Answer(reply.result, (reply.payload,)).misfit(bookie)
    return entries
