"""What is wrong at a broker, and who is busy there: for `magnetar doctor` and `magnetar top`.

From memory alone, in turns of the loop. A finding says what is wrong with what, why, what follows, and what mends it.
A kind of trouble that /health names is a row of `_KNOWN`; one of a subscription is a check in `_CHECKS`.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from magnetar.proto.errors import BookieUnavailable
from magnetar.runtime.connection.addresses import format_address
from magnetar.runtime.quantities import about, counted

from ..cursors.core.acks import Position
from ..dispatch.core.consumer import Consumer
from ..dispatch.subscription import Subscription
from ..resources.stores import Bookies
from ..settings import BrokerSettings
from ..topics.registry import Broker
from ..topics.topic import Topic
from .results import BookieRow
from .stats import TopicOffsets

CRITICAL: Final = "critical"  # messages do not get on, or copies of them are missing
WARNING: Final = "warning"  # it works, and will not, or not as it should
_TOPICS_PER_TURN = 10  # 1 to 3 ms
_MOST_FINDINGS = 1_000  # of topics
_FORSAKEN_MS = 10 * 60_000  # nobody has consumed what waits for so long
_STILL_S = 60.0  # who is slower is named


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong."""

    severity: str  # CRITICAL or WARNING
    subject: str
    cause: str
    consequence: str
    cure: str


class Diagnosis(msgspec.Struct, frozen=True):
    """Of one broker."""

    broker: str
    now_ms: int  # by its clock
    topics: int  # that were looked at
    settings: dict[str, bool | int | str]  # that all brokers of a cluster should have alike
    findings: list[Finding]


class BusyTopic(msgspec.Struct, frozen=True):
    """Rates are of the last ten seconds."""

    topic: str
    message_rate_in: float
    byte_rate_in: float
    message_rate_out: float
    byte_rate_out: float
    stored_bytes: int
    producers: int
    consumers: int


class BusySubscription(msgspec.Struct, frozen=True):
    """`backlog_messages`, `oldest_ms`: estimated. Rates are of the last ten seconds."""

    topic: str
    subscription: str
    backlog_messages: int
    oldest_ms: int
    message_rate_out: float
    acknowledge_rate: float
    slowest_consumer: str  # that holds most unacknowledged messages; "": nobody holds any
    unacked_messages: int  # of it


class Busiest(msgspec.Struct, frozen=True):
    """Of one broker: its sums, and the first of its topics and subscriptions."""

    broker: str
    topics: int
    connections: int
    totals: BusyTopic  # `topic` is ""
    busiest_topics: list[BusyTopic]
    largest_backlogs: list[BusySubscription]


class _Known(NamedTuple):
    pattern: re.Pattern[str]  # of "subject: reason"
    severity: str
    consequence: str
    cure: str


def _known(pattern: str, severity: str, consequence: str, cure: str) -> _Known:
    return _Known(re.compile(pattern), severity, consequence, cure)


