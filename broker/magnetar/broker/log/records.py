"""What the broker keeps in metadata of a topic: its ledger list, its staged ledgers (FORMATS.md).

Values are msgpack maps with a format number, rows in them are arrays; the structures below are both what is stored and what
the broker works with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Generic, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from magnetar.metadata import MetadataStore
from magnetar.metadata.record import Record
from magnetar.metadata.store import Check, Create, Put
from magnetar.proto.errors import (
    AlreadyExists,
    InvalidArgument,
    MagnetarError,
    NotFoundInStore,
    VersionConflict,
)
from magnetar.proto.ids import TopicName
from magnetar.proto.policies import Policies

from ..cursors.core.acks import Position

NO_POLICIES = Policies()
ABSENT = -1  # version of what has no node
_MAX_RECORD_BYTES = 512 * 1024  # the store takes twice as much
TOPICS_ROOT = "/topics"
NAMESPACES_ROOT = "/namespaces"
PARTITIONED_ROOT = "/partitioned"
CLUSTERS_ROOT = "/clusters"
DELETIONS_ROOT = "/deletions"
SCHEMAS_ROOT = "/schemas"
IF_EMPTY, FORCED = "if empty", "forced"  # see `NamespaceRecord.deletion`


def topic_path(name: TopicName) -> str:
    """Metadata path of the ledger list."""
    return f"{TOPICS_ROOT}/{name.tenant}/{name.namespace}/{name.domain}/{name.name}"


def segments_path(name: TopicName) -> str:
    """Metadata path whose children are the sealed segments of the ledger list."""
    return f"{topic_path(name)}/segments"


def segment_path(name: TopicName, number: int) -> str:
    """Metadata path of a sealed segment of the ledger list."""
    return f"{segments_path(name)}/{number:020d}"


def cursors_path(name: TopicName) -> str:
    """Metadata path whose children are the durable subscriptions."""
    return f"{topic_path(name)}/cursors"


def cursor_path(name: TopicName, subscription: str) -> str:
    """Metadata path of one cursor's pointer."""
    return f"{cursors_path(name)}/{subscription}"


def log_states_path(name: TopicName) -> str:
    """Metadata path whose children are the states that follow from the topic's log (`topics.log_state`)."""
    return f"{topic_path(name)}/states"


def log_state_path(name: TopicName, kind: str) -> str:
    """Metadata path of one such state's pointer."""
    return f"{log_states_path(name)}/{kind}"


def staged_path(name: TopicName) -> str:
    """Metadata path whose children are the staged ledgers (`export.staging`)."""
    return f"{topic_path(name)}/staged"


def staged_ledger_path(name: TopicName, stored_id: int) -> str:
    """Metadata path that says that a ledger may be there and is not part of the topic yet."""
    return f"{staged_path(name)}/{stored_id:020d}"


def namespace_path(namespace: str) -> str:
    """Metadata path of what is laid down for a namespace, `tenant/namespace`."""
    return f"{NAMESPACES_ROOT}/{namespace}"


def tenant_path(tenant: str) -> str:
    """Metadata path of a tenant; its namespaces stand below, so that the store deletes none that has any."""
    return f"{NAMESPACES_ROOT}/{tenant}"


def cluster_path(cluster: str) -> str:
    """Metadata path of what is known of a cluster."""
    return f"{CLUSTERS_ROOT}/{cluster}"


def deletion_path(whole: str) -> str:
    """Metadata path that says that a tenant, or `tenant/namespace`, is being deleted; every broker watches all of them."""
    return f"{DELETIONS_ROOT}/{quote(whole, safe='')}"


def partitioned_path(name: TopicName) -> str:
    """Metadata path of a partitioned topic's record; its partitions have ledger lists of their own."""
    return f"{PARTITIONED_ROOT}/{name.tenant}/{name.namespace}/{name.domain}/{name.name}"


def schemas_path(name: TopicName) -> str:
    """Metadata path of the list of a topic's schemas, of which partitions and domains have none of their own."""
    return f"{SCHEMAS_ROOT}/{name.full_namespace}/{name.whole.name}"


def schema_path(name: TopicName, version: int) -> str:
    """Metadata path of one of these schemas."""
    return f"{schemas_path(name)}/{version:010d}"


class LedgerInfo(msgspec.Struct, array_like=True, gc=False):
    """One ledger of a topic. Counts are of confirmed entries, and final once `closed`.

    Its place in the topic and the ledger that is stored have ids of their own: a ledger that was staged and attached is
    older than what was appended beside it, and message ids must grow along the topic.
    """

    ledger_id: int  # the position id: in message ids and cursors, grows along the list
    first_index: int  # topic-wide index of its first message
    entries: int = 0
    messages: int = 0
    size: int = 0  # payload bytes
    first_append_ms: int = 0  # 0 while empty
    last_append_ms: int = 0
    closed: bool = False
    stored_id: int = -1  # of the ledger on the bookies; -1, when made: the position id

    def __post_init__(self) -> None:
        if self.stored_id < 0:
            self.stored_id = self.ledger_id


