"""The compaction of one topic: when it runs, what it replaces, who reads it.

    IDLE     --asked for, above the threshold, or the last one is damaged--> RUNNING   (waits for a slot of the broker first)
    RUNNING  --done: the topic's metadata points to the new ledger--> IDLE
    RUNNING  --failed, or the topic is unloaded--> IDLE   the last compaction stays in use; `error` says why

The order of writes, so that a crash at any point loses no message and leaves no ledger behind:

    1. the id of the new ledger into the topic's metadata (`compacting`)     after a crash the next owner deletes that ledger
    2. the new ledger, closed: all of it is durable
    3. one compare-and-set: the pointer to the new ledger, the old one among those to be deleted, `compacting` = -1
    4. the old ledger is deleted                                             after a crash by the next owner

The *horizon* of a compaction is the first message that it has not looked at; the backlog is the topic from there on.

**Damage.** If a compacted ledger cannot be read, its readers lose the compacted view, never the topic: they get all messages
that the topic's ledgers have. The next round of maintenance compacts again, from the beginning of these ledgers, with what
can still be read of the damaged one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.tasks import TaskSet, awaited, end_all

from ..cursors.snapshot_ledger import is_damage
from ..log.managed_ledger import ManagedLedger
from ..log.reading import LedgerReading
from ..log.records import CompactedLedger
from ..resources.stores import Ledgers, Writer
from ..settings import BrokerSettings
from .compactor import CompactedWriter, Compactor, Progress
from .view import CompactedLog, CompactedView

_log = logging.getLogger(__name__)


class CompactionStats(msgspec.Struct, frozen=True):
    """Figures of a topic's compaction; WIRE.md says what they mean."""

    state: str  # "never", "running", "done", or "failed": the last one, and `error` says why
    error: str
    horizon: list[int] | None
    compacted_messages: int
    compacted_bytes: int
    compacted_ms: int
    backlog_bytes: int  # from the horizon on: what the next compaction reads
    messages_read: int  # by the compaction that is running
    damaged: bool  # the compacted ledger cannot be read: readers get all messages


class HasValues(Protocol):
    """Policies in force."""

    def value(self, policy: str) -> tuple[Any, str]:
        """See `topics.policies.Resolved`."""


