"""Policies in force: those of the topic, else those of its namespace, else the broker's settings.

A topic's own policies stand in the head of its ledger list: they are there when the topic is, and a former owner cannot
change them. Those of a namespace are a node of their own, which the broker watches while it serves a topic of it; so are
those of a partitioned topic (`partitions`), which stand between a partition's own and its namespace's.

While they are not known nothing is trimmed, nothing expires, and no ledger is begun: to act on the next level instead
would delete what the namespace says is to be kept, or store fewer copies than it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from magnetar.ledger.core.quorum import Striping
from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    InvalidArgument,
    NotEnoughBookies,
    NotFound,
    ServiceNotReady,
)
from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.proto.policies import PlacementGroup, Policies, PolicyInForce
from magnetar.proto.policy_table import BY_POLICY

from ..log.durability import Durability
from ..log.ledger_list import LedgerList
from ..log.list_changes import ListChanges
from ..log.records import ABSENT, NamespaceRecord, Stored, change, namespace_path
from ..resources.stores import Ledgers
from ..settings import BrokerSettings
from .followed import Followed

T = TypeVar("T")

ALL_BROKERS = ""
BROKER_POLICIES_PATH = "/policies"


@dataclass(frozen=True)
class Resolved:
    """What is in force, computed once a change: policies are never changed in place.

    `levels`: with their names, the one that counts first; the last one has every policy but `subscription_ttl_ms`.
    """

    levels: tuple[tuple[str, Policies], ...]

    @cached_property
    def retention(self) -> tuple[int, int, str]:
        """Milliseconds, bytes, and whose policy that is."""
        limits, source = self._first(lambda policies: policies.retention)
        return *limits, source

    def ttl_ms(self, subscription: str) -> tuple[int, str]:
        """Of a subscription, and whose policy that is; 0: its messages wait for ever."""
        return self._first(lambda own: own.subscription_ttl_ms.get(subscription, own.message_ttl_ms))

    @cached_property
    def durability(self) -> Durability:
        """Of the next ledger."""
        return Durability(*(self.value(policy)[0] for policy in Durability._fields))

    def value(self, policy: str) -> tuple[Any, str]:
        """Of a field of `Policies`, but for `subscription_ttl_ms`; and whose policy that is."""
        if policy in ("retention_ms", "retention_bytes"):
            retention_ms, retention_bytes, source = self.retention
            return retention_ms if policy == "retention_ms" else retention_bytes, source
        return self._first(attrgetter(policy))

    def _first(self, of: Callable[[Policies], T | None]) -> tuple[T, str]:
        """At the first level that has it, and whose policy that is."""
        for source, policies in self.levels:
            value = of(policies)
            if value is not None:
                return value, source
        raise AssertionError("the broker's settings have every policy")

    @cached_property
    def has_ttl(self) -> bool:
        """False: the messages of every subscription wait for ever."""
        return any(
            policies.message_ttl_ms or any(policies.subscription_ttl_ms.values())
            for _, policies in self.levels
        )

    def rows(self) -> list[PolicyInForce]:
        """For people and tools."""
        rows = []
        for policy, row in BY_POLICY.items():
            if row.by_subscription:
                names = sorted({name for _, policies in self.levels for name in getattr(policies, policy)})
                rows += [PolicyInForce(policy, name, *self.ttl_ms(name)) for name in names]
            else:
                rows.append(PolicyInForce(policy, "", *self.value(policy)))
        return rows


@lru_cache(maxsize=1)
def of_broker(settings: BrokerSettings) -> tuple[str, Policies]:
    """The last level: the settings that are called as policies are, and defaults."""
    values = {
        policy: getattr(settings, policy, row.default)
        for policy, row in BY_POLICY.items()
        if not row.by_subscription
    }
    return "broker", Policies(**values)


class TopicPolicies:
    """Of one topic."""

    def __init__(
        self,
        name: TopicName,
        ledgers: LedgerList,
        namespaces: NamespacePolicies,
        partitioned: Followed[Any],
    ) -> None:
        """`namespaces`, `partitioned`: what stands above a topic, and above a partition."""
        self._name = name
        self._own = "topic"
        self._ledgers = ledgers
        # The levels between the topic and the broker: what they are, and what is followed there, by which name.
        self._above: list[tuple[str, Followed[Any], str]] = [
            ("namespace", namespaces.followed, name.full_namespace),
            ("broker", namespaces.followed, ALL_BROKERS),
        ]
        if name.partition != NO_PARTITION:
            self._own = "partition"
            self._above.insert(0, ("topic", partitioned, str(name.whole)))
        self._settings = namespaces.settings
        self._changed: Callable[[], None] | None = None
        self._resolved: Resolved | None = None  # of the levels as they were when it was asked for last

    async def learn(self, changed: Callable[[], None]) -> None:
        """Returns when those above it were read, if that is possible. `changed` is called when they change.

        `stop` in the end.
        """
        self._changed = changed
        for _, followed, name in self._above:
            followed.listen(name, changed)
        await self.wait()

    async def wait(self) -> None:
        """Returns when those above it, if they have changed, were read again, if that is possible."""
        for _, followed, name in self._above:
            await followed.learn(name)

    def stop(self) -> None:
        """Changes do not matter here any more."""
        if self._changed is not None:
            for _, followed, name in self._above:
                followed.ignore(name, self._changed)
            self._changed = None

    def durability(self) -> Durability:
        """Of the topic's next ledger. ServiceNotReady: another level's policy would perhaps store fewer copies."""
        in_force = self.in_force()
        if in_force is None:
            unknown = [
                f"{level} {name}".strip()
                for level, followed, name in self._above
                if followed.known(name) is None
            ]
            raise ServiceNotReady(
                f"the policies of {' and of '.join(unknown)} cannot be read now, so it is not known how topic {self._name} "
                "is to be stored; it goes on when the metadata store answers"
            )
        return in_force.durability

    def in_force(self) -> Resolved | None:
        """None: not known now."""
        above = []
        for _, followed, name in self._above:
            if (found := followed.known(name)) is None:
                return None
            above.append(found.policies)
        return self._resolve(above)

    async def read(self) -> Resolved:
        """In force by what is stored now. Raises what the metadata store failed with."""
        return self._resolve([(await followed.read(name)).policies for _, followed, name in self._above])

    def _resolve(self, above: list[Policies]) -> Resolved:
        found, known = [self._ledgers.record.policies, *above], self._resolved
        if known is None or any(
            before is not now for (_, before), now in zip(known.levels, found, strict=False)
        ):
            names = [self._own, *(level for level, _, _ in self._above)]
            levels = (*zip(names, found, strict=True), of_broker(self._settings))
            known = self._resolved = Resolved(levels)
        return known

    async def change(self, list_changes: ListChanges, changes: Mapping[str, Any]) -> int:
        """Of the topic's own, as `Policies.changed`; the new version. Raises InvalidArgument."""

        async def change() -> int:
            record = self._ledgers.record
            policies = record.policies.changed(changes)
            if policies != record.policies:
                version = record.policies_version + 1
                await self._ledgers.commit(policies=policies, policies_version=version)
            return self._ledgers.record.policies_version

        return await list_changes.edit(change)


