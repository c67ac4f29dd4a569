"""The rows of clusters, tenants, namespaces, permissions and bundles."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from magnetar.proto.errors import Unsupported
from magnetar.proto.policies import Policies
from magnetar.proto.policy_shapes import SHAPES, whole_of

from ...log.records import ClusterRecord, TenantRecord
from ...ownership.core.bundles import Bundle
from ...service.admin import AdminService
from ...service.results import BundlesFound
from ...service.tenancy import TenancyService
from .routes import KEYS, NAMESPACE, TOPIC, WHOLE, Asked, Route, text
from .statuses import Refused
from .topics_routes import CLEAR_BACKLOG, SUBSCRIPTIONS, UNSUBSCRIBE

# As Pulsar shows what is not used.
_NOT_OF_CLUSTERS: Final = {
    "brokerClientTlsEnabled": False, "tlsAllowInsecureConnection": False, "brokerClientTlsEnabledWithKeyStore": False,
    "brokerClientTlsTrustStoreType": "JKS", "brokerClientTlsKeyStoreType": "JKS",
    "brokerClientSslFactoryPlugin": "org.apache.pulsar.common.util.DefaultPulsarSslFactory",
}  # fmt: skip
_NOT_OF_NAMESPACES: Final = {
    "allowed_clusters": [], "latency_stats_sample_rate": {}, "deleted": False, "subscription_auth_mode": "None",
    "migrated": False, "clusterDispatchRate": {},
}  # fmt: skip


async def create_namespace(asked: Asked, wanted: dict[str, Any] | None = None) -> None:
    """Makes a namespace, with `bundles` and policies as GET shows them."""
    given = wanted or {}
    changes: dict[str, Any] = {}
    for shape in SHAPES.values():
        value = given.get(shape.particular.whole)
        if value not in (None, {}, [], shape.particular.unset):
            if shape.variant or shape.particular.by_cluster:
                value = value.get(shape.variant or asked.service.settings.cluster_name)
            changes |= shape.read(value)
    policies = msgspec.convert(
        {name: value for name, value in changes.items() if value is not None}, Policies
    )
    bundles = (given.get("bundles") or {}).get("numBundles", 0)
    await asked.service.tenancy.create_namespace(
        asked, asked.namespace, policies=policies.check(), bundles=bundles
    )


async def namespace(asked: Asked) -> dict[str, Any]:
    """All that is laid down for a namespace."""
    record = await asked.service.tenancy.namespace(asked, asked.namespace)
    cluster = asked.service.settings.cluster_name
    found = whole_of(record.policies, cluster)
    return {
        **_NOT_OF_NAMESPACES, **found, "properties": record.properties,
        "auth_policies": {
            "namespace_auth": record.permissions, "destination_auth": record.topic_permissions,
            "subscription_auth_roles": {},
        },
        "replication_clusters": found.get("replication_clusters") or [cluster],
        "bundles": await bundles(asked),
    }  # fmt: skip


async def bundles(asked: Asked) -> dict[str, Any]:
    """The bounds of a namespace's bundles."""
    await asked.service.tenancy.namespace(asked, asked.namespace)
    return _bounds(await asked.service.list_bundles(asked, asked.namespace))


def _bounds(found: BundlesFound) -> dict[str, Any]:
    firsts = [f"0x{Bundle.parse(row.bundle).first:08x}" for row in found.bundles]
    return {"boundaries": [*firsts, "0xffffffff"], "numBundles": len(firsts)}


async def _bundle(asked: Asked) -> str:
    """Pulsar's bounds are those of the next one, ours the last hash of this."""
    names = [row.bundle for row in (await asked.service.list_bundles(asked, asked.namespace)).bundles]
    first, _, end = asked.names["bundle"].partition("_")
    for name in names:
        found = Bundle.parse(name)
        if first == f"0x{found.first:08x}" and end in (f"0x{found.last:08x}", f"0x{found.last + 1:08x}"):
            return name
    raise Refused(412, f"Cannot find bundle {asked.namespace}/{asked.names['bundle']} in the bundles list")


async def unload_bundle(asked: Asked) -> None:
    """Hands a bundle over to the broker that placement chooses."""
    await asked.service.unload_bundle(asked, await _bundle(asked))


async def split_bundle(asked: Asked) -> None:
    """Divides a bundle in two."""
    await asked.service.split_bundle(asked, await _bundle(asked))


async def unload(asked: Asked) -> None:
    """Hands all bundles of a namespace over."""
    await bundles(asked)
    for row in (await asked.service.list_bundles(asked, asked.namespace)).bundles:
        await asked.service.unload_bundle(asked, row.bundle)


async def clear_backlog(asked: Asked, subscription: str = "") -> None:
    """Acknowledges all that is stored now, in all topics of a namespace, for one or all subscriptions."""
    await _of_subscriptions(asked, CLEAR_BACKLOG, subscription)


async def unsubscribe(asked: Asked, subscription: str) -> None:
    """Deletes a subscription of all topics of a namespace."""
    await _of_subscriptions(asked, UNSUBSCRIBE, subscription)


async def _of_subscriptions(asked: Asked, route: Route, subscription: str) -> None:
    """Asks a row of a subscription, or all, of each topic that has it, at its owner."""
    await asked.service.tenancy.namespace(asked, asked.namespace)
    topics = await asked.service.admin.topics(asked, asked.namespace)
    have = await asked.each(asked.about(SUBSCRIPTIONS, topic, {}) for topic in topics)
    await asked.each(
        asked.about(route, topic, {}, subscription=name)
        for topic, names in have.items() for name in names if subscription in ("", name)
    )  # fmt: skip


