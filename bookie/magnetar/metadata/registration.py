"""A process in the shared metadata: an ephemeral node that says what it is, and goes when the process does.

    (no session) ──opened──> the node of a predecessor is waited for ──it is gone, ours is made──> REGISTERED
         ^                                                                                             │
         └───────────────────────────── the session is lost, or given up <─────────────────────────────┘

What else a process makes for others to see, and must let go of when they may have forgotten it, is made in the same session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from magnetar.proto.errors import AlreadyClosed, AlreadyExists, MagnetarError, ServiceNotReady
from magnetar.runtime.tasks import LongTask, begin, end_all, wait_at_most

from .store import MetadataStore, Session

_log = logging.getLogger(__name__)

# How often the node is compared with what it should say, and an error of the store is followed by another try.
POLL_S = 1.0
# A predecessor's node goes when its session ends: so many of our own timeouts are enough, and some time for the store.
_PREDECESSOR_TIMEOUTS = 3.0
_START_PATIENCE_S = 10.0


async def _nothing(session: Session) -> None:
    """Nothing else runs in the session."""


class Registration:
    """Keeps a node, in a new session whenever one was lost. `value` is asked every second, and written when it changed."""

    def __init__(
        self,
        metadata: MetadataStore,
        path: str,
        value: Callable[[], bytes],
        session_timeout_s: float,
        *,
        name: str,
        taken: str = "another process is registered under this name",
        on_lost: Callable[[], None] = lambda: None,
        in_session: Callable[[Session], Coroutine[Any, Any, None]] = _nothing,
    ) -> None:
        """`name`: of the process, in messages; `taken`: what an operator reads who gave two processes one name.

        `on_lost` is called as soon as it is known that others may see no node. `in_session` runs while the node stands.
        """
        self.registered = asyncio.Event()  # set while the node stands
        self._metadata = metadata
        self._path = path
        self._value = value
        self._timeout_s = session_timeout_s
        self._name = name
        self._taken = taken
        self._on_lost = on_lost
        self._in_session = in_session
        self._failure = "the store does not answer"  # why there is no node yet
        self._wake = asyncio.Event()  # the session is lost, or the node is to say something else
        # The one that the node is of, while it stands.
        self._session: Session | None = None
        self._task: LongTask | None = None

    @property
    def standing(self) -> bool:
        """False when others may see no node: its session was lost, which the clock decides."""
        return self._session is not None and not self._session.lost

    @property
    def session(self) -> Session:
        """To make other nodes with. Raises ServiceNotReady."""
        if self._session is None or self._session.lost:
            raise ServiceNotReady(f"{self._name} has no session with the metadata store; try again")
        return self._session

    async def start(self) -> None:
        """Returns when the node stands. Raises ServiceNotReady after a few session timeouts; nothing is left then."""
        self._task = LongTask(f"the registration of {self._name}", self._keep, retry_max_s=POLL_S)
        seconds = self._timeout_s * _PREDECESSOR_TIMEOUTS + _START_PATIENCE_S
        try:
            async with asyncio.timeout(seconds):
                await self.registered.wait()
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise ServiceNotReady(
                    f"{self._name} could not be registered in the metadata store within {seconds:g} s: {self._failure}"
                ) from None
            raise

    def changed(self) -> None:
        """The node is to say something else: `value` is asked soon."""
        self._wake.set()

    async def close(self) -> None:
        """The node goes, and `on_lost` is not called for it. May be called again."""
        self._session = None
        if self._task is not None:
            await self._task.close()
            self._task = None

    async def _keep(self) -> None:
        while True:
            try:
                session = await self._metadata.open_session(self._timeout_s)
                try:
                    await self._hold(session)
                except AlreadyClosed:  # the session ended while something was asked in it
                    pass
                finally:  # one that cannot be closed ends by its silence; and what is cancelled here stays cancelled
                    with contextlib.suppress(MagnetarError):
                        await session.close()
            except MagnetarError as error:
                self._failure = str(error)
                raise
            _log.warning("%s needs another session with the metadata store", self._name)

    async def _hold(self, session: Session) -> None:
        """Until the session is lost."""
        value = self._value()
        version = await self._make_node(value, session)
        self._session = session
        session.when_lost(lambda: self._lost(session))
        self.registered.set()
        _log.info("%s is registered", self._name)
        beside = begin(self._in_session(session), f"the session of {self._name}")
        try:
            await self._keep_up_to_date(value, version, session)
        finally:
            self._lost(session)  # or it is given up: what is made in it goes
            await end_all([beside])

    async def _make_node(self, value: bytes, session: Session) -> int:
        """Its version. Raises what the store raises; AlreadyClosed when the session is lost."""
        warned = False
        while True:
            try:
                return await self._metadata.create(self._path, value, session=session)
            except AlreadyExists:
                self._failure = self._taken
                if not warned:
                    warned = True
                    _log.warning(
                        "another process is registered at %s: waiting for the end of its session", self._path
                    )
                await asyncio.sleep(min(POLL_S, self._timeout_s / 4))

    async def _keep_up_to_date(self, stored: bytes, version: int, session: Session) -> None:
        """Returns when the session is lost. A node that cannot be written is no reason to give the session up."""
        store, path = self._metadata, self._path
        while not session.lost:
            if (value := self._value()) != stored:
                try:
                    version, stored = await store.put(path, value, version=version), value
                except MagnetarError as error:
                    _log.warning("%s cannot be changed yet: %s", path, error)
                    with contextlib.suppress(MagnetarError):
                        if (node := await store.get(path)) is not None:
                            version, stored = node.version, node.value
            await wait_at_most(self._wake, POLL_S)
            self._wake.clear()

    def _lost(self, session: Session) -> None:
        if self._session is not session:  # it is known
            return
        self._session = None
        self.registered.clear()
        self._wake.set()
        self._on_lost()
