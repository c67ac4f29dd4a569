"""The core of dispatch with a topic in memory around it: what its shell would do, done by the test, one event at a time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import Any, ParamSpec

from magnetar.broker.cursors.core.acks import AckRange, AckState, EntryKey, Position, Topology, by_entry
from magnetar.broker.cursors.core.redeliveries import RedeliveryCounts
from magnetar.broker.cursors.entries import encode_acks, encode_redeliveries, encode_rewinds, replay
from magnetar.broker.dispatch.core.consumer import Consumer, Delivery
from magnetar.broker.dispatch.core.delay_index import DelayedRun, DelayIndex, add_run
from magnetar.broker.dispatch.core.dispatcher import DispatchCore
from magnetar.broker.dispatch.core.entry_source import DispatchCounters
from magnetar.broker.dispatch.core.instructions import (
    CancelReads,
    EndReached,
    Instruction,
    PassEntry,
    PassMessages,
    Pause,
    Read,
    SkipEntry,
    Stop,
    TurnOver,
    WakeAt,
)
from magnetar.broker.resources.budget import ByteBudget
from magnetar.broker.settings import BrokerSettings
from magnetar.proto.batch import encode_batch
from magnetar.proto.batch_extensions import EXT_CHUNK, EXT_DELIVER_AT_MS, Chunk, entry_flags
from magnetar.proto.entry import Entry, encode_entry
from magnetar.proto.errors import MagnetarError
from magnetar.proto.ids import MAX_MESSAGES_PER_ENTRY
from magnetar.proto.ledger_entry import LEDGER_ENTRY_HEADER_BYTES, encode_ledger_entry
from magnetar.proto.ranges import Range

P = ParamSpec("P")


class FakeTopic:
    """Ledgers 1, 2, ... of which the last is open; entries are confirmed when they are published."""

    def __init__(self) -> None:
        self.ledgers: dict[int, list[bytes]] = {1: []}
        self.open = 1
        self.ended = False
        self.in_cache: dict[EntryKey, None] = {}

    def publish(
        self,
        batches: list[int],
        *,
        cached: bool,
        keys: list[str | list[str]] | None = None,
        times_ms: Sequence[int | None] = (),
        chunks: Sequence[Chunk | None] = (),
    ) -> EntryKey:
        """An entry of batches with so many messages. `keys`: of each batch, one for all of its messages or one for each.

        `times_ms`: delivery times of the batches, as many as there are. `chunks`: what each of them is a chunk of, if it is.
        """
        entries = self.ledgers[self.open]
        key = (self.open, len(entries))
        columns = [
            None if keys is None else [one] * count if isinstance(one, str) else one
            for count, one in zip(batches, keys or [""] * len(batches), strict=True)
        ]
        encoded = [
            encode_batch(
                [b"v"] * count,
                sequence_id=0 if chunk is None else chunk.chunk_id[0],
                publish_time_ms=0,
                keys=column,
                extensions={
                    **({} if due_ms is None else {EXT_DELIVER_AT_MS: due_ms}),
                    **({} if chunk is None else {EXT_CHUNK: chunk}),
                },
            )
            for count, column, due_ms, chunk in zip(
                batches, columns, times_ms or repeat(None), chunks or repeat(None)
            )
        ]
        producers, flags = [0] * len(batches), entry_flags(encoded)
        payload = encode_entry(
            encoded, batches, producers, ["p"], first_index=0, append_time_ms=0, flags=flags
        )
        entries.append(encode_ledger_entry(*key, -1, len(payload), payload))
        if cached:
            self.in_cache[key] = None
        return key

    def roll_over(self) -> None:
        """Closes the ledger and opens the next."""
        self.open += 1
        self.ledgers[self.open] = []

    def trim(self, mark_delete: Position) -> None:
        """Drops closed ledgers below the position."""
        for ledger in [ledger for ledger in self.ledgers if ledger < min(mark_delete[0], self.open)]:
            del self.ledgers[ledger]

    def entry(self, key: EntryKey) -> Entry:
        """As it is stored."""
        return Entry(self.ledgers[key[0]][key[1]], LEDGER_ENTRY_HEADER_BYTES)

    def messages(self) -> list[Position]:
        """All of them, in order."""
        return [
            (ledger, number, index)
            for ledger, entries in self.ledgers.items()
            for number, data in enumerate(entries)
            for index in range(Entry(data, LEDGER_ENTRY_HEADER_BYTES).message_count)
        ]

    # --- TopicLog ----------------------------------------------------------------------------------------------------

    def normalise(self, position: Position) -> Position:
        """As the ledger list does it."""
        entries = self.ledgers.get(position[0])
        if entries is not None and (position[0] == self.open or position[1] < len(entries)):
            return position
        for ledger, entries in self.ledgers.items():
            if ledger > position[0] and (entries or ledger == self.open):
                return (ledger, 0, 0)
        return position

    def is_confirmed(self, ledger_id: int, entry_id: int) -> bool:
        """True if it was published and is not trimmed."""
        return entry_id < len(self.ledgers.get(ledger_id, ()))

    def cached(self, key: EntryKey) -> Entry | None:
        """What the test left in the cache."""
        return self.entry(key) if key in self.in_cache and self.is_confirmed(*key) else None


def read_back(
    topology: Topology, state: AckState, counts: RedeliveryCounts, most: int = 2
) -> tuple[AckState, RedeliveryCounts]:
    """A cursor's state as it is after it was stored in pieces of at most `most` rows, and loaded."""
    entries = [encode_acks(state.mark_delete, piece) for piece in state.acked.pieces(most)]
    entries += [encode_redeliveries(rows) for rows in counts.pieces(most)]
    entries.append(encode_rewinds(counts.rewinds))
    found, found_counts = AckState(topology, (0, 0, 0)), RedeliveryCounts()
    for entry in entries:
        replay(found, found_counts, entry)
    return found, found_counts


