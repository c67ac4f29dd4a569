"""Dispatch against a model of one dictionary: who holds which message, how often it was given, what is acknowledged.

Whatever happens, in whichever order: nothing acknowledged is delivered, no message is at two consumers, counts and pending
acknowledgements are right, permits and caps are overdrawn by less than a batch; and when everything works again, each
message that is not acknowledged is delivered. The core checks its own invariants after every instruction on top of that.
"""

from collections.abc import Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from magnetar.broker.cursors.core.acks import EntryKey, Position
from magnetar.broker.dispatch.core import entry_source
from magnetar.broker.dispatch.core.consumer import Consumer
from magnetar.broker.dispatch.core.instructions import Instruction, PassMessages, Pause
from magnetar.broker.dispatch.core.selection import key_shared
from magnetar.broker.dispatch.core.selection.hash_ranges import SLOTS
from magnetar.broker.resources.rates import Limit, Throttle, TokenBucket
from magnetar.broker.settings import BrokerSettings
from magnetar.proto.batch import key_hash_of
from magnetar.proto.errors import BookieUnavailable, EntryDamaged, MessageLost
from magnetar.proto.ranges import Range
from support.dispatch_kit import Delivered, DispatchWorld
from support.long_form import LONG, times

BATCHES = st.lists(st.integers(1, 4), min_size=1, max_size=4)
LARGEST_BATCH = 4
KEYS = "abcde"
TYPES = ["exclusive", "failover", "shared", "key_shared"]
INDIVIDUAL = ("shared", "key_shared")
MAX_REPLAY_READS = entry_source.MAX_REPLAY_READS
LOOK_AHEAD = key_shared.LOOK_AHEAD_MESSAGES_PER_CONSUMER
PER_CONSUMER, PER_SUBSCRIPTION = 12, 20


