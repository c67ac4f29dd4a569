"""Bundles: the topics of a namespace, divided by the hash of their names into ranges that are owned as a whole.

>>> bounds = Bounds.even(4)
>>> [str(bundle) for bundle in bounds.bundles("public/default")][1]
'public/default/0x40000000_0x7fffffff'
>>> bounds.bundle_of("public/default", 0x40000000)
Bundle(namespace='public/default', first=1073741824, last=2147483647)
>>> bounds.split(bounds.bundle_of("public/default", 0), 0x100).bundles("a/b")[:2]
[Bundle(namespace='a/b', first=0, last=255), Bundle(namespace='a/b', first=256, last=1073741823)]
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from magnetar.proto.errors import InvalidArgument
from magnetar.proto.ids import TopicName

HASHES = 1 << 32
# Of one namespace: all of its owners are one list in the metadata store.
MAX_BUNDLES = 4_096
_RANGE = re.compile(r"0x([0-9a-f]{8})_0x([0-9a-f]{8})")


def topic_hash(name: TopicName) -> int:
    """32 bits: the upper half of the xxh3-64 of the full name. It is never changed: owners are found by it."""
    return xxh3_64_intdigest(str(name).encode()) >> 32


class Bundle(NamedTuple):
    """The topics of a namespace, `tenant/namespace`, whose hashes lie in first..last, both included."""

    namespace: str
    first: int
    last: int

    @property
    def range(self) -> str:
        """Its name within the namespace."""
        return f"0x{self.first:08x}_0x{self.last:08x}"

    def __str__(self) -> str:
        return f"{self.namespace}/{self.range}"

    def holds(self, name: TopicName) -> bool:
        """True if the topic is one of the bundle's."""
        return name.full_namespace == self.namespace and self.first <= topic_hash(name) <= self.last

    def contains(self, other: Bundle) -> bool:
        """True if all topics of the other one are this one's."""
        return self.namespace == other.namespace and self.first <= other.first and other.last <= self.last

    @classmethod
    def parse(cls, text: str) -> Bundle:
        """From `str(bundle)`. Raises InvalidArgument."""
        namespace, _, hashes = text.rpartition("/")
        found = _RANGE.fullmatch(hashes)
        if found is None or len(parts := namespace.split("/")) != 2 or not all(parts):
            raise InvalidArgument(
                f"not a bundle: {text[:120]!r} (want tenant/namespace/0x00000000_0x3fffffff, as ListBundles names them)"
            )
        first, last = (int(digits, 16) for digits in found.groups())
        if first > last:
            raise InvalidArgument(f"not a bundle: {text!r} ends before it begins")
        return cls(namespace, first, last)


def parse_bundle_or_topic(text: str) -> Bundle | TopicName:
    """What users name a bundle by: its own name, or that of a topic in it, in any form. Raises InvalidArgument."""
    is_topic = "://" in text or text.count("/") < 2 or not text.rpartition("/")[2].startswith("0x")
    return TopicName.parse(text) if is_topic else Bundle.parse(text)


class Bounds(NamedTuple):
    """The first hashes of a namespace's bundles: ascending, the first one is 0."""

    firsts: tuple[int, ...]

    @classmethod
    def even(cls, bundles: int) -> Bounds:
        """Bundles of equal width, to one hash."""
        return cls(tuple(number * HASHES // bundles for number in range(bundles)))

    @classmethod
    def of(cls, firsts: Iterable[int]) -> Bounds:
        """Raises ValueError when these are no bounds."""
        bounds = cls(tuple(firsts))
        bounds.check()
        return bounds

    def check(self) -> None:
        """Raises ValueError unless the invariants hold."""
        firsts = self.firsts
        if not firsts or firsts[0] != 0 or firsts[-1] >= HASHES or len(firsts) > MAX_BUNDLES:
            raise ValueError(f"{len(firsts)} bounds that do not begin at 0, or are too many")
        if any(a >= b for a, b in pairwise(firsts)):
            raise ValueError("bounds that do not rise")

    def bundles(self, namespace: str) -> list[Bundle]:
        """All of them, in order."""
        ends = (*self.firsts[1:], HASHES)
        return [Bundle(namespace, first, end - 1) for first, end in zip(self.firsts, ends)]

    def bundle_of(self, namespace: str, hash: int) -> Bundle:
        """The one that holds a hash."""
        place = bisect_right(self.firsts, hash)
        end = self.firsts[place] if place < len(self.firsts) else HASHES
        return Bundle(namespace, self.firsts[place - 1], end - 1)

    def has(self, bundle: Bundle) -> bool:
        """False for one that was divided, or never was."""
        return self.bundle_of(bundle.namespace, bundle.first) == bundle

    def require(self, bundle: Bundle) -> None:
        """Raises InvalidArgument unless the namespace has it."""
        if not self.has(bundle):
            raise InvalidArgument(
                f"namespace {bundle.namespace} has no bundle {bundle.range}: ListBundles names those it has"
            )

    def split(self, bundle: Bundle, at: int) -> Bounds:
        """With `bundle` divided: its second part begins with the hash `at`. Raises InvalidArgument."""
        self.require(bundle)  # it may have been divided meanwhile, perhaps at this very hash
        if not bundle.first < at <= bundle.last:
            raise InvalidArgument(f"bundle {bundle} cannot be divided at 0x{at:08x}")
        if len(self.firsts) >= MAX_BUNDLES:
            raise InvalidArgument(
                f"namespace {bundle.namespace} has {MAX_BUNDLES} bundles, and no more are possible"
            )
        place = bisect_right(self.firsts, bundle.first)
        return Bounds((*self.firsts[:place], at, *self.firsts[place:]))


def middle(bundle: Bundle, hashes: Iterable[int]) -> int:
    """Where to divide a bundle: half of the loaded topics' hashes on each side if there are two, else the middle.

    Raises InvalidArgument for a bundle of one hash.
    """
    found = sorted({hash for hash in hashes if bundle.first <= hash <= bundle.last})
    if len(found) > 1:
        return found[len(found) // 2]
    if bundle.first == bundle.last:
        raise InvalidArgument(f"bundle {bundle} holds one hash and cannot be divided")
    return (bundle.first + bundle.last) // 2 + 1
