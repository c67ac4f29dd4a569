"""Arranges bookies at the positions of an ensemble, so that every write set spans enough labels (racks, zones).

The ensemble is a ring; a write set is a run of Qw neighbours in it. A label names a rack or a zone; "" is not known, and
counts for none. With two racks, E = 4 and Qw = 2 the order a1 a2 b1 b2 has the write set {a1, a2}; a1 b1 a2 b2 has none
like it:

>>> order = [("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")]
>>> arrange(Striping(4, 2, 2), order, 2)
('a1', 'b1', 'a2', 'b2')

With E = 3 there is no such order of two racks: some two neighbours are of one rack.

>>> arrange(Striping(3, 2, 2), order, 2) is None
True
>>> spread_out(Striping(3, 2, 2), order)
('a1', 'b1', 'a2')

The search is exhaustive for ensembles of the usual size, and bounded for all (`MAX_STEPS`): it runs in the event loop. Where
every neighbour must differ (`spread` is Qw) large ones are laid out by rule, so that what can be is found at any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from .quorum import Striping

# Bookies with their labels, in the order in which they are preferred.
Order = Sequence[tuple[str, str]]

# Labels tried at a position, over the whole search, by each of its two ways. A step takes 5 to 10 us, what usually comes up
# (E <= 7) 0.2 ms in all, the worst of 1,300 random rings (E <= 24) 40 ms.
MAX_STEPS = 2000


def arrange(
    striping: Striping, order: Order, spread: int, fixed: Mapping[int, tuple[str, str]] | None = None
) -> tuple[str, ...] | None:
    """A bookie for each position, the first of `order` where possible; None if there is no such arrangement.

    Each write set spans `spread` labels (at most Qw). `fixed` holds the positions that stay as they are; write sets that
    consist of fixed positions only are not checked. `order` has the bookies for the other positions.
    """
    fixed = fixed or {}
    if spread <= 1:
        return spread_in_order(striping, order, fixed)
    if not fixed and not can_span(striping, order, spread):
        return None
    for tight in (False, True):
        search = _Search(striping, order, fixed, spread, tight)
        if search.fill(0):
            return search.bookies()
        if search.steps <= MAX_STEPS:
            return None  # every arrangement was tried
        if not fixed and (laid_out := _in_columns(striping.ensemble_size, order, spread)):
            return laid_out
    return None


def spread_in_order(
    striping: Striping, order: Order, fixed: Mapping[int, tuple[str, str]] | None = None
) -> tuple[str, ...]:
    """The first bookies of `order` at the positions that are not fixed."""
    fixed = fixed or {}
    names = iter(order)
    return tuple(
        fixed[position][0] if position in fixed else next(names)[0]
        for position in range(striping.ensemble_size)
    )


def spread_out(
    striping: Striping, order: Order, fixed: Mapping[int, tuple[str, str]] | None = None
) -> tuple[str, ...]:
    """A greedy choice of as many labels in each write set as possible, for when `arrange` finds no solution."""
    search = _Search(striping, order, fixed or {}, 0, True)
    found = search.fill(0)
    assert found, "with nothing asked the first choice fits"
    return search.bookies()


def can_span(striping: Striping, order: Order, spread: int) -> bool:
    """Whether the counts allow it: a necessary condition, and a sufficient one when `spread` is Qw.

    A label that occurs c times is seen by at most min(E, c * Qw) of the E write sets, each of which needs `spread`.
    """
    size, quorum = striping.ensemble_size, striping.write_quorum
    whole, rest = divmod(size, quorum)
    counts: dict[str, int] = {}
    for _, label in order:
        if label:
            counts[label] = counts.get(label, 0) + 1
    # Places that are seen by Qw write sets of their own.
    full = sum(min(count, whole) for count in counts.values())
    if full >= size:
        return True
    partly = min(size - full, sum(1 for count in counts.values() if count > whole))  # by `rest` of them
    return full * quorum + partly * rest >= spread * size


def _in_columns(size: int, order: Order, spread: int) -> tuple[str, ...] | None:
    """An order in which any `spread` neighbours have different labels; None if some label would have to occur too often.

    The ring is cut into as many blocks of `spread` positions or more as fit, and filled across them: the first position of
    each block, the second of each... A label that occurs no more often than there are blocks, the frequent ones first, then
    meets itself only a whole block further on.
    """
    blocks = size // spread
    taken: dict[str, list[str]] = {}
    left = size
    for bookie, label in order:
        names = taken.setdefault(label, [])
        if label and left and len(names) < blocks:
            names.append(bookie)
            left -= 1
    if left:
        return None
    longest, longer = -(-size // blocks), size % blocks  # the longer blocks come first
    starts = [size // blocks * block + min(block, longer) for block in range(blocks + 1)]
    places = [
        start + offset
        for offset in range(longest)
        for start, end in itertools.pairwise(starts)
        if start + offset < end
    ]
    ring = [""] * size
    frequent_first = sorted(taken.values(), key=len, reverse=True)
    for place, bookie in zip(places, itertools.chain.from_iterable(frequent_first)):
        ring[place] = bookie
    return tuple(ring)


class _Search:
    """Depth first over the open positions; bookies of one label are alike, so only the first that is left is tried."""

    def __init__(
        self,
        striping: Striping,
        order: Order,
        fixed: Mapping[int, tuple[str, str]],
        spread: int,
        tight: bool,
    ) -> None:
        size = striping.ensemble_size
        self.steps = 0
        self._spread = spread
        # Try labels that the neighbourhood lacks first, those with most bookies left before others; else as `order` has it.
        self._tight = tight
        self._open = [position for position in range(size) if position not in fixed]
        self._names: list[str] = [fixed[position][0] if position in fixed else "" for position in range(size)]
        # None: not filled yet.
        self._labels: list[str | None] = [
            fixed[position][1] if position in fixed else None for position in range(size)
        ]
        self._left: dict[str, list[tuple[int, str]]] = {}  # label -> (rank, bookie), the next one last
        for rank, (bookie, label) in reversed(list(enumerate(order))):
            self._left.setdefault(label, []).append((rank, bookie))
        sets = dict.fromkeys(tuple(sorted(write_set)) for write_set in striping.write_sets)
        self._around: list[list[tuple[int, ...]]] = [
            [write_set for write_set in sets if position in write_set] for position in range(size)
        ]

    def bookies(self) -> tuple[str, ...]:
        """By position, after `fill` was True."""
        return tuple(self._names)

    def fill(self, index: int) -> bool:
        """Fills the open positions from the index-th on; False if that cannot be, or takes too long."""
        if index == len(self._open):
            return True
        position = self._open[index]
        for label in self._choices(position):
            self.steps += 1
            if self.steps > MAX_STEPS:
                return False
            taken = self._left[label].pop()
            self._labels[position], self._names[position] = label, taken[1]
            if self._fits(position) and self.fill(index + 1):
                return True
            self._left[label].append(taken)
            self._labels[position] = None
        return False

    def _choices(self, position: int) -> list[str]:
        labels = [label for label, left in self._left.items() if left]
        if not self._tight:
            return sorted(labels, key=lambda label: self._left[label][-1][0])
        near: dict[str, int] = {}
        for write_set in self._around[position]:
            for other in write_set:
                label = self._labels[other]
                if label:
                    near[label] = near.get(label, 0) + 1
        return sorted(
            labels,
            key=lambda label: (
                not label,
                near.get(label, 0),
                -len(self._left[label]),
                self._left[label][-1][0],
            ),
        )

    def _fits(self, position: int) -> bool:
        """Whether every write set around it can still span enough."""
        for write_set in self._around[position]:
            labels = [self._labels[other] for other in write_set]
            unfilled = labels.count(None)
            if unfilled + len(dict.fromkeys(label for label in labels if label)) < self._spread:
                return False
        return True
