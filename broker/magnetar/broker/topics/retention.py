"""Who needs a topic's ledgers, and from which position on: trimming, archiving and a topic's figures go by it (rule 25).

A durable subscription needs what it has not acknowledged, a connected reader what it has not been sent: after a restart a
subscription that comes back sooner must not take the tail away from a reader that comes back later. A lease needs all from
its ledger on. Where a subscription stands whose cursor cannot be read is not known, nor which leases a former owner gave:
until they are, all is needed. Retention by time and size, when it comes, is another holder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from magnetar.proto.errors import MagnetarError

from ..dispatch.subscription import Subscription
from ..export.leases import Leases
from ..log.ledger_list import LedgerList

_ALL = (0, 0, 0)


class Holder(NamedTuple):
    """Somebody who needs the topic from `position` on; `reason` is for people."""

    position: tuple[int, int, int]
    reason: str


class Retention:
    """Of one topic. Subscriptions, those that are `unavailable`, and leases are the topic's own, which come and go."""

    def __init__(
        self,
        ledgers: LedgerList,
        subscriptions: Mapping[str, Subscription],
        unavailable: Mapping[str, MagnetarError],
        leases: Leases,
        *,
        compacts: bool = False,
    ) -> None:
        """`compacts`: by itself, also what was never compacted before."""
        self._compacts = compacts
        self._ledgers = ledgers
        self._subscriptions = subscriptions
        self._unavailable = unavailable
        self._leases = leases

    def lowest(self, besides: str = "", leases_only: bool = False) -> Holder:
        """Who needs most, not counting the lease `besides`; if nobody needs anything, the end of the topic and "".

        `leases_only`: who needs it at the bookies, where the archive can be read through the broker.
        """
        return min(self._of_leases(besides) if leases_only else self._holders(besides))

    def trimmed_until(self) -> Holder:
        """Who needs most, where trimming is concerned: what nobody subscribed to is not trimmed."""
        if any(one.durable for one in self._subscriptions.values()):
            return self.lowest()
        return Holder(_ALL, "no durable subscription says what is not needed any more")

    def _holders(self, besides: str) -> Iterator[Holder]:
        normalise = self._ledgers.normalise
        for name in self._unavailable:
            yield Holder(_ALL, f"where subscription {name!r} stands cannot be read")
        for name, one in self._subscriptions.items():
            if one.durable:
                position, reason = (
                    one.cursor.durable_mark,
                    f"subscription {name!r} has not acknowledged all of it",
                )
            else:
                position, reason = one.dispatcher.read_position, f"{name!r} is reading it"
            yield Holder(normalise(position), reason)
        compacted = self._ledgers.record.compaction
        if compacted is not None or self._compacts:
            first = _ALL if compacted is None else normalise(compacted.horizon)
            yield Holder(first, "the next compaction goes through it")
        yield from self._of_leases(besides)

    def _of_leases(self, besides: str) -> Iterator[Holder]:
        leases = self._leases
        yield Holder(self._ledgers.end, "")
        if not leases.all_known:
            seconds = leases.all_known_in_s
            yield Holder(
                _ALL, f"the topic was taken over, and whose leases it has is known in {seconds:.0f} s"
            )
        held = leases.lowest(besides)
        if held is not None:
            yield Holder(
                (max(held.first, 0), 0, 0),
                f"a lease keeps it, for {leases.left_s(held):.0f} s unless it is renewed: "
                "a query of Spark may be reading it",
            )
