"""The rows of topics, their subscriptions, and look-ups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from aiohttp import web

from magnetar.proto.entry import Entry
from magnetar.proto.errors import MessageLost, TopicBusy, TopicNotFound, Unsupported
from magnetar.proto.ids import NO_PARTITION, MessageId, TopicName

from ...log.positions import Start
from ...service.admin import AdminService, BacklogFound, FoundMessage
from ...service.broker import BrokerService
from . import messages, shapes
from .routes import TOPIC, WHOLE, Asked, Elsewhere, Route, nothing
from .statuses import Refused

_IN_NAMESPACE: Final = "/admin/v2/{domain}/{tenant}/{namespace}"
_SUBSCRIPTION: Final = f"{TOPIC}/subscription/{{subscription}}"
_LOOKUP: Final = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"
_DELETION_ROUNDS = 3
_LATEST = (1 << 63) - 1
_PAGE = 1_000


class MessageIdBody(msgspec.Struct, rename="camel"):
    """A message id of Pulsar. Ledger -1 is the beginning of the topic, the largest number its end."""

    ledger_id: int
    entry_id: int
    partition_index: int = -1
    batch_index: int = -1
    excluded: bool = False  # from the message behind it on
    properties: dict[str, str] | None = None

    @property
    def start(self) -> Start:
        """Where it means to begin."""
        if self.ledger_id < 0:
            return "earliest", None
        if self.ledger_id == _LATEST:
            return "latest", None
        return "id", MessageId(*self.position).to_bytes()

    @property
    def position(self) -> tuple[int, int, int]:
        """The message, or the one behind it if it is excluded."""
        index = max(self.batch_index, 0)
        if not self.excluded:
            return self.ledger_id, max(self.entry_id, 0), index
        return (
            (self.ledger_id, self.entry_id + 1, 0)
            if self.batch_index < 0
            else (self.ledger_id, self.entry_id, index + 1)
        )


# --- topics ----------------------------------------------------------------------------------------------------------


async def list_topics(asked: Asked) -> list[str]:
    """The topics of a namespace, partitions one by one."""
    found: list[str] = []
    more = True
    while more:
        page = await asked.service.list_topics(
            asked, asked.namespace, after=found[-1] if found else "", count=_PAGE
        )
        found += page.topics
        more = page.more
    return _of_domain(found, asked)


async def list_partitioned(asked: Asked) -> list[str]:
    """The partitioned topics of a namespace."""
    found: list[str] = []
    page = [""]
    while page:
        page = await asked.service.admin.list_partitioned(
            asked, asked.namespace, after=found[-1] if found else ""
        )
        found += page
    return _of_domain(found, asked)


def _of_domain(topics: list[str], asked: Asked) -> list[str]:
    start = f"{asked.names['domain']}://"
    return [topic for topic in topics if topic.startswith(start)]


async def create(asked: Asked, properties: dict[str, str] | None = None) -> None:
    """Makes a topic that is not partitioned; `properties` of its own."""
    await asked.service.admin.check_absent(asked, asked.topic)
    await asked.service.create_topic(asked, asked.topic)
    if properties:
        await asked.service.admin.set_properties(asked, asked.topic, properties)


class PartitionedBody(msgspec.Struct):
    """How many partitions, with properties."""

    partitions: int
    properties: dict[str, str] | None = None


async def create_partitioned(asked: Asked, wanted: int | PartitionedBody) -> None:
    """Makes a partitioned topic."""
    asked_for = PartitionedBody(wanted) if isinstance(wanted, int) else wanted
    await asked.service.admin.check_absent(asked, asked.topic)
    await asked.service.create_topic(asked, asked.topic, partitions=asked_for.partitions)
    if asked_for.properties:
        await asked.service.admin.set_properties(asked, asked.topic, asked_for.properties)


async def update_partitions(asked: Asked, partitions: int) -> None:
    """A partitioned topic has so many partitions from now on, which may not be fewer."""
    now = await asked.service.partitions(asked, asked.topic)
    if partitions < now:
        raise Refused(
            422, f"Desired partitions {partitions} can't be less than the current partitions {now}."
        )
    await asked.service.update_partitions(asked, asked.topic, partitions=partitions)


async def create_missed_partitions(asked: Asked) -> None:
    """Makes what an interrupted call left out."""
    found = await asked.service.admin.partitioned(asked, asked.topic)
    await asked.service.create_topic(asked, asked.topic, partitions=found.partitions)


async def delete(asked: Asked, *, force: bool = False, dry: bool = False) -> None:
    """Deletes a topic with its subscriptions; with users only by `force`. `dry`: says whether it could be deleted."""
    if await asked.service.partitions(asked, asked.topic):
        raise Refused(
            409,
            f"{asked.topic} is a partitioned topic, instead of calling delete topic, please call "
            "delete-partitioned-topic.",
        )
    await asked.service.delete_topic(asked, asked.topic, force=force, dry=dry)


async def delete_partitioned(asked: Asked, *, force: bool = False) -> None:
    """Deletes a partitioned topic as a whole; with users only by `force`. The same call goes on with an interrupted one."""
    found = await asked.service.admin.partitioned(asked, asked.topic)
    if found.exists and not force:
        await asked.ask(DELETE, range(found.partitions), dry="true")
    for _ in range(_DELETION_ROUNDS):
        left = await asked.service.delete_topic(asked, asked.topic, force=force)
        if left is None or not left.partitions:
            return
        try:
            await asked.ask(DELETE, left.partitions, force="true")
        except TopicNotFound:  # a deletion that was interrupted was completed to find that out
            continue
    raise TopicBusy(f"{asked.topic} still has partitions after all were deleted; delete it again")


def _only_partitions(asked: Asked) -> None:
    if TopicName.parse(asked.topic).partition == NO_PARTITION:
        raise TopicNotFound(
            f"Partitioned Topic not found: {asked.topic}; ask for its stats, not for partitioned ones"
        )


async def stats(asked: Asked) -> dict[str, Any]:
    """Figures under Pulsar's names."""
    return shapes.topic(await asked.service.admin.figures(asked, asked.topic), asked)


