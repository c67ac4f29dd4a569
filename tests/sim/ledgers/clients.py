"""Clients of simulated bookies, each a process of its own with a real LedgerClient over TCP: writers, recoverers, readers.

They keep going through failures that say that they can be retried, and tell the history what they saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from magnetar.ledger import (
    LedgerClient,
    LedgerReader,
    LedgerSettings,
    LedgerWriter,
    RegisteredBookies,
    StoredIdentities,
)
from magnetar.metadata.ledgers import StoredLedgers
from magnetar.proto.errors import (
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    UnknownLedgerState,
)
from sim.ledgers.answer_checker import AnswerChecker, CheckedTransport
from sim.ledgers.history import History, LedgerHistory
from sim.ledgers.machines import CONNECTION
from sim.ledgers.metadata import CLUSTER, MetadataService
from sim.ledgers.plan import Plan
from support.sim import SimClock, SimLoop

RETRY_S = 0.1
SIZES = (0, 10, 100, 100, 300, 1000, 3000)
MAX_OUTSTANDING = 48
# What another replica, a restart or time may make good.
_MAY_PASS = (EntryNotFound, EntryDamaged, UnknownLedgerState)


class ClientContext:
    """What the clients of one run share: access to the service, and the history."""

    def __init__(self, loop: SimLoop, metadata: MetadataService, history: History, plan: Plan) -> None:
        self.loop = loop
        self.metadata = metadata
        self.history = history
        self.plan = plan
        self.power_fails: Callable[[], None] = lambda: None  # of all machines at once
        self.answers = AnswerChecker()
        ensemble_size, write_quorum, ack_quorum = plan.quorums
        self.settings = LedgerSettings(
            ensemble_size=ensemble_size,
            write_quorum=write_quorum,
            ack_quorum=ack_quorum,
            add_timeout_s=0.5,
            read_timeout_s=0.5,
            connect_timeout_s=0.4,
            reconnect_backoff_s=0.03,
            reconnect_backoff_max_s=0.5,
            explicit_lac_interval_s=plan.explicit_lac_s,
            explicit_lac_backoff_max_s=1.0,
            suspect_bookie_s=1.0,
            max_outstanding_bytes=1024 * 1024,
        )

    async def client(self) -> tuple[LedgerClient, CheckedTransport]:
        """Of the calling process."""
        loop = self.loop
        metadata = self.metadata.view()
        bookies: list[RegisteredBookies] = []

        async def open_directory() -> None:
            bookies.append(await RegisteredBookies.open(metadata))

        await self.until_done(open_directory)
        identities = StoredIdentities(metadata, CLUSTER)
        transport = CheckedTransport(self.answers, bookies[0], self.settings, CONNECTION, identities)
        rng = random.Random(loop.rng.getrandbits(64))
        client = LedgerClient(
            StoredLedgers(metadata), transport, bookies[0], self.settings, rng, SimClock(loop)
        )
        return client, transport

    async def open(self, client: LedgerClient, ledger: LedgerHistory, who: str) -> LedgerReader:
        """For reading what is confirmed so far."""
        floor = ledger.floor
        reader: LedgerReader = await self.until_done(lambda: client.open(ledger.ledger_id, recover=False))
        self.history.asked_enough(ledger, floor, reader.last_add_confirmed, who)
        return reader

    async def until_done(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Retries what says that it can be retried."""
        while True:
            try:
                return await attempt()
            except MagnetarError as error:
                if not error.retryable and not isinstance(error, _MAY_PASS):
                    raise
                self.loop.trace.record("retry", type(error).__name__, error.message)
            await asyncio.sleep(RETRY_S)


