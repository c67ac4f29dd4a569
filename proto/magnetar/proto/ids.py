"""Identifiers: message ids, topic names and other names.

A message id is (ledger, entry, index in the entry, partition). Ids of one partition are ordered as the topic is:

>>> MessageId(7, 0, 3) < MessageId(7, 1, 0) < MessageId(8, 0, 0)
True
>>> MessageId.from_bytes(MessageId(7, 1, 0).to_bytes())
MessageId(ledger=7, entry=1, index=0, partition=-1)

Where a message is that was stored before, as its producer's name and sequence id tell, nobody remembers. The id of such a
duplicate says that and nothing else, comes before all others, and is no place to read from:

>>> DUPLICATE_ID.is_duplicate, DUPLICATE_ID < MessageId(0, 0, 0), str(DUPLICATE_ID)
(True, True, '-1:-1:0')

Topic names are `persistent://tenant/namespace/name`; a short name means `persistent://public/default/name`.

>>> str(TopicName.parse("orders"))
'persistent://public/default/orders'

The partitions of a topic are topics named after it, "-partition-" and their number; no other topic has such a name.

>>> name = TopicName.parse("orders").partition_of(3)
>>> str(name), name.partition, str(name.whole)
('persistent://public/default/orders-partition-3', 3, 'persistent://public/default/orders')
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from .errors import InvalidArgument, InvalidSetting, InvalidTopicName

MAX_ENTRY_ID = (1 << 43) - 1  # so that (entry, index in the entry) fits into 63 bits, for other protocols
# Cursors count by 20 bits, the last of which another protocol uses in its ids.
MAX_MESSAGES_PER_ENTRY = 1 << 19
# What a batch, and an entry that the broker makes, may have: 2.5 KB can hold 400,000, and are looked into in one turn.
MAX_MESSAGES_PER_BATCH = 1 << 15
MAX_BATCHES_PER_ENTRY = 65_535
MAX_LEDGER_ID = (1 << 63) - 1
NO_PARTITION = -1
MAX_PARTITIONS = 10_000  # of one topic: who makes, deletes or opens it has to do with each of them

_MESSAGE_ID = struct.Struct(">qqIi")  # no ledger or entry has a number that reads as a negative one


class MessageId(NamedTuple):
    """Position of one message: ordered, hashable, 24 bytes in its byte form (big-endian u64 u64 u32 i32).

    Of a message that was stored before (see `is_duplicate`) ledger and entry are -1, in bytes 2**64 - 1, and the index is 0.
    """

    ledger: int
    entry: int
    index: int  # type: ignore[assignment]  # tuple.index is of no use here
    partition: int = NO_PARTITION

    @property
    def is_duplicate(self) -> bool:
        """True if the service had the message already and did not store it again: where it is, it does not say."""
        return self.ledger < 0

    def to_bytes(self) -> bytes:
        """24 bytes that `from_bytes` reads back. Raises InvalidArgument for numbers that no id has."""
        try:
            packed = _MESSAGE_ID.pack(*self)
        except struct.error:
            raise InvalidArgument(f"not a message id: {self!r}") from None
        self._check()
        return packed

    def place(self) -> MessageId:
        """Itself, if there is a message with this id that can be read or acknowledged. Raises InvalidArgument."""
        self.to_bytes()
        if self.is_duplicate:
            raise InvalidArgument(
                f"the id {self} says that a message was stored before, and not where: take ids from received messages"
            )
        return self

    def _check(self) -> None:
        if (self.ledger < 0 or self.entry < 0) and self[:3] != (-1, -1, 0):
            raise InvalidArgument(f"not a message id: {self!r}")

    @classmethod
    def from_bytes(cls, data: bytes) -> MessageId:
        """Raises InvalidArgument unless `data` is what `to_bytes` made."""
        if len(data) != _MESSAGE_ID.size:
            raise InvalidArgument(f"a message id has {_MESSAGE_ID.size} bytes, not {len(data)}")
        found = cls(*_MESSAGE_ID.unpack(data))
        found._check()
        return found

    def __str__(self) -> str:
        return f"{self.ledger}:{self.entry}:{self.index}" + (
            f":{self.partition}" if self.partition != NO_PARTITION else ""
        )

    @classmethod
    def parse(cls, text: str) -> MessageId:
        """Reads the text form `ledger:entry:index[:partition]`."""
        try:
            parsed = cls(*(int(part) for part in text.split(":")))
            parsed.to_bytes()
        except (ValueError, TypeError):
            raise InvalidArgument(f"not a message id: {text!r} (want ledger:entry:index)") from None
        return parsed


DUPLICATE_ID = MessageId(-1, -1, 0)
"""What the service answers for a message that was stored before."""


def check_ids(ledger_id: int, first: int = 0, last: int = -1) -> None:
    """Raises InvalidArgument unless a ledger may have this id, and the entries `first` and `last` (-1: none)."""
    if not (0 <= ledger_id <= MAX_LEDGER_ID and 0 <= first <= MAX_ENTRY_ID and -1 <= last <= MAX_ENTRY_ID):
        raise InvalidArgument(
            f"ledger {ledger_id} or its entries {first} to {last} are outside the ids that there can be: ledgers have 0 to "
            f"{MAX_LEDGER_ID}, entries 0 to {MAX_ENTRY_ID}"
        )


_PART = re.compile(r"[-=:.\w]+")
_MAX_NAME = 255
DOMAINS = ("persistent", "non-persistent")
# Between the name of a topic and the number of a partition.
PARTITION_INFIX = "-partition-"
# The number in its canonical form: "orders-partition-03" is a topic like any other.
_PARTITION = re.compile(rf"(.+){PARTITION_INFIX}(0|[1-9][0-9]*)")


class TopicName(NamedTuple):
    """A parsed topic name. `domain` is "persistent" or "non-persistent"."""

    domain: str
    tenant: str
    namespace: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TopicName:
        """Parses a full, a `tenant/namespace/name` or a short name. Raises InvalidTopicName, which shows the forms."""
        try:
            domain, separator, rest = text.partition("://")
        except (AttributeError, TypeError):
            raise InvalidTopicName(f"not a topic name: {text!r} (a topic is named by a str)") from None
        if not separator:
            domain, rest = "persistent", text
            if "/" not in rest:
                rest = f"public/default/{rest}"
        parts = rest.split("/")
        if domain not in DOMAINS or len(parts) != 3:
            raise InvalidTopicName(
                f"not a topic name: {text!r} (want persistent://tenant/namespace/name, or just a name)"
            )
        for part in parts:
            if not _is_plain(part):
                raise InvalidTopicName(
                    f"not a topic name: {text!r} ({part[:40]!r} must be 1 to {_MAX_NAME} letters, digits or -=:._)"
                )
        return cls(domain, *parts)

    @property
    def persistent(self) -> bool:
        """False: its messages are in the memory of its broker alone."""
        return self.domain == "persistent"

    def partition_of(self, number: int) -> TopicName:
        """The name of partition `number` of this topic. Raises InvalidTopicName if that is too long for a name."""
        name = f"{self.name}{PARTITION_INFIX}{number}"
        if len(name) > _MAX_NAME:
            raise InvalidTopicName(
                f"not a topic name: {name[:40]!r}... (with the number of its partition it has {len(name)} characters, "
                f"more than {_MAX_NAME}; choose a shorter name for the topic)"
            )
        return self._replace(name=name)

    @property
    def partition(self) -> int:
        """The number of the partition that this names; NO_PARTITION: it names a whole topic."""
        found = _PARTITION.fullmatch(self.name)
        return NO_PARTITION if found is None else int(found[2])

    @property
    def whole(self) -> TopicName:
        """The topic whose partition this names; itself if it names none."""
        found = _PARTITION.fullmatch(self.name)
        return self if found is None else self._replace(name=found[1])

    @property
    def full_namespace(self) -> str:
        """tenant/namespace."""
        return f"{self.tenant}/{self.namespace}"

    @property
    def short(self) -> str:
        """The name alone for topics of public/default, else the full name: for people to read."""
        if (self.domain, self.tenant, self.namespace) == ("persistent", "public", "default"):
            return self.name
        return str(self)

    def __str__(self) -> str:
        return f"{self.domain}://{self.tenant}/{self.namespace}/{self.name}"


def _is_plain(name: str) -> bool:
    return bool(_PART.fullmatch(name)) and name not in (".", "..") and len(name) <= _MAX_NAME


def check_name(what: str, name: str) -> str:
    """Returns `name`, of a tenant, a cluster or another object that has one name. Raises InvalidArgument."""
    if not _is_plain(name):
        raise InvalidArgument(
            f"{what.capitalize()} name is not valid: {name[:80]!r} (want 1 to {_MAX_NAME} letters, digits or -=:._)"
        )
    return name


def check_namespace(namespace: str) -> str:
    """Returns `tenant/namespace`. Raises InvalidArgument."""
    parts = namespace.split("/")
    if len(parts) != 2 or not all(map(_is_plain, parts)):
        raise InvalidArgument(f"not a namespace: {namespace[:80]!r} (want tenant/namespace)")
    return namespace


def check_subscription_name(name: str) -> str:
    """Returns `name`, or raises InvalidArgument."""
    try:
        valid = _is_plain(name)
    except TypeError:
        raise InvalidArgument(
            f"not a subscription name: {name!r} (a subscription is named by a str)"
        ) from None
    if not valid:
        raise InvalidArgument(
            f"not a subscription name: {name[:40]!r} (1 to {_MAX_NAME} letters, digits or -=:._)"
        )
    return name


def require_plain_name(setting: str, name: str) -> None:
    """Checks a name that people give to a daemon, a rack or a zone: each is a node of the metadata, and shown in tables.

    Raises InvalidSetting, which begins with `setting`. The empty name is plain.
    """
    if name != name.strip() or not name.isprintable() or "/" in name or len(name) > _MAX_NAME:
        raise InvalidSetting(
            f"{setting} is {name!r:.300}; it must be a plain name of {_MAX_NAME} characters at most: no slash, no "
            "space around it"
        )