_SPACE = "free or add space there, add bookies, or keep less (`magnetar namespaces policies NAMESPACE --retention 1d`)"
# What /health names in a sentence: what follows from it, and what to do. The first row that fits counts.
_KNOWN: Final = (
    _known(
        r"^bookie .*it is lost", CRITICAL,
        "its copies are missing: after repair.lost_bookie_delay_s the other bookies make new ones",
        "start it again; if its disks are gone, `magnetar cluster recover NAME --metadata ...` copies at once",
    ),
    _known(
        r"^broker .*it is lost", WARNING, "the other brokers serve its topics",
        "start it again, or forget it: `magnetar cluster remove NAME --metadata ...`",
    ),
    _known(
        r"journal_stalled|journal hangs", CRITICAL, "nothing is confirmed there; writers go to other bookies, or wait",
        "look at the disk of its journal; stop the bookie, so that others take over",
    ),
    _known(
        r"\bdisk of .*not answered", CRITICAL, "reads of what is stored there fail, or wait for another copy",
        "look at the disk; stop the bookie, so that others take over",
    ),
    _known(
        r"full in about|nearly full", WARNING, "full, the bookie takes no new entries", _SPACE,
    ),
    _known(
        r"read.only|no space|: full", CRITICAL, "it serves what it has and takes no new entries", _SPACE,
    ),
    _known(
        r"write or sync failed", CRITICAL, "what only that disk held is damaged; other copies serve it",
        "replace the disk; the bookie makes what it lacks anew from other copies",
    ),
    _known(
        r"damage", WARNING, "other copies are read in their place, and they are healed from these",
        "wait for the repair (`magnetar cluster status`); if it stays, look at the disk: `magnetar bookie verify`",
    ),
    _known(
        r"^auditor", CRITICAL, "ledgers stay short of the copies that a lost bookie had",
        "set repair.auditor=true at the bookies, or run `magnetar autorecovery`",
    ),
    _known(
        r"^repair", WARNING, "these ledgers have fewer copies than they should; one more loss may lose entries",
        "start the bookies that are missing, or add others; `magnetar cluster status` shows how it goes on",
    ),
    _known(
        r"^bookies: ", CRITICAL, "no ledger can be begun: producers wait where one is needed",
        "start the bookies that are missing, add others, or ask for fewer copies (--durability, --minimum-write-quorum)",
    ),
    _known(
        r"^topics: .*fewer copies", WARNING, "what they store now survives fewer losses",
        "start the bookies that are missing; the next ledger of each topic has all its copies again",
    ),
    _known(
        r"^bookie .*failed a moment ago", WARNING, "reads and adds go to other bookies for a while",
        "if it lasts: look at that bookie and at the network between it and this broker",
    ),
    _known(
        r"^topic .*has not acknowledged", CRITICAL, "its producers wait, or are refused, as the quota's action says",
        "start the consumers of that subscription, or delete it; or raise the quota: `magnetar topics policies TOPIC "
        "--backlog-quota SIZE`",
    ),
    _known(
        r"begins anew", WARNING, "what it does is late", "its log has the traceback; please report it",
    ),
    _known(
        r"unsafe_no_sync", CRITICAL, "a power failure loses messages that were acknowledged",
        "set bookie.journal_sync_data=true and start it again",
    ),
    _known(
        r"^metadata", CRITICAL, "nothing can be created, moved or repaired; a broker without it stops serving",
        "look at ZooKeeper and at the network to it",
    ),
)  # fmt: skip


def _explained(subject: str, reason: str) -> Finding:
    text = f"{subject.rpartition(', ')[2]}: {reason}"  # without the daemon that says it
    subject = {"read_only": "bookie", "journal_stalled": "bookie"}.get(subject, subject)  # of this process
    for row in _KNOWN:
        if row.pattern.search(text):
            return Finding(row.severity, subject, reason, row.consequence, row.cure)
    return Finding(WARNING, subject, reason, "", "")


# --- subscriptions -----------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """A subscription at one moment."""

    topic: Topic
    subscription: Subscription
    mark: Position
    backlog: int  # estimated
    age_ms: int  # of the oldest message that is not acknowledged, estimated

    @property
    def due(self) -> int:
        """The backlog without what waits for its delivery time."""
        return max(self.backlog - self.topic.delays.messages_from(self.mark), 0)

    @property
    def named(self) -> str:
        """As the command line takes it."""
        return f"{self.topic.name} {self.subscription.name}"

    def finding(self, severity: str, cause: str, consequence: str, cure: str) -> Finding:
        subject = f"subscription {self.subscription.name} of {self.topic.name}"
        return Finding(severity, subject, cause, consequence, cure)


def _seen(topic: Topic) -> list[_Seen]:
    """Its durable subscriptions."""
    durable = [one for one in topic.subscriptions.values() if one.durable]
    if not durable:
        return []
    offsets, found = TopicOffsets(topic), []
    for subscription in durable:
        mark, before, age_ms = offsets.of_mark(subscription)
        backlog = max(offsets.end.messages - before.messages, 0)
        found.append(_Seen(topic, subscription, mark, backlog, age_ms))
    return found


def _troubled(seen: _Seen) -> Finding | None:
    """An entry that cannot be read, a message that always comes back, one that ends its consumers."""
    trouble = seen.subscription.trouble()
    if not trouble:
        return None
    if "cannot be read" in trouble:
        return seen.finding(
            CRITICAL, trouble, "delivery waits for it",
            "bring back the bookies that have it; if they are gone for good, `magnetar subscriptions skip "
            f"{seen.named} --count N` goes on behind it",
        )  # fmt: skip
    if "delivery time" in trouble:
        return None  # they are being read, after the topic was loaded
    return seen.finding(
        WARNING, trouble, "it costs its consumers work again and again, and what is behind it may wait",
        f"look at it: `magnetar subscriptions peek {seen.named}`; give the consumers a dead letter topic",
    )  # fmt: skip


