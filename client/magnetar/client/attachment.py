"""Keeps a producer or consumer attached to whichever broker serves its topic.

    attach: look the topic up, connect (one connection per broker), tell the broker, resume
    lost:   the connection broke, the topic moved or a send failed: attach again, with pauses that grow
    gave up: the service says that trying again cannot help

The first attach (`open`) ends with an error after operation_timeout; later ones are tried until they succeed, are refused
for good, or the owner is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from magnetar.proto.errors import (
    AlreadyExists,
    ConsumerBusy,
    InvalidArgument,
    MagnetarError,
    RequestTimeout,
    VersionConflict,
)

if TYPE_CHECKING:
    from .client import Client
    from .link import Link
    from .options import ClientOptions

T = TypeVar("T")
log = logging.getLogger("magnetar.client")

# After a connection broke the broker may take two ping intervals to notice, and holds the exclusive place till then.
STALE_HOLDER_INTERVALS = 3
# What a broker answers while it still holds the place, or is still opening it. The same call succeeded before.
_STALE_HOLDER_ERRORS = (ConsumerBusy, AlreadyExists, InvalidArgument)


class Attached(Protocol):
    """The producer or consumer."""

    async def attach(self, link: Link) -> None:
        """Makes itself known to the broker behind `link` and resumes. Raises what the broker answered."""
        ...

    def detached(self) -> None:
        """The link is of no use any more."""
        ...

    def gave_up(self, error: MagnetarError) -> None:
        """It will not be attached again."""
        ...


def backoff(first: float, longest: float, rng: random.Random) -> Iterator[float]:
    """Pauses in seconds: almost none, then `first`, doubling up to `longest`; each 20% more or less at random."""
    yield first * 0.2 * rng.random()
    pause = first
    while True:
        yield pause * rng.uniform(0.8, 1.2)
        pause = min(pause * 2, longest)


async def until_answered(
    attempt: Callable[[], Awaitable[T]], options: ClientOptions, rng: random.Random, what: str
) -> T:
    """Repeats `attempt` after retryable errors, with pauses; RequestTimeout when operation_timeout is over.

    `what` names the request in that error.
    """
    pauses = backoff(options.backoff_first, options.backoff_max, rng)
    reason = "no answer"
    try:
        async with asyncio.timeout(options.operation_timeout):
            while True:
                try:
                    return await attempt()
                except MagnetarError as error:
                    if not error.retryable or isinstance(error, VersionConflict):
                        raise
                    reason = error.message
                await asyncio.sleep(next(pauses))
    except TimeoutError:
        raise RequestTimeout(
            f"{what} did not succeed within operation_timeout={options.operation_timeout:g} s: {reason}"
        ) from None


class Attachment:
    """See the module's docstring. `what` names the owner in messages."""

    def __init__(self, client: Client, topic: str, owner: Attached, what: str) -> None:
        self._client = client
        self._topic = topic
        self._owner = owner
        self._what = what
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._attaching = False
        self._pauses = self._new_pauses()
        self._pause = 0.0  # the last one
        self._attached_at = -math.inf  # loop time
        self._lost_again = False  # lost while attaching, so the attempt counts for nothing

    def _new_pauses(self) -> Iterator[float]:
        options = self._client.options
        return backoff(options.backoff_first, options.backoff_max, self._client.rng)

    async def open(self) -> None:
        """Attaches for the first time. Raises the last error when operation_timeout is over or a retry cannot help."""
        options = self._client.options
        last: MagnetarError | None = None
        pauses = self._new_pauses()
        try:
            async with asyncio.timeout(options.operation_timeout):
                while True:
                    try:
                        if await self._attach_once():
                            return
                    except MagnetarError as error:
                        if not error.retryable:
                            raise
                        last = error
                    await asyncio.sleep(next(pauses))
        except TimeoutError:
            reason = f": {last.message}" if last is not None else ""
            raise RequestTimeout(
                f"{self._what} was not ready within operation_timeout={options.operation_timeout:g} s{reason}"
            ) from last

    def lost(self, error: BaseException | None) -> None:
        """The attachment does not hold any more; attaches again in the background."""
        if self._closed:
            return
        self._owner.detached()
        if self._attaching:
            self._lost_again = True
            return
        if self._task is not None and not self._task.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() - self._attached_at > 2 * self._pause:
            self._pauses = self._new_pauses()
        # Else the pauses go on growing: whatever broke it, a delivery that is too large perhaps, does so every time.
        log.info("%s: %s; attaching again", self._what, error or "connection closed")
        self._task = loop.create_task(self._attach_again(), name=f"attach {self._what}")

    def give_up(self, error: MagnetarError) -> None:
        """No further attempt: tells the owner."""
        if not self._closed:
            self._closed = True
            self._owner.detached()
            self._owner.gave_up(error)
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()

    def close(self) -> None:
        """Stops trying. The client awaits the end of what was under way."""
        self._closed = True
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._client.await_end(task)

    async def _attach_once(self) -> bool:
        """Looks up, connects, attaches; False if it was lost again meanwhile."""
        self._attaching, self._lost_again = True, False
        try:
            link = await self._client.link_of_topic(self._topic)
            await self._owner.attach(link)
            if self._lost_again or link.closed:
                self._owner.detached()
                return False
            self._attached_at = asyncio.get_running_loop().time()
            return True
        finally:
            self._attaching = False

    async def _attach_again(self) -> None:
        options = self._client.options
        loop = asyncio.get_running_loop()
        held_until = loop.time() + STALE_HOLDER_INTERVALS * options.ping_interval
        while not self._closed:
            self._pause = next(self._pauses)
            await asyncio.sleep(self._pause)
            try:
                async with asyncio.timeout(options.operation_timeout):
                    if await self._attach_once():
                        log.info("%s: attached again", self._what)
                        return
            except TimeoutError:
                log.info("%s: no answer within %g s", self._what, options.operation_timeout)
            except MagnetarError as error:
                held = isinstance(error, _STALE_HOLDER_ERRORS) and loop.time() < held_until
                if not error.retryable and not held:
                    log.warning("%s: gave up: %s", self._what, error)
                    self._task = None
                    self.give_up(error)
                    return
                log.info("%s: %s; trying again", self._what, error)
