"""The metadata that a cluster shares, as its daemons and the commands of `magnetar cluster` open it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from magnetar.metadata.paths import INSTANCE_PATH
from magnetar.proto.errors import InvalidSetting, ServiceNotReady
from magnetar.runtime.clock import elapsed_s

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore

_PATIENCE_S = 0.5  # then a command says what it waits for


def system_rng() -> random.Random:
    """Seeded from the system."""
    return random.Random(random.SystemRandom().getrandbits(128))


async def open_shared_metadata(
    address: str, rng: random.Random, stops: AsyncExitStack, *, make_root: bool = False
) -> MetadataStore:
    """The store on ZooKeeper; closed by `stops`. ServiceNotReady; InvalidSetting without a cluster, unless `make_root`."""
    from magnetar.metadata.zookeeper.store import open_zookeeper_store

    metadata = await open_zookeeper_store(address, rng=rng, clock=elapsed_s, make_root=make_root)
    stops.push_async_callback(metadata.close)
    if not make_root and await metadata.get(INSTANCE_PATH) is None:
        raise InvalidSetting(
            f"setting metadata: there is no cluster at {address.rpartition('@')[2]}; correct the root, or make a cluster "
            "there: magnetar cluster init"
        )
    return metadata


@contextlib.asynccontextmanager
async def open_store(
    metadata: str, wait_s: float = 0.0, *, make_root: bool = False
) -> AsyncIterator[MetadataStore]:
    """The metadata at this address, for a command. ServiceNotReady when no server has come up in `wait_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    waits = loop.call_later(
        _PATIENCE_S,
        lambda: print(
            f"magnetar: waiting for the metadata store at {metadata.rpartition('@')[2]}", file=sys.stderr
        ),
    )
    async with AsyncExitStack() as stops:
        store: MetadataStore | None = None
        try:
            while store is None:
                try:
                    store = await open_shared_metadata(metadata, system_rng(), stops, make_root=make_root)
                except ServiceNotReady:  # it took some seconds to find that out
                    if loop.time() >= deadline:
                        raise
        finally:
            waits.cancel()
        yield store
