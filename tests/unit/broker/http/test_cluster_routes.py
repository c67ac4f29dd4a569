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


async def test_what_is_wrong_and_who_is_there_have_paths_of_their_own() -> None:
    async with administered() as admin:
        found = (await admin("GET", "/magnetar/v1/problems")).body
        assert (found["broker"], found["findings"]) == ("standalone", [])
        assert (await admin("GET", "/magnetar/v1/busiest?count=5")).body["topics"] == 0
        assert (await admin("GET", "/magnetar/v1/busiest?count=500")).status == 412
        assert "bookies" in (await admin("GET", "/magnetar/v1/bookies")).body
