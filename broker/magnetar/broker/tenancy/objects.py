"""Clusters, tenants and namespaces: records with versions in the metadata store, made and deleted by Pulsar's rules.

    /clusters/{cluster}               ClusterRecord
    /namespaces/{tenant}              TenantRecord
    /namespaces/{tenant}/{namespace}  NamespaceRecord
    /deletions/{either}               it is being deleted: `deletion`

The broker's own cluster, the tenant `public` and the namespace `public/default` exist without a record; the first change of
one makes it. So they come back, empty, when somebody deletes them.

A change reads the record, and replaces it by compare-and-set until it meets no other change: of two brokers that change the
same record none loses what the other one wrote. Whether they are empty is decided by the store: it deletes no tenant's node
while nodes stand below it, and whoever makes a topic checks the version of its namespace.

Texts begin as those of Pulsar, which its users know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import unquote

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.record import Record
from magnetar.metadata.store import Create, Operation
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    NotFoundInStore,
    VersionConflict,
)
from magnetar.proto.ids import check_name, check_namespace
from magnetar.proto.policies import Policies
from magnetar.runtime.clock import Clock

from ..log.records import (
    ABSENT,
    CLUSTERS_ROOT,
    DELETIONS_ROOT,
    FORCED,
    ClusterRecord,
    NamespaceRecord,
    Stored,
    TenantRecord,
    change,
    cluster_path,
    deletion_path,
    namespace_path,
    tenant_path,
)
from ..ownership.core.bundles import MAX_BUNDLES, Bounds
from ..ownership.records import BoundsRecord, bounds_path
from ..settings import BrokerSettings

PUBLIC, DEFAULT = "public", "public/default"
R = TypeVar("R", bound=Record)


class Kind(NamedTuple, Generic[R]):
    """What the three have in common."""

    what: str
    known: str  # there is one already
    record: type[R]
    path: Callable[[str], str]
    check: Callable[[str], str]  # of a name: raises InvalidArgument


CLUSTER = Kind(
    "Cluster", "Cluster already exists", ClusterRecord, cluster_path, partial(check_name, "cluster")
)
TENANT = Kind("Tenant", "Tenant already exist", TenantRecord, tenant_path, partial(check_name, "tenant"))
NAMESPACE = Kind("Namespace", "Namespace already exists", NamespaceRecord, namespace_path, check_namespace)


class Objects:
    """See the module docstring."""

    def __init__(self, metadata: MetadataStore, settings: BrokerSettings, clock: Clock) -> None:
        self._metadata = metadata
        self._settings = settings
        self._clock = clock

    # --- reading -----------------------------------------------------------------------------------------------------

    async def find(self, kind: Kind[R], name: str) -> Stored[R] | None:
        """Also of what is being deleted; None: there is none."""
        path = kind.path(kind.check(name))
        stored = await self._metadata.get(path)
        if stored is None:
            always = self._always().get((kind.what, name))
            return Stored(always, ABSENT) if isinstance(always, kind.record) else None
        return Stored(kind.record.decode(stored.value, path), stored.version)

    async def get(self, kind: Kind[R], name: str) -> Stored[R]:
        """Raises NotFound, also once its deletion is certain."""
        found = await self.find(kind, name)
        if found is None or getattr(found.record, "deletion", "") == FORCED:
            raise NotFound(f"{kind.what} does not exist: there is no {name}")
        return found

    def _always(self) -> dict[tuple[str, str], Record]:
        own = self._settings.cluster_name
        urls = {
            "serviceUrl": self._settings.http_url,
            "brokerServiceUrl": self._settings.pulsar_url_for_clients or self._settings.service_url,
        }
        return {
            (CLUSTER.what, own): ClusterRecord(urls, []),
            (TENANT.what, PUBLIC): TenantRecord([], [own], 0),
            (NAMESPACE.what, DEFAULT): NamespaceRecord(Policies()),
        }

    async def clusters(self) -> list[str]:
        """By name."""
        return sorted({self._settings.cluster_name, *await self._metadata.children(CLUSTERS_ROOT)})

    async def deletions(self) -> list[str]:
        """Tenants and namespaces that are being deleted."""
        return [unquote(name) for name in await self._metadata.children(DELETIONS_ROOT)]

    # --- changes -----------------------------------------------------------------------------------------------------

    async def change(self, kind: Kind[R], name: str, edit: Callable[[R], R]) -> R:
        """What `edit` makes of the record takes its place; it may be called several times. Raises NotFound."""
        return (await change(self._metadata, kind.path(name), partial(self.get, kind, name), edit)).record

    async def create(self, kind: Kind[R], name: str, record: R) -> None:
        """Raises AlreadyExists."""
        if await self.find(kind, name) is None:
            with contextlib.suppress(AlreadyExists):
                await self._metadata.create(kind.path(name), record.encode())
                return
        raise AlreadyExists(f"{kind.known}: {name}")

    async def delete(self, kind: Kind[R], name: str, version: int) -> None:
        """Unless it has changed since. Raises VersionConflict, and NodeNotEmpty while something stands below it."""
        path = kind.path(name)
        try:
            await self._metadata.delete(path, version=version)
        except (NotFoundInStore, VersionConflict):
            raise VersionConflict(f"{path} was changed by somebody else; look at it, and try again") from None

    async def new_tenant(self, roles: Sequence[str], clusters: Sequence[str] | None) -> TenantRecord:
        """`clusters` None: all that there are. Raises InvalidArgument."""
        return TenantRecord(list(roles), await self.allowed(clusters), self._clock.now_ms())

    async def allowed(self, clusters: Sequence[str] | None) -> list[str]:
        """The clusters that a tenant may have. Raises InvalidArgument."""
        known = await self.clusters()
        if clusters is None:
            return known
        if not clusters:
            raise InvalidArgument(f"Clusters can not be empty: name some of {', '.join(known)}")
        if missing := set(clusters).difference(known):
            raise InvalidArgument(
                f"Clusters do not exist: {', '.join(sorted(missing))}; there are {', '.join(known)}"
            )
        return list(clusters)

    async def create_namespace(
        self, name: str, *, policies: Policies | None = None, bundles: int = 0, with_tenant: bool = False
    ) -> None:
        """`bundles` 0: as many as the settings say, once it has topics. `with_tenant`: that is made as well, if need be.

        Raises AlreadyExists, NotFound for its tenant, InvalidArgument.
        """
        if not 0 <= bundles <= MAX_BUNDLES:
            raise InvalidArgument(f"Invalid number of bundles: {bundles}; want 1 to {MAX_BUNDLES}")
        tenant = check_namespace(name).partition("/")[0]
        record = NamespaceRecord((policies or Policies()).check(), self._clock.now_ms())
        path = namespace_path(name)
        while name != DEFAULT or await self._metadata.get(path) is None:
            if with_tenant and await self.find(TENANT, tenant) is None:
                with contextlib.suppress(AlreadyExists):
                    await self.create(TENANT, tenant, await self.new_tenant([], None))
            parent = await self.get(TENANT, tenant)
            nodes: list[Operation] = [parent.check(tenant_path(tenant)), Create(path, record.encode())]
            if bundles and await self._metadata.get(bounds_path(name)) is None:
                firsts = list(Bounds.even(bundles).firsts)
                nodes.append(Create(bounds_path(name), BoundsRecord(firsts).encode()))
            try:
                return await self._metadata.commit(nodes)
            except VersionConflict:
                continue
            except AlreadyExists as error:
                if error.details.get("index") != 1:
                    continue
                break
        raise AlreadyExists(f"{NAMESPACE.known}: {name}")

    async def mark_deleted(self, kind: Kind[Any], name: str, why: str) -> None:
        """From here on it does not exist, or not for long: see `NamespaceRecord.deletion`. Raises NotFound."""
        path = kind.path(name)
        while True:
            found = await self.find(kind, name)
            if found is None:
                raise NotFound(f"{kind.what} {name} does not exist.")
            if found.record.deletion in (why, FORCED):
                return
            changed = msgspec.structs.replace(found.record, deletion=why)
            marker = [] if found.record.deletion else [Create(deletion_path(name), why.encode())]
            with contextlib.suppress(AlreadyExists, NotFoundInStore, VersionConflict):
                await self._metadata.commit([found.write(path, changed), *marker])
                return
