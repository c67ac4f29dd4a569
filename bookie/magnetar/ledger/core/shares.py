"""Which bookies are asked for which entries of a range of a striped ledger: few bookies, each for its whole share at once.

>>> from .quorum import Striping
>>> shares(Striping(3, 2, 2), 0b111, 0, (0, 0, 0), 0)  # residues 0 and 1 at position 1, residue 2 at position 0
[(1, 3), (0, 4)]
>>> shares(Striping(3, 2, 2), 0b111, 0, (0, 0, 0), 0b010)  # position 1 is suspected
[(0, 1), (2, 6)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from magnetar.proto.stripe import Stripe

from .quorum import Striping


def shares(
    striping: Striping, wanted: int, begin: int, excluded: Sequence[int], suspected: int, far: int = 0
) -> list[tuple[int, int]]:
    """(position, residues) that together have the residues `wanted`, each from one position of its write set.

    `begin`: the residue that is assigned first, so that different ledgers ask different bookies first. `excluded`: by
    residue, the positions that cannot give it; a residue for which none is left is in no share. `suspected` positions come
    last, those that are `far` before them. All residues and positions are bits, but for those returned as position and
    `begin`.
    """
    found: dict[int, int] = {}
    current = -1  # the position that got the last residue
    size = striping.ensemble_size
    for step in range(size):
        residue = (begin + step) % size
        usable = striping.masks[residue] & ~excluded[residue]
        if not wanted >> residue & 1 or not usable:
            continue
        usable = usable & ~suspected & ~far or usable & ~suspected or usable
        if current < 0 or not usable >> current & 1:
            # One that has a share already; else the one that has the most of the residues that follow.
            order = striping.write_sets[residue]
            known = [position for position in order if position in found and usable >> position & 1]
            current = known[0] if known else next(p for p in reversed(order) if usable >> p & 1)
        found[current] = found.get(current, 0) | 1 << residue
    return list(found.items())


def preferences(striping: Striping, begin: int, distrusted: int) -> tuple[tuple[int, ...], ...]:
    """Positions that a recovery asks first; `begin` and `distrusted` as for `shares`.

    Striped: by entry id % E, few positions with as much as they have. Else any has all: those that are asked in turn. For
    entries of which no position is trusted: all that have it.
    """
    size = striping.ensemble_size
    if size == striping.write_quorum:
        trusted = tuple((position,) for position in range(size) if not distrusted >> position & 1)
        return trusted or striping.write_sets[:1]
    rows = list(striping.write_sets)
    for position, residues in shares(striping, (1 << size) - 1, begin, [distrusted] * size, 0):
        for residue in range(size):
            if residues >> residue & 1:
                rows[residue] = (position,)
    return tuple(rows)


def stripes_of(ids: Sequence[int], cycle: int) -> Iterator[tuple[int, int, Stripe]]:
    """First entry, last entry, and stripe of the runs that have exactly these ascending entries: one if they make a stripe.

    Else there are one or more runs for each residue by `cycle`, which is E, or 1 where each bookie has every entry.

    >>> runs = [list(stripes_of(ids, 3)) for ids in ([6, 7, 9, 10, 12], [6, 7, 10, 15, 18])]
    >>> [[(first, last, stripe.residues) for first, last, stripe in found] for found in runs]
    [[(6, 12, 3)], [(6, 6, 1), (15, 18, 1), (7, 10, 2)]]
    """
    residues = 0
    for entry_id in ids:
        residues |= 1 << entry_id % cycle
    stripe = Stripe(cycle, residues)
    if list(stripe.ids(ids[0], ids[-1], len(ids) + 1)) == list(ids):
        yield ids[0], ids[-1], stripe
        return
    for residue in range(cycle):
        mine = [entry_id for entry_id in ids if entry_id % cycle == residue]
        begin = 0
        for place, entry_id in enumerate(mine):
            if place + 1 == len(mine) or mine[place + 1] != entry_id + cycle:
                yield mine[begin], entry_id, Stripe(cycle, 1 << residue)
                begin = place + 1