class ModelWorld(DispatchWorld):
    """Compares every delivery with the model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.type = ""
        self.acked: set[Position] = set()
        self.holder: dict[Position, str] = {}  # individual acknowledgements: who has it now
        self.handed_out: dict[Position, None] = {}  # of these, what its consumer reported as handed out
        self.returned: dict[Position, None] = {}  # waits to be delivered again
        self.nacks: dict[Position, int] = {}  # how often it was given back
        self.rewinds: list[Position] = []
        self.permits: dict[str, int] = {}
        self.newest: Position = (0, 0, 0)  # not individual: the last one that was not given back
        self.keys: dict[Position, str] = {}
        self.times_ms: dict[Position, int] = {}  # of delayed messages
        self.priorities: dict[str, int] = {}  # failover: of the consumers, as they joined
        self.takeover_ms: int | None = None
        self.told_end: set[str] = set()

    def count(self, message: Position) -> int:
        """The redelivery count that a delivery of it must have."""
        rewound = sum(position > message for position in self.rewinds)
        return self.nacks.get(message, 0) + rewound

    def delivered(self, delivered: Delivered) -> None:
        """A delivery must be right."""
        name, core = delivered.consumer, self.core
        consumer = self.consumers[name]
        assert not core.paused
        assert consumer.port.writable
        assert self.permits[name] > 0, "a delivery without permits"
        if self.type == "failover":
            assert name == self.active, f"a delivery to {name}, which is not active"
            assert self.takeover_ms is None, "a delivery while another consumer takes over"
        assert delivered.epoch == self.epoch
        assert delivered.indexes
        self.permits[name] -= len(delivered.indexes)
        assert self.permits[name] > -LARGEST_BATCH
        for index in delivered.indexes:
            message = (*delivered.key, index)
            assert message not in self.acked, f"{message} is acknowledged"
            assert message not in self.holder, f"{message} is at {self.holder.get(message)}"
            if self.type in INDIVIDUAL:
                assert self.times_ms.get(message, 0) <= self.now_ms, f"{message} is delivered early"
            assert delivered.redelivery_count == self.count(message), message
            if self.type == "exclusive":
                self.check_range(message, consumer, within=True)
            if self.type == "key_shared":
                self.check_key(message, name)
            if self.type in INDIVIDUAL:
                self.holder[message] = name
                assert (
                    len([1 for holder in self.holder.values() if holder == name])
                    < PER_CONSUMER + LARGEST_BATCH
                )
                assert len(self.holder) < PER_SUBSCRIPTION + LARGEST_BATCH
            elif message not in self.returned:
                assert message > self.newest, f"{message} out of order"
                self.newest = message
            self.returned.pop(message, None)

    def execute(self, instruction: Instruction) -> None:
        """What is passed is out of the consumer's ranges, and acknowledged."""
        if isinstance(instruction, PassMessages):
            (consumer,) = self.consumers.values()
            messages = [
                (*instruction.key, index)
                for first, last in instruction.ranges
                for index in range(first, last + 1)
            ]
            for message in messages:
                self.check_range(message, consumer, within=False)
            self.acknowledged(messages)
        super().execute(instruction)

    def check_range(self, message: Position, consumer: Consumer, *, within: bool) -> None:
        """An exclusive consumer that names ranges gets what is in them."""
        if message in self.keys and consumer.hash_ranges:
            slot = key_hash_of(self.keys[message]) % SLOTS or 1
            assert within == any(first <= slot <= last for first, last in consumer.hash_ranges)
        else:
            assert within or consumer.hash_ranges

    def end_reached(self, name: str) -> None:
        """Nothing is left that may come to it, but for what it has itself."""
        self.told_end.add(name)
        for message in self.topic.messages():
            if message not in self.acked:
                assert message not in self.returned, f"{name} is told the end before {message} has come again"
                if self.type in INDIVIDUAL:
                    assert self.holder.get(message) == name, f"{name} is told the end before {message}"
                else:
                    assert message <= self.newest, f"{name} is told the end before {message}"
                    assert self.type == "exclusive" or name == self.active

    def check_key(self, message: Position, name: str) -> None:
        """Of each key, what is older is acknowledged or at the same consumer: never elsewhere, never still to come."""
        for other, key in self.keys.items():
            if key == self.keys[message] and other not in self.acked and self.topic.is_confirmed(*other[:2]):
                assert self.holder.get(other, name) == name, (
                    f"{message} is out while {other} is at another consumer"
                )
                if message not in self.times_ms and other not in self.times_ms:
                    assert other >= message or other in self.holder, f"{message} overtakes {other}"

    @property
    def active(self) -> str | None:
        """Failover: who gets everything."""
        return min(self.priorities, key=lambda name: self.priorities[name], default=None)

    def acknowledged(self, messages: list[Position]) -> None:
        """These are done with."""
        for message in messages:
            self.acked.add(message)
            self.holder.pop(message, None)
            self.handed_out.pop(message, None)
            self.returned.pop(message, None)

    def give_back(self, messages: list[Position], *, counted: bool = True) -> None:
        """Nacked."""
        for message in messages:
            if self.holder.pop(message, None) is not None:
                self.handed_out.pop(message, None)
                self.returned[message] = None
                self.nacks[message] = self.nacks.get(message, 0) + counted

    def lost(self, name: str) -> None:
        """Its consumer left: rule 49."""
        for message in self.held_by(name):
            self.give_back([message], counted=message in self.handed_out)

    def held_by(self, name: str) -> list[Position]:
        """What is pending at a consumer."""
        return [message for message, holder in self.holder.items() if holder == name]

    def rewound(self, read_position: Position) -> None:
        """Everything unacknowledged comes again."""
        if self.topic.normalise(self.state.mark_delete) < read_position:
            self.rewinds.append(read_position)
            for message in self.returned:  # not delivered since it was nacked, and the rewind counts it
                self.nacks[message] = max(self.nacks[message] - 1, 0)
        self.begin_again()

    def begin_again(self) -> None:
        """Everything unacknowledged is delivered from the mark-delete position on."""
        self.holder.clear()
        self.handed_out.clear()
        self.returned.clear()
        self.newest = (0, 0, 0)

    def forget(self) -> None:
        """A seek: all is as if it had never been delivered."""
        self.acked = {message for message in self.acked if message < self.state.mark_delete}
        self.nacks.clear()
        self.rewinds.clear()
        self.begin_again()