async def partitioned_stats(asked: Asked) -> dict[str, Any]:
    """The sums over all partitions, and by `perPartition` each one's."""
    _only_partitions(asked)
    return await stats(asked)


async def internal_stats(asked: Asked) -> dict[str, Any]:
    """The ledgers and cursors."""
    return shapes.internal(await asked.service.admin.figures(asked, asked.topic))


async def partitioned_internal_stats(asked: Asked) -> dict[str, Any]:
    """The ledgers and cursors of each partition."""
    _only_partitions(asked)
    return await internal_stats(asked)


async def remove_properties(asked: Asked, key: str) -> None:
    """Removes one of the topic's properties."""
    await asked.service.admin.set_properties(asked, asked.topic, {}, [key])


async def compact(asked: Asked) -> None:
    """Begins a compaction unless one is under way."""
    await asked.service.compact_topic(asked, asked.topic)


async def compaction_status(asked: Asked) -> dict[str, str]:
    """How the last compaction ended, or that one is under way."""
    return shapes.compaction(await asked.service.compact_topic(asked, asked.topic, action="status"))


async def not_here(asked: Asked) -> None:
    """Magnetar has no such thing."""
    what = asked.route.path.rpartition("/")[2]
    raise Unsupported(
        f"Magnetar has no {what} of this kind: {_INSTEAD.get(what, 'there is nothing in its place')}"
    )


_INSTEAD: Final = {
    "offload": "ledgers are archived for good by `magnetar archive`, or deleted by retention",
    "properties": "subscriptions have none; note what belongs to one among the properties of its topic",
    "replicatedSubscriptionStatus": "topics are of one cluster",
}


def _union(answers: Mapping[str, list[str]], _: Asked) -> list[str]:
    return sorted({name for names in answers.values() for name in names})


def _by_number(answers: Mapping[str, Any], _: Asked) -> dict[str, Any]:
    return {str(number): answer for number, answer in enumerate(answers.values())}


def _worst(answers: Mapping[str, Any], _: Asked) -> Any:
    """Of the compactions of partitions: one that failed, else one that runs, else the first."""
    order = ("ERROR", "RUNNING", "NOT_RUN", "SUCCESS")
    return min(answers.values(), key=lambda answer: order.index(answer["status"]))


def _metadata(partitions: int) -> dict[str, Any]:
    return {"partitions": partitions, "deleted": False}


def _last_message(found: MessageId | None) -> dict[str, int]:
    return shapes.message_id((-1, -1, 0) if found is None else found[:3])


