"""LedgerClient: create, open, recover and delete ledgers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from magnetar.metadata.ledgers import LedgerManager
from magnetar.proto.errors import AlreadyClosed, ConnectionLost, RequestTimeout
from magnetar.runtime.clock import Clock
from magnetar.runtime.tasks import begin

from .components import LedgerComponents
from .core.degrade import DEGRADED_PROPERTY, describe
from .core.metadata import LedgerMetadata
from .core.quorum import Striping
from .deletions import Deletions
from .directory import BookieDirectory
from .health import BookieHealth
from .placement.chooser import BOOKIE_GROUP_PROPERTY, BookieChooser
from .placement.policy import Placement
from .reader import LedgerReader
from .records import LedgerRecords
from .recover import recover as recover_ledger
from .recovery_survey import EndSurvey, survey_end
from .settings import LedgerSettings
from .transport import BookieTransport
from .writer import LedgerWriter


class LedgerClient:
    """Ledgers over their records in metadata and bookies. It owns neither; `close` ends only what it started itself."""

    def __init__(
        self,
        ledgers: LedgerManager,
        transport: BookieTransport,
        bookies: BookieDirectory,
        settings: LedgerSettings,
        rng: random.Random,
        clock: Clock,
        *,
        remember_deletions: bool = False,
    ) -> None:
        """`remember_deletions`: for bookies without metadata, which do not find out by themselves what was deleted."""
        self.health = BookieHealth(settings, bookies)
        chooser = BookieChooser(
            bookies,
            Placement.of(settings),
            self.health,
            rng,
            transport.reset_backoff,
        )
        self._clock = clock
        self._records = records = LedgerRecords(ledgers, settings.metadata_timeout_s)
        self._components = LedgerComponents(records, transport, bookies, chooser, self.health, settings)
        self._writers: dict[LedgerWriter, None] = {}
        self._recoveries: dict[int, asyncio.Task[LedgerMetadata]] = {}
        self._deletions = Deletions(
            records, transport, bookies, settings.deletion_retry_s, remember=remember_deletions
        )
        self._closed = False

    async def create(
        self,
        *,
        ensemble_size: int | None = None,
        write_quorum: int | None = None,
        ack_quorum: int | None = None,
        properties: Mapping[str, str] | None = None,
        ledger_id: int | None = None,
        deferred_sync: bool = False,
        accepted: Callable[[int], None] | None = None,
        explicit_lac: bool = True,
        minimum_write_quorum: int | None = None,
        bookie_group: str = "",
    ) -> LedgerWriter:
        """A new ledger, open for this writer; what is not given comes from the settings.

        `ledger_id`: from `next_id`, for an owner who writes it down first and so finds the ledger after a crash.
        `deferred_sync`: appends are answered before they are durable, which `LedgerWriter.force` makes them.
        `accepted`: deferred sync for an owner who keeps entries until they are durable. It gets the last entry that can be
        answered, and the callbacks of `append` come when the entry is durable, or failed.
        `explicit_lac`: an idle writer writes its last-add-confirmed to the bookies, so that readers elsewhere learn of the
        last entry (rule 19). Without it they learn of an entry with the next one, or when the ledger is closed; recovery
        finds all entries in either case. An owner whose ledgers nobody else follows saves E journaled requests at a pause.

        `bookie_group`: only, or first of all, on these bookies, replacements included (`proto.policies.PlacementGroup`).

        InvalidSetting unless Qa <= Qw <= E; NotEnoughBookies if fewer than E are writable, or placement finds none that
        fit. With `minimum_write_quorum` (0: without) a smaller ledger is made then, which says so (`LedgerWriter.degraded`).
        """
        self._check_open()
        c = self._components
        striping = Striping(
            c.settings.ensemble_size if ensemble_size is None else ensemble_size,
            c.settings.write_quorum if write_quorum is None else write_quorum,
            c.settings.ack_quorum if ack_quorum is None else ack_quorum,
        )
        minimum = c.settings.minimum_write_quorum if minimum_write_quorum is None else minimum_write_quorum
        all_properties = dict(properties or {})
        if bookie_group:
            all_properties[BOOKIE_GROUP_PROPERTY] = bookie_group
        chosen = c.chooser.of(all_properties).ensemble(striping, minimum)
        if chosen.degraded:
            all_properties[DEGRADED_PROPERTY] = describe(striping)
        metadata = LedgerMetadata.create(
            chosen.striping, chosen.bookies, self._clock.now_ms(), all_properties
        )
        drawn = await self._records.next_id() if ledger_id is None else ledger_id
        try:
            version = await self._records.create(drawn, metadata)
        except (ConnectionLost, RequestTimeout):
            if ledger_id is None:
                self._deletions.delete_later(drawn)  # nobody else knows of it
            raise
        self._check_open()
        writer = LedgerWriter(
            c,
            drawn,
            metadata,
            version,
            self._forget,
            explicit_lac=explicit_lac,
            deferred_sync=deferred_sync,
            accepted=accepted,
        )
        self._writers[writer] = None
        return writer

    def adopt(self, ledger_id: int, metadata: LedgerMetadata, version: int) -> LedgerWriter:
        """The writer of a ledger that was created elsewhere for this client, and not written to yet."""
        self._check_open()
        writer = LedgerWriter(self._components, ledger_id, metadata, version, self._forget)
        self._writers[writer] = None
        return writer

    async def next_id(self, count: int = 1) -> int:
        """An id from the sequence of all ledgers, which no ledger will have unless it is given to `create`.

        The first of `count` in a row, which one write draws.
        """
        self._check_open()
        return await self._records.next_id(count)

    async def open(self, ledger_id: int, *, recover: bool) -> LedgerReader:
        """The ledger for reading. LedgerNotFound.

        With `recover` a ledger that is not closed is fenced, recovered and closed first: its writer, if it lives, will
        get LedgerFenced. QuorumLost and NotEnoughBookies change nothing and can be tried again. Without it an open
        ledger can be read up to what was confirmed when `read_last_confirmed` was called last (here: now).
        """
        self._check_open()
        found = await self._records.read(ledger_id)
        if recover and not found.metadata.closed:
            metadata = await self._recover(ledger_id)
            return LedgerReader(self._components, ledger_id, metadata)
        reader = LedgerReader(self._components, ledger_id, found.metadata)
        if not reader.closed:
            await reader.read_last_confirmed()
        return reader

    async def survey_end(self, ledger_id: int) -> EndSurvey:
        """What each bookie knows of the end of a ledger, which it fences there; changes no record. LedgerNotFound."""
        self._check_open()
        found = await self._records.read(ledger_id)
        return await survey_end(self._components.transport, ledger_id, found.metadata)

    async def accept_loss(self, ledger_id: int, last_entry: int) -> LedgerMetadata:
        """Recovers and closes a ledger whose end cannot be proved at an end that an operator accepts, as surveyed.

        What can be proved is proved: then the ledger ends there. InvalidArgument when a bookie that answers proves an entry
        behind `last_entry`; NotEnoughBookies. LedgerNotFound.
        """
        self._check_open()
        found = await self._records.read(ledger_id)
        return await recover_ledger(self._components, ledger_id, found, last_entry)

    def reader(self, ledger_id: int, metadata: LedgerMetadata) -> LedgerReader:
        """The ledger for reading, by metadata that the caller has; neither store nor bookies are asked."""
        self._check_open()
        return LedgerReader(self._components, ledger_id, metadata)

    async def delete(self, ledger_id: int) -> None:
        """Deletes the ledger's metadata, then sends the deletion to its bookies without waiting. LedgerNotFound.

        A bookie that does not get it drops the entries when it next compares its ledgers with the metadata, or, with
        `remember_deletions`, when it is back (see `send_missed_deletions`).
        """
        self._check_open()
        await self._deletions.delete(ledger_id)
        for writer in [writer for writer in self._writers if writer.ledger_id == ledger_id]:
            writer.ledger_deleted()

    def send_missed_deletions(self) -> None:
        """From now on bookies get the deletions that they have missed, also those of earlier processes."""
        self._check_open()
        self._deletions.start()

    @property
    def components(self) -> LedgerComponents:
        """What self-repair shares with the client's writers and readers."""
        return self._components

    def check_placement(self, striping: Striping, minimum_write_quorum: int, bookie_group: str) -> None:
        """NotEnoughBookies, unless `create` could make such a ledger once all bookies that are known take entries."""
        self._components.chooser.of({BOOKIE_GROUP_PROPERTY: bookie_group}).check(
            striping, minimum_write_quorum
        )

    def suspects(self) -> tuple[str, ...]:
        """Bookies that failed a moment ago."""
        return self.health.suspects()

    def figures(self) -> dict[str, int]:
        """What placement and quarantine did, for /metrics."""
        return {**self._components.chooser.figures(), **self.health.figures()}

    async def close(self) -> None:
        """Detaches all writers, leaving their ledgers open (the next owner recovers them), and stops recoveries."""
        self._closed = True
        writers = list(self._writers)
        for writer in writers:
            writer.detach()
        recoveries = list(self._recoveries.values())
        for task in recoveries:
            task.cancel()
        await asyncio.gather(
            *recoveries,
            self._deletions.close(),
            *(writer.ended() for writer in writers),
            return_exceptions=True,
        )

    async def _recover(self, ledger_id: int) -> LedgerMetadata:
        """Recoveries of one ledger share one task, which continues when one of its callers is cancelled."""
        self._check_open()  # again: `close` may have come while the metadata was read
        task = self._recoveries.get(ledger_id)
        if task is None:
            task = self._recoveries[ledger_id] = begin(
                self._recover_once(ledger_id),
                f"recovery of ledger {ledger_id}",
                lambda done: self._recovered(ledger_id, done),
            )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if task.cancelled() and not (me and me.cancelling()):
                self._check_open()  # `close` cancelled the recovery; the caller itself was not cancelled
            raise

    async def _recover_once(self, ledger_id: int) -> LedgerMetadata:
        found = await self._records.read(ledger_id)
        return await recover_ledger(self._components, ledger_id, found)

    def _recovered(self, ledger_id: int, task: asyncio.Task[LedgerMetadata]) -> None:
        del self._recoveries[ledger_id]
        if not task.cancelled():
            task.exception()  # looked at, in case all who waited were cancelled

    def _forget(self, writer: LedgerWriter) -> None:
        self._writers.pop(writer, None)

    def _check_open(self) -> None:
        if self._closed:
            raise AlreadyClosed("the ledger client is closed")