def _forsaken(seen: _Seen) -> Finding | None:
    """Nobody consumes what waits; not of a topic that was just loaded, whose consumers may be on their way."""
    subscription, due = seen.subscription, seen.due
    if subscription.consumers or not due or seen.age_ms < _FORSAKEN_MS or subscription.quiet_s < _STILL_S:
        return None
    return seen.finding(
        WARNING,
        f"no consumer is connected, and {counted(due, 'message waits', 'messages wait')}, the first for "
        f"{about(seen.age_ms / 1000)}",
        "they are kept, whatever the retention is, and use the disks of the bookies",
        f"start its consumers; if nobody needs it: `magnetar subscriptions delete {seen.named}`",
    )


def _who(consumer: Consumer) -> str:
    return f"{consumer.name} at {consumer.port.peer.address}"


def _why_idle(consumer: Consumer) -> str:
    """Why a consumer gets nothing now; "" if it would get what there is."""
    if consumer.blocked_on_unacked_messages:
        return (
            f"{_who(consumer)} holds {consumer.unacked_messages:,} unacknowledged messages, as many as it may"
        )
    if not consumer.port.writable:
        return f"the connection of {_who(consumer)} takes no bytes: its process hangs, or the network does"
    if consumer.available_permits <= 0:
        return (
            f"{_who(consumer)} takes nothing out of its queue, which is full: its program waits for something else "
            f"({consumer.unacked_messages:,} of its messages are unacknowledged)"
        )
    return ""


def _stuck(seen: _Seen) -> Finding | None:
    """There is something to deliver, and for a minute nothing was delivered or acknowledged."""
    subscription, core = seen.subscription, seen.subscription.dispatcher.core
    active = [one for one in subscription.consumers if core.active in (None, one)]
    if not active or not seen.due or subscription.quiet_s < _STILL_S:
        return None
    tracker = core.tracker
    if tracker.blocked_on_unacked_messages:
        cause = f"its consumers hold {tracker.unacked_messages:,} unacknowledged messages together, as many as they may"
    else:
        reasons = [_why_idle(consumer) for consumer in active]
        if not all(reasons):
            return None  # somebody would take more: there is nothing that is due
        cause = "; ".join(reasons[:3])
    return seen.finding(
        CRITICAL, f"it is stuck: {cause}", f"{counted(seen.backlog, 'message waits', 'messages wait')}",
        "look at that program, or start it again: what it holds goes to the others when its connection closes "
        f"(`magnetar subscriptions stats {seen.named}`)",
    )  # fmt: skip


def _held_back(seen: _Seen) -> Finding | None:
    """One consumer holds the oldest message while others go on behind it."""
    subscription, core = seen.subscription, seen.subscription.dispatcher.core
    if not core.tracker.individual_acks or subscription.mark_quiet_s < _STILL_S:
        return None
    waiting = core.draining_slots
    if waiting:
        names = ", ".join(f"{name} ({slots} key slots)" for name, slots in list(waiting.items())[:3])
        return seen.finding(
            WARNING, f"{names} kept keys that belong to others now, and has not acknowledged what it got of them",
            "messages of these keys wait", "look at that program, or start it again",
        )  # fmt: skip
    holes = subscription.cursor.state.range_count
    holder = next((one for one in subscription.consumers if core.first_owed(one) == seen.mark), None)
    if holder is None or not holes:
        return None
    ledger, entry, index = seen.mark
    return seen.finding(
        WARNING,
        f"{_who(holder)} holds message {ledger}:{entry}:{index}, the oldest that is not acknowledged, stored "
        f"{about(seen.age_ms / 1000)} ago, while others have acknowledged what is behind it",
        "ledgers from there on are kept; it is delivered again when that consumer's connection closes",
        f"look at that program; `magnetar subscriptions peek {seen.named}` shows the message",
    )


def _still(seen: _Seen) -> Finding | None:
    """Consumers hold messages, would take more, and have acknowledged nothing for a minute."""
    quiet_s = seen.subscription.quiet_s
    holders = [one for one in seen.subscription.consumers if one.unacked_messages]
    if not holders or not seen.due or quiet_s < _STILL_S:
        return None
    held = ", ".join(f"{_who(one)} holds {one.unacked_messages:,}" for one in holders[:3])
    return seen.finding(
        WARNING, f"it stands still: {held} unacknowledged, and for {about(quiet_s)} nothing was acknowledged or delivered",
        f"{counted(seen.backlog, 'message waits', 'messages wait')} for a program that is slow or stuck",
        "look at that program, or start it again: what it holds is delivered again when its connection closes",
    )  # fmt: skip


