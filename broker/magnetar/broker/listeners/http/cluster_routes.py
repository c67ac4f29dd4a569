"""The rows of brokers and bookies, and what Pulsar has and Magnetar never will.

A broker is called as Pulsar's tools call it: by the host and port of its HTTP. The dynamic configuration of brokers is that
of the policies at their level (`proto.policy_table`), under Pulsar's names; it holds for all brokers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

import msgspec

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName
from magnetar.proto.policy_shapes import read_one, show_one
from magnetar.proto.policy_table import DESCRIBED

from ...ownership.ownership import BrokerRow
from ...ownership.records import READY
from ...service.broker import BrokerService
from ...service.results import BookiesFound
from ...topics.policies import ALL_BROKERS
from .routes import Asked, Route, text
from .statuses import Refused

_BROKERS: Final = "/admin/v2/brokers"
_CLUSTER: Final = "/admin/v2/clusters/{cluster}"
_DYNAMIC: Final = {row.dynamic: row.policies[0] for row in DESCRIBED if row.dynamic}

_BUSY: Final = {
    "msgRateIn": "message_rate_in", "msgRateOut": "message_rate_out", "msgThroughputIn": "byte_rate_in",
    "msgThroughputOut": "byte_rate_out", "storageSize": "stored_bytes", "producerCount": "producers",
}  # fmt: skip


def _id(broker: BrokerRow) -> str:
    return broker.http.partition("://")[2] or broker.name


# --- brokers -----------------------------------------------------------------------------------------------------------


async def brokers(asked: Asked, cluster: str = "") -> list[str]:
    """The brokers that take topics, by the address of their HTTP."""
    _check_cluster(asked, cluster)
    found = await asked.service.list_brokers(asked)
    return sorted(_id(one) for one in found.brokers if one.state == READY)


def _check_cluster(asked: Asked, cluster: str) -> None:
    if cluster and cluster != asked.service.settings.cluster_name:
        raise Refused(
            404, f"Cluster {cluster[:80]} does not exist here: this is {asked.service.settings.cluster_name}"
        )


async def leader(asked: Asked) -> dict[str, str]:
    """The broker that balances."""
    found = await asked.service.list_brokers(asked)
    for one in found.brokers:
        if one.name == found.balancer or len(found.brokers) == 1:
            return {"serviceUrl": one.http, "brokerId": _id(one)}
    raise Refused(404, "Couldn't find leader broker: none balances now; one will within seconds")


async def owned(asked: Asked, broker: str, cluster: str) -> dict[str, Any]:
    """The bundles of all namespaces that a broker serves."""
    _check_cluster(asked, cluster)
    known = {_id(one): one for one in (await asked.service.list_brokers(asked)).brokers}
    if broker not in known:
        raise Refused(404, f"Broker id {broker[:80]!r} not found in available brokers: {', '.join(known)}")
    status = {"broker_assignment": "shared", "is_controlled": False, "is_active": True}
    found: dict[str, Any] = {}
    for tenant in await asked.service.tenancy.tenants(asked):
        for namespace in await asked.service.tenancy.namespaces(asked, tenant):
            await asyncio.sleep(0)
            rows = (await asked.service.list_bundles(asked, namespace)).bundles
            found |= {row.bundle: status for row in rows if row.broker == known[broker].name}
    return found


async def dynamic_names(asked: Asked) -> list[str]:
    """What can be set for all brokers while they run."""
    return sorted(_DYNAMIC)


async def dynamic(asked: Asked) -> dict[str, str]:
    """What is set for all brokers, as texts."""
    policies = (await asked.service.namespace_policies(asked, ALL_BROKERS)).policies
    values = {name: policies.value(policy) for name, policy in _DYNAMIC.items()}
    return {
        name: _text(show_one(_DYNAMIC[name], value)) for name, value in values.items() if value is not None
    }


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(value)
    return value if isinstance(value, str) else str(value).lower()


async def set_dynamic(asked: Asked, name: str, value: str) -> None:
    """Sets it for all brokers, within a second."""
    policy = _policy(name, "update")
    given: Any = value
    if policy == "subscription_types":
        given = [one.strip() for one in value.split(",") if one.strip()]
    elif value.lstrip("-").isdigit() or value in ("true", "false"):
        given = msgspec.json.decode(value)
    await asked.service.change_namespace_policies(asked, ALL_BROKERS, {policy: read_one(policy, given)})


async def unset_dynamic(asked: Asked, name: str) -> None:
    """The setting of each broker counts again."""
    await asked.service.change_namespace_policies(asked, ALL_BROKERS, {_policy(name, "delete"): None})


def _policy(name: str, what: str) -> str:
    if name not in _DYNAMIC:
        raise InvalidArgument(
            f"Can't {what} non-dynamic configuration: {name[:80]} is none of {', '.join(sorted(_DYNAMIC))}; a setting "
            "of a broker is changed in its file, and by a restart"
        )
    return _DYNAMIC[name]


async def quotas_are_checked(asked: Asked) -> None:
    """Nothing: backlog quotas are checked every few seconds anyway."""


async def settings(asked: Asked) -> dict[str, str]:
    """The settings of this broker, as texts."""
    found = msgspec.to_builtins(asked.service.settings)
    return {f"broker.{name}": _text(value) for name, value in found.items()}


async def about(asked: Asked) -> str:
    """The version of the software."""
    return version("magnetar")


async def topics(asked: Asked) -> dict[str, Any]:
    """The topics that this broker serves with their rates, by namespace, bundle and domain."""
    found: dict[str, Any] = {}
    for one in await asked.service.loaded_topics(asked):
        await asyncio.sleep(0)
        name = TopicName.parse(one.topic)
        bundle = await asked.service.admin.bundle_range(asked, one.topic)
        place = found.setdefault(name.full_namespace, {}).setdefault(bundle, {}).setdefault(name.domain, {})
        place[one.topic] = {theirs: getattr(one, ours) for theirs, ours in _BUSY.items()}
    return found


def _figures(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"metrics": found, "dimensions": {"metric": "magnetar_broker"}}]


# --- bookies -----------------------------------------------------------------------------------------------------------


def _bookies(known: BookiesFound) -> dict[str, Any]:
    return {"bookies": [{"bookieId": one.name} for one in known.bookies]}


def _racks(known: BookiesFound) -> dict[str, Any]:
    """By group."""
    found: dict[str, Any] = {}
    for one in known.bookies:
        if one.rack:
            rack = {"rack": one.rack, "hostname": one.address.rpartition(":")[0]}
            found.setdefault(one.group or "default", {})[one.name] = rack
    return found


async def rack(asked: Asked, bookie: str) -> dict[str, str]:
    """The rack of a bookie."""
    for group in _racks(await asked.service.list_bookies(asked)).values():
        if bookie in group:
            return dict(group[bookie])
    raise Refused(404, f"Bookie rack placement configuration not found: {bookie[:200]}")


# --- what there will not be ----------------------------------------------------------------------------------------------

_ISOLATION = "the policy broker_group of a namespace says which brokers serve it"
_NO_FUNCTIONS = (
    "there are no functions and connectors here: run programs beside the service, or jobs of Spark"
)
# By a segment of paths that Pulsar has, or of one that has other methods here.
NEVER: Final = {
    **dict.fromkeys(("functions", "sinks", "sources", "worker", "worker-stats", "packages"), _NO_FUNCTIONS),
    "transactions": "there are no transactions here; deduplication stores what is sent again once",
    **dict.fromkeys(
        ("offload", "offloadPolicies"),
        "nothing is offloaded: ledgers are archived for good by `magnetar archive`, or deleted by retention",
    ),
    "replicatedSubscriptionStatus": "subscriptions are not replicated: a topic is of one cluster",
    "subscriptionAuthMode": "names of subscriptions are not bound to roles: permissions are of namespaces and topics",
    "shadowTopics": "a topic has no shadows: read it by one more subscription",
    "allowedClusters": "a namespace is of one cluster; which clusters a tenant may use stands at the tenant",
    "entryFilters": "messages are not filtered by the broker; consumers pass over what they do not want",
    "schemaAutoUpdateCompatibilityStrategy": "it is schemaCompatibilityStrategy since Pulsar 2.4",
    "racks-info": "a bookie says itself where it is: set [bookie] rack, zone and group in its settings",
    "resource-quotas": "bundles are balanced by their measured load, which `magnetar brokers list` shows, not by quotas",
    "namespaceIsolationPolicies": _ISOLATION,
    "resourcegroups": "there are no groups of resources: rates are limited by topic, namespace and broker, by policies",
    "mbeans": "there is no Java virtual machine here; see /metrics",
    "allocator-stats": "there are no allocators of Netty here; see /metrics",
    "shutdown": "a broker is stopped by a signal to its process (SIGTERM), which drains it first",
}


async def no_isolation(asked: Asked, cluster: str) -> None:
    """There are no such policies."""
    raise Refused(404, f"NamespaceIsolationPolicies for cluster {cluster[:80]} does not exist: {_ISOLATION}")


async def none(asked: Asked) -> list[str]:
    """There are none."""
    return []


_B: Final = BrokerService
CLUSTER_ROUTES: Final = (
    Route("GET", _BROKERS, brokers),
    Route("GET", f"{_BROKERS}/leaderBroker", leader),
    Route("GET", f"{_BROKERS}/version", about, answer=text),
    Route("GET", f"{_BROKERS}/{{cluster}}", brokers),
    Route("GET", f"{_BROKERS}/backlog-quota-check", quotas_are_checked, status=204),
    Route("GET", f"{_BROKERS}/{{cluster}}/{{broker}}/ownedNamespaces", owned),
    Route("GET", f"{_BROKERS}/configuration", dynamic_names),
    Route("GET", f"{_BROKERS}/configuration/values", dynamic),
    Route("GET", f"{_BROKERS}/configuration/runtime", settings),
    Route("GET", f"{_BROKERS}/internal-configuration", settings),
    Route("POST", f"{_BROKERS}/configuration/{{name}}/{{value}}", set_dynamic),
    Route("DELETE", f"{_BROKERS}/configuration/{{name}}", unset_dynamic),
    Route(
        "GET", "/admin/v2/broker-stats/load-report", _B.list_brokers,
        answer=lambda found: {one.name: one.load for one in found.brokers},
    ),
    Route("GET", "/admin/v2/broker-stats/metrics", _B.broker_figures, answer=_figures),
    Route("GET", "/admin/v2/broker-stats/topics", topics),
    Route("GET", "/admin/v2/bookies/all", _B.list_bookies, answer=_bookies),
    Route("GET", "/admin/v2/bookies/racks-info", _B.list_bookies, answer=_racks),
    Route("GET", "/admin/v2/bookies/racks-info/{bookie}", rack),
    Route("GET", f"{_CLUSTER}/namespaceIsolationPolicies", no_isolation),
    Route("GET", "/admin/v2/resourcegroups", none),
)  # fmt: skip
