"""Planted defects of placement and balance: mistakes that a test must notice. PLANTS has them by name.

Each is a patch of the real code by way of pytest's MonkeyPatch, which the test undoes.
"""

from typing import Any

import pytest

from magnetar.broker.ownership.balance.core import balancer, facts, survey
from magnetar.broker.ownership.balance.core.balancer import Splitting
from magnetar.broker.ownership.balance.core.moves import Moves, Rests, UnseenMoves
from magnetar.broker.ownership.balance.core.placement import BundlePlacement
from magnetar.broker.ownership.balance.core.survey import ClusterSurvey, ReadyBroker, ReadyBrokers
from magnetar.broker.ownership.balance.leader import BalanceLeader

streaks: Any = balancer._Streaks
moves: Any = Moves
surveys: Any = ClusterSurvey
splitting: Any = Splitting
unseen: Any = UnseenMoves
choosing: Any = BundlePlacement
leader: Any = BalanceLeader


def plant_no_hysteresis(patch: pytest.MonkeyPatch) -> None:
    """A broker is judged by the round of the moment."""
    patch.setattr(streaks, "count", lambda self, names: dict.fromkeys(names))


def plant_no_cooldown(patch: pytest.MonkeyPatch) -> None:
    """A bundle that was just moved is moved again."""
    patch.setattr(Rests, "resting", lambda self, bundle, now: False)


def plant_load_counted_twice(patch: pytest.MonkeyPatch) -> None:
    """What was moved counts on top of the reports that show it."""
    patch.setattr(unseen, "_over", lambda self, one, survey, now: False)


def plant_moves_not_counted(patch: pytest.MonkeyPatch) -> None:
    """The reports alone count, also those from before the moves."""
    patch.setattr(unseen, "apply", lambda self, survey, now: None)


def plant_former_owner_believed(patch: pytest.MonkeyPatch) -> None:
    """A bundle's load is what its former owner says."""
    read = surveys._read_report

    def credulous(self: Any, broker: str, rows: Any) -> Any:
        total = read(self, broker, rows)
        self.load_of.update((row.bundle, row) for row in rows if row.bundle in self.owner_of)
        return total

    patch.setattr(surveys, "_read_report", credulous)


def plant_dead_broker_chosen(patch: pytest.MonkeyPatch) -> None:
    """Brokers that are not registered any more stay destinations."""
    update = choosing.update

    def nostalgic(self: Any, brokers: Any, now: float) -> None:
        known = {one.facts.name: one.facts for one in self._ready.by_name.values()}
        known.update((one.name, one) for one in brokers)
        update(self, list(known.values()), now)

    patch.setattr(choosing, "update", nostalgic)


def plant_draining_chosen(patch: pytest.MonkeyPatch) -> None:
    """A broker that hands over all it has gets bundles."""
    made = ReadyBrokers.__init__

    def careless(self: Any, brokers: Any, settings: Any) -> None:
        made(self, [one._replace(state=facts.READY) for one in brokers], settings)

    patch.setattr(ReadyBrokers, "__init__", careless)


def plant_herd(patch: pytest.MonkeyPatch) -> None:
    """Everybody chooses the least loaded broker of all."""

    def greedy(self: Any, tier: Any, overload: Any) -> Any:
        fitting = [one for one in tier if self._fits(one, overload)]
        return min(fitting, key=lambda one: one.facts.cpu, default=None)

    patch.setattr(choosing, "_draw", greedy)


def plant_placed_not_counted(patch: pytest.MonkeyPatch) -> None:
    """A process forgets what it has placed since the reports."""
    patch.setattr(ReadyBroker, "comes", lambda self, share, topics: None)


def plant_zone_ignored(patch: pytest.MonkeyPatch) -> None:
    """All brokers are alike."""
    patch.setattr(survey, "tier_of", lambda broker, binding, dedicated_groups: 0)


def plant_split_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A bundle above a limit is split whatever that helps."""
    patch.setattr(splitting, "may_split", lambda self, load, bundles_of_namespace, now: True)


def plant_stale_leader_acts(patch: pytest.MonkeyPatch) -> None:
    """A leader goes on after its session."""
    hold = leader._round

    class Immortal:
        """A session that is never lost."""

        lost = False

    patch.setattr(leader, "_round", lambda self, session: hold(self, Immortal()))


def plant_moves_above_the_limit(patch: pytest.MonkeyPatch) -> None:
    """Neither the round nor a broker has a bound."""
    patch.setattr(moves, "_may_move", lambda self, broker: True)


def plant_destination_judged_too_early(patch: pytest.MonkeyPatch) -> None:
    """A broker that just gave a bundle away looks idle."""
    leaves = ReadyBroker.leaves

    def hasty(self: Any, share: float, topics: int) -> None:
        leaves(self, share, topics)
        self.cpu = max(self.cpu - share, 0.0)

    patch.setattr(ReadyBroker, "leaves", hasty)


def plant_needless_splits(patch: pytest.MonkeyPatch) -> None:
    """A bundle that may not leave its broker is split because it does not."""

    def largest(self: Any, source: Any, mean: float) -> Any:
        found = max(self._cheapest_of(source), key=lambda one: one[1], default=None)
        return None if found is None else found[0]

    patch.setattr(moves, "too_large", largest)


PLANTS = {
    name.removeprefix("plant_"): plant for name, plant in list(globals().items()) if name.startswith("plant_")
}
