"""The checker of a cluster's history finds each defect that is planted in a good one, and nothing in the good one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.cluster.checker import FINDINGS, RECEIPT_GRACE_S, check
from support.cluster.history import (
    AckReceipt,
    AnyEvent,
    Confirmed,
    ConsumerMade,
    Handed,
    Nacked,
    ProducerMade,
    Received,
    Sent,
    Stored,
    StoredBefore,
    SubscriptionMade,
    key_of,
)

TYPES = ("exclusive", "failover", "shared", "key_shared")
COUNT = 40
KEYS = 4
Events = list[AnyEvent]
Plant = Callable[[Events], object]


def message(number: int) -> Handed:
    """The one that is stored in entry `number`: producers take turns."""
    producer, its_number = ("keyed", "plain")[number % 2], number // 2
    return Handed(
        (1, number, 0), producer, its_number, key_of(its_number, KEYS if producer == "keyed" else 0)
    )


def good_history() -> Events:
    """Two producers, a subscription of each type with two consumers; the second takes over at message 20."""
    events: Events = [
        ProducerMade("keyed", "t", KEYS, batched=True),
        ProducerMade("plain", "t", 0, batched=False),
    ]
    for type in TYPES:
        events.append(SubscriptionMade(type, "t", type))
        events += [ConsumerMade(f"{type}-{n}", type, "t") for n in range(2)]
    for number in range(COUNT):
        one, at = message(number), float(number)
        events.append(Sent(at, one.producer, one.number, 1))
        events.append(Confirmed(at + 0.1, at, one.producer, one.number, (one.position,)))
        for type in TYPES:
            consumer = f"{type}-{number >= COUNT // 2:d}"
            events.append(Received(at + 0.2, consumer, 0, (one,)))
            events.append(AckReceipt(at + 0.6, at + 0.5, consumer, 0, (one.position,)))
    events.append(Stored("t", tuple(message(number) for number in range(COUNT))))
    return events


def index_of(events: Events, wanted: Callable[[AnyEvent], bool], occurrence: int = 0) -> int:
    return [at for at, event in enumerate(events) if wanted(event)][occurrence]


def received_by(consumer: str) -> Callable[[AnyEvent], bool]:
    return lambda event: isinstance(event, Received) and event.consumer == consumer


def store(events: Events, change: Callable[[list[Handed]], object]) -> None:
    """Changes what the reader found."""
    stored = events.pop()
    assert isinstance(stored, Stored)
    messages = list(stored.messages)
    change(messages)
    events.append(Stored("t", tuple(messages)))


def lose(events: Events) -> None:
    store(events, lambda messages: messages.pop(7))


def lose_behind_a_truncated_ledger(events: Events) -> None:
    """Another message stands where the receipt said."""
    store(events, lambda messages: messages.__setitem__(8, Handed((1, 8, 0), "plain", 19, "")))


def store_what_nobody_sent(events: Events) -> None:
    store(events, lambda messages: messages.append(Handed((1, COUNT, 0), "plain", COUNT, "")))


def store_a_wrong_key(events: Events) -> None:
    store(
        events, lambda messages: messages.append(Handed((1, COUNT, 0), "keyed", 0, key_of(1, KEYS)))
    )  # its value reads well, its key is that of another


def store_twice(events: Events) -> None:
    store(events, lambda messages: messages.append(Handed((1, COUNT, 0), "keyed", 0, key_of(0, KEYS))))


def refuse_what_is_not_stored(events: Events) -> None:
    """Its receipt says that it was stored before."""
    events.append(StoredBefore(41.0, 40.0, "plain", (COUNT,)))


def swap_in_the_topic(events: Events) -> None:
    def swap(messages: list[Handed]) -> None:
        one, other = messages[10], messages[12]  # of the same producer
        messages[10] = Handed(one.position, other.producer, other.number, other.key)
        messages[12] = Handed(other.position, one.producer, one.number, one.key)

    store(events, swap)


def deliver_in_another_order(events: Events, type: str) -> None:
    """The messages of a key, both of the first consumer."""
    one = index_of(events, received_by(f"{type}-0"), 2)
    other = index_of(events, received_by(f"{type}-0"), 2 + 2 * KEYS)
    first, second = events[one], events[other]
    assert isinstance(first, Received)
    assert isinstance(second, Received)
    assert first.messages[0].key == second.messages[0].key
    events[one] = Received(first.at, first.consumer, 0, second.messages)
    events[other] = Received(second.at, second.consumer, 0, first.messages)


def skip_a_delivery(events: Events) -> None:
    del events[index_of(events, received_by("shared-0"), 3)]


def forget_a_receipt(events: Events) -> None:
    def its(event: AnyEvent) -> bool:
        return isinstance(event, AckReceipt) and event.consumer == "shared-1"

    del events[index_of(events, its)]


def deliver_after_the_receipt(events: Events) -> None:
    events.append(Received(5.6 + RECEIPT_GRACE_S + 0.1, "shared-1", 0, (message(5),)))


def deliver_what_is_not_stored(events: Events) -> None:
    """An owner that was replaced handed it out; its producer sent it again, and it stands elsewhere."""
    events.append(Received(39.9, "shared-1", 0, (Handed((1, 999, 0), "plain", 3, ""),)))


def hold_at_two(events: Events, type: str) -> None:
    """The second consumer gets messages while the first one holds message 1, for which it gets a receipt at 30."""

    def its(event: AnyEvent) -> bool:
        return isinstance(event, AckReceipt) and event.positions == ((1, 0, 0),)

    at = next(n for n, event in enumerate(events) if its(event) and f"{type}-" in repr(event))
    events[at] = AckReceipt(30.1, 30.0, f"{type}-0", 0, ((1, 0, 0),))


def confirm_in_an_old_ledger(events: Events) -> None:
    events.append(Confirmed(20.1, 20.0, "plain", 5, ((2, 0, 0),)))
    events.append(Confirmed(22.5, 22.0, "plain", 11, ((1, 23, 0),)))


def add_a_redelivery_after_a_nack(events: Events) -> None:
    """Nothing is wrong with that, also when another consumer held messages in the meantime."""
    row = index_of(events, received_by("key_shared-0"), 4)
    events.insert(row, Nacked(3.9, "key_shared-0", ((1, 4, 0),)))
    events.insert(row, Received(3.8, "key_shared-0", 0, (message(4),)))


PLANTED: dict[str, tuple[Plant, set[str]]] = {
    "lost": (lose, {"lost", "vanished"}),
    "refused, not stored": (refuse_what_is_not_stored, {"lost"}),
    "overwritten": (
        lose_behind_a_truncated_ledger,
        {"lost", "vanished", "reordered by producer", "duplicated"},
    ),
    "phantom": (store_what_nobody_sent, {"phantom", "never delivered"}),
    "wrong key": (store_a_wrong_key, {"phantom", "never delivered"}),
    "duplicated": (store_twice, {"duplicated", "never delivered"}),
    "reordered by producer": (swap_in_the_topic, {"reordered by producer", "lost", "vanished"}),
    "reordered, exclusive": (
        lambda events: deliver_in_another_order(events, "exclusive"),
        {"reordered by key", "redelivered"},
    ),
    "reordered by key": (
        lambda events: deliver_in_another_order(events, "key_shared"),
        {"reordered by key", "redelivered"},
    ),
    "never delivered": (skip_a_delivery, {"never delivered"}),
    "never acknowledged": (forget_a_receipt, {"never acknowledged"}),
    "redelivered": (deliver_after_the_receipt, {"redelivered"}),
    "vanished": (deliver_what_is_not_stored, {"vanished"}),
    "two active, exclusive": (lambda events: hold_at_two(events, "exclusive"), {"two active consumers"}),
    "two active, failover": (lambda events: hold_at_two(events, "failover"), {"two active consumers"}),
    "key at two consumers": (lambda events: hold_at_two(events, "key_shared"), {"two active consumers"}),
    "stale owner": (confirm_in_an_old_ledger, {"stale confirmation", "lost"}),
}


def test_a_good_history_is_good_and_counted() -> None:
    verdict = check(good_history(), deduplication=True)
    assert verdict.good, verdict
    assert verdict.counts == {
        "sent": COUNT, "confirmed": COUNT, "stored": COUNT, "topics": 1, "producers": 2, "consumers": 8,
    }  # fmt: skip
    assert verdict.subscriptions["shared"] == {
        "subscriptions": 1, "delivered": COUNT, "receipts": COUNT, "again": 0, "nacked": 0,
    }  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_defect_is_found(name: str) -> None:
    events = good_history()
    plant, kinds = PLANTED[name]
    plant(events)
    verdict = check(events, deduplication=True)
    assert set(verdict.findings) == kinds, verdict
    assert all(verdict.examples[kind] for kind in kinds)


def test_every_finding_is_planted() -> None:
    assert {kind for _, kinds in PLANTED.values() for kind in kinds} == set(FINDINGS)


def test_what_is_no_defect_is_not_found() -> None:
    events = good_history()
    add_a_redelivery_after_a_nack(events)
    assert check(events).good
    store_twice(events)
    duplicated = check([*events, *_delivered_again()])
    assert duplicated.good, duplicated
    assert duplicated.counts["duplicates"] == 1
    assert check([event for event in good_history() if not isinstance(event, AckReceipt)], drained=False).good


def _delivered_again() -> Events:
    """The second copy of a message, handed out and acknowledged."""
    copy = Handed((1, COUNT, 0), "keyed", 0, key_of(0, KEYS))
    events: Events = []
    for type in TYPES:
        events.append(Received(50.0, f"{type}-1", 0, (copy,)))
        events.append(AckReceipt(50.2, 50.1, f"{type}-1", 0, (copy.position,)))
    return events


def test_a_hold_counts_only_within_an_attachment() -> None:
    """A consumer that lost its broker may still hand out what it has; whether it holds it nobody knows."""
    events = good_history()
    hold_at_two(events, "failover")
    at = index_of(events, lambda event: isinstance(event, AckReceipt) and event.asked_at == 30.0)
    events[at] = AckReceipt(30.1, 30.0, "failover-0", -1, ((1, 0, 0),))
    assert check(events).good


def test_a_topic_that_was_not_read_again_proves_nothing() -> None:
    assert (
        check([event for event in good_history() if not isinstance(event, Stored)]).findings["lost"] == COUNT
    )