class StoredPolicies(Stored[NamespaceRecord]):
    """Of a namespace or for all brokers."""

    __slots__ = ()

    @property
    def policies(self) -> Policies:
        """Of its record."""
        return self.record.policies


class NamespacePolicies:
    """Of all namespaces, by name, and those for all brokers, which have the name ALL_BROKERS."""

    def __init__(self, metadata: MetadataStore, settings: BrokerSettings) -> None:
        self._metadata = metadata
        self.settings = settings
        self.followed: Followed[StoredPolicies] = Followed(
            metadata,
            policies_path,
            self.read,
            what="the policies of namespace",
            meanwhile="so that none of its topics is trimmed",
        )

    async def in_force(self, namespace: str) -> Resolved:
        """By what is stored now, for topics that have none of their own. Raises as `read`."""
        names = [ALL_BROKERS] if namespace == ALL_BROKERS else [namespace, ALL_BROKERS]
        levels = [(_level(name), (await self.read(name)).policies) for name in names]
        return Resolved((*levels, of_broker(self.settings)))

    async def below(self, namespace: Policies) -> Resolved:
        """In force where a namespace has these; from memory while a topic is loaded. Raises as `read`."""
        brokers: StoredPolicies = await self.followed.get(ALL_BROKERS)
        levels = (("namespace", namespace), (_level(ALL_BROKERS), brokers.policies))
        return Resolved((*levels, of_broker(self.settings)))

    def of_brokers(self) -> Resolved:
        """For whom no namespace matters, from memory: before they are known it is what the settings say."""
        found = self.followed.known(ALL_BROKERS)
        levels = [] if found is None else [(_level(ALL_BROKERS), found.policies)]
        return Resolved((*levels, of_broker(self.settings)))

    async def read(self, namespace: str) -> StoredPolicies:
        """As they are stored, in which record. Raises DataDirectoryError, or what the store failed with."""
        path = policies_path(namespace)
        stored = await self._metadata.get(path)
        if stored is None:
            return StoredPolicies(NamespaceRecord(Policies()), ABSENT)
        return StoredPolicies(NamespaceRecord.decode(stored.value, path), stored.version)

    async def change(self, namespace: str, changes: Mapping[str, Any], *, exists: bool = False) -> int:
        """As `Policies.changed`, of what is stored when nobody else changes it; the new version. Raises InvalidArgument.

        `exists`: it has a record, unless it is deleted meanwhile, which raises NotFound.
        """

        async def read() -> StoredPolicies:
            found = await self.read(namespace)
            if exists and found.version == ABSENT:
                raise NotFound(f"Namespace does not exist: there is no {namespace}")
            return found

        def edit(was: NamespaceRecord) -> NamespaceRecord:
            return msgspec.structs.replace(was, policies=was.policies.changed(changes))

        try:
            return (await change(self._metadata, policies_path(namespace), read, edit)).version
        finally:
            self.followed.drop(namespace)