@dataclass
class FakeDelays:
    """The index of a topic, which may be read back in the background: then `later` is what comes with `known`."""

    index: DelayIndex | None = None
    whole: bool = True
    pieces: list[bytes] = field(default_factory=list)
    later: list[tuple[EntryKey, list[DelayedRun], int]] = field(default_factory=list)

    def add(self, key: EntryKey, batches: list[int], times_ms: Sequence[int | None]) -> None:
        """An entry is confirmed."""
        runs: list[DelayedRun] = []
        for end, count, due_ms in zip(accumulate(batches), batches, times_ms, strict=True):
            if due_ms is not None:
                add_run(runs, end - count, count, due_ms)
        if runs and self.whole:
            self.index = self.index or DelayIndex()
            self.index.add(key, runs, sum(batches))
        elif runs:
            self.later.append((key, runs, sum(batches)))

    def reload(self) -> None:
        """Another broker begins to read what is stored."""
        if self.whole:
            self.pieces = [] if self.index is None else list(self.index.pieces())
        self.index, self.whole = DelayIndex(), False

    def known(self, now_ms: int) -> None:
        """It has read all."""
        assert self.index is not None
        for piece in self.pieces:
            list(self.index.apply(piece, now_ms))
        for key, runs, messages in self.later:
            if left := [run for run in runs if run[2] > now_ms]:
                self.index.add(key, left, messages)
        self.pieces, self.later, self.whole = [], [], True


class FakePort:
    """Writable or not, as the test says; the core calls nothing else."""

    peer: Any = None

    def __init__(self) -> None:
        self.writable = True

    def deliver(self, delivery: Delivery) -> None:
        """The shell's business."""
        raise AssertionError("the core must not deliver")

    def active_changed(self, active: bool) -> None:
        """The shell's business."""
        raise AssertionError("the core must not tell")

    def sought(self) -> None:
        """The subscription's business."""
        raise AssertionError("the core must not tell")

    def end_of_topic(self, epoch: int, redelivers: int) -> None:
        """The shell's business."""
        raise AssertionError("the core must not tell")

    def entry_unreadable(self, epoch: int, key: EntryKey, error: MagnetarError, *, lost: bool) -> None:
        """The shell's business."""
        raise AssertionError("the core must not tell")

    def consumer_closed(self, error: MagnetarError) -> None:
        """The shell's business."""
        raise AssertionError("the core must not close")


@dataclass
class Delivered:
    """One delivery as its consumer sees it."""

    consumer: str
    key: EntryKey
    indexes: list[int]
    redelivery_count: int
    epoch: int


