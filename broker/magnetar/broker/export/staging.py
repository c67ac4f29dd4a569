"""Ledgers that tasks of a job write to the bookies, and that are not part of the topic before they are attached.

    (none)  --create: id, node `staged/<id>`, ledger--> STAGED
    STAGED  --attach: one compare-and-set of the ledger list--> ATTACHED; the node goes afterwards
    STAGED  --discard, or nobody renewed its transaction: a compare-and-set that adds its id to `trimmed`, the ledgers that
              are still to be deleted--> DISCARDED; the ledger is deleted, and its node

The node is written before the ledger is made, so that no crash leaves a ledger that nobody finds; a node without a ledger
is swept like one with it. Both ways out of STAGED are changes of the ledger list, made while nothing else changes it. A
broker that lost the topic gets a version conflict before it deletes anything; if the outcome of an attachment is not known,
its ledgers cannot be discarded before the list was read again. What the list names is attached, whatever a node says.

A *transaction* is one write of a job, and has nothing to do with transactions of producers. When it was renewed last is
known in memory only: after the topic is loaded every transaction has its full time again, which stands in its nodes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from magnetar.ledger import LedgerMetadata, LedgerState
from magnetar.metadata.ledgers import ledger_path
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import (
    DataDirectoryError,
    FinalError,
    InvalidArgument,
    LedgerClosed,
    LedgerNotFound,
    MagnetarError,
    NotFoundInStore,
    TooManyRequests,
    TopicBusy,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.tasks import TaskSet

from ..log.ledger_list import check_not_terminated
from ..log.managed_ledger import ManagedLedger
from ..log.records import StagedRecord, replace, staged_ledger_path, staged_path
from ..topics.components import Components
from .ledgers import BookieRow, WritableBookie, identities_of, name_bookies, writable_bookies
from .names import check_text

_log = logging.getLogger(__name__)


class StagedLedger(msgspec.Struct, frozen=True):
    """A ledger that a transaction writes, with what its writer needs (WIRE.md)."""

    ledger: int
    version: int
    metadata: bytes
    bookies: dict[str, str]
    writable: list[WritableBookie]
    identities: dict[str, BookieRow]
    max_message_bytes: int


class StagedKept(msgspec.Struct, frozen=True):
    """How long a transaction's staged ledgers are kept, and how many there are."""

    ttl_ms: int
    ledgers: int


@dataclass(slots=True)
class Transaction:
    """The staged ledgers of one write of a job, which expire together."""

    expires_at: float  # loop time, seconds
    ttl_ms: int
    ledgers: dict[int, None] = field(default_factory=dict)


def _quorums(metadata: LedgerMetadata) -> tuple[int, int, int]:
    return metadata.ensemble_size, metadata.write_quorum, metadata.ack_quorum


