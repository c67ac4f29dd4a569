"""`magnetar tenants`, `namespaces`, `topics get`, `brokers`, `bookies`: the same words, over a broker that runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from magnetar.cli.app import app
from magnetar.cli.terminal.session import EXIT_USAGE
from magnetar.client import InvalidArgument, connect
from support.served_broker import serving


async def run(url: str, line: str) -> Result:
    """In a thread: a command has a loop of its own."""
    return await asyncio.to_thread(CliRunner().invoke, app, [*line.split(), "--url", url])


async def ask(url: str, line: str) -> Any:
    """What --json prints."""
    ended = await run(url, f"{line} --json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


async def refused(url: str, line: str) -> str:
    ended = await run(url, line)
    assert ended.exit_code in (1, EXIT_USAGE)
    [reason] = ended.stderr.splitlines()
    return reason.removeprefix("magnetar: ")


async def test_records_from_the_first_to_the_last() -> None:
    async with serving() as server:
        url = f"magnetar://127.0.0.1:{server.addresses[0][1]}"
        assert (await run(url, "tenants create acme --admin-role ann")).stdout == "created tenant acme\n"
        assert await refused(url, "tenants create acme") == "Tenant already exist: acme"
        await ask(url, "tenants update acme --admin-role bob --admin-role eve")
        assert (await ask(url, "tenants get acme"))["admin_roles"] == ["bob", "eve"]
        assert await ask(url, "tenants list") == ["acme", "public"]
        assert "does not exist" in await refused(url, "namespaces create nobody/shop")
        assert await ask(url, "namespaces create acme/shop --bundles 4") == {
            "name": "acme/shop",
            "bundles": 4,
        }
        assert len(await ask(url, "bundles list acme/shop")) in (1, 4)  # a broker that is alone has one
        assert await ask(url, "namespaces list") == ["acme/shop", "public/default"]
        await ask(url, "namespaces policies acme/shop --ttl 1h")
        assert (await ask(url, "namespaces get acme/shop"))["policies"]["message_ttl_ms"] == 3_600_000
        await ask(url, "topics create acme/shop/orders --partitions 2")
        found = await ask(url, "topics get acme/shop/orders")
        assert (found["partitions"], len(found["brokers"]), found["subscriptions"]) == (2, 1, [])
        assert "acme/shop has persistent://acme/shop/orders; delete its topics first" in await refused(
            url, "namespaces delete acme/shop --yes"
        )
        assert "acme has shop; delete them first" in await refused(url, "tenants delete acme --yes")
        assert "broker.allow_forced_deletion=true" in await refused(url, "tenants delete acme --yes --force")
        assert "say --yes" in await refused(url, "tenants delete acme")
        for line in ("topics delete acme/shop/orders", "namespaces delete acme/shop", "tenants delete acme"):
            assert (await run(url, f"{line} --yes")).exit_code == 0
        assert await ask(url, "tenants list") == ["public"]


async def test_figures_of_a_namespace_are_the_sums_of_its_topics() -> None:
    async with serving() as server:
        url = f"magnetar://127.0.0.1:{server.addresses[0][1]}"
        async with connect(url) as client:
            for topic in ("acme/shop/a", "acme/shop/b", "acme/other/c"):
                await client.admin.create_subscription(topic, "s", start="earliest")
                async with client.create_producer(topic) as producer:
                    await producer.send_many([b"x"] * 3)
            stats = await ask(url, "namespaces stats acme/shop")
            counts = ("topics", "loaded_topics", "subscriptions", "backlog_messages")
            assert [stats[name] for name in counts] == [2, 2, 2, 6]
            assert "does not exist" in await refused(url, "namespaces stats acme/nothing")
            [broker] = await ask(url, "brokers list")
            assert (await ask(url, f"brokers get {broker['name']}"))["url"] == url
            assert (
                await refused(url, "brokers get b7") == f"there is no broker b7; there are {broker['name']}"
            )
            assert await ask(url, "bookies list") == []


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (("tenants", "burn"), "there is no 'tenants burn'; want one of clusters list"),
        (("tenants", "create", "a"), "tenants create takes no colour"),
    ],
)
async def test_what_the_protocol_does_not_know_is_refused(asked: tuple[str, ...], reason: str) -> None:
    async with serving() as server, connect(f"magnetar://127.0.0.1:{server.addresses[0][1]}") as client:
        with pytest.raises(InvalidArgument, match=reason):
            await client.admin.administer(*asked, colour="red")
        with pytest.raises(InvalidArgument, match="an argument of tenants create is wrong"):
            await client.admin.administer("tenants", "create", "a", admin_roles=7)