@dataclass
class DispatchWorld:
    """A core, its topic, its cursor and its consumers. Invariants are checked after every event and every instruction."""

    settings: BrokerSettings
    topic: FakeTopic = field(default_factory=FakeTopic)
    now_ms: int = 0
    durable: bool = True

    def __post_init__(self) -> None:
        self.state = AckState(self.topic, (1, 0, 0))
        self.counters = DispatchCounters()
        self.budget = ByteBudget(1 << 30)
        self.counts = RedeliveryCounts()
        self.delays = FakeDelays()
        self.core = self.new_core()
        self.consumers: dict[str, Consumer] = {}
        self.reads: dict[int, Read] = {}
        self.timer_ms: int | None = None
        self.done: deque[Instruction] = deque()
        self.epoch = 0
        self.credit_s = 0.0

    def new_core(self) -> DispatchCore:
        """The subscription as it is loaded, with what its cursor has."""
        return DispatchCore(
            self.topic,
            self.state,
            self.counts,
            self.settings,
            self.budget,
            self.counters,
            self.delays,
            durable=self.durable,
        )

    def reload(self, *, later: bool = False) -> None:
        """The topic is unloaded, and loaded again from what its cursor has stored.

        `later`: what is delayed becomes known with `delays_known`.
        """
        self.core.close()
        self.state, self.counts = read_back(self.topic, self.state, self.counts)
        self.consumers.clear()
        self.reads.clear()
        self.timer_ms = None
        self.delays.reload()
        self.core = self.new_core()
        self.core.check()
        if not later:
            self.delays_known()

    def delays_known(self) -> None:
        """The index of delayed messages was read back."""
        self.delays.known(self.now_ms)
        self.handle(self.core.delays_known)

    def wait(self, ms: int) -> None:
        """Time passes; the topic releases what is due."""
        self.now_ms += ms
        index, more = self.delays.index, self.delays.whole
        while index is not None and more:
            runs, more = index.take_due(self.now_ms)
            index.check()
            if runs:
                self.handle(self.core.released, runs)

    def handle(self, event: Callable[P, None], *given: P.args, **named: P.kwargs) -> None:
        """An event of the core, which is drained then."""
        event(*given, **named)
        self.core.check()
        self.drain()

    def drain(self) -> None:
        """What a shell's run does; also what the topic does when entries are confirmed."""
        turns = 0
        while (instruction := self.poll()) is not None:
            turns += isinstance(instruction, TurnOver)
            assert turns < 1_000, "it never comes to rest"
            self.done.append(instruction)
            self.execute(instruction)
            self.core.check()
        self.core.check_stopped()

    def poll(self) -> Instruction | None:
        """Time passes until a rate lets more be delivered."""
        while (instruction := self.core.poll()) is None and self.core.stop is Stop.THROTTLED:
            self.core.check_stopped()
            assert self.core.throttle is not None
            self.credit_s += self.core.throttle.ready(self.credit_s)
        return instruction

    def execute(self, instruction: Instruction) -> None:
        """One instruction."""
        match instruction:
            case Delivery():
                self.delivered(see(instruction))
            case Read(read_id):
                self.reads[read_id] = instruction
            case CancelReads(read_ids):
                for read_id in read_ids:
                    del self.reads[read_id]
            case WakeAt(due_ms):
                assert self.timer_ms is None or due_ms < self.timer_ms
                self.timer_ms = due_ms
            case EndReached(consumer):
                self.end_reached(consumer.name)
            case PassEntry(key):
                if self.state.mark_delete[:2] == key:
                    self.state.move_to((key[0], key[1] + 1, 0))
            case PassMessages(key, ranges, count):
                for first, last in ranges:
                    self.state.ack(*key, first, last, count)
            case SkipEntry(key):
                self.state.ack(*key, 0, MAX_MESSAGES_PER_ENTRY - 1, MAX_MESSAGES_PER_ENTRY)

    def delivered(self, delivered: Delivered) -> None:
        """For whoever wants to look."""

    def end_reached(self, name: str) -> None:
        """The same: the consumer is told that nothing is left for it."""

    def terminate(self) -> None:
        """Nothing follows what was published."""
        self.topic.ended = True
        self.drain()

    # --- events ------------------------------------------------------------------------------------------------------

    def join(self, name: str, type: str, priority_level: int = 0, hash_ranges: Sequence[Range] = ()) -> None:
        """A consumer subscribes."""
        consumer = self.consumers[name] = Consumer(
            name, self.epoch, FakePort(), priority_level=priority_level, hash_ranges=hash_ranges
        )
        self.handle(self.core.added, consumer, type, self.now_ms)

    def leave(self, name: str) -> None:
        """A consumer has left."""
        self.handle(self.core.left, self.consumers.pop(name))

    def grant(self, name: str, messages: int, size: int = 0) -> None:
        """FLOW."""
        self.handle(self.core.granted, self.consumers[name], messages, size)

    def set_writable(self, name: str, writable: bool) -> None:
        """Its connection's buffer is full, or has drained."""
        port: Any = self.consumers[name].port
        port.writable = writable
        if writable:
            self.handle(self.core.writable, self.consumers[name])

    def acknowledge(self, name: str, rows: list[AckRange], *, cumulative: bool = False) -> None:
        """As the subscription does it: the cursor first."""
        added: list[int] = []
        ranges = by_entry(rows)
        for ledger, entry, firsts, lasts in ranges:
            if not self.topic.is_confirmed(ledger, entry):
                added.append(0)
                continue
            count = self.topic.entry((ledger, entry)).message_count
            if cumulative:
                self.state.ack_through(ledger, entry, min(lasts[0], count - 1), count)
            else:
                added.append(self.state.ack_all(ledger, entry, firsts, lasts, count))
        self.handle(self.core.acknowledged, self.consumers[name], ranges, added, cumulative=cumulative)

    def nack(self, name: str, rows: list[AckRange], *, counted: bool = True) -> None:
        """Negative acknowledgement."""
        self.handle(self.core.nacked, self.consumers[name], rows, counted=counted)

    def hand_out(self, name: str, rows: list[AckRange], *, taken_back: bool = False) -> None:
        """A consumer with a dead-letter policy reports what it gives to its program."""
        self.handle(self.core.handed_out, self.consumers[name], rows, taken_back=taken_back)

    def pause(self, reason: Pause) -> None:
        """A seek or a lookup begins."""
        self.handle(self.core.pause, reason)

    def resume(self, reason: Pause) -> None:
        """It ends."""
        self.handle(self.core.resume, reason)

    def seek(self, position: Position) -> None:
        """The cursor moves, between pause and resume."""
        self.epoch += 1
        self.state.reset(position)
        self.counts.clear()
        self.handle(self.core.reset, self.epoch)

    def skip(self, position: Position) -> None:
        """An operator acknowledges what lies before it, whoever holds it."""
        self.state.move_to(position)
        self.handle(self.core.skipped)

    def answer_read(self, read_id: int, entries: int = 1) -> None:
        """A read ends with so many entries, or with MessageLost if they were trimmed."""
        ledger, first = self.reads.pop(read_id).key
        data = self.topic.ledgers.get(ledger, [])[first : first + entries]
        assert data
        self.handle(self.core.read_done, read_id, data, self.now_ms)

    def fail_read(self, read_id: int, error: MagnetarError) -> None:
        """A read fails."""
        del self.reads[read_id]
        self.handle(self.core.read_failed, read_id, error, self.now_ms)

    def fire_timer(self) -> None:
        """Time passes until the timer is due."""
        assert self.timer_ms is not None
        self.now_ms, self.timer_ms = max(self.timer_ms, self.now_ms), None
        self.handle(self.core.timer_due, self.now_ms)

    def roll_over(self) -> None:
        """The next ledger."""
        self.topic.roll_over()
        self.state.renormalise()
        self.handle(self.core.ledgers_changed)

    def trim(self) -> None:
        """What is acknowledged goes."""
        self.topic.trim(self.state.mark_delete)
        if self.delays.index is not None:
            self.delays.index.drop_below(min(self.topic.ledgers))
        self.state.renormalise()
        self.handle(self.core.ledgers_changed)


def see(delivery: Delivery) -> Delivered:
    """What a consumer finds in a delivery."""
    entry = delivery.entry
    first = entry.batch_start_index(delivery.first_batch)
    end = entry.end_indexes[delivery.last_batch - 1]
    hidden = {index for start, last in delivery.hidden for index in range(start, last + 1)}
    return Delivered(
        delivery.consumer.name,
        (delivery.ledger_id, delivery.entry_id),
        [index for index in range(first, end) if index not in hidden],
        delivery.redelivery_count,
        delivery.epoch,
    )
