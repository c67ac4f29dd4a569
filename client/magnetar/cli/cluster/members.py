"""Who is in a cluster, which of its daemons are restarted together, and why they may not be stopped now.

    --by daemon     each on its own, bookies before brokers
    --by machine    what has one host together: the bookie and the broker of a machine
    --by zone       what has one zone together ([bookie] zone, [broker] zone)

What is stopped together takes copies of entries away together. Of an entry with Qw copies at most Qw - Qa may be away: then
each ledger keeps its ack quorum, so its writer goes on, and its end can be found if Qa is more than what is away. For
example with Qw = 3 and Qa = 2 a zone may hold one copy of an entry, which `ledger.placement=zone` sees to over three zones.
A ledger that was made with fewer copies while a bookie was away (`ledger.minimum_write_quorum`) counts with the Qw and Qa
that were asked for; one copy is always left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from magnetar.proto.errors import InvalidArgument
from magnetar.runtime.quantities import counted

from ..wiring.cluster_facts import bookie_facts, broker_facts

if TYPE_CHECKING:
    from magnetar.ledger import LedgerMetadata
    from magnetar.metadata import MetadataStore


KINDS = ("bookie", "broker")
_READS = 100  # records of ledgers that are read at once


@dataclass(frozen=True, slots=True)
class Member:
    """A daemon as it is registered."""

    kind: str
    name: str
    host: str
    port: int
    state: str
    run: int  # another number after each start
    zone: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def trouble(self) -> str:
        """Why another daemon must not be stopped now; "" if it may."""
        if self.state in ("lost", "stalled", "stopping", "unreadable"):
            return f"{self} is {self.state}"
        return ""


_LABELS: dict[str, Callable[[Member], str]] = {
    "daemon": str,
    "machine": lambda member: member.host,
    "zone": lambda member: member.zone,
}
WAYS = tuple(_LABELS)


@dataclass(frozen=True, slots=True)
class Group:
    """What is restarted together, bookies first."""

    name: str  # for people
    members: tuple[Member, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def described(self) -> str:
        """With its members."""
        if len(self.members) == 1:
            return str(self.members[0])
        return f"{self.name} ({', '.join(member.name for member in self.members)})"

    def of_kind(self, kind: str) -> list[str]:
        """Names."""
        return [member.name for member in self.members if member.kind == kind]


async def read_members(store: MetadataStore) -> list[Member]:
    """All bookies that the cluster knows, then all brokers that are registered."""
    found = []
    for row in await bookie_facts(store):
        host, port = _split(row["address"])
        found.append(Member("bookie", row["id"], host, port, row["state"], row["incarnation"], row["zone"]))
    for row in await broker_facts(store):
        host, port = _split(row["url"].partition("://")[2])
        found.append(Member("broker", row["name"], host, port, row["state"], row["started_ms"], row["zone"]))
    return found


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port) if port.isdecimal() else 0


def plan(members: Sequence[Member], only: Sequence[str], by: str = "daemon") -> list[Group]:
    """Those of `only` (kinds, names, zones or machines; empty: all), in the order of their restart. InvalidArgument."""
    if by not in WAYS:
        raise InvalidArgument(f"--by {by} is not known: it is {', '.join(WAYS)}")
    label = _LABELS[by]
    labels = {} if by == "daemon" else {label(member): None for member in members}
    known = {*KINDS, *(member.name for member in members), *labels}
    if unknown := [name for name in only if name not in known]:
        names = ", ".join([*(member.name for member in members), *filter(None, labels)]) or "none"
        raise InvalidArgument(
            f"there is no daemon {unknown[0]} in this cluster; it has {names} (or say bookie, broker)"
        )
    chosen = [
        member
        for member in members
        if not only or member.kind in only or member.name in only or (labels and label(member) in only)
    ]
    if nameless := [member for member in chosen if not label(member)]:
        raise InvalidArgument(
            f"{nameless[0]} does not say its {by}, so it cannot be restarted by {by}: "
            + (f"set {nameless[0].kind}.zone" if by == "zone" else "it is not registered")
        )
    chosen.sort(key=lambda member: KINDS.index(member.kind))
    groups: dict[str, list[Member]] = {}
    for member in chosen:
        groups.setdefault(label(member), []).append(member)
    return [
        Group(name if by == "daemon" else f"{by} {name}", tuple(together))
        for name, together in groups.items()
    ]


def obstacles(members: Sequence[Member], expected: Sequence[Member], to_repair: int) -> list[str]:
    """Why no daemon may be stopped now. `expected`: who was there when the plan was made."""
    found = [trouble for member in members if (trouble := member.trouble)]
    there = {(member.kind, member.name) for member in members}
    found += [f"{member} is not registered" for member in expected if (member.kind, member.name) not in there]
    if to_repair:
        found.append(f"{counted(to_repair, 'ledger waits', 'ledgers wait')} for repair")
    return found


async def refusals(store: MetadataStore, members: Sequence[Member], groups: Sequence[Group]) -> list[str]:
    """Why these groups may not be stopped, one after another; a sentence for each that may not.

    A daemon alone may always be stopped. Reads the records of all ledgers: a million take about a minute.
    """
    groups = [group for group in groups if len(group.members) > 1]
    brokers = [member.name for member in members if member.kind == "broker" and member.state != "lost"]
    found = {
        group.name: f"{group} cannot be restarted together: no broker would be left to take over its topics"
        for group in groups
        if (stopped := group.of_kind("broker")) and len(stopped) == len(brokers)
    }
    found |= await _too_few_copies(store, [group for group in groups if group.name not in found])
    return list(found.values())


async def _too_few_copies(store: MetadataStore, groups: Sequence[Group]) -> dict[str, str]:
    """By the group's name."""
    from magnetar.ledger import LedgerMetadata
    from magnetar.metadata.ledgers import StoredLedgers

    ledgers = StoredLedgers(store)
    stopped = {group.name: dict.fromkeys(group.of_kind("bookie")) for group in groups}
    stopped = {name: bookies for name, bookies in stopped.items() if bookies}
    short: dict[str, list[tuple[int, LedgerMetadata]]] = {}
    if not stopped:
        return {}
    async for page in ledgers.pages():
        for start in range(0, len(page), _READS):
            some = page[start : start + _READS]
            for ledger_id, node in zip(some, await asyncio.gather(*map(ledgers.get, some)), strict=True):
                if node is None:  # deleted meanwhile
                    continue
                metadata = LedgerMetadata.decode(node.value, ledger_id)
                for name, bookies in stopped.items():
                    if not may_be_away(metadata, bookies):
                        short.setdefault(name, []).append((ledger_id, metadata))
    return {name: _sentence(name, list(stopped[name]), ledgers) for name, ledgers in short.items()}


