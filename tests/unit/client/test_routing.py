"""Where messages go: rules, hashes of keys, functions; sans I/O."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.client.core.routing import (
    OutgoingMessage,
    Router,
    RoutingHash,
    check_routing,
    java_string_hash,
)
from magnetar.client.options import ProducerOptions
from magnetar.proto.batch import Columns, key_hash_of
from magnetar.proto.errors import InvalidArgument

KEYS = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.binary())
PARTITIONS = st.integers(1, 200)


def router(
    routing: Any = "round_robin",
    routing_hash: RoutingHash = "murmur3",
    seed: int = 1,
    *,
    partitions: int = 1 << 31,
) -> Router:
    return Router(routing, routing_hash, partitions, random.Random(seed).randrange)


def always(_: int) -> bool:
    return True


# --- hashes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "hashed"),
    [  # of the tests of Pulsar's clients: pulsar-client-cpp/tests/HashTest.cc and pulsar-client-go/.../hash_test.go
        ("k1", 2110152746), ("k2", 1479966664), ("key1", 462881061), ("key2", 1936800180), ("key01", 39696932),
        ("key02", 751761803), ("", 0), ("hello", 0x248BFA47), ("test", 0x3A6BD213),
    ],
)  # fmt: skip
def test_murmur3_is_that_of_pulsars_clients(key: str, hashed: int) -> None:
    assert router(routing_hash="murmur3").of_key[key] == hashed


def test_a_key_goes_to_the_partition_that_pulsar_chooses() -> None:
    """Computed by `MathUtils.signSafeMod(Murmur3Hash32.getInstance().makeHash(key), 7)` of Pulsar's Java client 4.0.6."""
    chosen = {"": 0, "a": 4, "k1": 2, "key1": 6, "order-4711": 5, "ключ": 6, "\N{KEY}": 1, "x" * 1000: 1}
    assert {key: router(partitions=7).of_key[key] for key in chosen} == chosen


@pytest.mark.parametrize(
    ("key", "hashed"),
    [
        ("keykeykeykeykey1", 434058482), ("keykeykey2", 42978643), ("", 0), ("hello", 0x5E918D2), ("test", 0x364492),
        # As a Java 17 computes them: code units of UTF-16, of which the last text has two.
        ("ключ", 33309882), ("\N{KEY}", 1772660),
    ],
)  # fmt: skip
def test_the_java_hash_is_that_of_java(key: str, hashed: int) -> None:
    assert java_string_hash(key) == hashed
    assert router(routing_hash="java").of_key[key] == hashed


def test_a_key_of_bytes_is_hashed_as_pulsar_keeps_it() -> None:
    assert router(routing_hash="java").of_key[b"\x00\x01\x02\xff"] == java_string_hash("AAEC/w==")
    assert router(routing_hash="murmur3").of_key[b"\x00\x01\x02\xff"] == 1033688062


@given(key=KEYS, partitions=PARTITIONS, routing_hash=st.sampled_from(["murmur3", "java"]))
def test_a_key_always_goes_to_the_same_partition(key: Any, partitions: int, routing_hash: Any) -> None:
    one = router(routing_hash=routing_hash, partitions=partitions)
    other = router("single", routing_hash=routing_hash, seed=2, partitions=partitions)
    assert 0 <= one.of_key[key] < partitions
    assert one.of_key[key] == one.of_key[key] == other.of_key[key]
    one.resize(partitions + 1)
    assert one.of_key[key] == router(routing_hash=routing_hash, partitions=partitions + 1).of_key[key]


# --- rules -------------------------------------------------------------------------------------------------------------


@given(partitions=PARTITIONS, seed=st.integers(), rounds=st.integers(1, 3))
def test_round_robin_gives_each_partition_as_many_batches(partitions: int, seed: int, rounds: int) -> None:
    rule = router(seed=seed, partitions=partitions)
    turns = [rule.of_batch(always) for _ in range(rounds * partitions)]
    assert sorted(turns) == sorted(rounds * list(range(partitions)))
    assert turns[:partitions] == [(turns[0] + step) % partitions for step in range(partitions)]