class DispatchMachine(RuleBasedStateMachine):
    """See the module docstring."""

    @initialize(type=st.sampled_from(TYPES), policy=st.sampled_from(["stop", "skip"]))
    def begin(self, type: str, policy: str) -> None:
        self.world = ModelWorld(
            BrokerSettings(
                max_unacked_messages_per_consumer=PER_CONSUMER,
                max_unacked_messages_per_subscription=PER_SUBSCRIPTION,
                max_entry_read_attempts=3,
                read_ahead_bytes=600,
                unreadable_entry_policy=policy,
            )
        )
        self.type = type
        self.names = 0
        # Few, so that what is to be delivered again has to wait for them.
        entry_source.MAX_REPLAY_READS = 2
        key_shared.LOOK_AHEAD_MESSAGES_PER_CONSUMER = 12
        self.damaged: set[EntryKey] = set()
        # Something to work on at once: most steps of a run would only prepare for it.
        for number in range(12):
            self.add([2, 1, 3], KEYS[number % 5] + "b" + "+", cached=number % 3 == 0)
        self.join(8, 1)

    # --- the topic ---------------------------------------------------------------------------------------------------

    @rule(
        batches=BATCHES,
        keys=st.lists(st.sampled_from([*KEYS, "+"]), min_size=4, max_size=4),
        cached=st.sampled_from([True, True, False]),
        delays_ms=st.lists(st.sampled_from([0, 0, 0, 1, 30, 1_500, 9_000]), min_size=4, max_size=4),
    )
    def publish(self, batches: list[int], keys: list[str], cached: bool, delays_ms: list[int]) -> None:
        self.add(batches, keys[: len(batches)], cached=cached, delays_ms=delays_ms[: len(batches)])
        self.world.drain()

    @rule(delay_ms=st.sampled_from([20, 1_500, 9_000]), many=st.integers(1, 4))
    def publish_delayed(self, delay_ms: int, many: int) -> None:
        for number in range(many):
            self.add([2, 1], ["+", KEYS[number]], cached=not number, delays_ms=[delay_ms, delay_ms])
        self.world.drain()

    @rule(ms=st.sampled_from([0, 1, 20, 1_500, 9_000]))
    def wait(self, ms: int) -> None:
        self.world.wait(ms)

    @precondition(lambda self: not self.world.delays.whole)
    @rule()
    def delays_known(self) -> None:
        self.world.delays_known()

    @rule(many=st.integers(2, 6))
    def publish_many(self, many: int) -> None:
        for number in range(many):
            self.add([2, 2], [KEYS[number % 5], "+"], cached=False)
        self.world.drain()

    def add(
        self, batches: list[int], keys: Sequence[str], *, cached: bool, delays_ms: Sequence[int] = ()
    ) -> None:
        """An entry with a key for each batch; "+": all of its messages have different ones."""
        columns: list[str | list[str]] = [
            list(KEYS[:count]) if key == "+" else key for key, count in zip(keys, batches, strict=True)
        ]
        times_ms = [self.world.now_ms + ms if ms else None for ms in delays_ms] or [None] * len(batches)
        ledger, entry = self.world.topic.publish(batches, cached=cached, keys=columns, times_ms=times_ms)
        self.world.delays.add((ledger, entry), batches, times_ms)
        spread = [due_ms for due_ms, count in zip(times_ms, batches, strict=True) for _ in range(count)]
        self.world.times_ms |= {
            (ledger, entry, index): due_ms for index, due_ms in enumerate(spread) if due_ms is not None
        }
        flat = [
            key
            for column, count in zip(columns, batches, strict=True)
            for key in (column if isinstance(column, list) else [column] * count)
        ]
        self.world.keys |= {(ledger, entry, index): key for index, key in enumerate(flat)}

    @rule(rate=st.sampled_from([0, 50, 100, 150]))
    def limit(self, rate: int) -> None:
        """To deliveries of so few messages as a quantum of the rate has."""
        throttle = Throttle([Limit(TokenBucket(rate), False)]) if rate else None
        self.world.handle(self.world.core.limit, throttle, PER_CONSUMER, PER_SUBSCRIPTION)

    @rule()
    def evict(self) -> None:
        self.world.topic.in_cache.clear()

    @rule()
    def roll_over(self) -> None:
        self.world.roll_over()

    @precondition(lambda self: len(self.world.topic.ledgers) > 1)
    @rule()
    def trim(self) -> None:
        self.world.trim()

    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        keys = sorted({message[:2] for message in self.world.topic.messages()})
        if keys:
            self.damaged.add(data.draw(st.sampled_from(keys)))

    # --- consumers ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.world.consumers) < (1 if self.type == "exclusive" else 4))
    @rule(
        permits=st.sampled_from([0, 5, 50, 1000]),
        priority_level=st.integers(0, 2),
        ranges=st.sampled_from([[], [(0, 32_767)], [(0, 9_999), (40_000, 65_535)], [(7, 7)]]),
    )
    def join(self, permits: int, priority_level: int, ranges: Sequence[Range] = ()) -> None:
        world = self.world
        self.names += 1
        world.permits[f"c{self.names}"] = 0
        if world.type not in ("", self.type):
            world.begin_again()
        world.type = self.type
        if self.type == "failover":
            before = world.active
            world.priorities[f"c{self.names}"] = priority_level
            if before not in (None, world.active):
                world.takeover_ms = world.now_ms + world.settings.failover_delay_ms
        world.join(f"c{self.names}", self.type, priority_level, ranges if self.type == "exclusive" else ())
        world.permits[f"c{self.names}"] = permits
        world.grant(f"c{self.names}", permits)

    @precondition(lambda self: not self.world.consumers and self.names)
    @rule(type=st.sampled_from(TYPES))
    def change_type(self, type: str) -> None:
        self.type = type

    @precondition(lambda self: self.world.consumers and self.world.counters.deliveries % 2)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.leave_one(self.consumer(data))

    def leave_one(self, name: str) -> None:
        world = self.world
        active = world.active
        world.priorities.pop(name, None)
        if world.type in INDIVIDUAL:
            world.lost(name)
        elif world.type == "exclusive" or world.active != active:
            world.takeover_ms = None
            world.begin_again()
        world.leave(name)

    @precondition(lambda self: self.world.counters.deliveries % 4 == 1)
    @rule(later=st.booleans())
    def reload(self, later: bool) -> None:
        """The topic is unloaded and loaded again: the cursor remembers acknowledgements and redelivery counts."""
        world = self.world
        if world.type in INDIVIDUAL:
            for name in world.consumers:
                world.lost(name)
        world.begin_again()
        world.priorities.clear()
        world.takeover_ms = None
        world.type = ""
        world.reload(later=later)

    @precondition(lambda self: self.world.consumers)
    @rule(data=st.data(), messages=st.sampled_from([0, 1, 3, 12, 40]))
    def grant(self, data: st.DataObject, messages: int) -> None:
        name = self.consumer(data)
        self.world.permits[name] += messages
        self.world.grant(name, messages)

    @precondition(lambda self: self.world.consumers)
    @rule(data=st.data(), writable=st.booleans())
    def change_writable(self, data: st.DataObject, writable: bool) -> None:
        self.world.set_writable(self.consumer(data), writable)

    def consumer(self, data: st.DataObject) -> str:
        name: str = data.draw(st.sampled_from(sorted(self.world.consumers)))
        return name

    # --- acknowledgements --------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.consumers and Pause.SEEK not in self.world.core.paused)
    @rule(data=st.data(), beyond=st.integers(0, 2))
    def acknowledge(self, data: st.DataObject, beyond: int) -> None:
        """Of anything that exists, also what another consumer holds or nobody was given; also past an entry's end."""
        message = self.message(data)
        if message is not None:
            last = message[2] + beyond
            self.world.acknowledged([(*message[:2], index) for index in range(message[2], last + 1)])
            self.world.acknowledge(self.consumer(data), [(*message, last)])

    @precondition(
        lambda self: (
            self.world.consumers
            and self.world.type not in INDIVIDUAL
            and Pause.SEEK not in self.world.core.paused
        )
    )
    @rule(data=st.data())
    def acknowledge_through(self, data: st.DataObject) -> None:
        message = self.message(data)
        if message is not None:
            self.world.acknowledged([other for other in self.world.topic.messages() if other <= message])
            self.world.acknowledge(self.consumer(data), [(*message, message[2])], cumulative=True)

    @precondition(lambda self: self.world.consumers)
    @rule(
        data=st.data(), beyond=st.sampled_from([0, 1, 5, 100]), counted=st.sampled_from([True, True, False])
    )
    def nack(self, data: st.DataObject, beyond: int, counted: bool) -> None:
        """Also of what was never delivered, or is not there."""
        message = self.message(data)
        if message is not None:
            self.nack_one(self.consumer(data), message, beyond, counted=counted)

    def nack_one(self, name: str, message: Position, beyond: int, *, counted: bool = True) -> None:
        world = self.world
        named = [
            other
            for other in world.topic.messages()
            if message <= other <= (*message[:2], message[2] + beyond)
        ]
        if world.type in INDIVIDUAL:
            world.give_back([other for other in named if world.holder.get(other) == name], counted=counted)
        else:
            for other in named:
                new = other >= world.core.read_position or other in world.acked or other in world.returned
                if not new:
                    world.returned[other] = None
                    world.nacks[other] = world.nacks.get(other, 0) + counted
        position = world.core.read_position
        if world.type not in INDIVIDUAL and len(world.returned) > PER_SUBSCRIPTION:
            world.rewound(position)
        world.nack(name, [(*message, message[2] + beyond)], counted=counted)

    @precondition(lambda self: self.world.consumers and self.world.newest > (1, 0, 0))
    @rule(data=st.data())
    def acknowledge_what_waits_to_come_again(self, data: st.DataObject) -> None:
        """The connection is full between the nack and the acknowledgement."""
        world, name = self.world, self.consumer(data)
        seen = [message for message in world.topic.messages() if message <= world.newest]
        if not seen or Pause.SEEK in world.core.paused:
            return
        message = data.draw(st.sampled_from(seen))
        world.set_writable(name, False)
        self.nack_one(name, message, 1)
        world.acknowledged([message])
        world.acknowledge(name, [(*message, message[2])])
        world.set_writable(name, True)

    @precondition(lambda self: self.world.consumers)
    @rule(data=st.data())
    def nack_all(self, data: st.DataObject) -> None:
        world, name = self.world, self.consumer(data)
        if world.type in INDIVIDUAL:
            world.give_back(world.held_by(name))
        elif world.type == "exclusive" or name == world.active:  # another one has nothing
            world.rewound(world.core.read_position)
        world.nack(name, [])

    @precondition(lambda self: self.world.holder)
    @rule(data=st.data(), beyond=st.integers(0, 3), taken_back=st.sampled_from([False, False, True]))
    def hand_out(self, data: st.DataObject, beyond: int, taken_back: bool) -> None:
        """A consumer reports some messages, of which it may hold only a few, or none."""
        world = self.world
        message = data.draw(st.sampled_from(sorted(world.holder)))
        name = self.consumer(data)
        for index in range(message[2], message[2] + beyond + 1):
            named = (*message[:2], index)
            if world.holder.get(named) == name:
                if taken_back:
                    world.handed_out.pop(named, None)
                else:
                    world.handed_out[named] = None
        world.hand_out(name, [(*message, message[2] + beyond)], taken_back=taken_back)

    def message(self, data: st.DataObject) -> Position | None:
        messages = self.world.topic.messages()
        return data.draw(st.sampled_from(messages)) if messages else None

    # --- pauses ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.core.paused == {} and self.world.counters.deliveries % 3 == 1)
    @rule()
    def look_up(self) -> None:
        self.world.pause(Pause.ACK_LOOKUP)

    @precondition(
        lambda self: Pause.SEEK not in self.world.core.paused and self.world.counters.deliveries % 3 == 2
    )
    @rule()
    def begin_seek(self) -> None:
        self.world.pause(Pause.SEEK)

    @precondition(lambda self: Pause.SEEK in self.world.core.paused)
    @rule(data=st.data())
    def move_cursor(self, data: st.DataObject) -> None:
        message = self.message(data) or (self.world.topic.open, 0, 0)
        self.world.seek(message)
        # Nothing that is acknowledged beyond the new place is remembered.
        self.world.acked = {other for other in self.world.topic.messages() if other < message}
        self.world.forget()

    @precondition(lambda self: self.world.core.paused)
    @rule()
    def resume(self) -> None:
        self.world.resume(next(iter(self.world.core.paused)))

    # --- reads -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.reads)
    @rule(data=st.data(), entries=st.integers(1, 4), fails=st.sampled_from([False, False, True]))
    def answer(self, data: st.DataObject, entries: int, fails: bool) -> None:
        self.answer_one(data.draw(st.sampled_from(sorted(self.world.reads))), entries, fails=fails)

    @precondition(lambda self: self.world.reads)
    @rule()
    def answer_all(self) -> None:
        for read_id in sorted(self.world.reads):
            if read_id in self.world.reads:
                self.answer_one(read_id, 2, fails=False)

    def answer_one(self, read_id: int, entries: int, *, fails: bool) -> None:
        world = self.world
        ledger, first = key = world.reads[read_id].key
        if not world.topic.is_confirmed(*key):
            world.fail_read(read_id, MessageLost("trimmed"))
        elif key in self.damaged:
            skips = world.settings.unreadable_entry_policy == "skip"
            if (
                skips
                and world.core.source.failures.get(key)
                and world.core.source.failures[key].attempts == 2
            ):
                world.acknowledged([message for message in world.topic.messages() if message[:2] == key])
            world.fail_read(read_id, EntryDamaged("damaged"))
        elif fails:
            world.fail_read(read_id, BookieUnavailable("down"))
        else:
            if world.reads[read_id].max_bytes == 1:
                entries = 1
            good = 1
            while good < entries and (ledger, first + good) not in self.damaged:
                good += 1
            world.answer_read(read_id, good)

    @precondition(lambda self: self.world.timer_ms is not None)
    @rule()
    def time_passes(self) -> None:
        world = self.world
        assert world.timer_ms is not None
        if world.takeover_ms is not None and max(world.timer_ms, world.now_ms) >= world.takeover_ms:
            world.takeover_ms = None
            world.begin_again()
        world.fire_timer()
        world.wait(0)

    # --- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def as_modelled(self) -> None:
        world = self.world
        for name, consumer in world.consumers.items():
            assert consumer.available_permits == world.permits[name]
            if world.type in INDIVIDUAL:
                pending = {
                    (*key, index)
                    for key, ranges in consumer.pending_acks.items()
                    for members in ranges.by_count.values()
                    for first, last in members
                    for index in range(first, last + 1)
                }
                assert pending == set(world.held_by(name))
        mark = world.state.mark_delete
        assert all(message in world.acked for message in world.topic.messages() if message < mark)

    def teardown(self) -> None:
        """Everything works again: each message that is not acknowledged is delivered, and then the end of the topic."""
        entry_source.MAX_REPLAY_READS = MAX_REPLAY_READS
        key_shared.LOOK_AHEAD_MESSAGES_PER_CONSUMER = LOOK_AHEAD
        if not hasattr(self, "world"):
            return
        world = self.world
        self.damaged.clear()
        if not world.delays.whole:
            world.delays_known()
        world.wait(10_000)
        for reason in list(world.core.paused):
            world.resume(reason)
        if not world.consumers:
            self.join(1, 1)
        world.terminate()
        for _ in range(1000):
            before = (len(world.done), len(world.acked))
            for name in list(world.consumers):
                world.set_writable(name, True)
                if world.consumers[name].available_permits <= 0:
                    world.permits[name] += 50
                    world.grant(name, 50)
            for read_id in sorted(world.reads):
                if read_id in world.reads:
                    self.answer_one(read_id, 3, fails=False)
            if world.timer_ms is not None:
                self.time_passes()
            if (
                world.type == "key_shared"  # a key may wait for what another consumer holds
                or world.core.tracker.blocked_on_unacked_messages
                or any(consumer.blocked_on_unacked_messages for consumer in world.consumers.values())
            ):
                for message, name in list(world.holder.items()):
                    world.acknowledged([message])
                    world.acknowledge(name, [(*message, message[2])])
            if before == (len(world.done), len(world.acked)) and not world.reads and world.timer_ms is None:
                break
        else:
            raise AssertionError("it does not come to rest")
        for message in world.topic.messages():
            if message not in world.acked:
                if world.type in INDIVIDUAL:
                    assert message in world.holder, f"{message} was never delivered"
                else:
                    assert message <= world.newest, f"{message} was never delivered"
                    assert message not in world.returned, f"{message} was never delivered again"
        if not world.holder or len({*world.holder.values()}) == 1:
            assert world.told_end, "nobody is told the end"
        if not world.holder and world.type in INDIVIDUAL:
            assert world.told_end >= world.consumers.keys()
        assert not world.core.source.failures
        assert world.counters.unreadable_entries == 0
        assert world.budget.used == world.core.source.charged_bytes
        for name in list(world.consumers):
            self.leave_one(name)
        assert world.budget.used == 0


