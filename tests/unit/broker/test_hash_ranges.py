"""Which consumer owns which slots of a key_shared subscription."""

from typing import Any

from magnetar.broker.dispatch.core.consumer import Consumer
from magnetar.broker.dispatch.core.selection.hash_ranges import SLOTS, Owners

PORT: Any = None


def shares(owners: Owners) -> dict[Consumer | None, set[int]]:
    found: dict[Consumer | None, set[int]] = {}
    for slot in range(SLOTS):
        found.setdefault(owners[slot], set()).add(slot)
    return found


def test_who_comes_or_goes_changes_the_owner_of_its_own_share_only() -> None:
    owners = Owners()
    consumers = [Consumer(f"c{number}", 0, PORT) for number in range(20)]
    for consumer in consumers:
        owners.add(consumer)
    before = shares(owners)
    assert set(before) == set(consumers)
    assert all(SLOTS / 20 / 2 < len(slots) < SLOTS / 20 * 2 for slots in before.values())
    late = Consumer("new", 0, PORT)
    owners.add(late)
    for owner, slots in shares(owners).items():
        assert owner is late or slots <= before[owner]
    owners.remove(late)
    assert shares(owners) == before


def test_consumers_of_the_same_name_have_a_share_each() -> None:
    owners = Owners()
    first, second = Consumer("worker", 0, PORT), Consumer("worker", 0, PORT)
    owners.add(first)
    owners.add(second)
    assert all(len(slots) > SLOTS / 4 for slots in shares(owners).values())
    assert set(shares(owners)) == {first, second}
    owners.remove(second)
    assert set(shares(owners)) == {first}


def test_what_no_sticky_consumer_names_is_owned_by_nobody() -> None:
    owners = Owners()
    assert owners[7] is None
    sticky = Consumer("s", 0, PORT, hash_ranges=[(10, 19), (SLOTS - 2, SLOTS - 1)])
    owners.add(sticky)
    assert shares(owners)[sticky] == {*range(10, 20), SLOTS - 2, SLOTS - 1}
    assert owners[9] is None
    assert owners[0] is None