@given(partitions=PARTITIONS, seed=st.integers(), data=st.data())
def test_round_robin_passes_over_partitions_that_have_no_broker(
    partitions: int, seed: int, data: st.DataObject
) -> None:
    ready = data.draw(st.sets(st.integers(0, partitions - 1)))
    rule = router(seed=seed, partitions=partitions)
    turns = [rule.of_batch(ready.__contains__) for _ in range(2 * partitions)]
    if ready:
        assert set(turns) == ready
    else:
        assert set(turns) == set(range(partitions)), "there is no better one"


@given(counts=st.lists(PARTITIONS, min_size=1), seed=st.integers())
def test_any_rule_follows_the_number_of_partitions(counts: list[int], seed: int) -> None:
    for rule in (router(seed=seed), router("single", seed=seed)):
        for count in counts:
            rule.resize(count)
            assert 0 <= rule.of_batch(always) < count


def test_single_stays_where_chance_put_it() -> None:
    chosen = {seed: router("single", seed=seed, partitions=8) for seed in range(50)}
    first = {seed: rule.of_batch(always) for seed, rule in chosen.items()}
    assert set(first.values()) == set(range(8))
    for seed, rule in chosen.items():
        for count in (8, 9, 80):
            rule.resize(count)
            assert rule.of_batch(lambda _: False) == first[seed]


@pytest.mark.parametrize("answer", [-1, 3, True, 1.0, None, "1"])
def test_an_answer_that_is_no_partition_is_a_clear_error(answer: Any) -> None:
    rule = router(lambda message, partitions: answer, partitions=3)
    with pytest.raises(
        InvalidArgument, match=r"answered .*; with 3 partitions it is a whole number from 0 to 2"
    ):
        rule.of_message(OutgoingMessage(b"v"))


@pytest.mark.parametrize(
    "options", [{"routing": "robin"}, {"routing": 5}, {"routing": None}, {"routing_hash": "md5"}]
)
def test_routings_that_do_not_exist_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="routing"):
        ProducerOptions("t", **options)
    with pytest.raises(InvalidArgument):
        check_routing(**{"routing": "single", "routing_hash": "java", **options})


# --- many messages -----------------------------------------------------------------------------------------------------


@given(
    keys=st.none() | st.lists(st.none() | KEYS, max_size=30),
    partitions=PARTITIONS,
    routing=st.sampled_from(["round_robin", "single", lambda message, count: len(message.value) % count]),
)
def test_many_messages_are_shared_out_as_single_ones_would_be(
    keys: list[Any] | None, partitions: int, routing: Any
) -> None:
    values: list[bytes | None] = [b"v" * number for number in range(5 if keys is None else len(keys))]
    shares = router(routing, partitions=partitions).share_out(Columns(values, keys), always)
    assert sorted(number for share in shares.values() for number in share) == list(range(len(values)))
    single = router(routing, partitions=partitions)
    of_batch = router(routing, partitions=partitions).of_batch(always)
    where: Callable[[int], int] = lambda number: (  # noqa: E731
        single.of_message(OutgoingMessage(values[number]))
        if callable(routing)
        else (of_batch if keys is None or keys[number] is None else single.of_key[keys[number]])
    )
    for partition, share in shares.items():
        assert list(share) == sorted(share)
        assert all(where(number) == partition for number in share)


def test_a_function_sees_the_whole_message() -> None:
    seen: list[OutgoingMessage] = []

    def route(message: OutgoingMessage, partitions: int) -> int:
        seen.append(message)
        return partitions - 1

    shares = router(route, partitions=4).share_out(
        Columns([b"a", None], ["k", None], [{"p": "q"}, None]), always
    )
    assert shares == {3: [0, 1]}
    assert seen == [OutgoingMessage(b"a", "k", {"p": "q"}), OutgoingMessage(None, None, None)]


def test_remembered_keys_are_bounded() -> None:
    rule = router(partitions=7)
    for number in range(25_000):
        assert rule.of_key[f"k{number}"] == key_hash_of(f"k{number}") % (1 << 31) % 7
    assert len(rule.of_key) <= 10_000
    before = len(rule.of_key)
    assert rule.of_key["x" * 1000] == 1
    assert len(rule.of_key) == before, "a large one is hashed each time"
