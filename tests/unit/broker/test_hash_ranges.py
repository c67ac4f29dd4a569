"""Which consumer owns which slots of a key_shared subscription."""

import random
from bisect import bisect_right
from typing import Any

from xxhash import xxh3_64_intdigest

from magnetar.broker.dispatch.core.consumer import Consumer
from magnetar.broker.dispatch.core.selection.hash_ranges import POINTS, SLOTS, Owners

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


def owners_of_one_sorted_list(names: dict[Consumer, str]) -> list[Consumer]:
    """The owner of every slot, from all places in one list that is sorted anew: what the ring is by definition."""
    ring: dict[int, Consumer] = {}
    for consumer, name in names.items():
        for point in range(POINTS):
            digest = xxh3_64_intdigest(f"{name}\n{point}".encode())
            ring[digest % SLOTS << 48 | digest >> 16] = consumer
    places = sorted(ring)
    return [ring[places[bisect_right(places, (slot + 1 << 48) - 1) - 1]] for slot in range(SLOTS)]


def test_consumers_that_come_and_go_own_what_a_ring_that_is_made_anew_gives_them() -> None:
    rng, owners, names = random.Random(5), Owners(), dict[Consumer, str]()
    for step in range(60):
        if names and rng.random() < 0.4:
            consumer = rng.choice(list(names))
            owners.remove(consumer)
            del names[consumer]
        else:
            consumer = Consumer(f"c{rng.randrange(12)}", 0, PORT)
            owners.add(consumer)
            labels = [consumer.name, *(f"{consumer.name}\n{number}" for number in range(1, 60))]
            names[consumer] = next(label for label in labels if label not in names.values())
        if names and step % 20 == 0:
            assert [owners[slot] for slot in range(SLOTS)] == owners_of_one_sorted_list(names)
    for consumer in names:
        owners.remove(consumer)
    assert owners[7] is None


def test_one_that_comes_or_goes_moves_few_places_of_the_others() -> None:
    owners = Owners()
    for number in range(100):
        owners.add(Consumer(f"c{number}", 0, PORT))
    assert sum(map(len, owners._arcs)) == 100 * POINTS
    assert max(map(len, owners._arcs)) < 100 * POINTS / 25
