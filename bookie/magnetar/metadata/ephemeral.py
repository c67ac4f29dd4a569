"""Ephemeral nodes: the one that says what a process is, and the one that gives it an office.

A process's own node is made when that of a predecessor is gone, and kept up to date in one session. An office belongs to
whoever makes its node, until its session ends:

    await elected(store, "/auditor", b"me", session)
    ...                                   # the office is held; `session.lost` says when it is not any more

There are no terms and no fencing. An office holder that does not know yet that its session is lost may act for a moment
beside its successor: what it does must be harmless then, or be verified by whoever carries it out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from magnetar.proto.errors import AlreadyExists, MagnetarError
from magnetar.runtime.tasks import wait_at_most

from .store import MetadataStore, Session

_log = logging.getLogger(__name__)

# How often a node is compared with what it should say, and an error of the store is followed by another try.
POLL_S = 1.0
# A predecessor's node goes when its session ends: so many of our own timeouts are enough, and some time for the store.
_PREDECESSOR_TIMEOUTS = 3.0
_START_PATIENCE_S = 10.0
# A contender looks so often whether the office is free without a change that the store reports.
_ELECTION_POLL_S = 30.0


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
        await wait_at_most(changed, POLL_S)
        changed.clear()


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
            await wait_at_most(changed, _ELECTION_POLL_S)
    finally:
        watch.close()