class AttachedQuery(NamedTuple):
    """What is remembered of a query that attached ledgers."""

    batch: int  # the last one
    used_ms: int  # when it was attached
    expires_ms: int  # forgotten from then on
    content: int = 0  # digest of the last batch's rows; 0: not given


class PublishedBatch(msgspec.Struct, array_like=True):
    """A small batch of a query: once `confirmed` the entry at this place, until then at it, behind it, or not there."""

    batch: int
    used_ms: int  # when this was recorded
    expires_ms: int
    ledger_id: int  # position id
    entry_id: int
    digest: bytes
    confirmed: bool = False
    content: int = 0  # as in AttachedQuery


class Segment(NamedTuple):
    """A sealed segment of the ledger list: `number` names its node, which holds ledgers `first` to `last`."""

    number: int
    first: int  # position ids
    last: int


class Archive(NamedTuple):
    """Archived ledgers in a row that are at one location: up to `last`, from behind the row before."""

    location: str  # of the archive, as a URI: whoever reads it finds the ledgers' manifests there
    last: int  # position id


class ArchivedLedger(NamedTuple):
    """A closed ledger whose messages are in files: not at the bookies any more, or not for long."""

    info: LedgerInfo  # as it was; final
    location: str


class CompactedLedger(msgspec.Struct, array_like=True, frozen=True):
    """What the last compaction of a topic left, and where."""

    ledger_id: int  # stored id; -1: no message is left
    horizon: tuple[int, int, int]  # the first message that it did not look at: all before were
    chunks: int  # entries that hold messages; index pages follow
    messages: int  # that are left
    size: int  # payload bytes
    compacted_ms: int  # when it was done


