"""The storage engine: what an add, a read and a fence do, and what a start and a stop do.

Add, in one turn of the loop and so under the ledger's lock (rule 1): fence check -> write cache -> journal. The callback
comes when the journal's sync has passed the record, never from inside `add`.

    add -> write cache -> journal device -> durable -> done
                |
                +--> checkpoint: entry log, index, mark --> journal files are recycled

Read: write cache -> read cache -> index -> entry log with read-ahead. A bookie never says "no such entry" when it met
damage (rule 8).

Fail-stop (rule 4): a failed write or sync ends all acknowledgements at once and calls `on_failure`; the daemon exits, and
the next start recovers from what is durable. A full disk does not: the bookie turns read-only and comes back (rule 12).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from magnetar.proto.errors import (
    BookieReadOnly,
    DiskFull,
    EntryDamaged,
    EntryNotFound,
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    MessageTooLarge,
    ServiceNotReady,
    StorageFailed,
    TooManyRequests,
    error_from_wire,
)
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, LEDGER_ENTRY_HEADER_BYTES
from magnetar.runtime.files import FileLock

from .checkpoint import Checkpointer
from .components import BookieComponents
from .cookie import Cookie
from .disk_space import DiskSpace
from .entry_log import EntryLogs
from .index import LocationIndex
from .journal.journal import DurableCallback, Journal, JournalPosition
from .layout import DataLayout
from .ledgers import LedgerState, LedgerStates
from .read_cache import ReadCache
from .settings import BookieSettings
from .stored_entries import StoredEntries
from .write_cache import WriteCache

__all__ = ["Bookie"]

_log = logging.getLogger(__name__)
_DEFAULT_READ_BYTES = 4 << 20
# The sizes of what is read stand in a frame's header, which has at most 64 KB.
_MAX_READ_ENTRIES = 8192
_RETRY_FLUSH_S = 1.0

_FENCED = LedgerFenced.code
_READ_ONLY = BookieReadOnly.code
_TOO_MANY = TooManyRequests.code
_NOT_READY = ServiceNotReady.code


class Bookie:
    """One bookie over one data directory. Made by `open`; all calls from one event loop."""

    def __init__(
        self,
        settings: BookieSettings,
        components: BookieComponents,
        layout: DataLayout,
        cookie: Cookie,
        lock: FileLock,
        index: LocationIndex,
        mark: list[JournalPosition],
    ) -> None:
        """For `startup.open_bookie`."""
        # Fail-stop: called once; the daemon must exit.
        self.on_failure: Callable[[MagnetarError], None] = _log_failure
        # Called when `accepting` becomes true again.
        self.on_accepting: list[Callable[[], None]] = []
        self.settings = settings
        self.cookie = cookie
        self.layout = layout
        self.components = components
        self.read_only = False
        self.failure: MagnetarError | None = None
        self.replayed_records = 0
        self.lock = lock
        self._index = index
        self.cache = WriteCache(settings.write_cache_bytes)
        self.read_cache = ReadCache(settings.read_cache_bytes)
        self.ledgers = LedgerStates(index)
        worker = components.disk_worker
        self.logs = EntryLogs(components.files, worker, layout, settings.entry_log_bytes)
        self._disk_space = DiskSpace(components.files, layout.root, settings)
        self._stored = StoredEntries(self.cache, self.read_cache, index, self.logs, settings)
        self.journal: Journal = None  # type: ignore[assignment]  # set by startup before anything is served
        self.checkpointer = Checkpointer(
            self.cache,
            self.logs,
            index,
            worker,
            layout,
            mark,
            self.ledgers.take_dirty,
            self.ledgers.settle,
        )
        # Adds that wait for room in the write cache: (deadline, entry, recovery, done), in order of arrival.
        self._waiting: deque[tuple[float, bytes, bool, DurableCallback]] = deque()
        self._waiting_bytes = 0
        self._waiting_timer: asyncio.TimerHandle | None = None
        self._flush_wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        # Error code for every add while there is a reason to refuse them all, else 0.
        self._refusal = 0

    @classmethod
    async def open(cls, settings: BookieSettings, components: BookieComponents) -> Bookie:
        """Locks the directory, checks its cookie, replays the journals and serves.

        Raises DataDirectoryError (locked, missing parts, damaged, another version), DiskFull or StorageFailed.
        """
        from .startup import open_bookie

        return await open_bookie(settings, components)

    def start_tasks(self) -> None:
        """Begins the checkpoints and watches the disk. For `startup`."""
        loop = asyncio.get_running_loop()
        self.journal.on_failure = self.fail
        self.components.disk_worker.on_failure = self.fail
        self._look_at_disk()
        self._tasks = [
            loop.create_task(self._checkpoint_forever(), name="bookie checkpoints"),
            loop.create_task(self._watch_disk(), name="bookie disk watch"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    # --- adding ------------------------------------------------------------------------------------------------------

    @property
    def accepting(self) -> bool:
        """False while adds wait for room: a server should stop reading until `on_accepting`."""
        return not self._waiting

    def add(self, entry: bytes, *, recovery: bool, done: DurableCallback) -> None:
        """Stores a ledger entry (40-byte header and payload, digest already verified); keeps the bytes object.

        `done(ledger_id, entry_id, code)` is called once from the loop: code 0 when the entry is durable here, else
        LedgerFenced, BookieReadOnly, TooManyRequests, MessageTooLarge, ServiceNotReady or StorageFailed. Raises EntryDamaged
        for bytes that hold no header. Adding an entry again stores the newer bytes. About 2 us and the journal's copy.
        """
        if len(entry) < LEDGER_ENTRY_HEADER_BYTES:
            raise EntryDamaged(
                f"a ledger entry has at least {LEDGER_ENTRY_HEADER_BYTES} bytes, not {len(entry)}"
            )
        if len(entry) > self.settings.max_entry_bytes:
            self._refuse(entry, done, MessageTooLarge.code)
        elif self._waiting or not self._admit(entry, recovery, done):
            self._wait_for_room(entry, recovery, done)

    def _admit(self, entry: bytes, recovery: bool, done: DurableCallback) -> bool:
        """The add path. False if the write cache has no room."""
        ledger_id, entry_id, last_add_confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(entry)
        states = self.ledgers
        state = states.by_id.get(ledger_id)
        if state is None:
            try:
                state = states.load(ledger_id)
            except StorageFailed as error:  # nobody can tell whether the ledger is fenced
                self.fail(error)
                self._refuse(entry, done, StorageFailed.code)
                return True
        if state.fenced and not recovery:
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, _FENCED)
            return True
        if self._refusal:
            asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, self._refusal)
            return True
        cache = self.cache
        if not cache.has_room(len(entry)):
            self._flush_wanted.set()
            return False
        cache.put(ledger_id, entry_id, entry)
        states.note_entry(state, ledger_id, entry_id, last_add_confirmed)
        if recovery:
            self.read_cache.discard(ledger_id, entry_id)
        self.journal.add(entry, done, ledger_id, entry_id)
        if cache.half_full:
            self._flush_wanted.set()
        return True

    def _wait_for_room(self, entry: bytes, recovery: bool, done: DurableCallback) -> None:
        loop = asyncio.get_running_loop()
        limit = self.settings.write_cache_bytes // 4
        if self._waiting and self._waiting_bytes + len(entry) > limit:
            self._refuse(entry, done, _TOO_MANY)
            return
        deadline = loop.time() + self.settings.add_backpressure_timeout_s
        self._waiting.append((deadline, entry, recovery, done))
        self._waiting_bytes += len(entry)
        if self._waiting_timer is None:
            self._waiting_timer = loop.call_at(deadline, self._waited_too_long)

    def _refuse(self, entry: bytes, done: DurableCallback, code: int) -> None:
        ledger_id, entry_id, _, _ = LEDGER_ENTRY_FIELDS.unpack_from(entry)
        asyncio.get_running_loop().call_soon(done, ledger_id, entry_id, code)

    def _waited_too_long(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiting_timer = None
        # A timer may fire up to its resolution early.
        now = loop.time() + 0.002
        while self._waiting and self._waiting[0][0] <= now:
            _, entry, _, done = self._waiting.popleft()
            self._waiting_bytes -= len(entry)
            self._refuse(entry, done, _TOO_MANY)
        if self._waiting:
            self._waiting_timer = loop.call_at(self._waiting[0][0], self._waited_too_long)
        else:
            self._tell_accepting()

    def _admit_waiting(self) -> None:
        """Called whenever room may have appeared, or every add is refused from now on."""
        if not self._waiting:
            return
        while self._waiting:
            _, entry, recovery, done = self._waiting[0]
            if not self._admit(entry, recovery, done):
                return
            self._waiting.popleft()
            self._waiting_bytes -= len(entry)
        if self._waiting_timer is not None:
            self._waiting_timer.cancel()
            self._waiting_timer = None
        self._tell_accepting()

    def _tell_accepting(self) -> None:
        for callback in list(self.on_accepting):
            callback()

    # --- reading -----------------------------------------------------------------------------------------------------

    async def read(
        self, ledger_id: int, first: int, last: int, *, max_bytes: int = 0, fence: bool = False
    ) -> tuple[list[bytes], int]:
        """Entries from `first` on without a hole, up to `last` and about `max_bytes` (0: 4 MB), and the highest LAC known.

        At least one entry, or EntryNotFound, or EntryDamaged. `fence` fences first, durably.
        """
        if fence:
            await self.fence(ledger_id)
        self._check_alive()
        state = self._peek(ledger_id)
        limit = max_bytes or _DEFAULT_READ_BYTES
        entries: list[bytes] = []
        size, entry_id = 0, first
        while entry_id <= last and len(entries) < _MAX_READ_ENTRIES:
            entry = self.cache.get(ledger_id, entry_id) or self.read_cache.get(ledger_id, entry_id)
            if entry is None:
                # Not the last one asked for, but what a sequential reader will ask for next.
                ahead = last > first or state.next_read == entry_id
                try:
                    entry = await self._stored.read(ledger_id, entry_id, ahead=ahead)
                except EntryDamaged:
                    if not entries:
                        raise
                    break
            if entry is None or (entries and size + len(entry) > limit):
                break
            entries.append(entry)
            size += len(entry)
            entry_id += 1
        if not entries:
            raise EntryNotFound(
                f"ledger {ledger_id} has no entry {first} on this bookie", ledger_id=ledger_id, entry_id=first
            )
        state.next_read = entry_id
        return entries, state.confirmed

    async def read_last_confirmed(self, ledger_id: int, *, fence: bool = False) -> tuple[int, int]:
        """(highest last add confirmed, last entry) known here. LedgerNotFound if never written nor fenced here."""
        if fence:
            await self.fence(ledger_id)
        self._check_alive()
        state = self._peek(ledger_id)
        if not state.known:
            raise LedgerNotFound(f"ledger {ledger_id} was never written on this bookie", ledger_id=ledger_id)
        return state.confirmed, state.last_entry

    def _peek(self, ledger_id: int) -> LedgerState:
        """The state, without keeping one for a ledger that nobody wrote: reads must not fill the memory."""
        state = self.ledgers.by_id.get(ledger_id)
        if state is None:
            record = self._index.get_ledger(ledger_id)
            state = LedgerState(None) if record is None else self.ledgers.load(ledger_id)
        return state

    # --- fencing, explicit LAC ---------------------------------------------------------------------------------------

    async def fence(self, ledger_id: int) -> None:
        """From now on only recovery adds pass. Durable when it returns, for unknown ledgers as well (rule 6)."""
        self._check_alive()
        state = self.ledgers.load(ledger_id)
        if not state.fenced:
            state.fenced = True
            self.ledgers.mark_dirty(state, ledger_id)
            durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            state.fence_durable = durable

            def done(_ledger_id: int, _number: int, code: int) -> None:
                state.fence_durable = None
                if code:
                    durable.set_exception(error_from_wire(code, 0, "the fence could not be written"))
                    durable.exception()  # every fencer may have gone away
                else:
                    durable.set_result(None)

            self.journal.fence(ledger_id, done)
        if state.fence_durable is not None:
            # Shielded: one fencer that gives up must not cancel the others.
            await asyncio.shield(state.fence_durable)

    async def write_last_confirmed(self, ledger_id: int, last_add_confirmed: int) -> None:
        """Explicit LAC of an idle writer. Durable when it returns; LedgerFenced if the ledger is fenced."""
        self._check_alive()
        state = self.ledgers.load(ledger_id)
        if state.fenced:
            raise LedgerFenced(f"ledger {ledger_id} was fenced by a recovery", ledger_id=ledger_id)
        if last_add_confirmed <= state.durable_explicit_lac:
            return
        durable: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def done(_ledger_id: int, _number: int, code: int) -> None:
            if not code:
                state.durable_explicit_lac = max(state.durable_explicit_lac, last_add_confirmed)
            if not durable.done():
                durable.set_result(code)

        self.journal.last_confirmed(ledger_id, last_add_confirmed, done)
        # In memory first, as an entry is in the write cache before it is in the journal: a checkpoint may pass the record.
        state.explicit_lac = max(state.explicit_lac, last_add_confirmed)
        self.ledgers.mark_dirty(state, ledger_id)
        code = await durable
        if code:
            raise error_from_wire(code, 0, "the last add confirmed could not be written")
        self._check_alive()

    # --- looking after -----------------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What BookieInfo answers: id, disk space, whether it is read-only."""
        free, total = self.components.files.free_bytes(self.layout.root)
        return {
            "bookie_id": self.cookie.bookie_id,
            "free_bytes": free,
            "total_bytes": total,
            "read_only": self.read_only,
        }

    def stats(self) -> dict[str, int]:
        """Figures for metrics, sizes in bytes."""
        return {
            "write_cache_bytes": self.cache.size,
            "read_cache_bytes": self.read_cache.size,
            "read_cache_hits": self.read_cache.hits,
            "read_cache_misses": self.read_cache.misses,
            "journal_files": len(self.journal.files),
            "journal_end_offset": self.journal.end_offset,
            "checkpoints": self.checkpointer.finished,
            "replayed_records": self.replayed_records,
            "waiting_adds": len(self._waiting),
        }

    async def checkpoint(self) -> None:
        """Flushes everything, moves the mark and releases journals. Durable when it returns.

        Raises DiskFull (tried again later, by itself). Any other failure stops the bookie, whoever asked: a second
        attempt could succeed without what the first one lost (rule 4).
        """
        if self.failure is not None:
            raise StorageFailed(f"this bookie has stopped: {self.failure}")
        try:
            moved = await self.checkpointer.run(lambda: [self.journal.durable_position()])
        except DiskFull:
            raise
        except MagnetarError as error:
            self.fail(error)
            raise
        if moved is not None:
            self.journal.release(moved[0])
        # Between two looks no more is written than a write cache and its journal: far less than the minimum.
        self._look_at_disk()
        self._admit_waiting()

    async def _checkpoint_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._flush_wanted.wait(), self.settings.checkpoint_interval_s)
            self._flush_wanted.clear()
            try:
                await self.checkpoint()
            except DiskFull as error:
                self._look_at_disk(full=True)
                _log.warning("the flush waits for disk space: %s", error)
                await asyncio.sleep(_RETRY_FLUSH_S)
                self._flush_wanted.set()
            except MagnetarError:
                return  # `checkpoint` has stopped the bookie

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """They end by being cancelled; anything else would leave the bookie without checkpoints."""
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.critical("%s ended", task.get_name(), exc_info=error)
            self.fail(StorageFailed(f"{task.get_name()} ended: {error!r}"))

    async def _watch_disk(self) -> None:
        while True:
            await asyncio.sleep(self.settings.disk_check_interval_s)
            self._look_at_disk()

    def _look_at_disk(self, *, full: bool = False) -> None:
        """Turns read-only and back (rule 12)."""
        full = full or self.checkpointer.stopped_by_full_disk
        self.read_only = self._disk_space.look(full=full)
        self._update_refusal()

    def _update_refusal(self) -> None:
        if self.failure is not None:
            self._refusal = StorageFailed.code
        elif self._closing:
            self._refusal = _NOT_READY
        else:
            self._refusal = _READ_ONLY if self.read_only else 0
        if self._refusal:
            self._admit_waiting()

    def fail(self, error: MagnetarError) -> None:
        """Fail-stop: nothing is acknowledged any more."""
        if self.failure is None:
            self.failure = error
            self.journal.stop(error)
            self._update_refusal()
            self.on_failure(error)

    def _check_alive(self) -> None:
        if self.failure is not None:
            raise StorageFailed(f"this bookie has stopped: {self.failure}")
        if self._closing:
            raise ServiceNotReady("this bookie is stopping")

    async def close(self) -> None:
        """Takes no more adds, makes durable what it has, writes a last checkpoint, lets go of the directory.

        After a failure it only lets go. May be called twice.
        """
        if self._closing:
            return
        self._closing = True
        self._update_refusal()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        try:
            await self.journal.close()
            if self.failure is None:
                with contextlib.suppress(DiskFull):  # the journal keeps what the flush could not place
                    await self.checkpointer.run(lambda: [self.journal.durable_position()])
                    await self.logs.close()
        finally:
            self.release()
            await self.components.disk_worker.close()
            self.lock.release()

    def release(self) -> None:
        """Frees index and files as they are."""
        self.logs.abandon()
        self._index.close()


def _log_failure(error: MagnetarError) -> None:
    _log.critical("the bookie failed: %s", error)
