"""What this broker knows of the cluster: brokers, bounds, owners, transfers. Each is read when asked for, and kept until
it changes (`magnetar.metadata.watched`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
from xxhash import xxh3_64_intdigest

from magnetar.metadata import MetadataStore
from magnetar.metadata.paths import DRAINING_BROKERS_PATH
from magnetar.metadata.store import Create, Operation, Put, Versioned
from magnetar.metadata.watched import Watched, WatchedByName
from magnetar.proto.errors import DataDirectoryError, InvalidArgument
from magnetar.proto.policies import PlacementGroup

from ..log.records import NamespaceRecord, namespace_path
from .balance.core.facts import UNBOUND, BrokerFacts, NamespaceBinding
from .core.bundles import Bounds, Bundle
from .ownership import BrokerRow
from .records import (
    BROKERS_PATH,
    DRAINING,
    OWNERS_PATH,
    TRANSFERS_PATH,
    BoundsRecord,
    BrokerRecord,
    OwnerRecord,
    TransferRecord,
    bounds_path,
    bundle_of_transfer,
    owners_path,
)

_log = logging.getLogger(__name__)
T = TypeVar("T")

NEW = -1  # version of the bounds of a namespace that has none: nobody made a topic there yet


class KnownBounds(NamedTuple):
    """A namespace's bounds, and the version of their node."""

    bounds: Bounds
    version: int


class KnownOwner(NamedTuple):
    """A bundle's owner, and the version of its node. `damage`: why the node cannot be read; then the record names nobody."""

    record: OwnerRecord
    version: int
    damage: str = ""


class KnownTransfer(NamedTuple):
    """What a bundle's owner is asked to do, and the version of the node."""

    record: TransferRecord
    version: int


class ClusterView:
    """See the module docstring. `close` in the end."""

    def __init__(self, metadata: MetadataStore, default_bundles: int, on_change: Callable[[], None]) -> None:
        """`default_bundles`: of a namespace that nobody divided yet. `on_change` is called when anything has changed."""
        self._metadata = metadata
        self._default = Bounds.even(default_bundles)
        self._on_change = on_change
        # Those that run, by name.
        self.brokers = self._watched(BROKERS_PATH, lambda: cluster_brokers(metadata))
        self.draining = self._watched(
            DRAINING_BROKERS_PATH, lambda: metadata.children(DRAINING_BROKERS_PATH)
        )  # names
        self.transfers = self._watched(TRANSFERS_PATH, self._read_transfers)  # what owners are asked to do
        # By namespace: as many as have bounds. Anybody can look up a topic of a namespace that does not exist, so nothing
        # is kept of others.
        self._bounds = WatchedByName(metadata, bounds_path, self._read_bounds, self._of_namespace)
        self._owners = WatchedByName(
            metadata, owners_path, partial(read_owners, metadata), self._of_namespace
        )
        self._bindings = WatchedByName(metadata, namespace_path, self._read_binding, self._of_namespace)

    def _watched(self, path: str, read: Callable[[], Coroutine[Any, Any, T]]) -> Watched[T]:
        return Watched(self._metadata, path, read, self._on_change)

    def _of_namespace(self, namespace: str) -> None:
        self._on_change()

    async def bounds(self, namespace: str) -> KnownBounds:
        """How a namespace is divided, or would be if somebody made a topic there: its version is NEW then."""
        if not self.has_bounds(namespace):
            found = await self._read_bounds(namespace)
            if found.version == NEW:
                return found
        return await self._bounds.of(namespace).get()

    def has_bounds(self, namespace: str) -> bool:
        """False for a namespace of which no bounds were found yet: anybody can make up a name."""
        return namespace in self._bounds

    def drop(self, namespace: str) -> None:
        """The bounds and the owners of a namespace have changed, or may have."""
        self._bounds.drop(namespace)
        self._owners.drop(namespace)

    def namespaces(self) -> list[str]:
        """Those whose owners were asked for."""
        return list(self._owners)

    def owners(self, namespace: str) -> Watched[dict[Bundle, KnownOwner]]:
        """The bundles of a namespace with bounds that somebody owns."""
        return self._owners.of(namespace)

    async def owner(self, bundle: Bundle) -> KnownOwner | None:
        """Who owns a bundle, of a namespace with or without bounds; None: nobody."""
        if (await self.bounds(bundle.namespace)).version == NEW:
            return None
        return (await self.owners(bundle.namespace).get()).get(bundle)

    async def broker_facts(self) -> list[BrokerFacts]:
        """All brokers, as placement and balance see them."""
        draining = await self.draining.get()
        return [
            BrokerFacts(
                row.name,
                row.zone,
                DRAINING if row.name in draining else row.state,
                row.load.cpu,
                row.load.bundles,
                row.load.topics,
                row.load.connections,
                row.group,
                xxh3_64_intdigest(msgspec.msgpack.encode(row.load)),
            )
            for row in (await self.brokers.get()).values()
        ]

    # --- reading -----------------------------------------------------------------------------------------------------

    async def _read_bounds(self, namespace: str) -> KnownBounds:
        path = bounds_path(namespace)
        stored = await self._metadata.get(path)
        if stored is None:
            return KnownBounds(self._default, NEW)
        try:
            return KnownBounds(Bounds.of(BoundsRecord.decode(stored.value, path).bounds), stored.version)
        except ValueError as error:
            raise DataDirectoryError(f"the metadata of {path} is damaged: {error}") from None

    async def all_owners(self) -> dict[Bundle, KnownOwner]:
        """Of every namespace."""
        found: dict[Bundle, KnownOwner] = {}
        for tenant in await self._metadata.children(OWNERS_PATH):
            for name in await self._metadata.children(f"{OWNERS_PATH}/{tenant}"):
                found |= await self.owners(f"{tenant}/{name}").get()
        return found

    async def binding(self, namespace: str) -> NamespaceBinding:
        """The brokers that a namespace is bound to by its policies."""
        if namespace not in self._bounds and namespace not in self._owners:
            return await self._read_binding(namespace)
        return await self._bindings.of(namespace).get()

    async def _read_binding(self, namespace: str) -> NamespaceBinding:
        path = namespace_path(namespace)
        stored = await self._metadata.get(path)
        if stored is None:
            return UNBOUND
        policies = NamespaceRecord.decode(stored.value, path).policies
        group = PlacementGroup.parse(policies.broker_group or "", "broker_group")
        return NamespaceBinding(policies.broker_zone or "", group.name, group.strict)

    async def _read_transfers(self) -> dict[Bundle, KnownTransfer]:
        found = {}
        for name, node in (await _nodes(self._metadata, TRANSFERS_PATH)).items():
            try:
                record = TransferRecord.decode(node.value, f"{TRANSFERS_PATH}/{name}")
                found[bundle_of_transfer(name)] = KnownTransfer(record, node.version)
            except (DataDirectoryError, InvalidArgument) as error:
                _log.warning("a request to move a bundle is left out: %s", error)
        return found

    async def close(self) -> None:
        """Nothing is watched or read any more."""
        for watched in (
            self.brokers,
            self.draining,
            self.transfers,
            self._bounds,
            self._owners,
            self._bindings,
        ):
            await watched.close()


