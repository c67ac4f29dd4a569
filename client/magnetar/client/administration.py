"""Administration: what operators ask of topics, subscriptions, policies and the cluster, without producing or consuming."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from magnetar.proto.commands import (
    ClearBacklog,
    Command,
    CompactTopic,
    CreateSubscription,
    CreateTopic,
    DeleteSubscription,
    DeleteTopic,
    Drain,
    ExpireMessages,
    GetPolicies,
    ListBrokers,
    ListBundles,
    ListTopics,
    PeekMessages,
    SeekSubscription,
    SetPolicies,
    SkipMessages,
    SplitBundle,
    TopicStats,
    UnloadBundle,
)
from magnetar.proto.errors import InvalidArgument, VersionConflict
from magnetar.proto.ids import TopicName, check_subscription_name
from magnetar.proto.policies import Policies, PolicyInForce

from .connection.pool import ConnectionPool
from .messages import Message, peeked_messages
from .options import Start, start_on_wire, time_in_ms

# Two administrators who change policies at a time meet once; more conflicts in a row are not theirs.
_UPDATE_ATTEMPTS = 5


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
        """Figures of a topic (WIRE.md). Raises TopicNotFound."""
        return dict(await self._ask(TopicStats, topic))

    async def create_topic(self, topic: str) -> None:
        """Creates a topic; fine if it exists."""
        await self._ask(CreateTopic, topic)

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Deletes a topic and all its messages; TopicInUse while producers or consumers are connected, unless `force`."""
        await self._ask(DeleteTopic, topic, force)

    async def compact_topic(self, topic: str, *, wait: bool = False) -> dict[str, Any]:
        """Begins a compaction of the topic, unless one is under way; returns its state (WIRE.md, CompactTopic).

        With `wait` it returns when the compaction is over: `state` is "done", or "failed" and `error` says why. A compaction
        goes on when the caller is cancelled. Raises TopicNotFound.
        """
        state = await self._compaction(topic, "start")
        pause = 0.01
        while wait and state["state"] == "running":
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
            state = await self.compaction_status(topic)
        return state

    async def compaction_status(self, topic: str) -> dict[str, Any]:
        """The state of the topic's compaction (WIRE.md, CompactTopic). Raises TopicNotFound."""
        return await self._compaction(topic, "status")

    async def remove_compaction(self, topic: str) -> dict[str, Any]:
        """Deletes what the last compaction left. Readers get all that the topic has; trimming waits for no compaction."""
        return await self._compaction(topic, "remove")

    async def _compaction(self, topic: str, action: str) -> dict[str, Any]:
        return dict(await self._ask(CompactTopic, topic, action))

    # --- subscriptions -----------------------------------------------------------------------------------------------

    async def create_subscription(self, topic: str, subscription: str, *, start: Start = "latest") -> None:
        """Makes a durable subscription that nobody consumes yet: from `start` on it keeps what is stored.

        start: as for `subscribe`. Raises AlreadyExists if there is one; also when the connection broke and an earlier
        attempt of this call made it.
        """
        await self._ask(
            CreateSubscription, topic, check_subscription_name(subscription), start_on_wire(start)
        )

    async def seek_subscription(self, topic: str, subscription: str, start: Start) -> None:
        """Moves a subscription, whoever consumes it, to "earliest", "latest", a message id (inclusive) or a time.

        Consumers that are connected go on there; messages from before that wait in their queues are dropped when the first
        one from there arrives. Raises SubscriptionNotFound, InvalidArgument for one that is not durable.
        """
        await self._ask(SeekSubscription, topic, check_subscription_name(subscription), start_on_wire(start))

    async def skip_messages(self, topic: str, subscription: str, count: int) -> int:
        """Acknowledges the next `count` messages of a subscription, whoever holds them; how many there were.

        What a consumer holds of them it may still hand out. When this raises RequestTimeout or ConnectionLost, whether
        anything was skipped is not known, and it is not tried again. Raises as seek_subscription.
        """
        answer = await self._ask_once(SkipMessages, topic, check_subscription_name(subscription), count)
        return int(answer["skipped"])

    async def clear_backlog(self, topic: str, subscription: str) -> int:
        """Acknowledges all that is stored now, as skip_messages does; returns how many they were at most."""
        answer = await self._ask_once(ClearBacklog, topic, check_subscription_name(subscription))
        return int(answer["skipped"])

    async def peek_messages(self, topic: str, subscription: str, count: int = 1) -> list[Message]:
        """The next messages that a subscription has not acknowledged; they are neither delivered nor counted.

        At most 1,000, and those of 1 MiB, but one in any case. They cannot be acknowledged. Raises SubscriptionNotFound.
        """
        answer = await self._ask(PeekMessages, topic, check_subscription_name(subscription), count)
        return peeked_messages(answer["entries"], str(TopicName.parse(topic)))

    async def expire_messages(self, topic: str, subscription: str, before: datetime | int) -> int:
        """Acknowledges what `topic` stored before a time (a datetime or ms since the epoch); durable when it returns.

        For a durable subscription. Returns how many messages it went on by, those acknowledged before among them. Raises
        SubscriptionNotFound.
        """
        name = check_subscription_name(subscription)
        return int((await self._ask(ExpireMessages, topic, name, time_in_ms(before)))["messages"])

    async def delete_subscription(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Deletes a subscription; while consumers are connected only with `force`. Raises SubscriptionNotFound."""
        await self._ask(DeleteSubscription, topic, check_subscription_name(subscription), force)

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
        """Does what update_topic_policies does; what is None is that of the broker's settings again."""
        return await self._update_policies("", namespace, changes)

    async def _policies(self, topic: str, namespace: str) -> FoundPolicies:
        answer = await self._pool.request(GetPolicies(0, topic, namespace), topic or None)
        policies = msgspec.convert(answer["policies"], Policies)
        return FoundPolicies(policies, answer["version"], [PolicyInForce(*row) for row in answer["in_force"]])

    async def _update_policies(self, topic: str, namespace: str, changes: Mapping[str, Any]) -> FoundPolicies:
        """Reads, changes and writes them by compare-and-set."""
        for name in changes:
            if name not in Policies.__struct_fields__:
                raise InvalidArgument(
                    f"{name!r} is no policy; there are {', '.join(Policies.__struct_fields__)}"
                )
        for attempt in range(1, _UPDATE_ATTEMPTS + 1 if changes else 1):
            found = await self._policies(topic, namespace)
            policies = msgspec.msgpack.encode(_with(found.policies, changes))
            try:
                await self._pool.request(
                    SetPolicies(0, topic, namespace, found.version), topic or None, policies
                )
            except VersionConflict:
                if attempt == _UPDATE_ATTEMPTS:
                    raise
                continue
            break
        return await self._policies(topic, namespace)

    # --- the cluster -------------------------------------------------------------------------------------------------

    async def brokers(self) -> list[dict[str, Any]]:
        """The brokers of the cluster, by name: name, url, zone, group, state, started_ms, version, load (WIRE.md)."""
        return list((await self._pool.request(ListBrokers(0)))["brokers"])

    async def bundles(self, namespace: str) -> list[dict[str, Any]]:
        """Bundles of `tenant/namespace` and who owns them: bundle, broker, url, to; "" where nobody does."""
        return list((await self._pool.request(ListBundles(0, namespace)))["bundles"])

    async def unload_bundle(self, bundle: str, *, to: str = "") -> None:
        """A bundle, or that of a topic, moves to the broker named `to` ("": to any); it has moved when this returns.

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


def _with(policies: Policies, changes: Mapping[str, Any]) -> Policies:
    """The changed policies; in `subscription_ttl_ms` the subscriptions that are named change. Raises InvalidArgument."""
    fields = dict(changes)
    if "subscription_ttl_ms" in fields:
        ttls = {**policies.subscription_ttl_ms, **(fields["subscription_ttl_ms"] or {})}
        fields["subscription_ttl_ms"] = {name: ttl_ms for name, ttl_ms in ttls.items() if ttl_ms is not None}
    try:
        return msgspec.convert({**msgspec.structs.asdict(policies), **fields}, Policies).check()
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"the policies are not as they should be: {error}") from None
