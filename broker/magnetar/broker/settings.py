"""Settings of the broker: frozen data. Sizes in bytes, times as their suffix says.

Defaults are those that users of Pulsar know.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from magnetar.ledger.core.quorum import check_quorums
from magnetar.proto.batch import GROUP_OVERHEAD_BYTES
from magnetar.proto.errors import InvalidArgument, InvalidSetting
from magnetar.proto.frames import DEFAULT_MAX_MESSAGE_BYTES
from magnetar.proto.ids import MAX_ENTRY_ID, require_plain_name
from magnetar.proto.policies import PlacementGroup, check_retention
from magnetar.proto.policy_table import BY_POLICY, UNLIMITED
from magnetar.proto.quorums import MAX_ENSEMBLE_SIZE

MIB = 1024 * 1024
# A ledger younger than `min_ledger_age_ms` may hold this many times `max_ledger_entries` or `max_ledger_bytes`.
HARD_LEDGER_LIMIT = 4
UNNAMED = "standalone"  # a broker that was given no name
MAX_LEDGER_ENTRIES = MAX_ENTRY_ID // HARD_LEDGER_LIMIT
# What 0 means, of the settings that may be 0.
_ZERO = {
    "max_unacked_messages_per_consumer": "switches the cap off",
    "max_unacked_messages_per_subscription": "switches the cap off",
    "topic_idle_unload_ms": "keeps topics loaded",
    "attach_min_bytes": "attaches every batch",
    "min_ledger_age_ms": "lets a full ledger be left at once",
    "max_inline_cursor_bytes": "keeps cursors out of their metadata nodes",
    "archive_read_bytes_per_s": "sets no bound",
    "retention_ms": "keeps nothing that is acknowledged",
    "retention_bytes": "keeps nothing that is acknowledged",
    "message_ttl_ms": "lets messages wait for ever",
    "max_delivery_delay_ms": "sets no limit",
    "max_delayed_messages": "sets no limit",
    "compaction_threshold_bytes": "compacts topics only when asked",
    "compaction_tombstone_retention_ms": "leaves no message that deletes its key",
    "minimum_write_quorum": "refuses ledgers while there are fewer bookies than ensemble_size",
    "pulsar_port": "opens no port for Pulsar's protocol",
    "exclusive_grace_ms": "gives it at once to the first that waits",
    "ledger_change_spread_ms": "has all topics change their ledgers at once",
}
_MAY_BE_UNLIMITED = ("retention_ms", "retention_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """Defaults suit standalone; a cluster sets ensemble_size, write_quorum and ack_quorum to 2/2/2 or more."""

    name: str = UNNAMED
    cluster_name: str = (
        "standalone"  # as tenants and namespaces say where they may be served, and Pulsar's metrics where
    )
    service_url: str = "magnetar://127.0.0.1:7650"  # what a lookup answers
    http_url: str = (
        "http://127.0.0.1:8080"  # the same of HTTP: requests for a topic are redirected to its broker's
    )
    # Pulsar's own protocol, on the same host as the native one; 0: it is not spoken.
    pulsar_port: int = 6650
    pulsar_url: str = ""  # what its look-ups answer; "": pulsar_port at the host of service_url
    # Its clients stay on the URL that they were given, and connect to brokers through that: behind NAT, or a proxy.
    pulsar_through_service_url: bool = False
    # In a cluster. A broker's name is unique there; one that keeps the default is named HOST:PORT of its service URL.
    zone: str = ""
    group: str = ""  # namespaces can be confined to the brokers of a group (the policy broker_group)
    default_bundles: int = 4  # of a namespace that nobody divided yet
    auto_create_topics: bool = True
    # The first topic in a namespace that does not exist makes it, and its tenant. false: it is refused.
    auto_create_namespaces: bool = True
    # Whether a namespace that has topics, or a tenant that has namespaces, can be deleted with all of them. Pulsar:
    # forceDeleteNamespaceAllowed, forceDeleteTenantAllowed.
    allow_forced_deletion: bool = False

    # Durability of topics for which neither they nor their namespaces have such a policy (`magnetar.proto.policies`).
    ensemble_size: int = 1
    write_quorum: int = 1
    ack_quorum: int = 1
    # With fewer writable bookies than ensemble_size, ledgers go to those that are left, so many at least. What is not given
    # follows from [ledger] minimum_write_quorum.
    minimum_write_quorum: int = 0
    flush: str = "sync"
    bookie_group: str = ""
    # With flush=async: what was acknowledged is synced within this time, and what that takes at the bookies.
    flush_interval_ms: int = 50
    # Topics whose ledgers do not fit any more (bookies are back, policies changed) begin new ones, each at its own moment
    # within this time: thousands of ledgers at once would stall the metadata store.
    ledger_change_spread_ms: int = 30_000

    memory_budget_bytes: int = 256 * MIB
    tail_cache_share: float = 0.2  # of the memory budget, over all topics
    publish_share: float = 0.25  # of the memory budget: queued and unconfirmed messages over all topics
    max_topic_publish_bytes: int = 16 * MIB  # queued and unconfirmed of one topic; then reading pauses

    # Non-persistent topics keep their newest messages in memory: all of them together a share of the memory budget, and each
    # one so much. Who is further behind loses messages, which are counted.
    non_persistent_share: float = 0.1
    max_non_persistent_topic_bytes: int = 16 * MIB

    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES  # bookies must take entries of max_group_bytes
    max_entry_bytes: int = 768 * 1024  # coalescing stops here; a larger single group is an entry of its own
    # How long a producer that opens again waits until what it sent before is stored or refused; then QuorumLost.
    producer_drain_timeout_ms: int = 10_000
    # So long those who wait for exclusive access leave the topic to the producers that had it, if their connections were
    # lost or it has just been loaded. Whoever asks for access without waiting for it gets it at once.
    exclusive_grace_ms: int = 1_000
    max_outstanding_entries: int = 4  # appended and not confirmed, per topic
    max_outstanding_bytes: int = 4 * MIB

    max_ledger_entries: int = 50_000
    max_ledger_bytes: int = 2 * 1024 * MIB
    max_ledger_age_ms: int = 240 * 60_000
    min_ledger_age_ms: int = 10 * 60_000  # until then a ledger may hold HARD_LEDGER_LIMIT times as much
    maintenance_interval_s: float = 120.0
    # A topic that nobody uses for so long is unloaded in the next round of maintenance: no producers, consumers, leases or
    # staged ledgers, and no request. Its next use loads it again. Unloading closes its ledger: at an hour, a topic to which
    # somebody writes now and then gets 24 ledgers a day at most. 0: topics stay loaded.
    topic_idle_unload_ms: int = 60 * 60_000

    # Policies of topics for which neither they nor their namespaces have any (`magnetar.proto.policies`). Pulsar:
    # defaultRetentionTimeInMinutes, defaultRetentionSizeInMB, ttlDurationDefaultInSeconds.
    retention_ms: int = 0
    retention_bytes: int = 0
    message_ttl_ms: int = 0
    max_delivery_delay_ms: int = 0
    max_delayed_messages: int = 0
    message_expiry_interval_s: float = 300.0  # how often it is looked for what has waited longer than its TTL

    read_bytes: int = 1 * MIB  # one read of a consumer that is behind the cache
    read_ahead_bytes: int = 4 * MIB  # read and not yet dispatched, per subscription
    # Of the memory budget: what was read last, over all topics, for other subscriptions that read the same.
    shared_read_share: float = 0.1

    # Archived ledgers are read from their files by helper processes. All topics of the broker together read so much.
    archive_read_bytes_per_s: int = 32 * MIB
    archive_read_timeout_ms: int = 30_000  # for one read of `read_bytes`; then the helper process is killed
    archive_reader_idle_ms: int = 60_000  # a helper process that nobody asks for so long is ended

    # Messages delivered and not acknowledged where acknowledgements are individual; then nothing is delivered until half of
    # them are acknowledged. 0: no cap. Pulsar: maxUnackedMessagesPerConsumer, maxUnackedMessagesPerSubscription.
    max_unacked_messages_per_consumer: int = 50_000
    max_unacked_messages_per_subscription: int = 200_000
    # A consumer of higher priority takes a failover subscription over after this time, in which the acknowledgements of the
    # one before arrive. Pulsar: activeConsumerFailoverDelayTimeMillis.
    failover_delay_ms: int = 1_000
    # An entry that could not be read so often is unreadable: dispatch stops there, visibly, and goes on trying; or, if its
    # data is lost and the policy is "skip", it is acknowledged and counted. Pulsar: autoSkipNonRecoverableData.
    max_entry_read_attempts: int = 10
    unreadable_entry_policy: str = "stop"

    cursor_flush_interval_ms: int = 100  # acknowledgements without receipt may wait this long
    max_cursor_ledger_entries: int = 10_000
    max_cursor_ranges: int = 200_000  # then a subscription gets no new messages until gaps close
    max_inline_cursor_bytes: int = 64 * 1024  # a smaller cursor is kept in its metadata node at closing

    # Of topics for which neither they nor their namespaces have this policy. What is known of producers is stored after so
    # many entries, or after a while; who has stored nothing for so long, or longest of too many, is forgotten, but for those
    # that are connected. Pulsar: brokerDeduplicationEnabled and those that begin like it.
    deduplication: bool = False
    deduplication_snapshot_entries: int = 1_000
    deduplication_snapshot_interval_ms: int = 120_000
    deduplication_producer_ttl_ms: int = 6 * 3_600_000
    deduplication_max_producers: int = 10_000  # per topic

    # Ledgers kept for readers that go to the bookies; so long after a load nothing is trimmed.
    max_lease_ms: int = 15 * 60_000
    max_leases: int = 1_000  # per topic
    staged_ttl_ms: int = 10 * 60_000  # staged ledgers whose transaction was not heard of are deleted
    max_staged_ttl_ms: int = 24 * 3_600_000  # the longest time that a writer may ask for instead
    max_staged_ledgers: int = 10_000  # per topic
    # A batch of less is published as one entry, if it can be, and not attached: a stream of small batches adds no ledgers.
    # Bookies must take entries of that size; what is not given follows from [bookie] max_entry_bytes.
    attach_min_bytes: int = 12 * MIB
    attached_query_ms: int = 30 * 24 * 3_600_000  # so long the last batch of a query is remembered
    max_attached_queries: int = 1_000  # per topic

    # Topic compaction. So many bytes behind what was compacted last make a topic be compacted by itself; 0: only when asked.
    compaction_threshold_bytes: int = 0
    # Most keys that may have changed since the last compaction, and most messages that one may leave. While a compaction
    # runs it takes some 200 bytes of memory for each changed key; a compacted topic that is read 30 for each entry left.
    compaction_max_keys: int = 500_000
    max_compactions: int = 1  # at once, over all topics
    compaction_keyless: str = "keep"  # messages without a key; "drop" leaves them out, as Pulsar does
    # So long a message that deletes its key is there for readers that were away; it is gone in the next compaction after.
    compaction_tombstone_retention_ms: int = 24 * 3_600_000

    # Topics, and durable subscriptions, that /metrics has rows for; the others are summed in one.
    max_topic_metrics: int = 1_000

    max_requests_per_connection: int = 1_000
    # Pattern subscriptions that learn of new topics at once; others list them.
    max_watches_per_connection: int = 100
    retry_initial_ms: int = 50
    retry_max_ms: int = 5_000

    def __post_init__(self) -> None:
        check_quorums(self.ensemble_size, self.write_quorum, self.ack_quorum)
        for field in fields(self):
            value = getattr(self, field.name)
            if value == UNLIMITED and field.name in _MAY_BE_UNLIMITED:
                continue
            if not isinstance(value, bool | str) and value <= 0 and not (value == 0 and field.name in _ZERO):
                zero = _ZERO.get(field.name)
                wanted = "be positive" if zero is None else f"not be negative; 0 {zero}"
                raise InvalidSetting(f"broker setting {field.name} is {value}: it must {wanted}")
        if not self.name:
            raise InvalidSetting("broker setting name is ''; it must be a plain name")
        require_plain_name("broker setting name", self.name)
        require_plain_name("broker setting cluster_name", self.cluster_name)
        if self.unreadable_entry_policy not in ("stop", "skip"):
            raise InvalidSetting(
                f"broker setting unreadable_entry_policy must be 'stop' or 'skip', not {self.unreadable_entry_policy!r}"
            )
        try:
            check_retention(self.retention_ms, self.retention_bytes)
        except InvalidArgument as error:
            raise InvalidSetting(f"broker settings: {error.message}") from None
        try:
            BY_POLICY["flush"].check("flush", self.flush)
            PlacementGroup.parse(self.bookie_group)
        except InvalidArgument as error:
            raise InvalidSetting(f"broker setting {error.message}") from None
        if self.minimum_write_quorum > MAX_ENSEMBLE_SIZE:
            raise InvalidSetting(
                f"broker setting minimum_write_quorum is {self.minimum_write_quorum}: it must be a number of bookies, at "
                f"most {MAX_ENSEMBLE_SIZE}, or 0 (off)"
            )
        if self.compaction_keyless not in ("keep", "drop"):
            raise InvalidSetting(
                f"broker setting compaction_keyless must be 'keep' or 'drop', not {self.compaction_keyless!r}"
            )
        if self.min_ledger_age_ms > self.max_ledger_age_ms:
            raise InvalidSetting(
                f"broker setting min_ledger_age_ms={self.min_ledger_age_ms} must not exceed "
                f"max_ledger_age_ms={self.max_ledger_age_ms}"
            )
        if self.max_ledger_entries > MAX_LEDGER_ENTRIES:
            raise InvalidSetting(f"broker setting max_ledger_entries must not exceed {MAX_LEDGER_ENTRIES}")
        for name in ("tail_cache_share", "publish_share", "shared_read_share", "non_persistent_share"):
            if getattr(self, name) >= 1:
                raise InvalidSetting(f"broker setting {name} is a share: it must be less than 1")

    @property
    def bookies_needed(self) -> int:
        """So many must take entries, or no ledger can be made by these settings."""
        return min(self.minimum_write_quorum, self.write_quorum) or self.ensemble_size

    def lack_of_bookies(self, writable: int) -> str:
        """Why no ledger can be made while so many bookies take entries; "" if one can."""
        if writable >= self.bookies_needed:
            return ""
        return f"{writable} bookies take entries, and broker.ensemble_size={self.ensemble_size} needs {self.bookies_needed}"

    @property
    def pulsar_url_for_clients(self) -> str:
        """Where Pulsar's clients connect; "": nowhere."""
        host = self.service_url.partition("://")[2].rpartition(":")[0]
        return (self.pulsar_url or f"pulsar://{host}:{self.pulsar_port}") if self.pulsar_port else ""

    @property
    def max_group_bytes(self) -> int:
        """A group may be as large as the largest message and what stands around it."""
        return self.max_message_bytes + GROUP_OVERHEAD_BYTES

    @property
    def tail_cache_bytes(self) -> int:
        """Budget of the tail cache."""
        return int(self.memory_budget_bytes * self.tail_cache_share)

    @property
    def shared_read_bytes(self) -> int:
        """Budget of what was read last."""
        return int(self.memory_budget_bytes * self.shared_read_share)

    @property
    def non_persistent_bytes(self) -> int:
        """Bound of what non-persistent topics have in memory."""
        return int(self.memory_budget_bytes * self.non_persistent_share)

    @property
    def publish_bytes(self) -> int:
        """Bound of what is queued or unconfirmed over all topics."""
        return int(self.memory_budget_bytes * self.publish_share)
