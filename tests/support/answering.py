"""What bookies in memory answer to the commands of a ledger client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from magnetar.proto.commands import (
    ENTRY_RANGE_ROW,
    LEDGER_FENCED,
    LEDGER_ROW,
    BookieInfo,
    DeleteLedger,
    ListEntries,
    ListLedgers,
    ReadEntries,
    ReadLastConfirmed,
    WaitLastConfirmed,
    WriteLastConfirmed,
    encode_rows,
)
from magnetar.proto.stripe import EVERY_ENTRY, Stripe


class Answering:
    """Answers by the methods of a bookie in memory."""

    async def answer(self, command: Any) -> tuple[Any, Sequence[bytes]]:
        """See LocalBookie."""
        bookie: Any = self
        match command:
            case ReadEntries(_, ledger_id, first, last, max_bytes, fence, cycle, residues):
                stripe = Stripe(cycle, residues) if cycle != 1 else EVERY_ENTRY
                entries, lac = await bookie.read(
                    ledger_id, first, last, max_bytes=max_bytes, fence=fence, stripe=stripe
                )
                return {"sizes": [len(entry) for entry in entries], "last_add_confirmed": lac}, entries
            case ReadLastConfirmed(_, ledger_id, fence):
                lac, last = await bookie.read_last_confirmed(ledger_id, fence=fence)
                return {"last_add_confirmed": lac, "last_entry": last}, ()
            case WriteLastConfirmed(_, ledger_id, lac):
                await bookie.write_last_confirmed(ledger_id, lac)
                return None, ()
            case WaitLastConfirmed(_, ledger_id, lac, timeout_ms, max_entries, max_bytes):
                lac, fenced, entries = await bookie.wait_last_confirmed(
                    ledger_id, lac, timeout_s=timeout_ms / 1000, max_entries=max_entries, max_bytes=max_bytes
                )
                sizes = [len(entry) for entry in entries]
                return {"last_add_confirmed": lac, "fenced": fenced, "sizes": sizes}, entries
            case DeleteLedger(_, ledger_id):
                await bookie.delete_ledger(ledger_id)
                return None, ()
            case ListLedgers(_, after, count):
                ledgers, more = bookie.list_ledgers(after, count)
                rows = [(row[0], row[1] * LEDGER_FENCED, row[3], row[4]) for row in ledgers]
                return {"more": more}, (encode_rows(LEDGER_ROW, rows),)
            case ListEntries(_, ledger_id, first, count):
                ranges, following = await bookie.list_entries(ledger_id, first, count)
                return {"next": following}, (encode_rows(ENTRY_RANGE_ROW, ranges),)
            case BookieInfo():
                return bookie.info(), ()
        raise AssertionError(f"not a request to a bookie: {command}")
