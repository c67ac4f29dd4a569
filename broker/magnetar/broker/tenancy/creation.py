"""Who may make a topic, and which kind it is: by its namespace, and by the policies in force there.

Every topic, and every partition, is made in a commit that checks what `check` returns: its namespace exists then, and is not
being deleted. What a deletion lists afterwards is all that there is.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Check
from magnetar.proto.errors import (
    AlreadyExists,
    DataDirectoryError,
    InvalidArgument,
    MagnetarError,
    NotFound,
    ServiceNotReady,
    SubscriptionNotFound,
    TopicBusy,
)
from magnetar.proto.ids import DOMAINS, TopicName

from ..log.records import TOPICS_ROOT, NamespaceRecord, namespace_path
from ..settings import BrokerSettings
from ..topics.policies import NamespacePolicies
from .objects import NAMESPACE, Objects, Stored

if TYPE_CHECKING:
    from ..topics.topic import Topic


class Creation:
    """See the module docstring."""

    def __init__(
        self,
        objects: Objects,
        metadata: MetadataStore,
        settings: BrokerSettings,
        policies: NamespacePolicies,
    ) -> None:
        self._objects = objects
        self._policies = policies
        self._metadata = metadata
        self._settings = settings

    async def check(self, name: TopicName, topics: int = 1) -> Check:
        """Before so many topics are made in the topic's namespace, which is made if settings allow it.

        Raises NotFound, InvalidArgument above max_topics_per_namespace, TopicBusy.
        """
        namespace = name.full_namespace
        try:
            found = await self.existing(namespace)
        except DataDirectoryError:  # nobody can delete it then, and topics are made as before
            path = namespace_path(namespace)
            stored = await self._metadata.get(path)
            return Check(path, None if stored is None else stored.version)
        if found.record.deletion:
            raise TopicBusy(f"namespace {namespace} of topic {name} is being deleted")
        in_force = await self._policies.below(found.record.policies)
        most: int = in_force.value("max_topics_per_namespace")[0]
        if most and await self.count(namespace, most) + topics > most:
            raise InvalidArgument(
                f"Exceed maximum number of topics in namespace: {namespace} has the policy max_topics_per_namespace={most}; "
                "delete topics, or raise it"
            )
        return found.check(namespace_path(namespace))

    async def existing(self, namespace: str) -> Stored[NamespaceRecord]:
        """The namespace, which is made if settings allow it. Raises NotFound."""
        while (found := await self._objects.find(NAMESPACE, namespace)) is None:
            if not self._settings.auto_create_namespaces:
                raise NotFound(
                    f"Namespace not found: there is no {namespace}; create it, or set broker.auto_create_namespaces=true"
                )
            with contextlib.suppress(AlreadyExists):
                await self._objects.create_namespace(namespace, with_tenant=True)
        return found

    async def count(self, namespace: str, most: int = 0) -> int:
        """How many topics and partitions a namespace has; above `most` (0: no limit) it is not counted on."""
        found = 0
        for domain in DOMAINS:
            if not most or found <= most:
                path = f"{TOPICS_ROOT}/{namespace}/{domain}"
                found += len(await self._metadata.children(path, limit=most + 1 - found if most else 0))
        return found

    async def by_use(self, name: TopicName) -> int | None:
        """With how many partitions a topic is made by its first use; 0: it is not partitioned, None: it is not made."""
        try:
            own = await self._policies.followed.get(name.full_namespace)
            in_force = await self._policies.below(own.policies)
        except DataDirectoryError:
            raise
        except MagnetarError as error:
            raise ServiceNotReady(
                f"the policies of namespace {name.full_namespace} are not known, and whether topic {name} is made; try "
                f"again: {error.message}"
            ) from error
        if not in_force.value("auto_create_topics")[0]:
            return None
        if in_force.value("auto_create_topics_type")[0] != "partitioned" or not name.persistent:
            return 0
        return int(in_force.value("auto_create_topics_partitions")[0])

    def check_subscription(self, topic: Topic, subscription: str) -> None:
        """Before a durable subscription is used. Raises SubscriptionNotFound where there is none, and its use makes none."""
        known = topic.subscriptions
        if subscription in known or subscription in known.recovery.unavailable:
            return
        in_force = topic.policies.in_force()
        if in_force is not None and not in_force.value("auto_create_subscriptions")[0]:
            raise SubscriptionNotFound(
                f"Subscription does not exist: topic {topic.name} has no subscription {subscription!r}, and by its policy "
                "auto_create_subscriptions none is made by its use; create it first"
            )
