"""HTTP of a broker: what is asked wrongly, what another broker serves, and what is asked of each partition."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from magnetar.broker.listeners.http.openapi import document, page
from magnetar.broker.listeners.http.server import ROUTES, TABLE
from magnetar.broker.listeners.http.shapes import iso
from magnetar.broker.listeners.http.statuses import STATUSES, status_of
from magnetar.proto import commands
from magnetar.proto.batch import encode_batch
from magnetar.proto.errors import ERRORS_BY_CODE
from support.admin_kit import Admin, administered, serving_admin
from support.broker_kit import FakeClient
from support.cluster_kit import brokers
from support.service import held_port

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
TOPIC = "persistent/public/default/orders"


async def test_methods_that_a_path_has() -> None:
    async with administered() as admin:
        await admin("PUT", TOPIC)
        told = await admin("OPTIONS", f"{TOPIC}/stats")
        assert (told.status, told.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
        refused = await admin("PATCH", TOPIC)
        assert (refused.status, refused.headers["allow"]) == (405, "DELETE, OPTIONS, PUT")
        assert refused.reason == "this path has no PATCH, only DELETE, OPTIONS, PUT"
        looked = await admin("HEAD", f"{TOPIC}/stats")
        assert (looked.status, looked.body) == (200, None)
        assert int(looked.headers["content-length"]) > 1000
        assert (await admin("GET", "/nothing/here")).status == 404
        assert (await admin("GET", "/status.html")).body == b"OK"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("persistent/public/default/%2e%2e/stats", 412),
        ("persistent/public/../orders/stats", 412),
        ("persistent/public/default/a%2Fb/stats", 412),
        ("persistent/public/default/a%00b/stats", 412),
        ("persistent/public/default/%ff/stats", 400),
        ("persistent/public/default/" + "x" * 300 + "/stats", 412),
        ("persistent/public/default/" + "x" * 10_000 + "/stats", 400),
        ("persistent//default/orders/stats", 404),
        ("persistent/" + "x/" * 3_000, 404),
        (f"{TOPIC}/subscription/%F0%9F%98%80/position/1", 404),
        (f"{TOPIC}/subscription/s/skip/many", 400),
        (f"{TOPIC}/subscription/s/skip/0", 412),
        (f"{TOPIC}/subscription/s/expireMessages/-1", 412),
        (f"{TOPIC}/ledger/-1/entry/-1", 412),
        (f"{TOPIC}/ledger/{10**30}/entry/0", 412),
    ],
)
async def test_rule_47_a_hostile_path_is_refused_with_a_reason(path: str, status: int) -> None:
    async with administered() as admin:
        await admin("PUT", TOPIC)
        method = "POST" if "/skip/" in path or "/expire" in path else "GET"
        refused = await admin(method, path)
        assert refused.status == status
        if len(path) < 8_000:  # of longer ones the server of HTTP reads nothing
            assert refused.reason
            assert len(refused.reason) < 1_000


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "the body is not as it is wanted here: Input data was truncated"),
        (b"", 400, "this needs a body of JSON"),
        (b"\xff", 400, "JSON is malformed"),
        (b'"many"', 400, "got `str`"),
        (b"[" * 100_000, 400, "got `array`"),
        (b"0", 406, "should be greater than 0"),
        (b"9" * 30, 412, "a topic has 1 to 10,000 partitions"),
        (b"1" * (1024 * 1024 + 1), 413, "the body is larger than 1 MiB"),
    ],
)
async def test_rule_47_a_body_that_is_none_is_refused_with_a_reason(
    body: bytes, status: int, reason: str
) -> None:
    async with administered() as admin:
        refused = await admin("PUT", f"{TOPIC}/partitions", raw=body)
        assert refused.status == status
        assert reason in refused.reason
        assert (await admin("GET", f"{TOPIC}/partitions")).body == {"partitions": 0, "deleted": False}


async def test_every_error_has_a_status() -> None:
    assert {status_of(cls()) for cls in ERRORS_BY_CODE.values()} <= {*STATUSES.values()}


async def test_a_message_has_the_headers_of_pulsar() -> None:
    async with administered() as admin:
        client = FakeClient(admin.broker)
        await client.producer()
        client.publish_batch([b"a", b"b", b"c"], time_ms=1_000)
        await client.until(lambda: client.receipts)
        subscription = f"{TOPIC}/subscription/s"
        assert (await admin("PUT", subscription, {"ledgerId": -1, "entryId": -1})).status == 204
        for number, value in enumerate((b"a", b"b", b"c"), 1):
            found = await admin("GET", f"{subscription}/position/{number}")
            assert found.body == value
            assert found.headers["x-pulsar-message-id"] == f"0:0:{number - 1}"
            assert found.headers["x-pulsar-publish-time"] == "1970-01-01T00:00:01.000Z"
            assert found.headers["x-pulsar-sequence-id"] == str(number - 1)
        assert (await admin("GET", f"{subscription}/position/4")).status == 404
        assert (await admin("GET", f"{TOPIC}/ledger/0/entry/0?batchIndex=2")).body == b"c"
        assert (await admin("GET", f"{TOPIC}/ledger/0/entry/0?batchIndex=-2")).status == 404
        assert (await admin("GET", f"{TOPIC}/ledger/0/entry/0?batchIndex=3")).status == 404
        latest = await admin("GET", f"{TOPIC}/examinemessage?initialPosition=latest&messagePosition=2")
        assert latest.body == b"b"
        assert (await admin("POST", f"{subscription}/skip/2")).status == 204
        found = await admin("POST", f"{subscription}/analyzeBacklog")
        assert (found.body["entries"], found.body["messages"]) == (1, 1)
        assert (await admin("GET", f"{TOPIC}/lastMessageId")).body["batchIndex"] == 2
        back = {"ledgerId": 0, "entryId": 0, "batchIndex": 0, "excluded": True}
        assert (await admin("POST", f"{subscription}/resetcursor", back)).status == 204
        assert (await admin("GET", f"{subscription}/position/1")).body == b"b"
        for excluded, following in ((True, b"b"), (False, b"c")):
            through = {"ledgerId": 0, "entryId": 0, "batchIndex": 1, "excluded": excluded}
            assert (await admin("POST", f"{subscription}/expireMessages", through)).status == 204
            assert (await admin("GET", f"{subscription}/position/1")).body == following
        assert (await admin("DELETE", f"{TOPIC}/truncate")).status == 204
        stats = (await admin("GET", f"{TOPIC}/stats")).body
        assert (stats["storageSize"], stats["subscriptions"]["s"]["msgBacklog"]) == (0, 0)


async def test_the_figures_name_the_consumer_that_gets_the_messages() -> None:
    async with administered() as admin:
        clients = [FakeClient(admin.broker) for _ in "ab"]
        for client, name in zip(clients, "ab", strict=True):
            await client.consumer(type="failover", name=name)
        found = (await admin("GET", f"{TOPIC}/stats")).body["subscriptions"]["billing"]
        active = found["activeConsumerName"]
        assert active in ("a", "b")
        clients["ab".index(active)].close()
        found = (await admin("GET", f"{TOPIC}/stats")).body["subscriptions"]["billing"]
        assert found["activeConsumerName"] == "ba"["ab".index(active)]
        await FakeClient(admin.broker).consumer(subscription="many", type="shared")
        found = (await admin("GET", f"{TOPIC}/stats")).body["subscriptions"]["many"]
        assert "activeConsumerName" not in found


async def test_the_figures_say_who_is_there_since_when_and_what_waits() -> None:
    async with administered() as admin:
        client = FakeClient(admin.broker)
        await client.consumer(permits=0)
        await client.producer()
        empty = (await admin("GET", f"{TOPIC}/stats?getEarliestTimeInBacklog=true")).body
        assert empty["earliestMsgPublishTimeInBacklogs"] == -1
        client.publish(b"a")
        await client.until(lambda: client.receipts)
        found = (await admin("GET", f"{TOPIC}/stats?getEarliestTimeInBacklog=true")).body
        for one in (found["publishers"][0], found["subscriptions"]["billing"]["consumers"][0]):
            assert (one["address"], one["clientVersion"], one["metadata"]) == (
                client.address,
                client.client_version,
                {},
            )
            assert one["connectedSince"] == iso(admin.broker.clock.now_ms())
        stored_ms = found["earliestMsgPublishTimeInBacklogs"]
        assert stored_ms == admin.broker.clock.now_ms()
        assert found["subscriptions"]["billing"]["earliestMsgPublishTimeInBacklog"] == stored_ms
        assert (await admin("GET", f"{TOPIC}/stats")).body["earliestMsgPublishTimeInBacklogs"] == 0


async def test_ids_are_packed_as_in_pulsars_protocol() -> None:
    async with administered() as admin:
        client = FakeClient(admin.broker)
        await client.consumer(permits=0)
        await client.producer()
        batches = [encode_batch([one, one * 2], sequence_id=0, publish_time_ms=0) for one in (b"a", b"b")]
        client.frame(commands.Send(0, 1, 0), b"".join(batches))  # both in one entry
        await client.until(lambda: client.receipts)
        last = (await admin("GET", f"{TOPIC}/lastMessageId")).body
        assert (last["entryId"], last["batchIndex"]) == (2, 1)
        place = f"{TOPIC}/ledger/{last['ledgerId']}/entry"
        assert (await admin("GET", f"{place}/2?batchIndex=1")).body == b"bb"
        assert (await admin("GET", f"{place}/1")).headers[
            "x-pulsar-message-id"
        ] == "0:0"  # the batch that has it
        assert (await admin("GET", f"{place}/2?batchIndex=2")).status == 404
        assert (await admin("GET", f"{place}/{1 << 20}")).status == 404
        reset, first = f"{TOPIC}/subscription/billing/resetcursor", f"{TOPIC}/subscription/billing/position/1"
        for entry, index, excluded, value in (
            (2, -1, False, b"b"), (0, 1, False, b"aa"), (0, 0, True, b"aa"), (0, -1, True, b"b"),
        ):  # fmt: skip
            back = {"ledgerId": last["ledgerId"], "entryId": entry, "batchIndex": index, "excluded": excluded}
            assert (await admin("POST", reset, back)).status == 204
            assert (await admin("GET", first)).body == value


async def test_a_topic_that_stores_nothing_has_figures_and_no_ledgers() -> None:
    path = "non-persistent/public/default/prices"
    async with administered() as admin:
        assert (await admin("PUT", path)).status == 204
        assert (await admin("PUT", path)).status == 409
        client = FakeClient(admin.broker)
        await client.consumer(topic="non-persistent://public/default/prices", start=("latest", None))
        found = (await admin("GET", f"{path}/stats")).body["subscriptions"]["billing"]
        assert (found["isDurable"], [one["consumerName"] != "" for one in found["consumers"]]) == (
            False,
            [True],
        )
        assert (await admin("GET", f"{path}/stats?excludeConsumers=true")).body["subscriptions"]["billing"][
            "consumers"
        ] == []
        assert (await admin("GET", f"{path}/internalStats")).status == 200
        for method, what in (("POST", "trim"), ("DELETE", "truncate"), ("PUT", "compaction")):
            refused = await admin(method, f"{path}/{what}")
            assert (refused.status, "nothing of it is stored" in refused.reason) == (501, True)
        assert (await admin("DELETE", path)).status == 412
        assert (await admin("DELETE", f"{path}?force=true")).status == 204
        assert (await admin("GET", "non-persistent/public/default")).body == []


async def test_properties_of_a_subscription_are_kept_until_others_take_their_place() -> None:
    path = f"{TOPIC}/subscription/s"
    async with administered() as admin:
        await admin("PUT", TOPIC)
        created = {"ledgerId": -1, "entryId": -1, "properties": {"owner": "anna", "text": "\u00fc"}}
        assert (await admin("PUT", path, created)).status == 204

        async def shown() -> object:
            (one,) = (await admin("GET", f"{TOPIC}/stats")).body["subscriptions"].values()
            found = (await admin("GET", f"{path}/properties")).body
            assert found == one["subscriptionProperties"]
            return found

        assert await shown() == created["properties"]
        assert (await admin("PUT", path, {**created, "properties": {"owner": "bert"}})).status == 409
        await admin("POST", f"{path}/resetcursor/0")
        await admin("PUT", f"{TOPIC}/unload")
        assert await shown() == created["properties"]
        for properties in ({"team": "blue"}, {}, {"a": "b" * 9_999}):
            assert (await admin("PUT", f"{path}/properties", properties)).status == 204
            assert await shown() == properties
            await admin("PUT", f"{TOPIC}/unload")
            assert await shown() == properties
        many = {f"{number}": "x" for number in range(10_000)}
        for name, body in (
            (f"{path}/properties", many),
            (f"{TOPIC}/subscription/t", {**created, "properties": many}),
        ):
            refused = await admin("PUT", name, body)
            assert (refused.status, "48890 letters; at most 10000" in refused.reason) == (412, True), refused
        assert (await admin("PUT", f"{path}/properties", {"a": 1})).status == 400
        assert (await admin("GET", f"{TOPIC}/subscriptions")).body == ["s"]
        assert (await admin("GET", f"{TOPIC}/subscription/t/properties")).status == 404
        assert (await admin("PUT", f"{TOPIC}/subscription/t/properties", {})).status == 404


async def test_properties_of_a_subscription_of_a_partitioned_topic_are_of_all_partitions() -> None:
    async with administered() as admin:
        await admin("PUT", f"{TOPIC}/partitions", 2)
        end = {"ledgerId": (1 << 63) - 1, "entryId": -1}
        await admin("PUT", f"{TOPIC}/subscription/s", {**end, "properties": {"a": "1"}})
        path = f"{TOPIC}/subscription/s/properties"
        assert (await admin("GET", path)).body == {"a": "1"}
        assert (await admin("PUT", path, {"b": "2"})).status == 204
        for one in (TOPIC, f"{TOPIC}-partition-0", f"{TOPIC}-partition-1"):
            assert (await admin("GET", f"{one}/subscription/s/properties")).body == {"b": "2"}
        found = (await admin("GET", f"{TOPIC}/partitioned-stats")).body["subscriptions"]["s"]
        assert found["subscriptionProperties"] == {"b": "2"}


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/admin/v3/functions/a/b/c", "there are no functions"),
        ("/admin/v3/transactions/metrics", "there are no transactions"),
        (f"{TOPIC}/subscription/s/replicatedSubscriptionStatus", "not replicated"),
        ("/admin/v2/namespaces/public/default/allowedClusters", "of one cluster"),
        (f"{TOPIC}/offloadPolicies", "nothing is offloaded"),
    ],
)
async def test_what_will_never_be_there_says_so(path: str, reason: str) -> None:
    async with administered() as admin:
        refused = await admin("GET", path)
        assert (refused.status, reason in refused.reason) == (501, True)


async def test_of_policies_what_is_wrong_changes_nothing_and_names_the_policy() -> None:
    policies = "namespaces/public/default"
    async with administered() as admin:
        await admin("PUT", TOPIC)
        for path, body, status, reason in (
            (f"{policies}/messageTTL", "soon", 400, "message_ttl_ms"),
            (
                f"{policies}/retention",
                {"retentionTimeInMinutes": 5, "retentionSizeInMB": 0},
                400,
                "contradict",
            ),
            (f"{policies}/retention", {"retentionHours": 5}, 400, "retention has no 'retentionHours'"),
            (f"{TOPIC}/publishRate", [1], 400, "want an object"),
            (f"{policies}/backlogQuota?backlogQuotaType=nothing", {"limit": 1}, 412, "message_age"),
            (f"{TOPIC}/messageTTL?messageTTL=never", None, 400, "messageTTL"),
        ):
            refused = await admin("POST", path, body)
            assert (refused.status, reason in refused.reason) == (status, True), refused
        assert (await admin("POST", f"{policies}/noSuchPolicy", 1)).status == 404
        assert (await admin("GET", f"{policies}/retention")).body is None
        assert (await admin("GET", f"{policies}/backlogQuotaMap")).body == {}


@asynccontextmanager
async def two_brokers() -> AsyncIterator[list[Admin]]:
    async with AsyncExitStack() as stops:
        cluster = await stops.enter_async_context(brokers())
        admins = []
        for name in ("a", "b"):
            port = held_port(cluster)
            started = await cluster.start(name, http_url=f"http://127.0.0.1:{port}")
            admins.append(await stops.enter_async_context(serving_admin(started.broker, port)))
        yield admins


async def test_what_another_broker_serves_is_redirected_and_partitions_are_asked_where_they_are() -> None:
    async with two_brokers() as (one, other):
        assert (await one("PUT", f"{TOPIC}/partitions", 8)).status == 204
        for number in range(8):  # both have some of them, as whoever asks first decides
            admin = (one, other)[number % 2]
            await admin("GET", f"/lookup/v2/topic/{TOPIC}-partition-{number}")
        assert (await one("PUT", f"{TOPIC}/subscription/s")).status == 204
        assert (await other("GET", f"{TOPIC}/subscriptions")).body == ["s"]
        stats = (await one("GET", f"{TOPIC}/partitioned-stats?perPartition=true")).body
        owners = {part["ownerBroker"] for part in stats["partitions"].values()}
        assert owners == {admin.url.removeprefix("http://") for admin in (one, other)}
        assert (stats["metadata"]["partitions"], len(stats["partitions"])) == (8, 8)
        name, foreign = next(
            (name, part) for name, part in stats["partitions"].items() if part["ownerBroker"] not in one.url
        )
        path = f"/admin/v2/{name.replace('://', '/')}/stats?excludeConsumers=true"
        redirected = await one("GET", path)
        assert redirected.status == 307
        assert redirected.headers["location"] == f"{other.url}{path}&authoritative=false"
        assert (await other("GET", redirected.headers["location"].removeprefix(other.url))).status == 200
        found = (await one("GET", f"/lookup/v2/topic/{name.replace('://', '/')}")).body
        assert found["httpUrl"] == f"http://{foreign['ownerBroker']}"
        assert (await one("DELETE", f"{TOPIC}/subscription/nosuch")).status == 404
        refused = await one("POST", f"{TOPIC}/terminate")
        assert (refused.status, "partitioned topic" in refused.reason) == (405, True)
        assert (await one("DELETE", TOPIC)).status == 409
        assert (await one("DELETE", f"{TOPIC}/partitions")).status == 204
        assert (await one("DELETE", f"{TOPIC}/partitions")).status == 404
        assert (await one("GET", "persistent/public/default")).body == []


async def test_the_routes_describe_themselves() -> None:
    told = document(ROUTES, "1")
    assert json.loads(json.dumps(told)) == told
    skip = told["paths"][
        "/admin/v2/{domain}/{tenant}/{namespace}/{topic}/subscription/{subscription}/skip/{count}"
    ]
    assert skip["post"]["parameters"][-1] == {
        "name": "count",
        "in": "path",
        "required": True,
        "schema": {"type": "integer"},
    }
    lacking = [f"{row.method} {row.path}" for row in TABLE.rows if not row.doc]
    assert lacking == []
    assert "<td>GET<td>" in page(ROUTES)


async def test_an_entry_of_several_messages_is_a_batch_of_pulsar() -> None:
    async with administered() as admin:
        client = FakeClient(admin.broker)
        await client.producer()
        batch = encode_batch([b"a", None], keys=["k", None], sequence_id=0, publish_time_ms=0)
        client.frame(commands.Send(0, 1, 0), batch)
        await client.until(lambda: client.receipts)
        found = await admin("GET", f"{TOPIC}/ledger/0/entry/0")
        assert found.headers["x-pulsar-num-batch-message"] == "2"
        assert found.headers["x-pulsar-message-id"] == "0:0"
        # SingleMessageMetadata: partition_key (2), payload_size (3), b64 (6), sequence_id (8), null_value (9)
        first = b"\x12\x01k\x18\x01\x30\x00\x40\x00\x48\x00"
        second = b"\x18\x00\x40\x01\x48\x01"
        assert found.body == b"\0\0\0\x0b" + first + b"a" + b"\0\0\0\x06" + second


async def test_a_replicated_subscription_is_refused() -> None:
    async with administered() as admin:
        await admin("PUT", TOPIC)
        refused = await admin("PUT", f"{TOPIC}/subscription/s?replicated=true")
        assert (refused.status, "not replicated" in refused.reason) == (501, True)
        assert (await admin("PUT", f"{TOPIC}/subscription/s?replicated=false")).status == 204


@pytest.mark.parametrize("value", ["many", [1], {"a": 1}, True, 1.5])
async def test_a_policy_of_another_type_is_a_bad_request(value: object) -> None:
    async with administered() as admin:
        refused = await admin("POST", "namespaces/public/default/maxProducersPerTopic", value)
        assert (refused.status, "maxProducersPerTopic is " in refused.reason) == (400, True)
        below = await admin("POST", "namespaces/public/default/maxProducersPerTopic", -7)
        assert below.status == 412  # of the type, and not allowed


async def test_each_publisher_has_its_rates_and_a_backlog_its_age() -> None:
    async with administered() as admin:
        client = FakeClient(admin.broker)
        await client.producer()
        assert (await admin("PUT", f"{TOPIC}/subscription/s")).status == 204
        (topic,) = admin.broker.topics.values()
        (session,) = topic.producers
        session.rates.look(0.0, (0, 0))
        client.publish_batch([b"a", b"b"])
        await client.until(lambda: client.receipts)
        session.rates.look(10.0, (session.messages_in, session.bytes_in))
        found = (await admin("GET", f"{TOPIC}/stats")).body
        (publisher,) = found["publishers"]
        assert (publisher["msgRateIn"], publisher["averageMsgSize"] > 10) == (0.2, True)
        assert publisher["clientVersion"] == client.client_version
        assert found["oldestBacklogMessageAgeSeconds"] >= 0
