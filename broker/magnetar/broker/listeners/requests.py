"""What the client of a connection asked for: a task each, bounded, cancelled with the connection; how errors reach it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from magnetar.proto.errors import (
    DiskFull,
    MagnetarError,
    ServiceNotReady,
    StorageFailed,
    TooManyRequests,
    TopicNotServed,
)
from magnetar.runtime.tasks import TaskSet

from ..service.broker import BrokerService

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Requests:
    """Of one connection."""

    def __init__(self, service: BrokerService) -> None:
        self._service = service
        self._tasks = TaskSet("request of a client")
        self.cancel = self._tasks.cancel

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the connection."""
        return self._tasks.begin(work)

    def check_busy(self) -> None:
        """Raises TooManyRequests."""
        if len(self._tasks) >= self._service.settings.max_requests_per_connection:
            raise TooManyRequests(
                f"{len(self._tasks)} requests of this connection are being worked on; wait for some of them"
            )

    def ask(
        self,
        work: Callable[[], Awaitable[T]],
        answer: Callable[[T], None],
        refuse: Callable[[MagnetarError], None],
    ) -> None:
        """Gives one of the two what `work` returned or raised, an error as clients are told it."""
        try:
            self.check_busy()
        except TooManyRequests as error:
            refuse(error)
        else:
            self.begin(self._run(work, answer, refuse))

    async def _run(
        self,
        work: Callable[[], Awaitable[T]],
        answer: Callable[[T], None],
        refuse: Callable[[MagnetarError], None],
    ) -> None:
        try:
            result = await work()
            self.check_owner()
            answer(result)
        except MagnetarError as error:
            refuse(for_client(error))
        except Exception as error:
            _log.exception("a request failed")
            refuse(ServiceNotReady(f"the request failed here: {error!r}"))

    def check_owner(self) -> None:
        """What was done may have been done, and is not confirmed while this raises TopicNotServed: rule 31."""
        if not self._service.valid:
            raise TopicNotServed("this broker may not be the owner of its topics any more; look the topic up")

    def confirmed(
        self, answer: Callable[[], None], refuse: Callable[[MagnetarError], None]
    ) -> Callable[[MagnetarError | None], None]:
        """For what calls back with an error or None: answers as `ask`."""

        def done(error: MagnetarError | None) -> None:
            try:
                if error is not None:
                    raise error
                self.check_owner()
            except MagnetarError as failure:
                refuse(for_client(failure))
            else:
                answer()

        return done


def for_client(error: MagnetarError) -> MagnetarError:
    """The error for a client: a broken disk is final for this process, which stops, and not for whoever asks again.

    Otherwise a consumer that subscribes anew in just that moment would be closed for good.
    """
    if isinstance(error, StorageFailed) and not isinstance(error, DiskFull):
        return ServiceNotReady(f"the service is stopping because its storage failed: {error.message}")
    return error