def policies_path(namespace: str) -> str:
    """Metadata path of what is laid down for a namespace, or for all brokers."""
    return namespace_path(namespace) if namespace != ALL_BROKERS else BROKER_POLICIES_PATH


def _level(namespace: str) -> str:
    return "broker" if namespace == ALL_BROKERS else "namespace"


def check_possible(
    ledgers: Ledgers, broker_groups: Iterable[str], before: Resolved, policies: Policies
) -> None:
    """Of changed policies of the first level. Raises InvalidArgument where bookies or brokers are missing for them.

    Those that are down for the moment, as far as can be seen, are not.
    """
    (level, own), *others = before.levels
    durable = Resolved(((level, policies), *others)).durability
    if durable != before.durability:
        try:
            ledgers.check_placement(
                Striping(*durable[:3]), durable.minimum_write_quorum, durable.bookie_group
            )
        except NotEnoughBookies as error:
            raise InvalidArgument(
                f"no ledger could be made with these policies: {error.message}. To set them before the bookies are there, "
                "allow fewer copies until then (minimum_write_quorum, --minimum-write-quorum), or others than those of a "
                "group (bookie_group=preferred:NAME)"
            ) from None
    text = policies.broker_group or ""
    group = PlacementGroup.parse(text, "broker_group")
    if group.strict and text != own.broker_group and group.name not in broker_groups:
        raise InvalidArgument(
            f"broker_group={group.name}: no broker has the setting [broker] group={group.name}, so that nobody could "
            f"serve the topics; start one first, or set preferred:{group.name}"
        )
