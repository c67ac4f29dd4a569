"""Marks of brokers and bookies that are drained: they hand over all they have, and get nothing, until the mark is gone.

/draining-brokers/<name>    {"format": 1, "zone": its own, by which it is found while it is stopped}
/draining/<bookie id>       the same
"""

from __future__ import annotations

import contextlib

from magnetar.proto.errors import AlreadyExists, NotFoundInStore

from .paths import DRAINING_BOOKIES_PATH, DRAINING_BROKERS_PATH
from .record import Record
from .store import MetadataStore

BROKER, BOOKIE = KINDS = ("broker", "bookie")
DRAIN_PATHS = {BROKER: DRAINING_BROKERS_PATH, BOOKIE: DRAINING_BOOKIES_PATH}


class DrainMark(Record):
    """An operator wants what the member has elsewhere."""

    zone: str  # "": it is in none, or not known


async def mark_drained(store: MetadataStore, kind: str, name: str, zone: str = "") -> bool:
    """`kind`: of KINDS. False if it was marked before."""
    try:
        await store.create(f"{DRAIN_PATHS[kind]}/{name}", DrainMark(zone).encode())
    except AlreadyExists:
        return False
    return True


async def unmark_drained(store: MetadataStore, kind: str, name: str) -> None:
    """It may have all that it could before; what has moved stays where it is."""
    with contextlib.suppress(NotFoundInStore):
        await store.delete(f"{DRAIN_PATHS[kind]}/{name}")
