"""A process in the shared metadata: an ephemeral node that says where it is, and goes when the process does.

/bookies/<bookie id>    `ledger.directory.encode_registration`; a bookie whose session was lost registers again
/broker                 msgpack map {"url"}: the one broker of the cluster; one whose session was lost stops at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgpack

from magnetar.metadata import MetadataStore, Session
from magnetar.proto.errors import AlreadyExists, MagnetarError, RequestTimeout, ServiceNotReady

__all__ = ["BROKER_PATH", "Registration", "take_broker_place"]

_log = logging.getLogger(__name__)

BROKER_PATH = "/broker"
# How often a registration is compared with what it should say, and an error of the store is followed by another try.
POLL_S = 1.0
# A predecessor's node goes when its session ends: this many of our own timeouts are enough.
PREDECESSOR_TIMEOUTS = 3.0
# How long the first registration may take beyond that.
START_PATIENCE_S = 10.0


class Registration:
    """Keeps a node, in a new session whenever one was lost. `value` is asked every second, and written when it changed."""

    def __init__(
        self, metadata: MetadataStore, path: str, value: Callable[[], bytes], session_timeout_s: float
    ) -> None:
        self._metadata = metadata
        self._path = path
        self._value = value
        self._timeout_s = session_timeout_s
        self._registered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the node stands. RequestTimeout; nothing is left then."""
        self._task = asyncio.get_running_loop().create_task(self._keep(), name=f"registration {self._path}")
        seconds = self._timeout_s * PREDECESSOR_TIMEOUTS + START_PATIENCE_S
        try:
            async with asyncio.timeout(seconds):
                await self._registered.wait()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise RequestTimeout(
                    f"{self._path} could not be registered in the metadata store within {seconds:g} s; is another process "
                    "registered under this name?"
                ) from None
            raise

    async def close(self) -> None:
        """The node goes. May be called again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep(self) -> None:
        while True:
            try:
                session = await self._metadata.open_session(self._timeout_s)
                try:
                    await self._hold(session)
                finally:
                    await session.close()
                _log.warning("the session of %s was lost; it is registered again", self._path)
            except MagnetarError as error:
                _log.warning("%s is not registered yet: %s", self._path, error)
                await asyncio.sleep(POLL_S)

    async def _hold(self, session: Session) -> None:
        """Until the session is lost."""
        lost = asyncio.Event()
        session.when_lost(lost.set)
        value = self._value()
        while True:
            try:
                version = await self._metadata.create(self._path, value, session=session)
                break
            except AlreadyExists:  # of a predecessor whose session has not ended yet
                await asyncio.sleep(min(POLL_S, self._timeout_s / 4))
        self._registered.set()
        while not session.lost:
            if (now := self._value()) != value:
                version = await self._metadata.put(self._path, now, version=version)
                value = now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lost.wait(), POLL_S)


async def take_broker_place(
    metadata: MetadataStore, url: str, session_timeout_s: float, on_lost: Callable[[MagnetarError], None]
) -> Session:
    """The place of the cluster's one broker, for as long as the session lasts. ServiceNotReady when another one has it."""
    loop = asyncio.get_running_loop()
    session = await metadata.open_session(session_timeout_s)
    deadline = loop.time() + session_timeout_s * PREDECESSOR_TIMEOUTS
    try:
        while True:
            try:
                await metadata.create(BROKER_PATH, msgpack.packb({"url": url}), session=session)
                break
            except AlreadyExists:  # of a predecessor whose session has not ended yet, or of one that runs
                if loop.time() > deadline:
                    node = await metadata.get(BROKER_PATH)
                    other = "" if node is None else f" at {msgpack.unpackb(node.value)['url']}"
                    raise ServiceNotReady(
                        f"another broker{other} serves this cluster, and a cluster has one broker in this release; stop "
                        "that one first"
                    ) from None
                await asyncio.sleep(min(POLL_S, session_timeout_s / 4))
    except BaseException:
        await session.close()
        raise
    session.when_lost(
        lambda: on_lost(
            ServiceNotReady(
                "the session with the metadata store was lost, so another broker may serve this cluster; start again"
            )
        )
    )
    return session
