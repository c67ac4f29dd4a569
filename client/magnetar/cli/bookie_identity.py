"""A bookie of this process and the metadata store that lists its ledgers: do they belong together (rules 9, 35, 36)?

It is introduced as one over TCP is, before it serves anybody. A bookie that took the place of one that lost its disks says
so in its cookie: then every ledger that there was before is fenced and unknown there, so that nothing is said not to exist.
"""

from __future__ import annotations

from magnetar.bookie import Bookie
from magnetar.ledger import StoredIdentities
from magnetar.ledger.identities import MOST_INTRODUCTIONS
from magnetar.metadata import MetadataStore

__all__ = ["introduce_bookie"]


async def introduce_bookie(bookie: Bookie, metadata: MetadataStore, cluster: int) -> StoredIdentities:
    """Who it is, for others. WrongBookie when it is known with another data directory, or a newer state of it."""
    identities = StoredIdentities(metadata, cluster)
    name = bookie.cookie.bookie_id
    for _ in range(MOST_INTRODUCTIONS):
        expected = await identities.expected(name)
        if await identities.verify(name, expected, bookie.introduce(expected)):
            break
    return identities