def may_be_away(metadata: LedgerMetadata, bookies: dict[str, None]) -> bool:
    """Whether every entry of the ledger keeps enough copies without these bookies; see the module docstring."""
    from magnetar.ledger.core.degrade import DEGRADED_PROPERTY, asked_for

    full = asked_for(metadata.properties.get(DEGRADED_PROPERTY, "")) or metadata.striping
    most = min(full.write_quorum - full.ack_quorum, metadata.write_quorum - 1)
    return all(
        sum(fragment.bookies[position] in bookies for position in write_set) <= most
        for fragment in metadata.fragments()
        if not fragment.empty
        for write_set in metadata.striping.write_sets
    )


def _sentence(group: str, bookies: list[str], short: Sequence[tuple[int, LedgerMetadata]]) -> str:
    ledger_id, metadata = short[0]
    more = f" (and so {counted(len(short) - 1, 'other')})" if len(short) > 1 else ""
    return (
        f"{group} cannot be restarted together: ledger {ledger_id}{more} would be below its ack quorum, for more than "
        f"{metadata.write_quorum - metadata.ack_quorum} of the {metadata.write_quorum} copies of an entry are on "
        f"{', '.join(bookies)}; restart it with --by daemon, or spread the copies: ledger.placement=zone, then magnetar "
        "cluster check"
    )
