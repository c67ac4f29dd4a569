"""Every change of a topic's ledger list: one at a time, by compare-and-set; what it lets go of is deleted afterwards.

    take_over   the last ledger is recovered, and the list written even if nothing changed (rule 23)
    add         the next ledger, to be written to (`appending`)
    edit        what others change: attached and archived ledgers, policies, the pointer of a compaction
    trim        ledgers that nobody needs leave, from the beginning on
    delete      all of them leave, and then the list itself

Metadata comes first (rule 25): a ledger is deleted once the stored list does not name it any more, and what cannot be
deleted yet stays among `trimmed`, for the next change or the next owner.

A conflict is another owner, so it fences the topic for good: whoever changes the list by `alone` need not look for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from magnetar.proto.errors import (
    LedgerFenced,
    LedgerNotFound,
    MagnetarError,
    TopicBusy,
    TopicNotServed,
    VersionConflict,
)
from magnetar.runtime.tasks import finish

from ..cursors.core.acks import Position
from ..resources.stores import Ledgers, Writer, delete_ledgers
from .ledger_list import LedgerList
from .reading import LedgerReading, measure
from .records import LedgerInfo

_log = logging.getLogger(__name__)

R = TypeVar("R")
# What is deleted at once, while the list cannot change otherwise and a topic that rolls over waits.
MAX_LEDGERS_PER_TRIMMING = 1_000


class ListChanges:
    """Changes the ledger list of one topic. `not_served` says why nothing can be changed any more."""

    def __init__(
        self,
        ledger_list: LedgerList,
        ledgers: Ledgers,
        reading: LedgerReading,
        fence: Callable[[MagnetarError], None],
        changed: Callable[[], None],
    ) -> None:
        """`fence` gets what says that another broker owns the topic; `changed` is called when ledgers were trimmed."""
        self.list = ledger_list
        self._ledgers = ledgers
        self._reading = reading
        self._fence = fence
        self._changed = changed
        self.lock = asyncio.Lock()  # one change of the list at a time
        self._trimming = asyncio.Lock()  # from asking what is not needed until that has left the list
        self.not_served: TopicNotServed | None = None

    def check_served(self) -> None:
        """Raises TopicNotServed."""
        if self.not_served is not None:
            raise TopicNotServed(self.not_served.message)

    # --- one at a time -----------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nothing else changes the list meanwhile. A conflict fences; raises TopicNotServed then, and if it was before."""
        async with self.lock:
            self.check_served()
            try:
                yield
            except (VersionConflict, LedgerFenced) as conflict:
                self._fence(conflict)
                self.check_served()
                raise

    async def edit(self, change: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """Runs `change`, which commits to the list, while nothing else changes it; then deletes what was trimmed.

        Once `change` has begun it is done, and the list is as it says, even if the caller is cancelled: somebody else waits
        for the outcome. Raises what `change` raised, or TopicNotServed.
        """
        async with self.alone():
            return await self.finish(change)

    async def finish(self, change: Callable[[], Coroutine[Any, Any, R]]) -> R:
        """The same for whoever is `alone`."""
        result = await finish(change())
        await self._delete_trimmed()
        return result

    async def delete_trimmed(self) -> None:
        """Deletes what the stored list no longer names; what fails is tried again at the next change or opening."""
        async with self.lock:
            await self._delete_trimmed()

    async def _delete_trimmed(self) -> None:
        trimmed = self.list.record.trimmed
        for stored_id in trimmed:
            self._reading.forget(stored_id)
        await delete_ledgers(self._ledgers, trimmed, f"topic {self.list.name}")

    # --- the first change, and ledgers that follow -------------------------------------------------------------------

    async def take_over(self, create_ms: int | None) -> bool:
        """Rule 23. False: the topic was made (`create_ms`: the time). TopicNotFound; TopicBusy on a conflict."""
        ledgers = self.list
        existed = await ledgers.load(create_ms=create_ms)
        if not existed or ledgers.record.deleting:
            return existed
        if ledgers.ledgers and not ledgers.ledgers[-1].closed:
            info = ledgers.ledgers[-1]
            try:
                reader = await self._ledgers.open(info.stored_id, recover=True)
            except LedgerNotFound as missing:
                await ledgers.load(create_ms=None)
                if ledgers.ledgers and ledgers.ledgers[-1].stored_id == info.stored_id:
                    raise
                # Its owner closed, trimmed and deleted it since the list was read.
                raise TopicBusy(f"topic {ledgers.name} is still served by another broker") from missing
            await measure(info, reader, reader.last_add_confirmed)
            ledgers.end_last(reader.last_add_confirmed + 1)
        record = ledgers.record
        # A compaction that did not come to its end left a ledger, or only the intention of one.
        abandoned = [record.compacting] if record.compacting >= 0 else []
        try:
            await ledgers.commit(delete=abandoned, compacting=-1)
        except VersionConflict as conflict:
            raise TopicBusy(f"topic {ledgers.name} is being taken over by another broker") from conflict
        await ledgers.sweep()
        await self.delete_trimmed()
        return True

    async def add(self, writer: Writer) -> LedgerInfo:
        """The writer's ledger follows all others; to be called `alone`. If that fails, the writer is let go of."""
        info = LedgerInfo(writer.ledger_id, self.list.record.next_index)
        try:
            await self.list.commit(append=[info])
        except BaseException as error:
            writer.detach()
            if isinstance(error, VersionConflict):
                # After any other failure the stored list may name the new ledger: then it stays.
                with contextlib.suppress(MagnetarError):
                    await self._ledgers.delete(writer.ledger_id)
            raise
        return info

    # --- trimming ----------------------------------------------------------------------------------------------------

    def trimmable(self, limit: Callable[[], Position]) -> int:
        """How many ledgers `trim` would delete now. Costs nothing for a topic whose first ledger is open."""
        ledgers = self.list.ledgers
        if not ledgers or not ledgers[0].closed or self.not_served is not None:
            return 0
        most = MAX_LEDGERS_PER_TRIMMING - len(self.list.record.trimmed)
        return max(0, min(self.list.closed_before(limit()), most))

    async def trim(self, limit: Callable[[], Position]) -> int:
        """Deletes closed ledgers that lie wholly before the limit; returns how many.

        `limit` is asked when nothing else changes the list any more. At most MAX_LEDGERS_PER_TRIMMING go at once: what is
        left is for the next round.
        """

        async def change() -> int:
            async with self._trimming:
                count = self.trimmable(limit)
                if count:
                    last = self.list.ledgers[count - 1]
                    end = known_end if known_end[0] == last.ledger_id else (last.ledger_id, last.entries, 0)
                    await self.list.commit(trim=count, trimmed_end=end)
                    self._changed()
                return count

        try:
            # Before the list is held: a read may take its time.
            known_end = await self._end_of_last(self.trimmable(limit))
            return await self.edit(change)
        except MagnetarError as error:
            _log.warning("topic %s: not trimmed yet: %s", self.list.name, error)
            return 0

    async def trimming_decided(self) -> bool:
        """False: a trimming was under way that may not heed who came since; it has changed the list when this returns.

        It waits for metadata alone, and for no bookie: not while the list is held for another change.
        """
        if not self._trimming.locked():
            return True
        async with self._trimming:
            return False

    async def _end_of_last(self, count: int) -> Position:
        """The position behind the last message of the first `count` ledgers."""
        if not count:
            return (-1, 0, 0)
        last = self.list.ledgers[count - 1]
        if not last.entries:
            return (last.ledger_id, 0, 0)
        key = (last.ledger_id, last.entries - 1)
        try:
            return (*key, await self._reading.read_message_count(key))
        except MagnetarError:  # what cannot be read is trimmed all the same
            return (last.ledger_id, last.entries, 0)

    # --- deleting ----------------------------------------------------------------------------------------------------

    async def mark_deleting(self) -> None:
        """From here on the topic does not exist, even if a crash comes before `delete` is done."""
        async with self.lock:
            compacted = self.list.record.compacted_ledgers()
            await self.list.commit(deleting=True, delete=compacted, compaction=None, compacting=-1)

    async def delete(self) -> None:
        """Deletes the ledgers of a topic marked as deleting, then its metadata; may be repeated after a crash."""
        async with self.lock:
            while True:
                await self._delete_trimmed()
                if left := len(self.list.record.trimmed):
                    raise TopicBusy(
                        f"topic {self.list.name}: {left} ledgers could not be deleted; delete it again"
                    )
                if not self.list.ledgers:
                    break
                await self.list.commit(trim=min(len(self.list.ledgers), MAX_LEDGERS_PER_TRIMMING))
            await self.list.delete()
