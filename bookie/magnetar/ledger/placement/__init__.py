"""Where new ledgers and replacements go.

`policy` is the seam; `random_placement` and `spread` (racks, zones) implement it, `weighting` draws the order in which
bookies are preferred. `chooser` asks a policy on behalf of the ledger client: it knows quarantine and degrading. What is
decided without chance is in `ledger.core`: `ring`, `degrade`, `quarantine`.
"""

from magnetar.ledger.directory import Labels
from magnetar.ledger.settings import LedgerSettings

from .policy import Candidates, Placement
from .random_placement import RandomPlacement
from .spread import SpreadPlacement
from .weighting import Weighting

__all__ = [
    "Candidates",
    "Labels",
    "Placement",
    "RandomPlacement",
    "SpreadPlacement",
    "Weighting",
    "placement_of",
]


def placement_of(settings: LedgerSettings) -> Placement:
    """The policy that the settings name."""
    weighting = Weighting(settings.placement_weighted, settings.placement_max_weight_ratio)
    if settings.placement == "random":
        return RandomPlacement(weighting)
    return SpreadPlacement.of(settings, weighting)
