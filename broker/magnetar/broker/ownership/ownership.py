"""What the rest of a broker knows of ownership, and the ownership of a broker that is alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

import msgspec

from magnetar.proto.errors import MagnetarError, TopicNotServed, Unsupported
from magnetar.proto.ids import TopicName

from .core.bundles import Bounds, Bundle, parse_bundle_or_topic
from .records import READY, BrokerLoad, BrokerRecord


class Located(msgspec.Struct, frozen=True):
    """The answer to a look-up."""

    url: str
    final: bool  # False: ask the broker at this URL, with `authoritative`


class BrokerRow(msgspec.Struct, frozen=True):
    """A broker of the cluster."""

    name: str
    url: str
    zone: str
    group: str
    state: str
    started_ms: int
    version: str
    load: BrokerLoad
    problems: dict[str, str] = {}
    http: str = ""
    pulsar: str = ""

    @classmethod
    def of(cls, name: str, record: BrokerRecord) -> BrokerRow:
        """Of the node of this name."""
        return cls(name=name, **msgspec.structs.asdict(record))


class BundleRow(msgspec.Struct, frozen=True):
    """A bundle and who owns it; "" where nobody does."""

    bundle: str
    broker: str
    url: str
    to: str  # name of the broker to which it moves


class DrainState(msgspec.Struct, frozen=True):
    """Who is drained, or was until `undo`, and what they have left."""

    brokers: list[str]
    bookies: list[str]
    bundles: int = 0  # that the brokers own
    ledgers: int = 0  # that name one of the bookies
    open_ledgers: int = 0  # of these: their writers leave them within minutes
    # By ledger: why the last attempt to copy it did not succeed; the first hundred.
    notes: dict[int, str] = {}

    @property
    def over(self) -> bool:
        """They have nothing left: they can be stopped."""
        return not (self.bundles or self.ledgers)


class TopicCounters(NamedTuple):
    """What a loaded topic has counted since it was loaded."""

    name: TopicName
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int


class Host(Protocol):
    """The broker's topics, as ownership sees them."""

    def counters(self) -> list[TopicCounters]:
        """Of all topics that are loaded."""

    @property
    def connections(self) -> Collection[object]:
        """Of clients, to any listener."""

    def problems(self) -> dict[str, str]:
        """What is wrong here, by what it is about; a few of them, and short."""

    def loaded(self) -> list[TopicName]:
        """The topics that are loaded, being loaded or being closed."""

    def has(self, name: TopicName) -> bool:
        """True for one of `loaded`."""

    def in_use(self, name: TopicName) -> bool:
        """True for a topic with clients, or with work under way."""

    async def unload(self, name: TopicName, error: MagnetarError) -> None:
        """Closes a topic: what is queued is confirmed, its users get `error`. Returns when nothing of it is left."""

    def fence(self, error: MagnetarError) -> None:
        """Nothing of any topic is confirmed any more when this returns; they let go afterwards."""


class Administration(Protocol):
    """What operators see of a cluster's brokers and bundles, and what they ask of them; whichever broker they ask."""

    async def brokers(self) -> list[BrokerRow]:
        """All of the cluster, by name."""

    async def balancer(self) -> str:
        """The name of the broker that balances; "": none."""

    async def bundles(self, namespace: str) -> list[BundleRow]:
        """Those of a namespace, in the order of their hashes."""

    async def transfer(self, bundle: str, to: str) -> None:
        """Returns when the bundle's owner has handed it over. Raises InvalidArgument, RequestTimeout."""

    async def split(self, bundle: str) -> list[str]:
        """The parts, when its owner has divided it. Raises InvalidArgument, RequestTimeout."""

    async def drain(
        self, name: str = "", *, zone: str = "", kind: str = "", undo: bool = False
    ) -> DrainState:
        """A broker or a bookie, or all of a zone, hand over all they have, until `undo`. Returns what they still have.

        `kind`, "broker" or "bookie", where one of each has the name. Raises InvalidArgument, and NotFound for nobody.
        """

    async def drains(self, name: str = "", *, zone: str = "", kind: str = "") -> DrainState:
        """Of all that are drained, or of one or a zone, which is then: else raises NotFound. Changes nothing."""


