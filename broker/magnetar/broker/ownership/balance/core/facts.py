"""What decisions are made of, and what they are: rows of plain numbers.

A bundle is named by its text, `tenant/namespace/0x40000000_0x7fffffff` (both hashes inclusive).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

READY = "ready"


class BrokerFacts(NamedTuple):
    """A registered broker. Others than "ready" ones ("draining", "stopping") get nothing and are not judged."""

    name: str
    zone: str = ""
    state: str = READY
    cpu: float = 0.0  # share of a core
    bundles: int = 0
    topics: int = 0
    connections: int = 0
    group: str = ""
    report: int = 0  # another number whenever the broker has reported anew: the version of its node


class BundleLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One row of `/bundle-loads/NAME`; rates per second.

    `gc=False`: the garbage collector does not visit the leader's 100,000 rows, which would stop the loop for 0.15 s.
    """

    bundle: str
    topics: int
    messages_in: float
    bytes_in: float
    messages_out: float
    bytes_out: float


class BundleOwner(msgspec.Struct, frozen=True, gc=False):
    """A node below `/owners`; `to` is where the bundle is moving, or ""."""

    bundle: str
    broker: str
    to: str = ""
    # Since it was moved to this owner by a request, as the clocks of two brokers say.
    moved_ago_s: float = math.inf


class NamespaceBinding(NamedTuple):
    """Where the bundles of a namespace should be. Without a group any broker is as good as another.

    `strict`: nowhere but at brokers of the group. A zone is always a preference.
    """

    zone: str = ""
    group: str = ""
    strict: bool = False


UNBOUND = NamespaceBinding()


class Move(NamedTuple):
    """A request to `source`: hand the bundle over to `to`. `share`: of a core, as estimated."""

    bundle: str
    source: str
    to: str
    share: float
    reason: str


class Split(NamedTuple):
    """A request to the owner: make two of it."""

    bundle: str
    broker: str
    reason: str


Decision = Move | Split


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """What the leader read before a round. Parts may be of slightly different moments."""

    brokers: Sequence[BrokerFacts]
    owners: Sequence[BundleOwner]
    reports: Mapping[
        str, Sequence[BundleLoad]
    ]  # by broker: what it served when it wrote its `/bundle-loads/NAME`
    requested: Collection[
        str
    ] = ()  # bundles about which there is a request that its owner has not carried out
    bindings: Mapping[str, NamespaceBinding] = field(default_factory=dict)  # by `tenant/namespace`


def namespace_of(bundle: str) -> str:
    """`tenant/namespace` of a bundle's name."""
    return bundle.rpartition("/")[0]


def bundle_range(bundle: str) -> tuple[int, int]:
    """First and last hash of a bundle's name."""
    first, _, last = bundle.rpartition("/")[2].partition("_")
    return int(first, 16), int(last, 16)
