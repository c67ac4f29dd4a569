"""Brokers, bookies and bundles over HTTP: as pulsar-admin was recorded to ask, and what dynamic configuration does."""

from __future__ import annotations

import re

import pytest

from pulsar_admin.replay import replay
from support.admin_kit import administered

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
_OWN_SETTINGS = "a broker has settings of its own"
_RACKS = "a bookie says its rack in its settings"
_LOAD = "bundles are balanced by their measured load"
KNOWN = {
    r"^brokers get-(internal|runtime)-config": _OWN_SETTINGS,
    r"^brokers healthcheck": "this broker is on fakes; tests/integration/test_gateway.py asks a real one",
    r"^bookies (set|get|delete)-bookie-rack": _RACKS,
    r"^bookies racks-placement": _RACKS,
    r"^broker-stats load-report": "Pulsar's load manager answers nothing",
    r"^broker-stats mbeans": "there is no Java virtual machine",
    r"^resource-quotas": _LOAD,
    r"^ns-isolation-policy": "a namespace says which brokers serve it",
}
COMPARED = r"^(brokers|bookies|broker-stats|resource-quotas|ns-isolation-policy|resourcegroups) "


async def test_commands_are_answered_as_by_pulsar() -> None:
    async with administered() as admin:
        found = await replay(admin, COMPARED)
    unknown = {one: found[one] for one in found if not any(re.search(known, one) for known in KNOWN)}
    assert unknown == {}
    assert [known for known in KNOWN if not any(re.search(known, command) for command in found)] == []


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
        assert found.body is None, "it is not set at the namespace"
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
