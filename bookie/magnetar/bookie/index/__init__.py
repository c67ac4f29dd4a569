"""Where each entry is, and what is known of each ledger: the seam `LocationIndex`, RocksDB, a model for tests."""

from .locations import (
    ALL_LEDGERS,
    BATCH_ENTRIES,
    LedgerRecord,
    Location,
    LocationIndex,
    decode_ledger_record,
    encode_ledger_record,
)
from .model import ModelLocationIndex, ModelStorage
from .rocks import RocksLocationIndex

__all__ = [
    "ALL_LEDGERS",
    "BATCH_ENTRIES",
    "LedgerRecord",
    "Location",
    "LocationIndex",
    "ModelLocationIndex",
    "ModelStorage",
    "RocksLocationIndex",
    "decode_ledger_record",
    "encode_ledger_record",
]
