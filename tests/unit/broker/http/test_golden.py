"""The recorded commands of pulsar-admin are answered as Pulsar answers them, but for what is named here."""

from __future__ import annotations

import re

import pytest

from pulsar_admin.replay import replay
from support.admin_kit import administered

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])  # real sockets
_NO_PROPERTIES = "subscriptions have no properties"
_NOT_MADE = "Pulsar makes a subscription that is asked for here; this answers that there is none"
# By a regular expression of the command.
_ONE_BUNDLE = "a broker that is alone has one bundle in each namespace"
KNOWN = {
    r"^clusters list": "the settings of brokers are not served yet",
    r"^namespaces policies acme/one": "Pulsar shows policies of offloading that nobody set, and one that was removed",
    r"^namespaces (split-bundle|unload) .*--bundle 0x.0000000": _ONE_BUNDLE,
    r"^topics create-subscription .*--property": _NO_PROPERTIES,
    r"^topics (get|update)-subscription-properties": _NO_PROPERTIES,
    r"^topics stats": f"{_NO_PROPERTIES}, so that one is missing; a consumer has no address",
    r"^topics (peek-messages|skip|reset-cursor|unsubscribe) .*--subscription nosuch": _NOT_MADE,
    r"^topicPolicies (set|get)-retention": "no backlog quota is there by default that it would have to exceed",
    r"^topicPolicies get-message-ttl .*plain$": "Pulsar shows what was set a moment later",
}
COMPARED = "^(topics|topicPolicies|namespaces|tenants|clusters) "


async def test_commands_are_answered_as_by_pulsar() -> None:
    async with administered() as admin:
        found = await replay(admin, COMPARED)
    unknown = {
        command: differences
        for command, differences in found.items()
        if not any(re.search(known, command) for known in KNOWN)
    }
    assert unknown == {}
    assert [known for known in KNOWN if not any(re.search(known, command) for command in found)] == []
