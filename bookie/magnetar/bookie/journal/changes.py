"""What a journal record says of its ledger: read by a start, and by the tools that show what a start would do."""

from __future__ import annotations

import struct

from magnetar.proto.errors import DataDirectoryError
from magnetar.proto.ledger_entry import LEDGER_ENTRY_FIELDS, NO_ENTRY

from ..index import LedgerRecord
from .records import DELETED, FENCE, LAST_CONFIRMED, Record, RecordType


def ledger_change(record: Record) -> tuple[int, LedgerRecord] | None:
    """(ledger id, what it adds to the ledger's record); None for the records that the journal writes for itself.

    DataDirectoryError for a type that is not known here: a newer program wrote it.
    """
    kind, payload = record.type, record.payload
    try:
        if kind == RecordType.ADD:
            ledger_id, entry_id, confirmed, _ = LEDGER_ENTRY_FIELDS.unpack_from(payload)
            return ledger_id, LedgerRecord(False, NO_ENTRY, entry_id, confirmed)
        if kind == RecordType.FENCE:
            return FENCE.unpack(payload)[0], LedgerRecord(fenced=True)
        if kind == RecordType.LAST_CONFIRMED:
            ledger_id, explicit = LAST_CONFIRMED.unpack(payload)
            return ledger_id, LedgerRecord(explicit_lac=explicit)
        if kind == RecordType.DELETED:
            ledger_id, deleted_at_ms = DELETED.unpack(payload)
            return ledger_id, LedgerRecord(fenced=True, deleted_at_ms=deleted_at_ms)
    except struct.error as error:
        raise DataDirectoryError(f"a journal record of type {kind} is too short: {error}") from error
    if kind in (RecordType.BEGIN, RecordType.SYNCED):
        return None
    raise DataDirectoryError(
        f"a journal holds a record of type {kind}, which this program does not know; run the version of magnetar that wrote "
        "it"
    )
