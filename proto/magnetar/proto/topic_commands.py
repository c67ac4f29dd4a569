"""Commands about topics and subscriptions as a whole: administration, and the ledgers of which a topic is made (48 to 74);
about the brokers of a cluster and the bundles that they own (76 to 80; broker/CLUSTER.md explains the words); and about
partitioned topics as a whole (81 to 83), which any broker answers; and about the end of a topic (84).

By the ledgers, Spark and other clients of the bookies learn and change what a topic consists of. A ledger has a
position id, which message ids carry and which grows along the topic, and a stored id, by which bookies and ledger metadata
know it. They differ where a staged ledger was attached (WIRE.md).
"""

from __future__ import annotations

from typing import Any

from .command import Command


class ListTopics(Command, tag=48):
    """Ok: {"topics": [full name, ...], "more": bool}, sorted, from the name after `after` on. Empty namespace: all.

    The broker bounds `count`; 0: as many as it gives.
    """

    namespace: str = ""
    after: str = ""
    count: int = 0


class TopicStats(Command, tag=49):
    """Ok: a map of figures (WIRE.md)."""

    topic: str


class CreateTopic(Command, tag=50):
    """Ok: null. With `partitions` a partitioned topic; AlreadyExists if there is one with another number of partitions."""

    topic: str
    partitions: int = 0


class DeleteTopic(Command, tag=51):
    """Ok: null. Refused while producers or consumers are connected unless `force`. `dry`: only that is looked at.

    Of a partitioned topic the broker deletes the record; its partitions are topics of their own. Ok: {"partitions":
    [number, ...]}: those that are to be deleted before this is asked again; once that is empty the topic is deleted.
    """

    topic: str
    force: bool = False
    dry: bool = False


class DeleteSubscription(Command, tag=52):
    """Ok: null. Refused while consumers are connected unless `force`."""

    topic: str
    subscription: str
    force: bool = False


class GetPolicies(Command, tag=53):
    """Policies of a topic, of a namespace (`topic` ""), or for all brokers (both "").

    Ok: {"policies": map, "version": int, "in_force": [[policy, subscription or "", value, source], ...]}: what is set here,
    a number that rises with each change, and what holds in the end, with the level that says so: "topic", "namespace" or
    "broker".
    """

    topic: str
    namespace: str = ""


class ChangePolicies(Command, tag=54):
    """Changes those policies of a topic, of a namespace, or for all brokers, that the payload names. Ok: {"version": int}.

    The payload is a msgpack map; nil takes a policy back. A policy that the broker does not know is refused.
    """

    topic: str
    namespace: str = ""


class CreateSubscription(Command, tag=55):
    """A durable subscription without a consumer. Ok: null, when it is durable. AlreadyExists if there is one of the name.

    `start`: see Seek. The topic is made if the broker's settings allow it.
    """

    topic: str
    subscription: str
    start: tuple[str, Any] = ("latest", None)


class SeekSubscription(Command, tag=56):
    """Moves a durable subscription, whoever is connected. Ok: {"epoch": int}, when it is durable.

    `start`, and what consumers learn of it: see Seek.
    """

    topic: str
    subscription: str
    start: tuple[str, Any]


class SkipMessages(Command, tag=57):
    """Acknowledges the next `count` messages that a durable subscription has not acknowledged, whoever holds them.

    Ok: {"skipped": int, "mark_delete": [ledger, entry, index]}, when it is durable; fewer if there are no more.
    """

    topic: str
    subscription: str
    count: int


class PeekMessages(Command, tag=58):
    """The next `count` messages that a subscription has not acknowledged; they are neither delivered nor counted.

    Ok: {"entries": [[ledger, entry, redelivery count, [[first, last], ...], entry slice as bytes], ...]}: parts of
    entries as Deliver carries them; the ranges are what in the slice is not meant, by index in the stored entry. The
    broker bounds `count` and the bytes, so that there may be fewer than asked for.
    """

    topic: str
    subscription: str
    count: int = 1


class ClearBacklog(Command, tag=59):
    """As SkipMessages, of all that is stored now. Ok: the same; `skipped` is then an upper bound."""

    topic: str
    subscription: str


class ExpireMessages(Command, tag=60):
    """Acknowledges, in a durable subscription, all that the topic stored before `before_ms` (ms since the epoch).

    Ok: {"moved": bool, "messages": int, "mark_delete": [ledger, entry, index]}, once it is durable. `messages`: how many
    lie between the old mark-delete position and the new one, whether they were acknowledged before or not.
    """

    topic: str
    subscription: str
    before_ms: int


class WatchTopics(Command, tag=61):
    """From now on the broker tells by TopicsChanged which topics of the namespace are made and deleted. Ok: null.

    The peer chooses `watch_id`, which is another one for each watch of a connection. An empty namespace ends the watch.
    """

    watch_id: int
    namespace: str = ""


