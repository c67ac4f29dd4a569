"""Ledgers that are confined to the bookies of a group, or prefer them: what their properties say, and who belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from magnetar.ledger.directory import BookieDirectory
from magnetar.proto.errors import InvalidArgument
from magnetar.proto.policies import PlacementGroup

# The key in a ledger's properties; its value is the text of a PlacementGroup.
BOOKIE_GROUP_PROPERTY = "bookie_group"
ANY_BOOKIE = PlacementGroup("", strict=False)


def group_of(properties: Mapping[str, str]) -> PlacementGroup:
    """Of a ledger; any bookie for what nobody can have meant (a property is text that anybody may have written)."""
    try:
        return PlacementGroup.parse(properties.get(BOOKIE_GROUP_PROPERTY, ""))
    except InvalidArgument:
        return ANY_BOOKIE


def members(group: PlacementGroup, bookies: BookieDirectory, names: Sequence[str]) -> Sequence[str]:
    """Those of `names` that belong to the group."""
    return [name for name in names if bookies.labels(name).group == group.name]
