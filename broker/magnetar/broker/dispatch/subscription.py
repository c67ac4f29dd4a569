"""A subscription: a cursor, its consumers, and what they may do.

    no consumers --subscribe--> exclusive, failover, shared or key_shared, as the first consumer says
    exclusive, or another type --subscribe--> ConsumerBusy;  the same type --subscribe--> one more consumer
    last consumer leaves --> no consumers (durable) | deleted (a reader's)
    seek --> the epoch rises, dispatch pauses until the cursor's new place is durable
    skip --> acknowledged, whoever holds it; dispatch goes on
    close, delete --> CLOSED

An acknowledgement must know how many messages its entry has, to tell when it is whole. Usually a delivery has shown it; else
(after a restart, or if more is pending than is remembered) the entry is looked up, in the background, and the receipt comes
after that. Dispatch goes on meanwhile, unless what is acknowledged could be delivered again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from magnetar.proto.errors import (
    ConsumerBusy,
    InvalidArgument,
    MagnetarError,
    MessageLost,
    StorageFailed,
    SubscriptionNotFound,
    TooManyRequests,
    TopicBusy,
)
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY, NO_PARTITION, check_subscription_name
from magnetar.proto.ranges import Range
from magnetar.runtime.tasks import begin

from ..compaction.view import CompactedAcks, CompactedLog
from ..cursors.core.acks import AckRange, EntryKey, Position, by_entry
from ..cursors.cursor import Cursor, DurableCallback
from ..log.positions import Start, check_start
from ..log.reading import LedgerReading
from ..log.records import LedgerInfo
from ..resources.moving_rates import MovingRates
from .core.consumer import Consumer, ConsumerPort
from .core.entry_source import NOT_RECOVERABLE
from .core.instructions import Pause, Stop
from .core.lost_consumers import LostConsumers
from .core.selection import SELECTORS
from .core.selection.hash_ranges import check_hash_ranges
from .dispatcher import Dispatcher, TopicLog

_log = logging.getLogger(__name__)

# Acknowledgements that wait for a lookup: rows, over all requests.
MAX_LOOKUP_ROWS = 100_000
LOOKUPS_AT_ONCE = 32  # entries
MAX_EPOCH = 1 << 62
MAX_PRIORITY_LEVEL = 1_000
MAX_PROPERTIES = 10_000  # letters: they are written with every ledger
MAX_CONSUMER_NAME_CHARS = 255
# So often a message comes back, or is the first in hand of a lost consumer, before it is named.
POISON_REDELIVERIES = 5
# First and last index of an acknowledgement that passes an entry, though it cannot be read.
WHOLE_ENTRY = (0, MAX_MESSAGES_PER_ENTRY - 1)


class _Lookup(NamedTuple):
    """An acknowledgement that waits for a message count."""

    consumer: Consumer
    rows: list[AckRange]
    cumulative: bool
    done: DurableCallback | None


class SubscribeRequest(NamedTuple):
    """What whoever subscribes asks for; `check` it as a whole before anything is made."""

    subscription: str
    type: str = "exclusive"
    start: Start = ("latest", None)  # of a subscription that is made for it
    durable: bool = True
    name: str = ""  # of the consumer
    epoch: int = 0
    priority_level: int = 0
    hash_ranges: Sequence[Range] = ()
    create: bool = True  # the topic, if there is none and settings allow it
    # Of what was compacted it gets what is left; for types where one consumer gets everything in order.
    read_compacted: bool = False
    properties: Mapping[str, str] = MappingProxyType({})  # of a subscription that is made for it

    def check(self) -> None:
        """Raises InvalidArgument for what no subscription takes, whatever it has."""
        if not 0 <= self.epoch < MAX_EPOCH:
            raise InvalidArgument(f"a consumer epoch of {self.epoch} is not allowed")
        if len(self.name) > MAX_CONSUMER_NAME_CHARS:
            raise InvalidArgument(f"a consumer name has at most {MAX_CONSUMER_NAME_CHARS} characters")
        if not 0 <= self.priority_level <= MAX_PRIORITY_LEVEL:
            raise InvalidArgument(
                f"a priority level of {self.priority_level} is not allowed; want 0, the highest, to {MAX_PRIORITY_LEVEL}"
            )
        if self.type not in SELECTORS:
            raise InvalidArgument(
                f"unknown subscription type {self.type!r} (want {' or '.join(map(repr, SELECTORS))})"
            )
        if self.read_compacted and SELECTORS[self.type].individual_acks:
            raise InvalidArgument(
                f"read_compacted is for exclusive and failover subscriptions and for readers, not for a {self.type} one"
            )
        if self.hash_ranges and not SELECTORS[self.type].hash_ranges:
            raise InvalidArgument(
                f"hash_ranges are for key_shared and exclusive subscriptions, not for a {self.type} one"
            )
        check_hash_ranges(self.hash_ranges, ())
        check_properties(self.properties)
        if self.subscription or self.durable:
            check_subscription_name(self.subscription)
        check_start(self.start)


def check_properties(properties: Mapping[str, str]) -> None:
    """Raises InvalidArgument for more than a topic or a subscription may have."""
    if (letters := sum(map(len, (*properties, *properties.values())))) > MAX_PROPERTIES:
        raise InvalidArgument(f"the properties have {letters} letters; at most {MAX_PROPERTIES} are allowed")


class Subscribed(NamedTuple):
    """A consumer of a subscription."""

    subscription: Subscription
    consumer: Consumer
    # It was made for this consumer, and messages between the id that was asked for and where it begins were trimmed.
    trimmed: bool


class Sought(NamedTuple):
    """A subscription was moved."""

    epoch: int
    trimmed: bool  # as in Subscribed


class Subscription:
    """See the module docstring."""

    def __init__(
        self,
        name: str,
        log: TopicLog,
        cursor: Cursor,
        dispatcher: Dispatcher,
        on_empty: Callable[[Subscription, bool], None],
        *,
        partition: int = NO_PARTITION,
    ) -> None:
        """`on_empty`: the last consumer left; it comes again, or not. `partition`: which the topic is."""
        self.name = name
        self._partition = partition
        self.cursor = cursor
        self.dispatcher = dispatcher
        self._core = dispatcher.core
        self.epoch = 0
        self.type = ""
        self._log = log
        self.compacted: CompactedLog | None = None  # the same, of a `read_compacted` subscription
        self._on_empty = on_empty
        self._lookups: list[_Lookup] = []
        self._lookup_rows = 0  # of all of them
        self._lookup_task: asyncio.Task[None] | None = None
        self._dropped_acks = 0  # requests without a receipt, since the last lookup ended
        self._seeking = False
        self._lost_consumers = LostConsumers()
        self._closed: MagnetarError | None = None
        self.acked_messages = 0
        self.rates = MovingRates(4)  # messages and bytes out, redelivered, acknowledged
        self._marks = MovingRates(3)
        self.dropped_messages = 0  # of a non-persistent topic: they left before they were delivered

    @property
    def durable(self) -> bool:
        """False for a reader's."""
        return self.cursor.durable

    @property
    def consumers(self) -> list[Consumer]:
        """Those connected."""
        return self._core.consumers

    def trouble(self) -> str:
        """Why its consumers do not get on: an entry that cannot be read, or a message that comes back all the time."""
        for (ledger, entry), failure in self._core.source.unreadable.items():
            return f"entry {ledger}:{entry} cannot be read: {failure.error}"
        if self._core.stop is Stop.DELAYS and self.consumers:
            return "which messages wait for their delivery time is not known: that is still being read"
        count, (ledger, entry), index = self.cursor.redeliveries.most(self.cursor.state.mark_delete)
        if count >= POISON_REDELIVERIES:
            return (
                f"message {ledger}:{entry}:{index} came back {count} times and is not acknowledged: do its consumers nack "
                "it, time out, or end? a dead-letter policy, or `magnetar subscriptions skip`, gets it out of the way"
            )
        lost, (ledger, entry, index) = self._lost_consumers.worst(self.cursor.state, self.dispatcher.now_ms())
        if lost >= POISON_REDELIVERIES:
            return (
                f"the connections of {lost} consumers were lost one after another, each with message "
                f"{ledger}:{entry}:{index} first, which is not acknowledged: does it, or one behind it, end them?"
            )
        return ""

    def is_to_come(self, end: Position, but: Consumer | None) -> bool:
        """See `DispatchCore.is_to_come`."""
        return self._seeking or self._core.is_to_come(end, but)

    # --- consumers ---------------------------------------------------------------------------------------------------

    @property
    def read_compacted(self) -> bool:
        """True if it gets what compactions left, and then the tail."""
        return self.compacted is not None

    def look_at(self, log: LedgerReading | CompactedLog) -> None:
        """While there are no consumers: it sees the topic like this from now on, and its cursor follows."""
        state = self.cursor.state
        self._log = log
        self.compacted = log if isinstance(log, CompactedLog) else None
        self.cursor.follow(log)
        self.dispatcher.look_at(
            log, state if self.compacted is None else CompactedAcks(self.compacted, state)
        )

    def add_consumer(self, port: ConsumerPort, asked: SubscribeRequest) -> Consumer:
        """Attaches a consumer. Raises ConsumerBusy; nothing is delivered before `flow`."""
        if self._closed is not None:
            raise self._closed
        type = asked.type
        if self.consumers and (type != self.type or not SELECTORS[type].several):
            raise ConsumerBusy(
                f"subscription {self.name!r} is held by {len(self.consumers)} consumer(s) of type {self.type}; "
                "close them, choose another subscription, or subscribe with type='shared' on all of them"
            )
        if SELECTORS[type].hash_ranges:
            check_hash_ranges(asked.hash_ranges, self.consumers)
        self.type = type
        self.epoch = max(self.epoch, asked.epoch)
        consumer = Consumer(
            asked.name,
            self.epoch,
            port,
            priority_level=asked.priority_level,
            partition=self._partition,
            hash_ranges=sorted(asked.hash_ranges),
        )
        self._hold_back()  # it may take over
        self.dispatcher.handle(self._core.added, consumer, type, self.dispatcher.now_ms())
        return consumer

    def remove_consumer(self, consumer: Consumer, *, lost: bool = False, returns: bool = False) -> None:
        """A consumer left: what it had not acknowledged goes to others, or to the next one.

        `lost`: with its connection. `returns`: it is about to subscribe again, and finds the subscription where it is.
        """
        if consumer.closed:
            return
        if lost and (first := self._core.first_owed(consumer)) is not None:
            self._lost_consumers.lost(first, self.dispatcher.now_ms())
        self._hold_back()
        self.dispatcher.handle(self._core.left, consumer)
        if not self.consumers:
            self._on_empty(self, returns)

    def flow(self, consumer: Consumer, messages: int, size: int) -> None:
        """Grants permits."""
        self.dispatcher.handle(self._core.granted, consumer, messages, size)

    def writable(self, consumer: Consumer) -> None:
        """The consumer's connection is writable again."""
        self.dispatcher.handle(self._core.writable, consumer)

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
        elif self._lookups and self._lookup_rows + len(rows) > MAX_LOOKUP_ROWS:
            if done is not None:
                done(TooManyRequests("too many acknowledgements wait to be looked up; try again"))
                return
            if not self._dropped_acks:
                _log.warning(
                    "subscription %s: %d acknowledged ranges wait to be looked up; more are dropped until there is room, "
                    "and what they name is delivered again",
                    self.name,
                    self._lookup_rows,
                )
            self._dropped_acks += 1
        else:
            self._lookups.append(_Lookup(consumer, rows, cumulative, done))
            self._lookup_rows += len(rows)
            replay, position = self._core.tracker.replay, self._core.read_position[:2]
            if (cumulative and replay) or any(key >= position or key in replay for key in unknown):
                self._hold_back()
            if self._lookup_task is None:
                self._lookup_task = begin(self._look_up(), f"acknowledgements of {self.name}")

    def _hold_back(self) -> None:
        """What is acknowledged and waits to be looked up must not be delivered again."""
        if self._lookups:
            self.dispatcher.handle(self._core.pause, Pause.ACK_LOOKUP)

    def _check(self, rows: list[AckRange], cumulative: bool) -> dict[EntryKey, None]:
        """The entries whose message count is not known. Raises InvalidArgument for what was never delivered."""
        if self._closed is not None:
            raise self._closed
        if self._seeking:
            raise TopicBusy(
                f"subscription {self.name!r} is seeking; what is acknowledged now would be ambiguous"
            )
        if cumulative:
            if self.type and SELECTORS[self.type].individual_acks:
                raise InvalidArgument(
                    f"a {self.type} subscription cannot acknowledge cumulatively; acknowledge each message"
                )
            if len(rows) != 1:
                raise InvalidArgument(f"a cumulative acknowledgement has one row, not {len(rows)}")
        unknown: dict[EntryKey, None] = {}
        log, counts = self._log, self._core.message_counts
        known: EntryKey | None = None
        for ledger, entry, _, last in _checked(rows):
            key = (ledger, entry)
            if key == known:
                continue
            if key in counts:
                known = key
                continue
            if not log.is_known(ledger):
                continue
            if not log.is_confirmed(ledger, entry):
                raise InvalidArgument(f"message {ledger}:{entry}:{last} was never delivered")
            if key >= self.cursor.state.mark_delete[:2] and log.message_count(key) is None:
                unknown[key] = None
        return unknown

    async def _look_up(self) -> None:
        try:
            while self._lookups:
                wanted = self._lookups[0]
                error: MagnetarError | None = None
                found: dict[EntryKey, int] = {}
                try:
                    # What was known at first may be forgotten meanwhile.
                    while missing := [
                        key for key in self._check(wanted.rows, wanted.cumulative) if key not in found
                    ]:
                        for start in range(0, len(missing), LOOKUPS_AT_ONCE):
                            part = missing[start : start + LOOKUPS_AT_ONCE]
                            counting = [self._find_count(key, wanted.rows) for key in part]
                            counts = await asyncio.gather(*counting, return_exceptions=True)
                            for key, count in zip(part, counts):
                                if isinstance(count, BaseException):
                                    raise count
                                found[key] = count
                except MagnetarError as failure:
                    error = failure
                if self._lookups and self._lookups[0] is wanted:
                    del self._lookups[0]
                    self._lookup_rows -= len(wanted.rows)
                    if error is None:
                        self._apply(wanted.consumer, wanted.rows, wanted.cumulative, wanted.done, found)
                    elif wanted.done is not None:
                        wanted.done(error)
                    else:
                        _log.warning("subscription %s: an acknowledgement is refused: %s", self.name, error)
        except Exception as failure:
            _log.exception("subscription %s: acknowledgements failed", self.name)
            self._fail_lookups(StorageFailed(f"the acknowledgement failed: {failure!r}"))
        finally:
            self._lookup_task = None
            if self._dropped_acks:
                _log.warning(
                    "subscription %s: %d acknowledgements were dropped", self.name, self._dropped_acks
                )
                self._dropped_acks = 0
            self.dispatcher.handle(self._core.resume, Pause.ACK_LOOKUP)

    async def _find_count(self, key: EntryKey, rows: list[AckRange]) -> int:
        """Messages of an entry that is acknowledged by `rows`; 0: it was trimmed."""
        try:
            return await self._log.read_message_count(key)
        except NOT_RECOVERABLE as damage:
            if (*key, *WHOLE_ENTRY) in rows and self._log.is_confirmed(*key):
                if self.cursor.state.skip_whole(*key) == key[1]:
                    self.dispatcher.skipped(*key, damage)
                return MAX_MESSAGES_PER_ENTRY
            if not isinstance(damage, MessageLost):
                raise
            return 0

    def _fail_lookups(self, error: MagnetarError) -> None:
        lookups, self._lookups = self._lookups, []
        self._lookup_rows = 0
        if self.durable or self._closed is None:  # a reader's ends with it: nothing comes again
            self._dropped_acks += sum(wanted.done is None for wanted in lookups)
        for wanted in lookups:
            if wanted.done is not None:
                wanted.done(error)

    def _apply(
        self,
        consumer: Consumer,
        rows: list[AckRange],
        cumulative: bool,
        done: DurableCallback | None,
        found: dict[EntryKey, int],
    ) -> None:
        cursor, counts, log = self.cursor, self._core.message_counts, self._log
        added: list[int] = []
        ranges = by_entry(rows)
        for ledger, entry, firsts, lasts in ranges:
            key = (ledger, entry)
            count = counts.get(key) or found.get(key) or log.message_count(key)  # none: it was trimmed
            if cumulative:
                if log.is_known(ledger):
                    last = lasts[0] if count is None else min(lasts[0], count - 1)
                    cursor.ack_through(ledger, entry, last, count or 0)
            else:
                added.append(0 if count is None else cursor.ack(ledger, entry, firsts, lasts, count))
        # How many messages an entry had that is lost nobody knows.
        acknowledged = sum(number for number in added if number < MAX_MESSAGES_PER_ENTRY)
        self.acked_messages += acknowledged
        consumer.acked_messages += acknowledged
        cursor.changed(done)
        self.dispatcher.handle(self._core.acknowledged, consumer, ranges, added, cumulative=cumulative)

    def count_rates(self, now: float) -> None:
        """Called every few seconds; `now` in seconds of the loop."""
        if self.rates.due(now):
            self.rates.look(now, self._counters())
        self._marks.look(now, self.cursor.state.mark_delete)
        for consumer in self.consumers:
            consumer.count_rates(now)

    def _counters(self) -> tuple[int, ...]:
        return *self._core.delivered, self._core.redelivered_messages, self.acked_messages

    @property
    def quiet_s(self) -> float:
        """For how long nothing was delivered and nothing acknowledged, as far as it was looked."""
        return self.rates.quiet_s(self._counters())

    @property
    def mark_quiet_s(self) -> float:
        """For how long the mark-delete position has not moved, as far as it was looked."""
        return self._marks.quiet_s(self.cursor.state.mark_delete)

    def ledgers_changed(self) -> None:
        """The topic has another ledger: a cursor at the end of the last one moves on to it."""
        if self.compacted is not None:
            self.cursor.follow(self.compacted)
        else:
            self.cursor.state.renormalise()
        self.dispatcher.handle(self._core.ledgers_changed)

    def redeliver(self, consumer: Consumer, rows: Iterable[AckRange], *, counted: bool = True) -> None:
        """Negative acknowledgement; no rows: everything that this consumer holds. `counted`: redelivery counts rise."""
        if not consumer.closed:
            nacked = _checked(list(rows))
            self._hold_back()
            self.epoch += not nacked
            self.dispatcher.handle(self._core.nacked, consumer, nacked, counted=counted, epoch=self.epoch)

    def handed_out(
        self, consumer: Consumer, epoch: int, rows: Iterable[AckRange], *, taken_back: bool
    ) -> None:
        """What counts if the consumer's connection is lost; of another epoch it means nothing any more."""
        if not consumer.closed and epoch == consumer.epoch:
            # Nothing can be delivered for it.
            self._core.handed_out(consumer, _checked(list(rows)), taken_back=taken_back)

    # --- seek, end ---------------------------------------------------------------------------------------------------

    async def seek(self, resolve: Callable[[], Awaitable[Position]] | Position) -> int:
        """Moves the cursor; durable when it returns the new epoch, and only then anything is delivered.

        `resolve` is the position, or finds it. Consumers drop what they hold of a lower epoch and grant its permits again.
        Dispatch goes on after the caller has had its turn to answer.
        """
        self._check_still()
        self._seeking = True
        self.dispatcher.handle(self._core.pause, Pause.SEEK)
        try:
            position = resolve if isinstance(resolve, tuple) else await resolve()
            self._fail_lookups(TopicBusy(f"subscription {self.name!r} was moved"))
            self.cursor.reset(position)
            self.epoch += 1
            self.dispatcher.handle(self._core.reset, self.epoch)
            moved = list(self.consumers)
            try:
                if self.durable:
                    await self.cursor.flush()
            finally:
                for consumer in moved:
                    if not consumer.closed:
                        consumer.port.sought()
            return self.epoch
        finally:
            self._seeking = False
            asyncio.get_running_loop().call_soon(self.dispatcher.handle, self._core.resume, Pause.SEEK)

    def lose(self, info: LedgerInfo, end: Position) -> None:
        """The first ledger of a non-persistent topic leaves; `end` is behind it. What was not delivered of it is counted."""
        if self.cursor.state.mark_delete < end:
            self.dropped_messages += self._core.losing(info)
            self.cursor.skip_to(end)
            self.dispatcher.handle(self._core.skipped)

    async def skip_to(self, find: Callable[[], Awaitable[Position]]) -> bool:
        """Acknowledges everything before the position that `find` returns; durable when this returns. False: it was.

        What consumers hold of it is no longer owed by them; whatever reaches them all the same they may acknowledge or not.
        Raises TopicBusy, having done nothing, if the subscription is moved while the position is looked for.
        """
        self._check_still()
        epoch = self.epoch
        position = await find()
        self._check_still()
        if epoch != self.epoch:
            raise TopicBusy(f"subscription {self.name!r} was moved meanwhile; nothing was skipped, try again")
        moved = self.cursor.skip_to(position)
        if moved:
            self.dispatcher.handle(self._core.skipped)
        await self.cursor.flush()
        return moved

    def _check_still(self) -> None:
        """Raises unless the subscription can be moved now."""
        if self._closed is not None:
            raise self._closed
        if self._seeking:
            raise TopicBusy(f"subscription {self.name!r} is seeking already; try again")

    async def close(self, error: MagnetarError, *, fenced: bool = False) -> list[Consumer]:
        """Makes the cursor durable and lets go. `fenced`: nothing is written.

        Returns consumers that are to be notified once nothing of the topic is written here any more: they go to the next
        owner then, who would shut this one out. Of a fenced subscription they are notified at once.
        """
        consumers = await self._stop(error, notify=fenced)
        await self.cursor.close(fenced=fenced)
        return [] if fenced else consumers

    async def delete(self) -> None:
        """The subscription and its cursor are deleted when this returns."""
        await self._stop(SubscriptionNotFound(f"subscription {self.name!r} was deleted"), notify=True)
        await self.cursor.delete()

    async def _stop(self, error: MagnetarError, *, notify: bool) -> list[Consumer]:
        self._closed = error
        self._fail_lookups(error)
        if self._lookup_task is not None:
            self._lookup_task.cancel()
            await asyncio.wait([self._lookup_task])
        return await self.dispatcher.close(error if notify else None)


def _checked(rows: list[AckRange]) -> list[AckRange]:
    """Raises InvalidArgument for a row without messages, which would leave ranges that overlap."""
    for _, _, first, last in rows:
        if last < first:
            raise InvalidArgument(f"a row of messages {first} to {last} has none")
    return rows