class TopicsChanged(Command, tag=62):
    """From the broker: what became of topics of a watched namespace, in a payload: a msgpack map {full name: exists}.

    `list_again`: changes were left out; the payload is empty, and only a new list can tell what there is.
    """

    watch_id: int
    list_again: bool = False


class CompactTopic(Command, tag=63):
    """Ok: the state of the topic's compaction (WIRE.md).

    `action`: "start" begins one unless one is under way, "remove" gives compaction up and deletes what the last one left,
    "status" does nothing.
    """

    topic: str
    action: str = "start"


# --- topics as ledgers -----------------------------------------------------------------------------------------------


class TopicLedgers(Command, tag=64):
    """The ledgers of a topic, for readers that go to the bookies themselves. The broker bounds `count` and the bytes.

    Ok: {"ledgers": [[position id, stored id, first index, entries, messages, bytes, first append ms, last append ms,
    closed, ledger metadata as bytes], ...], "more": bool, "end": [ledger, entry, index], "bookies": {id: "host:port"},
    "identities": {id: [cluster, bookie id, instance, start, incarnation]}, "end_offset": int, "created_ms": int}; ledgers
    with a position id above `after`, in the order of the topic. All `entries` are confirmed and never change. A topic that
    was deleted and made again has another `created_ms`.
    """

    topic: str
    after: int = -1
    count: int = 1000


class AttachLedgers(Command, tag=65):
    """Publishes closed staged ledgers, in the order given, as a batch of a query; all of it becomes visible at once.

    Payload: msgpack array of [stored id, messages, first append ms, last append ms]. Ok: {"attached": bool, "first":
    position id of the first ledger or null, "end": [ledger, entry, index]}. `attached` false: the topic has this batch,
    and what of these ledgers is still staged was discarded. `content`: a digest of the rows, whatever their order (64
    bits). With it the last batch is the same one only if both digests are, and anything else whose number is not above the
    last one raises InvalidArgument; without (0) every such number is found done.
    """

    topic: str
    query: str
    batch: int
    remember_ms: int = 0
    content: int = 0


class KeepLedgers(Command, tag=66):
    """A lease: ledgers with position ids from `first` on (-1: all) are not trimmed for `ttl_ms`; 0 ends it.

    Ok: {"lease": str, "ttl_ms": int, "first": position id of the first ledger that it holds, or null}. An empty `lease`
    makes one; to renew it, name it, with `first` -1 to leave that as it is.
    """

    topic: str
    lease: str = ""
    ttl_ms: int = 0
    first: int = -1


class CreateStagedLedger(Command, tag=67):
    """A ledger that the asking side writes to the bookies and that is not part of the topic before it is attached.

    Ok: {"ledger": stored id, "version": int, "metadata": bytes, "bookies": {id: "host:port"},
    "writable": [[id, "host:port", rack, zone], ...], "identities": as TopicLedgers}. `ttl_ms` is for its transaction, as in
    KeepStaged, but never shortens what that has.
    """

    topic: str
    transaction: str
    ttl_ms: int = 0


class GetLedgerMetadata(Command, tag=68):
    """Ledger metadata of a staged ledger, or of one that belongs to the topic. Ok: as CreateStagedLedger."""

    topic: str
    ledger: int


class PutLedgerMetadata(Command, tag=69):
    """Compare-and-set of the metadata of a staged ledger that is not closed. Payload: the metadata. Ok: {"version": int}.

    VersionConflict when another version is stored, unless that is just what is to be written.
    """

    topic: str
    ledger: int
    version: int


class KeepStaged(Command, tag=70):
    """The transaction goes on: its staged ledgers are not swept for `ttl_ms` (0: the broker's staged_ttl_ms).

    Ok: {"ttl_ms": int, "ledgers": int}: what was granted, and how many there are.
    """

    topic: str
    transaction: str
    ttl_ms: int = 0


class DiscardStaged(Command, tag=71):
    """Deletes staged ledgers of a transaction: those of the payload, a msgpack array of stored ids; all without payload.

    Ok: {"discarded": int}. What is attached, or not known, is skipped.
    """

    topic: str
    transaction: str


class QueryState(Command, tag=72):
    """The last batch of a query that was attached to the topic. Ok: {"batch": int}, -1 if none is known."""

    topic: str
    query: str