class Staging:
    """The staged ledgers of one topic. `load` them before use, and `stop` in the end."""

    def __init__(
        self,
        name: TopicName,
        ledger: ManagedLedger[Any],
        components: Components,
        now: Callable[[], float],
    ) -> None:
        """`now`: loop time in seconds."""
        self._name = name
        self._ledger = ledger
        self._metadata = components.metadata
        self._components = components
        self._settings = components.settings
        self._now = now
        # Stored id -> transaction, of every staged ledger that is known here.
        self._ledgers: dict[int, str] = {}
        self._transactions: dict[str, Transaction] = {}
        self._creating = TaskSet("create a staged ledger")  # each task has the name of its transaction
        self._clearing = TaskSet("delete nodes of staged ledgers")  # those that mean nothing any more
        self._stopped: MagnetarError | None = None

    def __len__(self) -> int:
        return len(self._ledgers)

    def __contains__(self, stored_id: int) -> bool:
        return stored_id in self._ledgers

    # --- what there is -----------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Registers the staged ledgers of the metadata store that are not known yet: when the topic is loaded, and later."""
        for stored_id in await self._staged():
            await self._adopt(stored_id)

    async def _staged(self) -> list[int]:
        """As the metadata store has them; what is not named as a ledger is left out."""
        names = await self._metadata.children(staged_path(self._name))
        return [int(name) for name in names if name.isdecimal()]

    async def _adopt(self, stored_id: int) -> bool:
        """Registers a staged ledger by its node; False if there is none, or the ledger is attached.

        A damaged node gets a transaction of its own, which nobody renews.
        """
        path = staged_ledger_path(self._name, stored_id)
        node = await self._metadata.get(path)
        if node is None or stored_id in self._ledgers:
            return stored_id in self._ledgers
        if self._ledger.list.stored(stored_id) is not None:
            self.unregister([stored_id])
            return False
        try:
            record = StagedRecord.decode(node.value, path)
        except DataDirectoryError as error:
            _log.warning("topic %s: staged ledger %d will be deleted: %s", self._name, stored_id, error)
            record = StagedRecord(f"damaged-{stored_id}", 0, 0)
        self._register(stored_id, record.transaction, max(record.ttl_ms, 0))
        return True

    def _register(self, stored_id: int, transaction: str, ttl_ms: int) -> None:
        self._ledgers[stored_id] = transaction
        known = self._transactions.setdefault(transaction, Transaction(0.0, 0))
        known.ledgers[stored_id] = None
        known.ttl_ms = max(known.ttl_ms, self._granted(ttl_ms))
        self._heard_of(transaction)

    def _granted(self, ttl_ms: int) -> int:
        """For how long a transaction is kept that asks for so much; 0: for no time of its own."""
        if ttl_ms < 0:
            raise InvalidArgument(f"staged ledgers cannot be kept for {ttl_ms} ms")
        return min(ttl_ms or self._settings.staged_ttl_ms, self._settings.max_staged_ttl_ms)

    def _forget(self, stored_id: int) -> None:
        name = self._ledgers.pop(stored_id, None)
        if name is not None:
            known = self._transactions[name]
            known.ledgers.pop(stored_id, None)
            if not known.ledgers:
                del self._transactions[name]

    async def require(self, stored_id: int) -> None:
        """Renews the transaction of a ledger that is staged here. Raises InvalidArgument if it is not."""
        if stored_id not in self._ledgers and not (0 <= stored_id < 1 << 63 and await self._adopt(stored_id)):
            raise InvalidArgument(
                f"ledger {stored_id} is not staged for topic {self._name}: it was attached or discarded, or its transaction "
                f"was not renewed in time: within staged_ttl_ms={self._settings.staged_ttl_ms}, or what its writer set "
                "(Spark's option staged_ttl_s); write it again into a new one"
            )
        self._heard_of(self._ledgers[stored_id])

    def _heard_of(self, transaction: str) -> None:
        known = self._transactions.get(transaction)
        if known is not None:
            known.expires_at = max(known.expires_at, self._now() + known.ttl_ms / 1000)

    # --- making and writing ------------------------------------------------------------------------------------------

    async def create(self, transaction: str, ttl_ms: int) -> StagedLedger:
        """A new staged ledger. Raises TooManyRequests, NotEnoughBookies, TopicTerminated."""
        check_text("transaction", transaction)
        self._granted(ttl_ms)
        self._check_served()
        check_not_terminated(self._ledger.list)
        if len(self._ledgers) + len(self._creating) >= self._settings.max_staged_ledgers:
            raise TooManyRequests(
                f"topic {self._name} has {len(self._ledgers)} staged ledgers; attach or discard some, or raise the broker's "
                "max_staged_ledgers"
            )
        self._heard_of(transaction)
        # Not to be left half done when the caller's connection breaks.
        creating = self._create(transaction, min(ttl_ms, self._settings.max_staged_ttl_ms))
        return await self._creating.run(creating, transaction)

    async def _create(self, transaction: str, ttl_ms: int) -> StagedLedger:
        components = self._components
        durability = self._ledger.durability()
        stored_id = await components.ledgers.next_id()
        # From here on it is found: if one of the next steps fails, or its outcome is not known, it is swept.
        self._register(stored_id, transaction, ttl_ms)
        record = StagedRecord(transaction, components.clock.now_ms(), ttl_ms)
        await self._metadata.create(staged_ledger_path(self._name, stored_id), record.encode())
        writer = await components.ledgers.create(
            **durability.of_ledger(),
            properties={"kind": "topic", "topic": str(self._name)},
            ledger_id=stored_id,
        )
        writer.detach()
        return await self._describe(stored_id)

    async def get(self, stored_id: int) -> StagedLedger:
        """Describes a staged ledger, or one of the topic. Raises InvalidArgument, LedgerNotFound."""
        if self._ledger.list.stored(stored_id) is None:
            await self.require(stored_id)
        return await self._describe(stored_id)

    async def _stored(self, stored_id: int) -> Versioned:
        found = await self._metadata.get(ledger_path(stored_id))
        if found is None:
            raise LedgerNotFound(f"ledger {stored_id} does not exist", ledger_id=stored_id)
        return found

    async def _describe(self, stored_id: int) -> StagedLedger:
        found = await self._stored(stored_id)
        bookies = self._components.bookies
        named: dict[str, str] = {}
        name_bookies(named, bookies, found.value)
        writable = writable_bookies(bookies)
        identities = identities_of(dict.fromkeys([*named, *(one.bookie for one in writable)]), bookies)
        return StagedLedger(
            stored_id,
            found.version,
            found.value,
            named,
            writable,
            identities,
            self._settings.max_message_bytes,
        )

    async def put(self, stored_id: int, version: int, value: bytes) -> int:
        """Compare-and-set of a staged ledger's metadata by its writer; the new version.

        Raises LedgerClosed if what is stored is final, InvalidArgument for what cannot follow it, LedgerNotFound, and
        VersionConflict, unless `value` is stored already: then an answer was lost.
        """
        await self.require(stored_id)
        try:
            wanted = LedgerMetadata.decode(value, stored_id)
        except FinalError as error:
            raise InvalidArgument(
                f"what is to be written is not metadata of ledger {stored_id}: {error}"
            ) from None
        found = await self._stored(stored_id)
        if found.version != version:
            if found.value == value:
                return found.version
            raise VersionConflict(
                f"the metadata of ledger {stored_id} has version {found.version}, not {version}"
            )
        current = LedgerMetadata.decode(found.value, stored_id)
        if current.state is LedgerState.CLOSED:
            raise LedgerClosed(f"ledger {stored_id} is closed; its metadata is final")
        if wanted.state < current.state or _quorums(wanted) != _quorums(current):
            raise InvalidArgument(
                f"the metadata of ledger {stored_id} cannot go back, nor change its quorums"
            )
        return await replace(self._metadata, ledger_path(stored_id), value, version)

    # --- keeping and discarding --------------------------------------------------------------------------------------

    def keep(self, transaction: str, ttl_ms: int) -> StagedKept:
        """Renews the transaction."""
        check_text("transaction", transaction)
        granted = self._granted(ttl_ms)
        known = self._transactions.get(transaction)
        if known is not None:
            known.ttl_ms = granted
            known.expires_at = self._now() + granted / 1000
        return StagedKept(granted, 0 if known is None else len(known.ledgers))

    async def discard(self, transaction: str, stored_ids: list[int] | None) -> int:
        """Deletes staged ledgers of a transaction, None: all; returns how many. What is attached stays."""
        check_text("transaction", transaction)
        self._check_served()
        creating = [task for task in self._creating if task.get_name() == transaction]
        if creating:
            await asyncio.wait(creating)
        if stored_ids is None:
            known = self._transactions.get(transaction)
            stored_ids = [] if known is None else list(known.ledgers)
        return await self.drop(
            stored_id for stored_id in stored_ids if self._ledgers.get(stored_id) == transaction
        )

    async def drop(self, stored_ids: Iterable[int]) -> int:
        """Discards those of these ledgers that are still staged; how many. The decision is durable when it returns."""
        wanted = [stored_id for stored_id in dict.fromkeys(stored_ids) if stored_id in self._ledgers]
        if not wanted:
            return 0

        async def work() -> int:
            staged = [stored_id for stored_id in wanted if stored_id in self._ledgers]
            ledgers = self._ledger.list
            discarded = [stored_id for stored_id in staged if ledgers.stored(stored_id) is None]
            if discarded:
                await ledgers.commit(delete=discarded)
            self.unregister(staged)
            return len(discarded)

        return await self._ledger.changes.edit(work)

    async def drop_or_leave(self, stored_ids: Iterable[int]) -> None:
        """As `drop`, for ledgers whose messages were published otherwise: a failure is logged, and left to the sweep."""
        try:
            await self.drop(stored_ids)
        except MagnetarError as error:
            _log.warning("topic %s: staged ledgers are left to the sweep: %s", self._name, error)

    def unregister(self, stored_ids: Iterable[int]) -> None:
        """Forgets ledgers that the list has attached or discarded, and deletes their nodes in the background."""
        unstaged = list(stored_ids)
        for stored_id in unstaged:
            self._forget(stored_id)
        if unstaged:
            self._clearing.begin(self._delete_nodes(unstaged))

    async def _delete_nodes(self, stored_ids: list[int]) -> None:
        """What fails is found at the next load."""
        for stored_id in stored_ids:
            try:
                await self._metadata.delete(staged_ledger_path(self._name, stored_id))
            except NotFoundInStore:
                continue
            except MagnetarError as error:
                _log.warning("topic %s: the node of ledger %d stays: %s", self._name, stored_id, error)

    async def sweep(self) -> int:
        """The regular round: transactions that nobody renewed go; returns how many ledgers."""
        if self._stopped is not None:
            return 0
        now = self._now()
        busy = {task.get_name() for task in self._creating}  # what is not made yet cannot be deleted
        expired = [
            known
            for name, known in self._transactions.items()
            if known.expires_at <= now and name not in busy
        ]
        try:
            discarded = await self.drop(stored_id for known in expired for stored_id in known.ledgers)
        except MagnetarError as error:
            _log.warning("topic %s: staged ledgers are not swept yet: %s", self._name, error)
            return 0
        if discarded:
            _log.info(
                "topic %s: %d staged ledgers whose transaction nobody renewed are deleted",
                self._name,
                discarded,
            )
        return discarded

    # --- ending ------------------------------------------------------------------------------------------------------

    def _check_served(self) -> None:
        if self._stopped is not None:
            raise self._stopped

    async def stop(self, error: MagnetarError) -> None:
        """Refuses what comes with `error`, and waits for what has begun. What is staged stays, for the next owner."""
        self._stopped = error
        await self._creating.wait()
        await self._clearing.wait()

    async def delete_all(self) -> None:
        """The topic is being deleted, durably: so is everything staged. May be repeated. Raises TopicBusy."""
        for stored_id in await self._staged():
            try:
                await self._components.ledgers.delete(stored_id)
            except LedgerNotFound:
                pass
            except MagnetarError as error:
                raise TopicBusy(
                    f"topic {self._name}: staged ledger {stored_id} could not be deleted; delete it again: {error}"
                ) from error
            await self._metadata.delete(staged_ledger_path(self._name, stored_id))
        self._ledgers.clear()
        self._transactions.clear()
