"""The rows of topics, their subscriptions, and look-ups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from msgspec import structs

from magnetar.proto.entry import Entry
from magnetar.proto.errors import MessageLost, TopicBusy, TopicNotFound, Unsupported
from magnetar.proto.ids import NO_PARTITION, TopicName
from magnetar.proto.pulsar.ids import pack_entry, unpack_entry
from magnetar.proto.ranges import complement

from ...log.positions import Start
from ...service.admin import AdminService, BacklogFound, FoundMessage, TopicFigures
from ...service.broker import BrokerService
from . import messages, shapes
from .routes import TOPIC, WHOLE, Asked, Elsewhere, PulsarMessageId, Route, nothing, text
from .statuses import Refused

_DELETION_ROUNDS = 3
_END: Final = PulsarMessageId((1 << 63) - 1, (1 << 63) - 1)


async def create(asked: Asked, properties: dict[str, str] | None = None) -> None:
    """Makes a topic that is not partitioned."""
    await asked.service.create_topic(asked, asked.topic, new=True)
    if properties:
        await asked.service.admin.change_properties(asked, asked.topic, {**properties})


async def partitions(asked: Asked) -> dict[str, Any]:
    """How many partitions a topic has, 0: it is not partitioned, and its properties."""
    count = await asked.service.partitions(asked, asked.topic)
    properties = await asked.service.admin.properties(asked, asked.topic) if count else None
    return {**shapes.metadata(count), **({"properties": properties} if properties else {})}


async def create_partitioned(asked: Asked, wanted: int | dict[str, Any]) -> None:
    """Makes a partitioned topic: the body is a number, or an object with `partitions` and `properties`."""
    partitions = wanted.get("partitions") if isinstance(wanted, dict) else wanted
    if not isinstance(partitions, int):
        raise Refused(400, "want the number of partitions, or an object with it as partitions")
    if partitions < 1:
        raise Refused(406, f"Number of partitions should be greater than 0, and is {partitions}")
    await asked.service.create_topic(asked, asked.topic, partitions=partitions, new=True)
    if isinstance(wanted, dict) and wanted.get("properties"):
        await asked.service.admin.change_properties(asked, asked.topic, wanted["properties"])


async def update_partitions(asked: Asked, partitions: int) -> None:
    """A partitioned topic has so many partitions from now on, which may not be fewer."""
    now = await asked.service.partitions(asked, asked.topic)
    if partitions < now:
        raise Refused(
            422, f"Desired partitions {partitions} can't be less than the current partitions {now}."
        )
    await asked.service.update_partitions(asked, asked.topic, partitions=partitions)


async def delete(asked: Asked, *, force: bool = False, dry: bool = False) -> None:
    """Deletes a topic with its subscriptions; with users only by `force`. `dry`: says whether it could be deleted."""
    if await asked.service.partitions(asked, asked.topic):
        raise Refused(
            409, f"{asked.topic} is a partitioned topic: DELETE .../partitions deletes it as a whole"
        )
    await asked.service.delete_topic(asked, asked.topic, force=force, dry=dry)


async def delete_partitioned(asked: Asked, *, force: bool = False) -> None:
    """Deletes a partitioned topic as a whole; with users only by `force`. The same call goes on with an interrupted one."""
    found = await asked.service.admin.partitioned(asked, asked.topic)
    if found.exists and not force:
        await asked.of_partitions(range(found.partitions), DELETE, {"dry": "true"})
    for _ in range(_DELETION_ROUNDS):
        left = await asked.service.delete_topic(asked, asked.topic, force=force)
        if left is None or not left.partitions:
            return
        try:
            await asked.of_partitions(left.partitions, DELETE, {"force": "true"})
        except TopicNotFound:  # a deletion that was interrupted was completed to find that out
            continue
    raise TopicBusy(f"{asked.topic} still has partitions after all were deleted; delete it again")


async def remove_property(asked: Asked, key: str) -> None:
    """Removes one of the topic's properties."""
    await asked.service.admin.change_properties(asked, asked.topic, {key: None})


async def stats(asked: Asked) -> dict[str, Any]:
    """Figures under Pulsar's names."""
    return shapes.topic(await asked.service.admin.figures(asked, asked.topic), asked)


async def partitioned_stats(asked: Asked) -> dict[str, Any]:
    """The sums over all partitions, and by `perPartition` each one's."""
    if TopicName.parse(asked.topic).partition == NO_PARTITION:
        raise TopicNotFound(f"Partitioned Topic not found: {asked.topic}; ask for its stats")
    return await stats(asked)


async def subscribe(
    asked: Asked, subscription: str, at: PulsarMessageId = _END, *, replicated: bool = False
) -> None:
    """Makes a durable subscription, which begins at a message; without a body at the end."""
    if replicated:
        raise Unsupported("subscriptions are not replicated: a topic is of one cluster; leave replicated out")
    start, properties = await at.start(asked), at.properties or {}
    await asked.service.create_subscription(
        asked, asked.topic, subscription, start=start, properties=properties
    )


