"""A bookie in the shared metadata: an ephemeral node that says where it is, and goes when the process does.

/bookies/<bookie id>    `ledger.directory.encode_registration`; a bookie whose session was lost registers again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from magnetar.metadata import MetadataStore, Session
from magnetar.metadata.ephemeral import POLL_S, create_after_predecessor, keep_up_to_date, start_limit_s
from magnetar.proto.errors import RequestTimeout
from magnetar.runtime.tasks import LongTask

_log = logging.getLogger(__name__)


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
        # The one that the node is of, while it stands.
        self._session: Session | None = None
        self._task: LongTask | None = None

    @property
    def standing(self) -> bool:
        """False when others may see no node: its session was lost, which the clock decides."""
        return self._session is not None and not self._session.lost

    async def start(self) -> None:
        """Returns when the node stands. RequestTimeout; nothing is left then."""
        self._task = LongTask(f"the registration {self._path}", self._keep, retry_max_s=POLL_S)
        seconds = start_limit_s(self._timeout_s)
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
            await self._task.close()
            self._task = None

    async def _keep(self) -> None:
        while True:
            session = await self._metadata.open_session(self._timeout_s)
            try:
                await self._hold(session)
            finally:
                self._session = None
                await session.close()
            _log.warning("the session of %s was lost; it is registered again", self._path)

    async def _hold(self, session: Session) -> None:
        """Until the session is lost."""
        lost = asyncio.Event()
        session.when_lost(lost.set)
        store, path, value = self._metadata, self._path, self._value()
        version = await create_after_predecessor(store, path, value, session, self._timeout_s)
        self._session = session
        self._registered.set()
        await keep_up_to_date(store, path, self._value, value, version, session, lost)