# --- subscriptions ---------------------------------------------------------------------------------------------------


async def create_subscription(
    asked: Asked, subscription: str, start: MessageIdBody | None = None, *, replicated: bool = False
) -> None:
    """Makes a durable subscription, at the end unless the body says where. It has no properties."""
    if replicated or (start is not None and start.properties):
        raise Unsupported("a subscription has no properties, and is of one cluster: leave out both")
    await asked.service.create_subscription(
        asked, asked.topic, subscription, start=("latest", None) if start is None else start.start
    )


async def reset_to_time(asked: Asked, subscription: str, timestamp: int) -> None:
    """Moves a subscription to the first message published at a time, in ms since the epoch, or later."""
    await asked.service.seek_subscription(asked, asked.topic, subscription, start=("time", timestamp))


async def reset_to_id(asked: Asked, subscription: str, start: MessageIdBody) -> None:
    """Moves a subscription to a message, or behind it if it is excluded."""
    await asked.service.seek_subscription(asked, asked.topic, subscription, start=start.start)


async def peek(asked: Asked, subscription: str, position: int) -> web.Response:
    """The message of this number, from 1 on, among those that are not acknowledged."""
    found = await asked.service.peek_messages(asked, asked.topic, subscription, count=position)
    left = position
    for one in found.entries:
        entry, hidden = (
            Entry(one.slice),
            {index for first, last in one.hidden for index in range(first, last + 1)},
        )
        for index in range(entry.base_index, entry.base_index + entry.message_count):
            left -= index not in hidden
            if not left:
                return messages.response(FoundMessage(entry, one.ledger, one.entry, index))
    raise MessageLost(
        f"Could not find message {position}: subscription {subscription} has {position - left} to show"
    )


async def examine(
    asked: Asked, *, initial_position: str = "latest", message_position: int = 1
) -> web.Response:
    """The message of this number, from the beginning of the topic ("earliest") or from its end ("latest")."""
    if initial_position not in ("earliest", "latest"):
        raise Refused(412, f"initialPosition is {initial_position[:40]!r}; want earliest or latest")
    from_end = initial_position == "latest"
    return messages.response(
        await asked.service.admin.examine(asked, asked.topic, max(message_position, 1), from_end=from_end)
    )


async def message_at_time(asked: Asked, timestamp: int) -> dict[str, int]:
    """The id of the first message published at a time, in ms since the epoch, or later."""
    return shapes.message_id(await asked.service.admin.find(asked, asked.topic, ("time", timestamp)))


async def backlog_size(asked: Asked, start: MessageIdBody) -> int:
    """Bytes that are stored from a message on."""
    return await asked.service.admin.backlog_size(asked, asked.topic, start.position)


def _analyzed(found: BacklogFound) -> dict[str, Any]:
    zeros = {f"filter{what}{of}": 0 for what in ("Rejected", "Rescheduled") for of in ("Entries", "Messages")}
    return {
        **zeros,
        "entries": found.entries,
        "messages": found.messages,
        "filterAcceptedEntries": found.entries,
        "filterAcceptedMessages": found.messages,
        "aborted": False,
        **{
            name: f"{place[0]}:{place[1]}"
            for name, place in (("firstMessageId", found.first), ("lastMessageId", found.last))
            if place is not None
        },
    }


def _not_offloaded(_: Any) -> dict[str, Any]:
    return {"status": "NOT_RUN", "lastError": "", "firstUnoffloadedMessage": shapes.message_id((-1, -1, 0))}


# --- look-ups --------------------------------------------------------------------------------------------------------


async def lookup(asked: Asked) -> dict[str, str]:
    """Who serves the topic."""
    owner = await asked.service.admin.owner(asked, asked.topic, authoritative=asked.authoritative)
    if not owner.final:
        raise Elsewhere(owner)
    return {"brokerUrl": owner.url, "httpUrl": owner.http, "nativeUrl": owner.url, "brokerUrlSsl": ""}


DELETE: Final = Route("DELETE", TOPIC, delete, partitions=WHOLE)
_B, _A = BrokerService, AdminService

