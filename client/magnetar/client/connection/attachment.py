"""A producer's or consumer's place at whichever broker serves its topic, and each of its endings.

    attach:  look the topic up, connect (one connection per broker), tell the broker, resume
    lost:    the connection broke, the topic moved or a send failed: attach again, with pauses that grow
    moved:   the broker said where the topic goes: the first attempt is there and without a pause
    fail:    the service says that trying again cannot help
    close:   what must be sent is sent, and the broker is told and has answered
    abort:   the broker is told, and nothing is waited for

An attempt that is given up on the way sends a close behind its opening, on the same connection, so that the broker keeps no
place for nobody. Pauses start anew once an attachment has held for twice the last pause.

The first attach (`open`) ends with an error after operation_timeout. Later ones, and the first one of an owner that may wait
for a place, are tried until they succeed, are refused for good, or the owner is closed, and once they take longer than
operation_timeout one warning says what is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from magnetar.proto.commands import CloseConsumer, CloseProducer, Command
from magnetar.proto.errors import (
    AlreadyClosed,
    FinalError,
    InvalidArgument,
    LookupAgainError,
    MagnetarError,
    MessageLost,
    RequestTimeout,
    RetryableError,
    TopicNotServed,
    error_from_wire,
)
from magnetar.runtime.tasks import begin, report
from magnetar.runtime.timeouts import TimeLimit

from ..receipts import copy_of
from .broker_connection import BrokerConnection, Port
from .calls import backoff, until_answered
from .pool import ConnectionPool

log = logging.getLogger("magnetar.client")

_PATIENCE_S = 365 * 24 * 3600.0  # for an answer that comes when there is a place
OF_ANOTHER_CLUSTER = "is about messages of the cluster that this client has left"


class Attached(Protocol):
    """The producer or consumer."""

    def opening(self) -> Command:
        """What makes it known to the broker."""

    @property
    def may_wait(self) -> bool:
        """The broker answers `opening` when there is a place, whenever that is."""

    async def opened(self, connection: BrokerConnection, answer: dict[str, Any]) -> None:
        """The broker has answered that; what has to be there before anything else is sent now."""

    def attached(self) -> None:
        """What is known by the broker now goes on there."""

    def received(self, command: Command, payload: bytes) -> None:
        """A frame of its connection."""

    def writing_resumed(self) -> None:
        """The connection takes more."""

    def detached(self, error: BaseException | None) -> None:
        """Its connection is of no use any more."""

    def cluster_switched(self) -> None:
        """What it is attached to next is another cluster, where ids of messages mean other messages."""

    def failed(self, error: MagnetarError) -> None:
        """It will not be attached again."""

    async def settle(self) -> None:
        """Sends what must be sent before it closes, and waits until that is confirmed."""

    def leaving(self) -> None:
        """It is closed now: what can be sent without waiting is sent."""

    def left(self) -> None:
        """It was closed."""


class Attachment(Port):
    """See the module's docstring. `what` names the owner in messages.

    id: unique in the client; the broker knows the owner by it. connection: None while it is not attached. attached: set
    while there is a connection, and when there never will be again. failure: why it will not be attached again. cluster: see
    ConnectionPool; the one that it was attached to last.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        topic: str,
        id: int,
        what: str,
        owner: Attached,
        closing: type[CloseProducer] | type[CloseConsumer],
        on_closed: Callable[[], object],
    ) -> None:
        self.pool = pool
        self.topic = topic
        self.id = id
        self.what = what
        self.connection: BrokerConnection | None = None
        self._detached_from: BrokerConnection | None = None  # its broker may hold the place still
        self.attached = asyncio.Event()
        self.closed = False
        self.failure: MagnetarError | None = None
        self.cluster = pool.cluster
        self._owner = owner
        self._closing_command = closing(0, id)
        self._on_closed = on_closed
        self._closing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._attaching = False
        self._lost_again = False  # lost while attaching, so the attempt counts for nothing
        self._pauses = backoff(pool.options.backoff_first, pool.options.backoff_max, pool.rng)
        self._pause = 0.0  # the last one
        self._attached_at = -math.inf  # loop time
        self._reason = ""  # why it is not attached

    # --- what its owner asks ---------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """True once it will not be attached again."""
        return self.closed or self.failure is not None

    def check_open(self) -> None:
        """Raises what it failed with, or AlreadyClosed."""
        if self.failure is not None:
            raise copy_of(self.failure)
        if self.closed:
            raise AlreadyClosed(f"{self.what} is closed; open another one")

    async def call(self, command: Command, payload: bytes = b"") -> Any:
        """A request to whichever broker this is attached to, repeated when it is not attached there any more meanwhile.

        Raises what the broker answered, MessageLost if it is attached to another cluster by then, or RequestTimeout
        after operation_timeout.
        """
        pool, cluster = self.pool, self.cluster

        async def ask() -> Any:
            while self.connection is None:
                self.check_open()
                await self.attached.wait()
            if self.cluster != cluster:
                raise MessageLost(f"{self.what}: {type(command).__name__} {OF_ANOTHER_CLUSTER}")
            connection = self.connection
            try:
                return await connection.request(command, pool.options.operation_timeout, payload)
            except InvalidArgument as error:
                if self.connection is connection or self.closed:
                    raise
                # The broker had ended the consumer (its topic moves, or the broker stops) when the request reached it.
                raise TopicNotServed(f"{self.what}: {error.message}") from error

        what = f"{self.what}: {type(command).__name__} did not succeed"
        return await until_answered(ask, pool.options, pool.rng, what)

    async def open(self) -> None:
        """Attaches for the first time. Raises the last error when operation_timeout is over or a retry cannot help.

        An owner that may wait does so until it is attached, refused for good, or closed, and says what it waits for.
        """
        if self._owner.may_wait:
            warning = asyncio.get_running_loop().call_later(self.pool.options.operation_timeout, self._warn)
            try:
                await self._attach_again(follow=True)
            finally:
                warning.cancel()
            self.check_open()
            return

        async def attempt() -> None:
            if not await self._attach_once():
                raise RetryableError("the connection broke")

        await until_answered(attempt, self.pool.options, self.pool.rng, f"{self.what} was not ready")

    def start_over(self, error: BaseException) -> None:
        """Attaches anew, as after a lost connection: the state at the broker is not known."""
        if self.connection is not None:
            self.connection.send(self._closing_command.encode())
        self.lost(error)

    # --- endings ---------------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """In order; can be called again, and while it is aborted. Cancelled, it aborts."""
        async with self._closing:
            if self.closed:
                return
            try:
                await self._owner.settle()
            except MagnetarError:
                await self._leave()
                raise
            except BaseException:
                self.abort()
                raise
            await self._leave()

    def abort(self) -> None:
        """At once."""
        connection = self._end()
        if connection is not None:
            connection.send(self._closing_command.encode())

    def fail(self, error: MagnetarError, *, leave: bool = False) -> None:
        """For good: tells the owner. `leave`: and the broker, which has not ended it."""
        if not self.ended:
            self.failure = error
            connection = self.connection or self._detached_from
            if leave and connection is not None:
                connection.send(self._closing_command.encode())
            self._detach(error)
            self.pool.note_attached(self, True)
            self.attached.set()
            if self._task is not None and self._task is not asyncio.current_task():
                self._task.cancel()
            self._owner.failed(error)

    async def _leave(self) -> None:
        connection = self._end()
        if connection is not None:
            await self.pool.tell_leaving(connection, self._closing_command)

    def _end(self) -> BrokerConnection | None:
        """Everything of closing that needs no waiting; the connection on which to tell the broker, if there is one.

        The pool awaits the end of what was under way.
        """
        if self.closed:
            return None
        self._owner.leaving()
        self.closed = True
        connection = self.connection or self._detached_from
        self.pool.note_attached(self, True)
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            self.pool.await_end(task)
        self._detach(None)
        self.attached.set()
        self._owner.left()
        self._on_closed()
        return connection

    # --- Port ------------------------------------------------------------------------------------------------------------

    def received(self, command: Command, payload: bytes) -> None:
        """A frame for the owner, or the broker has closed it: whether it looks for another place depends on why."""
        if not isinstance(command, CloseProducer | CloseConsumer):
            self._owner.received(command, payload)
            return
        error = error_from_wire(command.code, command.action, command.message)
        error.details["url"] = command.url
        if error.retryable:
            self.lost(error)
        else:
            self.fail(error)

    def writing_resumed(self) -> None:
        """See Attached."""
        self._owner.writing_resumed()

    def lost(self, error: BaseException | None) -> None:
        """The attachment does not hold any more; attaches again in the background."""
        if self.ended:
            return
        self._detach(error)
        self.pool.note_attached(self, False)
        follow = self.pool.moved(self.topic, error)
        if self._attaching:
            self._lost_again = True
            return
        if self._task is not None and not self._task.done():
            return
        loop = asyncio.get_running_loop()
        options = self.pool.options
        level = logging.INFO
        if loop.time() - self._attached_at >= 2 * self._pause:
            self._pauses = backoff(options.backoff_first, options.backoff_max, self.pool.rng)
        else:
            # The pauses go on growing: whatever broke it, a delivery that is too large perhaps, does so every time.
            level, follow = logging.WARNING, False
        log.log(level, "%s: %s; attaching again", self.what, error or "connection closed")
        self._reason = str(error or "connection closed")
        warning = loop.call_later(options.operation_timeout, self._warn)
        ended = partial(self._attaching_ended, warning)
        self._task = begin(self._attach_again(follow), f"attach {self.what}", ended)

    # --- attaching -------------------------------------------------------------------------------------------------------

    def _attaching_ended(self, warning: asyncio.TimerHandle, task: asyncio.Task[None]) -> None:
        warning.cancel()
        report(task)
        if not task.cancelled() and (defect := task.exception()) is not None:
            self.fail(FinalError(f"{self.what} cannot be attached again: {defect!r}"))

    def waits_for(self, reason: str) -> None:
        """The broker says why it does not answer yet."""
        self._reason = reason
        log.info("%s: waits: %s", self.what, reason)

    def _warn(self) -> None:
        log.warning(
            "%s: has waited %g s for %s, and goes on waiting: %s",
            self.what, self.pool.options.operation_timeout,
            "its place" if self._owner.may_wait else "a broker that serves it", self._reason,
        )  # fmt: skip

    def _detach(self, error: BaseException | None) -> None:
        connection, self.connection = self.connection, None
        self.attached.clear()
        if connection is not None:
            self._detached_from = connection
            connection.ports.pop(self.id, None)
            self._owner.detached(error)

    async def _attach_once(self) -> bool:
        """Looks up, connects, attaches; False if it was lost again meanwhile.

        A look-up may be held until a failed owner has a successor; attaching has its own time after that.
        """
        self._attaching, self._lost_again = True, False
        try:
            async with self._in_time():
                connection = await self.pool.to_topic(self.topic)
            if self.cluster != self.pool.cluster:
                self.cluster = self.pool.cluster
                self._owner.cluster_switched()
                self.check_open()  # it may have failed for that
            try:
                async with contextlib.nullcontext() if self._owner.may_wait else self._in_time():
                    await self._attach(connection)
            except LookupAgainError as error:
                self.pool.moved(self.topic, error)
                raise
            if self._lost_again or connection.closed:
                self._detach(None)
                return False
            self._attached_at = asyncio.get_running_loop().time()
            self.pool.note_attached(self, True)
            return True
        finally:
            self._attaching = False

    async def _attach(self, connection: BrokerConnection) -> None:
        """Makes the owner known to the broker. Raises what the broker answered."""
        connection.ports[self.id] = self
        try:
            seconds = _PATIENCE_S if self._owner.may_wait else self.pool.options.operation_timeout
            answer = await connection.request(self._owner.opening(), seconds)
            await self._owner.opened(connection, answer)
        except BaseException as error:
            connection.ports.pop(self.id, None)
            if not isinstance(error, MagnetarError) or error.retryable:
                # The broker may still complete what was given up here: nobody would hold that place.
                connection.send(self._closing_command.encode())
            raise
        self.connection, self._detached_from = connection, None
        self.attached.set()
        self._owner.attached()

    def _in_time(self) -> TimeLimit:
        seconds = self.pool.options.operation_timeout
        return TimeLimit(seconds, lambda: RequestTimeout(f"no answer within {seconds:g} s"))

    async def _attach_again(self, follow: bool) -> None:
        """`follow`: the first attempt is made at once."""
        while not self.ended:
            self._pause = next(self._pauses)
            if not follow:
                await asyncio.sleep(self._pause)
            follow = False
            try:
                if await self._attach_once():
                    log.info("%s: attached again", self.what)
                    return
            except MagnetarError as error:
                if not error.retryable:
                    log.warning("%s: gave up: %s", self.what, error)
                    self._task = None
                    self.fail(error)
                    return
                self._reason = str(error)
                log.info("%s: %s; trying again", self.what, error)
