"""Clusters, tenants and namespaces, as Pulsar's administrators know them: see `operations` for how each is authorized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from magnetar.proto.errors import InvalidArgument, NodeNotEmpty, NotAllowed, NotEmpty, NotFound
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies

from ..log.records import (
    NAMESPACES_ROOT,
    ClusterRecord,
    NamespaceRecord,
    TenantRecord,
    tenant_path,
)
from ..tenancy.objects import CLUSTER, DEFAULT, NAMESPACE, PUBLIC, TENANT
from ..topics.registry import Broker
from .diagnosis import busy_namespace
from .operations import on_cluster, on_namespace, on_tenant, on_topic

ACTIONS = ("produce", "consume", "functions", "sources", "sinks", "packages")  # that Pulsar grants to roles
_replace = msgspec.structs.replace


class TenancyService:
    """A part of `BrokerService`."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._objects = broker.objects

    # --- clusters ----------------------------------------------------------------------------------------------------

    @on_cluster("list_clusters")
    async def clusters(self) -> list[str]:
        """By name; the broker's own is one of them."""
        return await self._objects.clusters()

    @on_cluster("list_clusters")
    async def cluster(self, name: str) -> ClusterRecord:
        """Raises NotFound."""
        return (await self._objects.get(CLUSTER, name)).record

    @on_cluster("change_clusters")
    async def create_cluster(self, name: str, data: Mapping[str, Any]) -> None:
        """Raises AlreadyExists."""
        await self._objects.create(CLUSTER, name, ClusterRecord(dict(data), []))

    @on_cluster("change_clusters")
    async def update_cluster(self, name: str, data: Mapping[str, Any]) -> None:
        """What is said of it is this now. Raises NotFound."""
        await self._objects.change(CLUSTER, name, lambda was: _replace(was, data=dict(data)))

    @on_cluster("change_clusters")
    async def set_peer_clusters(self, name: str, peers: Sequence[str]) -> None:
        """The clusters that Pulsar's users call its peers. Raises NotFound, InvalidArgument."""
        for peer in peers:
            if peer == name or await self._objects.find(CLUSTER, peer) is None:
                raise InvalidArgument(f"Peer cluster {peer} does not exist, or is the cluster itself")
        await self._objects.change(CLUSTER, name, lambda was: _replace(was, peers=list(peers)))

    @on_cluster("change_clusters")
    async def delete_cluster(self, name: str) -> None:
        """Raises NotFound, and InvalidArgument for the broker's own one."""
        found = await self._objects.get(CLUSTER, name)
        if name == self._broker.settings.cluster_name:
            raise InvalidArgument(f"Cluster {name} is the one that answers (broker.cluster_name), and stays")
        await self._objects.delete(CLUSTER, name, found.version)

    # --- tenants -----------------------------------------------------------------------------------------------------

    @on_cluster("list_tenants")
    async def tenants(self) -> list[str]:
        """By name."""
        found = {PUBLIC, *await self._broker.metadata.children(NAMESPACES_ROOT)}
        return sorted(found.difference(await self._objects.deletions()))

    @on_tenant("get_tenant")
    async def tenant(self, tenant: str) -> TenantRecord:
        """Raises NotFound."""
        return (await self._objects.get(TENANT, tenant)).record

    @on_tenant("change_tenants")
    async def create_tenant(
        self, tenant: str, *, admin_roles: Sequence[str] = (), allowed_clusters: Sequence[str] | None = None
    ) -> None:
        """`allowed_clusters` None: all that there are. Raises AlreadyExists, InvalidArgument."""
        record = await self._objects.new_tenant(admin_roles, allowed_clusters)
        await self._objects.create(TENANT, tenant, record)

    @on_tenant("change_tenants")
    async def update_tenant(
        self,
        tenant: str,
        *,
        admin_roles: Sequence[str] | None = None,
        allowed_clusters: Sequence[str] | None = None,
    ) -> None:
        """None: stays as it is. Raises NotFound, InvalidArgument."""
        await self._objects.get(TENANT, tenant)
        allowed = None if allowed_clusters is None else await self._objects.allowed(allowed_clusters)

        def edit(was: TenantRecord) -> TenantRecord:
            roles = was.admin_roles if admin_roles is None else list(admin_roles)
            return _replace(
                was, admin_roles=roles, allowed_clusters=was.allowed_clusters if allowed is None else allowed
            )

        await self._objects.change(TENANT, tenant, edit)

    @on_tenant("change_tenants")
    async def delete_tenant(self, tenant: str, *, force: bool = False) -> None:
        """`force`: with all of its namespaces. Raises NotFound, NotEmpty, NotAllowed, RequestTimeout while that goes on."""
        if force:
            self._check_force("tenants")
            await self._broker.deletions.delete_tenant(tenant)
            return
        found = await self._objects.find(TENANT, tenant)
        if found is None:
            raise NotFound(f"Tenant doesn't exist: there is no {tenant}")
        try:
            if tenant == PUBLIC:
                raise NodeNotEmpty
            await self._objects.delete(TENANT, tenant, found.version)
        except NodeNotEmpty:
            names = ", ".join(sorted(await self._broker.metadata.children(tenant_path(tenant)))) or "default"
            raise NotEmpty(
                f"The tenant still has active namespaces: {tenant} has {names:.500}; delete them first, or all with force"
            ) from None

    # --- namespaces --------------------------------------------------------------------------------------------------

    @on_tenant("list_namespaces")
    async def namespaces(self, tenant: str) -> list[str]:
        """`tenant/namespace` of each, by name. Raises NotFound."""
        await self._objects.get(TENANT, tenant)
        found = {f"{tenant}/{name}" for name in await self._broker.metadata.children(tenant_path(tenant))}
        if tenant == PUBLIC:
            found.add(DEFAULT)
        return sorted(found.difference(await self._objects.deletions()))

    @on_namespace("get_policies")
    async def namespace(self, namespace: str) -> NamespaceRecord:
        """All that is laid down for it. Raises NotFound."""
        return (await self._objects.get(NAMESPACE, namespace)).record

    @on_namespace("create_namespace")
    async def create_namespace(
        self, namespace: str, *, policies: Policies | None = None, bundles: int = 0
    ) -> None:
        """`bundles` 0: as the settings say. Raises AlreadyExists, NotFound for its tenant, InvalidArgument."""
        await self._objects.create_namespace(namespace, policies=policies, bundles=bundles)

    @on_namespace("delete_namespace")
    async def delete_namespace(self, namespace: str, *, force: bool = False) -> None:
        """`force`: with all of its topics. Raises NotFound, NotEmpty, NotAllowed, RequestTimeout while that goes on."""
        if force:
            self._check_force("namespaces")
        await self._broker.deletions.delete_namespace(namespace, force=force)

    @on_namespace("namespace_stats")
    async def namespace_stats(self, namespace: str) -> dict[str, float]:
        """Of what this broker has loaded of it. Raises NotFound."""
        await self._objects.get(NAMESPACE, namespace)
        return await busy_namespace(self._broker, namespace)

    def _check_force(self, what: str) -> None:
        if not self._broker.settings.allow_forced_deletion:
            raise NotAllowed(
                f"Broker doesn't allow forced deletion of {what}: set broker.allow_forced_deletion=true, or delete what is "
                "in them first"
            )

    # --- properties, permissions -------------------------------------------------------------------------------------

    @on_namespace("set_policies")
    async def set_properties(
        self, namespace: str, properties: Mapping[str, str], *, only: bool = False
    ) -> None:
        """These, beside those there are, or `only` these. Raises NotFound."""

        def edit(was: NamespaceRecord) -> NamespaceRecord:
            return _replace(was, properties={**({} if only else was.properties), **properties})

        await self._objects.change(NAMESPACE, namespace, edit)

    @on_namespace("set_policies")
    async def remove_property(self, namespace: str, key: str) -> str | None:
        """What it was; None: there was none. Raises NotFound."""
        found = None

        def edit(was: NamespaceRecord) -> NamespaceRecord:
            nonlocal found
            left = dict(was.properties)
            found = left.pop(key, None)
            return _replace(was, properties=left)

        await self._objects.change(NAMESPACE, namespace, edit)
        return found

    @on_namespace("grant_permissions")
    async def grant(self, namespace: str, role: str, actions: Sequence[str]) -> None:
        """The role may do this in the namespace, and nothing else; none: nothing any more. Raises NotFound."""
        _check(role, actions)

        def edit(was: NamespaceRecord) -> NamespaceRecord:
            return _replace(was, permissions=_granted(was.permissions, role, actions))

        await self._objects.change(NAMESPACE, namespace, edit)

    @on_topic("grant_permissions")
    async def grant_topic(self, name: TopicName, role: str, actions: Sequence[str]) -> None:
        """The same for one topic, or all of its partitions; beside what it may do in the namespace. Raises NotFound."""
        _check(role, actions)
        topic = str(name)

        def edit(was: NamespaceRecord) -> NamespaceRecord:
            return was.with_permissions(topic, _granted(was.topic_permissions.get(topic, {}), role, actions))

        await self._objects.change(NAMESPACE, name.full_namespace, edit)

    @on_topic("get_permissions")
    async def topic_permissions(self, name: TopicName) -> dict[str, list[str]]:
        """Actions by role: those of its namespace and its own together. Raises NotFound."""
        record = (await self._objects.get(NAMESPACE, name.full_namespace)).record
        found = {role: list(actions) for role, actions in record.permissions.items()}
        for role, actions in record.topic_permissions.get(str(name), {}).items():
            found[role] = sorted({*found.get(role, []), *actions}, key=ACTIONS.index)
        return found


def _granted(before: dict[str, list[str]], role: str, actions: Sequence[str]) -> dict[str, list[str]]:
    others = {other: its for other, its in before.items() if other != role}
    return others | ({role: list(dict.fromkeys(actions))} if actions else {})


def _check(role: str, actions: Sequence[str]) -> None:
    if not role or len(role) > 255 or not role.isprintable():
        raise InvalidArgument(f"not a role: {role[:80]!r} (want 1 to 255 printable characters)")
    for action in actions:
        if action not in ACTIONS:
            raise InvalidArgument(
                f"{action!r:.80} is no action that can be granted; there are {', '.join(ACTIONS)}"
            )