class TopicCompaction:
    """Compacts one topic, and has the view of its last compaction. `stop` it in the end."""

    def __init__(
        self,
        ledger: ManagedLedger[Any],
        ledgers: Ledgers,
        settings: BrokerSettings,
        slots: asyncio.Semaphore,
        policies: Callable[[], HasValues | None],
        now_ms: Callable[[], int],
        switched: Callable[[], None],
    ) -> None:
        """`slots` of the broker bound the compactions that run at a time. `policies` None: not known now.

        `switched` is called when `view` was replaced.
        """
        self._ledger = ledger
        self._ledgers = ledgers
        self._settings = settings
        self._slots = slots
        self._policies = policies
        self._now_ms = now_ms
        self._switched = switched
        self.view: CompactedView | None = None  # of the ledger that `_pointer` names, once it was opened
        self._damaged = False  # that ledger cannot be read
        self._opening: asyncio.Task[None] | None = None
        self._tasks = TaskSet(f"compaction of topic {ledger.name}")  # one at most
        self._progress: Progress | None = None  # of the compaction that has a slot
        self._error = ""  # why the last compaction failed
        self._stopped = False

    @property
    def running(self) -> bool:
        """True while a compaction is under way, or waits for a slot."""
        return len(self._tasks) > 0

    @property
    def _pointer(self) -> CompactedLedger | None:
        """The last compaction, as the topic's metadata has it."""
        return self._ledger.list.record.compaction

    # --- reading -----------------------------------------------------------------------------------------------------

    def log_of(self, whole: LedgerReading) -> CompactedLog:
        """The topic as one `read_compacted` subscription sees it; call `load` before."""
        return CompactedLog(whole, lambda: self.view, self._found_damage)

    async def load(self) -> None:
        """Opens `view`, if there is a compaction and it is not damaged. Raises errors that may pass (a lost bookie)."""
        while self.view is None and self._pointer is not None and not self._damaged:
            if self._opening is None:
                self._opening = awaited(self._open_view())
                self._opening.add_done_callback(self._opened)
            await asyncio.shield(self._opening)

    def _opened(self, _: asyncio.Task[None]) -> None:
        self._opening = None

    async def _open_view(self) -> None:
        pointer = self._pointer
        if pointer is None:
            return
        try:
            view = await CompactedView.open(pointer, self._ledger.reading.read_stored)
        except MagnetarError as error:
            if self._pointer is not pointer:
                return  # another compaction has ended meanwhile: `load` opens that one
            if not is_damage(error):
                raise
            self._mark_damaged(error)
        else:
            if self._pointer is pointer:
                self.view = view

    def _found_damage(self, view: CompactedView) -> None:
        if view is self.view:
            self.view = None
            self._mark_damaged(None)
            asyncio.get_running_loop().call_soon(self._switched)

    def _mark_damaged(self, error: MagnetarError | None) -> None:
        self._damaged = True
        _log.warning(
            "topic %s: what its last compaction left is damaged (%s); readers get all messages that the topic's ledgers "
            "have until it is compacted again",
            self._ledger.name, error or "a chunk cannot be read",
        )  # fmt: skip

    # --- compacting --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a compaction, unless one is under way. Raises TopicNotServed."""
        self._ledger.changes.check_served()
        if not self._tasks and not self._stopped:
            self._tasks.begin(self._run())

    def round(self) -> None:
        """Maintenance: begins a compaction that is due."""
        due = self._damaged or 0 < self._threshold_bytes <= self.backlog_bytes()
        if due and not self._tasks:
            self.begin()

    @property
    def _threshold_bytes(self) -> int:
        """A backlog of so many bytes makes a compaction due; 0: none begins by itself."""
        policies = self._policies()
        threshold: int = 0 if policies is None else policies.value("compaction_threshold_bytes")[0]
        return threshold

    def backlog_bytes(self) -> int:
        """Bytes from the horizon on; within the ledger of the horizon they are estimated by the number of entries."""
        ledgers, pointer = self._ledger.list, self._pointer
        if pointer is None:
            return ledgers.size
        ledger, entry, _ = pointer.horizon
        rest = sum(info.size for info in ledgers.after(ledger, len(ledgers.ledgers)))
        info = ledgers.info(ledger)
        if info is not None and info.entries > entry:
            rest += info.size * (info.entries - entry) // info.entries
        return rest

    async def _run(self) -> None:
        try:
            async with self._slots:
                await self._compact()
            self._error = ""
        except MagnetarError as error:
            self._error = str(error)
            _log.warning("topic %s is not compacted: %s", self._ledger.name, error)
        except Exception as error:  # a defect here must not end the topic
            self._error = f"the compaction failed here: {error!r}"
            _log.exception("topic %s: its compaction failed", self._ledger.name)
        finally:
            self._progress = None

    async def _compact(self) -> None:
        await self.load()
        if not self._damaged:
            try:
                await self._compact_once(rebuild=False)
                return
            except MagnetarError as error:
                if not is_damage(error) or not await self._old_is_damaged():
                    raise
        await self._compact_once(rebuild=True)

    async def _old_is_damaged(self) -> bool:
        """True if the damage that a compaction met is in the old compacted ledger, of which this reads every chunk."""
        view = self.view
        if view is None:
            return self._damaged
        for row in range(len(view.index)):
            try:
                view.cached(row) or await view.read(row)
            except MagnetarError as error:
                if not is_damage(error):
                    raise
                self._found_damage(view)
                return True
        return False

    async def _compact_once(self, *, rebuild: bool) -> None:
        """`rebuild`: from the beginning of the topic, with what can be read of the damaged compacted ledger."""
        ledgers, pointer = self._ledger.list, self._pointer
        end = ledgers.end
        old, start = self.view, ledgers.start
        if rebuild and pointer is not None:
            old, lost = await CompactedView.salvage(pointer, self._ledger.reading.read_stored)
            _log.warning(
                "topic %s is compacted from its beginning; %d of %d chunks of the last compaction are lost",
                self._ledger.name, lost, pointer.chunks,
            )  # fmt: skip
        elif pointer is not None:
            start = pointer.horizon
            if ledgers.normalise(start) >= end:
                return  # nothing is new
        ledger_id = await self._ledgers.next_id()
        await self._name_unfinished(ledger_id)
        writer = CompactedWriter(lambda: self._create(ledger_id))
        compactor = Compactor(
            self._ledger.reading,
            ledgers.normalise,
            self._settings,
            self._now_ms,
            writer,
            f"topic {self._ledger.name}",
        )
        self._progress = compactor.progress
        try:
            done = await compactor.run(old, start, end, salvage=rebuild)
            await self._switch(done)
        except BaseException as error:
            writer.abandon()
            # If it was cancelled, `remove` deletes the ledger, or the next owner of the topic does.
            if isinstance(error, MagnetarError):
                with contextlib.suppress(MagnetarError):  # the next compaction, or owner, does it
                    await self._name_unfinished(-1)
            raise

    async def _create(self, ledger_id: int) -> Writer:
        return await self._ledgers.create(
            **self._ledger.durability().of_ledger(),
            properties={"kind": "compacted", "topic": str(self._ledger.name)},
            ledger_id=ledger_id,
            explicit_lac=False,
        )

    async def _name_unfinished(self, ledger_id: int) -> None:
        """Step 1; -1 undoes it after a failure. The ledger that was named before, of a failed compaction, is deleted."""
        ledgers = self._ledger.list

        async def change() -> None:
            before = ledgers.record.compacting
            await ledgers.commit(delete=[before] if before >= 0 else [], compacting=ledger_id)

        await self._ledger.changes.edit(change)

    async def _switch(self, done: CompactedLedger) -> None:
        """Steps 3 and 4: readers see `done` from here on, once its index could be read back; the old ledger is deleted."""
        view = await CompactedView.open(done, self._ledger.reading.read_stored)
        ledgers = self._ledger.list

        async def change() -> None:
            before = self._pointer
            old = [before.ledger_id] if before is not None and before.ledger_id >= 0 else []
            await ledgers.commit(delete=old, compaction=done, compacting=-1)
            self.view, self._damaged = view, False

        await self._ledger.changes.edit(change)
        self._switched()

    async def remove(self) -> None:
        """Ends compaction of the topic: deletes the compacted ledger, and trimming waits for no compaction any more."""
        await self._stop_task()
        ledgers = self._ledger.list

        async def change() -> None:
            await ledgers.commit(delete=ledgers.record.compacted_ledgers(), compaction=None, compacting=-1)
            self.view, self._damaged, self._error = None, False, ""

        await self._ledger.changes.edit(change)
        self._switched()

    def stats(self) -> CompactionStats:
        """Figures for people and tools."""
        pointer, progress = self._pointer, self._progress
        state = (
            "running" if self.running else "failed" if self._error else "never" if pointer is None else "done"
        )
        return CompactionStats(
            state=state,
            error=self._error,
            horizon=None if pointer is None else list(pointer.horizon),
            compacted_messages=0 if pointer is None else pointer.messages,
            compacted_bytes=0 if pointer is None else pointer.size,
            compacted_ms=0 if pointer is None else pointer.compacted_ms,
            backlog_bytes=self.backlog_bytes(),
            messages_read=0 if progress is None else progress.messages_read,
            damaged=self._damaged,
        )

    async def _stop_task(self) -> None:
        await self._tasks.close()
        await end_all([self._opening] if self._opening is not None else [])

    async def stop(self) -> None:
        """Cancels what is under way; no compaction begins any more."""
        self._stopped = True
        await self._stop_task()
