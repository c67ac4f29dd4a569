"""An ephemeral node that says what its process is: made when a predecessor's is gone, and kept up to date in one session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from magnetar.proto.errors import AlreadyExists, MagnetarError

from .store import MetadataStore, Session

_log = logging.getLogger(__name__)

# How often a node is compared with what it should say, and an error of the store is followed by another try.
POLL_S = 1.0
# A predecessor's node goes when its session ends: so many of our own timeouts are enough, and some time for the store.
_PREDECESSOR_TIMEOUTS = 3.0
_START_PATIENCE_S = 10.0


def start_limit_s(session_timeout_s: float) -> float:
    """How long a process waits for its first node before it gives up."""
    return session_timeout_s * _PREDECESSOR_TIMEOUTS + _START_PATIENCE_S


async def create_after_predecessor(
    store: MetadataStore,
    path: str,
    value: bytes,
    session: Session,
    session_timeout_s: float,
    taken: Callable[[], None] = lambda: None,
) -> int:
    """Returns the node's version when it is made. `taken` is called whenever another process has it still.

    Raises what the store raises; AlreadyClosed when the session is lost.
    """
    told = False
    while True:
        try:
            return await store.create(path, value, session=session)
        except AlreadyExists:
            taken()
            if not told:
                _log.warning("another process is registered at %s: waiting for the end of its session", path)
                told = True
            await asyncio.sleep(min(POLL_S, session_timeout_s / 4))


async def keep_up_to_date(
    store: MetadataStore,
    path: str,
    value: Callable[[], bytes],
    stored: bytes,
    version: int,
    session: Session,
    changed: asyncio.Event,
) -> None:
    """Returns when the session is lost. `value` is asked every POLL_S, and when `changed` is set, as it is to be at the end.

    `stored`: what the node says at `version`. A node that cannot be written is no reason to give the session up, with all
    that depends on it.
    """
    while not session.lost:
        if (now := value()) != stored:
            try:
                version, stored = await store.put(path, now, version=version), now
            except MagnetarError as error:
                _log.warning("%s cannot be changed yet: %s", path, error)
                with contextlib.suppress(MagnetarError):
                    if (node := await store.get(path)) is not None:
                        version, stored = node.version, node.value
        with contextlib.suppress(TimeoutError):
            # Not wait_for, which until Python 3.12 forgets a cancellation that comes with the event.
            async with asyncio.timeout(POLL_S):
                await changed.wait()
        changed.clear()