class Writer:
    """Creates a ledger and appends to it until it is stopped, or fails. Attributes are read from outside."""

    def __init__(self, context: ClientContext, name: str) -> None:
        self.ledger: LedgerHistory | None = None
        self.stopping = False  # True: closes the ledger
        self.quiet = False  # True: appends nothing more
        self.detaching = False
        self.limit = 1 << 30  # entries
        self.bursts: tuple[int, ...] = (1, 1, 2, 5, 12)  # entries at a time
        self.sizes: tuple[int, ...] = SIZES  # payload bytes
        self.gap_s = context.plan.mean_burst_gap_s
        self.most_outstanding = MAX_OUTSTANDING
        self.error: MagnetarError | None = None  # why appends fail
        self.closed = False
        self.writer: LedgerWriter | None = None
        self.name = name
        self._context = context
        self._rng = random.Random(context.loop.rng.getrandbits(64))

    async def run(self) -> None:
        """The process."""
        client, _ = await self._context.client()
        writer: LedgerWriter = await self._context.until_done(lambda: self.create(client))
        self.writer = writer
        self.ledger = self._context.history.created(writer.ledger_id, self._context.settings.ack_quorum)
        rng = self._rng
        while self.error is None and not (self.stopping or self.detaching):
            if not self.quiet:
                self._append(rng.choice(self.bursts))
            await asyncio.sleep(rng.expovariate(1 / self.gap_s))
        if self.detaching:
            await client.close()
        elif self.stopping or rng.random() < self._context.plan.close_after_failure:
            await self._close(writer)

    async def create(self, client: LedgerClient) -> LedgerWriter:
        """The ledger."""
        return await client.create()

    def _append(self, count: int) -> None:
        ledger, writer = self.ledger, self.writer
        assert ledger is not None
        assert writer is not None
        for _ in range(count):
            if len(ledger.sent) - ledger.confirmed > self.most_outstanding or len(ledger.sent) >= self.limit:
                return
            payload = b"%d/%d/" % (ledger.ledger_id, len(ledger.sent)) + bytes(self._rng.choice(self.sizes))
            entry_id = writer.append(payload, self._confirmed)
            if entry_id >= 0:
                self._context.history.sent(ledger, entry_id, payload)
            else:
                self._context.history.refused += 1

    def _confirmed(self, entry_id: int, entry: bytes, error: MagnetarError | None) -> None:
        assert self.ledger is not None
        if error is not None:
            self.error = error
            self._context.history.refused += 1
        else:
            self._context.loop.trace.record("ack", self.ledger.ledger_id, entry_id)
            self._context.history.acknowledged(self.ledger, entry_id, entry)

    async def _close(self, writer: LedgerWriter) -> None:
        assert self.ledger is not None
        try:
            metadata = await self._context.until_done(writer.close)
        except (LedgerFenced, LedgerNotFound) as error:  # a successor came first
            self.error = error
            return
        self._context.history.closed(self.ledger, metadata, self.name)
        self.closed = True


async def recover(context: ClientContext, ledger: LedgerHistory, name: str) -> None:
    """A process that takes a ledger over: fences, recovers, closes, and reads all of it."""
    client, _ = await context.client()
    try:
        reader: LedgerReader = await context.until_done(lambda: client.open(ledger.ledger_id, recover=True))
    except LedgerNotFound:
        if not ledger.deleting:
            raise
        return
    context.history.recoveries += 1
    context.loop.trace.record("recovered", name, ledger.ledger_id, reader.metadata.last_entry)
    context.history.closed(ledger, reader.metadata, name)
    await read_all(context, reader, ledger, name)


async def read_all(context: ClientContext, reader: LedgerReader, ledger: LedgerHistory, name: str) -> None:
    """Every entry up to what the reader takes for confirmed, whatever it takes."""
    entry_id = 0
    while entry_id <= reader.last_add_confirmed:
        try:
            entries = await context.until_done(
                partial(reader.read, entry_id, reader.last_add_confirmed, max_bytes=16 * 1024)
            )
        except LedgerNotFound:
            if not ledger.deleting:
                raise
            return
        for entry in entries:
            context.history.read(ledger, entry_id, entry, name)
            entry_id += 1


async def delete(context: ClientContext, ledger: LedgerHistory) -> None:
    """A process that deletes a ledger."""
    client, _ = await context.client()
    ledger.deleting = True
    with contextlib.suppress(LedgerNotFound):  # deleted by the attempt whose answer was lost
        await context.until_done(lambda: client.delete(ledger.ledger_id))
    context.history.deleted += 1
    context.loop.trace.record("deleted", ledger.ledger_id)
    await asyncio.sleep(1.0)  # the deletion is sent to its bookies


