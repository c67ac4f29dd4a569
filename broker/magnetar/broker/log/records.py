"""What the broker keeps in metadata: the ledger list of a topic and the pointer of a cursor (FORMATS.md).

Values are msgpack maps with a format number.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from magnetar.proto.errors import DataDirectoryError, MagnetarError, NotFoundInStore, VersionConflict
from magnetar.proto.ids import TopicName

from ..resources.stores import Metadata

FORMAT = 1
TOPICS_ROOT = "/topics"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


def topic_path(name: TopicName) -> str:
    """Metadata path of the ledger list."""
    return f"{TOPICS_ROOT}/{name.tenant}/{name.namespace}/{name.domain}/{name.name}"


def cursors_path(name: TopicName) -> str:
    """Metadata path whose children are the durable subscriptions."""
    return f"{topic_path(name)}/cursors"


def cursor_path(name: TopicName, subscription: str) -> str:
    """Metadata path of one cursor's pointer."""
    return f"{cursors_path(name)}/{subscription}"


def staged_path(name: TopicName) -> str:
    """Metadata path whose children are the staged ledgers (`export.staging`)."""
    return f"{topic_path(name)}/staged"


def staged_ledger_path(name: TopicName, stored_id: int) -> str:
    """Metadata path that says that a ledger may be there and is not part of the topic yet."""
    return f"{staged_path(name)}/{stored_id:020d}"


@dataclass(slots=True)
class LedgerInfo:
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

    def row(self) -> list[Any]:
        """As stored."""
        return [
            self.ledger_id, self.first_index, self.entries, self.messages, self.size,
            self.first_append_ms, self.last_append_ms, self.closed, self.stored_id,
        ]  # fmt: skip


class AttachedQuery(NamedTuple):
    """What is remembered of a query that attached ledgers."""

    batch: int  # the last one
    used_ms: int  # when it was attached
    expires_ms: int  # forgotten from then on
    content: int = 0  # digest of the last batch's rows; 0: not given


@dataclass(slots=True)
class PublishedBatch:
    """A small batch of a query: once `confirmed` the entry at this place, until then at it, behind it, or not there."""

    batch: int
    used_ms: int  # when this was recorded
    expires_ms: int
    ledger_id: int  # position id
    entry_id: int
    digest: bytes
    confirmed: bool = False
    content: int = 0  # as in AttachedQuery

    def row(self) -> list[Any]:
        """As stored, behind the query."""
        return [
            self.batch, self.used_ms, self.expires_ms, self.ledger_id, self.entry_id, self.digest, self.confirmed,
            self.content,
        ]  # fmt: skip


class ArchivedLedger(NamedTuple):
    """A closed ledger whose messages are in files: not at the bookies any more, or not for long."""

    info: LedgerInfo  # as it was; final
    location: str  # of the archive, as a URI: whoever reads it finds the ledger's manifest there


@dataclass(slots=True)
class TopicRecord:
    """The ledger list. `trimmed`: stored ids of ledgers that are not read at the bookies and may not be deleted yet.

    Archived ledgers are a list of their own, because everything but TOPIC_LEDGERS takes them for trimmed. They are the
    topic's beginning: the position id of each is below those of all `ledgers`.
    """

    ledgers: list[LedgerInfo] = field(default_factory=list)
    trimmed: list[int] = field(default_factory=list)
    next_index: int = 0  # topic-wide index after the last closed ledger
    created_ms: int = 0
    deleting: bool = False
    properties: dict[str, str] = field(default_factory=dict)
    attached: dict[str, AttachedQuery] = field(default_factory=dict)  # by query
    archived: list[ArchivedLedger] = field(default_factory=list)
    # By query, beside what `attached` has of an earlier batch. Copies of the record share these: `confirmed` changes.
    publishing: dict[str, PublishedBatch] = field(default_factory=dict)

    def last_of(self, query: str) -> AttachedQuery | None:
        """The last batch of a query that the topic has."""
        published = self.publishing.get(query)
        if published is not None and published.confirmed:
            return AttachedQuery(published.batch, published.used_ms, published.expires_ms, published.content)
        return self.attached.get(query)

    def encode(self) -> bytes:
        """The metadata value."""
        # A location stands once for all archived ledgers in a row that have it: it is longer than their figures.
        runs = itertools.groupby(self.archived, lambda one: one.location)
        return _encode(
            {
                "format": FORMAT,
                "ledgers": [info.row() for info in self.ledgers],
                "trimmed": self.trimmed,
                "next_index": self.next_index,
                "created_ms": self.created_ms,
                "deleting": self.deleting,
                "properties": self.properties,
                "attached": [[query, *state] for query, state in self.attached.items()],
                "archived": [[location, [one.info.row() for one in run]] for location, run in runs],
                "publishing": [[query, *state.row()] for query, state in self.publishing.items()],
            }
        )

    @classmethod
    def decode(cls, value: bytes, path: str) -> TopicRecord:
        """Raises DataDirectoryError."""
        fields = decode_map(value, path)
        try:
            return cls(
                [LedgerInfo(*row) for row in fields["ledgers"]],
                list(fields["trimmed"]),
                fields["next_index"],
                fields["created_ms"],
                fields["deleting"],
                dict(fields["properties"]),
                {row[0]: AttachedQuery(*row[1:]) for row in fields["attached"]},
                [ArchivedLedger(LedgerInfo(*row), run[0]) for run in fields["archived"] for row in run[1]],
                {row[0]: PublishedBatch(*row[1:]) for row in fields["publishing"]},
            )
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise DataDirectoryError(f"the metadata of {path} is damaged: {error!r}") from error


