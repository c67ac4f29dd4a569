"""Planned hand-over of brokers, bookies and zones: who is meant, what is refused, and the way back."""

from __future__ import annotations

import asyncio

import pytest

from magnetar.broker.log.records import NamespaceRecord, namespace_path
from magnetar.broker.ownership.draining import ClusterMember, choose
from magnetar.ledger.directory import encode_registration
from magnetar.metadata.paths import cookie_path
from magnetar.proto.errors import InvalidArgument, NotFound
from magnetar.proto.policies import Policies
from support.cluster_kit import Cluster, brokers
from unit.broker.ownership.test_ownership import load_all, until

KNOWN = [
    ClusterMember("broker", "a", "x", drained=False),
    ClusterMember("broker", "same", "y", drained=False),
    ClusterMember("bookie", "b1", "x", drained=True),
    ClusterMember("bookie", "same", "", drained=False),
]


def names(found: list[ClusterMember]) -> list[str]:
    return [f"{member.kind} {member.name}" for member in found]


def test_a_name_or_a_zone_is_recognized() -> None:
    assert names(choose(KNOWN, "a")) == ["broker a"]
    assert names(choose(KNOWN, "b1")) == ["bookie b1"]
    assert names(choose(KNOWN, zone="x")) == ["broker a", "bookie b1"]
    assert names(choose(KNOWN, zone="x", kind="bookie")) == ["bookie b1"]
    assert names(choose(KNOWN, "same", kind="broker")) == ["broker same"]


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"name": "same"}, "'same' is the name of a broker and of a bookie: give the kind"),
        ({"name": "c"}, "no broker or bookie 'c' in this cluster; brokers: a, same; bookies: b1, same"),
        ({"name": "c", "kind": "bookie"}, "no bookie 'c' in this cluster; bookies: b1, same"),
        ({"zone": "z"}, r"in zone 'z' \(settings broker.zone, bookie.zone\); zones: x, y"),
        ({"name": "a", "zone": "x"}, "give the name of a broker or a bookie, or a zone"),
        ({}, "give the name of a broker or a bookie, or a zone"),
        ({"name": "a", "kind": "proxy"}, "'proxy' is no kind of a member; there are broker and bookie"),
    ],
)
def test_whoever_cannot_be_meant_is_one_clear_error(asked: dict[str, str], error: str) -> None:
    with pytest.raises((InvalidArgument, NotFound), match=error):
        choose(KNOWN, **asked)


async def bookies(cluster: Cluster, **zones: str) -> None:
    """They register in the cluster's metadata."""
    for name, zone in zones.items():
        await cluster.metadata.create(cookie_path(name), b"")
        await cluster.metadata.create(f"/bookies/{name}", encode_registration("127.0.0.1:1", zone=zone))


async def test_a_zone_is_drained_and_comes_back_also_what_is_stopped_meanwhile() -> None:
    async with brokers(default_bundles=8) as cluster:
        for name, zone in (("a", "x"), ("b", "x"), ("c", "y")):
            await cluster.start(name, zone=zone, default_bundles=8)
        await bookies(cluster, b1="x", b2="y", b3="y")
        await load_all(cluster)
        c = cluster.brokers["c"].ownership
        begun = await c.administration.drain(zone="x")
        assert (begun.brokers, begun.bookies) == (["a", "b"], ["b1"])
        await until(lambda: not cluster.brokers["a"].topics and not cluster.brokers["b"].topics)
        await until(
            lambda: (
                [cluster.brokers[name].ownership.state for name in "abc"] == ["drained", "drained", "ready"]
            )
        )
        assert (await c.administration.drain(zone="x")).over, "asked again, it says how far that is"
        await cluster.stop("a")
        await cluster.metadata.delete("/bookies/b1")
        undone = await c.administration.drain(zone="x", undo=True)
        assert (undone.brokers, undone.bookies) == (["a", "b"], ["b1"])
        assert await cluster.metadata.children("/draining-brokers") == []
        assert await cluster.metadata.children("/draining") == []


async def test_the_last_broker_and_the_last_of_a_group_are_not_drained() -> None:
    async with brokers("a") as cluster:
        a = cluster.brokers["a"].ownership
        with pytest.raises(InvalidArgument, match="broker a cannot be drained: no other broker takes topics"):
            await a.administration.drain("a")
        await cluster.start("b", group="fast")
        await a.administration.drain("a")
        with pytest.raises(InvalidArgument, match="broker b cannot be drained: no other broker takes topics"):
            await a.administration.drain("b")
        await a.administration.drain("a", undo=True)
        record = NamespaceRecord(Policies(broker_group="fast")).encode()
        await cluster.metadata.create(namespace_path("shop/live"), record)
        with pytest.raises(
            InvalidArgument, match="no broker would be left that namespace shop/live may have"
        ):
            await a.administration.drain("b")
        assert await cluster.metadata.children("/draining-brokers") == []


@pytest.mark.parametrize("kind", ["broker", "bookie"])
async def test_of_drains_that_begin_at_once_not_all_go_on(kind: str) -> None:
    """Regression: each saw the members of the others unmarked, and all of the cluster was drained."""
    async with brokers("a", "b") as cluster:
        await bookies(cluster, a="", b="")
        record = NamespaceRecord(Policies(ensemble_size=1, write_quorum=1, ack_quorum=1)).encode()
        await cluster.metadata.create(namespace_path("shop/live"), record)
        drains = [
            one.ownership.administration.drain(name, kind=kind) for name, one in cluster.brokers.items()
        ]
        ended = await asyncio.gather(*drains, return_exceptions=True)
        refused = [one for one in ended if isinstance(one, InvalidArgument)]
        why = "no other broker takes topics" if kind == "broker" else "shop/live wants ledgers on 1 bookies"
        assert refused
        assert why in str(refused[0])
        marks = await cluster.metadata.children("/draining-brokers" if kind == "broker" else "/draining")
        assert len(marks) + len(refused) == 2


async def test_a_bookie_that_a_namespace_needs_is_not_drained() -> None:
    async with brokers("a") as cluster:
        await bookies(cluster, b1="", b2="")
        policies = Policies(ensemble_size=2, write_quorum=2, ack_quorum=2)
        await cluster.metadata.create(namespace_path("shop/live"), NamespaceRecord(policies).encode())
        a = cluster.brokers["a"].ownership
        with pytest.raises(
            InvalidArgument, match=r"bookie b1 .*: namespace shop/live wants ledgers on 2 bookies"
        ):
            await a.administration.drain("b1")
        assert await cluster.metadata.children("/draining") == []


async def test_damaged_nodes_keep_nobody_else_from_a_drain_and_its_end() -> None:
    """Regression: every drain failed with what msgpack said, and every `undo`."""
    async with brokers("a", "b") as cluster:
        for node in ("/bookies/foreign", "/draining-brokers/foreign", "/draining/foreign"):
            await cluster.metadata.create(node, b"junk")
        a = cluster.brokers["a"].ownership
        assert (await a.administration.drain("b")).brokers == ["b"]
        await a.administration.drain("b", undo=True)
        for kind in ("broker", "bookie"):
            await a.administration.drain("foreign", kind=kind, undo=True)
        assert await cluster.metadata.children("/draining-brokers") == []
        assert await cluster.metadata.children("/draining") == []
