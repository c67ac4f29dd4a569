"""Identity: the instance of a metadata store, and the bookies that were ever registered with it.

    /instance              u64, random, made once
    /cookies/{bookie id}   msgpack map {"format": 1, "instance": u64 of the bookie's cookie}

A bookie keeps the store's instance in its cookie, so that an emptied or foreign store is noticed; the store keeps the
bookie's, so that a bookie whose disks were emptied is noticed (rule 9).
"""

from __future__ import annotations

import random

import msgpack

from magnetar.proto.errors import AlreadyExists, DataDirectoryError

from .paths import INSTANCE_PATH, cookie_path
from .store import MetadataStore

__all__ = ["cluster_instance", "register_cookie", "registered_cookie"]


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


async def registered_cookie(store: MetadataStore, bookie_id: str) -> int | None:
    """Instance of the data directory that this bookie is known to have; None: it was never seen."""
    node = await store.get(cookie_path(bookie_id))
    if node is None:
        return None
    try:
        return int(msgpack.unpackb(node.value)["instance"])
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise DataDirectoryError(
            f"the metadata node {cookie_path(bookie_id)} is no bookie's cookie ({error}); restore the metadata store"
        ) from error


async def register_cookie(
    store: MetadataStore, bookie_id: str, instance: int, *, replaces: bool = False
) -> None:
    """Makes the bookie known, or finds that it is; `replaces`: it took the place of one that lost its disks.

    DataDirectoryError when the bookie is known with another data directory: it must not serve (rule 9). Durable.
    """
    path = cookie_path(bookie_id)
    value: bytes = msgpack.packb({"format": 1, "instance": instance})
    while True:
        node = await store.get(path)
        if node is None:
            try:
                await store.create(path, value)
            except AlreadyExists:
                continue
            return
        if (known := await registered_cookie(store, bookie_id)) == instance:
            return
        if not replaces:
            raise DataDirectoryError(
                f"bookie {bookie_id!r} is known with another data directory (instance {known:016x}, this one is "
                f"{instance:016x}): were its disks emptied or exchanged? Mount the right ones, or replace it (magnetar "
                "bookie cookie --accept-new-disk) and let its ledgers be repaired"
            )
        await store.put(path, value, version=node.version)
        return
