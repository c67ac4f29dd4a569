"""Somebody wants a place that is held: is who holds it still there?

The keep-alive takes two of its intervals to notice that a connection ended without a word (a machine lost its power, a
firewall forgot it). A newcomer does not wait for that: the holder's connection is pinged at once, and closed, with all that
it held, if nothing comes from it for 5 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from ..dispatch.core.consumer import Peer


async def probe(holders: Iterable[Peer], newcomer: Peer | None = None) -> None:
    """Returns when each has answered, or has lost its place. The newcomer's own connection is not asked, for it asks."""
    peers = dict.fromkeys(holders)
    # Shielded: others may wait for the same answer, and it is worth having if nobody does.
    await asyncio.gather(*[asyncio.shield(peer.probe()) for peer in peers if peer is not newcomer])