async def expire_through(asked: Asked, subscription: str, last: PulsarMessageId) -> None:
    """Acknowledges all up to a message, and that too unless it is excluded."""
    behind = await structs.replace(last, excluded=not last.excluded).start(asked)
    await asked.service.admin.expire_before(asked, asked.topic, subscription, behind)


async def message(asked: Asked, ledger_id: int, entry_id: int, *, batch_index: int = -1) -> web.Response:
    """A message by its id; without an index a batch as a whole."""
    entry, first = unpack_entry(entry_id)
    whole = batch_index == -1
    number = first if whole else first + batch_index
    found = await asked.service.admin.message(asked, asked.topic, ledger_id, entry, number)
    return messages.response(found, whole=whole)


async def last_message(asked: Asked) -> dict[str, int]:
    """The id of the last message; of an empty topic an entry of -1."""
    return await _message_id(asked, *await asked.service.admin.last_message(asked, asked.topic))


async def find(asked: Asked, start: Start) -> dict[str, int]:
    """The id of the first message from a time on; behind the last one if there is none."""
    return await _message_id(asked, *await asked.service.admin.find(asked, asked.topic, start))


async def terminate(asked: Asked) -> dict[str, int]:
    """Ends a topic: nothing can be published any more. The answer is the id of its last message."""
    await asked.service.terminate_topic(asked, asked.topic)
    return await last_message(asked)


async def _message_id(asked: Asked, ledger: int, entry: int, number: int) -> dict[str, int]:
    partition = TopicName.parse(asked.topic).partition
    try:
        found = await asked.service.admin.message(asked, asked.topic, ledger, max(entry, 0), number)
    except MessageLost:  # no message is there yet
        return shapes.message_id(ledger, -1 if entry < 0 else pack_entry(entry, number), partition=partition)
    return shapes.message_id(*shapes.packed_id(found), partition)


async def peek(asked: Asked, subscription: str, position: int) -> web.Response:
    """The message of this number, from 1 on, among those that are not acknowledged."""
    found = await asked.service.peek_messages(asked, asked.topic, subscription, count=position)
    left = position
    for one in found.entries:
        entry = Entry(one.slice)
        last = entry.base_index + entry.message_count - 1
        for first, end in complement(one.hidden, entry.base_index, last):
            if left <= end - first + 1:
                return messages.response(FoundMessage(entry, one.ledger, one.entry, first + left - 1))
            left -= end - first + 1
    raise MessageLost(f"{position} messages cannot be shown: {position - left} are not acknowledged")


async def lookup(asked: Asked) -> dict[str, str]:
    """Who serves the topic."""
    owner = await asked.service.admin.owner(asked, asked.topic, authoritative=asked.authoritative)
    if not owner.final:
        raise Elsewhere(owner)
    return {
        "brokerUrl": owner.pulsar or owner.url,
        "httpUrl": owner.http,
        "nativeUrl": owner.url,
        "brokerUrlSsl": "",
    }


def _subscriptions(found: TopicFigures) -> list[str]:
    return sorted({*found.stats.subscriptions, *found.stats.unavailable_subscriptions})


def _union(answers: Mapping[str, list[str]], _: Asked) -> list[str]:
    return sorted({name for names in answers.values() for name in names})


def _first(answers: Mapping[str, Any], _: Asked) -> Any:
    return next(iter(answers.values()))


def _by_number(answers: Mapping[str, Any], _: Asked) -> dict[str, Any]:
    return {str(TopicName.parse(topic).partition): answer for topic, answer in answers.items()}


def _worst(answers: Mapping[str, Any], _: Asked) -> Any:
    """Of the compactions of partitions: one that failed, else one that runs, else one that never was."""
    order = ("ERROR", "RUNNING", "NOT_RUN", "SUCCESS")
    return min(answers.values(), key=lambda answer: order.index(answer["status"]))


def _analyzed(found: BacklogFound) -> dict[str, Any]:
    ends = {"firstMessageId": found.first, "lastMessageId": found.last}
    return {
        **{f"filter{what}{of}": 0 for what in ("Rejected", "Rescheduled") for of in ("Entries", "Messages")},
        "entries": found.entries, "messages": found.messages, "aborted": False,
        "filterAcceptedEntries": found.entries, "filterAcceptedMessages": found.messages,
        **{name: f"{place[0]}:{pack_entry(place[1], 0)}" for name, place in ends.items() if place is not None},
    }  # fmt: skip


def _not_offloaded(_: Any) -> dict[str, Any]:
    return {"status": "NOT_RUN", "lastError": "", "firstUnoffloadedMessage": shapes.message_id()}