class Tail:
    """A process that reads a ledger while it is written, up to its end."""

    def __init__(self, context: ClientContext, name: str) -> None:
        self.name = name
        self.context = context
        self.next: dict[int, int] = {}  # ledger -> entries read
        self.done: dict[int, None] = {}  # ledgers read to their end
        self._rng = random.Random(context.loop.rng.getrandbits(64))

    async def run(self, ledgers: list[LedgerHistory]) -> None:
        """Follows the ledgers of a chain, those to come as well."""
        client, transport = await self.context.client()
        position = 0
        while True:
            if position == len(ledgers):
                await asyncio.sleep(0.05)
                continue
            ledger = ledgers[position]
            try:
                await self._follow(client, transport, ledger)
            except LedgerNotFound:
                if not ledger.deleting:
                    raise
            self.done[ledger.ledger_id] = None
            position += 1

    async def _follow(self, client: LedgerClient, transport: CheckedTransport, ledger: LedgerHistory) -> None:
        context = self.context
        reader = await context.open(client, ledger, self.name)
        if self._rng.random() < 0.5:
            await self._follow_by_polls(reader, ledger)
            return
        while True:
            if reader.closed:
                context.history.closed(ledger, reader.metadata, self.name)
            context.history.last_confirmed(ledger, reader.last_add_confirmed, self.name)
            await self._read(reader, ledger)
            if reader.closed:
                return
            if self._rng.random() < 0.5:
                await asyncio.sleep(self._rng.uniform(0.01, 0.1))
            else:
                await self._long_poll(transport, reader, ledger)
            floor = ledger.floor
            await context.until_done(reader.read_last_confirmed)
            context.history.asked_enough(ledger, floor, reader.last_add_confirmed, self.name)

    async def _follow_by_polls(self, reader: LedgerReader, ledger: LedgerHistory) -> None:
        """The client's own way: long polls at several bookies, a watch on the metadata."""
        async with reader.follow(self.next.get(ledger.ledger_id, 0), max_bytes=8 * 1024) as tail:
            while not tail.ended:
                entry_id = tail.next_entry
                entries = await self.context.until_done(partial(tail.next, 1.0))
                if reader.closed:
                    self.context.history.closed(ledger, reader.metadata, self.name)
                self.context.history.last_confirmed(ledger, reader.last_add_confirmed, self.name)
                for entry in entries:
                    self.context.history.read(ledger, entry_id, entry, self.name)
                    entry_id += 1
                self.next[ledger.ledger_id] = entry_id

    async def _read(self, reader: LedgerReader, ledger: LedgerHistory) -> None:
        while (entry_id := self.next.get(ledger.ledger_id, 0)) <= reader.last_add_confirmed:
            entries = await self.context.until_done(
                partial(reader.read, entry_id, reader.last_add_confirmed, max_bytes=8 * 1024)
            )
            for entry in entries:
                self.context.history.read(ledger, entry_id, entry, self.name)
                entry_id += 1
            self.next[ledger.ledger_id] = entry_id

    async def _long_poll(
        self, transport: CheckedTransport, reader: LedgerReader, ledger: LedgerHistory
    ) -> None:
        """Asks one bookie of the ensemble; it may answer anything that is confirmed."""
        bookie = self._rng.choice(reader.metadata.last_ensemble.bookies)
        known = reader.last_add_confirmed
        try:
            news = await transport.wait_last_confirmed(
                bookie, ledger.ledger_id, known, timeout_s=0.3, max_entries=4
            )
        except MagnetarError:
            return
        self.context.history.last_confirmed(
            ledger, news.last_add_confirmed, f"{bookie} to {self.name}", bookie=True
        )
        for entry_id, entry in enumerate(news.entries, known + 1):
            self.context.history.read(ledger, entry_id, entry, f"{bookie} to {self.name}")
