"""What an operator lays down for a topic or a namespace: how messages are stored, how long they are kept, and how long they
wait to be consumed.

A policy that is not set at one level is that of the next one: topic, namespace, then the settings of the broker. One field
is a policy, with two exceptions. The two limits of retention belong together: where one of them is set, the other one is
that of the same level, and no limit if it is not set. The three sizes of a ledger are set together or not at all.

This is where a policy is added: a field of `Policies`, what its value may be in `check`, and a row of `DESCRIBED`, which the
command line is made of. The setting of the same name in the broker's section is its default.

>>> Policies(retention_ms=3_600_000).check().retention
(3600000, -1)
>>> Policies().retention is None
True
>>> Policies(ensemble_size=3, write_quorum=3, ack_quorum=2).check().quorums
(3, 3, 2)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from .errors import InvalidArgument
from .ids import check_subscription_name
from .quorums import MAX_ENSEMBLE_SIZE, quorum_problem

UNLIMITED = -1
# A topic stores them beside its list of ledgers, which is written with every ledger.
MAX_SUBSCRIPTION_TTLS = 200
_MOST = 1 << 53  # what every client can count to
# When a message is acknowledged to its producer: once ack_quorum bookies have it on disk, or in memory.
FLUSHES = ("sync", "async")
PREFERRED = "preferred:"
_MOST_GROUP_LETTERS = 255


class Policies(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not set at this level."""

    # Of what every durable subscription has acknowledged: a ledger is deleted once it is older, or once the topic has so
    # many bytes without it. UNLIMITED: this limit deletes nothing. Both 0: nothing is kept for its own sake.
    retention_ms: int | None = None
    retention_bytes: int | None = None
    # What waits longer counts as acknowledged. 0: messages wait for ever.
    message_ttl_ms: int | None = None
    subscription_ttl_ms: dict[str, int] = {}  # by name; these come before message_ttl_ms
    # Delivery times: how far ahead one may lie, and how many messages of a topic may wait for theirs. 0: no limit.
    max_delivery_delay_ms: int | None = None
    max_delayed_messages: int | None = None
    # Of the topic's next ledger: how many bookies it is on, how many of them get an entry, how many confirm it. All or none.
    ensemble_size: int | None = None
    write_quorum: int | None = None
    ack_quorum: int | None = None
    # With fewer writable bookies than ensemble_size, ledgers have fewer copies, so many at least. 0: they are refused.
    minimum_write_quorum: int | None = None
    flush: str | None = None  # of FLUSHES
    bookie_group: str | None = None  # see `PlacementGroup`; "": any bookie
    deduplication: bool | None = None  # by producer name and sequence id
    # Of namespaces alone, whose topics move as bundles: the brokers that serve them. "": any.
    broker_group: str | None = None  # see `PlacementGroup`
    broker_zone: str | None = None  # a preference: brokers of this zone come first

    @property
    def retention(self) -> tuple[int, int] | None:
        """Milliseconds and bytes as they count together; None: not set."""
        if self.retention_ms is None and self.retention_bytes is None:
            return None
        return (
            UNLIMITED if self.retention_ms is None else self.retention_ms,
            UNLIMITED if self.retention_bytes is None else self.retention_bytes,
        )

    @property
    def quorums(self) -> tuple[int, int, int] | None:
        """Ensemble size, write quorum, ack quorum; None: not set."""
        if self.ensemble_size is None or self.write_quorum is None or self.ack_quorum is None:
            return None
        return self.ensemble_size, self.write_quorum, self.ack_quorum

    def check(self) -> Policies:
        """Returns itself, or raises InvalidArgument."""
        if self.retention is not None:
            check_retention(*self.retention)
        self._check_durability()
        if len(self.subscription_ttl_ms) > MAX_SUBSCRIPTION_TTLS:
            raise InvalidArgument(
                f"{len(self.subscription_ttl_ms)} subscriptions have a TTL of their own; at most {MAX_SUBSCRIPTION_TTLS}: "
                "give the others message_ttl_ms"
            )
        times = {
            f"subscription_ttl_ms of {name!r}": ttl_ms for name, ttl_ms in self.subscription_ttl_ms.items()
        }
        if self.message_ttl_ms is not None:
            times["message_ttl_ms"] = self.message_ttl_ms
        for name, ttl_ms in times.items():
            if not 0 <= ttl_ms < _MOST:
                raise InvalidArgument(
                    f"{name} is {ttl_ms}; want milliseconds, or 0 for messages that wait for ever"
                )
        for name in ("max_delivery_delay_ms", "max_delayed_messages"):
            if not 0 <= (getattr(self, name) or 0) < _MOST:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; want 0 for no limit, or more")
        for name in self.subscription_ttl_ms:
            check_subscription_name(name)
        return self

    def _check_durability(self) -> None:
        sizes = {name: getattr(self, name) for name in ("ensemble_size", "write_quorum", "ack_quorum")}
        missing = [name for name, value in sizes.items() if value is None]
        if 0 < len(missing) < len(sizes):
            raise InvalidArgument(
                f"ensemble_size, write_quorum and ack_quorum belong together, and {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing; set all three, as 3, 3 and 2, or none"
            )
        if self.quorums is not None and (problem := quorum_problem(*self.quorums)):
            given = ", ".join(f"{name}={value}" for name, value in sizes.items())
            raise InvalidArgument(f"{given} do not fit: {problem}")
        minimum = self.minimum_write_quorum
        if minimum is not None:
            most = MAX_ENSEMBLE_SIZE if self.write_quorum is None else self.write_quorum
            if not 0 <= minimum <= most:
                raise InvalidArgument(
                    f"minimum_write_quorum is {minimum}; want a number of copies, at most {most}, or 0: with fewer bookies "
                    "than ensemble_size nothing is written"
                    + (
                        ""
                        if self.write_quorum is None
                        else f" (write_quorum={most} is how many copies there are)"
                    )
                )
        if self.flush is not None:
            check_flush(self.flush)
        if self.bookie_group is not None:
            PlacementGroup.parse(self.bookie_group)
        if self.broker_group is not None:
            PlacementGroup.parse(self.broker_group, "broker_group")

    def check_topic(self) -> Policies:
        """Returns itself, or raises InvalidArgument where these cannot be the policies of a topic."""
        for name in OF_NAMESPACES:
            if getattr(self, name) is not None:
                raise InvalidArgument(
                    f"{name} is a policy of namespaces, whose topics move together; set it there"
                )
        return self