def put_bounds(namespace: str, bounds: Bounds, version: int) -> Operation:
    """For a commit: how the namespace is divided from then on; `version` is that of the bounds as they are known."""
    path, value = bounds_path(namespace), BoundsRecord(list(bounds.firsts)).encode()
    return Create(path, value) if version == NEW else Put(path, value, version)


async def _nodes(metadata: MetadataStore, path: str) -> dict[str, Versioned]:
    """Those below a path that have a value, by name."""
    names = await metadata.children(path)
    found = await asyncio.gather(*(metadata.get(f"{path}/{name}") for name in names))
    return {name: node for name, node in zip(names, found) if node is not None}


async def read_owners(metadata: MetadataStore, namespace: str) -> dict[Bundle, KnownOwner]:
    """The bundles of a namespace that somebody owns."""
    path = owners_path(namespace)
    found = {}
    for name, node in (await _nodes(metadata, path)).items():
        try:
            bundle = Bundle.parse(f"{namespace}/{name}")
        except InvalidArgument:
            _log.warning("%s/%s is left out: it is not named as a bundle is", path, name)
            continue
        try:
            found[bundle] = KnownOwner(OwnerRecord.decode(node.value, f"{path}/{name}"), node.version)
        except DataDirectoryError as error:  # costs this bundle, not the namespace
            damage = (
                f"{error.message}; delete it, unless a broker that made it runs: the bundle has no owner then"
            )
            found[bundle] = KnownOwner(OwnerRecord("", "", "", 0), node.version, damage)
    return found


async def cluster_brokers(metadata: MetadataStore) -> dict[str, BrokerRow]:
    """Those that run, by name."""
    rows = {}
    for name, node in (await _nodes(metadata, BROKERS_PATH)).items():
        try:
            rows[name] = BrokerRow.of(name, BrokerRecord.decode(node.value, f"{BROKERS_PATH}/{name}"))
        except DataDirectoryError as error:  # one broker of another release must not blind us for all others
            _log.warning("broker %s is left out: %s", name, error)
    return rows
