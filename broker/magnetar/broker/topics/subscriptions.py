"""Subscriptions of a topic come, are moved, and go.

    subscribe, create --> find the position (beside others) --> made, one at a time --> attached
    seek              --> find the position --> its epoch rises; durable
    delete            --> refused while others are connected, unless it is forced
    create, delete fails -> it may be there all the same: it is looked for (`recovery`), and nothing is trimmed until then
    the topic ends    --> all are closed, side by side
    refused for them  --> asked whether they are still there; if one is not, once more

A pointer has one writer at any time: the cursor of the subscription, then its deletion, then what makes the next one of its
name. Making and deleting go on to their end, even if whoever asked for it is gone; until then nothing else is changed here,
and the topic does not end. So no cursor meets another one of this broker, and a conflict is always another owner's.

A subscription with `read_compacted` looks at what a compaction left and at what came after, instead of at the whole topic.
Which of the two it looks at changes only while it has no consumers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from magnetar.proto.errors import (
    AlreadyExists,
    ConsumerBusy,
    InvalidArgument,
    MagnetarError,
    SubscriptionNotFound,
)
from magnetar.runtime.tasks import TaskSet, finish
from magnetar.runtime.weak import weak_callback

from ..compaction.topic_compaction import TopicCompaction
from ..compaction.view import CompactedLog
from ..cursors.core.acks import Position
from ..cursors.cursor import Cursor
from ..cursors.recovery import CursorRecovery
from ..dispatch.core.consumer import Consumer, ConsumerPort, Peer
from ..dispatch.core.delay_index import Run
from ..dispatch.core.dispatcher import Delays
from ..dispatch.core.entry_source import DispatchCounters
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.readers import Readers
from ..dispatch.subscription import Sought, Subscribed, SubscribeRequest, Subscription
from ..log.managed_ledger import ManagedLedger
from ..log.positions import Start, skips_trimmed
from ..log.records import cursors_path
from .components import Components
from .limits import TopicLimits
from .probing import probe

_log = logging.getLogger(__name__)

_CURSORS_AT_ONCE = 32  # that are closed
RETURN_S = 60.0  # for which the subscription of a reader that a seek sent away waits for it
T = TypeVar("T")
Find = Callable[[Start], Awaitable[Position]]


class Subscriptions(Mapping[str, Subscription]):
    """Of one topic, by name, but for those whose cursor cannot be read. `load` before use, `close` in the end."""

    def __init__(
        self,
        ledger: ManagedLedger[Any],
        compaction: TopicCompaction,
        readers: Readers,
        dispatched: DispatchCounters,
        components: Components,
        tasks: TaskSet,
        check_served: Callable[[], None],
        delays: Delays,
        limits: TopicLimits,
    ) -> None:
        """`tasks`: work that the topic awaits when it ends. `check_served` raises once it has."""
        self._ledger = ledger
        self._log = ledger.reading
        self._compaction = compaction
        self._readers = readers
        self._dispatched = dispatched
        self._components = components
        self._tasks = tasks
        self._check_served = check_served
        self._delays = delays
        self._limits = limits
        self._by_name: dict[str, Subscription] = {}
        self.recovery = CursorRecovery(
            self._ledger.name,
            self._ledger.list,
            self._ledger.cursor,
            weak_callback(self._attach),
            components.settings,
        )
        self.beginnings: list[
            Position
        ] = []  # of subscriptions that are being made: nothing from there on is trimmed
        self._changing = asyncio.Lock()
        self._reader_number = 0

    def __getitem__(self, name: str) -> Subscription:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    async def load(self) -> None:
        """Recovers the durable cursors; see `cursors.recovery` for when it returns."""
        await self.recovery.run(await self._components.metadata.children(cursors_path(self._ledger.name)))

    def _attach(self, name: str, cursor: Cursor) -> Subscription:
        dispatcher = Dispatcher(
            f"subscription {name!r} of topic {self._ledger.name}",
            self._log,
            cursor,
            self._components.settings,
            self._components.read_budget,
            self._dispatched,
            self._readers,
            self._delays,
            self._components.ownership,
        )
        subscription = Subscription(
            name, self._log, cursor, dispatcher, self._emptied, partition=self._ledger.name.partition
        )
        self._by_name[name] = subscription
        self._limits.apply(subscription)
        return subscription

    def _emptied(self, subscription: Subscription, returns: bool) -> None:
        """The last consumer left; a reader's cursor goes with it, unless it `returns` soon."""
        if returns:
            asyncio.get_running_loop().call_later(RETURN_S, self._emptied, subscription, False)
        elif (
            not subscription.durable
            and not subscription.consumers
            and self._by_name.get(subscription.name) is subscription
        ):
            del self._by_name[subscription.name]
            # Nothing of it waits: its cursor is not durable, so closing is only cancelling a read.
            self._tasks.begin(subscription.delete())

    @property
    def consumers(self) -> list[Consumer]:
        """Those connected, of all subscriptions."""
        return [consumer for subscription in self._by_name.values() for consumer in subscription.consumers]

    def ledgers_changed(self) -> None:
        """The topic's list of ledgers is another one."""
        for subscription in self._by_name.values():
            subscription.ledgers_changed()

    def released(self, runs: list[Run]) -> None:
        """The delivery time of these messages has come."""
        for subscription in list(self._by_name.values()):
            subscription.dispatcher.handle(subscription.dispatcher.core.released, runs)

    def delays_known(self) -> None:
        """From now on it is known which messages wait for their delivery time."""
        for subscription in list(self._by_name.values()):
            subscription.dispatcher.handle(subscription.dispatcher.core.delays_known)

    @property
    def lowest_mark(self) -> Position:
        """Before it every subscription has acknowledged everything; without any, nothing is."""
        return min([one.cursor.state.mark_delete for one in self._by_name.values()], default=(0, 0, 0))

    def restore_cursors(self) -> None:
        """The regular round: cursors leave ledgers for which there are better ones."""
        for subscription in self._by_name.values():
            subscription.cursor.restore()

    async def subscribe(self, asked: SubscribeRequest, port: ConsumerPort) -> Subscribed:
        """Attaches a consumer; makes the subscription at `start` if there is none. Raises ConsumerBusy.

        The request was checked as a whole before anything is made, as the topic may be.
        """
        name, start = asked.subscription, asked.start
        if not name and not asked.durable:
            self._reader_number += 1
            name = f"reader-{self._reader_number}"
        if not self._ledger.name.persistent:
            asked = asked._replace(durable=False, read_compacted=False)  # nothing of it is ever compacted
        self._check(name)
        self._limits.check_type(asked.type)
        compacted: CompactedLog | None = None
        if asked.read_compacted:
            await self._compaction.load()
            compacted = self._compaction.log_of(self._log)
        find = self._log.find if compacted is None else compacted.find
        # Outside of the lock: a time may have to be looked for in archived ledgers, and others go on meanwhile.
        position = None if name in self._by_name else await self._begin(find, start)

        async def attach() -> Subscribed:
            nonlocal position
            self.recovery.check(name)
            subscription = self._by_name.get(name)
            made, trimmed = subscription is None, False
            if subscription is None:
                position = position or await self._begin(find, start)
                trimmed = not asked.read_compacted and skips_trimmed(self._ledger.list, start, position)
                subscription = await self._create(
                    name, position, durable=asked.durable, properties=asked.properties
                )
                if compacted is not None:
                    compacted.begin_at(position, new=start[0] == "earliest")
                    subscription.look_at(compacted)
            elif subscription.durable != asked.durable:
                kind = "durable" if subscription.durable else "not durable"
                raise ConsumerBusy(f"subscription {name!r} exists and is {kind}; choose another name")
            try:
                self._check_served()
                self._limits.check_room("max_consumers", lambda: len(self.consumers))
                self._limits.check_room("max_consumers_per_subscription", subscription.consumers.__len__)
                self._choose_view(subscription, compacted)
                consumer = subscription.add_consumer(port, asked)
            except MagnetarError:
                if made:
                    self._emptied(subscription, False)
                raise
            active = subscription.dispatcher.core.active
            if active not in (None, consumer):  # it is waited for, as it would be if it held a place
                active.port.peer.probe()
            return Subscribed(subscription, consumer, trimmed)

        try:
            return await self._change(name, attach, port.peer)
        finally:
            if position is not None:
                self.beginnings.remove(position)

    async def _begin(self, find: Find, start: Start) -> Position:
        """Where a subscription is to begin; it is among `beginnings` from now on, until the caller takes it out."""
        position = await self._find(find, start)
        self.beginnings.append(position)
        return position

    async def _find(self, find: Find, start: Start) -> Position:
        """No trimming that is under way takes what is there. With the subscription or a beginning at once, none will."""
        while True:
            position = await find(start)
            if await self._ledger.changes.trimming_decided():
                return position

    async def _change(self, name: str, change: Callable[[], Awaitable[T]], newcomer: Peer | None) -> T:
        """One change of a subscription at a time. Raises ConsumerBusy if those who are in its way are still there."""
        while True:
            try:
                async with self._changing:
                    self._check_served()
                    return await change()
            except ConsumerBusy:
                subscription = self._by_name.get(name)
                holders = [] if subscription is None else list(subscription.consumers)
                # Others go on meanwhile, and holders may leave by themselves.
                await probe([holder.port.peer for holder in holders], newcomer)
                if not any(holder.closed for holder in holders):
                    self._check_served()
                    raise

    def _check(self, name: str) -> None:
        self._check_served()
        self.recovery.check(name)

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
            subscription.look_at(self._log)
        else:
            compacted.begin_at(subscription.cursor.state.mark_delete, new=False)
            subscription.look_at(compacted)

    async def create(
        self, name: str, start: Start, properties: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Makes a durable subscription without a consumer; it is durable when this returns. Raises AlreadyExists."""
        position = await self._begin(self._log.find, start)
        try:
            async with self._changing:
                self._check(name)
                if name in self._by_name:
                    raise AlreadyExists(
                        f"topic {self._ledger.name} has a subscription {name!r} already; use it, move it by seeking, "
                        "or delete it first"
                    )
                await self._create(name, position, durable=True, properties=properties)
        finally:
            self.beginnings.remove(position)

    async def _create(
        self, name: str, position: Position, *, durable: bool, properties: Mapping[str, str]
    ) -> Subscription:
        self._check_served()
        self._limits.check_room(
            "max_subscriptions", lambda: len(self._by_name) + len(self.recovery.unavailable)
        )
        if not durable:
            return self._attach(name, self._ledger.cursor(None, position))
        return await self._to_the_end(self._create_durable(name, position, properties))

    async def _create_durable(
        self, name: str, position: Position, properties: Mapping[str, str]
    ) -> Subscription:
        try:
            cursor = await self._stored_cursor(name, position, properties)
        except MagnetarError:
            self._check_served()
            # It may be there all the same, and need what its beginning has held until now.
            self.recovery.begin(name)
            raise
        self._check_served()
        return self._attach(name, cursor)

    async def _stored_cursor(self, name: str, position: Position, properties: Mapping[str, str]) -> Cursor:
        ledger, clock = self._ledger, self._components.clock
        cursor = ledger.cursor(name, position)
        try:
            await cursor.create(clock.now_ms(), properties)
        except AlreadyExists:
            # Made by a call that did not learn of its success (another owner would have fenced us), or deleted in part.
            if not await cursor.recover(ledger.list):
                await cursor.delete()
                cursor = ledger.cursor(name, position)
                await cursor.create(clock.now_ms(), properties)
        return cursor

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits what writes a pointer, as the topic's end does as well, and a caller who is cancelled meanwhile."""
        return await finish(self._tasks.begin(work))

    def existing(self, name: str, *, durable: bool = False) -> Subscription:
        """Raises SubscriptionNotFound, why it cannot be used, or (`durable`) InvalidArgument for a reader's.

        Nothing is durable of a non-persistent topic, where all subscriptions are alike.
        """
        self._check(name)
        found = self._by_name.get(name)
        if found is None:
            raise SubscriptionNotFound(f"topic {self._ledger.name} has no subscription {name!r}")
        if durable and not found.durable and self._ledger.name.persistent:
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
                position = await self._find(self._log.find, start)
                trimmed = skips_trimmed(self._ledger.list, start, position)
                return position
            position = await self._find(compacted.find, start)
            compacted.begin_at(position, new=start[0] == "earliest")
            return position

        return Sought(await subscription.seek(find), trimmed)

    async def delete(self, name: str, *, force: bool = False, by: Consumer | None = None) -> None:
        """Deletes a subscription; refused while other consumers than `by` are connected, unless `force`."""

        async def remove() -> None:
            if name in self.recovery.unavailable:
                await self._to_the_end(self.recovery.delete(name))
                return
            subscription = self.existing(name)
            others = [consumer for consumer in subscription.consumers if consumer is not by]
            if others and not force:
                raise ConsumerBusy(
                    f"subscription {name!r} has {len(others)} connected consumer(s); close them or use force"
                )
            if by is not None:
                subscription.remove_consumer(by)
            self._by_name.pop(name, None)
            await self._to_the_end(self._delete(subscription))

        await self._change(name, remove, None if by is None else by.port.peer)

    async def _delete(self, subscription: Subscription) -> None:
        try:
            await subscription.delete()
        except MagnetarError:
            self._check_served()
            self.recovery.begin(subscription.name)  # it may be there all the same
            raise

    async def close(self, error: MagnetarError, *, fenced: bool) -> list[Consumer]:
        """Closes all cursors, side by side; a defect in one costs itself only. `fenced`: nothing is written.

        Returns the consumers to notify when nothing of the topic is written any more.
        """
        slots = asyncio.Semaphore(_CURSORS_AT_ONCE)

        async def close(subscription: Subscription) -> list[Consumer]:
            async with slots:
                consumers = list(subscription.consumers)
                try:
                    return await subscription.close(error, fenced=fenced)
                except Exception:
                    _log.exception(
                        "topic %s: closing subscription %r failed", self._ledger.name, subscription.name
                    )
                    return consumers  # they are notified all the same: they would wait here for ever

        await self.recovery.stop()
        subscriptions = list(self._by_name.values())
        self._by_name.clear()
        closed = await asyncio.gather(*map(close, subscriptions))
        return [consumer for consumers in closed for consumer in consumers]
