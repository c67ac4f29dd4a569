"""The transport to bookies over TCP: connections per bookie for all ledgers, opened when they are first needed.

One is for adds. Requests go over a second: a read or a fence must not wait behind adds, least of all while the bookie reads
none because its write cache is full. Re-adds of recoveries go over a third: a stale writer of this very process may have the
same entry in flight, and an AddDone row does not say which of the two it answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from magnetar.proto.commands import (
    DEFERRED_SYNC,
    ENTRY_RANGE_ROW,
    LEDGER_DELETED,
    LEDGER_FENCED,
    LEDGER_ROW,
    BookieInfo,
    Command,
    DeleteLedger,
    ListEntries,
    ListLedgers,
    ReadEntries,
    ReadLastConfirmed,
    WaitLastConfirmed,
    WriteLastConfirmed,
    decode_rows,
)
from magnetar.proto.errors import MalformedFrame
from magnetar.proto.stripe import EVERY_ENTRY, Stripe
from magnetar.runtime.connection import ConnectionOptions, Reply

from .bookie_channel import BookieChannel
from .bookie_link import Destination
from .directory import BookieDirectory
from .identities import AnyBookie, BookieIdentities
from .settings import LedgerSettings
from .transport import (
    AddCallback,
    EntryPage,
    LastConfirmed,
    LedgerPage,
    ListedLedger,
    LongPollAnswer,
    ReadResult,
)


class TcpTransport:
    """BookieTransport over TCP. `options` are those of every connection; the directory tells the addresses.

    `identities` say who is believed to be which bookie; without them everybody is.
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
            features=(*options.features, DEFERRED_SYNC),
            handshake_timeout_s=min(options.handshake_timeout_s, settings.connect_timeout_s),
            # The bound that counts is max_outstanding_bytes, which fails adds one by one and by name.
            max_buffered_bytes=max(options.max_buffered_bytes, 2 * settings.max_outstanding_bytes),
        )
        self._identities = identities or AnyBookie()
        self._channels: dict[str, BookieChannel] = {}
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
        channels = self._recovery_channels if recovery else self._channels
        channel = channels.get(bookie) or self._channel(channels, bookie)
        channel.add(entry, ledger_id, entry_id, done, deferred)

    def force(self, bookie: str, ledger_id: int) -> None:
        if (channel := self._channels.get(bookie)) is not None:
            channel.force(ledger_id)

    def expect(self, bookie: str) -> None:
        for channels in (self._channels, self._recovery_channels):
            if (channel := channels.get(bookie)) is not None:
                channel.expect()

    async def read(
        self,
        bookie: str,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int = 0,
        fence: bool = False,
        stripe: Stripe = EVERY_ENTRY,
    ) -> ReadResult:
        reply = await self._ask(bookie, ReadEntries(0, ledger_id, first, last, max_bytes, fence, *stripe))
        try:
            last_add_confirmed = reply.result["last_add_confirmed"]
            entries = _cut(reply)
            if stripe.cycle != 1 and not reply.result.get("striped"):  # an older bookie: all from `first` on
                entries = [entry for entry_id, entry in enumerate(entries, first) if stripe.holds(entry_id)]
            if not entries:
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise _misfit(bookie, "ReadEntries", reply) from None
        return ReadResult(entries, last_add_confirmed)

    async def read_last_confirmed(self, bookie: str, ledger_id: int, *, fence: bool = False) -> LastConfirmed:
        reply = await self._ask(bookie, ReadLastConfirmed(0, ledger_id, fence))
        try:
            return LastConfirmed(reply.result["last_add_confirmed"], reply.result["last_entry"])
        except (TypeError, KeyError):
            raise _misfit(bookie, "ReadLastConfirmed", reply) from None

    async def write_last_confirmed(self, bookie: str, ledger_id: int, last_add_confirmed: int) -> None:
        await self._ask(bookie, WriteLastConfirmed(0, ledger_id, last_add_confirmed))

    async def wait_last_confirmed(
        self,
        bookie: str,
        ledger_id: int,
        last_add_confirmed: int,
        *,
        timeout_s: float,
        max_entries: int = 0,
        max_bytes: int = 0,
    ) -> LongPollAnswer:
        milliseconds = max(1, round(timeout_s * 1000))
        command = WaitLastConfirmed(0, ledger_id, last_add_confirmed, milliseconds, max_entries, max_bytes)
        reply = await self._ask(bookie, command, timeout_s)
        try:
            result = reply.result
            return LongPollAnswer(result["last_add_confirmed"], result["fenced"], _cut(reply))
        except (TypeError, KeyError, ValueError):
            raise _misfit(bookie, "WaitLastConfirmed", reply) from None

    async def delete_ledger(self, bookie: str, ledger_id: int) -> None:
        await self._ask(bookie, DeleteLedger(0, ledger_id))

    async def list_ledgers(self, bookie: str, *, after: int = -1, count: int = 1000) -> LedgerPage:
        reply = await self._ask(bookie, ListLedgers(0, after, count))
        try:
            ledgers = [
                ListedLedger(
                    ledger_id,
                    bool(flags & LEDGER_FENCED),
                    bool(flags & LEDGER_DELETED),
                    last_entry,
                    confirmed,
                )
                for ledger_id, flags, last_entry, confirmed in decode_rows(LEDGER_ROW, reply.payload)
            ]
            return LedgerPage(ledgers, reply.result["more"])
        except (TypeError, KeyError):
            raise _misfit(bookie, "ListLedgers", reply) from None

    async def list_entries(
        self, bookie: str, ledger_id: int, *, first: int = 0, count: int = 1000
    ) -> EntryPage:
        reply = await self._ask(bookie, ListEntries(0, ledger_id, first, count))
        try:
            ranges = [(begin, end) for begin, end in decode_rows(ENTRY_RANGE_ROW, reply.payload)]
            return EntryPage(ranges, reply.result["next"])
        except (TypeError, KeyError):
            raise _misfit(bookie, "ListEntries", reply) from None

    async def info(self, bookie: str) -> dict[str, Any]:
        """See BookieTransport. Ignores the backoff: the caller limits its own rate."""
        channels = self._request_channels
        (channels.get(bookie) or self._channel(channels, bookie)).expect()
        reply = await self._ask(bookie, BookieInfo(0))
        if not isinstance(reply.result, dict):
            raise _misfit(bookie, "BookieInfo", reply)
        return reply.result

    async def close(self) -> None:
        self._closed = True
        channels = [
            channel
            for channels in (self._channels, self._request_channels, self._recovery_channels)
            for channel in channels.values()
        ]
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _ask(self, bookie: str, command: Command, longer_s: float = 0.0) -> Reply:
        channels = self._request_channels
        channel = channels.get(bookie) or self._channel(channels, bookie)
        connection = await channel.connected()
        return await connection.request(command, timeout=self._settings.read_timeout_s + longer_s)

    def _channel(self, channels: dict[str, BookieChannel], bookie: str) -> BookieChannel:
        recovery = channels is self._recovery_channels
        destination = Destination(
            bookie, recovery, self._bookies, self._settings, self._options, self._identities
        )
        channel = channels[bookie] = BookieChannel(destination)
        if self._closed:
            channel.refuse()
        return channel


def _cut(reply: Reply) -> list[bytes]:
    """The entries of an answer with `sizes`. ValueError and others if they do not fit."""
    entries: list[bytes] = []
    position = 0
    for size in reply.result["sizes"]:
        entries.append(reply.payload[position : position + size])
        position += size
    if position != len(reply.payload):
        raise ValueError
    return entries


def _misfit(bookie: str, command: str, reply: Reply) -> MalformedFrame:
    return MalformedFrame(
        f"bookie {bookie} answered {command} with {len(reply.payload)} bytes that do not fit {reply.result!r:.100}"
    )
