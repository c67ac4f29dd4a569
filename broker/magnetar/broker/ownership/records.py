"""What the brokers of a cluster say to each other in metadata (broker/CLUSTER.md draws the paths; FORMATS.md the values)."""

from __future__ import annotations

from urllib.parse import quote, unquote

import msgspec

from magnetar.metadata.record import Record

from .core.bundles import Bundle

BROKERS_PATH = "/brokers"
BALANCER_PATH = "/balancer"
OWNERS_PATH = "/owners"
TRANSFERS_PATH = "/transfers"

READY, DRAINING, DRAINED, STOPPING = "ready", "draining", "drained", "stopping"


def broker_path(name: str) -> str:
    """Ephemeral: the broker of this name runs."""
    return f"{BROKERS_PATH}/{name}"


def bounds_path(namespace: str) -> str:
    """How a namespace is divided."""
    return f"/bundles/{namespace}"


def owners_path(namespace: str) -> str:
    """Its children are the bundles that somebody owns."""
    return f"{OWNERS_PATH}/{namespace}"


def owner_path(bundle: Bundle) -> str:
    """Ephemeral: who owns the bundle."""
    return f"{OWNERS_PATH}/{bundle}"


def transfer_path(bundle: Bundle) -> str:
    """A request about a bundle; all requests are in one list, which every broker watches."""
    return f"{TRANSFERS_PATH}/{quote(str(bundle), safe='')}"


def bundle_of_transfer(node: str) -> Bundle:
    """From the last name of the path."""
    return Bundle.parse(unquote(node))


class BrokerLoad(msgspec.Struct, frozen=True):
    """Per second, but for `cpu`, a share of one core, and for the counts; two significant digits."""

    cpu: float = 0.0
    bundles: int = 0
    topics: int = 0
    connections: int = 0
    messages_in: float = 0
    messages_out: float = 0
    bytes_in: float = 0
    bytes_out: float = 0


class BrokerRecord(Record):
    """A broker that runs."""

    url: str
    zone: str  # "": it does not say
    group: str  # the same
    state: str  # READY, DRAINING, DRAINED (it has no bundle left) or STOPPING
    started_ms: int
    version: str  # of the software
    load: BrokerLoad
    problems: dict[str, str]  # what is wrong there, by what it is about
    http: str = ""  # where its HTTP is
    pulsar: str = ""  # where it speaks Pulsar's protocol; "": nowhere


class BoundsRecord(Record):
    """See `core.bundles.Bounds`."""

    bounds: list[int]


class OwnerRecord(Record):
    """The owner of a bundle."""

    broker: str
    url: str
    to: str  # name of the broker to which it moves; "": it stays
    session: int  # id of the owner's session: a broker tells by it what it made itself
    moved_ms: int = 0  # when it came here because somebody asked for that; 0: for another reason


class TransferRecord(Record):
    """A request to the owner of a bundle. It is deleted when done (by the destination, if one is named) or impossible."""

    to: str  # name of a broker; "": one that placement chooses
    split: bool  # divide it instead
    reason: str  # for the log
