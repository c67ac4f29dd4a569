"""Moves that were decided and that the brokers' reports do not show yet.

    decided ──the owner is the destination──> done ──load_settle_s──> seen: the reports alone count
       └──the request is gone, the owner the same, load_settle_s over──> impossible: forgotten

Until then the bundle counts at neither broker when that is judged as a source, and at both when they are destinations.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import BalanceSettings
from .facts import Move
from .survey import ClusterSurvey


@dataclass(slots=True)
class _Unseen:
    move: Move
    topics: int
    decided_at: float
    done_at: float | None = None


class UnseenMoves:
    """By bundle; as many as moves within a few minutes."""

    def __init__(self, settings: BalanceSettings) -> None:
        self._settings = settings
        self._moves: dict[str, _Unseen] = {}

    def __len__(self) -> int:
        return len(self._moves)

    def add(self, move: Move, topics: int, now: float) -> None:
        """Was decided now."""
        self._moves[move.bundle] = _Unseen(move, topics, now)

    def apply(self, survey: ClusterSurvey, now: float) -> None:
        """Forgets what is seen or impossible, and changes the survey's brokers by the others."""
        by_name = survey.ready.by_name
        for bundle, unseen in list(self._moves.items()):
            if self._over(unseen, survey, now):
                del self._moves[bundle]
                continue
            move = unseen.move
            if (source := by_name.get(move.source)) is not None:
                source.leaves(move.share, unseen.topics)
            if (to := by_name.get(move.to)) is not None:
                to.comes(move.share, unseen.topics)

    def _over(self, unseen: _Unseen, survey: ClusterSurvey, now: float) -> bool:
        move, settle_s = unseen.move, self._settings.load_settle_s
        owner = survey.owner_of.get(move.bundle)
        if owner == move.to and unseen.done_at is None:
            unseen.done_at = now
        if unseen.done_at is not None:
            return owner != move.to or now - unseen.done_at >= settle_s
        if owner not in (None, move.source):
            return True  # somebody else took it
        waiting = move.bundle in survey.requested
        return not waiting and now - unseen.decided_at >= settle_s

    def check(self) -> None:
        """Asserts the invariants; tests call it after every round."""
        for bundle, unseen in self._moves.items():
            assert unseen.move.bundle == bundle
            assert unseen.done_at is None or unseen.done_at >= unseen.decided_at
