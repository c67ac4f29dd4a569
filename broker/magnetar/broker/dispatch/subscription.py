"""A subscription: a cursor, its consumers, and what they may do.

    no consumers --subscribe--> exclusive or shared, as the first consumer says
    exclusive --subscribe--> ConsumerBusy;  shared --subscribe(shared)--> one more consumer
    last consumer leaves --> no consumers (durable) | gone (a reader's)
    seek --> the epoch rises, dispatch pauses until the cursor's new place is durable
    close, delete --> CLOSED

An acknowledgement must know how many messages its entry has, to tell when it is whole. Usually a delivery told; else (after
a restart) the entry is looked up, in the background, and the receipt comes after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from magnetar.proto.errors import (
    ConsumerBusy,
    InvalidArgument,
    MagnetarError,
    MessageLost,
    StorageFailed,
    SubscriptionNotFound,
    TooManyRequests,
    TopicBusy,
    Unsupported,
)

from ..cursors.core.acks import EntryKey, Position
from ..cursors.cursor import Cursor, DurableCallback
from .consumer import Consumer, ConsumerPort
from .dispatcher import Dispatcher

_log = logging.getLogger(__name__)

AckRange = tuple[int, int, int, int]  # ledger, entry, first index, last index
MAX_LATE_REQUESTS = 10_000


class AckLog(Protocol):
    """What acknowledgement needs of the topic."""

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if the entry exists for consumers."""

    def is_known(self, ledger_id: int) -> bool:
        """False if the ledger was trimmed or is not of this topic."""

    def message_count(self, key: EntryKey) -> int | None:
        """Messages of an entry that is in memory."""

    async def read_message_count(self, key: EntryKey) -> int:
        """Messages of any entry. Raises MessageLost."""


class _Late(NamedTuple):
    """Acknowledgements that wait for a message count."""

    consumer: Consumer
    rows: list[AckRange]
    cumulative: bool
    done: DurableCallback | None


