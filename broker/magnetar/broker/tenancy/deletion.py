"""Deletion of namespaces and tenants: complete, and gone on with by whoever sees it, whatever crashes in between.

    (record)   --delete: the record says why, and a node below /deletions names it-->  IF EMPTY or FORCED
    IF EMPTY   --a topic is found: both are taken back-->                               (record), and NotEmpty is answered
    IF EMPTY, FORCED   --topics and partitioned topics are deleted, then record, bundles and name in one commit--> (nothing)

Once the record says so no topic is made in the namespace (`creation`), and no namespace below the tenant (`objects`), so
what is listed afterwards is all that there is. Every broker watches /deletions, deletes the topics of its own bundles and of
those that nobody has, and goes on when it starts. A tenant is deleted when all of its namespaces are.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.store import Delete, Operation, Put
from magnetar.proto.errors import (
    MagnetarError,
    NodeNotEmpty,
    NotEmpty,
    NotFound,
    NotFoundInStore,
    RequestTimeout,
    TopicNotFound,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.runtime.tasks import Jobs, LongTask, on_change
from magnetar.runtime.timeouts import TimeLimit

from ..log.records import (
    DELETIONS_ROOT,
    FORCED,
    IF_EMPTY,
    PARTITIONED_ROOT,
    SCHEMAS_ROOT,
    Stored,
    TopicRecord,
    deletion_path,
    namespace_path,
    tenant_path,
    topic_path,
)
from ..log.topic_names import list_topics
from ..ownership.ownership import Ownership
from ..ownership.records import bounds_path, owners_path
from ..topics.partitions import PartitionedTopics
from ..topics.schemas import remove_schemas
from .objects import DEFAULT, NAMESPACE, PUBLIC, TENANT, Kind, Objects

_log = logging.getLogger(__name__)

_WAIT_S = 60.0  # for the end of what somebody asked for; it goes on afterwards
_PAUSE_S, _PAUSE_MAX_S = 0.2, 30.0
_LOOK_S = 30.0
_TOPICS_AT_ONCE = 16
_TOPICS_PER_PAGE = 1_000
_TOPICS_NAMED = 5  # of a namespace that is not empty


class Deletions:
    """Of one broker. `start` before use, `close` in the end."""

    def __init__(
        self,
        objects: Objects,
        metadata: MetadataStore,
        partitioned: PartitionedTopics,
        ownership: Ownership,
        delete_topic: Callable[[TopicName], Awaitable[None]],
    ) -> None:
        """`delete_topic`: one that this broker serves, whoever uses it."""
        self._objects = objects
        self._metadata = metadata
        self._partitioned = partitioned
        self._ownership = ownership
        self._delete_topic = delete_topic
        self._jobs = Jobs("deletion")
        self._changed = asyncio.Event()
        self._task: LongTask | None = None

    def start(self) -> None:
        """What is being deleted is looked for from now on."""
        self._watch = self._metadata.watch(DELETIONS_ROOT, lambda _: self._changed.set())
        self._changed.set()
        follow = partial(on_change, self._changed, self._look, poll_s=_LOOK_S)
        self._task = LongTask("the deletion of namespaces", follow)

    async def close(self) -> None:
        """What is left is left to others, and to the next start."""
        if self._task is not None:
            self._watch.close()
            await self._task.close()
        await self._jobs.cancel()

    async def _look(self) -> None:
        for name in await self._objects.deletions():
            self._begin(name)

    def _begin(self, name: str) -> None:
        self._jobs.begin(name, partial(self._work, name))

    # --- asked for ---------------------------------------------------------------------------------------------------

    async def delete_namespace(self, name: str, *, force: bool) -> None:
        """It is gone when this returns. Raises NotFound, NotEmpty unless `force`, RequestTimeout while it goes on."""
        if await self._objects.find(NAMESPACE, name) is None:
            raise NotFound(f"Namespace {name} does not exist.")
        if not force and (topics := await self._topics(name)):
            raise _not_empty(name, topics)
        await self._delete(NAMESPACE, name, FORCED if force else IF_EMPTY)

    async def delete_tenant(self, name: str) -> None:
        """With all of its namespaces. Raises NotFound, RequestTimeout while it goes on."""
        await self._delete(TENANT, name, FORCED)

    async def _delete(self, kind: Kind[Any], name: str, why: str) -> None:
        await self._objects.mark_deleted(kind, name, why)
        late = f"the deletion of {name} takes longer than {_WAIT_S:g} s, and goes on"
        async with TimeLimit(_WAIT_S, lambda: RequestTimeout(late)):
            while (found := await self._objects.find(kind, name)) is not None and found.record.deletion:
                self._begin(name)
                await self._jobs.wait(name)
        if found is not None and why == IF_EMPTY and (topics := await self._topics(name)):
            raise _not_empty(name, topics)

    # --- step by step ------------------------------------------------------------------------------------------------

    async def _work(self, name: str) -> None:
        pause_s = _PAUSE_S
        while True:
            try:
                if await (self._namespace(name) if "/" in name else self._tenant(name)):
                    return
            except MagnetarError as error:
                _log.warning("%s is not deleted yet, and will be: %s", name, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _tenant(self, name: str) -> bool:
        """True: there is nothing left to do."""
        found = await self._objects.find(TENANT, name)
        if found is None or not found.record.deletion:
            return True
        names = {f"{name}/{one}" for one in await self._metadata.children(tenant_path(name))}
        if name == PUBLIC and await self._topics(DEFAULT):
            names.add(DEFAULT)
        for one in sorted(names):
            try:
                await self._objects.mark_deleted(NAMESPACE, one, FORCED)
            except NotFound:
                continue
            self._begin(one)
        for one in sorted(names):
            await self._jobs.wait(one)
        return await self._commit(name, [Delete(tenant_path(name), found.version)])

    async def _namespace(self, name: str) -> bool:
        """True: there is nothing left to do."""
        found = await self._objects.find(NAMESPACE, name)
        if found is None or not found.record.deletion:
            return True
        if found.record.deletion == IF_EMPTY and await self._topics(name):
            return await self._take_back(name, found)
        wholes = await self._partitioned_topics(name)
        for whole in wholes:
            await self._partitioned.delete(whole)
        await self._delete_topics(name)
        for whole in wholes:
            await self._partitioned.delete(whole)
        if await list_topics(self._metadata, name, count=1) or await self._partitioned_topics(name):
            return False
        for topic in await self._metadata.children(f"{SCHEMAS_ROOT}/{name}"):  # of those that never were made
            await remove_schemas(self._metadata, TopicName.parse(f"{name}/{topic}"))
        nodes: list[Operation] = [Delete(namespace_path(name), found.version)]
        # Bundles that somebody owns stay divided as they are: brokers serve by what they hold.
        bounds = await self._metadata.get(bounds_path(name))
        if bounds is not None and not await self._metadata.children(owners_path(name), limit=1):
            nodes.append(Delete(bounds_path(name), bounds.version))
        return await self._commit(name, nodes)

    async def _take_back(self, name: str, found: Stored[Any]) -> bool:
        record = msgspec.structs.replace(found.record, deletion="")
        return await self._commit(name, [Put(namespace_path(name), record.encode(), found.version)])

    async def _commit(self, name: str, nodes: list[Operation]) -> bool:
        try:
            await self._metadata.commit([*nodes, Delete(deletion_path(name))])
        except (NodeNotEmpty, NotFoundInStore, VersionConflict):  # somebody else did it, or it was changed
            return False
        return True

    # --- topics ------------------------------------------------------------------------------------------------------

    async def _topics(self, namespace: str) -> list[TopicName]:
        """Some of them; none if all that there are do not exist any more: their deletion is not complete."""
        found: list[TopicName] = []
        for name in await self._partitioned_topics(namespace):
            if (await self._partitioned.read(name)).exists:
                found.append(name)
                if len(found) == _TOPICS_NAMED:
                    return found
        after = ""
        while page := await list_topics(self._metadata, namespace, after=after, count=_TOPICS_PER_PAGE):
            for after in page:
                name = TopicName.parse(after)
                path = topic_path(name)
                stored = None if name.whole in found else await self._metadata.get(path)
                if stored is not None and not TopicRecord.decode(stored.value, path).deleting:
                    found.append(name.whole)
                    if len(found) == _TOPICS_NAMED:
                        return found
        return found

    async def _partitioned_topics(self, namespace: str) -> list[TopicName]:
        names = await list_topics(self._metadata, namespace, count=sys.maxsize, root=PARTITIONED_ROOT)
        return [TopicName.parse(name) for name in names]

    async def _delete_topics(self, namespace: str) -> None:
        """Those that are this broker's; one that cannot be deleted now costs itself only (rule 48)."""
        after, failed = "", []
        while page := await list_topics(self._metadata, namespace, after=after, count=_TOPICS_AT_ONCE):
            after = page[-1]
            ended = await asyncio.gather(
                *(self._delete_own(TopicName.parse(name)) for name in page), return_exceptions=True
            )
            failed += [error for error in ended if isinstance(error, BaseException)]
        if failed:
            raise failed[0]

    async def _delete_own(self, name: TopicName) -> None:
        if not self._ownership.serves(name):
            await self._ownership.locate(name, authoritative=True, unreachable="")
            if not self._ownership.serves(name):  # its owner sees the deletion as well
                return
        try:
            await self._delete_topic(name)
        except TopicNotFound:  # it was being deleted already
            return


def _not_empty(name: str, topics: list[TopicName]) -> NotEmpty:
    named = ", ".join(topic.short for topic in topics) + (", ..." if len(topics) == _TOPICS_NAMED else "")
    return NotEmpty(
        f"Cannot delete non empty namespace: {name} has {named}; delete its topics first, or all with force"
    )
