"""What only the real pulsar-admin shows: texts that are JSON by name alone, and how it writes paths."""

from __future__ import annotations

import aiohttp
import pytest

from support.admin_kit import administered

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
NAMESPACE = "/admin/v2/namespaces/public/default"


async def test_texts_are_sent_and_taken_without_quotes() -> None:
    async with administered() as admin, aiohttp.ClientSession(admin.url) as session:

        async def text(method: str, path: str, body: bytes = b"") -> str:
            async with session.request(method, path, data=body) as response:
                assert response.status < 300
                return await response.text()

        await text("POST", f"{NAMESPACE}/antiAffinity", b"racks")
        assert await text("GET", f"{NAMESPACE}/antiAffinity") == "racks"
        await text("PUT", f"{NAMESPACE}/property/color/blue")
        assert await text("GET", f"{NAMESPACE}/property/color") == "blue"
        assert await text("DELETE", f"{NAMESPACE}/property/color") == "blue"
        assert (await text("GET", "/admin/v2/brokers/version"))[0].isdigit()
        assert (await text("GET", "/lookup/v2/topic/persistent/public/default/one/bundle")).startswith("0x")


async def test_the_name_of_a_subscription_may_be_encoded_twice() -> None:
    topic = "persistent/public/default/orders"
    async with administered() as admin:
        await admin("PUT", topic)
        assert (
            await admin("PUT", f"{topic}/subscription/team%253Aa%253Db")
        ).status == 204  # as pulsar-admin does
        assert (await admin("GET", f"{topic}/subscriptions")).body == ["team:a=b"]
        assert (await admin("DELETE", f"{topic}/subscription/team%3Aa=b")).status == 204


async def test_subscriptions_have_no_roles_of_their_own() -> None:
    async with administered() as admin:
        for method, path in (
            ("POST", "permissions/subscription/billing"),
            ("GET", "permissions/subscription"),
            ("DELETE", "permissions/billing/dave"),
            ("POST", "subscriptionAuthMode"),
        ):
            refused = await admin(method, f"{NAMESPACE}/{path}", ["dave"])
            assert (refused.status, "permissions are of namespaces" in refused.reason) == (501, True), path


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("replication", ["standalone"]),
        ("maxTopicsPerNamespace", 0),
        ("dispatcherPauseOnAckStatePersistent", False),
        ("schemaCompatibilityStrategy", "UNDEFINED"),
        ("isAllowAutoUpdateSchema", True),
        ("offloadThreshold", -1),
        ("messageTTL", None),
    ],
)
async def test_where_nothing_is_set_the_tool_gets_what_it_can_print(path: str, wanted: object) -> None:
    async with administered() as admin:
        assert (await admin("GET", f"{NAMESPACE}/{path}")).body == wanted