class Subscription:
    """See the module docstring."""

    def __init__(
        self,
        name: str,
        log: AckLog,
        cursor: Cursor,
        dispatcher: Dispatcher,
        on_empty: Callable[[Subscription], None],
    ) -> None:
        self.name = name
        self.cursor = cursor
        self.dispatcher = dispatcher
        self.epoch = 0
        self.type = ""
        self._log = log
        self._on_empty = on_empty
        self._late: deque[_Late] = deque()
        self._late_task: asyncio.Task[None] | None = None
        self._seeking = False
        self._closed: MagnetarError | None = None
        self.acked_messages = 0

    @property
    def durable(self) -> bool:
        """False for a reader's."""
        return self.cursor.durable

    @property
    def consumers(self) -> list[Consumer]:
        """Those connected."""
        return self.dispatcher.consumers

    # --- consumers ---------------------------------------------------------------------------------------------------

    def add_consumer(self, port: ConsumerPort, *, type: str, name: str, epoch: int) -> Consumer:
        """Attaches a consumer. Raises ConsumerBusy, Unsupported; nothing is delivered before `flow`."""
        check_type(type)
        if self._closed is not None:
            raise self._closed
        if self.consumers and (type != self.type or type == "exclusive"):
            raise ConsumerBusy(
                f"subscription {self.name!r} is held by {len(self.consumers)} consumer(s) of type {self.type}; "
                "close them, choose another subscription, or subscribe with type='shared' on all of them"
            )
        self.type = type
        self.dispatcher.set_shared(type == "shared")
        self.epoch = max(self.epoch, epoch)
        consumer = Consumer(name, self.epoch, port)
        self.dispatcher.add(consumer)
        return consumer

    def remove_consumer(self, consumer: Consumer) -> None:
        """A consumer left: what it had not acknowledged goes to others, or to the next one."""
        if consumer.closed:
            return
        self.dispatcher.remove(consumer)
        if not self.consumers:
            self._on_empty(self)

    def flow(self, consumer: Consumer, messages: int, size: int) -> None:
        """Grants permits."""
        consumer.grant(messages, size)
        self.dispatcher.dispatch()

    def wake(self) -> None:
        """A consumer's connection is writable again, or entries were confirmed."""
        self.dispatcher.dispatch()

    # --- acknowledgement ---------------------------------------------------------------------------------------------

    def acknowledge(
        self, consumer: Consumer, rows: list[AckRange], *, cumulative: bool, done: DurableCallback | None
    ) -> None:
        """Acknowledges ranges; `done` comes when the change is durable, or with an error and nothing changed."""
        try:
            unknown = self._check(rows, cumulative)
        except MagnetarError as error:
            if done is None:
                _log.warning("subscription %s: an acknowledgement is refused: %s", self.name, error)
            else:
                done(error)
            return
        if not unknown:
            self._apply(consumer, rows, cumulative, done, {})
        elif len(self._late) >= MAX_LATE_REQUESTS:
            if done is not None:
                done(TooManyRequests("too many acknowledgements wait to be looked up; try again"))
        else:
            self._late.append(_Late(consumer, rows, cumulative, done))
            if self._late_task is None:
                self.dispatcher.pause()
                self._late_task = asyncio.get_running_loop().create_task(self._apply_late())

    def _check(self, rows: list[AckRange], cumulative: bool) -> list[EntryKey]:
        """The entries whose message count is not known. Raises InvalidArgument for what was never delivered."""
        if self._closed is not None:
            raise self._closed
        if self._seeking:
            raise TopicBusy(
                f"subscription {self.name!r} is seeking; what is acknowledged now would be ambiguous"
            )
        if cumulative:
            if self.type == "shared":
                raise InvalidArgument(
                    "a shared subscription cannot acknowledge cumulatively; acknowledge each message"
                )
            if len(rows) != 1:
                raise InvalidArgument(f"a cumulative acknowledgement has one row, not {len(rows)}")
        unknown: list[EntryKey] = []
        log, counts = self._log, self.dispatcher.message_counts
        for ledger, entry, first, last in rows:
            if last < first:
                raise InvalidArgument(f"an acknowledgement of messages {first} to {last} is empty")
            key = (ledger, entry)
            if key in counts:
                continue
            if not log.is_known(ledger):
                continue
            if not log.is_confirmed(ledger, entry):
                raise InvalidArgument(f"message {ledger}:{entry}:{last} was never delivered")
            if key >= self.cursor.state.mark_delete[:2] and log.message_count(key) is None:
                unknown.append(key)
        return unknown

    async def _apply_late(self) -> None:
        try:
            while self._late:
                late = self._late[0]
                error: MagnetarError | None = None
                found: dict[EntryKey, int] = {}
                try:
                    for key in self._check(late.rows, late.cumulative):
                        with contextlib.suppress(MessageLost):  # trimmed: nothing to acknowledge any more
                            found[key] = await self._log.read_message_count(key)
                    self._check(late.rows, late.cumulative)
                except MagnetarError as failure:
                    error = failure
                if self._late and self._late[0] is late:
                    self._late.popleft()
                    if error is None:
                        self._apply(late.consumer, late.rows, late.cumulative, late.done, found)
                    elif late.done is not None:
                        late.done(error)
        except Exception as failure:
            _log.exception("subscription %s: acknowledgements failed", self.name)
            self._fail_late(StorageFailed(f"the acknowledgement failed: {failure!r}"))
        finally:
            self._late_task = None
            self.dispatcher.resume()

    def _fail_late(self, error: MagnetarError) -> None:
        late, self._late = self._late, deque()
        for item in late:
            if item.done is not None:
                item.done(error)

    def _apply(
        self,
        consumer: Consumer,
        rows: list[AckRange],
        cumulative: bool,
        done: DurableCallback | None,
        found: dict[EntryKey, int],
    ) -> None:
        cursor, counts, log = self.cursor, self.dispatcher.message_counts, self._log
        for ledger, entry, first, last in rows:
            key = (ledger, entry)
            count = counts.get(key) or found.get(key) or log.message_count(key)
            if cumulative:
                if log.is_known(ledger):
                    last = last if count is None else min(last, count - 1)
                    cursor.ack_through(ledger, entry, last, count or 0)
                self._settle_through(consumer, ledger, entry, last)
                continue
            if consumer.pending:
                consumer.settle(key, first, last)
            if count is not None:
                self.acked_messages += cursor.ack(ledger, entry, first, last, count)
        cursor.changed(done)
        self.dispatcher.acknowledged()

    def _settle_through(self, consumer: Consumer, ledger: int, entry: int, last: int) -> None:
        for key in [key for key in consumer.pending if key <= (ledger, entry)]:
            consumer.settle(key, 0, last if key == (ledger, entry) else 1 << 32)

    def ledgers_changed(self) -> None:
        """The topic has another ledger: a cursor at the end of the last one moves on to it."""
        self.cursor.state.renormalise()
        self.dispatcher.acknowledged()

    def redeliver(self, consumer: Consumer, rows: Iterable[AckRange]) -> None:
        """Negative acknowledgement; no rows: everything that this consumer holds."""
        given = list(rows)
        if not given:
            self.dispatcher.redeliver_all(consumer)
            return
        for ledger, entry, first, last in given:
            if first <= last < 1 << 32 and self._log.is_confirmed(ledger, entry):
                self.dispatcher.redeliver(consumer, (ledger, entry), first, last)
        self.dispatcher.dispatch()

    # --- seek, end ---------------------------------------------------------------------------------------------------

    async def seek(self, resolve: Callable[[], Awaitable[Position]] | Position) -> int:
        """Moves the cursor; durable when it returns the new epoch, and only then anything is delivered.

        `resolve` is the position, or finds it. Consumers drop what they hold of a lower epoch and grant its permits again.
        Dispatch goes on after the caller has had its turn to answer.
        """
        if self._closed is not None:
            raise self._closed
        if self._seeking:
            raise TopicBusy(f"subscription {self.name!r} is seeking already")
        self._seeking = True
        self.dispatcher.pause()
        try:
            position = resolve if isinstance(resolve, tuple) else await resolve()
            self._fail_late(TopicBusy(f"subscription {self.name!r} was moved"))
            self.cursor.reset(position)
            self.epoch += 1
            for consumer in self.consumers:
                consumer.epoch = self.epoch
            self.dispatcher.restart()
            if self.durable:
                await self.cursor.flush()
            self.dispatcher.acknowledged()
            return self.epoch
        finally:
            self._seeking = False
            asyncio.get_running_loop().call_soon(self.dispatcher.resume)

    async def close(self, error: MagnetarError, *, fenced: bool = False) -> None:
        """Tells the consumers, makes the cursor durable and lets go. `fenced`: nothing is written."""
        await self._stop(error)
        await self.cursor.close(fenced=fenced)

    async def delete(self) -> None:
        """The subscription and its cursor are gone when this returns."""
        await self._stop(SubscriptionNotFound(f"subscription {self.name!r} was deleted"))
        await self.cursor.delete()

    async def _stop(self, error: MagnetarError) -> None:
        self._closed = error
        for consumer in list(self.consumers):
            consumer.closed = True
            consumer.port.consumer_closed(error)
        self.consumers.clear()
        self._fail_late(error)
        if self._late_task is not None:
            self._late_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._late_task
        await self.dispatcher.close()


def check_type(type: str) -> None:
    """Raises Unsupported or InvalidArgument."""
    if type in ("failover", "key_shared"):
        raise Unsupported(f"subscription type {type!r} is not offered yet; use 'exclusive' or 'shared'")
    if type not in ("exclusive", "shared"):
        raise InvalidArgument(f"unknown subscription type {type!r} (want 'exclusive' or 'shared')")