TOPICS_ROUTES: Final = (
    Route("GET", _IN_NAMESPACE, list_topics),
    Route("GET", f"{_IN_NAMESPACE}/partitioned", list_partitioned),
    Route("PUT", TOPIC, create, body="properties", partitions=WHOLE),
    DELETE,
    Route("GET", f"{TOPIC}/partitions", _B.partitions, answer=_metadata, partitions=WHOLE),
    Route("PUT", f"{TOPIC}/partitions", create_partitioned, body="wanted", partitions=WHOLE),
    Route("POST", f"{TOPIC}/partitions", update_partitions, body="partitions", partitions=WHOLE),
    Route("DELETE", f"{TOPIC}/partitions", delete_partitioned, partitions=WHOLE),
    Route("POST", f"{TOPIC}/createMissedPartitions", create_missed_partitions, partitions=WHOLE),
    Route("GET", f"{TOPIC}/properties", _A.properties, partitions=WHOLE),
    Route("PUT", f"{TOPIC}/properties", _A.set_properties, body="changed", partitions=WHOLE),
    Route("DELETE", f"{TOPIC}/properties", remove_properties, partitions=WHOLE),
    Route("GET", f"{TOPIC}/stats", stats),
    Route("GET", f"{TOPIC}/partitioned-stats", partitioned_stats, partitions=shapes.partitioned),
    Route("GET", f"{TOPIC}/internalStats", internal_stats),
    Route("GET", f"{TOPIC}/partitioned-internalStats", partitioned_internal_stats, partitions=shapes.parts),
    Route("GET", f"{TOPIC}/internal-info", _A.figures, answer=shapes.info, partitions=shapes.parts),
    Route("GET", f"{TOPIC}/lastMessageId", _A.last_message, answer=shapes.message_id),
    Route("GET", f"{TOPIC}/messageid/{{timestamp}}", message_at_time),
    Route("GET", f"{TOPIC}/examinemessage", examine),
    Route("GET", f"{TOPIC}/ledger/{{ledgerId}}/entry/{{entryId}}", _A.message, answer=messages.response),
    Route("PUT", f"{TOPIC}/backlogSize", backlog_size, body="start"),
    Route("POST", f"{TOPIC}/terminate", _B.terminate_topic, answer=_last_message),
    Route("POST", f"{TOPIC}/terminate/partitions", _B.terminate_topic, answer=_last_message, partitions=_by_number),
    Route("PUT", f"{TOPIC}/unload", _A.unload_topic, partitions=nothing),
    Route("PUT", f"{TOPIC}/compaction", compact, partitions=nothing),
    Route("GET", f"{TOPIC}/compaction", compaction_status, partitions=_worst),
    Route("POST", f"{TOPIC}/trim", _A.trim, partitions=nothing, status=200),
    Route("DELETE", f"{TOPIC}/truncate", _A.truncate, partitions=nothing),
    Route("GET", f"{TOPIC}/offload", _A.figures, answer=_not_offloaded),
    Route("PUT", f"{TOPIC}/offload", not_here, partitions=WHOLE),
    Route("GET", f"{TOPIC}/subscriptions", _A.subscriptions, partitions=_union),
    Route("PUT", _SUBSCRIPTION, create_subscription, body="start", partitions=nothing),
    Route("DELETE", _SUBSCRIPTION, _B.delete_subscription, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/skip/{{count}}", _B.skip_messages, answer=nothing),
    Route("POST", f"{_SUBSCRIPTION}/skip_all", _B.clear_backlog, answer=nothing, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/expireMessages/{{seconds}}", _A.expire_older, partitions=nothing),
    Route("POST", f"{TOPIC}/all_subscription/expireMessages/{{seconds}}", _A.expire_older, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/resetcursor/{{timestamp}}", reset_to_time, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/resetcursor", reset_to_id, body="start"),
    Route("GET", f"{_SUBSCRIPTION}/position/{{position}}", peek),
    Route("POST", f"{_SUBSCRIPTION}/analyzeBacklog", _A.analyze_backlog, answer=_analyzed),
    *(Route(method, f"{_SUBSCRIPTION}/properties", not_here, partitions=WHOLE) for method in ("GET", "PUT")),
    *(
        Route(method, f"{_SUBSCRIPTION}/replicatedSubscriptionStatus", not_here, partitions=WHOLE)
        for method in ("GET", "POST")
    ),
    Route("GET", _LOOKUP, lookup, partitions=WHOLE),
    Route("GET", f"{_LOOKUP}/bundle", _A.bundle_range, partitions=WHOLE),
)  # fmt: skip