async def set_property(asked: Asked, key: str, value: str) -> None:
    """Notes one property of a namespace."""
    await asked.service.tenancy.set_properties(asked, asked.namespace, {key: value})


async def one_property(asked: Asked, key: str) -> str | None:
    """One property of a namespace."""
    return (await asked.service.tenancy.namespace(asked, asked.namespace)).properties.get(key)


async def no_roles(asked: Asked) -> None:
    """Subscriptions have no roles of their own."""
    raise Unsupported(
        "subscriptions have no roles of their own here: permissions are of namespaces and topics"
    )


async def no_resource_group(asked: Asked) -> None:
    """There are none."""
    await asked.service.tenancy.namespace(asked, asked.namespace)
    if asked.route.method == "POST":
        raise Refused(412, "ResourceGroup does not exist: limits are policies of namespaces and topics here")


def _cluster(record: ClusterRecord) -> dict[str, Any]:
    return {**_NOT_OF_CLUSTERS, **record.data, **({"peerClusterNames": record.peers} if record.peers else {})}


def _tenant(record: TenantRecord) -> dict[str, Any]:
    return {"adminRoles": record.admin_roles, "allowedClusters": record.allowed_clusters}


_T: Final = TenancyService
_CLUSTERS: Final = "/admin/v2/clusters"
_CLUSTER: Final = f"{_CLUSTERS}/{{name}}"
_TENANT: Final = "/admin/v2/tenants/{tenant}"
_NO_ACTIONS: Final = {"actions": ()}

TENANCY_ROUTES: Final = (
    Route("GET", _CLUSTERS, _T.clusters),
    Route("GET", _CLUSTER, _T.cluster, answer=_cluster),
    Route("PUT", _CLUSTER, _T.create_cluster, body="data", status=200),
    Route("POST", _CLUSTER, _T.update_cluster, body="data", status=200),
    Route("DELETE", _CLUSTER, _T.delete_cluster),
    Route("GET", f"{_CLUSTER}/peers", _T.cluster, answer=lambda record: record.peers),
    Route("POST", f"{_CLUSTER}/peers", _T.set_peer_clusters, body="peers"),
    Route("GET", f"{_CLUSTER}/failureDomains", _T.cluster, answer=lambda _: {}),
    Route("GET", "/admin/v2/tenants", _T.tenants),
    Route("GET", _TENANT, _T.tenant, answer=_tenant),
    Route("PUT", _TENANT, _T.create_tenant, body=KEYS),
    Route("POST", _TENANT, _T.update_tenant, body=KEYS),
    Route("DELETE", _TENANT, _T.delete_tenant),
    Route("GET", "/admin/v2/namespaces/{tenant}", _T.namespaces),
    Route("GET", NAMESPACE, namespace),
    Route("PUT", NAMESPACE, create_namespace, body="wanted"),
    Route("DELETE", NAMESPACE, _T.delete_namespace),
    Route("GET", f"{NAMESPACE}/topics", AdminService.topics),
    Route("GET", f"{NAMESPACE}/bundles", bundles),
    Route("PUT", f"{NAMESPACE}/{{bundle}}/unload", unload_bundle),
    Route("PUT", f"{NAMESPACE}/{{bundle}}/split", split_bundle),
    Route("PUT", f"{NAMESPACE}/unload", unload),
    Route("POST", f"{NAMESPACE}/clearBacklog", clear_backlog),
    Route("POST", f"{NAMESPACE}/clearBacklog/{{subscription}}", clear_backlog),
    Route("POST", f"{NAMESPACE}/unsubscribe/{{subscription}}", unsubscribe),
    Route("GET", f"{NAMESPACE}/permissions", _T.namespace, answer=lambda record: record.permissions),
    Route("POST", f"{NAMESPACE}/permissions/{{role}}", _T.grant, body="actions"),
    Route("DELETE", f"{NAMESPACE}/permissions/{{role}}", _T.grant, given=_NO_ACTIONS),
    Route("GET", f"{NAMESPACE}/permissions/{{kind}}", no_roles),
    Route("POST", f"{NAMESPACE}/permissions/{{kind}}/{{subscription}}", no_roles),
    Route("DELETE", f"{NAMESPACE}/permissions/{{subscription}}/{{role}}", no_roles),
    Route("GET", f"{NAMESPACE}/properties", _T.namespace, answer=lambda record: record.properties),
    Route("PUT", f"{NAMESPACE}/properties", _T.set_properties, body="properties"),
    Route("DELETE", f"{NAMESPACE}/properties", _T.set_properties, given={"properties": {}, "only": True}),
    Route("GET", f"{NAMESPACE}/property/{{key}}", one_property, answer=text),
    Route("PUT", f"{NAMESPACE}/property/{{key}}/{{value}}", set_property),
    Route("DELETE", f"{NAMESPACE}/property/{{key}}", _T.remove_property, answer=text),
    Route("GET", f"{NAMESPACE}/resourcegroup", no_resource_group),
    Route("POST", f"{NAMESPACE}/resourcegroup/{{name}}", no_resource_group),
    Route("GET", f"{TOPIC}/permissions", _T.topic_permissions, partitions=WHOLE),
    Route("POST", f"{TOPIC}/permissions/{{role}}", _T.grant_topic, body="actions", partitions=WHOLE),
    Route("DELETE", f"{TOPIC}/permissions/{{role}}", _T.grant_topic, given=_NO_ACTIONS, partitions=WHOLE),
)