_CHECKS: Final[tuple[Callable[[_Seen], Finding | None], ...]] = (
    _troubled, _forsaken, _stuck, _held_back, _still
)  # fmt: skip


def _limited(topic: Topic) -> Finding | None:
    """A quota or a rate keeps its producers from publishing."""
    limits, subject = topic.limits, f"topic {topic.name}"
    policies = f"`magnetar topics policies {topic.name}"
    if limits.refusal is not None or limits.held:
        reason, consequence = (
            limits.held,
            "its producers wait, and what they send fails after their send_timeout",
        )
        if limits.refusal is not None:
            reason, consequence = limits.refusal.message, "whatever its producers send fails"
        cause, _, cure = reason.rpartition("; ")
        command = policies + (
            " --backlog-quota SIZE`" if "_bytes=" in cause else " --backlog-quota-age TIME`"
        )
        return Finding(CRITICAL, subject, cause, consequence, f"{cure} ({command})")
    if limits.ahead:
        return Finding(
            WARNING, subject,
            f"{counted(len(limits.ahead), 'producer sends', 'producers send')} more than {limits.publish_rates}, allows",
            "they are held: what they send waits, and fails after their send_timeout",
            f"let them send less, or raise that policy ({policies} --publish-rate N`, `magnetar brokers policies "
            "--broker-publish-rate N`)",
        )  # fmt: skip
    return None


def _of_topic(topic: Topic) -> Iterator[Finding]:
    for name, error in topic.subscriptions.recovery.unavailable.items():
        yield Finding(
            CRITICAL, f"subscription {name} of {topic.name}", f"its cursor cannot be read: {error.message}",
            "nobody can consume from it; what it has not acknowledged is kept",
            "bring back the bookies that have it; the broker tries again by itself",
        )  # fmt: skip
    compaction = topic.compaction.stats()
    if compaction.state == "failed":
        yield Finding(
            WARNING, f"topic {topic.name}", f"its compaction failed: {compaction.error}",
            "readers of the compacted topic get old values as well", f"`magnetar topics compact {topic.name}` tries again",
        )  # fmt: skip
    if (limited := _limited(topic)) is not None:
        yield limited
    for seen in _seen(topic):
        if (found := next(filter(None, (check(seen) for check in _CHECKS)), None)) is not None:
            yield found


# --- a broker ----------------------------------------------------------------------------------------------------------

_ALIKE: Final = (
    "cluster_name", "default_bundles", "auto_create_topics", "ensemble_size", "write_quorum", "ack_quorum",
    "minimum_write_quorum", "flush", "retention_ms", "retention_bytes", "message_ttl_ms", "deduplication",
)  # fmt: skip


def _of_settings(settings: BrokerSettings, *, alone: bool) -> Iterator[Finding]:
    per_consumer = settings.max_unacked_messages_per_consumer
    together = settings.max_unacked_messages_per_subscription
    if 0 < together < per_consumer:
        yield Finding(
            WARNING, "settings of the broker",
            f"max_unacked_messages_per_consumer={per_consumer} is above max_unacked_messages_per_subscription={together}",
            "one consumer that acknowledges nothing stops all others of its subscription",
            "set max_unacked_messages_per_consumer lower",
        )  # fmt: skip
    if not alone and settings.write_quorum == 1:
        yield Finding(
            WARNING, "settings of the broker", "write_quorum=1: topics without a policy have one copy of each message",
            "the loss of one bookie loses messages", "set ensemble_size, write_quorum and ack_quorum to 3, 3 and 2",
        )  # fmt: skip
    if settings.flush == "async" and settings.write_quorum == 1:
        yield Finding(
            WARNING, "settings of the broker", "flush=async with write_quorum=1",
            "a power failure loses messages that were acknowledged", "set flush=sync, or more copies",
        )  # fmt: skip


async def diagnose(broker: Broker, known: Mapping[str, str]) -> Diagnosis:
    """`known`: what the process knows of itself and its cluster, by subject; as /health."""
    settings = broker.settings
    findings = [
        _explained(subject, reason)
        for subject, reason in known.items()
        if not subject.startswith(("subscription ", "topic "))  # these are looked at below
    ]
    findings += _of_settings(settings, alone=broker.ownership.alone)
    count = 0
    async for topic in _loaded(broker):
        count += 1
        if topic.not_served is None and len(findings) < _MOST_FINDINGS:
            findings += _of_topic(topic)
    return Diagnosis(
        broker=settings.name,
        now_ms=broker.clock.now_ms(),
        topics=count,
        settings={name: getattr(settings, name) for name in _ALIKE},
        findings=findings,
    )


