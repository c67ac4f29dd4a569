"""A bookie and the metadata store that lists its ledgers: whether they belong together (rule 9).

emptied or foreign metadata   the store's instance differs from the one in the cookie: refused when the bookie opens
emptied or exchanged bookie   the store knows the bookie with another instance: refused before it serves
a replaced bookie             its cookie says that it is being repaired: every ledger that lists it is fenced and marked
                              unknown first, so that nothing it lost is ever said not to exist
"""

from __future__ import annotations

import logging

from magnetar.bookie import Bookie
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.metadata import MetadataStore
from magnetar.metadata.identity import register_cookie
from magnetar.metadata.paths import LEDGERS_PATH, ledger_of_name, ledger_path

__all__ = ["introduce_bookie", "ledgers_of_bookie"]

_log = logging.getLogger(__name__)


async def introduce_bookie(bookie: Bookie, metadata: MetadataStore) -> None:
    """Before the bookie serves anybody. DataDirectoryError when it is known with another data directory."""
    cookie = bookie.cookie
    if cookie.repairing:
        held = await ledgers_of_bookie(metadata, cookie.bookie_id)
        await bookie.mark_unknown(held)
        _log.warning(
            "bookie %s takes the place of one that lost its disks: %d ledgers that list it are unknown until they are "
            "repaired",
            cookie.bookie_id,
            len(held),
        )
    await register_cookie(metadata, cookie.bookie_id, cookie.instance, replaces=cookie.repairing)
    if cookie.repairing:
        await bookie.end_repair_mode()


async def ledgers_of_bookie(metadata: MetadataStore, bookie_id: str) -> list[int]:
    """Every ledger that has the bookie in one of its ensembles."""
    found: list[int] = []
    for name in await metadata.children(LEDGERS_PATH):
        ledger_id = ledger_of_name(name)
        if ledger_id is None:
            continue
        node = await metadata.get(ledger_path(ledger_id))
        if node is None:  # deleted meanwhile
            continue
        ensembles = LedgerMetadata.decode(node.value, ledger_id).ensembles
        if any(bookie_id in ensemble.bookies for ensemble in ensembles):
            found.append(ledger_id)
    return found
