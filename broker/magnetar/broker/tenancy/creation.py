"""Who may make a topic, and which kind it is: by its namespace, and by the policies in force there.

Every topic, and every partition, is made in a commit that checks what `check` returns: its namespace exists then, and is not
being deleted. What a deletion lists afterwards is all that there is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Check, Operation
from magnetar.proto.errors import (
    AlreadyExists,
    DataDirectoryError,
    InvalidArgument,
    MagnetarError,
    NotFound,
    ServiceNotReady,
    TopicBusy,
    VersionConflict,
)
from magnetar.proto.ids import DOMAINS, NO_PARTITION, TopicName

from ..log.records import ABSENT, TOPICS_ROOT, namespace_path
from ..settings import BrokerSettings
from ..topics.policies import NamespacePolicies, StoredPolicies
from ..topics.schemas import remove_schemas
from .objects import DEFAULT, NAMESPACE, Objects


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

    async def make(self, name: TopicName, nodes: Sequence[Operation], topics: int = 1) -> None:
        """Commits that, which makes so many topics, as soon as `check` allows it. Raises as that, and as the commit."""
        while True:
            check = await self.check(name, topics)
            try:
                return await self._metadata.commit([*nodes, check])
            except VersionConflict as conflict:
                if conflict.details.get("index") != len(nodes):
                    raise
                self._policies.followed.drop(name.full_namespace)

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
        in_force = await self._policies.below(found.policies)
        most: int = in_force.value("max_topics_per_namespace")[0]
        if most and await self.count(namespace, most) + topics > most:
            raise InvalidArgument(
                f"Exceed maximum number of topics in namespace: {namespace} has the policy max_topics_per_namespace={most}; "
                "delete topics, or raise it"
            )
        return found.check(namespace_path(namespace))

    async def existing(self, namespace: str) -> StoredPolicies:
        """The namespace, which is made if settings allow it; from memory while a topic of it is loaded. Raises NotFound."""
        followed = self._policies.followed
        while (found := await followed.get(namespace)).version == ABSENT and namespace != DEFAULT:
            if not self._settings.auto_create_namespaces:
                raise NotFound(
                    f"Namespace not found: there is no {namespace}; create it, or set broker.auto_create_namespaces=true"
                )
            with contextlib.suppress(AlreadyExists):
                await self._objects.create_namespace(namespace, with_tenant=True)
            followed.drop(namespace)
        return found

    async def forget(self, name: TopicName) -> None:
        """Before what is left of a deleted topic goes: who may use another one of the name is another matter, with what."""
        if name.partition == NO_PARTITION:
            await remove_schemas(self._metadata, name)
        topic, namespace = str(name), name.full_namespace
        found = await self._objects.find(NAMESPACE, namespace)
        if found is not None and topic in found.record.topic_permissions:
            with contextlib.suppress(NotFound):  # all of it goes
                await self._objects.change(NAMESPACE, namespace, lambda was: was.with_permissions(topic, {}))

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
