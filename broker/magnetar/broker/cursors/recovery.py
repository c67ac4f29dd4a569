"""Recovers the durable cursors of a topic when it is loaded: several at a time, each at its own cost.

Also one whose creation or deletion failed later: it may be there all the same, and need what would be trimmed.

    RECOVERING --its state was read--> handed to the topic as a subscription
               --the error may pass (a bookie is away)--> tried again after a pause that doubles
               --its metadata is damaged, or it fails for a defect--> REFUSED until the subscription is deleted
               --it was being deleted--> deleted
               --it is not there--> there is no such subscription

The topic is loaded when each cursor was tried once, and after FIRST_TRY_S at the latest. While a cursor is RECOVERING or
REFUSED, whoever asks for its subscription gets the error in `unavailable`, and nothing of the topic may be trimmed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from magnetar.proto.errors import DataDirectoryError, MagnetarError, NotFoundInStore, ServiceNotReady
from magnetar.proto.ids import TopicName
from magnetar.runtime.tasks import begin, end_all

from ..settings import BrokerSettings
from .core.acks import Topology
from .cursor import Cursor

_log = logging.getLogger(__name__)

FIRST_TRY_S = 5.0
CURSORS_AT_ONCE = 16


class CursorRecovery:
    """Of one topic. `run` once, `stop` in the end."""

    def __init__(
        self,
        topic: TopicName,
        topology: Topology,
        open_cursor: Callable[[str], Cursor],
        recovered: Callable[[str, Cursor], Any],
        settings: BrokerSettings,
    ) -> None:
        """`open_cursor` makes the cursor of a subscription, `recovered` takes it once its state was read."""
        self._topic = topic
        self._topology = topology
        self._open_cursor = open_cursor
        self._recovered = recovered
        self._settings = settings
        self._slots = asyncio.Semaphore(CURSORS_AT_ONCE)
        self._cursors: dict[str, Cursor] = {}  # of the same subscriptions as `unavailable`
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stopped = False
        # By subscription: RECOVERING if the error is retryable, else REFUSED.
        self.unavailable: dict[str, MagnetarError] = {}

    async def run(self, subscriptions: Iterable[str]) -> None:
        """Begins to recover the cursors of these subscriptions; see the module docstring for when it returns."""
        tried = [self.begin(name) for name in subscriptions]
        if tried:
            await asyncio.wait(tried, timeout=FIRST_TRY_S)

    def begin(self, subscription: str) -> asyncio.Future[None]:
        """Its cursor is `unavailable` from now on, until it is recovered; the future is done when it was tried once."""
        self.unavailable[subscription] = ServiceNotReady(
            f"{self._name(subscription)} is being recovered; try again"
        )
        self._cursors[subscription] = self._open_cursor(subscription)
        return self._begin(subscription)

    def check(self, subscription: str) -> None:
        """Raises ServiceNotReady or DataDirectoryError if the subscription is there and cannot be used."""
        error = self.unavailable.get(subscription)
        if error is not None:
            raise type(error)(error.message)

    async def delete(self, subscription: str) -> None:
        """Deletes a subscription that is `unavailable`. Raises TopicBusy if its ledger could not be deleted yet.

        When it fails, recovering goes on. Raises ServiceNotReady if the cursor was recovered in the meantime.
        """
        task = self._tasks.pop(subscription, None)
        if task is not None:
            await end_all([task])
        cursor = self._cursors.get(subscription)
        if cursor is None:
            raise ServiceNotReady(f"{self._name(subscription)} was recovered just now; try again")
        try:
            await self._delete(subscription, cursor)
        except MagnetarError:
            if not self._stopped:
                self._begin(subscription)
            raise
        self._forget(subscription)

    async def stop(self) -> None:
        """Nothing is tried any more when this returns."""
        self._stopped = True
        await end_all(self._tasks.values())

    def _begin(self, name: str) -> asyncio.Future[None]:
        """Recovers a cursor in a task; the future is done when it was tried once."""
        tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tasks[name] = begin(self._recover(name, tried), f"recovery of cursor {name}")
        return tried

    # --- one cursor --------------------------------------------------------------------------------------------------

    async def _recover(self, name: str, tried: asyncio.Future[None]) -> None:
        pause_ms = self._settings.retry_initial_ms
        try:
            while not await self._try(name):
                if not tried.done():
                    tried.set_result(None)
                await asyncio.sleep(pause_ms / 1000)
                pause_ms = min(pause_ms * 2, self._settings.retry_max_ms)
        finally:
            if not tried.done():
                tried.set_result(None)

    async def _try(self, name: str) -> bool:
        """True if there is nothing left to do."""
        cursor = self._cursors[name]
        try:
            async with self._slots:
                recovered = await cursor.recover(self._topology)
                if not recovered:
                    await self._delete(name, cursor)
                self._forget(name)
                if recovered:
                    self._recovered(name, cursor)
        except NotFoundInStore:
            self._forget(name)
            return True
        except DataDirectoryError as error:
            self.unavailable[name] = DataDirectoryError(
                f"{self._name(name)} cannot be read, {error}; delete the subscription and create it again"
            )
        except MagnetarError as error:
            self.unavailable[name] = ServiceNotReady(
                f"{self._name(name)} cannot be read yet, and is tried again; if that does not help, delete the "
                f"subscription and create it again: {error}"
            )
        except Exception as error:  # a defect in one cursor must not cost the topic
            _log.exception("%s: recovering its cursor failed", self._name(name))
            self.unavailable[name] = DataDirectoryError(f"{self._name(name)} cannot be recovered: {error!r}")
        else:
            return True
        _log.warning("%s", self.unavailable[name])
        return not self.unavailable[name].retryable

    async def _delete(self, name: str, cursor: Cursor) -> None:
        try:
            await cursor.delete()
        except NotFoundInStore:
            pass
        except BaseException:  # what was done of it is not known, and it has ended: the next one looks
            self._cursors[name] = self._open_cursor(name)
            raise

    def _name(self, subscription: str) -> str:
        return f"subscription {subscription!r} of topic {self._topic}"

    def _forget(self, name: str) -> None:
        self.unavailable.pop(name, None)
        self._cursors.pop(name, None)
        self._tasks.pop(name, None)
