"""The storage engine: one bookie, what a start and a stop do, and what happens when something fails.

    add (adds) -> write cache -> journal device -> durable -> done
                      |
                      +--> checkpoint: entry logs, index, mark --> journal files are recycled

    read (reads): write cache -> read cache -> index -> entry log with read-ahead

Fail-stop (rule 4): a failed write or sync ends all acknowledgements at once and calls `on_failure`; the daemon exits, and
the next start recovers from what is durable. A full disk does not: the bookie turns read-only and comes back (rule 12).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from magnetar.proto.bookie_identity import BookieIdentity
from magnetar.proto.errors import (
    BookieReadOnly,
    DiskFull,
    MagnetarError,
    ServiceNotReady,
    StorageFailed,
    error_from_wire,
)
from magnetar.proto.ids import check_ids
from magnetar.proto.stripe import EVERY_ENTRY, Stripe
from magnetar.runtime.files import FileLock
from magnetar.runtime.tasks import TaskSet

from .adds import Adds
from .checkpoint import Checkpointer
from .components import BookieComponents
from .cookie import Cookie
from .disk_space import DiskSpace, clear_read_only, set_read_only
from .entry_log.entry_logs import EntryLogs
from .fencing import Fencing
from .gc.assignments import Leftovers, UnknownLedgers
from .gc.collector import Collector
from .gc.compactor import Compactor
from .gc.survey import Survey
from .index import LocationIndex
from .introduction import Introductions
from .journal import Journals
from .layout import DataLayout
from .ledgers import LedgerDescriptors, Waiters
from .listing import Listing, StoredLedger
from .mark import Mark
from .metrics import LoadMeter
from .read_cache import ReadCache
from .reads import LongPollResult, Reads
from .scrub import Damage
from .scrub.scrubber import Scrubber
from .settings import BookieSettings
from .write_cache import WriteCache

_log = logging.getLogger(__name__)
_RETRY_FLUSH_S = 1.0
# A journal that has made nothing durable for so long although it should makes no progress.
_PROGRESS_S = 0.5
# For each helper that a disk may hold fast.
_LET_GO_S = 5.0


class Bookie:
    """One bookie over one data directory. Made by `startup.open_bookie`; all calls from one event loop."""

    def __init__(
        self,
        settings: BookieSettings,
        components: BookieComponents,
        layout: DataLayout,
        cookie: Cookie,
        lock: FileLock,
        index: LocationIndex,
        mark: Mark,
        journals: Journals,
    ) -> None:
        """For `startup.open_bookie`."""
        # Fail-stop: called once; the daemon must exit.
        self.on_failure: Callable[[MagnetarError], None] = _log_failure
        self.settings = settings
        self.layout = layout
        self.components = components
        self.failure: MagnetarError | None = None
        self.replayed_records = 0
        self.lock = lock
        self.index = index
        self.cache = WriteCache(settings.write_cache_bytes)
        self.read_cache = ReadCache(settings.read_cache_bytes)
        self.waiters = Waiters(settings.max_long_polls)
        self.ledgers = LedgerDescriptors(index, self.waiters, cookie.next_ledger_id)
        worker = components.disk_worker
        self.logs = EntryLogs(components.files, worker, layout, settings.entry_log_bytes)
        self.introductions = Introductions(components.files, worker, layout, cookie, self.ledgers)
        self.damage = Damage(components.repair_queue)
        self.journals = journals
        self.checkpointer = Checkpointer(
            self.cache,
            self.logs,
            index,
            worker,
            layout,
            mark,
            self.ledgers,
            settings.disk_recovery_bytes // 2,
        )
        self._flush_wanted = asyncio.Event()
        self._tasks = TaskSet("bookie")
        self._closing = False
        self._make_request_paths()
        self._make_maintenance()
        self.load = LoadMeter(self._load)

    def _load(self) -> tuple[int, int, int, int]:
        cache, reads = self.cache, self.reads
        return cache.entries_added, cache.bytes_added, reads.entries_read, reads.bytes_read

    def _make_request_paths(self) -> None:
        settings, ledgers, cache, read_cache = self.settings, self.ledgers, self.cache, self.read_cache
        index, journals = self.index, self.journals
        self.adds = Adds(settings, ledgers, journals, cache, read_cache, self._flush_wanted.set, self.fail)
        # Bound here, so that an add costs one call less (see `Adds.add`).
        self.add = self.adds.add
        # Called when `accepting` becomes true again.
        self.on_accepting = self.adds.on_accepting
        self.fencing = Fencing(ledgers, journals, cache, read_cache, self.damage, self.components.clock)
        self.reads = Reads(settings, ledgers, cache, read_cache, index, self.logs, self.damage, self.waiters)
        self.listing = Listing(ledgers, index, cache)

    def _make_maintenance(self) -> None:
        components, settings, logs, ledgers = self.components, self.settings, self.logs, self.ledgers
        files, worker, clock = components.files, components.disk_worker, components.clock
        index = self.index
        checkpointer, damage, assignments = self.checkpointer, self.damage, components.assignments
        leftovers = unknown = None
        if assignments is not None:
            leftovers = Leftovers(logs, index, assignments)
            unknown = UnknownLedgers(ledgers, index, damage, assignments, self.fencing, self.checkpoint)
        survey = Survey(
            logs,
            index,
            ledgers,
            checkpointer,
            self.fencing,
            clock,
            bytes_per_s=settings.compaction_bytes_per_s,
            tombstone_retention_s=settings.tombstone_retention_s,
        )
        self.collector = Collector(
            settings,
            logs,
            ledgers,
            checkpointer,
            self.fencing,
            survey,
            Compactor(files, worker, self.layout, logs, index, damage, settings.compaction_bytes_per_s),
            self.fail,
            components.existing_ledgers,
            leftovers,
            unknown,
        )
        self.scrubber = Scrubber(
            settings,
            files,
            worker,
            self.layout,
            logs,
            index,
            ledgers,
            self.cache,
            checkpointer,
            damage,
            clock,
            assignments,
            lambda: not self.accepting or checkpointer.flushing,
        )
        survey.measured_live_bytes = self.scrubber.exact_live_bytes
        self.disk_space = DiskSpace(files, self.layout, settings, logs, self.collector.note_space)

    def start_tasks(self) -> None:
        """Begins the checkpoints and watches the disk. For `startup`."""
        self.journals.on_failure(self.fail)
        self.journals.on_space(self._check_disk)
        self.components.disk_worker.on_failure = self.fail
        self._check_disk()
        if self.checkpointer.stopped_by_full_disk:
            self._flush_wanted.set()
        self._tasks.begin(self._checkpoint_forever(), "bookie checkpoints", self._task_ended)
        self._tasks.begin(self._watch_disk(), "bookie disk watch", self._task_ended)
        self._tasks.begin(self.collector.run(), "bookie garbage collection", self._task_ended)
        if self.settings.scrub_interval_s and self.settings.scrub_bytes_per_s:
            self._tasks.begin(self.scrubber.run(), "bookie scrub", self._task_ended)

    # --- the requests ------------------------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """False while adds wait for room: a server should stop reading until `on_accepting`."""
        return self.adds.accepting

    @property
    def waits_for_room(self) -> bool:
        """Adds wait for room, and what is on its way to a disk gets there: the bookie is slow, not hung (rule 21)."""
        return not self.adds.accepting and self.journals.stalled()[0] < _PROGRESS_S

    async def read(
        self,
        ledger_id: int,
        first: int,
        last: int,
        *,
        max_bytes: int = 0,
        fence: bool = False,
        stripe: Stripe = EVERY_ENTRY,
    ) -> tuple[list[bytes], int]:
        """Entries from `first` on without a hole, up to `last` and about `max_bytes` (0: 4 MB), and the highest LAC known.

        Of a `stripe` its entries, again without a hole among them. At least `first`, or EntryNotFound, or EntryDamaged.
        `fence` fences first, durably.
        """
        check_ids(ledger_id, first, last)
        if first > last or stripe is not EVERY_ENTRY:
            stripe.check(first, last)
        if fence:
            await self.fence(ledger_id)
        self.check_alive()
        return await self.reads.read(ledger_id, first, last, max_bytes, stripe)

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool = False) -> tuple[int, int]:
        """(highest last add confirmed, last entry) known here. LedgerNotFound if never written nor fenced here."""
        check_ids(ledger_id)
        if fence:
            await self.fence(ledger_id)
        self.check_alive()
        return await self.reads.last_confirmed(ledger_id)

    async def wait_last_confirmed(
        self, ledger_id: int, last_add_confirmed: int, *, timeout_s: float = 0.0
    ) -> LongPollResult:
        """Long poll: returns once the last add confirmed is above the given one, the ledger is fenced, or time is over.

        At most `long_poll_timeout_s` (0: that). LedgerNotFound if deleted, TooManyRequests.
        """
        check_ids(ledger_id, last=last_add_confirmed)
        self.check_alive()
        news = await self.reads.wait_last_confirmed(ledger_id, last_add_confirmed, timeout_s)
        self.check_alive()
        return news

    def list_ledgers(self, after: int = -1, count: int = 1000) -> tuple[list[StoredLedger], bool]:
        """The next ledgers above `after`, at most `count`, and whether there are more."""
        check_ids(after + 1)
        self.check_alive()
        return self.listing.ledgers(after, count)

    async def list_entries(
        self, ledger_id: int, first: int = 0, count: int = 1000
    ) -> tuple[list[tuple[int, int]], int]:
        """At most `count` ranges of entries from `first` on, and where to go on (-1: that was all). LedgerNotFound."""
        check_ids(ledger_id, first)
        self.check_alive()
        return await self.listing.entries(ledger_id, first, count)

    async def fence(self, ledger_id: int) -> None:
        """From now on only recovery adds pass. Durable when it returns, for unknown ledgers as well (rule 6)."""
        check_ids(ledger_id)
        self.check_alive()
        await self.fencing.fence(ledger_id)
        self.check_alive()

    def request_force(self, ledger_id: int) -> None:
        """Deferred adds of the ledger that came before become durable now; their own callbacks say when, and whether."""
        if self.failure is None:
            self.adds.force(ledger_id)

    async def force(self, ledger_id: int) -> None:
        """The same, and waits until all that were accepted are durable. StorageFailed: it is not known whether they are."""
        check_ids(ledger_id)
        self.check_alive()
        self.adds.force(ledger_id)
        durable: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(_ledger_id: int, _number: int, code: int) -> None:
            if not durable.done():
                durable.set_result(code)

        self.journals.of(ledger_id).force(ledger_id, done)
        if code := await durable:
            raise error_from_wire(code, 0, f"the deferred adds of ledger {ledger_id} could not be synced")

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC of an idle writer. Durable when it returns; LedgerFenced if the ledger is fenced."""
        check_ids(ledger_id, last=last_add_confirmed)
        self.check_alive()
        await self.fencing.write_last_confirmed(ledger_id, last_add_confirmed)
        self.check_alive()

    async def delete_ledger(self, ledger_id: int) -> None:
        """Nothing of the ledger is served any more, and no add brings it back (rule 7). Durable when it returns.

        For ledgers that were never seen here as well. The space comes back with the next garbage collections.
        """
        check_ids(ledger_id)
        self.check_alive()
        await self.fencing.delete([ledger_id])
        self.check_alive()
        self.adds.admit_waiting()

    # --- state and maintenance ------------------------------------------------------------------------------------------

    @property
    def cookie(self) -> Cookie:
        """Whose data it is, and on which directories."""
        return self.introductions.cookie

    def introduce(self, expected: BookieIdentity | None) -> BookieIdentity:
        """Who this bookie is, for a ledger client that expects `expected`. WrongBookie: the peer means another one."""
        self.check_alive()
        return self.introductions.introduce(expected)

    def convert_to_read_only(self, reason: str | None) -> None:
        """Sets the operator's marker, which survives restarts, or takes it away (None): at once. Blocks for some ms."""
        self.check_alive()
        if reason is None:
            clear_read_only(self.components.files, self.layout)
        else:
            set_read_only(self.components.files, self.layout, reason)
        self._check_disk()

    async def checkpoint(self) -> None:
        """Flushes everything, moves the mark and releases journals. Durable when it returns.

        Raises DiskFull (tried again later, by itself). Any other failure stops the bookie: a second
        attempt could succeed without what the first one lost (rule 4).
        """
        if self.failure is not None:
            raise StorageFailed(f"this bookie has stopped: {self.failure}")
        try:
            moved = await self.checkpointer.run(self.journals.durable_positions)
        except DiskFull:
            self._flush_wanted.set()  # soon: until it succeeds the bookie is read-only
            raise
        except MagnetarError as error:
            self.fail(error)
            raise
        except Exception as error:  # our own bug, in the middle of a flush
            self.fail(StorageFailed(f"a flush ended: {error!r}"))
            raise
        if moved is not None:
            self.journals.release(moved)
        # Between two checks at most a write cache and its journal are written: far less than the minimum.
        self._check_disk()
        self.adds.admit_waiting()

    async def _checkpoint_forever(self) -> None:
        while True:
            # Not `wait_for`: in 3.11 it forgets a cancellation that comes with the event, and `close` waits forever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.checkpoint_interval_s):
                    await self._flush_wanted.wait()
            self._flush_wanted.clear()
            try:
                await self.checkpoint()
            except DiskFull as error:
                self._check_disk(full=True)
                _log.warning("the flush waits for disk space: %s", error)
                await asyncio.sleep(_RETRY_FLUSH_S)
                self._flush_wanted.set()
            except MagnetarError:
                return  # `checkpoint` has stopped the bookie

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Stops the bookie when a task ends by itself: it would be left without checkpoints, or without a disk watch."""
        if self._closing or self.failure is not None:
            return
        error = asyncio.CancelledError("cancelled") if task.cancelled() else task.exception()
        _log.critical("%s ended", task.get_name(), exc_info=error)
        self.fail(StorageFailed(f"{task.get_name()} ended: {error!r}"))

    async def _watch_disk(self) -> None:
        while True:
            for directory in self.layout.journals + self.layout.ledgers:
                self.components.disk_worker.probe(directory)
            await asyncio.sleep(self.settings.disk_check_interval_s)
            self._check_disk()
            self.load.sample()

    def _check_disk(self, *, full: bool = False) -> None:
        """Turns read-only and back (rule 12)."""
        try:
            no_space = full or self.checkpointer.stopped_by_full_disk or self.journals.no_space
            self.disk_space.check(asyncio.get_running_loop().time(), full=no_space)
        except MagnetarError as error:  # a disk that cannot be asked has failed
            self.fail(error)
        self._update_refusal()

    @property
    def read_only(self) -> bool:
        """Takes no adds; `disk_space.reason` says why."""
        return bool(self.disk_space.reason)

    def _update_refusal(self) -> None:
        if self.failure is not None:
            self.adds.refuse_all(StorageFailed.code)
        elif self._closing:
            self.adds.refuse_all(ServiceNotReady.code)
        else:
            self.adds.refuse_all(
                BookieReadOnly.code if self.read_only else 0, recoveries=not self.disk_space.takes_recoveries
            )

    def fail(self, error: MagnetarError) -> None:
        """Fail-stop: nothing is acknowledged any more."""
        if self.failure is None:
            self.failure = error
            self.damage.stop()
            self.journals.stop(error)
            self._update_refusal()
            self.waiters.fail_all(error)
            self.on_failure(error)

    def check_alive(self) -> None:
        """Raises StorageFailed after a fail-stop, ServiceNotReady while the bookie stops: nothing is answered then."""
        if self.failure is not None:
            raise StorageFailed(f"this bookie has stopped: {self.failure}")
        if self._closing:
            raise ServiceNotReady("this bookie is stopping")

    async def close(self) -> None:
        """Takes no more adds, makes durable what it has, writes a last checkpoint, and releases the directory.

        After a failure it only releases the directory. May be called twice.
        """
        if self._closing:
            return
        self._closing = True
        self.damage.stop()
        self._update_refusal()
        self.waiters.fail_all(ServiceNotReady("this bookie is stopping"))
        self._tasks.cancel()
        self.collector.stop()  # its task may not have begun
        try:
            async with asyncio.timeout(self.settings.close_timeout_s):
                await self._finish()
        except TimeoutError:
            _log.critical(
                "the disk of %s hangs: it was not flushed in close_timeout_s=%g s; the next start replays the journal",
                self.layout.root,
                self.settings.close_timeout_s,
            )
        finally:
            await self._let_go()

    async def _finish(self) -> None:
        await self._tasks.wait()
        await self.introductions.written()
        await self.journals.close()
        if self.failure is None:
            await self.scrubber.close()
            with contextlib.suppress(DiskFull):  # the journal keeps what the flush could not place
                await self.checkpointer.run(self.journals.durable_positions)
                await self.logs.close()

    async def _let_go(self) -> None:
        """Releases helpers, files and the directory.

        A helper that hangs in the disk holds the lock until it ends (rule 12b).
        """
        try:
            async with asyncio.timeout(_LET_GO_S):
                await self.checkpointer.close()
        except TimeoutError:
            _log.critical("a flush of %s does not end", self.layout.root)
        self.release()
        try:
            async with asyncio.timeout(_LET_GO_S):
                await self.components.disk_worker.close()
        except TimeoutError:
            _log.critical("the disk worker of %s does not end", self.layout.root)
        self.lock.release()

    def release(self) -> None:
        """Closes index and files without writing."""
        self.logs.abandon()
        self.index.close()


def _log_failure(error: MagnetarError) -> None:
    _log.critical("the bookie failed: %s", error)
