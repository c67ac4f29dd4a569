"""What the simulation's judge of a subscription excuses behind a seek and of messages in chunks, and what it does not."""

import pytest

from magnetar.client.chunked_id import ChunkedMessageId
from magnetar.proto.commands import AckRow
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


def test_a_consumers_own_acknowledgement_in_an_earlier_attachment_may_free_the_key() -> None:
    """It was sent again when the consumer had found the broker again, and was handed the message again, too."""
    subscription = Subscription("key_shared", "key_shared", KEYS)
    a, b = Holder("a"), Holder("b")
    hand_out(subscription, a, FIRST, 0, 1.0)
    again = subscription.acknowledging(a, [(FIRST, ("paced", 0))], 2.0)
    a.detached(subscription, 2.5)
    hand_out(subscription, a, FIRST, 0, 3.0)
    hand_out(subscription, b, NEXT, KEYS, 4.0)
    subscription.receipt(subscription.acknowledging(b, [(NEXT, ("paced", KEYS))], 4.0), 4.1)
    subscription.receipt(again, 4.9)
    subscription.receipt(subscription.acknowledging(a, [(FIRST, ("paced", 0))], 5.0), 5.1)


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


# --- what lies between the chunks of a message is acknowledged cumulatively ------------------------------------------------

LARGE = ChunkedMessageId.of(MessageId(1, 0, 0), [AckRow(1, 0, 0, 0), AckRow(1, 2, 0, 0)])
BETWEEN, BEHIND = MessageId(1, 1, 0), MessageId(1, 3, 0)
PLACES = {("paced", 0): LARGE, ("other", 0): BETWEEN, ("paced", 1): BEHIND}


def cut(*, cuts: bool = True) -> tuple[Subscription, Holder]:
    """What lies between the chunks of `LARGE` was handed out, and acknowledged with what lies before it."""
    subscription, holder = Subscription("exclusive", "exclusive", 1), Holder("a")
    subscription.chunks = True
    subscription.handed_out(holder, BETWEEN, ("other", 0), count=0, epoch=0, now=1.0, failed_sends={})
    attempt = subscription.acknowledging_up_to(holder, BETWEEN, 1.0, cuts=cuts)
    subscription.receipt_up_to(attempt, BETWEEN, 1.1)
    return subscription, holder


def test_a_message_that_is_cut_need_not_come() -> None:
    """Seed 68 of `mixed_once`: the consumer left before its program took the message, whose first chunk was acknowledged."""
    subscription, holder = cut()
    holder.detached(subscription, 2.0)
    hand_out(subscription, holder, BEHIND, 1, 3.0)
    subscription.check_passed_over(PLACES)
    assert subscription.lacks(PLACES) == []


def test_a_message_that_is_cut_need_not_come_again() -> None:
    subscription, holder = cut()
    hand_out(subscription, holder, LARGE, 0, 1.2)
    holder.detached(subscription, 2.0)
    hand_out(subscription, holder, BEHIND, 1, 3.0)
    assert subscription.lacks(PLACES) == []


def test_native_clients_cut_nothing() -> None:
    subscription, holder = cut(cuts=False)
    assert subscription.lacks(PLACES) == [("paced", 0), ("paced", 1)]
    with pytest.raises(Violation, match=r"\('paced', 0\)\] did not come before it"):
        hand_out(subscription, holder, BEHIND, 1, 3.0)


def test_a_message_beside_the_cut_is_missed() -> None:
    subscription, holder = cut()
    places = {**PLACES, ("paced", 0): MessageId(1, 2, 0)}
    hand_out(subscription, holder, BEHIND, 1, 3.0)
    assert subscription.lacks(places) == [("paced", 0)]
    with pytest.raises(Violation, match=r"\('paced', 0\) at 1:2:0 and 0 others did not come in order"):
        subscription.check_passed_over(places)


def test_behind_a_seek_nothing_is_cut_any_more() -> None:
    subscription, holder = cut()
    seek(subscription)
    hand_out(subscription, holder, BEHIND, 1, 3.0)
    assert subscription.lacks(PLACES) == [("paced", 0), ("other", 0)]
    with pytest.raises(
        Violation, match=r"\('paced', 0\) at 1:0:0 and 0 others did not come in order behind a seek"
    ):
        subscription.check_passed_over(PLACES)
