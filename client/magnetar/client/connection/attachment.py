"""Keeps a producer or consumer attached to whichever broker serves its topic.

    attach:  look the topic up, connect (one connection per broker), tell the broker, resume
    lost:    the connection broke, the topic moved or a send failed: attach again, with pauses that grow
    moved:   the broker said where the topic goes: the first attempt is there and without a pause
    gave up: the service says that trying again cannot help

An attempt that is given up on the way sends a close behind its opening, on the same connection, so that the broker keeps no
place for nobody. Pauses start anew once an attachment has held for twice the last pause.

The first attach (`open`) ends with an error after operation_timeout; later ones are tried until they succeed, are refused
for good, or the owner is closed, and once they take longer than operation_timeout one warning says what is waited for.
"""

from __future__ import annotations

import asyncio
import logging
import math
from functools import partial
from typing import Protocol

from magnetar.proto.errors import FinalError, LookupAgainError, MagnetarError, RequestTimeout, RetryableError
from magnetar.runtime.tasks import begin, report
from magnetar.runtime.timeouts import TimeLimit

from .broker_connection import BrokerConnection
from .pool import ConnectionPool
from .retries import backoff, until_answered

log = logging.getLogger("magnetar.client")


class Attached(Protocol):
    """The producer or consumer."""

    async def attach(self, connection: BrokerConnection) -> None:
        """Makes itself known to the broker and resumes. Raises what the broker answered."""
        ...

    def detached(self) -> None:
        """The connection is of no use any more."""
        ...

    def cluster_switched(self) -> None:
        """What it is attached to next is another cluster, where ids of messages mean other messages."""
        ...

    def gave_up(self, error: MagnetarError) -> None:
        """It will not be attached again."""
        ...


class Attachment:
    """See the module's docstring. `what` names the owner in messages."""

    def __init__(self, pool: ConnectionPool, topic: str, owner: Attached, what: str) -> None:
        self._pool = pool
        self._topic = topic
        self._owner = owner
        self._what = what
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._attaching = False
        self._lost_again = False  # lost while attaching, so the attempt counts for nothing
        self._pauses = backoff(pool.options.backoff_first, pool.options.backoff_max, pool.rng)
        self._pause = 0.0  # the last one
        self._attached_at = -math.inf  # loop time
        self._cluster = pool.cluster  # the one that it was attached to last
        self._reason = ""  # why it is not attached

    async def open(self) -> None:
        """Attaches for the first time. Raises the last error when operation_timeout is over or a retry cannot help."""

        async def attempt() -> None:
            if not await self._attach_once():
                raise RetryableError("the connection broke")

        await until_answered(attempt, self._pool.options, self._pool.rng, f"{self._what} was not ready")

    def lost(self, error: BaseException | None) -> None:
        """The attachment does not hold any more; attaches again in the background."""
        if self._closed:
            return
        self._owner.detached()
        self._pool.note_attached(self, False)
        follow = self._pool.moved(self._topic, error)
        if self._attaching:
            self._lost_again = True
            return
        if self._task is not None and not self._task.done():
            return
        loop = asyncio.get_running_loop()
        level = logging.INFO
        if loop.time() - self._attached_at >= 2 * self._pause:
            self._pauses = backoff(
                self._pool.options.backoff_first, self._pool.options.backoff_max, self._pool.rng
            )
        else:
            # The pauses go on growing: whatever broke it, a delivery that is too large perhaps, does so every time.
            level, follow = logging.WARNING, False
        log.log(level, "%s: %s; attaching again", self._what, error or "connection closed")
        self._reason = str(error or "connection closed")
        warning = loop.call_later(self._pool.options.operation_timeout, self._warn)
        ended = partial(self._attaching_ended, warning)
        self._task = begin(self._attach_again(follow), f"attach {self._what}", ended)

    def _attaching_ended(self, warning: asyncio.TimerHandle, task: asyncio.Task[None]) -> None:
        warning.cancel()
        report(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self.give_up(FinalError(f"{self._what} cannot be attached again: {defect!r}"))

    def _warn(self) -> None:
        log.warning(
            "%s: has waited %g s for a broker that serves it, and goes on waiting: %s",
            self._what, self._pool.options.operation_timeout, self._reason,
        )  # fmt: skip

    def give_up(self, error: MagnetarError) -> None:
        """No further attempt: tells the owner."""
        if not self._closed:
            self._closed = True
            self._owner.detached()
            self._pool.note_attached(self, True)
            self._owner.gave_up(error)
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()

    def close(self) -> None:
        """Stops trying. The pool awaits the end of what was under way."""
        self._closed = True
        self._pool.note_attached(self, True)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self._pool.await_end(task)

    async def _attach_once(self) -> bool:
        """Looks up, connects, attaches; False if it was lost again meanwhile.

        A look-up may be held until a failed owner has a successor; attaching has its own time after that.
        """
        self._attaching, self._lost_again = True, False
        try:
            async with self._in_time():
                connection = await self._pool.to_topic(self._topic)
            if self._cluster != self._pool.cluster:
                self._cluster = self._pool.cluster
                self._owner.cluster_switched()
            try:
                async with self._in_time():
                    await self._owner.attach(connection)
            except LookupAgainError as error:
                self._pool.moved(self._topic, error)
                raise
            if self._lost_again or connection.closed:
                self._owner.detached()
                return False
            self._attached_at = asyncio.get_running_loop().time()
            self._pool.note_attached(self, True)
            return True
        finally:
            self._attaching = False

    def _in_time(self) -> TimeLimit:
        seconds = self._pool.options.operation_timeout
        return TimeLimit(seconds, lambda: RequestTimeout(f"no answer within {seconds:g} s"))

    async def _attach_again(self, follow: bool) -> None:
        """`follow`: the first attempt is made at once."""
        while not self._closed:
            self._pause = next(self._pauses)
            if not follow:
                await asyncio.sleep(self._pause)
            follow = False
            try:
                if await self._attach_once():
                    log.info("%s: attached again", self._what)
                    return
            except MagnetarError as error:
                if not error.retryable:
                    log.warning("%s: gave up: %s", self._what, error)
                    self._task = None
                    self.give_up(error)
                    return
                self._reason = str(error)
                log.info("%s: %s; trying again", self._what, error)
