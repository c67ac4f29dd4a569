"""How a topic's ledgers are stored, and when what `flush=async` has acknowledged is made durable.

    sync    an entry is confirmed, and receipted, when ack_quorum bookies have it on disk
    async   an entry is receipted when ack_quorum bookies have it in memory, and confirmed when they have it on disk: only
            then it is delivered, read, trimmed. Until then it also stays in the broker's memory, under the publish budget

With async the `Flusher` of the open ledger has the bookies sync `flush_interval_ms` after the first entry that was receipted
and is not durable, or as soon as they are many bytes:

    IDLE --receipted--> TIMED --flush_interval_ms, or many bytes--> FORCING --durable--> IDLE, or TIMED if more was receipted

An entry that was receipted is lost only if the broker's process fails and, before the sync, all machines that have it: a
bookie that fails alone is replaced, and its replacement gets the entry from the broker; if the broker fails alone, the next
owner finds the entry in the bookies' memory. Consumers never see an entry that can be lost.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from magnetar.proto.errors import MagnetarError
from magnetar.runtime.tasks import begin, end_all

from ..resources.stores import Writer
from .pending import PendingEntries


class Durability(NamedTuple):
    """What the policies in force say of the next ledger."""

    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    minimum_write_quorum: int = 0
    flush: str = "sync"
    bookie_group: str = ""

    def of_ledger(self) -> dict[str, Any]:
        """Arguments of `Ledgers.create`, for a ledger of which every entry is synced before it is confirmed."""
        arguments = self._asdict()
        del arguments["flush"]
        return arguments


class Flusher:
    """Has the entries of one open ledger made durable. `stop` it in the end."""

    __slots__ = ("_ended", "_interval_s", "_most_bytes", "_pending", "_task", "_timer", "_writer")

    def __init__(
        self, writer: Writer, pending: PendingEntries[Any], interval_ms: int, most_bytes: int
    ) -> None:
        self._writer = writer
        self._pending = pending
        self._interval_s = interval_ms / 1000
        self._most_bytes = most_bytes
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False

    def receipted(self) -> None:
        """Entries were receipted."""
        if self._task is not None or self._ended:
            return
        if self._pending.receipted_bytes >= self._most_bytes:
            self.force()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.force)

    def force(self) -> None:
        """Now; what is under way goes on."""
        self._cancel_timer()
        if self._task is None and self._pending.receipted_bytes:
            self._task = begin(self._force(), "forcing of entries")

    async def _force(self) -> None:
        try:
            await self._writer.force()
        except MagnetarError:
            return  # the entries fail, too, and go to the next ledger, which receipts them
        finally:
            self._task = None
        if self._pending.receipted_bytes:
            self.receipted()

    def end(self) -> None:
        """The ledger is being closed, which forces all of it."""
        self._ended = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def stop(self) -> None:
        """Nothing is forced any more."""
        self.end()
        if self._task is not None:
            await end_all([self._task])