class TopicRecord(Record):
    """The head of the ledger list (`ledger_list` says how segments, trimmed ranges and archives belong together)."""

    ledgers: list[LedgerInfo]  # the last of the list; those before them are in `segments`
    segments: list[Segment]  # oldest first
    trimmed_ranges: list[
        tuple[int, int]
    ]  # position ids, both ends included: what segments hold and the topic does not
    archives: list[Archive]  # the beginning of the list, oldest first
    trimmed: list[int]  # stored ids of ledgers that are not read at the bookies and may not be deleted yet
    next_index: int  # topic-wide index after the last closed ledger
    created_ms: int
    deleting: bool  # the topic does not exist any more; its ledgers do
    properties: dict[str, str]
    attached: dict[str, AttachedQuery]  # by query
    # By query, beside what `attached` has of an earlier batch. Copies of the record share these: `confirmed` changes.
    publishing: dict[str, PublishedBatch]
    # The position behind the last message that was trimmed, by which whoever asks for an older one learns of it; of its last
    # entry all counts as trimmed if that could not be read then. (0, 0, 0): nothing was trimmed.
    trimmed_end: Position
    policies: Policies  # the topic's own
    policies_version: int  # rises with every change of them
    compaction: CompactedLedger | None  # None: the topic was never compacted, or is not any more
    compacting: int  # stored id of the ledger that a compaction writes, or wrote before a crash; -1: none
    topic_epoch: int  # of the exclusive producer that was let in last; it rises with each. -1: none was
    terminated: bool  # nothing follows the last ledger, which is closed
    last_message: Position | None  # of a terminated topic, as it was then; None: it had none

    @classmethod
    def new(cls, created_ms: int) -> TopicRecord:
        """The record of a topic without ledgers."""
        return cls(
            [], [], [], [], [], 0, created_ms, False, {}, {}, {}, (0, 0, 0), NO_POLICIES, 0, None, -1, -1, False, None
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.policies == NO_POLICIES:  # 0.6 KB less for each topic
            self.policies = NO_POLICIES

    def compacted_ledgers(self) -> list[int]:
        """Stored ids of the ledgers of compactions that there may be."""
        done = self.compaction
        return [one for one in (-1 if done is None else done.ledger_id, self.compacting) if one >= 0]

    @property
    def archived_through(self) -> int:
        """Position id of the last archived ledger, -1 if none is."""
        return self.archives[-1].last if self.archives else -1

    def last_of(self, query: str) -> AttachedQuery | None:
        """The last batch of a query that the topic has."""
        published = self.publishing.get(query)
        if published is not None and published.confirmed:
            return AttachedQuery(published.batch, published.used_ms, published.expires_ms, published.content)
        return self.attached.get(query)


class SegmentRecord(Record):
    """A sealed segment. It is written once, before a head names it, and deleted after none does."""

    ledgers: list[LedgerInfo]


class ClusterRecord(Record):
    """What Pulsar's tools say of a cluster, this one or another: kept for them, and used by nobody yet."""

    data: dict[str, Any]  # addresses and names as in its JSON
    peers: list[str]


class TenantRecord(Record):
    """A tenant's node."""

    admin_roles: list[str]
    allowed_clusters: list[str]
    created_ms: int
    deletion: str = ""  # as in NamespaceRecord


class NamespaceRecord(Record, omit_defaults=True):
    """A namespace's node; what has its default is not stored.

    Whoever makes a topic checks the version of this node in the same commit, so none is made once it says `deletion`.
    """

    policies: Policies
    created_ms: int = 0
    # Why it is being deleted: IF_EMPTY, which ends when a topic is found, or FORCED, with all it has. "": it is not.
    deletion: str = ""
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    permissions: dict[str, list[str]] = msgspec.field(default_factory=dict)  # actions by role
    # The same by topic, where topics have their own.
    topic_permissions: dict[str, dict[str, list[str]]] = msgspec.field(default_factory=dict)

    def with_permissions(self, topic: str, roles: dict[str, list[str]]) -> NamespaceRecord:
        """The same, where these are all that the topic has of its own."""
        others = {name: its for name, its in self.topic_permissions.items() if name != topic}
        return msgspec.structs.replace(self, topic_permissions=others | ({topic: roles} if roles else {}))


class PartitionedRecord(Record):
    """A partitioned topic: how many partitions it has, and what holds for all of them (`topics.partitions`)."""

    partitions: int  # that users see; 0: it is being made
    policies: Policies
    policies_version: int  # rises with every change of them
    created_ms: int
    properties: dict[str, str]
    deleting: bool  # the topic does not exist any more; some of its partitions may
    inactive: list[
        int
    ]  # partitions that, by their owners, nobody uses any more; all: see `tenancy.inactivity`

    @classmethod
    def new(cls, created_ms: int) -> PartitionedRecord:
        """The record of a topic that is being made."""
        return cls(0, Policies(), 0, created_ms, {}, False, [])


class SchemaRow(NamedTuple):
    """A version of a topic's schema."""

    type: int  # Pulsar's number
    fingerprint: bytes  # by which the same schema is found again


class SchemasRecord(Record):
    """The versions of a topic's schema. A version's node is made in the commit that adds its row."""

    first: int  # the number of the first one
    rows: list[SchemaRow]


class SchemaRecord(Record):
    """A version of a topic's schema, which never changes."""

    version: int
    type: int
    definition: bytes
    properties: dict[str, str]
    user: str  # who brought it, as far as that is known
    created_ms: int


class StagedRecord(Record):
    """A staged ledger's node: for whom it was made, and for how long it is kept unless it is heard of."""

    transaction: str
    created_ms: int
    ttl_ms: int


R = TypeVar("R", bound=Record)


class Stored(NamedTuple, Generic[R]):
    """A record as it was read."""

    record: R
    version: int  # of its node, or ABSENT

    def check(self, path: str) -> Check:
        """For a commit: nobody has changed it since."""
        return Check(path, None if self.version == ABSENT else self.version)

    def write(self, path: str, record: R) -> Create | Put:
        """For a commit: this takes its place."""
        value = record.encode()
        if len(value) > _MAX_RECORD_BYTES:
            raise InvalidArgument(
                f"{path} would have {len(value):,} bytes, and at most {_MAX_RECORD_BYTES:,} are kept: remove properties or "
                "permissions first"
            )
        return Create(path, value) if self.version == ABSENT else Put(path, value, self.version)


async def change(
    metadata: MetadataStore, path: str, read: Callable[[], Awaitable[Stored[R]]], edit: Callable[[R], R]
) -> Stored[R]:
    """What `edit` makes of the record takes its place, and is returned. Both may be called several times.

    By compare-and-set until nobody else changes the record meanwhile, so that no change is lost.
    """
    while True:
        found = await read()
        record = edit(found.record)
        if record == found.record:
            return found
        written = found.write(path, record)
        with contextlib.suppress(AlreadyExists, VersionConflict):
            if isinstance(written, Create):
                return Stored(record, await metadata.create(path, written.value))
            return Stored(record, await replace(metadata, path, written.value, found.version))


async def replace(metadata: MetadataStore, path: str, value: bytes, version: int) -> int:
    """Compare-and-set; returns the new version. If its outcome is not known, the node is read back: a node of the old
    version was not changed, also if it says already what it was to say.

    Raises VersionConflict when another owner changed or deleted the node, or what the store failed with.
    """
    try:
        return await metadata.put(path, value, version=version)
    except (VersionConflict, NotFoundInStore) as conflict:
        raise VersionConflict(f"{path} was changed by another owner") from conflict
    except MagnetarError:
        stored = await metadata.get(path)
        if stored is None or stored.value != value or stored.version == version:
            raise
        return stored.version