class SkippingMachine(DispatchMachine):
    """Backlog is skipped as well: apart, since that hides defects that are planted in the rest, and costs time."""

    @precondition(
        lambda self: Pause.SEEK not in self.world.core.paused and self.world.counters.deliveries % 3 == 0
    )
    @rule(data=st.data(), whole_entry=st.booleans())
    def skip(self, data: st.DataObject, whole_entry: bool) -> None:
        """Up to a message or behind its entry: what was delivered and is pending, waits to come again, or was never sent."""
        message = self.message(data)
        if message is not None:
            position = (message[0], message[1] + 1, 0) if whole_entry else message
            self.world.acknowledged([other for other in self.world.topic.messages() if other < position])
            self.world.skip(position)


class DelayedMachine(DispatchMachine):
    """What there is at first is delayed as well, behind what is not and before it."""

    @initialize(
        type=st.sampled_from(INDIVIDUAL),
        policy=st.sampled_from(["stop", "skip"]),
        first_ms=st.lists(st.sampled_from([0, 20, 1_500, 9_000]), min_size=12, max_size=12),
    )
    def begin(self, type: str, policy: str, first_ms: list[int]) -> None:
        self.first_ms = iter(first_ms)
        super().begin(type, policy)

    def add(
        self, batches: list[int], keys: Sequence[str], *, cached: bool, delays_ms: Sequence[int] = ()
    ) -> None:
        delay_ms = next(self.first_ms, 0)
        super().add(batches, keys, cached=cached, delays_ms=delays_ms or [delay_ms] * len(batches))


class UnloadingMachine(DispatchMachine):
    """The topic is unloaded often."""

    @initialize(type=st.sampled_from(INDIVIDUAL), policy=st.sampled_from(["stop", "skip"]))
    def begin(self, type: str, policy: str) -> None:
        super().begin(type, policy)

    @rule()
    def unload(self) -> None:
        self.reload(later=False)
        self.join(50, 1)


# A long run takes as long as the limit of others.
TestDispatchMachine = pytest.mark.timeout(900)(SkippingMachine.TestCase)
TestDelayedMachine = pytest.mark.timeout(900)(DelayedMachine.TestCase)
TestDelayedMachine.settings = settings(max_examples=times(10, 300), stateful_step_count=100, deadline=None)
TestDispatchMachine.settings = settings(
    max_examples=times(40, 1000),
    stateful_step_count=100,
    deadline=None,
    # A long run tells what it found; making it smaller takes minutes.
    phases=[phase for phase in Phase if phase is not Phase.shrink or not LONG],
)
