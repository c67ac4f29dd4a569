"""The rules that the history of a cluster must obey (CORRECTNESS.md, rules 25, 28, 31, 33, 34; "Invariants").

`check(events)` is pure: events in, a `Verdict` out. Events of one process come in their order, those of several in any.

| finding | rule |
|---|---|
| lost | a confirmed message stands where its receipt said, whatever happened since; one that was stored before, somewhere |
| phantom | what is stored or delivered was sent, by that producer, with that key |
| duplicated | with deduplication no message is stored twice; without it duplicates are counted |
| reordered by producer | first occurrences in a topic rise with the numbers of their producer |
| reordered by key | first deliveries of a key rise (key_shared); of all messages (exclusive, failover) |
| vanished | what was delivered is stored at that position |
| never delivered | a subscription hands out every stored message |
| never acknowledged | and, in a run that was drained, gets a receipt for it |
| redelivered | nothing is handed out after the receipt of its acknowledgement |
| two active consumers | one consumer at a time of exclusive and failover; one at a time for a key of key_shared |
| stale confirmation | what is sent after a newer ledger confirmed a message is never confirmed in an older one |

Two consumers are active at once if both *certainly hold* messages: from handing one out until its acknowledgement, if the
receipt comes within the same attachment. What merely waits in a client that lost its broker is no violation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from support.cluster.history import (
    AckReceipt,
    AnyEvent,
    Confirmed,
    ConsumerMade,
    Handed,
    Nacked,
    Name,
    Position,
    ProducerMade,
    Received,
    SendFailed,
    Sent,
    Stored,
    StoredBefore,
    SubscriptionMade,
    key_of,
)

FINDINGS = (
    "lost",
    "phantom",
    "duplicated",
    "reordered by producer",
    "reordered by key",
    "vanished",
    "never delivered",
    "never acknowledged",
    "redelivered",
    "two active consumers",
    "stale confirmation",
)
# What was on its way when the receipt was given may still be handed out.
RECEIPT_GRACE_S = 2.0
# The notice that another consumer is active takes its time.
HANDOVER_S = 0.1
EXAMPLES = 5


@dataclass
class Verdict:
    """Counts, and what is wrong: how often, with examples."""

    counts: Counter[str] = field(default_factory=Counter)
    subscriptions: dict[str, Counter[str]] = field(default_factory=dict)
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def found(self, kind: str, text: str, times: int = 1) -> None:
        """A rule was broken."""
        assert kind in FINDINGS
        self.findings[kind] += times
        examples = self.examples.setdefault(kind, [])
        if len(examples) < EXAMPLES:
            examples.append(text)

    @property
    def good(self) -> bool:
        """Nothing is wrong."""
        return not self.findings

    def __str__(self) -> str:
        lines = [f"{kind}: {times}" for kind, times in self.findings.items()]
        lines += [f"    {kind}: {text}" for kind, texts in self.examples.items() for text in texts]
        return "\n".join(lines) or "nothing is wrong"


@dataclass
class _Producer:
    topic: str
    keys: int
    sent: int = 0


@dataclass
class _Topic:
    confirmed: dict[Name, Position] = field(default_factory=dict)
    stored_before: list[Name] = field(default_factory=list)  # as their receipts say
    stored: dict[Position, Handed] = field(default_factory=dict)
    confirmations: list[tuple[float, float, int, Name]] = field(default_factory=list)  # at, sent at, ledger
    read: bool = False


@dataclass
class _Subscription:
    name: str
    topic: str
    type: str
    received: list[tuple[float, str, int, Handed]] = field(default_factory=list)  # at, consumer, attachment
    receipts: dict[Position, float] = field(default_factory=dict)
    # Position, consumer and attachment -> when its acknowledgement was asked for, if the receipt came within it.
    asked: dict[tuple[Position, str, int], float] = field(default_factory=dict)
    nacked: int = 0

    @property
    def label(self) -> str:
        """In findings."""
        return f"{self.type} subscription {self.name!r} of {self.topic}"


def check(events: Iterable[AnyEvent], *, deduplication: bool = False, drained: bool = True) -> Verdict:
    """See the module docstring. `drained`: the run waited until everything had been acknowledged."""
    return _Check(deduplication, drained).run(events)


class _Check:
    def __init__(self, deduplication: bool, drained: bool) -> None:
        self.verdict = Verdict()
        self._deduplication = deduplication
        self._drained = drained
        self._producers: dict[str, _Producer] = {}
        self._topics: dict[str, _Topic] = {}
        self._subscriptions: dict[tuple[str, str], _Subscription] = {}
        self._consumers: dict[str, _Subscription] = {}

    def run(self, events: Iterable[AnyEvent]) -> Verdict:
        later: list[AnyEvent] = []
        for event in events:  # what the others refer to comes first, in whichever file it stands
            match event:
                case ProducerMade(producer, topic, keys):
                    self._producers[producer] = _Producer(topic, keys)
                    self._topics.setdefault(topic, _Topic())
                case SubscriptionMade(name, topic, type):
                    self._subscriptions.setdefault((topic, name), _Subscription(name, topic, type))
                    self._topics.setdefault(topic, _Topic())
                case _:
                    later.append(event)
        for event in later:
            if isinstance(event, ConsumerMade):
                self._consumers[event.consumer] = self._subscriptions[event.topic, event.subscription]
        for event in later:
            self._take(event)
        self._summarise()
        return self.verdict

    def _take(self, event: AnyEvent) -> None:
        counts = self.verdict.counts
        match event:
            case Sent(_, producer, first, count):
                self._producers[producer].sent = max(self._producers[producer].sent, first + count)
                counts["sent"] += count
            case Confirmed(at, sent_at, producer, first, positions):
                topic = self._topics[self._producers[producer].topic]
                for number, position in enumerate(positions, first):
                    topic.confirmed[producer, number] = position
                    topic.confirmations.append((at, sent_at, position[0], (producer, number)))
                counts["confirmed"] += len(positions)
            case StoredBefore(_, _, producer, numbers):
                topic = self._topics[self._producers[producer].topic]
                topic.stored_before += [(producer, number) for number in numbers]
                counts["confirmed"] += len(numbers)
                counts["duplicates refused"] += len(numbers)
            case SendFailed():
                counts["failed sends"] += 1
            case Received(at, consumer, attachment, messages):
                subscription = self._consumers[consumer]
                subscription.received += [(at, consumer, attachment, message) for message in messages]
            case AckReceipt(at, asked_at, consumer, attachment, positions):
                subscription = self._consumers[consumer]
                for position in positions:
                    if at < subscription.receipts.get(position, at + 1):
                        subscription.receipts[position] = at
                    if attachment >= 0:
                        subscription.asked[position, consumer, attachment] = asked_at
            case Nacked(_, consumer, positions):
                self._consumers[consumer].nacked += len(positions)
            case Stored(name, messages):
                topic = self._topics[name]
                topic.read = True
                for message in messages:
                    topic.stored[message.position] = message
                counts["stored"] += len(messages)

    def _summarise(self) -> None:
        for name, topic in self._topics.items():
            self._check_stored(name, topic)
            self._check_stale(name, topic)
        for subscription in self._subscriptions.values():
            subscription.received.sort(key=lambda row: row[0])
            self._check_deliveries(subscription, self._topics[subscription.topic])
            self._check_order(subscription)
            self._check_holds(subscription)
            self._count(subscription)
        self.verdict.counts["topics"] = len(self._topics)
        self.verdict.counts["producers"] = len(self._producers)
        self.verdict.counts["consumers"] = len(self._consumers)

    # --- the topic ---------------------------------------------------------------------------------------------------

    def _is_phantom(self, message: Handed, topic: str) -> bool:
        producer = self._producers.get(message.producer)
        return (
            producer is None
            or producer.topic != topic
            or not 0 <= message.number < producer.sent
            or message.key != key_of(message.number, producer.keys)
        )

    def _check_stored(self, name: str, topic: _Topic) -> None:
        verdict = self.verdict
        if not topic.read:
            if topic.confirmed:
                verdict.found("lost", f"{name} was not read again", len(topic.confirmed))
            return
        for message_name, position in topic.confirmed.items():
            found = topic.stored.get(position)
            if found is None or found.name != message_name:
                other = "nothing" if found is None else found.name
                verdict.found(
                    "lost", f"{message_name} was confirmed at {position} of {name}, which holds {other}"
                )
        names = {message.name for message in topic.stored.values()}
        for message_name in topic.stored_before:
            if message_name not in names:
                verdict.found(
                    "lost", f"{message_name} was confirmed as stored before, and {name} does not hold it"
                )
        seen: dict[Name, None] = {}
        highest: dict[str, int] = {}
        for position in sorted(topic.stored):
            message = topic.stored[position]
            if self._is_phantom(message, name):
                verdict.found("phantom", f"{name} holds {message}, which was not sent")
            elif message.name in seen:
                verdict.counts["duplicates"] += 1
                if self._deduplication:
                    verdict.found("duplicated", f"{name} holds {message.name} again at {position}")
            else:
                seen[message.name] = None
                before = highest.get(message.producer, -1)
                highest[message.producer] = max(before, message.number)
                if message.number < before:
                    verdict.found(
                        "reordered by producer",
                        f"{name} holds {message.name} at {position}, after number {before}",
                    )

    def _check_stale(self, name: str, topic: _Topic) -> None:
        """The highest ledger that had confirmed something before each message was sent."""
        confirmations = sorted(topic.confirmations)
        times = [row[0] for row in confirmations]
        highest: list[int] = []
        for row in confirmations:
            highest.append(max(row[2], highest[-1] if highest else row[2]))
        for at, sent_at, ledger, message in confirmations:
            before = bisect_left(times, sent_at)
            if before and highest[before - 1] > ledger:
                self.verdict.found(
                    "stale confirmation",
                    f"{message}, sent to {name} at {sent_at:.3f} when ledger {highest[before - 1]} had confirmed others, "
                    f"was confirmed in ledger {ledger} at {at:.3f}",
                )

    # --- a subscription ----------------------------------------------------------------------------------------------

    def _check_deliveries(self, subscription: _Subscription, topic: _Topic) -> None:
        verdict, receipts = self.verdict, subscription.receipts
        delivered: dict[Position, None] = {}
        for at, consumer, _, message in subscription.received:
            delivered[message.position] = None
            if self._is_phantom(message, subscription.topic):
                verdict.found("phantom", f"{consumer} got {message}, which was not sent")
            elif topic.read:
                stored = topic.stored.get(message.position)
                if stored is None or stored.name != message.name:
                    verdict.found(
                        "vanished", f"{consumer} got {message.name} at {message.position}, now {stored}"
                    )
            acknowledged = receipts.get(message.position)
            if acknowledged is not None and at > acknowledged + RECEIPT_GRACE_S:
                verdict.found(
                    "redelivered",
                    f"{consumer} got {message.name} ({message.position}) at {at:.3f}, acknowledged with receipt at "
                    f"{acknowledged:.3f}",
                )
        expected = topic.stored if topic.read else {p: n for n, p in topic.confirmed.items()}
        for position in expected:
            if position not in delivered:
                verdict.found("never delivered", f"{subscription.label} never got {position}")
            elif self._drained and position not in receipts:
                verdict.found("never acknowledged", f"{subscription.label} has no receipt for {position}")

    def _check_order(self, subscription: _Subscription) -> None:
        """First deliveries, all of them or those of each key; what is nacked comes again later and does not count."""
        if subscription.type == "shared":
            return
        seen: dict[Position, None] = {}
        last: dict[str, Position] = {}
        for at, consumer, _, message in subscription.received:
            if message.position in seen:
                continue
            seen[message.position] = None
            lane = _lane(subscription, message)
            before = last.get(lane)
            if before is not None and message.position < before:
                self.verdict.found(
                    "reordered by key",
                    f"{consumer} got {message.name} ({message.position}) at {at:.3f}, after {before} of "
                    f"{lane or 'the topic'}",
                )
            else:
                last[lane] = message.position

    def _check_holds(self, subscription: _Subscription) -> None:
        if subscription.type == "shared":
            return
        holds: dict[str, list[tuple[float, float, str, Position]]] = {}
        for lane, hold in _holds(subscription):
            holds.setdefault(lane, []).append(hold)
        for lane, of_lane in holds.items():
            latest: dict[str, tuple[float, Position]] = {}  # of each consumer: until when it held something
            for start, end, consumer, position in sorted(of_lane):
                for other, (its_end, its_position) in latest.items():
                    if other != consumer and min(its_end, end) > start + HANDOVER_S:
                        self.verdict.found(
                            "two active consumers",
                            f"{consumer} held {position} from {start:.3f} to {end:.3f} and {other} {its_position} until "
                            f"{its_end:.3f}{f', both of {lane}' if lane else ''}",
                        )
                if end > latest.get(consumer, (0.0, position))[0]:
                    latest[consumer] = end, position

    def _count(self, subscription: _Subscription) -> None:
        positions = {row[3].position for row in subscription.received}
        counts = self.verdict.subscriptions.setdefault(subscription.type, Counter())
        counts["subscriptions"] += 1
        counts["delivered"] += len(positions)
        counts["again"] += len(subscription.received) - len(positions)
        counts["receipts"] += len(subscription.receipts)
        counts["nacked"] += subscription.nacked


def _holds(subscription: _Subscription) -> Iterator[tuple[str, tuple[float, float, str, Position]]]:
    """What a consumer certainly held, by lane: from when, until when, who, and up to which message."""
    # A message that was nacked and came again is held from its last delivery on.
    since: dict[tuple[Position, str, int], tuple[float, str]] = {}
    for at, consumer, attachment, message in subscription.received:
        which = message.position, consumer, attachment
        if at <= subscription.asked.get(which, at - 1):
            since[which] = at, _lane(subscription, message)
    if subscription.type == "key_shared":
        for which, (at, lane) in since.items():
            yield lane, (at, subscription.asked[which], which[1], which[0])
        return
    # It was the active one through all of an attachment.
    attachments: dict[tuple[str, int], tuple[float, float, str, Position]] = {}
    for which, (at, _) in since.items():
        position, consumer, attachment = which
        start, end, *_ = attachments.get((consumer, attachment), (at, at))
        asked_at = subscription.asked[which]
        attachments[consumer, attachment] = min(start, at), max(end, asked_at), consumer, position
    for hold in attachments.values():
        yield "", hold


def _lane(subscription: _Subscription, message: Handed) -> str:
    """What is handed out in order, and to one consumer at a time. Messages without a key are spread, each by itself."""
    if subscription.type != "key_shared":
        return ""
    return f"message {message.position}" if not message.key else f"key {message.key!r}"