_B, _A = BrokerService, AdminService
_TOPICS: Final = "/admin/v2/{domain}/{tenant}/{namespace}"
_SUBSCRIPTION: Final = f"{TOPIC}/subscription/{{subscription}}"
_LOOKUP: Final = "/lookup/v2/topic/{domain}/{tenant}/{namespace}/{topic}"
DELETE: Final = Route("DELETE", TOPIC, delete, partitions=WHOLE)
SUBSCRIPTIONS: Final = Route(
    "GET", f"{TOPIC}/subscriptions", _A.figures, answer=_subscriptions, partitions=_union
)
UNSUBSCRIBE: Final = Route("DELETE", _SUBSCRIPTION, _B.delete_subscription, partitions=nothing)
CLEAR_BACKLOG: Final = Route(
    "POST", f"{_SUBSCRIPTION}/skip_all", _B.clear_backlog, answer=nothing, partitions=nothing
)

TOPICS_ROUTES: Final = (
    Route("GET", _TOPICS, _A.topics),
    Route("GET", f"{_TOPICS}/partitioned", _A.topics, given={"partitioned": True}),
    Route("PUT", TOPIC, create, body="properties", partitions=WHOLE),
    DELETE,
    Route("GET", f"{TOPIC}/partitions", partitions, partitions=WHOLE),
    Route("PUT", f"{TOPIC}/partitions", create_partitioned, body="wanted", partitions=WHOLE),
    Route("POST", f"{TOPIC}/partitions", update_partitions, body="partitions", partitions=WHOLE),
    Route("DELETE", f"{TOPIC}/partitions", delete_partitioned, partitions=WHOLE),
    Route("POST", f"{TOPIC}/createMissedPartitions", _A.partitioned, answer=nothing, partitions=WHOLE),  # none is
    Route("GET", f"{TOPIC}/properties", _A.properties, partitions=WHOLE),
    Route("PUT", f"{TOPIC}/properties", _A.change_properties, body="changed", partitions=WHOLE),
    Route("DELETE", f"{TOPIC}/properties", remove_property, partitions=WHOLE),
    Route("GET", f"{TOPIC}/stats", stats),
    Route("GET", f"{TOPIC}/partitioned-stats", partitioned_stats, partitions=shapes.partitioned),
    Route("GET", f"{TOPIC}/internalStats", _A.figures, answer=shapes.internal),
    Route("GET", f"{TOPIC}/partitioned-internalStats", _A.figures, answer=shapes.internal, partitions=shapes.parts),
    Route("GET", f"{TOPIC}/internal-info", _A.figures, answer=shapes.info, partitions=shapes.parts),
    Route("GET", f"{TOPIC}/lastMessageId", last_message),
    Route("GET", f"{TOPIC}/messageid/{{start}}", find),
    Route("GET", f"{TOPIC}/examinemessage", _A.examine, answer=messages.response),
    Route("GET", f"{TOPIC}/ledger/{{ledgerId}}/entry/{{entryId}}", message),
    Route("PUT", f"{TOPIC}/backlogSize", _A.backlog_size, body="start"),
    Route("POST", f"{TOPIC}/terminate", terminate),
    Route("POST", f"{TOPIC}/terminate/partitions", terminate, partitions=_by_number),
    Route("PUT", f"{TOPIC}/unload", _A.unload_topic, partitions=nothing),
    Route("PUT", f"{TOPIC}/compaction", _B.compact_topic, answer=nothing, partitions=nothing),
    Route(
        "GET", f"{TOPIC}/compaction", _B.compact_topic,
        given={"action": "status"}, answer=shapes.compaction, partitions=_worst,
    ),
    Route("POST", f"{TOPIC}/trim", _A.trim, partitions=nothing, status=200),
    Route("DELETE", f"{TOPIC}/truncate", _A.truncate, partitions=nothing),
    Route("GET", f"{TOPIC}/offload", _A.figures, answer=_not_offloaded),
    SUBSCRIPTIONS,
    Route("PUT", _SUBSCRIPTION, subscribe, body="at", partitions=nothing),
    UNSUBSCRIBE,
    Route("GET", f"{_SUBSCRIPTION}/properties", _A.subscription_properties, partitions=_first),
    Route(
        "PUT", f"{_SUBSCRIPTION}/properties", _A.set_subscription_properties, body="properties", partitions=nothing
    ),
    Route("POST", f"{_SUBSCRIPTION}/skip/{{count}}", _B.skip_messages, answer=nothing),
    CLEAR_BACKLOG,
    Route("POST", f"{_SUBSCRIPTION}/expireMessages/{{seconds}}", _A.expire_older, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/expireMessages", expire_through, body="last"),
    Route("POST", f"{TOPIC}/all_subscription/expireMessages/{{seconds}}", _A.expire_older, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/resetcursor/{{start}}", _B.seek_subscription, answer=nothing, partitions=nothing),
    Route("POST", f"{_SUBSCRIPTION}/resetcursor", _B.seek_subscription, body="start", answer=nothing),
    Route("GET", f"{_SUBSCRIPTION}/position/{{position}}", peek),
    Route("POST", f"{_SUBSCRIPTION}/analyzeBacklog", _A.analyze_backlog, answer=_analyzed),
    Route("GET", _LOOKUP, lookup, partitions=WHOLE),
    Route("GET", f"{_LOOKUP}/bundle", _A.bundle_range, answer=text, partitions=WHOLE),
)  # fmt: skip