async def _loaded(broker: Broker) -> AsyncIterator[Topic]:
    """All topics that are loaded, in turns of the loop."""
    for number, topic in enumerate(list(broker.topics.values()), 1):
        yield topic
        if number % _TOPICS_PER_TURN == 0:
            await asyncio.sleep(0)


async def busy_topics(broker: Broker) -> AsyncIterator[BusyTopic]:
    """All that are loaded, in turns of the loop."""
    async for topic in _loaded(broker):
        yield _busy_topic(topic)


async def busiest(broker: Broker, count: int) -> Busiest:
    """The `count` topics with most messages in and out, and the subscriptions with the largest backlogs."""
    topics: list[BusyTopic] = []
    waiting: list[tuple[int, int, _Seen]] = []
    async for topic, subscriptions in _look(broker):
        topics.append(_busy_topic(topic))
        for seen in subscriptions:
            push = heapq.heappush if len(waiting) < count else heapq.heappushpop
            push(waiting, (seen.backlog, id(seen.subscription), seen))
    return Busiest(
        broker=broker.settings.name,
        topics=len(topics),
        connections=len(broker.connections),
        totals=BusyTopic("", **_sums(topics)),
        busiest_topics=heapq.nlargest(
            count, topics, key=lambda one: one.message_rate_in + one.message_rate_out
        ),
        largest_backlogs=[_busy_subscription(seen) for *_, seen in sorted(waiting, reverse=True)],
    )


async def busy_namespace(broker: Broker, namespace: str) -> dict[str, float]:
    """Sums over those of its topics that are loaded here; the backlog is estimated."""
    topics: list[BusyTopic] = []
    backlogs: list[int] = []
    async for topic, subscriptions in _look(broker, namespace):
        topics.append(_busy_topic(topic))
        backlogs += [seen.backlog for seen in subscriptions]
    more = {"loaded_topics": len(topics), "subscriptions": len(backlogs), "backlog_messages": sum(backlogs)}
    return _sums(topics) | more


async def _look(broker: Broker, namespace: str = "") -> AsyncIterator[tuple[Topic, list[_Seen]]]:
    """What is loaded, in turns of the loop, with the durable subscriptions."""
    async for topic in _loaded(broker):
        if namespace in ("", topic.name.full_namespace):
            yield topic, _seen(topic)


def _sums(topics: list[BusyTopic]) -> dict[str, Any]:
    return {name: sum(getattr(one, name) for one in topics) for name in BusyTopic.__struct_fields__[1:]}


def _busy_topic(topic: Topic) -> BusyTopic:
    message_in, byte_in, message_out, byte_out, _ = topic.rates.per_second
    return BusyTopic(
        str(topic.name),
        message_in,
        byte_in,
        message_out,
        byte_out,
        topic.ledger.list.size,
        len(topic.producers),
        len(topic.subscriptions.consumers),
    )


def _busy_subscription(seen: _Seen) -> BusySubscription:
    subscription = seen.subscription
    slowest = max(subscription.consumers, key=lambda one: one.unacked_messages, default=None)
    held = 0 if slowest is None else slowest.unacked_messages
    rates = subscription.rates.per_second
    return BusySubscription(
        topic=str(seen.topic.name),
        subscription=subscription.name,
        backlog_messages=seen.backlog,
        oldest_ms=seen.age_ms,
        message_rate_out=rates[0],
        acknowledge_rate=rates[3],
        slowest_consumer=slowest.name if slowest is not None and held else "",
        unacked_messages=held,
    )


def bookie_rows(bookies: Bookies | None) -> list[BookieRow]:
    """Those that take entries, and the others with the reason."""
    if bookies is None:
        return []
    reasons = {**dict.fromkeys(bookies.writable(), ""), **bookies.refusals()}
    return [_bookie_row(bookies, name, reason) for name, reason in sorted(reasons.items())]


def _bookie_row(bookies: Bookies, name: str, reason: str) -> BookieRow:
    address = ""
    with contextlib.suppress(BookieUnavailable):
        address = format_address(bookies.address(name))
    return BookieRow(name, address, not reason, reason, bookies.free_bytes(name), *bookies.labels(name))
