"""Bundles and bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.ownership.core.bundles import (
    HASHES,
    Bounds,
    Bundle,
    middle,
    parse_bundle_or_topic,
    topic_hash,
)
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName

NAMESPACE = "public/default"


def test_the_hash_of_a_topic_never_changes() -> None:
    assert topic_hash(TopicName.parse("orders")) == 0xA419B579


@given(st.integers(1, 64), st.integers(0, HASHES - 1))
def test_every_hash_is_in_one_bundle(count: int, hash: int) -> None:
    bounds = Bounds.even(count)
    bounds.check()
    bundles = bounds.bundles(NAMESPACE)
    assert [bundle for bundle in bundles if bundle.first <= hash <= bundle.last] == [
        bounds.bundle_of(NAMESPACE, hash)
    ]
    assert bundles[0].first == 0
    assert bundles[-1].last == HASHES - 1
    assert all(Bundle.parse(str(bundle)) == bundle for bundle in bundles)


@given(st.lists(st.integers(0, HASHES - 1), max_size=20), st.lists(st.integers(0, HASHES - 1), max_size=9))
def test_a_split_divides_one_bundle_and_its_topics(places: list[int], hashes: list[int]) -> None:
    bounds = Bounds.even(4)
    for place in places:
        bundle = bounds.bundle_of(NAMESPACE, place)
        if bundle.first == bundle.last:
            continue
        at = middle(bundle, hashes)
        divided = bounds.split(bundle, at)
        divided.check()
        parts = [divided.bundle_of(NAMESPACE, bundle.first), divided.bundle_of(NAMESPACE, at)]
        assert parts[0].first == bundle.first
        assert parts[1].last == bundle.last
        assert parts[0].last + 1 == parts[1].first == at
        assert set(divided.bundles(NAMESPACE)) - set(parts) == set(bounds.bundles(NAMESPACE)) - {bundle}
        inside = {hash for hash in hashes if bundle.first <= hash <= bundle.last}
        if len(inside) > 1:
            assert all(any(part.first <= hash <= part.last for hash in inside) for part in parts)
        bounds = divided


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a/b",
        "a/0x00000000_0xffffffff",
        "a/b/0x1_0x2",
        "a/b/0x00000002_0x00000001",
        "a//0x00000000_0x00000001",
    ],
)
def test_what_is_no_bundle_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="not a bundle"):
        Bundle.parse(text)


@pytest.mark.parametrize("firsts", [[], [1], [0, 0], [0, 5, 4], [0, HASHES]])
def test_what_are_no_bounds_is_refused(firsts: list[int]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        Bounds.of(firsts)


def test_a_bundle_is_not_divided_outside_itself() -> None:
    bounds = Bounds.even(2)
    first = bounds.bundles(NAMESPACE)[0]
    for at in (0, first.last + 1):
        with pytest.raises(InvalidArgument, match="cannot be divided"):
            bounds.split(first, at)
    with pytest.raises(InvalidArgument, match="one hash"):
        middle(Bundle(NAMESPACE, 7, 7), [7])


@pytest.mark.parametrize("text", ["orders", "public/default/orders", "persistent://public/default/orders"])
def test_a_bundle_may_be_named_by_any_form_of_a_topics_name(text: str) -> None:
    assert parse_bundle_or_topic(text) == TopicName.parse("orders")


def test_three_parts_whose_last_one_is_a_range_are_a_bundle() -> None:
    assert parse_bundle_or_topic("t/n/0x00000000_0x7fffffff") == Bundle("t/n", 0, 0x7FFFFFFF)
    assert parse_bundle_or_topic("0xfeed") == TopicName.parse("0xfeed")
    with pytest.raises(InvalidArgument, match="want tenant/namespace/0x00000000_0x3fffffff"):
        parse_bundle_or_topic("t/n/0xfeed")


def test_a_bundle_that_was_divided_is_not_divided_again() -> None:
    """Regression, found by the simulation: the same hash twice damaged the bounds of its namespace."""
    bounds = Bounds.even(2)
    first = bounds.bundles(NAMESPACE)[0]
    divided = bounds.split(first, 4711)
    with pytest.raises(InvalidArgument, match="has no bundle"):
        divided.split(first, 4711)
