"""Who needs a topic's ledgers, and from which position on: trimming, archiving and a topic's figures go by it (rule 25).

A durable subscription needs what it has not acknowledged, a connected reader what it has not been sent: after a restart a
subscription that comes back sooner must not take the tail away from a reader that comes back later. A lease needs all from
its ledger on. Where a subscription stands whose cursor cannot be read is not known, nor which leases a former owner gave:
until they are, all is needed. A subscription that is being made needs what it is to begin with.

What nobody needs any more is trimmed, but for what the retention policy keeps. A closed ledger is kept until its last
message is older than `retention_ms`, or until the ledgers behind it have `retention_bytes`: one of the two limits lets it
go, and UNLIMITED is never reached. For example, with retention_bytes of 2 GB:

    ledgers       | 1 GB | 1 GB | 1 GB | 1 GB | 0.2 GB, open |
    acknowledged  -------------------->|
    trimmed       |<---->|<---->|             the third one stays: there are only 1.2 GB behind it

Without a retention policy (both limits 0) a topic keeps nothing that its durable subscriptions have acknowledged, and all
that it has as long as it has no durable subscription: readers and Spark read topics that nobody ever subscribes to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from magnetar.proto.policy_table import UNLIMITED
from magnetar.runtime.clock import Clock

from ..cursors.core.acks import Position
from ..export.leases import Leases
from ..log.ledger_list import LedgerList, first_appended_at
from .log_state import LogStates
from .policies import Resolved
from .subscriptions import Subscriptions

_ALL = (0, 0, 0)


class Holder(NamedTuple):
    """Somebody who needs the topic from `position` on; `reason` is for people."""

    position: tuple[int, int, int]
    reason: str


class Retention:
    """Of one topic. Subscriptions and leases are the topic's own, which come and go."""

    def __init__(
        self,
        ledgers: LedgerList,
        subscriptions: Subscriptions,
        states: LogStates,
        leases: Leases,
        policies: Callable[[], Resolved | None],
        clock: Clock,
    ) -> None:
        """`policies` None: not known now."""
        self._ledgers = ledgers
        self._subscriptions = subscriptions
        self._states = states
        self._leases = leases
        self._policies = policies
        self._clock = clock

    def lowest(self, besides: str = "", leases_only: bool = False) -> Holder:
        """Who needs most, not counting the lease `besides`; if nobody needs anything, the end of the topic and "".

        `leases_only`: who needs it at the bookies, where the archive can be read through the broker.
        """
        return min(self._of_leases(besides) if leases_only else self._holders(besides))

    def trimmed_until(self) -> Holder:
        """Who needs most, where trimming is concerned: also the retention policy, and what nobody subscribed to."""
        if not self._ledgers.name.persistent:
            return Holder(
                self._ledgers.start, "the topic is non-persistent: its newest messages are in memory"
            )
        policies = self._policies()
        if policies is None:
            return Holder(_ALL, "the policies of its namespace are not known now")
        limited = policies.retention[:2] != (0, 0)
        if not limited and not any(one.durable for one in self._subscriptions.values()):
            return Holder(_ALL, "no durable subscription says what is not needed any more")
        lowest = self.lowest()
        return min(lowest, self._retained(policies)) if limited else lowest

    @property
    def waits_for_time(self) -> bool:
        """True if there are ledgers that will be deleted when they are older."""
        policies = self._policies() if self._ledgers.name.persistent else None
        if policies is None or not self._ledgers.ledgers or policies.retention[0] in (0, UNLIMITED):
            return False
        return self._retained(policies).position <= self.lowest().position

    def _retained(self, policies: Resolved) -> Holder:
        """What a retention policy keeps."""
        retention_ms, retention_bytes, source = policies.retention
        kept = max(self._younger_than(retention_ms), self._last_bytes(retention_bytes))
        return Holder(kept, f"retention keeps it, a policy of the {source}")

    def _younger_than(self, retention_ms: int) -> Position:
        """From which position on ledgers are not older."""
        if retention_ms == UNLIMITED:
            return _ALL
        ledgers, before_ms = self._ledgers.ledgers, self._clock.now_ms() - retention_ms
        at = first_appended_at(ledgers, before_ms)
        return (ledgers[at].ledger_id, 0, 0) if at < len(ledgers) else self._ledgers.end

    def _last_bytes(self, retention_bytes: int) -> Position:
        """From which position on the topic has so many bytes, in whole ledgers."""
        if retention_bytes == UNLIMITED:
            return _ALL
        ledgers, size = self._ledgers.ledgers, 0
        at = len(ledgers)
        while at and size < retention_bytes:
            at -= 1
            size += ledgers[at].size
        return (ledgers[at].ledger_id, 0, 0) if at < len(ledgers) else self._ledgers.end

    def _holders(self, besides: str) -> Iterator[Holder]:
        normalise = self._ledgers.normalise
        for name in self._subscriptions.recovery.unavailable:
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
        for position in self._subscriptions.beginnings:
            yield Holder(normalise(position), "a subscription to it is being made")
        for position, reason in self._states.holders():
            yield Holder(normalise(position), reason)
        compacted, policies = self._ledgers.record.compaction, self._policies()
        # It compacts by itself, also what was never compacted before.
        compacts = policies is not None and policies.value("compaction_threshold_bytes")[0] > 0
        if compacted is not None or compacts:
            first = _ALL if compacted is None else normalise(compacted.horizon)
            yield Holder(first, "the next compaction goes through it")
        yield from self._of_leases(besides)

    def _of_leases(self, besides: str) -> Iterator[Holder]:
        leases = self._leases
        yield Holder(self._ledgers.end, "")
        if seconds := leases.all_known_in_s:
            yield Holder(
                _ALL,
                f"the topic came from another broker, and who holds leases on it is known in {seconds:.0f} s",
            )
        held = leases.lowest(besides)
        if held is not None:
            yield Holder(
                (max(held.first, 0), 0, 0),
                f"a lease keeps it, for {leases.left_s(held):.0f} s unless it is renewed: "
                "a query of Spark may be reading it",
            )
