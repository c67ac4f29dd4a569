"""Election by an ephemeral node: whoever makes it holds the office until its session ends.

    await elected(store, "/auditor", b"me", session)
    ...                                   # the office is held; `session.lost` says when it is not any more

There are no terms and no fencing. An office holder that does not know yet that its session is lost may act for a moment
beside its successor: what it does must be harmless then, or be verified by whoever carries it out.
"""

from __future__ import annotations

import asyncio

from magnetar.proto.errors import AlreadyExists
from magnetar.runtime.tasks import wait_at_most

from .store import MetadataStore, Session

# Looks whether the office is free without a change that the store reports.
_POLL_S = 30.0


async def elected(store: MetadataStore, path: str, value: bytes, session: Session) -> None:
    """Waits for the office, and returns as soon as it is held.

    Raises what the store raises. After an error whether the node was made is not known: contend again with a new session.
    """
    changed = asyncio.Event()
    watch = store.watch(path, lambda _: changed.set())
    try:
        while True:
            changed.clear()
            try:
                await store.create(path, value, session=session)
                return
            except AlreadyExists:
                pass
            await wait_at_most(changed, _POLL_S)
    finally:
        watch.close()