@dataclass(slots=True)
class CursorRecord:
    """A cursor's pointer: the ledger that holds it, or (ledger -1) the snapshot itself.

    `trimmed`: ledgers that held it and may not be deleted yet. `deleting`: the subscription is gone.
    """

    ledger_id: int
    snapshot: Mapping[str, Any]  # AckState.snapshot(); where a cursor without ledger stands
    created_ms: int = 0
    properties: dict[str, str] = field(default_factory=dict)
    trimmed: list[int] = field(default_factory=list)
    deleting: bool = False

    def encode(self) -> bytes:
        """The metadata value."""
        return _encode(
            {
                "format": FORMAT,
                "ledger": self.ledger_id,
                "snapshot": self.snapshot,
                "created_ms": self.created_ms,
                "properties": self.properties,
                "trimmed": self.trimmed,
                "deleting": self.deleting,
            }
        )

    @classmethod
    def decode(cls, value: bytes, path: str) -> CursorRecord:
        """Raises DataDirectoryError."""
        fields = decode_map(value, path)
        try:
            return cls(
                fields["ledger"],
                fields["snapshot"],
                fields["created_ms"],
                dict(fields["properties"]),
                list(fields["trimmed"]),
                fields["deleting"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataDirectoryError(f"the metadata of {path} is damaged: {error!r}") from error


async def replace(metadata: Metadata, path: str, value: bytes, version: int) -> int:
    """Compare-and-set; returns the new version. An outcome that is not known is settled by reading back.

    Raises VersionConflict when another owner changed or deleted the node, or what the store failed with.
    """
    try:
        return await metadata.put(path, value, version=version)
    except (VersionConflict, NotFoundInStore) as conflict:
        raise VersionConflict(f"{path} was changed by another owner") from conflict
    except MagnetarError:
        stored = await metadata.get(path)
        if stored is None or stored.value != value:
            raise
        return stored.version


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A staged ledger's node: for whom it was made."""

    transaction: str
    created_ms: int

    def encode(self) -> bytes:
        """The metadata value."""
        return _encode({"format": FORMAT, "transaction": self.transaction, "created_ms": self.created_ms})

    @classmethod
    def decode(cls, value: bytes, path: str) -> StagedRecord:
        """Raises DataDirectoryError."""
        fields = decode_map(value, path)
        try:
            return cls(str(fields["transaction"]), fields["created_ms"])
        except KeyError as error:
            raise DataDirectoryError(f"the metadata of {path} is damaged: {error!r}") from error


def decode_map(value: bytes, path: str) -> dict[str, Any]:
    """A msgpack map of this format. Raises DataDirectoryError."""
    try:
        fields = _decode(value)
    except msgspec.MsgspecError as error:
        raise DataDirectoryError(f"the metadata of {path} is damaged: {error}") from error
    if fields.get("format") != FORMAT:
        raise DataDirectoryError(
            f"the metadata of {path} has format {fields.get('format')}, and this release reads {FORMAT}: upgrade it"
        )
    return fields
