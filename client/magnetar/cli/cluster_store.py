"""The metadata of a cluster, as the commands of `magnetar cluster` open it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from magnetar.metadata import MetadataStore

__all__ = ["open_store"]


@contextlib.asynccontextmanager
async def open_store(address: str, wait_s: float, *, make_root: bool = False) -> AsyncIterator[MetadataStore]:
    """The metadata. ServiceNotReady when no server has come up in `wait_s`."""
    from magnetar.proto.errors import ServiceNotReady

    from .production import system_rng
    from .shared_metadata import open_shared_metadata

    deadline = asyncio.get_running_loop().time() + wait_s
    async with AsyncExitStack() as stops:
        store: MetadataStore | None = None
        while store is None:
            try:
                store = await open_shared_metadata(address, system_rng(), stops, make_root=make_root)
            except ServiceNotReady:  # it took some seconds to find that out
                if asyncio.get_running_loop().time() >= deadline:
                    raise
        yield store