class Described(NamedTuple):
    """How people write policies that are set together, most often one."""

    policies: tuple[str, ...]  # fields of Policies; several are written A/B/C
    option: str  # of the command line, without dashes
    unit: Literal["time", "size", "count", "word", "name"]  # of texts that are none of `words`
    metavar: str
    help: str
    words: Mapping[str, int | str] = {}  # texts with a value of their own
    by_subscription: bool = False  # the field holds a value for each name of a subscription

    @property
    def of_namespaces(self) -> bool:
        """Topics have no such policy: they move together."""
        return self.policies[0] in OF_NAMESPACES


OF_NAMESPACES = (
    "broker_group",
    "broker_zone",
)  # which are no settings of a broker: "", any, is their default
DESCRIBED = (
    Described(
        ("retention_ms",), "retention", "time", "TIME",
        "How long acknowledged messages are kept: 12h, 3d, infinite; 0 keeps none. inherit: as on the next level.",
        {"infinite": UNLIMITED},
    ),
    Described(
        ("retention_bytes",), "retention-size", "size", "SIZE",
        "Up to which size of a topic they are kept: 500MB, 10GB, infinite, inherit.",
        {"infinite": UNLIMITED},
    ),
    Described(
        ("message_ttl_ms",), "ttl", "time", "TIME",
        "How long messages wait to be acknowledged; then they count as acknowledged: 1h, 7d, infinite, inherit.",
        {"infinite": 0},
    ),
    Described(
        ("subscription_ttl_ms",), "subscription-ttl", "time", "NAME=TIME",
        "The same for one subscription; may be repeated.",
        {"infinite": 0}, by_subscription=True,
    ),
    Described(
        ("max_delivery_delay_ms",), "max-delivery-delay", "time", "TIME",
        "How far ahead a delivery time may lie: 7d, infinite, inherit.",
        {"infinite": 0},
    ),
    Described(
        ("max_delayed_messages",), "max-delayed-messages", "count", "MESSAGES",
        "How many messages of a topic may wait for their delivery time: 1000000, infinite, inherit.",
        {"infinite": 0},
    ),
    Described(
        ("ensemble_size", "write_quorum", "ack_quorum"), "durability", "count", "E/QW/QA",
        "Ensemble size, write quorum and ack quorum of new ledgers: 3/3/2, or inherit.",
    ),
    Described(
        ("minimum_write_quorum",), "minimum-write-quorum", "count", "COPIES",
        "With too few bookies write fewer copies, so many at least: 2, off, inherit.",
        {"off": 0},
    ),
    Described(
        ("flush",), "flush", "word", "WHEN",
        "Acknowledge what is on disk (sync) or in the memory of ack-quorum bookies (async): sync, async, inherit.",
        {word: word for word in FLUSHES},
    ),
    Described(
        ("bookie_group",), "bookie-group", "name", "GROUP",
        "Write to the bookies of a group only (fast), or before others (preferred:fast): also any, inherit.",
        {"any": ""},
    ),
    Described(
        ("deduplication",), "deduplication", "word", "WHETHER",
        "Store what producers send again once, by their name and sequence ids: on, off, inherit.",
        {"on": True, "off": False},
    ),
    Described(
        ("broker_group",), "broker-group", "name", "GROUP",
        "Serve topics by the brokers of a group only (fast), or before others (preferred:fast): also any, inherit.",
        {"any": ""},
    ),
    Described(
        ("broker_zone",), "broker-zone", "name", "ZONE",
        "Serve topics by brokers of this zone before others: also any, inherit.",
        {"any": ""},
    ),
)  # fmt: skip


