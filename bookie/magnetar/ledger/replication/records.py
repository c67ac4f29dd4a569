"""The records of all ledgers, read in pages of ids and a few records at a time.

So what goes through them needs memory that does not depend on the number of ledgers, and gives the loop a turn after each of
these groups (2 ms).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection

from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata.ledgers import LEDGERS_PER_PAGE, StoredLedgers, ledger_path
from magnetar.metadata.store import Versioned
from magnetar.proto.errors import InvalidArgument, MagnetarError

# Records that are read together: over a network the time of one, in the embedded store 10 us each.
_READS = 50
_NO_END = (1 << 63) - 1


async def stored_records(
    ledgers: StoredLedgers, *, after: int = -1, below: int = _NO_END
) -> AsyncIterator[list[tuple[int, Versioned]]]:
    """Ids and records of the ledgers with ids between these, in groups, ids rising. Raises what the store raises."""
    for start in await ledgers.page_starts():
        if start >= below:
            return
        if start + LEDGERS_PER_PAGE <= after:
            continue
        page = [ledger_id for ledger_id in await ledgers.page(start) if after < ledger_id < below]
        await asyncio.sleep(0)
        for at in range(0, len(page), _READS):
            some = page[at : at + _READS]
            nodes = await asyncio.gather(*map(ledgers.get, some))
            # Those without a record were deleted meanwhile.
            yield [(ledger_id, node) for ledger_id, node in zip(some, nodes, strict=True) if node is not None]
            await asyncio.sleep(0)


def may_name(node: Versioned, bookies: Collection[bytes]) -> bool:
    """Whether a record may name one of the bookies: it does so in plain bytes, so most need not be decoded."""
    return any(bookie in node.value for bookie in bookies)


async def records_naming(
    ledgers: StoredLedgers, bookies: Collection[str], *, decode_all: bool = False
) -> AsyncIterator[tuple[int, LedgerMetadata | InvalidArgument]]:
    """Ids and records of the ledgers that name one of the bookies, ids rising.

    A record that cannot be read counts as naming them: in its place is an error with its path. `decode_all` finds also
    those whose bytes do not show a name of a bookie.
    """
    names = tuple(bookie.encode() for bookie in bookies)
    async for group in stored_records(ledgers):
        for ledger_id, node in group:
            if not decode_all and not may_name(node, names):
                continue
            try:
                metadata = LedgerMetadata.decode(node.value, ledger_id)
            except MagnetarError as error:
                yield ledger_id, InvalidArgument(f"{ledger_path(ledger_id)} cannot be read: {error}")
                continue
            if any(bookie in ensemble.bookies for ensemble in metadata.ensembles for bookie in bookies):
                yield ledger_id, metadata
