"""Where each entry is, and what is known of each ledger: the seam `LocationIndex`, and RocksDB."""

from .locations import (
    ALL_LEDGERS,
    BATCH_ENTRIES,
    LedgerRecord,
    Location,
    LocationIndex,
    decode_ledger_record,
    encode_ledger_record,
)
from .rocks import RocksLocationIndex

__all__ = [
    "ALL_LEDGERS",
    "BATCH_ENTRIES",
    "LedgerRecord",
    "Location",
    "LocationIndex",
    "RocksLocationIndex",
    "decode_ledger_record",
    "encode_ledger_record",
]
