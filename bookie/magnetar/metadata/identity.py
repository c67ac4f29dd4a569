"""Identity: the instance of a metadata store, and the bookies that were ever registered with it (rules 35 and 36).

    /instance              u64, random, made once
    /cookies/{bookie}      msgpack map {"format": 1, "bookie_id", "instance", "start", "incarnation"}: who the bookie was
                           when a ledger client registered it last (`proto.bookie_identity`)

`bookie` is the name that ledger metadata has for it: its own id, or what a static list of bookies calls it. A bookie keeps
the store's instance in its cookie, so that an emptied or foreign store is noticed; the store keeps the bookie's instance and
start, so that a bookie is noticed whose disks were emptied, exchanged, or restored from an older copy.
"""

from __future__ import annotations

import random
from typing import NamedTuple

from magnetar.proto.bookie_identity import NOT_KNOWN, BookieIdentity
from magnetar.proto.errors import (
    AlreadyExists,
    NotFoundInStore,
    VersionConflict,
    WrongBookie,
)

from .paths import COOKIES_PATH, INSTANCE_PATH, cookie_path
from .record import Record
from .store import MetadataStore


class _Cookie(Record):
    bookie_id: str
    instance: int
    start: int
    incarnation: int


class RegisteredCookie(NamedTuple):
    """What the store has of a bookie; of one that was never seen NOT_KNOWN and no version."""

    identity: BookieIdentity
    version: int | None


async def cluster_instance(store: MetadataStore, rng: random.Random) -> int:
    """The store's instance, never 0; made if it has none. Durable when it returns."""
    while True:
        node = await store.get(INSTANCE_PATH)
        if node is not None:
            return int.from_bytes(node.value, "big")
        try:
            await store.create(INSTANCE_PATH, (rng.getrandbits(64) or 1).to_bytes(8, "big"))
        except AlreadyExists:  # another process was faster
            continue


async def registered_cookie(store: MetadataStore, bookie: str) -> RegisteredCookie:
    """Who the bookie was when it was registered last."""
    node = await store.get(cookie_path(bookie))
    if node is None:
        return RegisteredCookie(NOT_KNOWN, None)
    cookie = _Cookie.decode(node.value, cookie_path(bookie), "restore the metadata store")
    identity = BookieIdentity(
        bookie_id=cookie.bookie_id,
        instance=cookie.instance,
        start=cookie.start,
        incarnation=cookie.incarnation,
    )
    return RegisteredCookie(identity, node.version)


async def register_cookie(
    store: MetadataStore, bookie: str, expected: BookieIdentity, found: BookieIdentity
) -> bool:
    """Registers the bookie as the one that was found, in the place of `expected` (NOT_KNOWN: it was never seen). Durable.

    False: the store has something else than `expected` by now, and nothing was changed. WrongBookie: another bookie is
    registered with the same data directory.
    """
    known = await registered_cookie(store, bookie)
    if known.identity.is_same_start(found):
        return True
    if not known.identity.is_same_start(expected):
        return False
    value = _Cookie(found.bookie_id, found.instance, found.start, found.incarnation).encode()
    try:
        if known.version is None:
            await _check_new(store, bookie, found)
            await store.create(cookie_path(bookie), value)
        else:
            await store.put(cookie_path(bookie), value, version=known.version)
    except (AlreadyExists, VersionConflict, NotFoundInStore):  # another process was faster
        return False
    return True


async def _check_new(store: MetadataStore, bookie: str, found: BookieIdentity) -> None:
    """One bookie under two names would be two replicas, and no names of old ledgers may change."""
    for name in await store.children(COOKIES_PATH):
        if (await registered_cookie(store, name)).identity.instance == found.instance:
            raise WrongBookie(
                f"bookie {bookie} is the one that ledgers know as {name} (instance {found.instance:016x}): list it once, "
                f"and by that name ({name}=host:port)"
            )
