"""Subscriptions of a topic come, are moved, and go.

    subscribe, create --> find the position (beside others) --> made, one at a time --> attached
    seek              --> find the position --> its epoch rises; durable
    delete            --> refused while others are connected, unless it is forced
    refused for them  --> asked whether they are still there; if one is not, once more

A subscription with `read_compacted` looks at what a compaction left and at what came after, instead of at the whole topic.
Which of the two it looks at changes only while it has no consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

from magnetar.proto.errors import AlreadyExists, ConsumerBusy, InvalidArgument, SubscriptionNotFound
from magnetar.proto.ids import TopicName
from magnetar.runtime.clock import Clock

from ..compaction.topic_compaction import TopicCompaction
from ..compaction.view import CompactedLog, WholeTopic
from ..cursors.core.acks import Position
from ..cursors.cursor import Cursor
from ..cursors.recovery import CursorRecovery
from ..dispatch.core.consumer import Consumer, ConsumerPort, Peer
from ..dispatch.subscription import Sought, Subscribed, SubscribeRequest, Subscription
from ..log.managed_ledger import ManagedLedger
from ..log.positions import Start, skips_trimmed
from .probing import probe

T = TypeVar("T")


class SubscribedTopic(WholeTopic, Protocol):
    """What subscriptions need of their topic."""

    name: TopicName
    subscriptions: dict[str, Subscription]
    recovery: CursorRecovery
    ledger: ManagedLedger[Any]
    compaction: TopicCompaction

    def check_served(self) -> None:
        """Raises if the topic is not served here any more."""

    def attach(self, name: str, cursor: Cursor) -> Subscription:
        """A subscription of the topic with this cursor."""

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Work that the topic awaits when it is closed."""


