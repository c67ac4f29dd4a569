"""Administration: what operators ask of topics, subscriptions, policies and the cluster, without producing or consuming.

A topic that is named may be partitioned: then each of its partitions is asked, TOPICS_AT_ONCE at a time, and all of them
whatever becomes of the others (`all_of`). Its policies, and the number of its partitions, are a record of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from magnetar.proto.commands import (
    Administer,
    ChangePolicies,
    ClearBacklog,
    Command,
    CompactTopic,
    CreateSubscription,
    CreateTopic,
    DeleteSubscription,
    DeleteTopic,
    Diagnose,
    Drain,
    ExpireMessages,
    GetPolicies,
    ListBookies,
    ListBrokers,
    ListBundles,
    ListBusiest,
    ListTopics,
    PeekMessages,
    SeekSubscription,
    SkipMessages,
    SplitBundle,
    TerminateTopic,
    TopicStats,
    UnloadBundle,
    UpdatePartitions,
)
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    SubscriptionNotFound,
    TopicBusy,
    TopicNotFound,
)
from magnetar.proto.ids import NO_PARTITION, MessageId, TopicName, check_subscription_name
from magnetar.proto.policies import Policies, PolicyInForce

from .connection.calls import side_by_side
from .connection.pool import ConnectionPool
from .figures import compactions, together
from .messages import Message, peeked_messages
from .options import Start, start_on_wire, time_in_ms

# A topic that is being deleted has no new partitions, so that the first round finds all of them.
_DELETION_ROUNDS = 3
T = TypeVar("T")


class FoundPolicies(NamedTuple):
    """What is set for a topic or a namespace itself, its version, and what is in force there in the end."""

    policies: Policies
    version: int
    in_force: list[PolicyInForce]


class Admin:
    """`client.admin`: each method asks the service, again after retryable errors, up to operation_timeout.

    All of them raise RequestTimeout when that is over.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def _ask(self, command: Callable[..., Command], topic: str, *fields: Any) -> Any:
        """Asks the broker of a topic that is named as users do."""
        name = str(TopicName.parse(topic))
        return await self._pool.request(command(0, name, *fields), name)

    async def _ask_once(self, command: Callable[..., Command], topic: str, *fields: Any) -> Any:
        name = str(TopicName.parse(topic))
        return await self._pool.request_once(command(0, name, *fields), name)

    async def _names(self, topic: str) -> list[str]:
        """The full name of a topic, or those of its partitions."""
        name = TopicName.parse(topic)
        count = await self.partitions(topic)
        return [str(name.partition_of(number)) for number in range(count)] or [str(name)]

    async def _each(
        self, topic: str, call: Callable[[str], Awaitable[T]], *done: type[MagnetarError]
    ) -> dict[str, T]:
        """What the call returns for the topic, or for each of its partitions, by name; raises as `all_of`.

        Partitions that were added in the meantime are called as well, unless they say that they need it not (`done`).
        """

        async def call_added(name: str) -> None:
            with contextlib.suppress(*done):
                found[name] = await call(name)

        names = await self._names(topic)
        found = await _side_by_side(names, call)
        while names != [str(TopicName.parse(topic))] and (added := (await self._names(topic))[len(names) :]):
            names += added
            await _side_by_side(added, call_added)
        return found

    # --- topics ------------------------------------------------------------------------------------------------------

    async def list_topics(self, namespace: str = "") -> list[str]:
        """Full names of the topics of `tenant/namespace` ("": of all), sorted."""
        names: list[str] = []
        more = True
        while more:
            page = await self._pool.request(ListTopics(0, namespace, names[-1] if names else ""))
            names += page["topics"]
            more = page["more"] and bool(page["topics"])
        return names

    async def topic_stats(self, topic: str) -> dict[str, Any]:
        """Figures of a topic (WIRE.md). Raises TopicNotFound.

        Of a partitioned topic those of its partitions together, but for what is of one log, such as positions; `partitions`
        has those of each.
        """
        found = await self._each(topic, lambda name: self._ask(TopicStats, name))
        name = str(TopicName.parse(topic))
        return dict(found[name]) if name in found else together(name, list(found.values()))

    async def partitions(self, topic: str) -> int:
        """How many partitions the topic has; 0: it is not partitioned, or does not exist."""
        name = TopicName.parse(topic)
        if name.partition != NO_PARTITION:
            return 0
        return await self._pool.partitions_of(str(name))

    async def owners(self, topic: str) -> list[str]:
        """The brokers, as host:port, that serve the topic, or its partitions."""
        found = await _side_by_side(await self._names(topic), self._pool.to_topic)
        return sorted({connection.address for connection in found.values()})

    async def create_topic(self, topic: str, *, partitions: int = 0) -> None:
        """Creates a topic; fine if it exists. With `partitions` (up to 10,000) a partitioned one.

        Raises AlreadyExists if it has another number of partitions, or none.
        """
        name = str(TopicName.parse(topic))
        await self._pool.request(CreateTopic(0, name, partitions), None if partitions else name)

    async def update_partitions(self, topic: str, partitions: int) -> int:
        """A partitioned topic has so many partitions from now on; producers and consumers of it learn that at once.

        Messages with the key of earlier ones may go to another partition then. Raises InvalidArgument for fewer than it has,
        TopicNotFound unless it is partitioned.
        """
        name = str(TopicName.parse(topic))
        return int((await self._pool.request(UpdatePartitions(0, name, partitions)))["partitions"])

    async def terminate_topic(self, topic: str) -> dict[str, MessageId | None]:
        """The topic takes no more messages, for good; the id of the last one by name of the topic, or of each partition.

        What was sent before is stored, or fails. Producers end with TopicTerminated; consumers get everything, and then
        iterating over them ends. Doing it again changes nothing. Raises TopicNotFound, QuorumLost.
        """

        async def terminate(name: str) -> MessageId | None:
            answer: bytes | None = await self._ask(TerminateTopic, name)
            return None if answer is None else MessageId.from_bytes(answer)

        return await self._each(topic, terminate)

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic and all its messages; TopicInUse while producers or consumers are connected, unless `force`.

        A partitioned topic goes as a whole: without `force` nothing is deleted while a partition has a user. When this fails
        in the middle nobody can use the topic any more, and the same call goes on with the deletion.
        """
        whole = TopicName.parse(topic)
        names = await self._names(topic)
        if names != [str(whole)] and not force:
            await _side_by_side(names, lambda name: self._ask(DeleteTopic, name, False, True))
        command = DeleteTopic(0, str(whole), force)
        for _ in range(_DELETION_ROUNDS):
            left = await self._pool.request(command, None if names != [str(whole)] else names[0])
            if not left or not left["partitions"]:
                return
            names = [str(whole.partition_of(number)) for number in left["partitions"]]
            await _side_by_side(names, self._delete_partition)
        raise TopicBusy(f"{whole} still has partitions after all were deleted; delete it again")

    async def _delete_partition(self, name: str) -> None:
        with contextlib.suppress(
            TopicNotFound
        ):  # a deletion that was interrupted was completed to find that out
            await self._ask(DeleteTopic, name, True)

    async def compact_topic(self, topic: str, *, wait: bool = False) -> dict[str, Any]:
        """Begins a compaction of the topic, unless one is under way; returns its state (WIRE.md, CompactTopic).

        With `wait` it returns when the compaction is over: `state` is "done", or "failed" and `error` says why. A compaction
        goes on when the caller is cancelled. Raises TopicNotFound.
        """
        return await self._compactions(topic, lambda name: self._compact(name, wait))

    async def _compact(self, topic: str, wait: bool) -> dict[str, Any]:
        state = await self._compaction(topic, "start")
        pause = 0.01
        while wait and state["state"] == "running":
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
            state = await self._compaction(topic, "status")
        return state

    async def compaction_status(self, topic: str) -> dict[str, Any]:
        """The state of the topic's compaction (WIRE.md, CompactTopic). Raises TopicNotFound."""
        return await self._compactions(topic, lambda name: self._compaction(name, "status"))

    async def remove_compaction(self, topic: str) -> dict[str, Any]:
        """Deletes what the last compaction left. Readers get all that the topic has; trimming waits for no compaction."""
        return await self._compactions(topic, lambda name: self._compaction(name, "remove"))

    async def _compactions(
        self, topic: str, call: Callable[[str], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """The state of one, or of those of all partitions together."""
        found = list((await self._each(topic, call)).values())
        return found[0] if len(found) == 1 else compactions(found)

    async def _compaction(self, topic: str, action: str) -> dict[str, Any]:
        return dict(await self._ask(CompactTopic, topic, action))

    # --- subscriptions -----------------------------------------------------------------------------------------------

    async def create_subscription(self, topic: str, subscription: str, *, start: Start = "latest") -> None:
        """Makes a durable subscription that nobody consumes yet: from `start` on it keeps what is stored.

        start: as for `subscribe`. Raises AlreadyExists if there is one; also when the connection broke and an earlier
        attempt of this call made it. Of a partitioned topic all partitions that have none get it.
        """
        name, where = check_subscription_name(subscription), start_on_wire(start)
        if isinstance(start, MessageId) and await self.partitions(topic):
            raise InvalidArgument(
                f"{topic} is partitioned, and a message id is of one partition; begin at 'earliest', 'latest' or a time"
            )
        await self._each(topic, lambda one: self._ask(CreateSubscription, one, name, where), AlreadyExists)

    async def seek_subscription(self, topic: str, subscription: str, start: Start) -> None:
        """Moves a subscription, whoever consumes it, to "earliest", "latest", a message id (inclusive) or a time.

        Consumers that are connected go on there; messages from before that wait in their queues are dropped when the first
        one from there arrives. Raises SubscriptionNotFound, InvalidArgument for one that is not durable. Of a partitioned
        topic all partitions are moved; by the id of a message its own partition alone.
        """
        name, where = check_subscription_name(subscription), start_on_wire(start)
        if isinstance(start, MessageId) and await self.partitions(topic):
            if start.partition == NO_PARTITION:
                raise InvalidArgument(
                    f"{topic} is partitioned, and the id {start} does not say of which partition it is"
                )
            topic = str(TopicName.parse(topic).partition_of(start.partition))
        await self._each(topic, lambda one: self._ask(SeekSubscription, one, name, where))

    async def skip_messages(self, topic: str, subscription: str, count: int) -> int:
        """Acknowledges the next `count` messages of a subscription, whoever holds them; how many there were.

        What a consumer holds of them it may still hand out. When this raises RequestTimeout or ConnectionLost, whether
        anything was skipped is not known, and it is not tried again. Raises as seek_subscription, and InvalidArgument for a
        partitioned topic: of one partition it can be asked.
        """
        if partitions := await self.partitions(topic):
            raise InvalidArgument(
                f"{topic} has {partitions} partitions, whose messages have no order between them: skip those of one, such "
                f"as {TopicName.parse(topic).partition_of(0).short}"
            )
        answer = await self._ask_once(SkipMessages, topic, check_subscription_name(subscription), count)
        return int(answer["skipped"])

    async def clear_backlog(self, topic: str, subscription: str) -> int:
        """Acknowledges all that is stored now, as skip_messages does; returns how many they were at most."""
        name = check_subscription_name(subscription)
        answers = await self._each(topic, lambda one: self._ask_once(ClearBacklog, one, name))
        return sum(answer["skipped"] for answer in answers.values())

    async def peek_messages(self, topic: str, subscription: str, count: int = 1) -> list[Message]:
        """The next messages that a subscription has not acknowledged; they are neither delivered nor counted.

        At most 1,000, and those of 1 MiB, but one in any case; of a partitioned topic from one partition after the other.
        They cannot be acknowledged. Raises SubscriptionNotFound.
        """
        found: list[Message] = []
        for name in await self._names(topic):
            left = count - len(found)
            answer = await self._ask(PeekMessages, name, check_subscription_name(subscription), left)
            found += peeked_messages(answer["entries"], name)
            if len(found) >= count:
                break
        return found

    async def expire_messages(self, topic: str, subscription: str, before: datetime | int) -> int:
        """Acknowledges what `topic` stored before a time (a datetime or ms since the epoch); durable when it returns.

        For a durable subscription. Returns how many messages it went on by, those acknowledged before among them. Raises
        SubscriptionNotFound.
        """
        name, before_ms = check_subscription_name(subscription), time_in_ms(before)
        answers = await self._each(topic, lambda one: self._ask(ExpireMessages, one, name, before_ms))
        return sum(answer["messages"] for answer in answers.values())

    async def delete_subscription(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Deletes a subscription; while consumers are connected only with `force`. Raises SubscriptionNotFound."""
        name = check_subscription_name(subscription)
        await self._each(
            topic, lambda one: self._ask(DeleteSubscription, one, name, force), SubscriptionNotFound
        )

    # --- policies ----------------------------------------------------------------------------------------------------

    async def topic_policies(self, topic: str) -> FoundPolicies:
        """Policies of a topic itself, and those in force for it. Raises TopicNotFound."""
        return await self._policies(str(TopicName.parse(topic)), "")

    async def update_topic_policies(self, topic: str, changes: Mapping[str, Any]) -> FoundPolicies:
        """Sets policies of a topic, `{"retention_ms": 3_600_000}`; what is None is that of the namespace again.

        Fields of `Policies` that are not named stay as they are; so do subscriptions that subscription_ttl_ms does not name.
        Returns what is set and in force then. Raises TopicNotFound, InvalidArgument.
        """
        return await self._update_policies(str(TopicName.parse(topic)), "", changes)

    async def namespace_policies(self, namespace: str) -> FoundPolicies:
        """Policies of `tenant/namespace` itself, and those in force for its topics that have none of their own."""
        return await self._policies("", namespace)

    async def update_namespace_policies(self, namespace: str, changes: Mapping[str, Any]) -> FoundPolicies:
        """Does what update_topic_policies does; what is None is that of the brokers again."""
        return await self._update_policies("", namespace, changes)

    async def broker_policies(self) -> FoundPolicies:
        """Policies that are set for all brokers, and those in force for topics whose namespaces have none."""
        return await self._policies("", "")

    async def update_broker_policies(self, changes: Mapping[str, Any]) -> FoundPolicies:
        """Does what update_topic_policies does; what is None is that of each broker's settings again."""
        return await self._update_policies("", "", changes)

    async def _policies(self, topic: str, namespace: str) -> FoundPolicies:
        answer = await self._pool.request(GetPolicies(0, topic, namespace), topic or None)
        policies = msgspec.convert(answer["policies"], Policies)
        return FoundPolicies(policies, answer["version"], [PolicyInForce(*row) for row in answer["in_force"]])

    async def _update_policies(self, topic: str, namespace: str, changes: Mapping[str, Any]) -> FoundPolicies:
        if changes:
            payload = msgspec.msgpack.encode(dict(changes))
            await self._pool.request(ChangePolicies(0, topic, namespace), topic or None, payload)
        return await self._policies(topic, namespace)

    # --- tenants, namespaces, clusters -------------------------------------------------------------------------------

    async def administer(self, kind: str, verb: str, name: str = "", /, **arguments: Any) -> Any:
        """Lists, gets, creates, updates and deletes "tenants" and "namespaces": what each takes and returns is in WIRE.md.

        `administer("tenants", "create", "acme", admin_roles=["ann"])`. Raises NotFound, NotEmpty, NotAllowed,
        InvalidArgument, and AlreadyExists, also when the connection broke and an earlier attempt of this call made it.
        """
        payload = msgspec.msgpack.encode(arguments)
        return await self._pool.request(Administer(0, kind, verb, name), None, payload)

    # --- the cluster -------------------------------------------------------------------------------------------------

    async def brokers(self) -> list[dict[str, Any]]:
        """The brokers of the cluster, by name: name, url, zone, group, state, started_ms, version, load (WIRE.md)."""
        return list((await self._pool.request(ListBrokers(0)))["brokers"])

    async def bookies(self) -> list[dict[str, Any]]:
        """The bookies that the broker knows: name, address, writable, reason, free_bytes, rack, zone, group."""
        return list((await self._pool.request(ListBookies(0)))["bookies"])

    async def diagnose(self) -> dict[str, Any]:
        """What is wrong at the broker that is connected: broker, now_ms, topics, settings, findings (WIRE.md)."""
        return dict(await self._pool.request(Diagnose(0)))

    async def busiest(self, count: int = 10) -> dict[str, Any]:
        """The busiest topics and the largest backlogs of the broker that is connected (WIRE.md)."""
        return dict(await self._pool.request(ListBusiest(0, count)))

    async def bundles(self, namespace: str) -> list[dict[str, Any]]:
        """Bundles of `tenant/namespace` and who owns them: bundle, broker, url, to; "" where nobody does."""
        return list((await self._pool.request(ListBundles(0, namespace)))["bundles"])

    async def unload_bundle(self, bundle: str, *, to: str = "") -> None:
        """A bundle, or those of a topic, move to the broker named `to` ("": to any); they have moved when this returns.

        Raises InvalidArgument, RequestTimeout.
        """
        await self._pool.request(UnloadBundle(0, bundle, to))

    async def split_bundle(self, bundle: str) -> list[str]:
        """Divides a bundle, or that of a topic, in two; their names. Raises InvalidArgument, RequestTimeout."""
        return list((await self._pool.request(SplitBundle(0, bundle)))["bundles"])

    async def drain(
        self, name: str = "", *, zone: str = "", kind: str = "", undo: bool = False
    ) -> dict[str, Any]:
        """A broker or a bookie, or all of a zone, hand over all they have, and get nothing until `undo`.

        Does not wait for it; asked again, it says how far that is: brokers, bookies, bundles, ledgers, open_ledgers, notes
        (WIRE.md). It is over when bundles and ledgers are 0. With bookies it looks through the records of all ledgers.
        `kind`: "broker" or "bookie", where one of each has the name. Raises InvalidArgument, also when the others could not
        hold what these have.
        """
        return dict(await self._pool.request(Drain(0, name, zone, kind, undo)))


async def ask(admin: Admin, command: Command, *, topic: str | None = None, payload: bytes = b"") -> Any:
    """For other parts of Magnetar: a command of the protocol, to the broker of `topic` (None: any one of the cluster).

    It is sent again after retryable errors, up to operation_timeout. VersionConflict is raised at once: the same
    compare-and-set can only fail again.
    """
    return await admin._pool.request(command, topic, payload)


async def _side_by_side(names: Iterable[str], call: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """What the call returns for each, by name; raises as `all_of`."""
    names, found = list(names), dict[str, T]()
    if len(names) == 1:
        return {names[0]: await call(names[0])}

    async def one(name: str) -> None:
        found[name] = await call(name)

    await side_by_side({name: partial(one, name) for name in names})
    return {name: found[name] for name in names}
