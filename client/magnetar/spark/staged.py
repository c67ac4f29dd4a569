"""The ledger of one task of a sink: made and closed through the broker, written to the bookies by the task itself.

The ledger client runs here as a whole (quorums, ensemble changes, retries); only its metadata store is the broker, which
keeps and compares the metadata of staged ledgers for those who may not reach the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import msgpack

from magnetar.client import Client
from magnetar.client.administration import ask
from magnetar.ledger import (
    LedgerClient,
    LedgerMetadata,
    LedgerSettings,
    LedgerWriter,
    StaticBookies,
)
from magnetar.ledger.directory import BookieFacts, Labels
from magnetar.metadata.store import Versioned
from magnetar.proto.commands import (
    CreateStagedLedger,
    DiscardStaged,
    GetLedgerMetadata,
    KeepStaged,
    PutLedgerMetadata,
)
from magnetar.proto.errors import LedgerNotFound, MagnetarError, TopicNotFound
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.tasks import LongTask

from .bookies import bookie_transport, directory_of, known_bookies
from .plan import KnownBookie

if TYPE_CHECKING:
    from magnetar.metadata.ledgers import LedgerManager

_log = logging.getLogger(__name__)

RENEWALS_PER_TTL = 4
DISCARD_TIMEOUT_S = 5.0
# Payload bytes that are appended and not confirmed.
MAX_IN_FLIGHT_BYTES = 16 << 20


class BrokerLedgers:
    """What a writer of a topic's staged ledgers needs of a LedgerManager: the broker reads and writes their records."""

    def __init__(self, client: Client, topic: str) -> None:
        self._client = client
        self._topic = topic

    async def get(self, ledger_id: int) -> Versioned | None:
        try:
            found = await ask(
                self._client.admin, GetLedgerMetadata(0, self._topic, ledger_id), topic=self._topic
            )
        except LedgerNotFound:
            return None
        return Versioned(found["metadata"], found["version"])

    async def put(self, ledger_id: int, record: bytes, *, version: int) -> int:
        command = PutLedgerMetadata(0, self._topic, ledger_id, version)
        found = await ask(self._client.admin, command, topic=self._topic, payload=record)
        return int(found["version"])


class StagedLedger:
    """Appends entries and says what became of them all."""

    def __init__(self, writer: LedgerWriter, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes  # what the broker takes, and its consumers expect
        self.ledger_id = writer.ledger_id
        self.closed = False  # and all of it is confirmed
        self._writer = writer
        self._in_flight = 0
        self._error: MagnetarError | None = None
        self._room = asyncio.Event()
        self._room.set()

    async def append(self, payload: bytes) -> None:
        """Waits for room, not for the confirmation. Raises what an earlier entry failed with."""
        await self._room.wait()
        if self._error is not None:
            raise self._error
        self._in_flight += len(payload)
        if self._in_flight >= MAX_IN_FLIGHT_BYTES:
            self._room.clear()

        def confirmed(_entry_id: int, _entry: bytes, error: MagnetarError | None) -> None:
            self._in_flight -= len(payload)
            self._error = self._error or error
            if error is not None or self._in_flight < MAX_IN_FLIGHT_BYTES:
                self._room.set()

        self._writer.append(payload, confirmed)

    async def close(self) -> None:
        """All entries are confirmed and the ledger is closed when this returns; else it raises why not."""
        metadata = await self._writer.close()
        if self._error is not None:
            raise self._error
        assert metadata.last_entry == self._writer.last_add_confirmed
        self.closed = True


def bookies_of(made: Mapping[str, Any]) -> dict[str, KnownBookie]:
    """Those that CreateStagedLedger answered."""
    addresses = made["bookies"] | {row[0]: row[1] for row in made["writable"]}
    return known_bookies(addresses, made["identities"])


def places_of(made: Mapping[str, Any]) -> tuple[StaticBookies, str]:
    """The same with their racks and zones, and how to spread what replaces one."""
    directory = directory_of(bookies_of(made))
    labels = {bookie: Labels(*found) for bookie, _, *found in made["writable"]}
    for bookie, found in labels.items():
        directory.answered(bookie, BookieFacts(found))
    if any(one.zone for one in labels.values()):
        return directory, "zone"
    return directory, "rack" if any(one.rack for one in labels.values()) else "random"


@contextlib.asynccontextmanager
async def staged_ledger(
    client: Client, topic: str, transaction: str, timeout_s: float, ttl_s: float
) -> AsyncIterator[StagedLedger]:
    """A new staged ledger. What the body did not close is discarded; what dies before that is left to the sweep."""
    try:
        made = await ask(
            client.admin, CreateStagedLedger(0, topic, transaction, round(ttl_s * 1000)), topic=topic
        )
    except TopicNotFound as error:
        raise TopicNotFound(
            f"option topic: {error.message}; create it first, or set the broker's auto_create_topics",
            **error.details,
        ) from error
    directory, placement = places_of(made)
    settings = LedgerSettings(add_timeout_s=timeout_s, metadata_timeout_s=timeout_s, placement=placement)
    async with bookie_transport(directory, bookies_of(made), settings) as transport:
        ledgers = LedgerClient(
            cast("LedgerManager", BrokerLedgers(client, topic)),
            transport,
            directory,
            settings,
            random.Random(),
            SystemClock(),
        )
        metadata = LedgerMetadata.decode(made["metadata"], made["ledger"])
        staged = StagedLedger(
            ledgers.adopt(made["ledger"], metadata, made["version"]), made["max_message_bytes"]
        )
        try:
            async with keeping_staged(client, topic, transaction, ttl_s):
                yield staged
        finally:
            await ledgers.close()
            if not staged.closed:
                await discard_staged(client, topic, transaction, [made["ledger"]])


@contextlib.asynccontextmanager
async def keeping_staged(client: Client, topic: str, transaction: str, ttl_s: float) -> AsyncIterator[None]:
    """What is staged in the transaction, by whichever task, is renewed as long as the body runs."""
    keep = partial(_keep, client, topic, transaction, round(ttl_s * 1000))
    keeping = LongTask(f"the renewal of staged ledgers of {topic}", keep, retry_max_s=1.0)
    try:
        yield
    finally:
        await keeping.close()


async def _keep(client: Client, topic: str, transaction: str, ttl_ms: int) -> None:
    while True:
        kept = await ask(client.admin, KeepStaged(0, topic, transaction, ttl_ms), topic=topic)
        await asyncio.sleep(kept["ttl_ms"] / 1000 / RENEWALS_PER_TTL)


async def discard_staged(
    client: Client, topic: str, transaction: str, ledgers: Sequence[int] | None = None
) -> None:
    """Tidies up, all of the transaction or these ledgers; not at any price, for the sweep would do it too."""
    payload = b"" if ledgers is None else msgpack.packb(ledgers)
    try:
        async with asyncio.timeout(DISCARD_TIMEOUT_S):
            await ask(client.admin, DiscardStaged(0, topic, transaction), topic=topic, payload=payload)
    except (MagnetarError, TimeoutError) as error:
        _log.warning("staged ledgers of %s are left to the sweep: %s", topic, error)
