"""What the simulation's judge of a subscription excuses behind a seek, and what it does not."""

import pytest

from magnetar.proto.ids import MessageId
from sim.deliveries import Holder, Subscription, Violation

FIRST, NEXT = MessageId(1, 0, 0), MessageId(1, 1, 0)
KEYS = 7


def hand_out(subscription: Subscription, holder: Holder, id: MessageId, number: int, now: float) -> None:
    subscription.handed_out(
        holder, id, ("paced", number), count=0, epoch=subscription.seeks, now=now, failed_sends={}
    )


def seek(subscription: Subscription) -> None:
    subscription.seek_begins()
    subscription.sought(MessageId(0, 0, 0), subscription.seeks + 1, {})


def overlap_behind_a_seek(subscription: Subscription, a: Holder, b: Holder) -> None:
    """`a` has the first message of a key until 5.0, and `b` the next one at 4.0, each by its own receipt."""
    seek(subscription)
    for holder in (a, b):
        holder.detached(subscription, 2.5)
    hand_out(subscription, a, FIRST, 0, 3.0)
    hand_out(subscription, b, NEXT, KEYS, 4.0)
    subscription.receipt(subscription.acknowledging(b, [(NEXT, ("paced", KEYS))], 4.0), 4.1)
    subscription.receipt(subscription.acknowledging(a, [(FIRST, ("paced", 0))], 5.0), 5.1)


@pytest.mark.parametrize("quietly", [False, True])
def test_an_acknowledgement_from_before_a_seek_may_take_effect_behind_it(quietly: bool) -> None:
    """Seed 100 of `once`: it was sent again when its consumer had found the broker again, and freed the key."""
    subscription = Subscription("key_shared", "key_shared", KEYS)
    a, b = Holder("a"), Holder("b")
    hand_out(subscription, b, FIRST, 0, 1.0)
    subscription.acknowledging(b, [(FIRST, ("paced", 0))], 2.0, quietly=quietly)
    overlap_behind_a_seek(subscription, a, b)


@pytest.mark.parametrize("quietly", [False, True])
def test_one_whose_receipt_came_before_the_seek_has_had_its_effect(quietly: bool) -> None:
    subscription = Subscription("key_shared", "key_shared", KEYS)
    a, b = Holder("a"), Holder("b")
    hand_out(subscription, b, FIRST, 0, 1.0)
    attempt = subscription.acknowledging(b, [(FIRST, ("paced", 0))], 2.0, quietly=quietly)
    if quietly:  # the receipt of what came behind it
        attempt = subscription.acknowledging(b, [(NEXT, ("paced", KEYS))], 2.1)
    subscription.receipt(attempt, 2.2)
    with pytest.raises(Violation, match=r"a held .* and b another message of its key"):
        overlap_behind_a_seek(subscription, a, b)
