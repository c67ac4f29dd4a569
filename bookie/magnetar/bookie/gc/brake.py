"""The brake of garbage collection (rule 37): what a metadata store that lost something must not be able to destroy.

    the store would give an id again that this bookie has held  ->  it was lost or is an old copy: nothing is deleted
    it misses more than `gc_max_deleted_ratio` of all ledgers   ->  so many are deleted, the rest in later rounds

A store that merely lost some records thus costs a small share of the ledgers before somebody reads the log. Deletions that
bookies are asked for directly are not affected: a round only finds what a bookie has missed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from magnetar.proto.errors import DataDirectoryError

from ..ledgers import LedgerDescriptors
from .existing_ledgers import ExistingLedgers

_log = logging.getLogger(__name__)
# A bookie with a few ledgers gets on, too.
LEAST_DELETED = 10


async def deleted_ledgers(
    existing: ExistingLedgers, local: Sequence[int], ledgers: LedgerDescriptors, max_ratio: float
) -> list[int]:
    """Those of the `local` ledgers that are to be deleted in this round. Raises MagnetarError when nothing is known."""
    held = ledgers.next_ledger_id
    next_id = await existing.next_ledger_id()
    if next_id < held:
        raise DataDirectoryError(
            f"this bookie knows that the ledger ids below {held} were used, and the metadata store would give the id "
            f"{next_id} to its next ledger: it was restored from an older copy, or lost. Nothing is deleted by what it does "
            "not know; restore its newest copy",
            held=held,
            next_ledger_id=next_id,
        )
    missing = await existing.missing(local)
    most = max(LEAST_DELETED, int(len(local) * max_ratio))
    if len(missing) > most:
        _log.warning(
            "the metadata store does not list %d of the %d ledgers of this bookie; %d of them are deleted now, the others "
            "in later rounds (gc_max_deleted_ratio=%g). If these ledgers were not deleted on purpose, stop the bookie, and "
            "restore the metadata store",
            len(missing),
            len(local),
            most,
            max_ratio,
        )
    return missing[:most]
