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
KNOWN = {
    r"^topics create persistent://acme/nosuch": "namespaces are made with their first topic",
    r"^topics create-subscription .*--property": _NO_PROPERTIES,
    r"^topics (get|update)-subscription-properties": _NO_PROPERTIES,
    r"^topics stats": f"{_NO_PROPERTIES}, so that one is missing; a consumer has no address",
    r"^topics (peek-messages|skip|reset-cursor|unsubscribe) .*--subscription nosuch": _NOT_MADE,
    r"^topics .*permission": "there are none yet",
    r"^namespaces (set-clusters|set-message-ttl) .*nosuch": "there are no records of clusters and namespaces yet",
    r"^topicPolicies (set|get)-retention": "no backlog quota is there by default that it would have to exceed",
    r"^topicPolicies get-message-ttl .*plain$": "Pulsar shows what was set a moment later",
}
COMPARED = r"^(topics|topicPolicies) |^namespaces (get|set|remove|clear)-(?!resource-group|auto-subscription|backlog acme|propert)"


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