class PlacementGroup(NamedTuple):
    """The bookies that ledgers are placed on, or the brokers that serve topics: those of a group, or these before others.

    A bookie says its group in [bookie] group, a broker in [broker] group.

    >>> [tuple(PlacementGroup.parse(text)) for text in ("fast", "preferred:fast", "")]
    [('fast', True), ('fast', False), ('', False)]
    """

    name: str  # "": any
    strict: bool  # nothing is written, or served, where there are too few of them

    @classmethod
    def parse(cls, text: str, policy: str = "bookie_group") -> PlacementGroup:
        """Raises InvalidArgument."""
        name = text.removeprefix(PREFERRED)
        plain = name.isascii() and all(letter.isalnum() or letter in "-_." for letter in name)
        if not plain or len(name) > _MOST_GROUP_LETTERS or (not name and text):
            raise InvalidArgument(
                f"{policy} is {text!r:.300}; want the group that {policy.partition('_')[0]}s have in their settings, as "
                f"fast, or {PREFERRED}fast where others will do as well, or nothing for any; a name has letters, digits, "
                "'-', '_' and '.'"
            )
        return cls(name, bool(name) and name == text)


def check_flush(flush: str) -> None:
    """Raises InvalidArgument."""
    if flush not in FLUSHES:
        raise InvalidArgument(
            f"flush is {flush!r}; want sync, which acknowledges what is on disk, or async, which acknowledges what is in "
            "the memory of ack_quorum bookies"
        )


def check_retention(retention_ms: int, retention_bytes: int) -> None:
    """Raises InvalidArgument."""
    for name, value in (("retention_ms", retention_ms), ("retention_bytes", retention_bytes)):
        if not UNLIMITED <= value < _MOST:
            raise InvalidArgument(f"{name} is {value}; want 0 or more, or {UNLIMITED} for no limit")
    if (retention_ms == 0) != (retention_bytes == 0):
        raise InvalidArgument(
            f"retention_ms={retention_ms} and retention_bytes={retention_bytes} contradict each other: 0 keeps nothing. Set "
            f"both to 0, or the one that shall not limit to {UNLIMITED}"
        )


class PolicyInForce(NamedTuple):
    """What holds for a topic or a namespace in the end, and whose policy that is."""

    policy: str  # a field of Policies
    subscription: str  # that it is for; "": all that have none of their own
    value: bool | int | str
    source: str  # "topic", "namespace" or "broker"


def decode_policies(payload: bytes) -> Policies:
    """From a msgpack map. Raises InvalidArgument, also for a policy that is not known: it would not be heeded."""
    try:
        fields = msgspec.msgpack.decode(payload, type=dict[str, object])
        unknown = fields.keys() - set(Policies.__struct_fields__)
        if unknown:
            raise InvalidArgument(
                f"{sorted(unknown)[0]!r} is no policy; there are {', '.join(Policies.__struct_fields__)}"
            )
        return msgspec.convert(fields, Policies).check()
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"the policies are not as they should be: {error}") from None
