"""Which ensembles break the placement policy, and which replacements mend that with as few copies as possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from magnetar.ledger.core.events import BookiesChosen, ChooseBookies
from magnetar.ledger.core.metadata import LedgerMetadata
from magnetar.ledger.core.quorum import Striping
from magnetar.ledger.placement.chooser import BookieChooser

from .core.fragments import fragments_of

# Bookies that are replaced in one ensemble at most; more would be nearly a new one, for which a new ledger is cheaper.
_MOST_MOVES = 2


def compliant_replacements(
    chooser: BookieChooser, striping: Striping, ensemble: Sequence[str], exclude: Sequence[str]
) -> dict[int, str]:
    """New bookies by position, after which the ensemble complies; none if it does, or if no few of them make it so."""
    if chooser.complies(striping, ensemble):
        return {}
    for moves in range(1, _MOST_MOVES + 1):
        for positions in itertools.combinations(range(len(ensemble)), moves):
            chosen = chooser.replacements(ChooseBookies(positions, tuple(exclude)), striping)
            if isinstance(chosen, BookiesChosen):
                changed = [chosen.bookies.get(place, bookie) for place, bookie in enumerate(ensemble)]
                if chooser.complies(striping, changed):
                    return dict(chosen.bookies)
    return {}


def violates_placement(chooser: BookieChooser, metadata: LedgerMetadata) -> bool:
    """Whether a fragment that no writer writes to breaks placement although a choice that complies exists."""
    striping, chooser = metadata.striping, chooser.of(metadata.properties)
    return any(
        fragment.last is not None
        and not fragment.empty
        and bool(compliant_replacements(chooser, striping, fragment.bookies, fragment.bookies))
        for fragment in fragments_of(metadata)
    )