class Ownership(Protocol):
    """Which topics this broker serves, and who serves the others."""

    @property
    def administration(self) -> Administration:
        """Of the whole cluster."""

    async def start(self, host: Host) -> None:
        """Before anything else. Raises ServiceNotReady."""

    @property
    def alone(self) -> bool:
        """True: no other broker serves topics of this metadata store."""

    @property
    def valid(self) -> bool:
        """False: nothing may be confirmed, another broker may own what this one believes to own. Decided by the clock."""

    def check(self, name: TopicName) -> None:
        """Raises TopicNotServed unless the topic may be loaded and served here now."""

    def serves(self, name: TopicName) -> bool:
        """As `check`."""

    async def locate(self, name: TopicName, *, authoritative: bool, unreachable: str) -> Located:
        """Who serves the topic; this broker takes its bundle if it is to, and its namespace has topics.

        Raises ServiceNotReady.
        """

    async def claim(self, name: TopicName) -> None:
        """Before a topic is made that is not served: takes its bundle if it is the first one of its namespace.

        `check` says afterwards whether that was possible. Raises ServiceNotReady.
        """

    def figures(self) -> dict[str, float]:
        """For /metrics."""

    async def hand_over(self) -> None:
        """This broker stops: others get its bundles, as far as there are others."""

    async def close(self) -> None:
        """Lets go of everything; topics are closed."""


class SoleBroker:
    """`Ownership` of a broker that is alone, and its `Administration`: everything is its own, for ever."""

    alone = True
    valid = True

    def __init__(self, name: str, url: str, http: str = "", pulsar: str = "") -> None:
        self._name = name
        self._url = url
        self._http = http
        self._pulsar = pulsar
        self._host: Host | None = None

    @property
    def administration(self) -> SoleBroker:
        return self

    async def start(self, host: Host) -> None:
        self._host = host

    def check(self, name: TopicName) -> None:
        """See Ownership."""

    def serves(self, name: TopicName) -> bool:
        return True

    async def claim(self, name: TopicName) -> None:
        """See Ownership."""

    async def locate(self, name: TopicName, *, authoritative: bool, unreachable: str) -> Located:
        return Located(self._url, True)

    def figures(self) -> dict[str, float]:
        return {}

    async def hand_over(self) -> None:
        """See Ownership."""

    async def close(self) -> None:
        """See Ownership."""

    # --- Administration ----------------------------------------------------------------------------------------------

    async def brokers(self) -> list[BrokerRow]:
        name, url = self._name, self._url
        return [BrokerRow(name, url, "", "", READY, 0, "", BrokerLoad(), {}, self._http, self._pulsar)]

    async def balancer(self) -> str:
        return ""

    async def bundles(self, namespace: str) -> list[BundleRow]:
        return [
            BundleRow(str(bundle), self._name, self._url, "") for bundle in Bounds.even(1).bundles(namespace)
        ]

    async def transfer(self, bundle: str, to: str) -> None:
        """See Administration. There is nobody to move to: the topic, or its bundle, is unloaded until its next use."""
        if to:
            raise _alone()
        named = parse_bundle_or_topic(bundle)
        if isinstance(named, Bundle):
            Bounds.even(1).require(named)
        assert self._host is not None
        error = TopicNotServed("the topic is unloaded; look it up again")
        for name in self._host.loaded():
            if name == named or (isinstance(named, Bundle) and named.holds(name)):
                await self._host.unload(name, error)

    async def split(self, bundle: str) -> list[str]:
        raise _alone()

    async def drain(
        self, name: str = "", *, zone: str = "", kind: str = "", undo: bool = False
    ) -> DrainState:
        raise _alone()

    async def drains(self, name: str = "", *, zone: str = "", kind: str = "") -> DrainState:
        if name or zone:
            raise _alone()
        return DrainState([], [])


def _alone() -> Unsupported:
    return Unsupported(
        "this broker is alone; bundles move in a cluster: magnetar broker --metadata zk://host:port/root"
    )
