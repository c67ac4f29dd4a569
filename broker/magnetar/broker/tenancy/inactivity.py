"""What nobody uses any more is deleted by policy: topics, and subscriptions without consumers; and the data of topics that
nobody has loaded since the broker started expires.

`round` looks at a topic that is loaded. `look` looks at one that is not, by what the metadata store says of it: it is loaded
if something is due, for the rounds of all that are, and is unloaded again when it was idle for long enough.

A topic is inactive while nobody is connected to it or asks for it, and, where it is not loaded, since its last message. When
a subscription had consumers last is stored, with a precision of a tenth of its expiration time, and so outlives its broker.
In a topic that was just loaded it waits for consumers that come back.

A topic with partitions goes when all of them are inactive. Each owner notes that of its own in the topic's record, and takes
it back before anybody uses the partition again; who notes the last one marks the topic as being deleted in the same commit.
From then on nobody can use a partition, and each owner deletes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from magnetar.metadata import MetadataStore
from magnetar.proto.errors import (
    ConsumerBusy,
    SubscriptionNotFound,
    TopicInUse,
    TopicNotFound,
)
from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.runtime.clock import Clock

from ..cursors.pointer import PointerRecord
from ..log.records import TopicRecord, cursor_path, cursors_path, topic_path
from ..topics.partitions import PartitionedTopics
from ..topics.policies import NamespacePolicies, Resolved
from ..topics.topic import Topic

_CAUGHT_UP = "delete_when_subscriptions_caught_up"
_MAX_LOADS = 1_000
_MAX_LOOKED = 100_000
_COME_BACK_S = 120.0  # so long, at most, consumers may take after their topic was loaded


class Inactivity:
    """Of one broker."""

    def __init__(
        self,
        metadata: MetadataStore,
        clock: Clock,
        policies: NamespacePolicies,
        partitioned: PartitionedTopics,
        load: Callable[[TopicName], Awaitable[Topic]],
        delete: Callable[[TopicName, Callable[[Topic], bool]], Awaitable[None]],
    ) -> None:
        """`delete`: unless somebody uses the topic, or what it is given says no at the last moment."""
        self._metadata = metadata
        self._clock = clock
        self._policies = policies
        self._partitioned = partitioned
        self._load = load
        self._loads = 0
        self._namespace: tuple[str, Any] = ("", None)  # whose topics are looked at, and its policies
        self._delete = delete
        self._looked: dict[TopicName, int] = {}  # the first ledger of a topic that `look` has loaded

    # --- loaded topics -----------------------------------------------------------------------------------------------

    def due(self, topic: Topic) -> bool:
        """True if `round` has anything to delete. Notes which subscriptions have consumers."""
        in_force = topic.policies.in_force()
        if in_force is None:
            return False
        expiration_ms: int = in_force.value("subscription_expiration_ms")[0]
        if expiration_ms:
            for subscription in topic.subscriptions.values():
                if subscription.consumers:
                    subscription.cursor.keep_active(self._clock.now_ms(), expiration_ms // 10)
        if self._expired(topic, in_force, _COME_BACK_S):
            return True
        if topic.name.partition != NO_PARTITION:
            whole = self._partitioned.followed.known(str(topic.name.whole))
            if whole is None or topic.name.partition in whole.record.inactive:
                return whole is not None and whole.abandoned
        return self._is_inactive(topic, _unused_ms(topic))

    async def round(
        self, topic: Topic, *, come_back_s: float = _COME_BACK_S, unused_ms: float | None = None
    ) -> None:
        """Deletes the subscriptions of a topic that are due, or the whole topic. `unused_ms` None: as far as it knows."""
        unused_ms = _unused_ms(topic) if unused_ms is None else unused_ms
        in_force = topic.policies.in_force()
        for name in [] if in_force is None else self._expired(topic, in_force, come_back_s):
            try:
                await topic.subscriptions.delete(name)
            except (ConsumerBusy, SubscriptionNotFound):
                continue
        if topic.name.partition != NO_PARTITION:
            await self._partition(topic, unused_ms)
        elif self._is_inactive(topic, unused_ms):
            with contextlib.suppress(TopicInUse, TopicNotFound):
                await self._delete(topic.name, lambda found: self._is_inactive(found, unused_ms))

    async def _partition(self, topic: Topic, unused_ms: float) -> None:
        whole, used_at = topic.name.whole, topic.used_at
        with contextlib.suppress(TopicNotFound):
            await self._partitioned.note(
                topic.name,
                inactive=True,
                still=lambda: topic.used_at == used_at and self._is_inactive(topic, unused_ms),
            )
        if (await self._partitioned.read(whole)).abandoned:
            with contextlib.suppress(TopicInUse, TopicNotFound):
                await self._delete(topic.name, lambda _: True)
            await self._partitioned.delete(whole)

    def _expired(self, topic: Topic, in_force: Resolved, come_back_s: float) -> list[str]:
        expiration_ms: int = in_force.value("subscription_expiration_ms")[0]
        loaded_s = asyncio.get_running_loop().time() - topic.loaded_at
        if not expiration_ms or loaded_s < min(expiration_ms / 1000, come_back_s):
            return []
        before_ms = self._clock.now_ms() - _expired_ms(expiration_ms)
        return [
            name
            for name, one in topic.subscriptions.items()
            if one.durable and not one.consumers and one.cursor.active_ms <= before_ms
        ]

    def _is_inactive(self, topic: Topic, unused_ms: float) -> bool:
        in_force, known = topic.policies.in_force(), topic.subscriptions
        if in_force is None or topic.in_use or known.recovery.unavailable:
            return False
        mode, end = _mode(in_force, unused_ms), topic.ledger.list.end
        return bool(mode) and all(
            mode == _CAUGHT_UP and topic.log.normalise(one.cursor.state.mark_delete) >= end
            for one in known.values()
        )

    # --- topics that are not loaded ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """From here on `look` loads so many topics again: they are in memory for as long as idle ones are."""
        self._loads, self._namespace = 0, ("", None)

    async def look(self, name: TopicName) -> None:
        """Raises TopicNotFound if a deletion that was interrupted is completed by this, or what the load met."""
        stored = await self._metadata.get(topic_path(name))
        if stored is None or self._loads == _MAX_LOADS:
            return
        head = TopicRecord.decode(stored.value, topic_path(name))
        last_ms = max([head.created_ms, *(ledger.last_append_ms for ledger in head.ledgers)])
        unused_ms = self._clock.now_ms() - last_ms
        if await self._has_work(name, head, unused_ms):
            self._loads += 1
            await self.round(await self._load(name), come_back_s=0.0, unused_ms=unused_ms)

    async def _has_work(self, name: TopicName, head: TopicRecord, unused_ms: float) -> bool:
        if head.deleting:
            return True
        levels: list[tuple[str, Any]] = [("topic", head.policies)]
        noted = False
        if name.partition != NO_PARTITION:
            whole = await self._partitioned.followed.get(str(name.whole))
            if whole.abandoned:
                return True
            noted = name.partition in whole.record.inactive
            levels.append(("whole topic", whole.policies))
        if self._namespace[0] != name.full_namespace:  # topics come by namespace
            found = await self._policies.followed.get(name.full_namespace)
            self._namespace = (name.full_namespace, found.policies)
        levels.append(("namespace", self._namespace[1]))
        in_force = Resolved((*levels, *self._policies.of_brokers().levels))
        now_ms = self._clock.now_ms()
        if not noted and (mode := _mode(in_force, unused_ms)):
            if mode == _CAUGHT_UP or not await self._metadata.children(cursors_path(name), limit=1):
                return True
        expiration_ms = in_force.value("subscription_expiration_ms")[0]
        if expiration_ms:
            for subscription in await self._metadata.children(cursors_path(name)):
                path = cursor_path(name, subscription)
                if (stored := await self._metadata.get(path)) is not None:
                    pointer = PointerRecord.decode(stored.value, path)
                    if max(pointer.active_ms, pointer.created_ms) <= now_ms - _expired_ms(expiration_ms):
                        return True
        return self._has_old_data(name, head, in_force, now_ms)

    def _has_old_data(self, name: TopicName, head: TopicRecord, in_force: Resolved, now_ms: int) -> bool:
        """Messages that are due to be deleted, or to expire, unless that was tried and somebody needs them."""
        times = [
            in_force.retention[0],
            *(ttl for _, own in in_force.levels for ttl in own.subscription_ttl_ms.values()),
        ]
        times.append(in_force.value("message_ttl_ms")[0])
        finite = [time_ms for time_ms in times if time_ms > 0]
        if not finite or not head.ledgers or self._looked.get(name) == head.ledgers[0].ledger_id:
            return False
        first = head.ledgers[0]
        if first.closed and first.last_append_ms + min(finite) > now_ms:
            return False
        if len(self._looked) == _MAX_LOOKED:
            self._looked.clear()
        self._looked[name] = first.ledger_id
        return True


def _mode(in_force: Resolved, unused_ms: float) -> str:
    """How a topic that nobody has used for so long is deleted; "": not yet, or never."""
    due = in_force.value("delete_inactive_topics")[0] and unused_ms >= in_force.value("inactive_topic_ms")[0]
    return str(in_force.value("inactive_topic_mode")[0]) if due else ""


def _expired_ms(expiration_ms: int) -> int:
    """With the precision that it is stored with."""
    return expiration_ms + expiration_ms // 10


def _unused_ms(topic: Topic) -> float:
    """Of one that is loaded."""
    return 1000 * (asyncio.get_running_loop().time() - topic.used_at)
