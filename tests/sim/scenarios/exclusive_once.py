"""The topics of `exclusive` with deduplication: producers of one name, each of which goes on behind the ids of the last."""

from __future__ import annotations

from unittest.mock import patch

from magnetar.proto.ids import MessageId
from sim.cluster import brokers
from sim.deliveries import Violation
from sim.exclusive import ExclusiveHistory
from sim.history import name_of
from sim.once import deduplicated
from sim.scenarios import exclusive
from support.sim import Trace

EXPECTED_FAULTS = exclusive.EXPECTED_FAULTS


class ExclusiveOnceHistory(ExclusiveHistory):
    """Nothing is stored twice, and nothing is taken for a duplicate of what another producer has sent."""

    def check_reread(self, entries: list[tuple[MessageId, bytes]]) -> None:
        """See History."""
        names = [name_of(value) for _, value in entries]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise Violation(f"stored twice: {twice[:5]}")
        places = dict(zip(names, (message_id for message_id, _ in entries), strict=True))
        for name, message_id in self.confirmed.items():
            if message_id.is_duplicate and name in places:
                self.confirmed[name] = places[name]
            elif message_id.is_duplicate and not self.trimming:
                raise Violation(f"acknowledged as a duplicate, and not stored: {name}")
        super().check_reread(entries)


def play(seed: int, trace: Trace) -> dict[str, int]:
    """See sim.runner."""
    with (
        patch.object(brokers, "BROKER", deduplicated(brokers.BROKER)),
        patch.object(exclusive, "ExclusiveHistory", ExclusiveOnceHistory),
    ):
        return exclusive.play(seed, trace)
