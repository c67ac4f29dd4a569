"""/magnetar/v1: what is wrong, ledgers, fragments, repairs, damage and drains, over a store that real bookies would fill."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.broker.service import stored
from magnetar.ledger import RegisteredBookies
from magnetar.ledger.directory import encode_registration
from magnetar.ledger.replication.core.request import Reason, RepairRequest
from magnetar.metadata.damage import add_ranges, damaged_path
from magnetar.metadata.ledgers import ledger_path
from magnetar.metadata.paths import AUDITOR_PATH, COOKIES_PATH
from support.admin_kit import Admin, administered, serving_admin
from support.broker_kit import FakeClient, running_broker
from support.cluster_kit import brokers
from support.repair_kit import RepairCluster

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
OWN = "/magnetar/v1"
ORDERS = f"{OWN}/topics/persistent/public/default/orders/ledgers"


@asynccontextmanager
async def on_bookies(*names: str, **settings: Any) -> AsyncIterator[tuple[Admin, RepairCluster]]:
    """A broker that writes to these bookies."""
    cluster = await RepairCluster.start(*names)
    directory = await RegisteredBookies.open(cluster.metadata)
    try:
        async with (
            running_broker(await cluster.client(), cluster.metadata, bookies=directory, **settings) as broker,
            serving_admin(broker) as admin,
        ):
            yield admin, cluster
    finally:
        await directory.close()
        await cluster.close()


async def rows(admin: Admin, path: str, what: str) -> list[Any]:
    """All pages."""
    answer = await admin("GET", f"{OWN}/{path}")
    found = list(answer.body[what])
    while (following := answer.body["next"]) is not None:
        answer = await admin("GET", f"{OWN}/{path}&after={following}")
        found += answer.body[what]
    return found


async def test_what_is_wrong_and_who_is_there() -> None:
    async with administered() as admin:
        found = (await admin("GET", f"{OWN}/problems")).body
        assert (found["broker"], found["findings"]) == ("standalone", [])
        assert (await admin("GET", f"{OWN}/busiest?count=5")).body["topics"] == 0
        assert (await admin("GET", f"{OWN}/busiest?count=500")).status == 412
        assert "bookies" in (await admin("GET", f"{OWN}/bookies")).body


async def test_the_ledgers_of_a_topic_say_where_each_of_its_entries_is() -> None:
    settings = {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2, "max_ledger_entries": 1}
    async with on_bookies("b1", "b2", **settings) as (admin, _):
        client = FakeClient(admin.broker)
        await client.producer()
        for number, text in enumerate((b"a", b"bb", b"ccc"), 1):
            client.publish_batch([text])
            await client.confirmed(number)
        found = (await admin("GET", f"{ORDERS}?count=2")).body
        first, second = found["ledgers"]
        assert (first["messages"], first["first_offset"], first["closed"]) == (1, 0, True)
        assert second["first_offset"] == 1
        assert first["first_append_ms"] == first["last_append_ms"] == 1_000_000
        assert first["stored"]["state"] == "closed"
        (fragment,) = first["stored"]["fragments"]
        assert (fragment["first"], fragment["last"], sorted(fragment["bookies"])) == (0, 0, ["b1", "b2"])
        rest = (await admin("GET", f"{ORDERS}?after={found['next']}")).body
        assert [row["first_offset"] for row in rest["ledgers"]][:1] == [2]
        assert rest["next"] is None
        one = (await admin("GET", f"{OWN}/ledgers/{first['stored_id']}")).body
        assert one["stored"] == first["stored"]
        assert one["stored"]["properties"]["topic"] == "persistent://public/default/orders"
        assert (one["bookies"], one["repair"], one["damage"]) == ({"b1": "", "b2": ""}, None, [])


async def test_all_ledgers_in_pages_and_those_of_one_bookie(monkeypatch: pytest.MonkeyPatch) -> None:
    async with on_bookies("b1", "b10", "b3") as (admin, cluster):
        made = [
            await cluster.closed_ledger(2, ensemble_size=1, write_quorum=1, ack_quorum=1) for _ in range(60)
        ]
        found = await rows(admin, "ledgers?count=7", "ledgers")
        assert [row["ledger"] for row in found] == made
        on_b1 = [row["ledger"] for row in found if row["fragments"][0]["bookies"] == ["b1"]]
        assert 0 < len(on_b1) < 60
        assert [row["ledger"] for row in await rows(admin, "ledgers?count=7&bookie=b1", "ledgers")] == on_b1
        record = await cluster.metadata.get(ledger_path(made[0]))
        assert record is not None
        await cluster.metadata.create(ledger_path(2_500), record.value)
        for after, wanted in ((made[-1], [2_500]), (1_999, [2_500]), (2_499, [2_500]), (2_500, [])):
            page = (await admin("GET", f"{OWN}/ledgers?after={after}")).body
            assert [row["ledger"] for row in page["ledgers"]] == wanted
        await cluster.metadata.delete(ledger_path(2_500))
        monkeypatch.setattr(stored, "_MAX_LOOKED", 10)
        page = (await admin("GET", f"{OWN}/ledgers?bookie=b1")).body
        assert page["next"] == made[9], "the work of a page is bounded, whatever it finds"
        assert [row["ledger"] for row in await rows(admin, "ledgers?bookie=b1", "ledgers")] == on_b1
        monkeypatch.setattr(stored, "_MAX_BYTES", 1)
        assert len((await admin("GET", f"{OWN}/ledgers")).body["ledgers"]) == 1
        await cluster.metadata.delete(ledger_path(made[3]))
        await cluster.metadata.create(ledger_path(made[3]), b"\xc1")
        unreadable = (await admin("GET", f"{OWN}/ledgers/{made[3]}")).body["stored"]
        assert (unreadable["state"], "damaged" in unreadable["error"]) == ("unreadable", True)


async def test_repairs_say_which_why_since_when_and_who() -> None:
    async with on_bookies("b1", "b2") as (admin, cluster):
        quorums = {"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2}
        made = [await cluster.closed_ledger(2, **quorums) for _ in range(3)]
        for ledger in made:
            await cluster.queue.add(ledger, RepairRequest({"b2": Reason.LOST}, since_ms=5))
        await cluster.queue.add(10**6, RepairRequest({"b2": Reason.LOST}))  # deleted since
        request = await cluster.queue.get(made[0])
        assert request is not None
        await cluster.queue.write_note(made[0], *request, "no bookie is left")
        session = await cluster.metadata.open_session(10.0)
        assert await cluster.queue.lock(made[1], session, "bookie b1")
        await cluster.metadata.create(AUDITOR_PATH, b"bookie b1")
        await cluster.unregister("b2")
        page = (await admin("GET", f"{OWN}/repairs?count=2")).body
        assert (page["waiting"], page["auditor"], page["next"]) == (4, "bookie b1", made[1])
        first, second = page["ledgers"]
        assert first["repair"] == {
            "bookies": {"b2": "lost"}, "placement": False, "since_ms": 5, "note": "no bookie is left", "worker": "",
        }  # fmt: skip
        assert first["bookies"] == {"b1": "", "b2": "it is not registered any more"}
        assert (second["ledger"], second["repair"]["worker"]) == (made[1], "bookie b1")
        found = await rows(admin, "repairs?count=1", "ledgers")
        assert [row["ledger"] for row in found] == [*made, 10**6]
        assert found[-1]["stored"] is None
        path = f"/underreplicated{ledger_path(made[2]).removeprefix('/ledgers')}"
        await cluster.metadata.delete(path)
        await cluster.metadata.create(path, b"\xc1")
        (broken,) = (await admin("GET", f"{OWN}/repairs?after={made[1]}&count=1")).body["ledgers"]
        assert "cannot be read" in broken["repair"]["note"]


async def test_damage_is_listed_by_bookie_and_ledger() -> None:
    async with on_bookies("b1", "b2") as (admin, cluster):
        reports = [("b1", 3), ("b1", 20), ("b2", 1), ("b2", 3)]
        for bookie, ledger in reports:
            await _damage(cluster, bookie, ledger)
        await cluster.metadata.create(damaged_path("gone", 7), b"\xc1")
        found = await rows(admin, "damage?count=1", "copies")
        assert [(row["bookie"], row["ledger"]) for row in found] == [*reports, ("gone", 7)]
        assert (found[0]["ranges"], found[0]["error"]) == ([[0, 4, "checksum"]], "")
        assert "damaged" in found[-1]["error"]
        assert [row["ledger"] for row in await rows(admin, "damage?bookie=b2&count=1", "copies")] == [1, 3]


async def _damage(cluster: RepairCluster, bookie: str, ledger: int) -> None:
    await add_ranges(cluster.metadata, bookie, ledger, [(0, 4, "checksum")])


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("ledgers/99", 404, "ledger 99 does not exist"),
        ("ledgers/-1", 412, "outside the ids that there can be"),
        (f"ledgers/{10**30}", 412, "outside the ids that there can be"),
        ("ledgers?after=" + "9" * 7_000, 400, "after is not as it is wanted"),
        ("ledgers/many", 400, "ledger is not as it is wanted"),
        ("ledgers/%2e%2e", 400, "ledger is not as it is wanted"),
        ("ledgers?count=0", 412, "want 1 to 1000"),
        ("ledgers?count=1001", 412, "want 1 to 1000"),
        ("repairs?count=-1", 412, "want 1 to 1000"),
        ("damage?count=many", 400, "count is not as it is wanted"),
        ("ledgers?after=x", 400, "after is not as it is wanted"),
        ("ledgers?bookie=b9", 404, "there is no bookie 'b9' in this cluster; it has b1"),
        ("damage?bookie=..%2Fb1", 404, "there is no bookie '../b1'"),
        ("damage?bookie=" + "x" * 5000, 404, "there is no bookie 'xxxx"),
        ("topics/persistent/public/default/nothing/ledgers", 404, "does not exist"),
        ("topics/non-persistent/public/default/nothing/ledgers", 501, "nothing of it is stored"),
        ("topics/persistent/public/default/a%2Fb/ledgers", 412, ""),
        ("brokers/b9/drain", 501, "this broker is alone"),
        ("nothing", 404, "there is no /magnetar/v1/nothing here"),
    ],
)
async def test_what_is_asked_wrongly_is_one_clear_reason(path: str, status: int, reason: str) -> None:
    async with on_bookies("b1") as (admin, _):
        refused = await admin("GET", f"{OWN}/{path}")
        assert (refused.status, reason in refused.reason) == (status, True), refused
        assert len(refused.reason) < 600


@pytest.mark.parametrize(
    "after", ["/", "b1/", "b1/x%00", "%F0%9F%98%80", "b1/" + "9" * 5000, "../..", "%ed%a0%80"]
)
async def test_a_page_behind_what_nobody_named_is_a_page(after: str) -> None:
    async with on_bookies("b1") as (admin, cluster):
        await _damage(cluster, "b1", 1)
        found = await admin("GET", f"{OWN}/damage?after={after}")
        assert (found.status, len(found.body["copies"]) <= 1, found.body["next"]) == (200, True, None)
        for path in ("ledgers", "repairs"):
            assert (await admin("GET", f"{OWN}/{path}?after={10**18}")).body["next"] is None


async def test_of_a_partitioned_topic_each_partition_is_asked() -> None:
    async with administered() as admin:
        await admin("PUT", "persistent/public/default/orders/partitions", 2)
        refused = await admin("GET", ORDERS)
        assert (refused.status, "orders-partition-0 to 1" in refused.reason) == (405, True)
        assert (await admin("GET", ORDERS.replace("orders", "orders-partition-1"))).status == 200


async def test_a_standalone_service_has_no_drains() -> None:
    async with administered() as admin:
        assert (await admin("GET", f"{OWN}/drains")).body["can_be_stopped"] is False
        for method, path in (
            ("POST", "brokers/a/drain"),
            ("DELETE", "zones/x/drain"),
            ("GET", "bookies/b/drain"),
        ):
            refused = await admin(method, f"{OWN}/{path}")
            assert (refused.status, "this broker is alone" in refused.reason) == (501, True)


async def test_a_broker_that_is_alone_says_where_each_protocol_is_spoken() -> None:
    async with administered() as admin:
        (row,) = (await admin("GET", f"{OWN}/brokers")).body["brokers"]
        settings = admin.broker.settings
        assert (row["url"], row["pulsar"]) == (settings.service_url, settings.pulsar_url_for_clients)
        assert row["pulsar"].startswith("pulsar://")


async def test_brokers_bookies_and_zones_are_drained_and_come_back() -> None:
    async with brokers("a") as cluster:
        await cluster.start("b", zone="east")
        for name in ("b1", "b2"):
            await cluster.metadata.create(f"{COOKIES_PATH}/{name}", b"")
            await cluster.metadata.create(f"/bookies/{name}", encode_registration("127.0.0.1:1", zone="east"))
        async with serving_admin(cluster.brokers["a"].broker) as admin:
            unknown = await admin("POST", f"{OWN}/brokers/zzz/drain")
            assert (unknown.status, "brokers: a, b" in unknown.reason) == (404, True)
            assert (await admin("DELETE", f"{OWN}/zones/west/drain")).status == 404
            idle = await admin("GET", f"{OWN}/brokers/b/drain")
            assert (idle.status, idle.reason) == (404, "broker b is not drained")
            begun = await admin("POST", f"{OWN}/brokers/b/drain")
            assert (begun.status, begun.body["brokers"], begun.body["can_be_stopped"]) == (200, ["b"], True)
            assert (await admin("GET", f"{OWN}/brokers/b/drain")).body == begun.body
            refused = await admin("POST", f"{OWN}/brokers/a/drain")
            assert (refused.status, "no other broker takes topics" in refused.reason) == (412, True)
            assert (await admin("GET", f"{OWN}/zones/east/drain")).body["bookies"] == []
            assert (await admin("POST", f"{OWN}/bookies/b1/drain")).body["bookies"] == ["b1"]
            told = (await admin("GET", f"{OWN}/drains")).body
            assert (told["brokers"], told["bookies"]) == (["b"], ["b1"])
            undone = (await admin("DELETE", f"{OWN}/zones/east/drain")).body
            assert (undone["brokers"], "can_be_stopped" in undone) == (["b"], False)
            assert (await admin("GET", f"{OWN}/zones/east/drain")).reason == "nothing of zone east is drained"
            assert await cluster.metadata.children("/draining") == []
