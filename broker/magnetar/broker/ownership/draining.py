"""Planned hand-over: what a broker, a bookie or all of a zone have goes to the others; they get nothing new until `undo`.

    begin ──> a mark for each, below /draining-brokers and /draining ──> brokers hand their bundles over, in under a second
                                                                     └─> repairs copy the ledgers of bookies to others
    undo  ──> the marks are gone: they get bundles and ledgers again; what has moved stays where it is

All state is in the marks, so that whoever asks may go away, and anybody may ask again, or undo it. A mark notes the zone of
its member: the zone is found by it while the member is stopped.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.directory import BOOKIES_PATH, BookieFacts, decode_registration
from magnetar.ledger.replication.operations import (
    NewLedgers,
    drain_progress,
    obstacles_to_drain,
)
from magnetar.ledger.settings import LedgerSettings
from magnetar.metadata import MetadataStore
from magnetar.metadata.drains import (
    BOOKIE,
    BROKER,
    DRAIN_PATHS,
    KINDS,
    DrainMark,
    mark_drained,
    unmark_drained,
)
from magnetar.metadata.paths import COOKIES_PATH
from magnetar.proto.errors import DataDirectoryError, InvalidArgument, NotFound
from magnetar.runtime.clock import Clock

from ..log.records import NAMESPACES_ROOT, NamespaceRecord, namespace_path
from .balance.core.facts import UNBOUND
from .balance.core.survey import NEVER, tier_of
from .balance.settings import BalanceSettings
from .cluster_view import ClusterView, read_owners
from .ownership import DrainState
from .records import OWNERS_PATH, READY

_log = logging.getLogger(__name__)

_MOST_NAMED = 5  # obstacles in an error


class ClusterMember(NamedTuple):
    """A broker or a bookie that runs, ever ran, or is drained."""

    kind: str  # of KINDS
    name: str
    zone: str  # "": it is in none, or not known
    drained: bool  # it is marked


class Draining:
    """Over the metadata store alone, whoever runs."""

    def __init__(
        self,
        store: MetadataStore,
        view: ClusterView,
        balance: BalanceSettings,
        ledger: LedgerSettings,
        rng: random.Random,
        clock: Clock,
    ) -> None:
        """`balance`, `ledger`: as those who place bundles and ledgers have them."""
        self._store = store
        self._view = view
        self._balance = balance
        self._ledger = ledger
        self._rng = rng
        self._clock = clock

    async def members(self) -> list[ClusterMember]:
        """All of the cluster: brokers first, each by name."""
        store = self._store
        zones = dict.fromkeys(((BOOKIE, name) for name in await store.children(COOKIES_PATH)), "")
        for name in await store.children(BOOKIES_PATH):
            if (node := await store.get(f"{BOOKIES_PATH}/{name}")) is not None:
                zones[BOOKIE, name] = _zone(_zone_of_bookie, node.value, name)
        for name, row in (await self._view.brokers.get()).items():
            zones[BROKER, name] = row.zone
        marked = await self._marks()
        return [
            ClusterMember(
                kind, name, zones.get((kind, name)) or marked.get((kind, name), ""), (kind, name) in marked
            )
            for kind, name in sorted({**marked, **zones}, key=lambda one: (KINDS.index(one[0]), one[1]))
        ]

    async def _marks(self) -> dict[tuple[str, str], str]:
        """Zones of those that are drained, by kind and name."""
        found = {}
        for kind, path in DRAIN_PATHS.items():
            for name in await self._store.children(path):
                if (node := await self._store.get(f"{path}/{name}")) is not None:
                    found[kind, name] = _zone(_zone_of_mark, node.value, f"{path}/{name}")
        return found

    async def begin(self, chosen: Sequence[ClusterMember]) -> None:
        """They are marked when this returns; bookies first, so that no ledger of a bundle that moves begins there.

        InvalidArgument when the others could not take over all that they have. Those that are marked already stay so.
        """
        added = [member for member in chosen if not member.drained]
        if not added:
            return
        seen = {*await self._marks(), *((member.kind, member.name) for member in added)}
        await self._require(added)
        made = [
            member
            for member in reversed(added)
            if await mark_drained(self._store, member.kind, member.name, member.zone)
        ]
        self._view.draining.drop()
        if not seen.issuperset(await self._marks()):
            # Others were marked meanwhile, perhaps without a look at these: whoever marks last sees all marks.
            try:
                await self._require(made)
            except InvalidArgument:
                await self.undo(made)
                raise

    async def _require(self, added: Sequence[ClusterMember]) -> None:
        """Raises InvalidArgument when the others could not take over what these have."""
        if found := await self._obstacles(added):
            more = f"; and {len(found) - _MOST_NAMED} more reasons" if len(found) > _MOST_NAMED else ""
            names = ", ".join(f"{member.kind} {member.name}" for member in added)
            raise InvalidArgument(f"{names} cannot be drained: {'; '.join(found[:_MOST_NAMED])}{more}")

    async def undo(self, chosen: Iterable[ClusterMember]) -> None:
        """They are not marked when this returns."""
        for member in chosen:
            await unmark_drained(self._store, member.kind, member.name)
        self._view.draining.drop()

    async def state(self, chosen: Sequence[ClusterMember]) -> DrainState:
        """What they have now. With bookies among them it looks through the records of all ledgers."""
        brokers, bookies = _names(chosen)
        bundles = await bundles_of(self._store, brokers) if brokers else 0
        if not bookies:
            return DrainState(brokers, bookies, bundles)
        found = await drain_progress(self._store, bookies, self._clock)
        return DrainState(brokers, bookies, bundles, found.ledgers, found.open_ledgers, found.notes)

    # --- what the others could take over -----------------------------------------------------------------------------

    async def _obstacles(self, chosen: Sequence[ClusterMember]) -> list[str]:
        brokers, bookies = _names(chosen)
        found = await self._broker_obstacles(brokers) if brokers else []
        if bookies:
            expected = await self._new_ledgers()
            found += await obstacles_to_drain(self._store, bookies, expected, self._ledger, self._rng)
        return found

    async def _broker_obstacles(self, brokers: Collection[str]) -> list[str]:
        facts = await self._view.broker_facts()
        rest = [one for one in facts if one.state == READY and one.name not in brokers]
        if not rest:
            return ["no other broker takes topics"]
        bindings = {"a namespace without a broker group": UNBOUND}
        unreadable = []
        for namespace in await self._namespaces():
            try:
                bindings[f"namespace {namespace}"] = await self._view.binding(namespace)
            except (DataDirectoryError, InvalidArgument) as error:
                unreadable.append(
                    f"nobody knows which brokers namespace {namespace} may have ({error.message})"
                )
        groups = self._balance.dedicated_groups
        return unreadable + [
            f"no broker would be left that {whose} may have"
            for whose, binding in bindings.items()
            if all(tier_of(one, binding, groups) == NEVER for one in rest)
            and any(tier_of(one, binding, groups) != NEVER for one in facts if one.name in brokers)
        ]

    async def _new_ledgers(self) -> list[NewLedgers]:
        """As namespaces want them by their policies. What brokers want by their settings shows in the ledgers there are."""
        found = []
        for namespace in await self._namespaces():
            path = namespace_path(namespace)
            if (node := await self._store.get(path)) is None:
                continue
            try:
                policies = NamespaceRecord.decode(node.value, path).policies
            except DataDirectoryError as error:
                _log.warning("a drain does without the quorums of namespace %s: %s", namespace, error)
                continue
            if policies.quorums is not None:
                least = policies.minimum_write_quorum
                striping = Striping(least, least, 1) if least else Striping(*policies.quorums)
                found.append(NewLedgers(f"namespace {namespace}", striping, policies.bookie_group or ""))
        return found

    async def _namespaces(self) -> list[str]:
        """Those with policies."""
        return [
            f"{tenant}/{name}"
            for tenant in await self._store.children(NAMESPACES_ROOT)
            for name in await self._store.children(f"{NAMESPACES_ROOT}/{tenant}")
        ]


async def bundles_of(metadata: MetadataStore, brokers: Collection[str]) -> int:
    """How many bundles these brokers own."""
    found = 0
    for tenant in await metadata.children(OWNERS_PATH):
        for name in await metadata.children(f"{OWNERS_PATH}/{tenant}"):
            owners = await read_owners(metadata, f"{tenant}/{name}")
            found += sum(owner.record.broker in brokers for owner in owners.values())
    return found


def choose(
    known: Sequence[ClusterMember], name: str = "", *, zone: str = "", kind: str = ""
) -> list[ClusterMember]:
    """The member of this name, or all of this zone. `kind`: of KINDS; "": either.

    NotFound: there is none. InvalidArgument: a broker and a bookie have this name and `kind` does not say which.
    """
    if bool(name) == bool(zone):
        raise InvalidArgument("give the name of a broker or a bookie, or a zone")
    if kind not in ("", *KINDS):
        raise InvalidArgument(f"{kind!r} is no kind of a member; there are {' and '.join(KINDS)}")
    some = [member for member in known if member.kind == kind or not kind]
    found = [member for member in some if (member.zone == zone if zone else member.name == name)]
    if zone and not found:
        zones = ", ".join(sorted({member.zone for member in some if member.zone})) or "none"
        raise NotFound(
            f"no {kind or 'broker or bookie'} is in zone {zone!r} (settings broker.zone, bookie.zone); zones: {zones}"
        )
    if not found:
        names = "; ".join(
            f"{one}s: {', '.join(member.name for member in some if member.kind == one) or 'none'}"
            for one in KINDS
            if kind in ("", one)
        )
        raise NotFound(f"there is no {kind or 'broker or bookie'} {name!r} in this cluster; {names}")
    if name and len(found) > 1:
        raise InvalidArgument(f"{name!r} is the name of a broker and of a bookie: give the kind as well")
    return found


def _zone_of_mark(value: bytes, path: str) -> str:
    return DrainMark.decode(value, path).zone


def _zone_of_bookie(value: bytes, name: str) -> str:
    return BookieFacts.of(decode_registration(value, name)).labels.zone


def _zone(read: Callable[[bytes, str], str], value: bytes, name: str) -> str:
    """Not known of a member whose node is damaged: all others can be drained, and each drain can be undone."""
    try:
        return read(value, name)
    except DataDirectoryError as error:
        _log.warning("%s", error)
        return ""


def _names(chosen: Iterable[ClusterMember]) -> tuple[list[str], list[str]]:
    """Of the brokers, and of the bookies."""
    chosen = list(chosen)
    return (
        [one.name for one in chosen if one.kind == BROKER],
        [one.name for one in chosen if one.kind == BOOKIE],
    )
