"""What the broker keeps in metadata: the ledger list of a topic and the pointer of a cursor (FORMATS.md).

Values are msgpack maps with a format number; ledgers are rows that only grow at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from magnetar.proto.errors import DataDirectoryError, MagnetarError, NotFoundInStore, VersionConflict
from magnetar.proto.ids import TopicName

from .stores import Metadata

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


@dataclass(slots=True)
class LedgerInfo:
    """One ledger of a topic. Counts are of confirmed entries, and final once `closed`."""

    ledger_id: int
    first_index: int  # topic-wide index of its first message
    entries: int = 0
    messages: int = 0
    size: int = 0  # payload bytes
    first_append_ms: int = 0  # 0 while empty
    last_append_ms: int = 0
    closed: bool = False

    def row(self) -> list[Any]:
        """As stored."""
        return [
            self.ledger_id, self.first_index, self.entries, self.messages, self.size,
            self.first_append_ms, self.last_append_ms, self.closed,
        ]  # fmt: skip


@dataclass(slots=True)
class TopicRecord:
    """The ledger list. `trimmed`: ledgers that no longer belong to the topic and may not be deleted yet."""

    ledgers: list[LedgerInfo] = field(default_factory=list)
    trimmed: list[int] = field(default_factory=list)
    next_index: int = 0  # topic-wide index after the last closed ledger
    created_ms: int = 0
    deleting: bool = False
    properties: dict[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The metadata value."""
        return _encode(
            {
                "format": FORMAT,
                "ledgers": [info.row() for info in self.ledgers],
                "trimmed": self.trimmed,
                "next_index": self.next_index,
                "created_ms": self.created_ms,
                "deleting": self.deleting,
                "properties": self.properties,
            }
        )

    @classmethod
    def decode(cls, value: bytes, path: str) -> TopicRecord:
        """Raises DataDirectoryError."""
        fields = decode_map(value, path)
        try:
            return cls(
                [LedgerInfo(*row[:8]) for row in fields["ledgers"]],
                list(fields["trimmed"]),
                fields["next_index"],
                fields["created_ms"],
                fields["deleting"],
                dict(fields["properties"]),
            )
        except (KeyError, TypeError, ValueError) as error:
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


def decode_map(value: bytes, path: str) -> dict[str, Any]:
    """A msgpack map of a format known here. Raises DataDirectoryError."""
    try:
        fields = _decode(value)
    except msgspec.MsgspecError as error:
        raise DataDirectoryError(f"the metadata of {path} is damaged: {error}") from error
    if fields.get("format") != FORMAT:
        raise DataDirectoryError(
            f"the metadata of {path} has format {fields.get('format')}, this version reads {FORMAT}: upgrade it"
        )
    return fields
