"""Ledgers that nobody needs leave the list, from its beginning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from magnetar.proto.entry import Entry
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES

from ..cursors.core.acks import Position
from .managed_ledger import MAX_LEDGERS_PER_TRIMMING, ManagedLedger, State

_log = logging.getLogger(__name__)


def trimmable(ledger: ManagedLedger[Any], limit: Callable[[], Position]) -> int:
    """How many ledgers `trim` would delete now. Costs nothing for a topic whose first ledger is open."""
    ledgers = ledger.list.ledgers
    if not ledgers or not ledgers[0].closed or ledger.state in (State.FENCED, State.CLOSED):
        return 0
    most = MAX_LEDGERS_PER_TRIMMING - len(ledger.list.record.trimmed)
    return max(0, min(ledger.list.closed_before(limit()), most))


async def trim(ledger: ManagedLedger[Any], limit: Callable[[], Position]) -> int:
    """Deletes closed ledgers that lie wholly before the limit; returns how many. Metadata first (rule 25).

    `limit` is asked when nothing else changes the list any more. At most MAX_LEDGERS_PER_TRIMMING go at once: what is
    left is for the next round.
    """

    async def change() -> int:
        count = trimmable(ledger, limit)
        if count:
            last = ledger.list.ledgers[count - 1]
            end = known_end if known_end[0] == last.ledger_id else (last.ledger_id, last.entries, 0)
            await ledger.list.commit(trim=count, trimmed_end=end)
            ledger.events.rolled()
        return count

    try:
        # Before the list is held: a read may take its time.
        known_end = await _end_of_last(ledger, trimmable(ledger, limit))
        return await ledger.edit(change)
    except MagnetarError as error:
        _log.warning("topic %s: not trimmed yet: %s", ledger.name, error)
        return 0


async def _end_of_last(ledger: ManagedLedger[Any], count: int) -> Position:
    """The position behind the last message of the first `count` ledgers."""
    if not count:
        return (-1, 0, 0)
    last = ledger.list.ledgers[count - 1]
    try:
        found = await ledger.read(last.ledger_id, last.entries - 1, max_bytes=1)
        messages = Entry(found[0], LEDGER_ENTRY_HEADER_BYTES).message_count
        return (last.ledger_id, last.entries - 1, messages)
    except MagnetarError:  # what cannot be read is trimmed all the same
        return (last.ledger_id, last.entries, 0)
