"""Dynamic configuration over HTTP, and the paths that Pulsar has not."""

from __future__ import annotations

import pytest

from support.admin_kit import administered

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets


async def test_the_dynamic_configuration_is_that_of_policies_for_all_brokers() -> None:
    async with administered() as admin:
        names = (await admin("GET", "/admin/v2/brokers/configuration")).body
        assert "maxTopicsPerNamespace" in names
        path = "/admin/v2/brokers/configuration"
        assert (await admin("POST", f"{path}/maxTopicsPerNamespace/11")).status == 204
        assert (await admin("POST", f"{path}/subscriptionTypesEnabled/Shared,Exclusive")).status == 204
        assert (await admin("POST", f"{path}/brokerDeleteInactiveTopicsEnabled/true")).status == 204
        assert (await admin("GET", f"{path}/values")).body == {
            "maxTopicsPerNamespace": "11",
            "subscriptionTypesEnabled": "Shared,Exclusive",
            "brokerDeleteInactiveTopicsEnabled": "true",
        }
        found = await admin("GET", "/admin/v2/namespaces/public/default/maxTopicsPerNamespace")
        assert found.body == 0, "it is not set at the namespace"
        assert (await admin("DELETE", f"{path}/maxTopicsPerNamespace")).status == 204
        assert "maxTopicsPerNamespace" not in (await admin("GET", f"{path}/values")).body
        refused = await admin("POST", f"{path}/maxTopicsPerNamespace/many")
        assert refused.status == 412
        assert "max_topics_per_namespace" in refused.reason


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [
        ("POST", "bookies/racks-info/b1", "set [bookie] rack"),
        ("GET", "resource-quotas", "by their measured load"),
        ("DELETE", "resource-quotas/public/default/0x0_0x1", "by their measured load"),
        ("POST", "clusters/standalone/namespaceIsolationPolicies/one", "broker_group"),
        ("PUT", "resourcegroups/one", "there are no groups"),
        ("GET", "broker-stats/allocator-stats/default", "/metrics"),
        ("POST", "brokers/shutdown", "SIGTERM"),
    ],
)
async def test_what_will_never_be_there_says_so(method: str, path: str, reason: str) -> None:
    async with administered() as admin:
        refused = await admin(method, f"/admin/v2/{path}")
        assert (refused.status, reason in refused.reason) == (501, True), refused
        assert (await admin("OPTIONS", "/admin/v2/bookies/racks-info/b1")).status == 204
        topic = "persistent/public/default/orders/subscription/s"
        assert (await admin("PATCH", topic)).status == 405, "a name of users is not what will never be there"