class Subscribing:
    """Of one topic."""

    def __init__(self, topic: SubscribedTopic, clock: Clock) -> None:
        self._topic = topic
        self._clock = clock
        self._changing = asyncio.Lock()
        self._reader_number = 0

    async def subscribe(self, asked: SubscribeRequest, port: ConsumerPort) -> Subscribed:
        """Attaches a consumer; makes the subscription at `start` if there is none. Raises ConsumerBusy.

        The request was checked as a whole before anything is made, as the topic may be.
        """
        topic, name, start = self._topic, asked.subscription, asked.start
        if not name and not asked.durable:
            self._reader_number += 1
            name = f"reader-{self._reader_number}"
        self._check(name)
        compacted: CompactedLog | None = None
        if asked.read_compacted:
            await topic.compaction.load()
            compacted = topic.compaction.log_of(topic)
        find = topic.find if compacted is None else compacted.find
        # Outside of the lock: a time may have to be looked for in archived ledgers, and others go on meanwhile.
        position = None if name in topic.subscriptions else await find(start)

        async def attach() -> Subscribed:
            nonlocal position
            self._check(name)
            subscription = topic.subscriptions.get(name)
            trimmed = False
            if subscription is None:
                position = position or await find(start)
                trimmed = not asked.read_compacted and skips_trimmed(topic.ledger.list, start, position)
                subscription = await self._create(name, position, durable=asked.durable)
                if compacted is not None:
                    compacted.begin_at(position, new=start[0] == "earliest")
                    subscription.read_compacted_from(compacted)
            elif subscription.durable != asked.durable:
                kind = "durable" if subscription.durable else "not durable"
                raise ConsumerBusy(f"subscription {name!r} exists and is {kind}; choose another name")
            topic.check_served()
            self._choose_view(subscription, compacted)
            consumer = subscription.add_consumer(port, asked)
            active = subscription.dispatcher.core.active
            if active not in (None, consumer):  # it is waited for, as it would be if it held a place
                active.port.peer.probe()
            return Subscribed(subscription, consumer, trimmed)

        return await self._change(name, attach, port.peer)

    async def _change(self, name: str, change: Callable[[], Awaitable[T]], newcomer: Peer | None) -> T:
        """One change of a subscription at a time. Raises ConsumerBusy if those who are in its way are still there."""
        while True:
            try:
                async with self._changing:
                    return await change()
            except ConsumerBusy:
                subscription = self._topic.subscriptions.get(name)
                holders = [] if subscription is None else list(subscription.consumers)
                # Others go on meanwhile, and holders may leave by themselves.
                await probe([holder.port.peer for holder in holders], newcomer)
                if not any(holder.closed for holder in holders):
                    self._topic.check_served()
                    raise

    def _check(self, name: str) -> None:
        self._topic.check_served()
        self._topic.recovery.check(name)

    def _choose_view(self, subscription: Subscription, compacted: CompactedLog | None) -> None:
        """What a subscription looks at from now on. Raises ConsumerBusy if its consumers look at another thing."""
        if subscription.read_compacted == (compacted is not None):
            return
        if subscription.consumers:
            raise ConsumerBusy(
                f"subscription {subscription.name!r} has consumers with read_compacted={subscription.read_compacted}; "
                "all of its consumers must have the same"
            )
        if compacted is None:
            subscription.read_all_from(self._topic)
        else:
            compacted.begin_at(subscription.cursor.state.mark_delete, new=False)
            subscription.read_compacted_from(compacted)

    async def create(self, name: str, start: Start) -> None:
        """Makes a durable subscription without a consumer; it is durable when this returns. Raises AlreadyExists."""
        position = await self._topic.find(start)
        async with self._changing:
            self._check(name)
            if name in self._topic.subscriptions:
                raise AlreadyExists(
                    f"topic {self._topic.name} has a subscription {name!r} already; use it, move it by seeking, "
                    "or delete it first"
                )
            await self._create(name, position, durable=True)

    async def _create(self, name: str, position: Position, *, durable: bool) -> Subscription:
        ledger = self._topic.ledger
        cursor = ledger.cursor(name if durable else None, position)
        try:
            await cursor.create(self._clock.now_ms())
        except AlreadyExists:
            # Made by a call that was cancelled before it learned of its success (another owner would have fenced us),
            # or deleted in part.
            if not await cursor.recover(ledger.list):
                await cursor.delete()
                cursor = ledger.cursor(name if durable else None, position)
                await cursor.create(self._clock.now_ms())
        return self._topic.attach(name, cursor)

    def get(self, name: str, *, durable: bool = False) -> Subscription:
        """Raises SubscriptionNotFound, why it cannot be used, or (`durable`) InvalidArgument for a reader's."""
        self._check(name)
        found = self._topic.subscriptions.get(name)
        if found is None:
            raise SubscriptionNotFound(f"topic {self._topic.name} has no subscription {name!r}")
        if durable and not found.durable:
            raise InvalidArgument(
                f"subscription {name!r} is not durable: its consumer keeps its place, and it ends with that; seek there"
            )
        return found

    async def seek(self, subscription: Subscription, start: Start) -> Sought:
        """Moves the subscription; durable when it returns."""
        trimmed = False

        async def find() -> Position:
            nonlocal trimmed
            compacted = subscription.compacted
            if compacted is None:
                position = await self._topic.find(start)
                trimmed = skips_trimmed(self._topic.ledger.list, start, position)
                return position
            position = await compacted.find(start)
            compacted.begin_at(position, new=start[0] == "earliest")
            return position

        return Sought(await subscription.seek(find), trimmed)

    async def delete(self, name: str, *, force: bool = False, by: Consumer | None = None) -> None:
        """Deletes a subscription; refused while other consumers than `by` are connected, unless `force`."""
        topic = self._topic

        async def remove() -> None:
            if name in topic.recovery.unavailable:
                await asyncio.shield(topic.in_background(topic.recovery.delete(name)))
                return
            subscription = self.get(name)
            others = [consumer for consumer in subscription.consumers if consumer is not by]
            if others and not force:
                raise ConsumerBusy(
                    f"subscription {name!r} has {len(others)} connected consumer(s); close them or use force"
                )
            if by is not None:
                subscription.remove_consumer(by)
            topic.subscriptions.pop(name, None)
            # Goes on to its end when the caller's connection breaks.
            await asyncio.shield(topic.in_background(subscription.delete()))

        await self._change(name, remove, None if by is None else by.port.peer)