class ArchiveLedgers(Command, tag=73):
    """Closed ledgers whose messages are in files leave the bookies: from then on TopicLedgers says where the archive is.

    Payload: msgpack array of [position id, stored id, entries, messages], in the order of the topic: as the files have them.
    Ok: {"archived": int, "known": int, "moved": int, "gone": [position id, ...], "kept": [position id, reason] or null}:
    how many were archived now, were so before, and were so at another location, which is an error unless `moved` says that
    this one takes its place; which were trimmed before; and the first one that stays, with all after it, because somebody
    needs it at the bookies. The lease of this name is no reason, and with `with_backlog` neither are subscriptions and
    readers, which read archived ledgers through the broker. `dry`: nothing is done. Refused if a ledger is not what its row
    says.
    """

    topic: str
    location: str
    lease: str = ""
    dry: bool = False
    moved: bool = False
    with_backlog: bool = False


class ReportDamage(Command, tag=74):
    """Asks for copies of entries to be healed that an audit found wanting: they come into the repair queue.

    Payload: msgpack array of [stored id, bookie, first entry, last entry, reason]; both ends included, all of them entries
    of ledgers of the topic whose ensemble has the bookie. Ok: {"queued": int, "known": int}: nodes of the queue, one for
    each bookie and ledger, that were written, and that named these entries before. Nothing is written if a row is refused.
    """

    topic: str


# --- a cluster: any broker answers; one that is alone, as in standalone, as a cluster of one ---------------------------


class ListBrokers(Command, tag=76):
    """Ok: {"brokers": [{"name", "url", "zone", "group", "state", "started_ms", "version", "load"}, ...], "balancer"}.

    By name. `state`: ready, draining, stopping.
    """


class ListBundles(Command, tag=77):
    """Ok: {"bundles": [{"bundle": "tenant/ns/range", "broker", "url", "to"}, ...]}; empty names where nobody owns it."""

    namespace: str


class UnloadBundle(Command, tag=78):
    """Its owner hands the bundle over to the broker named `to`, or to one that placement chooses. Ok: null, when it is done.

    `bundle` is "tenant/ns/range", or a topic, which means its bundle. Without `to` nothing happens if nobody owns it.
    InvalidArgument for a bundle or a broker that is not there.
    """

    bundle: str
    to: str = ""


class SplitBundle(Command, tag=79):
    """Divides a bundle in two, by its topics if they are loaded. Ok: {"bundles": [its parts]}, when it is done."""

    bundle: str


class Drain(Command, tag=80):
    """A broker or a bookie, or all of a zone, hand over all they have, and get nothing until `undo`.

    Ok: {"brokers": [names], "bookies": [names], "bundles": how many these brokers own, "ledgers": how many name one of these
    bookies, "open_ledgers": how many of them are open, "notes": {ledger: why it could not be copied}}. `kind` is "broker" or
    "bookie", where one of each has the name. InvalidArgument when there is none, or the others could not hold all that.
    """

    name: str = ""
    zone: str = ""
    kind: str = ""
    undo: bool = False


# --- partitioned topics ----------------------------------------------------------------------------------------------


class UpdatePartitions(Command, tag=81):
    """The partitioned topic has this many partitions from now on. Ok: {"partitions": int}.

    InvalidArgument for fewer than it has, TopicNotFound unless it is a partitioned topic.
    """

    topic: str
    partitions: int


class WatchPartitions(Command, tag=82):
    """From now on the broker tells by PartitionsChanged how many partitions the topic has. Ok: {"partitions": int}, as 17.

    The peer chooses `watch_id`, which is another one for each watch of a connection. An empty topic ends the watch.
    """

    watch_id: int
    topic: str = ""


class PartitionsChanged(Command, tag=83):
    """From the broker: a watched topic has this many partitions now; 0: it is not, or no longer, a partitioned topic."""

    watch_id: int
    partitions: int = 0


class TerminateTopic(Command, tag=84):
    """The topic takes no more messages, for good. Ok: the id of its last message, or null; the same each time.

    Answered once everything that was queued before is stored or refused, and the end is durable.
    """

    topic: str


# --- tenants, namespaces, clusters -------------------------------------------------------------------------------------


class Administer(Command, tag=85):
    """A `verb` (list, get, create, ...) of a `kind` (tenants, namespaces, clusters). Payload, Ok: by both (WIRE.md)."""

    kind: str
    verb: str
    name: str = ""  # of one; of `namespaces list`: their tenant


# --- what is wrong, who is busy --------------------------------------------------------------------------------------


class Diagnose(Command, tag=90):
    """Ok: what is wrong at this broker: a map (WIRE.md)."""


class ListBusiest(Command, tag=91):
    """Ok: the busiest topics and the largest backlogs of this broker, `count` of each: a map (WIRE.md)."""

    count: int = 10


class ListBookies(Command, tag=92):
    """Ok: {"bookies": [{"name", "address", "writable", "reason", "free_bytes", "rack", "zone", "group"}, ...]}, by name."""
